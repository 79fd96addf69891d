"""ImageNet-1K in its layouts, and the sets that share its classes."""

from __future__ import annotations

import numpy as np
import pytest

from veca.probe.datasets import DatasetError, open_dataset

# In the order that folders are not sorted in on the disk, with gaps as the real ones have.
WNIDS = [f"n{10000000 + 7 * i:08d}" for i in range(1000)]


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}.JPEG"


def folders(write, split: str, prefix: str = "") -> None:
    for i, wnid in enumerate(WNIDS):
        name = val_name(i + 1) if split == "val" else f"{wnid}_{i}.JPEG"
        write.photos(f"{prefix}{split}/{wnid}/{name}")


def flat(write, count: int, prefix: str = "") -> None:
    write.photos(*(f"{prefix}val/{val_name(i)}" for i in range(1, count + 1)))


@pytest.mark.parametrize("prefix", ["", "ILSVRC/Data/CLS-LOC/"])
def test_class_folders(write, prefix: str) -> None:
    folders(write, "train", prefix)
    write.photos(f"{prefix}val/{WNIDS[7]}/{val_name(3)}", f"{prefix}val/{WNIDS[999]}/{val_name(1)}")
    train = open_dataset("imagenet-1k", write.root, "train")
    assert train.classes == tuple(WNIDS)
    assert train.targets.tolist() == list(range(1000))
    assert train.ids[5] == f"{prefix}train/{WNIDS[5]}/{WNIDS[5]}_5.JPEG"
    val = open_dataset("imagenet-1k", write.root, "val")
    assert dict(zip(val.ids, val.targets.tolist(), strict=True)) == {
        f"{prefix}val/{WNIDS[7]}/{val_name(3)}": 7,
        f"{prefix}val/{WNIDS[999]}/{val_name(1)}": 999,
    }


def test_flat_validation_images_with_numbers(write) -> None:
    flat(write, 3)
    write.text("val.txt", [f"{val_name(2)} 999", f"{val_name(1)} 0", f"{val_name(3)} 65"])
    val = open_dataset("imagenet-1k", write.root, "val")
    assert val.targets.tolist() == [0, 999, 65]
    assert val.ids == tuple(f"val/{val_name(i)}" for i in (1, 2, 3))


def test_flat_validation_images_with_wordnet_ids(write) -> None:
    folders(write, "train")
    flat(write, 2)
    write.text("val/val.txt", [f"{val_name(1)} {WNIDS[400]}", f"{val_name(2)} {WNIDS[2]}"])
    val = open_dataset("imagenet-1k", write.root, "val")
    assert val.targets.tolist() == [400, 2] and val.classes == tuple(WNIDS)
    write.text("val/val.txt", [f"{val_name(1)} n00000001", f"{val_name(2)} {WNIDS[2]}"])
    with pytest.raises(DatasetError, match="n00000001"):
        open_dataset("imagenet-1k", write.root, "val")


def test_flat_validation_images_with_kaggles_list(write) -> None:
    prefix = "ILSVRC/Data/CLS-LOC/"
    flat(write, 1000, prefix)
    rows = [f"ILSVRC2012_val_{i + 1:08d},{WNIDS[999 - i]} 1 2 3 4 " for i in range(1000)]
    write.text("LOC_val_solution.csv", ["ImageId,PredictionString", *rows])
    val = open_dataset("imagenet-1k", write.root, "val")
    assert val.targets.tolist() == list(range(999, -1, -1))


def devkit(write, images: int) -> tuple[list[int], list[str]]:
    """A ground truth in the development kit's own order of the classes."""
    order = np.random.default_rng(1).permutation(1000)
    wnids = [WNIDS[i] for i in order]  # of the kit's classes 1, 2, ...
    truth = np.random.default_rng(2).integers(1, 1001, 50_000)
    folder = "ILSVRC2012_devkit_t12/data/"
    write.text(f"{folder}ILSVRC2012_validation_ground_truth.txt", truth)
    flat(write, images)
    return [WNIDS.index(wnids[number - 1]) for number in truth[:images]], wnids


def test_the_development_kits_numbers_are_translated(write) -> None:
    expected, wnids = devkit(write, 20)
    write.text(
        "ILSVRC2012_devkit_t12/data/map_clsloc.txt",
        [f"{wnid} {i} name" for i, wnid in enumerate(wnids, 1)],
    )
    val = open_dataset("imagenet-1k", write.root, "val")
    assert val.targets.tolist() == expected and val.classes == tuple(WNIDS)


def test_the_development_kits_own_table(write) -> None:
    scipy_io = pytest.importorskip("scipy.io", reason="meta.mat needs scipy (veca[probe])")
    expected, wnids = devkit(write, 20)
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(float(i), wnid, "a word", 0.0) for i, wnid in enumerate(wnids, 1)]
    rows.append((1001.0, "n00000001", "a group of classes", 3.0))
    table = np.array(rows, dtype=fields).reshape(-1, 1)
    meta = write.path("ILSVRC2012_devkit_t12/data/meta.mat")
    scipy_io.savemat(meta, {"synsets": table})
    assert open_dataset("imagenet-1k", write.root, "val").targets.tolist() == expected
    meta.write_bytes(b"junk" * 100)
    with pytest.raises(DatasetError, match=r"meta\.mat"):
        open_dataset("imagenet-1k", write.root, "val")


def test_the_ground_truth_alone_is_not_enough(write) -> None:
    devkit(write, 2)
    with pytest.raises(DatasetError, match=r"map_clsloc\.txt"):
        open_dataset("imagenet-1k", write.root, "val")


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([f"{val_name(1)} 0"], "val_00000002"),
        ([f"{val_name(i)} 0" for i in (1, 2, 3)], "val_00000003"),
        ([f"{val_name(1)} 0", f"{val_name(2)} 1000"], "'1000'"),
        ([f"{val_name(1)} 0", f"{val_name(2)} {WNIDS[0]}"], "WordNet"),
        ([val_name(1)], "val_00000001"),
        ([f"{val_name(i)} {WNIDS[i]}" for i in (1, 2)], "2 classes"),
    ],
)
def test_lists_that_do_not_fit(write, rows: list[str], match: str) -> None:
    flat(write, 2)
    write.text("val.txt", rows)
    with pytest.raises(DatasetError, match=match):
        open_dataset("imagenet-1k", write.root, "val")


def test_a_subset_is_not_imagenet(write) -> None:
    write.photos("train/n01440764/1.JPEG", "val/n01440764/1.JPEG")
    with pytest.raises(DatasetError, match="1 of them"):
        open_dataset("imagenet-1k", write.root, "val")
    write.photos("train/tench/1.JPEG")
    with pytest.raises(DatasetError, match="'tench'"):
        open_dataset("imagenet-1k", write.root, "train")


# ------------------------------------------------------------------------------------------ ReaL


def test_real_labels(write) -> None:
    folders(write, "val")
    table: list[list[int]] = [[i % 1000] for i in range(50_000)]
    table[0], table[1], table[2] = [5, 3, 999], [], [0]
    write.json("real.json", table)
    real = open_dataset("imagenet-real", write.root, "val")
    assert real.ids[2].endswith(val_name(3))
    assert [real.labels(i) for i in range(5)] == [[5, 3, 999], [], [0], [3], [4]]
    assert real.unscored == 1 and any("1 images have no label" in note for note in real.notes)
    assert real.classes == tuple(WNIDS)
    with pytest.raises(DatasetError, match=r"labels\(i\)"):
        real.label(0)
    first = real.fingerprint()
    table[4] = [4, 5]
    write.json("real.json", table)
    assert open_dataset("imagenet-real", write.root, "val").fingerprint() != first


def test_real_labels_that_are_not_right(write) -> None:
    flat(write, 2)
    write.text("val.txt", [f"{val_name(1)} 0", f"{val_name(2)} 1"])
    write.json("real.json", [[1]] * 49_999)
    with pytest.raises(DatasetError, match="50,000"):
        open_dataset("imagenet-real", write.root, "val")
    for wrong in ([1000], [-1], ["cat"], 7, [True]):
        write.json("real.json", [[1], wrong] + [[1]] * 49_998)
        with pytest.raises(DatasetError, match="val_00000002"):
            open_dataset("imagenet-real", write.root, "val")
    write.path("real.json").write_text("[[1],")
    with pytest.raises(DatasetError, match="JSON"):
        open_dataset("imagenet-real", write.root, "val")


def test_real_needs_the_official_names(write) -> None:
    write.photos("val/cat.JPEG")
    write.text("val.txt", ["cat.JPEG 1"])
    write.json("real.json", [[1]] * 50_000)
    with pytest.raises(DatasetError, match=r"cat\.JPEG"):
        open_dataset("imagenet-real", write.root, "val")


# -------------------------------------------------------------------------------------------- V2


def test_imagenet_v2_reads_folder_names_as_numbers(write) -> None:
    base = "imagenetv2-matched-frequency-format-val"
    write.photos(*(f"{base}/{i}/image.jpeg" for i in range(1000)))
    for root in (write.root, write.root / base):
        dataset = open_dataset("imagenet-v2", root, "test")
        assert dataset.targets.tolist() == list(range(1000))
        assert all(int(name.split("/")[0]) == i for i, name in enumerate(dataset.ids))
    (write.root / base / "10/image.jpeg").unlink()
    with pytest.raises(DatasetError, match=r"val/10\b"):
        open_dataset("imagenet-v2", write.root, "test")
    (write.root / base / "10").rmdir()
    with pytest.raises(DatasetError, match=r"missing 10\b"):
        open_dataset("imagenet-v2", write.root, "test")
