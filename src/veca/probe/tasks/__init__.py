"""The tasks: from backbones and data to one outcome for each backbone and size.

Each takes a `Job`, has its features extracted (or computed as training goes on, where the protocol
augments), trains, and scores. Nothing looks at test labels before the score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veca.probe.tasks.classification import knn, linear, logreg
from veca.probe.tasks.depth import depth
from veca.probe.tasks.job import Job, Outcome, Progress, at_size
from veca.probe.tasks.segmentation import segmentation

__all__ = ["Job", "Outcome", "Progress", "at_size", "run_task"]

_TASKS: dict[str, Callable[[Job, Any], list[Outcome]]] = {
    "knn": knn,
    "linear": linear,
    "logreg": logreg,
    "segmentation": segmentation,
    "depth": depth,
}


def run_task(task: str, job: Job) -> list[Outcome]:
    """The outcomes of a task, in the order of `job.rows`."""
    return _TASKS[task](job, job.protocol.task(task))
