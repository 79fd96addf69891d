"""k-NN, linear classification and logistic regression on global features."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.errors import ProbeError
from veca.probe import knn as knn_probe
from veca.probe import linear as linear_probe
from veca.probe import live, verify
from veca.probe import logreg as logreg_probe
from veca.probe.augment import random_square
from veca.probe.backbone import Features
from veca.probe.data import hold_out, test_labels, train_labels
from veca.probe.extract import GLOBAL, Want
from veca.probe.intervals import mean_sums
from veca.probe.linear import Chosen, LinearGrid, Scaling
from veca.probe.metrics import accuracy, hits
from veca.probe.protocol import CropView, Knn, Linear, Logreg
from veca.probe.tasks.job import Job, Outcome
from veca.probe.views import SquareView

Fitted = tuple[LinearGrid, int, Chosen]
"""The classifiers of a grid, which of them to use, and how it was chosen."""


def _wants(job: Job, view: CropView) -> list[Want]:
    cell = job.protocol.extract.cell
    views = {size: SquareView(dataclasses.replace(view, size=size), cell) for size in job.sizes}
    return [Want(backbone, views[size], GLOBAL) for backbone, size in job.rows]


def knn(job: Job, settings: Knn) -> list[Outcome]:
    data = job.data
    labels, right = train_labels(data), test_labels(data)
    ks = [k for k in settings.k if k <= len(labels)]
    if settings.report_k not in ks:
        raise ProbeError(
            f"k = {settings.report_k} neighbours of {len(labels)} training images do not exist."
        )
    if len(ks) < len(settings.k):
        left_out = ", ".join(str(k) for k in settings.k if k not in ks)
        job.note(f"k = {left_out} left out: only {len(labels)} training images")
    wants = _wants(job, settings.view)
    train = job.extract(data.train, data.train_indices, wants)
    test = job.extract(data.test, data.test_indices, wants)
    outcomes = []
    for i, (backbone, size) in enumerate(job.rows):
        job.progress("k-NN", i, len(wants))
        bank, queries = (x[i].matrix(settings.features).to(job.device) for x in (train, test))
        found = knn_probe.predict(
            bank,
            labels,
            queries,
            ks,
            num_classes=data.train.num_classes,
            temperature=settings.temperature,
            center=settings.center,
        )
        scores = {k: accuracy(found[k], right, data.test.num_classes) for k in ks}
        metrics = {**scores[settings.report_k], **{f"top1_k{k}": scores[k]["top1"] for k in ks}}
        details: dict[str, Any] = {"features": settings.features, "k": settings.report_k}
        if job.verify:
            details["verified"] = verify.knn(bank, labels, queries, found, right, settings)
        sums = mean_sums(hits(found[settings.report_k], right))
        outcomes.append(Outcome(backbone, size, (size, size), metrics, sums, details))
    job.progress("k-NN", len(wants), len(wants))
    return outcomes


def linear(job: Job, settings: Linear) -> list[Outcome]:
    data, seed = job.data, job.protocol.seed
    labels, right = train_labels(data), test_labels(data)
    held = hold_out(data, labels, settings.validation, seed)
    wants = _wants(job, settings.view)
    trained, train = [], []
    if settings.augment.enabled:
        if job.verify:
            job.note("not verified: random crops leave no features to train another classifier on")
        trained = _linear_live(job, settings, wants, labels, held)
    else:
        train = job.extract(data.train, data.train_indices, wants)
    test = job.extract(data.test, data.test_indices, wants)
    outcomes = []
    for i, (backbone, size) in enumerate(job.rows):
        job.progress("linear", i, len(wants))
        details: dict[str, Any] = {"features": settings.features}
        if train:
            features = train[i].matrix(settings.features).to(job.device)
            fitted = linear_probe.fit(
                features, labels, held, data.train.num_classes, settings, seed=seed
            )
            if job.verify:
                details["verified"] = verify.linear(features, labels, held, fitted, settings, seed)
        else:
            fitted = trained[i]
        grid, which, chosen = fitted
        queries = test[i].matrix(settings.features).to(job.device)
        predicted = grid.predict(queries, which)
        metrics = accuracy(predicted, right, data.test.num_classes)
        details.update(_how("learning_rate", chosen))
        sums = mean_sums(hits(predicted, right))
        outcomes.append(Outcome(backbone, size, (size, size), metrics, sums, details))
    job.progress("linear", len(wants), len(wants))
    return outcomes


def _linear_live(
    job: Job, settings: Linear, wants: Sequence[Want], labels: Tensor, held: Tensor
) -> list[Fitted]:
    """Train on random crops, choose on the held-out images, which are seen as in the test."""
    data = job.data
    everything = torch.arange(len(labels))
    if len(settings.learning_rates) == 1:
        only = Chosen(settings.learning_rates[0], None, {})
        grids = _train_grids(job, settings, wants, labels, everything)
        return [(grid, 0, only) for grid in grids]
    grids = _train_grids(job, settings, wants, labels, everything[~held])
    outside = everything[held]
    stored = job.extract(data.train, [data.train_indices[i] for i in outside.tolist()], wants)
    fitted: list[Fitted] = []
    for grid, features in zip(grids, stored, strict=True):
        matrix = features.matrix(settings.features).to(job.device)
        fitted.append((grid, *linear_probe.select(grid, matrix, labels[outside].to(job.device))))
    if not settings.refit:
        return fitted
    rates = [chosen.value for _, _, chosen in fitted]
    again = _train_grids(job, settings, wants, labels, everything, rates)
    return [(grid, 0, chosen) for grid, (_, _, chosen) in zip(again, fitted, strict=True)]


def _train_grids(
    job: Job,
    settings: Linear,
    wants: Sequence[Want],
    labels: Tensor,
    places: Tensor,
    rates: Sequence[float] | None = None,
) -> list[LinearGrid]:
    """A grid for every want (or one classifier, at the rate given for it), on random crops."""
    data, augment, view = job.data, settings.augment, settings.view

    def read(place: int) -> tuple[Image.Image, int]:
        where = int(places[place])
        return data.train.image(data.train_indices[where]), int(labels[where])

    def make(sample: tuple[Image.Image, int], size: int, random: np.random.Generator) -> live.Drawn:
        pixels = random_square(sample[0], augment, size, view.interpolation, random)
        return live.Drawn(pixels, sample[1])

    def head(row: int, features: Features) -> LinearGrid:
        return LinearGrid(
            live.global_features(features, settings.features).shape[1],
            data.train.num_classes,
            settings,
            seed=job.protocol.seed,
            device=job.device,
            rates=None if rates is None else [rates[row]],
            normalize=Scaling(settings.normalize),
        )

    def step(grid: LinearGrid, features: Features, views: list[live.Drawn]) -> None:
        x = live.global_features(features, settings.features).to(job.device)
        grid.step(x, torch.tensor([view.label for view in views], device=job.device))

    return job.train_live(
        wants,
        read,
        make,
        count=len(places),
        batch=settings.batch,
        iterations=settings.iterations,
        text="linear, random crops",
        head=head,
        step=step,
    )


def logreg(job: Job, settings: Logreg) -> list[Outcome]:
    data = job.data
    labels, right = train_labels(data), test_labels(data)
    held = hold_out(data, labels, settings.validation, job.protocol.seed)
    wants = _wants(job, settings.view)
    train = job.extract(data.train, data.train_indices, wants)
    test = job.extract(data.test, data.test_indices, wants)
    outcomes = []
    tries = len(settings.c_values)
    # It is solved in float64, which Apple's GPUs do not have.
    device = torch.device("cpu") if job.device.type == "mps" else job.device
    for i, (backbone, size) in enumerate(job.rows):
        features = train[i].matrix(settings.features).to(device)

        def tell(done: int, before: int = i * tries) -> None:
            job.progress("logistic regression", before + done, len(wants) * tries)

        fitted = logreg_probe.fit(
            features,
            labels.to(device),
            held.to(device),
            data.train.num_classes,
            settings,
            progress=tell,
        )
        queries = test[i].matrix(settings.features).to(device)
        predicted = fitted.predict(queries)
        metrics = accuracy(predicted, right, data.test.num_classes)
        details: dict[str, Any] = {
            "features": settings.features,
            **_how("C", fitted.chosen),
            "iterations": fitted.solution.iterations,
            "unconverged_C": fitted.unconverged,
        }
        if not fitted.solution.converged:
            job.note(
                f"{backbone.label}: logistic regression with C = {fitted.chosen.value:.3g} stopped "
                f"after {fitted.solution.iterations} iterations, before the tolerance"
            )
        if job.verify:
            details["verified"] = verify.logreg(
                features, labels, held, queries, predicted, right, fitted, settings
            )
        sums = mean_sums(hits(predicted, right))
        outcomes.append(Outcome(backbone, size, (size, size), metrics, sums, details))
    return outcomes


def _how(name: str, chosen: Chosen) -> dict[str, Any]:
    return {
        name: chosen.value,
        "validation_top1": chosen.validation_top1,
        "tried_on_validation": chosen.tried,
    }
