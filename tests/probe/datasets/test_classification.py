"""Classification sets in their layouts: every id and label read back."""

from __future__ import annotations

import os
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from veca.errors import ImageError
from veca.probe.cache import digest
from veca.probe.datasets import DatasetError, check_dataset, open_dataset


def pairs(dataset):
    assert dataset.task == "classification"
    assert dataset.num_classes == len(dataset.classes)
    assert [dataset.label(i) for i in range(len(dataset))] == dataset.targets.tolist()
    assert all(dataset.labels(i) == [dataset.label(i)] for i in range(len(dataset)))
    assert all(dataset.image_path(i).is_file() for i in range(len(dataset)))
    return list(zip(dataset.ids, dataset.targets.tolist(), strict=True))


# ---------------------------------------------------------------------------------------- folder


def test_folder(write) -> None:
    pixels = write.image("train/cat/deep/b.png")
    write.photos("train/cat/a.jpg", "train/ant/x.JPEG", "val/cat/y.jpg", "train/cat/._a.jpg")
    write.text("train/cat/readme.txt", ["no image"])
    train = open_dataset("folder", write.root, "train")
    assert train.classes == ("ant", "cat")
    assert pairs(train) == [
        ("train/ant/x.JPEG", 0),
        ("train/cat/a.jpg", 1),
        ("train/cat/deep/b.png", 1),
    ]
    assert np.array_equal(np.asarray(train.image(2)), pixels)
    # Labels are those of train, though val alone has one class only.
    val = open_dataset("folder", write.root, "val")
    assert pairs(val) == [("val/cat/y.jpg", 1)]
    assert "ant" in val.notes[0]
    check = check_dataset("folder", write.root, contents=True)
    assert check.ok and check.splits["train"].count == 3
    assert "not there" in check.splits["test"].notes[0]


def test_folder_without_train_takes_its_own_classes(write) -> None:
    write.photos("test/b/1.jpg", "test/a/1.jpg")
    assert pairs(open_dataset("folder", write.root, "test")) == [
        ("test/a/1.jpg", 0),
        ("test/b/1.jpg", 1),
    ]


def test_folder_with_a_class_that_train_does_not_have(write) -> None:
    write.photos("train/a/1.jpg", "val/b/1.jpg")
    with pytest.raises(DatasetError, match="val/b"):
        open_dataset("folder", write.root, "val")


def test_folder_with_an_image_outside_the_classes(write) -> None:
    write.photos("train/a/1.jpg", "train/2.jpg")
    with pytest.raises(DatasetError, match=r"train/2\.jpg"):
        open_dataset("folder", write.root, "train")


def test_an_empty_class_is_named_or_allowed(write) -> None:
    write.photos("train/a/1.jpg")
    write.path("train/empty/x").parent.mkdir(exist_ok=True)
    with pytest.raises(DatasetError, match=r"\(empty\)"):
        open_dataset("folder", write.root, "train")
    dataset = open_dataset("folder", write.root, "train", allow_empty_classes=True)
    assert dataset.classes == ("a", "empty") and "empty" in dataset.notes[0]


def test_folder_with_no_image_at_all(write) -> None:
    write.path("train/a/x").touch()
    with pytest.raises(DatasetError, match="'train'"):
        open_dataset("folder", write.root, "train")


def test_links_between_folders_end(write) -> None:
    write.photos("train/a/1.jpg")
    (write.root / "train/a/loop").symlink_to(write.root / "train/a", target_is_directory=True)
    assert open_dataset("folder", write.root, "train").ids == ("train/a/1.jpg",)


def test_a_broken_image_is_found_by_a_check_of_the_contents(write) -> None:
    write.photos("train/a/1.jpg")
    write.path("train/a/2.jpg").write_bytes(b"no jpeg")
    assert check_dataset("folder", write.root, "train").ok
    check = check_dataset("folder", write.root, "train", contents=True)
    assert not check.ok and "2.jpg" in check.splits["train"].problems[0]
    with pytest.raises(ImageError, match=r"2\.jpg"):
        open_dataset("folder", write.root, "train").image(1)


# --------------------------------------------------------------------------------------- food101


def food(write):
    names = [f"dish_{i:03d}" for i in range(101)]
    write.text("food-101/meta/classes.txt", names)
    write.text("food-101/meta/train.txt", [f"{name}/{i}" for i, name in enumerate(names)])
    write.text("food-101/meta/test.txt", ["dish_100/7", "dish_003/8"])
    write.photos(*(f"food-101/images/{name}/{i}.jpg" for i, name in enumerate(names)))
    write.photos("food-101/images/dish_100/7.jpg", "food-101/images/dish_003/8.jpg")
    return names


def test_food101(write) -> None:
    names = food(write)
    train = open_dataset("food101", write.root, "train")
    assert train.classes == tuple(names)
    assert pairs(train) == [(f"images/{name}/{i}.jpg", i) for i, name in enumerate(names)]
    # The folder that the archive makes can be given as well; the order is the list's.
    test = open_dataset("food101", write.root / "food-101", "test")
    assert pairs(test) == [("images/dish_100/7.jpg", 100), ("images/dish_003/8.jpg", 3)]
    assert test.notes[0].startswith("no image of 99 of 101 classes")
    assert any("published test split has 25,250" in note for note in test.notes)


def test_a_listed_image_that_is_missing_is_named(write) -> None:
    food(write)
    (write.root / "food-101/images/dish_003/8.jpg").unlink()
    with pytest.raises(DatasetError, match=r"images/dish_003/8\.jpg") as caught:
        open_dataset("food101", write.root, "test")
    assert caught.value.missing == ("images/dish_003/8.jpg",)
    shutil.rmtree(write.root / "food-101/images")
    check = check_dataset("food101", write.root)
    assert not check.ok and check.missing == ("images",)


def test_a_class_that_is_not_in_the_list_of_classes(write) -> None:
    food(write)
    write.text("food-101/meta/test.txt", ["dish_003/8", "cake/7"])
    with pytest.raises(DatasetError, match="'cake'"):
        open_dataset("food101", write.root, "test")


def test_another_number_of_classes_than_published(write) -> None:
    food(write)
    write.text("food-101/meta/classes.txt", [f"dish_{i:03d}" for i in range(102)])
    with pytest.raises(DatasetError, match="102 classes"):
        open_dataset("food101", write.root, "test")


def test_an_empty_list_and_one_that_is_not_text(write) -> None:
    food(write)
    write.text("food-101/meta/test.txt", ["", " "])
    with pytest.raises(DatasetError, match="is empty"):
        open_dataset("food101", write.root, "test")
    write.path("food-101/meta/test.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="UTF-8"):
        open_dataset("food101", write.root, "test")


# ---------------------------------------------------------------------------------------- sun397


@pytest.mark.parametrize("lists", ["SUN397/", "", "Partitions/", "SUN397/Partitions/"])
def test_sun397(write, lists: str) -> None:
    names = [f"a/abbey_{i:03d}" for i in range(396)] + ["b/bistro/outdoor"]
    write.text("SUN397/ClassName.txt", [f"/{name}" for name in names])
    write.text(f"{lists}Training_01.txt", [f"/{name}/sun_1.jpg" for name in names])
    write.text(f"{lists}Testing_01.txt", ["/b/bistro/outdoor/sun_2.jpg", "/a/abbey_007/sun_2.jpg"])
    write.text(f"{lists}Testing_10.txt", ["/a/abbey_001/sun_2.jpg"])
    write.photos(*(f"SUN397/{name}/sun_{i}.jpg" for name in names for i in (1, 2)))
    train = open_dataset("sun397", write.root, "train")
    assert train.classes[0] == "a/abbey_000" and train.classes[396] == "b/bistro/outdoor"
    assert pairs(train) == [(f"{name}/sun_1.jpg", i) for i, name in enumerate(names)]
    test = open_dataset("sun397", write.root / "SUN397", "test")
    assert pairs(test) == [("b/bistro/outdoor/sun_2.jpg", 396), ("a/abbey_007/sun_2.jpg", 7)]
    tenth = open_dataset("sun397", write.root, "test", partition=10)
    assert pairs(tenth) == [("a/abbey_001/sun_2.jpg", 1)]
    with pytest.raises(DatasetError, match="partition=11"):
        open_dataset("sun397", write.root, "test", partition=11)
    with pytest.raises(DatasetError, match=r"Training_02\.txt"):
        open_dataset("sun397", write.root, "train", partition=2)


# ------------------------------------------------------------------------------------------ pets


def pets(write, extra=()):
    names = [f"{'Breed' if i % 2 else 'dog'}_{i:02d}_long" for i in range(37)]
    head = "#Image CLASS-ID SPECIES BREED ID"
    rows = [f"{name}_1 {i + 1} 1 1" for i, name in enumerate(names)]
    write.text("annotations/trainval.txt", [head, *reversed(rows)])
    write.text("annotations/test.txt", [f"{names[36]}_2 37 2 25", f"{names[0]}_2 1 1 1", *extra])
    write.photos(*(f"images/{name}_{k}.jpg" for name in names for k in (1, 2)))
    write.text("images/notes.mat", ["left over"])
    return names


def test_oxford_pets(write) -> None:
    names = pets(write)
    train = open_dataset("oxford-pets", write.root, "train")
    assert train.split == "train" and train.own_split == "trainval"
    assert train.classes == tuple(names)
    assert pairs(train) == [(f"images/{names[i]}_1.jpg", i) for i in reversed(range(37))]
    assert open_dataset("oxford-pets", write.root, "trainval").ids == train.ids
    test = open_dataset("oxford-pets", write.root, "test")
    assert pairs(test) == [(f"images/{names[36]}_2.jpg", 36), (f"images/{names[0]}_2.jpg", 0)]


@pytest.mark.parametrize("label", ["0", "38", "-1", "x"])
def test_a_label_outside_the_classes(write, label: str) -> None:
    pets(write, [f"dog_00_long_1 {label} 1 1"])
    with pytest.raises(DatasetError, match=f"'{label}'"):
        open_dataset("oxford-pets", write.root, "test")


def test_pets_with_two_names_for_one_class(write) -> None:
    pets(write, ["Breed_01_long_2 1 1 1"])
    with pytest.raises(DatasetError, match="dog_00_long"):
        open_dataset("oxford-pets", write.root, "test")


def test_a_line_with_too_few_columns(write) -> None:
    pets(write, ["Breed_01_long_2"])
    with pytest.raises(DatasetError, match="columns"):
        open_dataset("oxford-pets", write.root, "test")


def test_images_listed_twice_get_a_note(write) -> None:
    pets(write, ["dog_00_long_2 1 1 1"])
    notes = open_dataset("oxford-pets", write.root, "test").notes
    assert any("listed more than once, such as images/dog_00_long_2.jpg" in note for note in notes)


# ------------------------------------------------------------------------------------------- cub


def cub(write):
    names = [f"{i:03d}.Bird_{i}" for i in range(1, 201)]
    images = [f"{name}/{name}_{k}.jpg" for name in names for k in (1, 2)]
    write.text("CUB_200_2011/classes.txt", [f"{i} {name}" for i, name in enumerate(names, 1)])
    write.text("CUB_200_2011/images.txt", [f"{i} {name}" for i, name in enumerate(images, 1)])
    write.text(
        "CUB_200_2011/image_class_labels.txt", [f"{i} {(i + 1) // 2}" for i in range(1, 401)]
    )
    write.text("CUB_200_2011/train_test_split.txt", [f"{i} {i % 2}" for i in range(1, 401)])
    write.photos(*(f"CUB_200_2011/images/{name}" for name in images))
    return names


def test_cub200(write) -> None:
    names = cub(write)
    for split, k in (("train", 1), ("test", 2)):
        dataset = open_dataset("cub-200", write.root, split)
        assert dataset.classes == tuple(names)
        expected = [(f"images/{name}/{name}_{k}.jpg", i) for i, name in enumerate(names)]
        assert pairs(dataset) == expected


@pytest.mark.parametrize(
    ("file", "line", "match"),
    [
        ("image_class_labels.txt", "3 201", "'201'"),
        ("image_class_labels.txt", "3000 1", "image 3"),
        ("train_test_split.txt", "3 2", "'2'"),
        ("classes.txt", "7 007.Bird", r"/classes\.txt"),
    ],
)
def test_cub200_with_bad_lists(write, file: str, line: str, match: str) -> None:
    cub(write)
    path = write.root / "CUB_200_2011" / file
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines))
    with pytest.raises(DatasetError, match=match):
        open_dataset("cub-200", write.root, "test")


# ---------------------------------------------------------------------------------------- places


def test_places365_with_the_official_lists(write) -> None:
    names = [f"a/attic_{i:03d}" for i in range(364)] + ["z/zoo/outdoor"]
    write.text(
        "categories_places365.txt", [f"/{name} {i}" for i, name in reversed([*enumerate(names)])]
    )
    write.text(
        "places365_train_standard.txt", [f"/{name}/1.jpg {i}" for i, name in enumerate(names)]
    )
    write.text(
        "places365_val.txt", ["Places365_val_00000001.jpg 364", "Places365_val_00000002.jpg 0"]
    )
    write.photos(*(f"data_large_standard/{name}/1.jpg" for name in names))
    write.photos("val_256/Places365_val_00000001.jpg", "val_256/Places365_val_00000002.jpg")
    train = open_dataset("places365", write.root, "train")
    assert train.classes[:1] == ("attic_000",) and train.classes[364] == "zoo/outdoor"
    assert pairs(train) == [(f"data_large_standard/{n}/1.jpg", i) for i, n in enumerate(names)]
    val = open_dataset("places365", write.root, "val")
    assert pairs(val) == [
        ("val_256/Places365_val_00000001.jpg", 364),
        ("val_256/Places365_val_00000002.jpg", 0),
    ]
    write.text("places365_val.txt", ["Places365_val_00000001.jpg 365"])
    with pytest.raises(DatasetError, match="'365'"):
        open_dataset("places365", write.root, "val")


def test_places365_easy_format(write) -> None:
    names = [f"attic_{i:03d}" for i in range(365)]
    write.photos(*(f"places365_standard/train/{name}/1.jpg" for name in names))
    write.photos("places365_standard/val/attic_200/9.jpg")
    train = open_dataset("places365", write.root, "train")
    assert pairs(train) == [(f"train/{name}/1.jpg", i) for i, name in enumerate(names)]
    val = open_dataset("places365", write.root / "places365_standard", "val")
    assert pairs(val) == [("val/attic_200/9.jpg", 200)]
    shutil.rmtree(write.root / "places365_standard/train/attic_364")
    with pytest.raises(DatasetError, match="364 classes"):
        open_dataset("places365", write.root, "train")


# ----------------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_follows_the_data_and_not_the_place(write, tmp_path_factory) -> None:
    pets(write)
    first = open_dataset("oxford-pets", write.root, "test").fingerprint()
    assert len(first) == 64 and int(first, 16) >= 0
    copy = tmp_path_factory.mktemp("copy") / "elsewhere"
    shutil.copytree(write.root, copy)
    assert open_dataset("oxford-pets", copy, "test").fingerprint() == first
    assert open_dataset("oxford-pets", copy, "train").fingerprint() != first
    # One byte more in an image, another name in a list, another label: all are seen.
    seen = {first}
    image = copy / "images/dog_00_long_2.jpg"
    image.write_bytes(image.read_bytes() + b"\0")
    seen.add(open_dataset("oxford-pets", copy, "test").fingerprint())
    listed = copy / "annotations/test.txt"
    listed.write_text(listed.read_text().replace("dog_00_long_2 ", "dog_00_long_1 "))
    seen.add(open_dataset("oxford-pets", copy, "test").fingerprint())
    listed.write_text(listed.read_text().replace(" 37 2 25", " 36 2 25"))
    seen.add(open_dataset("oxford-pets", copy, "test").fingerprint())
    assert len(seen) == 4


def test_the_fingerprint_follows_the_options(write) -> None:
    write.photos("train/a/1.jpg")
    plain = open_dataset("folder", write.root, "train").fingerprint()
    loose = open_dataset("folder", write.root, "train", allow_empty_classes=True).fingerprint()
    assert plain != loose


def test_the_fingerprint_names_a_file_that_has_gone(write) -> None:
    write.photos("train/a/1.jpg")
    dataset = open_dataset("folder", write.root, "train")
    (write.root / "train/a/1.jpg").unlink()
    with pytest.raises(DatasetError, match=r"1\.jpg"):
        dataset.fingerprint()


def test_datasets_travel_to_worker_processes(write) -> None:
    write.photos("train/a/1.jpg", "train/b/1.jpg")
    dataset = open_dataset("folder", write.root, "train")
    again = pickle.loads(pickle.dumps(dataset))
    assert pairs(again) == pairs(dataset) and again.fingerprint() == dataset.fingerprint()
    assert repr(again) == f"<folder train: 2 samples in {str(write.root)!r}>"


def test_labels_of_another_task_are_refused(write) -> None:
    write.photos("train/a/1.jpg")
    dataset = open_dataset("folder", write.root, "train")
    with pytest.raises(DatasetError, match="depth"):
        dataset.depth(0)
    with pytest.raises(DatasetError, match="segmentation"):
        dataset.mask(0)
    with pytest.raises(IndexError):
        dataset.label(1)


def test_names_of_any_bytes(tmp_path) -> None:
    for name in (b"red/a\xff.png", b"blue/b.png"):
        path = tmp_path / "train" / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    dataset = open_dataset("folder", tmp_path, "train")
    assert len(dataset.fingerprint()) == len(dataset.state_on_disk()) == 64
    assert len(digest(dataset.ids)) == 64
