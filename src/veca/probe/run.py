"""One call from backbones and data to a finished table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch

from veca.bench import machine
from veca.errors import ProbeError
from veca.probe.backbone import STUDENT, TEACHER, Backbone, check_unique
from veca.probe.cache import default_folder
from veca.probe.data import DATASET_TASK, ProbeData, open_data
from veca.probe.datasets import find_dataset
from veca.probe.extract import ExtractionSummary, Stored, extract
from veca.probe.intervals import Interval, Resampling
from veca.probe.metrics import PRIMARY, retention
from veca.probe.protocol import Protocol, load_protocol
from veca.probe.record import Row, Run, subject
from veca.probe.tasks import make_task
from veca.probe.tasks.shared import FeatureRequest, Outcome, ProbeSetup, Progress, at_size
from veca.probe.timing import RowCost, costs


def run_probe(
    task: str,
    backbones: Sequence[Backbone],
    *,
    dataset: str,
    data: str | Path,
    protocol: str | Path | Protocol = "quick",
    sizes: Sequence[int] | None = None,
    train_dataset: str | None = None,
    train_data: str | Path | None = None,
    train_split: str = "train",
    test_split: str | None = None,
    options: Mapping[str, Any] | None = None,
    cache: str | Path | None = "default",
    device: torch.device | str | None = None,
    workers: int | None = None,
    measure_time: bool = True,
    verify: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Run:
    """Probe frozen backbones on a dataset; one row for each backbone (budget) and size.

    Args:
        task: "knn", "linear", "logreg", "segmentation" or "depth".
        backbones: see `veca.probe.as_backbone`; at most one has the role "teacher", and retention
            is measured against it.
        dataset, data: name and folder of the data; see `veca.probe.datasets`.
        protocol: a name, a TOML file or a `Protocol`.
        sizes: pixels, one or several; by default the protocol's. Window, stride and crop of the
            segmentation protocols follow in proportion.
        train_dataset, train_data, train_split, test_split, options: see `open_data`.
        cache: the folder that keeps features; "default": see `veca.probe.cache`; None: nothing is
            kept.
        device: where heads train; by default where the first backbone is.
        verify: compare with scikit-learn, which takes longer.
        command: what to write into the record as the way to repeat it.
        progress: called with (text, done, total) as the work goes on.

    Raises:
        ProbeError, DatasetError: a protocol, data or settings that do not fit.
    """
    begin = time.perf_counter()
    chosen = load_protocol(protocol)
    chosen = _at_sizes(chosen, task, sizes)
    backbones = [backbone.under(chosen.extract) for backbone in backbones]
    _check_backbones(backbones)
    found = open_data(
        task,
        dataset,
        data,
        train_dataset=train_dataset,
        train_data=train_data,
        train_split=train_split,
        test_split=test_split,
        options=options,
        subset=chosen.task(task).subset,
        seed=chosen.seed,
    )
    setup = ProbeSetup(
        protocol=chosen,
        data=found,
        backbones=backbones,
        sizes=_used_sizes(chosen, task, sizes),
        device=torch.device(device) if device is not None else backbones[0].device,
        progress=progress or _silent,
        workers=workers,
        verify=verify,
    )
    work = make_task(task, setup)
    summary = ExtractionSummary()
    with ExitStack() as stack:
        start = time.perf_counter()
        features = _extract(work.requests, setup, _cache(cache), stack, summary)
        seconds = time.perf_counter() - start
        outcomes = work.outcomes(features)
    setup.progress("timing", 0, 1)
    prices = costs([(o.backbone, o.input) for o in outcomes], chosen, measure=measure_time)
    setup.progress("timing", 1, 1)
    resampling = resampling_of(found, chosen.seed)
    return Run(
        task=task,
        dataset=found.describe(),
        protocol=chosen.only(task),
        backbones={backbone.name: backbone.describe() for backbone in backbones},
        rows=_rows(task, outcomes, prices, setup.cell, resampling),
        notes=[*found.notes, *setup.notes, *_cache_notes(summary)],
        seconds={"features": seconds, "total": time.perf_counter() - begin},
        cache={
            "decoded": summary.decoded,
            "computed": summary.computed,
            "reused": summary.reused,
            "damaged": len(summary.damaged),
        },
        machine=_machine(setup.device),
        command=command,
        resampling=resampling.describe(),
    )


def _extract(
    requests: Sequence[FeatureRequest],
    setup: ProbeSetup,
    cache: Path | None,
    stack: ExitStack,
    summary: ExtractionSummary,
) -> list[list[Stored]]:
    """The features that a task asks for, from the cache or computed into it."""
    found = []
    for dataset, indices, wants in requests:

        def tell(done: int, total: int, text: str = f"features, {dataset.own_split}") -> None:
            setup.progress(text, done, total)

        found.append(
            extract(
                dataset,
                indices,
                wants,
                settings=setup.protocol.extract,
                cache=cache,
                stack=stack,
                progress=tell,
                workers=setup.workers,
                summary=summary,
            )
        )
    return found


def planned_subject(
    task: str,
    backbones: Sequence[Backbone],
    *,
    dataset: str,
    protocol: str | Path | Protocol = "quick",
    sizes: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The `Run.subject` that `run_probe` with these arguments would have."""
    chosen = _at_sizes(load_protocol(protocol), task, sizes)
    name = find_dataset(dataset, DATASET_TASK[task]).info.name
    used = _used_sizes(chosen, task, sizes)
    rows = [(b.label, size) for size in used for b in backbones]
    return subject(task, name, chosen.only(task), rows)


def _cache(cache: str | Path | None) -> Path | None:
    if cache is None:
        return None
    return default_folder() if cache == "default" else Path(cache).expanduser()


def _check_backbones(backbones: Sequence[Backbone]) -> None:
    if not backbones:
        raise ProbeError("no backbone to probe; give weights, a teacher or a baseline.")
    check_unique(backbones)
    teachers = {backbone.name for backbone in backbones if backbone.role == TEACHER}
    if len(teachers) > 1:
        raise ProbeError(
            f"retention is measured against one teacher, got {', '.join(sorted(teachers))}; make "
            "the others baselines."
        )


def _at_sizes(protocol: Protocol, task: str, sizes: Sequence[int] | None) -> Protocol:
    """The protocol as it is used; of several sizes the rows tell which is whose."""
    if not sizes:
        return protocol
    if min(sizes) < 1:
        raise ProbeError(f"sizes are pixels of at least 1, got {list(sizes)}.")
    section = protocol.task(task)
    if len(sizes) > 1 or sizes[0] == section.view.size:
        return protocol
    changed = {task: at_size(section, sizes[0], protocol.extract.cell)}
    name = protocol.name if protocol.name.endswith("+") else f"{protocol.name}+"
    return dataclasses.replace(protocol, name=name, **changed)


def _used_sizes(protocol: Protocol, task: str, sizes: Sequence[int] | None) -> list[int]:
    """Each once; the protocol's own unless others are asked for."""
    return list(dict.fromkeys(sizes or [protocol.task(task).view.size]))


def _rows(
    task: str,
    outcomes: Sequence[Outcome],
    prices: Sequence[RowCost],
    cell: int,
    resampling: Resampling,
) -> list[Row]:
    metric = PRIMARY[task]
    drawn = resampling.scores([o.sums for o in outcomes])
    teacher, full = _teachers(outcomes), _full_budgets(outcomes)

    def beside(mine: int, reference: int | None) -> tuple[float | None, Interval | None]:
        """What one outcome keeps of another, and the interval of that."""
        if reference is None:
            return None, None
        ours, theirs = (outcomes[i].metrics[metric] for i in (mine, reference))
        ends = resampling.share_interval(drawn[mine], drawn[reference], metric)
        return retention(ours, theirs, metric), ends

    rows = []
    for i, (o, price) in enumerate(zip(outcomes, prices, strict=True)):
        of_teacher, interval_teacher = beside(i, teacher.get(o.size))
        known = full.get((o.backbone.name, o.size)) if o.backbone.role == STUDENT else None
        of_full, interval_full = beside(i, known)
        rows.append(
            Row(
                name=o.backbone.name,
                role=o.backbone.role,
                cores=o.backbone.cores,
                size=o.size,
                input=o.input,
                grid=o.backbone.grid_for(o.input, cell),
                metrics=o.metrics,
                retention_teacher=of_teacher,
                retention_full=of_full,
                interactions=price.compute.interactions,
                flops=price.compute.flops,
                ms=price.ms,
                spread_ms=price.spread_ms,
                details=o.details,
                interval=resampling.score_interval(drawn[i], metric),
                interval_teacher=interval_teacher,
                interval_full=interval_full,
                keep=o.backbone.keep,
                agreement=o.backbone.agreement,
                precision=o.backbone.precision,
            )
        )
    return rows


def _teachers(outcomes: Sequence[Outcome]) -> dict[int, int]:
    """Size -> the place of the teacher's outcome."""
    return {o.size: i for i, o in enumerate(outcomes) if o.backbone.role == TEACHER}


def _full_budgets(outcomes: Sequence[Outcome]) -> dict[tuple[str, int], int]:
    """(name, size) -> the place of its outcome with all cores and all tokens; of several
    precisions in the first."""
    places: dict[tuple[str, int], int] = {}
    for i, o in enumerate(outcomes):
        config = getattr(getattr(o.backbone, "model", None), "config", None)
        bank = getattr(config, "num_cores", None)
        if bank is not None and o.backbone.cores == bank and o.backbone.keep == 1:
            places.setdefault((o.backbone.name, o.size), i)
    return places


def resampling_of(data: ProbeData, seed: int) -> Resampling:
    """How the test images are drawn anew: alone, by scene, or in blocks of time."""
    groups = data.test.groups
    return Resampling(
        len(data.test_indices),
        groups=None if groups is None else [groups[i] for i in data.test_indices],
        in_time=data.test.in_time,
        seed=seed,
    )


def _machine(device: torch.device) -> dict[str, Any]:
    """Where and with what it was measured; numpy and Pillow because they make the pixels."""
    libraries = {"numpy": np.__version__, "pillow": PIL.__version__}
    threads = torch.get_num_threads()
    return {**dataclasses.asdict(machine(device)), **libraries, "threads": threads}


def _cache_notes(summary: ExtractionSummary) -> list[str]:
    notes = []
    if summary.damaged:
        notes.append(f"{len(summary.damaged)} damaged parts of the feature cache recomputed")
    for label in summary.uncached:
        notes.append(f"features of {label} are not kept: its weights cannot be told apart")
    return notes


def _silent(text: str, done: int, total: int) -> None:
    pass
