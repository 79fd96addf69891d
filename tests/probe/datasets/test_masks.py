"""Segmentation sets in their layouts: every stored value checked against a plain definition."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from veca.probe.datasets import DatasetError, check_dataset, list_datasets, open_dataset
from veca.probe.datasets.masks import load_table


def grid(values) -> np.ndarray:
    """Every value once or more, in 16 columns and at least two rows."""
    values = list(values)
    values += [values[0]] * max(-len(values) % 16, 32 - len(values))
    return np.array(values).reshape(-1, 16)


def expect(dataset, i: int, stored: np.ndarray, meaning) -> None:
    """The mask is `meaning(value)` at each pixel."""
    mask = dataset.mask(i)
    assert mask.dtype == np.uint8 and mask.shape == stored.shape
    assert mask.tolist() == [[meaning(int(value)) for value in row] for row in stored]
    assert mask[mask != 255].max(initial=0) < dataset.num_classes
    assert np.asarray(dataset.image(i)).shape[:2] == stored.shape == dataset.size(i)


def refuse(dataset, value: int) -> None:
    """A mask with one wrong pixel is refused, with its name and that value."""
    path = dataset.label_path(0)
    kept = path.read_bytes()
    stored = np.array(Image.open(path))
    stored[1, 2] = value
    Image.fromarray(stored).save(path)
    with pytest.raises(DatasetError, match=rf"value {value}\b") as caught:
        dataset.mask(0)
    assert str(path) in str(caught.value)
    path.write_bytes(kept)


# ------------------------------------------------------------------------------------ VOC, Context


def voc(write, base: str = "VOCdevkit/VOC2012") -> np.ndarray:
    stored = grid([*range(21), 255])
    for name in ("2007_1", "2007_2", "2008_3"):
        write.image(f"{base}/JPEGImages/{name}.jpg", *stored.shape)
        write.labels(f"{base}/SegmentationClass/{name}.png", stored, palette=True)
    write.text(f"{base}/ImageSets/Segmentation/train.txt", ["2007_2", "2007_1"])
    write.text(f"{base}/ImageSets/Segmentation/val.txt", ["2008_3"])
    return stored


def test_voc2012(write) -> None:
    stored = voc(write)
    train = open_dataset("voc2012", write.root, "train")
    assert train.ids == ("JPEGImages/2007_2.jpg", "JPEGImages/2007_1.jpg")
    assert train.classes[0] == "background" and train.classes[15] == "person"
    assert train.num_classes == 21 and train.ignore_index == 255
    for i in range(2):
        expect(train, i, stored, lambda value: value)
    val = open_dataset("voc2012", write.root / "VOCdevkit", "val")
    assert val.ids == ("JPEGImages/2008_3.jpg",)
    refuse(val, 21)


def test_voc2012_with_the_augmented_masks(write) -> None:
    voc(write)
    check = check_dataset("voc2012", write.root, contents=True)
    assert check.ok and "not there" in check.splits["trainaug"].notes[0]
    base = "VOCdevkit/VOC2012"
    other = grid([20, 3])
    write.image(f"{base}/JPEGImages/2010_9.jpg", *other.shape)
    write.labels(f"{base}/SegmentationClassAug/2010_9.png", other)
    write.text(f"{base}/ImageSets/Segmentation/trainaug.txt", ["2010_9"])
    augmented = open_dataset("voc2012", write.root, "trainaug")
    expect(augmented, 0, other, lambda value: value)
    # The official list stays what it was.
    assert len(open_dataset("voc2012", write.root, "train")) == 2


def test_voc2012_with_colours_instead_of_labels(write) -> None:
    voc(write)
    write.image("VOCdevkit/VOC2012/SegmentationClass/2008_3.png", 2, 16)
    with pytest.raises(DatasetError, match="RGB"):
        open_dataset("voc2012", write.root, "val").mask(0)


def test_pascal_context_counts_background(write) -> None:
    base = "VOCdevkit/VOC2010"
    stored = grid([*range(60), 255])
    write.image(f"{base}/JPEGImages/2008_1.jpg", *stored.shape)
    write.labels(f"{base}/SegmentationClassContext/2008_1.png", stored)
    write.text(f"{base}/ImageSets/SegmentationContext/val.txt", ["2008_1"])
    val = open_dataset("pascal-context-60", write.root, "val")
    assert val.num_classes == 60 and val.classes[:2] == ("background", "aeroplane")
    # The 59 classes follow in alphabetical order.
    assert list(val.classes[1:]) == sorted(val.classes[1:]) and val.classes[59] == "wood"
    expect(val, 0, stored, lambda value: value)
    refuse(val, 60)


# ------------------------------------------------------------------------------------------ ADE20K


def test_ade20k_shifts_labels_down_by_one(write) -> None:
    base = "ADEChallengeData2016"
    stored = grid(range(151))
    for split in ("training", "validation"):
        for name in ("ADE_2", "ADE_1"):
            write.image(f"{base}/images/{split}/{name}.jpg", *stored.shape)
            write.labels(f"{base}/annotations/{split}/{name}.png", stored)
    val = open_dataset("ade20k-150", write.root, "val")
    assert val.ids == ("images/validation/ADE_1.jpg", "images/validation/ADE_2.jpg")
    assert val.num_classes == 150
    named = {0: "wall", 2: "sky", 12: "person", 20: "car", 149: "flag"}
    assert {i: val.classes[i] for i in named} == named
    expect(val, 0, stored, lambda value: value - 1 if value else 255)
    train = open_dataset("ade20k-150", write.root / base, "training")
    assert train.split == "train"
    expect(train, 1, stored, lambda value: value - 1 if value else 255)
    refuse(val, 151)
    refuse(val, 255)


# -------------------------------------------------------------------------------------------- COCO

UNUSED = [12, 26, 29, 30, 45, 66, 68, 69, 71, 83, 91]  # category ids that COCO never used


def rank(category: int) -> int:
    """Place of a category id among the used ones, from 0."""
    return category - 1 - sum(unused < category for unused in UNUSED)


def coco(write, images: str = "images/", maps: str = "stuffthingmaps/") -> np.ndarray:
    stored = grid(value for value in [*range(182), 255] if value + 1 not in UNUSED)
    for split in ("train2017", "val2017"):
        write.image(f"{images}{split}/000000000139.jpg", *stored.shape)
        write.labels(f"{maps}{split}/000000000139.png", stored)
    return stored


@pytest.mark.parametrize(("images", "maps"), [("images/", "stuffthingmaps/"), ("", "annotations/")])
def test_coco_stuff(write, images: str, maps: str) -> None:
    stored = coco(write, images, maps)
    # Renumbered copies that other tools leave there are not masks of other images.
    write.labels(f"{maps}val2017/000000000139_labelTrainIds.png", stored)
    write.labels(f"{maps}val2017/000000000139_instanceTrainIds.png", stored)
    val = open_dataset("coco-stuff", write.root, "val")
    assert val.ids == (f"{images}val2017/000000000139.jpg",)
    assert val.num_classes == 171 and len(set(val.classes)) == 171
    named = {0: "person", 11: "stop sign", 79: "toothbrush", 80: "banner", 170: "wood"}
    assert {i: val.classes[i] for i in named} == named
    expect(val, 0, stored, lambda value: 255 if value == 255 else rank(value + 1))
    assert sorted({int(v) for v in np.unique(val.mask(0))}) == [*range(171), 255]
    for unused in UNUSED:
        refuse(val, unused - 1)
    refuse(val, 182)


def test_coco_object(write) -> None:
    stored = coco(write)
    train = open_dataset("coco-object", write.root, "train")
    assert train.num_classes == 81
    named = {0: "background", 1: "person", 12: "stop sign", 40: "bottle", 80: "toothbrush"}
    assert {i: train.classes[i] for i in named} == named
    # Things are 1..80, all else is background: nothing is ignored.
    expect(train, 0, stored, lambda value: rank(value + 1) + 1 if value < 90 else 0)
    assert sorted({int(v) for v in np.unique(train.mask(0))}) == [*range(81)]
    refuse(train, 200)


def test_the_table_of_coco_is_complete() -> None:
    table = load_table("coco")
    ids = [number for number, _ in table["things"] + table["stuff"]]
    assert ids == [i for i in range(1, 183) if i not in UNUSED]
    assert len(table["things"]) == 80 and len(table["stuff"]) == 91


# -------------------------------------------------------------------------------------- Cityscapes

EVALUATED = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]


def city(write, kind: str, stored: np.ndarray) -> None:
    for name in ("bonn/bonn_000001", "aachen/aachen_000002"):
        write.image(f"leftImg8bit/val/{name}_leftImg8bit.png", *stored.shape)
        write.labels(f"gtFine/val/{name}_gtFine_{kind}.png", stored)
        write.labels(f"gtFine/val/{name}_gtFine_instanceIds.png", stored)
        write.image(f"gtFine/val/{name}_gtFine_color.png", *stored.shape)


def test_cityscapes_label_ids(write) -> None:
    stored = grid(range(34))
    city(write, "labelIds", stored)
    val = open_dataset("cityscapes", write.root, "val")
    assert val.ids == (
        "leftImg8bit/val/aachen/aachen_000002_leftImg8bit.png",
        "leftImg8bit/val/bonn/bonn_000001_leftImg8bit.png",
    )
    assert val.classes[0] == "road" and val.classes[13] == "car" and val.classes[18] == "bicycle"
    expect(val, 1, stored, lambda v: EVALUATED.index(v) if v in EVALUATED else 255)
    refuse(val, 34)


def test_cityscapes_train_ids(write) -> None:
    stored = grid([*range(19), 255])
    city(write, "labelTrainIds", stored)
    val = open_dataset("cityscapes", write.root, "val")
    expect(val, 0, stored, lambda value: value)
    refuse(val, 19)
    # Where both exist the raw ids are read, and then every image needs them.
    write.labels("gtFine/val/bonn/bonn_000001_gtFine_labelIds.png", grid(range(34)))
    with pytest.raises(DatasetError, match=r"aachen_000002_gtFine_labelIds\.png"):
        open_dataset("cityscapes", write.root, "val")


# ------------------------------------------------------------------------------------ CamVid, Pets


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_camvid(write, suffix: str) -> None:
    stored = grid(range(12))
    for split in ("train", "val", "test"):
        write.image(f"{split}/0001TP_{split}.{suffix}", *stored.shape)
        write.labels(f"{split}annot/0001TP_{split}.png", stored)
    for split in ("train", "val", "test"):
        dataset = open_dataset("camvid", write.root, split)
        assert dataset.in_time
        assert dataset.ids == (f"{split}/0001TP_{split}.{suffix}",)
        expect(dataset, 0, stored, lambda value: 255 if value == 11 else value)
    assert dataset.classes[0] == "sky" and dataset.classes[10] == "bicyclist"
    refuse(dataset, 12)
    refuse(dataset, 255)


def test_pets_trimaps_score_all_three(write) -> None:
    stored = grid([1, 2, 3])
    for name in ("Bengal_1", "pug_2", "pug_3"):
        write.image(f"images/{name}.jpg", *stored.shape)
        write.labels(f"annotations/trimaps/{name}.png", stored)
    write.text("annotations/trainval.txt", ["pug_2 26 2 18", "Bengal_1 6 1 2"])
    write.text("annotations/test.txt", ["pug_3 26 2 18"])
    train = open_dataset("pets", write.root, "train", task="segmentation")
    assert train.ids == ("images/pug_2.jpg", "images/Bengal_1.jpg")
    assert train.classes == ("pet", "background", "border")
    expect(train, 0, stored, lambda value: value - 1)
    refuse(train, 0)
    refuse(train, 255)
    (write.root / "annotations/trimaps/pug_3.png").unlink()
    with pytest.raises(DatasetError, match=r"trimaps/pug_3\.png"):
        open_dataset("pets-trimaps", write.root, "test")


# ------------------------------------------------------------------------------------------- plain


@pytest.mark.parametrize("images", ["images/train", "train/images"])
def test_images_and_masks(write, images: str) -> None:
    masks = images.replace("images", "masks")
    stored = grid([0, 1, 2, 255])
    write.image(f"{images}/sub/a.jpg", *stored.shape)
    write.labels(f"{masks}/sub/a.png", stored)
    write.json("dataset.json", {"classes": ["x", "y", "z"]})
    dataset = open_dataset("images-masks", write.root, "train")
    assert dataset.ids == (f"{images}/sub/a.jpg",) and dataset.classes == ("x", "y", "z")
    expect(dataset, 0, stored, lambda value: value)
    refuse(dataset, 3)


def test_images_and_masks_with_a_shift_and_ignored_values(write) -> None:
    stored = grid([0, 1, 2, 9, 255])
    write.image("images/test/a.png", *stored.shape)
    write.labels("masks/test/a.png", stored.astype(np.uint16))
    settings = {"classes": ["x", "y"], "reduce_zero_label": True, "ignore": [9, 255]}
    write.json("dataset.json", settings)
    dataset = open_dataset("images-masks", write.root, "test")
    expect(dataset, 0, stored, lambda value: {1: 0, 2: 1}.get(value, 255))
    # A keyword is stronger than the file.
    strict = open_dataset("images-masks", write.root, "test", ignore=[9])
    with pytest.raises(DatasetError, match="value 255"):
        strict.mask(0)
    assert strict.fingerprint() != dataset.fingerprint()
    write.labels("masks/test/a.png", np.full(stored.shape, 300, dtype=np.uint16))
    with pytest.raises(DatasetError, match="value 300"):
        dataset.mask(0)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "'classes'.*given"),
        ({"classes": "road"}, "'road'"),
        ({"classes": []}, r"\[\]"),
        ({"classes": ["c"] * 256}, "'c', 'c'"),
        ({"classes": ["a", 2]}, r"\['a', 2\]"),
        ({"classes": ["a"], "ignore": 255}, "'ignore'.*is 255"),
        ({"classes": ["a"], "ignore": [256]}, r"\[256\]"),
        ({"classes": ["a", "b"], "ignore": [1]}, "'b'"),
        ({"classes": ["a"], "reduce_zero_label": 1}, "reduce_zero_label="),
        ({"class": ["a"]}, "'class'"),
        (["a"], "object"),
    ],
)
def test_settings_that_are_not_right(write, settings, match: str) -> None:
    write.image("images/test/a.png")
    write.labels("masks/test/a.png", np.zeros((6, 8)))
    write.json("dataset.json", settings)
    with pytest.raises(DatasetError, match=match) as caught:
        open_dataset("images-masks", write.root, "test")
    assert "dataset.json" in str(caught.value)


def test_255_classes_fit_and_the_last_value_is_ignored(write) -> None:
    stored = grid(range(256))
    write.image("images/test/a.png", *stored.shape)
    write.labels("masks/test/a.png", stored)
    names = [f"class {i}" for i in range(255)]
    dataset = open_dataset("images-masks", write.root, "test", classes=names)
    expect(dataset, 0, stored, lambda value: value)


def test_the_tables_have_as_many_classes_as_announced() -> None:
    sizes = {
        "voc2012": 21,
        "pascal_context_60": 60,
        "ade20k_150": 150,
        "camvid": 11,
    }
    for name, count in sizes.items():
        classes = load_table(name)["classes"]
        assert len(classes) == count == len(set(classes))
    counts = {info.name: info.classes for info in list_datasets("segmentation")}
    assert counts["coco-stuff"] == 171 and counts["coco-object"] == 81
    assert counts["cityscapes"] == len(EVALUATED)
