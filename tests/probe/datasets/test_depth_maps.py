"""Depth sets in their layouts: metres and invalid pixels checked value by value, and the crops."""

from __future__ import annotations

import numpy as np
import pytest

from veca.probe.datasets import DatasetError, check_dataset, open_dataset
from veca.probe.datasets.depth_maps import EIGEN_NYU, GARG, KITTI_BENCHMARK, NYU_BORDER, Crop


def expect(dataset, i: int, metres) -> None:
    """`metres` holds None where the depth is invalid."""
    depth = dataset.depth(i)
    assert depth.dtype == np.float32
    wanted = np.array([[np.nan if m is None else m for m in row] for row in metres], np.float32)
    np.testing.assert_array_equal(depth, wanted)
    assert np.asarray(dataset.image(i)).shape[:2] == depth.shape == dataset.size(i)


def words(values) -> np.ndarray:
    return np.array(values, dtype=np.uint16)


# -------------------------------------------------------------------------------------------- NYU


@pytest.mark.parametrize(
    ("lists", "train", "test"),
    [("nyu_{}.txt", "", ""), ("nyudepthv2_{}_files_with_gt.txt", "sync/", "official_splits/test/")],
)
def test_nyuv2(write, lists: str, train: str, test: str) -> None:
    stored = words([[0, 1, 2, 9_999], [10_000, 10_001, 65_535, 1_500]])
    names = ["kitchen_0028b/{}00045", "bath_01/{}00002", "bath_01/{}00001"]
    for folder, slash, split in ((train, "/", "train"), (test, "", "test")):
        rows = []
        for name in names:
            image, depth = name.format("rgb_") + ".jpg", name.format("sync_depth_") + ".png"
            write.image(folder + image, 2, 4)
            write.labels(folder + depth, stored)
            rows.append(f"{slash}{image} {slash}{depth} 518.8579")
        write.text(lists.format(split), rows)
        dataset = open_dataset("nyuv2", write.root, split)
        assert dataset.ids == (
            f"{folder}bath_01/rgb_00001.jpg",
            f"{folder}bath_01/rgb_00002.jpg",
            f"{folder}kitchen_0028b/rgb_00045.jpg",
        )
        # Scored is 0.001 < depth < 10, both ends out, as the reference does.
        for i in range(3):
            expect(dataset, i, [[None, None, 0.002, 9.999], [None, None, None, 1.5]])
        assert dataset.groups == (0, 0, 1)
    assert dataset.max_depth == 10.0 and dataset.min_depth == 1e-3
    assert dataset.classes == () and dataset.num_classes == 0
    assert dataset.eval_crop is EIGEN_NYU and dataset.train_crop is NYU_BORDER
    (write.root / test / "bath_01/sync_depth_00001.png").unlink()
    with pytest.raises(DatasetError, match=r"bath_01/sync_depth_00001\.png"):
        open_dataset("nyuv2", write.root, "test")


def test_depth_of_8_bits_is_refused_where_16_are_meant(write) -> None:
    write.image("a/rgb_1.jpg", 2, 2)
    write.labels("a/sync_depth_1.png", np.full((2, 2), 200))
    write.text("nyu_test.txt", ["a/rgb_1.jpg a/sync_depth_1.png 518.8579"])
    dataset = open_dataset("nyuv2", write.root, "test")
    with pytest.raises(DatasetError, match="8 bits"):
        dataset.depth(0)


# ------------------------------------------------------------------------------------------ KITTI


@pytest.mark.parametrize("lists", ["kitti_eigen_{}.txt", "eigen_{}_files_with_gt.txt"])
def test_kitti_skips_and_counts_images_without_depth(write, lists: str) -> None:
    stored = words([[0, 1, 256, 20_479], [20_480, 65_535, 384, 2_560]])
    rows = []
    for drive, frame in (("0009", 21), ("0002", 69), ("0002", 54)):
        sync = f"2011_09_26_drive_{drive}_sync"
        image = f"2011_09_26/{sync}/image_02/data/{frame:010d}.png"
        depth = f"{sync}/proj_depth/groundtruth/image_02/{frame:010d}.png"
        write.image(f"input/{image}", 2, 4)
        write.labels(f"gt_depth/{depth}", stored)
        rows.append(f"{image} {depth} 721.5377")
    lost = "2011_09_26/2011_09_26_drive_0002_sync/image_02/data/0000000075.png"
    write.text(lists.format("test"), [*rows, f"{lost} None 721.5377"])
    dataset = open_dataset("kitti", write.root, "test")
    assert [name[-14:] for name in dataset.ids] == [f"{n:010d}.png" for n in (54, 69, 21)]
    assert dataset.groups == (0, 0, 1)
    assert dataset.skipped == ((f"input/{lost}", f"{lists.format('test')} has no depth for it"),)
    assert any("1 left out, such as" in note for note in dataset.notes)
    metres = [[None, 1 / 256, 1.0, 20_479 / 256], [None, None, 1.5, 10.0]]
    for i in range(3):
        expect(dataset, i, metres)
    assert dataset.max_depth == 80.0
    assert dataset.image_crop is KITTI_BENCHMARK and dataset.eval_crop is GARG


# ------------------------------------------------------------------------------------------- crops


def test_crops() -> None:
    assert EIGEN_NYU.box(480, 640) == (45, 471, 41, 601)
    assert EIGEN_NYU.box(240, 320) == (22, 235, 20, 300)
    assert NYU_BORDER.box(480, 640) == (45, 472, 43, 608)
    # The benchmark crop: the bottom 352 rows, 1216 columns from the middle.
    for height, width, left in ((375, 1242, 13), (376, 1241, 12), (352, 1216, 0), (370, 1224, 4)):
        box = KITTI_BENCHMARK.box(height, width)
        assert box == (height - 352, height, left, left + 1216)
    assert GARG.box(352, 1216) == (143, 349, 43, 1172)
    with pytest.raises(DatasetError, match="352 x 1216"):
        KITTI_BENCHMARK.box(100, 200)
    assert Crop("own", "fractions", (0.0, 1.0, 0.25, 0.75)).box(10, 8) == (0, 10, 2, 6)


# ------------------------------------------------------------------------------------------- plain


@pytest.mark.parametrize("order", ["rgb/train", "train/rgb"])
def test_rgb_and_depth(write, order: str) -> None:
    depths = order.replace("rgb", "depth")
    write.image(f"{order}/b.jpg", 2, 3)
    write.labels(f"{depths}/b.png", words([[0, 5, 100], [400, 401, 10]]))
    write.image(f"{order}/a.png", 1, 4)
    np.save(write.path(f"{depths}/a.npy"), np.array([[np.nan, np.inf, -100.0, 250.0]]))
    write.image(f"{order}/c.png", 1, 2)
    write.labels(f"{depths}/c.png", [[0, 200]])  # 8 bit
    write.json("dataset.json", {"depth_scale": 100, "max_depth": 4})
    dataset = open_dataset("rgb-depth", write.root, "train")
    assert dataset.ids == (f"{order}/a.png", f"{order}/b.jpg", f"{order}/c.png")
    assert (dataset.depth_scale, dataset.max_depth, dataset.min_depth) == (100.0, 4.0, 1e-3)
    expect(dataset, 0, [[None, None, None, 2.5]])
    expect(dataset, 1, [[None, 0.05, 1.0], [4.0, None, 0.1]])
    expect(dataset, 2, [[None, 2.0]])
    assert dataset.groups is None and dataset.eval_crop is None
    nearer = open_dataset("rgb-depth", write.root, "train", max_depth=2, min_depth=0.5)
    expect(nearer, 1, [[None, None, 1.0], [None, None, None]])
    assert nearer.fingerprint() != dataset.fingerprint()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_depth": 10}, "'depth_scale'.*given"),
        ({"depth_scale": 1000}, "'max_depth'"),
        ({"depth_scale": 0, "max_depth": 10}, "is 0"),
        ({"depth_scale": "mm", "max_depth": 10}, "'mm'"),
        ({"depth_scale": True, "max_depth": 10}, "True"),
        ({"depth_scale": 1, "max_depth": 1, "min_depth": 2}, "'min_depth'"),
        ({"scale": 1}, "'scale'"),
    ],
)
def test_settings_that_are_not_right(write, settings, match: str) -> None:
    write.image("rgb/train/a.png")
    write.labels("depth/train/a.png", np.ones((6, 8)))
    write.json("dataset.json", settings)
    with pytest.raises(DatasetError, match=match):
        open_dataset("rgb-depth", write.root, "train")


def test_depth_that_is_all_invalid(write) -> None:
    write.image("rgb/train/a.png", 2, 2)
    write.labels("depth/train/a.png", words([[0, 0], [50_000, 0]]))
    dataset = open_dataset("rgb-depth", write.root, "train", depth_scale=1000, max_depth=10)
    with pytest.raises(DatasetError, match="valid depth"):
        dataset.depth(0)
    assert np.isnan(dataset.depth(0, allow_empty=True)).all()
    options = {"depth_scale": 1000, "max_depth": 10}
    check = check_dataset("rgb-depth", write.root, "train", contents=True, **options)
    assert "no valid depth" in check.splits["train"].problems[0]


def test_depth_of_another_size_than_its_image(write) -> None:
    write.image("rgb/train/a.png", 4, 4)
    np.save(write.path("depth/train/a.npy"), np.ones((2, 2)))
    dataset = open_dataset("rgb-depth", write.root, "train", depth_scale=1, max_depth=10)
    with pytest.raises(DatasetError, match="2 x 2"):
        dataset.depth(0)


# -------------------------------------------------------------------------------------------- SCAU


def test_scau_is_split_by_time(write) -> None:
    stored = words([[0, 1_000, 10_000], [10_001, 65_535, 1_234]])
    numbers = [9 * i for i in range(12)]
    for number in (numbers[5:], numbers[:5]):
        for frame in number:
            # No leading zeros: the order is that of the numbers, not of the names.
            write.image(f"rgb/{frame}.jpg", 2, 3)
            write.labels(f"depth/{frame}.png", stored)
    train = open_dataset("scau-rgbd", write.root, "train")
    test = open_dataset("scau-rgbd", write.root, "test")
    frames = [int(name[4:-4]) for name in train.ids + test.ids]
    assert frames == numbers and (len(train), len(test)) == (7, 5)
    expect(train, 0, [[None, 1.0, 10.0], [None, None, 1.234]])
    assert train.groups == (0, 0, 1, 2, 3, 4, 5)
    assert test.groups == (6, 6, 7, 8, 9) and test.in_time
    write.image("rgb/last.jpg", 2, 3)
    write.labels("depth/last.png", stored)
    with pytest.raises(DatasetError, match=r"last\.jpg"):
        open_dataset("scau-rgbd", write.root, "train")
