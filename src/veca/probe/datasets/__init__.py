"""Datasets for probing, in their public layouts on the disk.

    from veca.probe.datasets import check_dataset, open_dataset

    print(check_dataset("oxford-pets", "data/pets"))        # what is missing, where to get it
    train = open_dataset("oxford-pets", "data/pets", "train")
    train.image(0), train.label(0), train.classes

`list_datasets()` tells names, tasks, splits, layouts, sources and licences.
"""

from veca.errors import DatasetError
from veca.probe.datasets import (  # noqa: F401  (importing them registers their datasets)
    cifar,
    classification,
    depth_maps,
    imagenet,
    masks,
)
from veca.probe.datasets.base import (
    IGNORE_INDEX,
    TASKS,
    Check,
    Dataset,
    DatasetInfo,
    SplitCheck,
)
from veca.probe.datasets.classification import ClassificationDataset
from veca.probe.datasets.depth_maps import Crop, DepthDataset
from veca.probe.datasets.masks import SegmentationDataset
from veca.probe.datasets.registry import (
    check_dataset,
    find_dataset,
    list_datasets,
    open_dataset,
    register,
)

__all__ = [
    "IGNORE_INDEX",
    "TASKS",
    "Check",
    "ClassificationDataset",
    "Crop",
    "Dataset",
    "DatasetError",
    "DatasetInfo",
    "DepthDataset",
    "SegmentationDataset",
    "SplitCheck",
    "check_dataset",
    "find_dataset",
    "list_datasets",
    "open_dataset",
    "register",
]
