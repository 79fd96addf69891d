"""Many large pictures, each into a store of its own: here, or on a Ray cluster."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from veca._util.files import place_for
from veca.config import VecaConfig
from veca.embed.cluster import spread
from veca.errors import AlreadyThereError, InputError, VecaError, check_choice
from veca.large.job import LargeJob
from veca.model import Veca, create_model
from veca.precision import in_precision

ENGINES = ("local", "ray")


class Collected(NamedTuple):
    """What became of many pictures."""

    written: list[Path]
    failed: list[tuple[str, str]]
    """Path and reason."""


def collect(
    pictures: Sequence[str | os.PathLike[str]],
    job: LargeJob,
    model: Veca,
    *,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Compute the features of many pictures; those that are there already are left as they are.

    Args:
        job: its `out` is a folder, in which each picture gets NAME.zarr.
        engine: "local": one after the other; "ray": side by side on a cluster.
        address, workers, threads, device: of the cluster, as in `veca.embed.embed`.
        progress: called with (done, total) pictures.
    """
    check_choice("engine", engine, ENGINES)
    folder = place_for(job.out)
    paths = [os.path.abspath(path) for path in pictures]  # noqa: PTH100
    stems = Counter(Path(path).stem for path in paths)
    twice = [stem for stem, number in stems.items() if number > 1]
    if twice:
        raise InputError(f"two pictures would both be {folder / twice[0]}.zarr; rename one.")
    if folder.suffix in (".zarr", ".h5", ".tif", ".npy"):
        raise InputError(f"several pictures go into a folder, and {folder} names one output.")
    tasks = [{"path": path, "out": str(folder / f"{Path(path).stem}.zarr")} for path in paths]
    rows: Iterator[dict[str, Any]]
    if engine == "ray":
        given = {
            "state": {name: tensor.cpu() for name, tensor in model.state_dict().items()},
            "config": model.config.to_dict(),
            "dtype": model.dtype,
            "precision": model.precision,
            "job": job,
        }
        rows = spread(
            _Worker,
            given,
            tasks,
            purpose="veca large --engine ray",
            workers=workers,
            threads=threads,
            device=device,
            address=address,
        )
    else:
        rows = (_one(model, job, task) for task in tasks)
    found = Collected([], [])
    for row in rows:
        if row["reason"]:
            found.failed.append((str(row["path"]), str(row["reason"])))
        else:
            found.written.append(Path(str(row["out"])))
        if progress is not None:
            progress(len(found.written) + len(found.failed), len(tasks))
    return Collected(sorted(found.written), sorted(found.failed))


class _Worker:
    """Holds the model; each call makes one store."""

    def __init__(self, work: Any) -> None:
        import ray

        given = ray.get(work)
        torch.set_num_threads(given["cpus"])
        model = create_model(VecaConfig.from_dict(given["config"])).to(given["dtype"])
        model.load_state_dict(given["state"])
        model = model.eval().to(given["device"])
        precise = given["precision"] == "fp32"
        self._model = model if precise else in_precision(model, given["precision"])
        self._job: LargeJob = given["job"]

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return _one(self._model, self._job, row)


def _one(model: Veca, job: LargeJob, task: dict[str, Any]) -> dict[str, Any]:
    """One picture; what is wrong with it is a line, and the others go on."""
    reason, error = "", ""
    own = replace(job, out=Path(task["out"]), state=None)
    try:
        picture = own.open(task["path"])
        own.run(model, picture, own.mask_for(picture, model))
    except AlreadyThereError:
        pass
    except VecaError as problem:
        reason = str(problem)
    except MemoryError as problem:
        error = json.dumps(["LargeError", f"out of memory ({problem}); allow less."])
    return {**task, "reason": reason, "error": error}
