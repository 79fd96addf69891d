"""The datasets that come with the package, as datasets.toml describes them."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

from veca._util.settings import SettingsReader, SettingsTables
from veca.errors import DatasetError
from veca.probe.datasets.base import DatasetInfo

_READER = SettingsReader(DatasetError)
# Every classification set with a training split takes it; see `ClassificationDataset`.
_EMPTY_CLASSES = "True: a training split may lack images of some classes (default False)"


def shipped(name: str) -> DatasetInfo:
    """What is known about one of them."""
    own = {"name": name, "classes": None, **_tables()[name]}
    table = {**_tables().get(own.pop("like", ""), {}), **own}
    splits = table["splits"]
    if isinstance(splits, list):
        table["splits"] = {split: split for split in splits}
    table["report_split"] = list(splits)[-1]
    if table["task"] == "classification" and "train" in splits:
        table["options"] = {"allow_empty_classes": _EMPTY_CLASSES, **table.get("options", {})}
    return _READER.build(DatasetInfo, SettingsTables(table))


@functools.cache
def _tables() -> dict[str, Any]:
    file = resources.files("veca.probe.datasets") / "datasets.toml"
    return _READER.parse(file.read_text(encoding="utf-8"), file.name)
