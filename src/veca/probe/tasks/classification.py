"""k-NN, linear classification and logistic regression on global features."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from veca.probe import knn as knn_probe
from veca.probe import linear as linear_probe
from veca.probe import live, verify
from veca.probe import logreg as logreg_probe
from veca.probe.augment import random_square
from veca.probe.data import hold_out, test_labels, train_labels
from veca.probe.errors import ProbeError
from veca.probe.extract import GLOBAL, Want
from veca.probe.metrics import accuracy
from veca.probe.protocol import CropView, Knn, Linear, Logreg
from veca.probe.tasks.job import Job, Outcome
from veca.probe.views import SquareView

def _square_wants(job: Job, view: CropView) -> list[Want]:
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
    wants = _square_wants(job, settings.view)
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
        outcomes.append(Outcome(backbone, size, (size, size), metrics, details))
    job.progress("k-NN", len(wants), len(wants))
    return outcomes


def linear(job: Job, settings: Linear) -> list[Outcome]:
    data, seed = job.data, job.protocol.seed
    labels, right = train_labels(data), test_labels(data)
    held = hold_out(data, labels, settings.validation, seed)
    wants = _square_wants(job, settings.view)
    if settings.augment.enabled:
        fitted = _linear_live(job, settings, wants, labels, held)
        train = None
    else:
        train = job.extract(data.train, data.train_indices, wants)
        fitted = None
    test = job.extract(data.test, data.test_indices, wants)
    outcomes = []
    for i, (backbone, size) in enumerate(job.rows):
        job.progress("linear", i, len(wants))
        details: dict[str, Any] = {"features": settings.features}
        if train is not None:
            features = train[i].matrix(settings.features).to(job.device)
            grid, which, chosen = linear_probe.fit(
                features, labels, held, data.train.num_classes, settings, seed=seed
            )
            if job.verify:
                details["verified"] = verify.linear(
                    features, labels, grid, which, chosen, held, settings, seed
                )
        else:
            grid, which, chosen = (fitted or [])[i]
        queries = test[i].matrix(settings.features).to(job.device)
        metrics = accuracy(grid.predict(queries, which), right, data.test.num_classes)
        details.update(_chosen("learning_rate", chosen))
        outcomes.append(Outcome(backbone, size, (size, size), metrics, details))
    job.progress("linear", len(wants), len(wants))
    return outcomes


Fitted = tuple[linear_probe.LinearGrid, int, linear_probe.Chosen]


def _linear_live(
    job: Job, settings: Linear, wants: Sequence[Want], labels: Tensor, held: Tensor
) -> list[Fitted]:
    """Train on random crops, choose on the held-out images seen as in the test."""
    data, seed = job.data, job.protocol.seed
    single = len(settings.learning_rates) == 1
    kept = torch.nonzero(~held).flatten() if not single else torch.arange(len(labels))
    grids = _train_grids(job, settings, wants, labels, kept, None)
    if single:
        only = linear_probe.Chosen(settings.learning_rates[0], None, {})
        return [(grid, 0, only) for grid in grids]
    outside = torch.nonzero(held).flatten()
    stored = job.extract(data.train, [data.train_indices[i] for i in outside.tolist()], wants)
    fitted: list[Fitted] = []
    for grid, features in zip(grids, stored, strict=True):
        matrix = features.matrix(settings.features).to(job.device)
        which, chosen = linear_probe.select(grid, matrix, labels[outside].to(job.device))
        fitted.append((grid, which, chosen))
    if not settings.refit:
        return fitted
    rates = [chosen.value for _, _, chosen in fitted]
    again = _train_grids(job, settings, wants, labels, torch.arange(len(labels)), rates)
    return [(grid, 0, chosen) for grid, (_, _, chosen) in zip(again, fitted, strict=True)]


def _train_grids(
    job: Job,
    settings: Linear,
    wants: Sequence[Want],
    labels: Tensor,
    places: Tensor,
    rates: Sequence[float] | None,
) -> list[linear_probe.LinearGrid]:
    data, view = job.data, settings.view

    def make(place: int, random: Any) -> list[live.Drawn]:
        where = int(places[place])
        image = data.train.image(data.train_indices[where])
        state = random.bit_generator.state
        views = []
        for size in job.sizes:
            random.bit_generator.state = state  # every size sees the same crop
            pixels = random_square(image, settings.augment, size, view.interpolation, random)
            views.append(live.Drawn(pixels, int(labels[where])))
        return views

    grids: list[linear_probe.LinearGrid | None] = [None] * len(wants)
    for step, batch in job.draw(make, len(places), settings.batch, settings.iterations):
        for i, (want, size) in enumerate(zip(wants, (s for _, s in job.rows), strict=True)):
            views = [one[job.sizes.index(size)] for one in batch]
            found = live.batch_features(
                want, [v.pixels for v in views], job.protocol.extract.cell, job.protocol.extract.batch
            )
            features = live.global_features(found, settings.features).to(job.device)
            grid = grids[i]
            if grid is None:
                grid = grids[i] = linear_probe.LinearGrid(
                    features.shape[1],
                    data.train.num_classes,
                    settings,
                    seed=job.protocol.seed,
                    device=job.device,
                    rates=None if rates is None else [rates[i]],
                    normalize=linear_probe.Scaling(settings.normalize),
                )
            grid.step(features, torch.tensor([v.label for v in views], device=job.device))
        job.progress("linear, random crops", step + 1, settings.iterations)
    return [grid for grid in grids if grid is not None]


def logreg(job: Job, settings: Logreg) -> list[Outcome]:
    data = job.data
    labels, right = train_labels(data), test_labels(data)
    held = hold_out(data, labels, settings.validation, job.protocol.seed)
    wants = _square_wants(job, settings.view)
    train = job.extract(data.train, data.train_indices, wants)
    test = job.extract(data.test, data.test_indices, wants)
    outcomes = []
    total = len(wants) * len(settings.c_values)
    for i, (backbone, size) in enumerate(job.rows):
        features = train[i].matrix(settings.features).to(job.device)
        start = i * len(settings.c_values)

        def tell(done: int, start: int = start) -> None:
            job.progress("logistic regression", start + done, total)

        fitted = logreg_probe.fit(
            features,
            labels.to(job.device),
            held.to(job.device),
            data.train.num_classes,
            settings,
            progress=tell,
        )
        queries = test[i].matrix(settings.features).to(job.device)
        predicted = fitted.predict(queries)
        metrics = accuracy(predicted, right, data.test.num_classes)
        details: dict[str, Any] = {"features": settings.features, **_chosen("C", fitted.chosen)}
        details["iterations"] = fitted.solution.iterations
        details["unconverged"] = fitted.unconverged
        if not fitted.solution.converged:
            job.note(
                f"{backbone.label}: logistic regression with C = {fitted.chosen.value:.3g} stopped "
                f"at {fitted.solution.iterations} iterations, before the tolerance"
            )
        if job.verify:
            details["verified"] = verify.logreg(
                features, labels, held, queries, predicted, right, fitted, settings
            )
        outcomes.append(Outcome(backbone, size, (size, size), metrics, details))
    return outcomes


def _chosen(name: str, chosen: linear_probe.Chosen) -> dict[str, Any]:
    return {
        name: chosen.value,
        "validation_top1": chosen.validation_top1,
        "tried_on_validation": chosen.tried,
    }
