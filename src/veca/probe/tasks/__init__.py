"""The tasks, one file each: head, training and score of one kind of probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veca.probe.tasks.depth import DepthTask
from veca.probe.tasks.knn import KnnTask
from veca.probe.tasks.linear import LinearTask
from veca.probe.tasks.logreg import LogregTask
from veca.probe.tasks.segmentation import SegmentationTask
from veca.probe.tasks.shared import ProbeSetup, Task
from veca.probe.tasks.shared import at_size as at_size

_TASKS: dict[str, Callable[[ProbeSetup, Any], Task]] = {
    "knn": KnnTask,
    "linear": LinearTask,
    "logreg": LogregTask,
    "segmentation": SegmentationTask,
    "depth": DepthTask,
}


def make_task(name: str, setup: ProbeSetup) -> Task:
    """A task by its name, with the protocol's settings for it."""
    return _TASKS[name](setup, setup.protocol.task(name))
