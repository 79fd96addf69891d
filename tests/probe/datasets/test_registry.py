"""Names, tasks, splits and the check that tells what is missing."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from veca.errors import VecaError
from veca.probe.datasets import (
    Dataset,
    DatasetError,
    check_dataset,
    find_dataset,
    list_datasets,
    open_dataset,
    register,
)

NAMES = {
    "classification": {
        "imagenet-1k",
        "imagenet-v2",
        "imagenet-real",
        "places365",
        "food101",
        "sun397",
        "oxford-pets",
        "cub-200",
        "cifar-10",
        "cifar-100",
        "folder",
    },
    "segmentation": {
        "voc2012",
        "pascal-context-60",
        "ade20k-150",
        "coco-object",
        "coco-stuff",
        "cityscapes",
        "camvid",
        "pets-trimaps",
        "images-masks",
    },
    "depth": {"nyuv2", "kitti", "rgb-depth", "scau-rgbd"},
}
ALL = [info.name for info in list_datasets()]


def test_every_dataset_is_listed_under_its_task() -> None:
    for task, names in NAMES.items():
        assert {info.name for info in list_datasets(task)} == names
    assert len(ALL) == sum(map(len, NAMES.values()))


@pytest.mark.parametrize("name", ALL)
def test_every_dataset_says_what_a_user_needs(name: str) -> None:
    info = find_dataset(name).info
    assert info.report_split in info.splits
    assert set(info.counts) <= set(info.splits)
    assert set(info.optional_splits) <= set(info.splits)
    assert info.layout and info.where and info.licence
    # Settings are chosen on another split than scores are reported on, so no two may be the same.
    assert len(set(info.splits.values())) == len(info.splits)


@pytest.mark.parametrize("name", ALL)
def test_check_of_an_empty_folder_tells_what_is_missing_and_where_to_get_it(
    name: str, tmp_path: Path
) -> None:
    check = check_dataset(name, tmp_path)
    info = check.info
    text = str(check)
    assert not check.ok
    assert check.missing
    assert all(row in text for row in info.layout.splitlines())
    assert info.where in text and info.licence in text
    for split in info.splits:
        with pytest.raises(DatasetError, match=f"'{name}'") as caught:
            open_dataset(name, tmp_path, split)
        assert caught.value.missing[0] in str(caught.value)
        assert "\n" not in str(caught.value)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ALL)
def test_a_root_that_is_not_there(name: str, tmp_path: Path) -> None:
    split = find_dataset(name).info.report_split
    with pytest.raises(DatasetError, match="nowhere"):
        open_dataset(name, tmp_path / "nowhere", split)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DatasetError, match="/file"):
        open_dataset(name, file, split)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("ImageNet", "imagenet-1k"),
        ("imagenet_1k", "imagenet-1k"),
        ("CIFAR10", "cifar-10"),
        ("VOC 2012", "voc2012"),
        ("ade20k", "ade20k-150"),
        ("NYU", "nyuv2"),
        ("scau", "scau-rgbd"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert find_dataset(alias).info.name == name


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(DatasetError, match="'food101'"):
        find_dataset("food10")
    with pytest.raises(DatasetError, match="'segmentation'"):
        find_dataset("camvid", "segmentatoin")


def test_one_name_for_several_tasks() -> None:
    assert find_dataset("oxford-pets").info.task == "classification"
    assert find_dataset("oxford-pets", "segmentation").info.name == "pets-trimaps"
    assert find_dataset("pets", "classification").info.name == "oxford-pets"
    assert find_dataset("plain", "depth").info.name == "rgb-depth"
    with pytest.raises(DatasetError, match="pets-trimaps"):
        find_dataset("pets")
    with pytest.raises(DatasetError, match=r"segmentation.*depth"):
        find_dataset("camvid", "depth")


def test_splits_that_a_dataset_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="'val'"):
        open_dataset("oxford-pets", tmp_path, "val")
    with pytest.raises(DatasetError, match="'test'"):
        open_dataset("imagenet-1k", tmp_path, "test")


def test_unknown_option(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="'partitoin'"):
        open_dataset("food101", tmp_path, "train", partitoin=2)
    with pytest.raises(DatasetError, match="'scale'"):
        open_dataset("camvid", tmp_path, "train", scale=2)


def test_the_error_is_of_the_package_and_survives_a_worker_process() -> None:
    error = DatasetError("what", missing=["a", "b"])
    assert isinstance(error, VecaError) and isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "what" and again.missing == ("a", "b")


def test_a_name_is_registered_once() -> None:
    cls: type[Dataset] = find_dataset("camvid")
    with pytest.raises(DatasetError, match="registered"):
        register(cls)
