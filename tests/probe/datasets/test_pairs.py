"""Label files read as stored, images turned as their labels lie, pairs that fit together."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from veca.probe.datasets import DatasetError, check_dataset, open_dataset
from veca.probe.datasets.pairs import label_size, read_values


def png(path, values: np.ndarray, bits: int) -> None:
    """A greyscale PNG of `bits` bits per pixel, packed by hand (Pillow writes 1, 8 and 16 only)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    height, width = values.shape
    rows = b""
    for row in values:
        packed = np.unpackbits(row.astype(np.uint8)[:, None], axis=1)[:, 8 - bits :]
        rows += b"\0" + np.packbits(packed.ravel()).tobytes()
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_values_are_those_stored_whatever_the_bit_depth(tmp_path, bits: int) -> None:
    values = np.arange(35).reshape(5, 7) % 2**bits
    path = tmp_path / "labels.png"
    png(path, values, bits)
    read, depth = read_values(path)
    assert np.array_equal(read, values) and depth == bits
    assert label_size(path) == (5, 7)


def test_palette_indices_16_bits_tiff_and_npy(write, tmp_path) -> None:
    values = np.arange(48).reshape(6, 8)
    write.labels("p.png", values, palette=True)
    assert np.array_equal(read_values(tmp_path / "p.png")[0], values)
    # Few colours: Pillow packs the indices into 4 bits each.
    write.labels("p4.png", values % 16, palette=True)
    Image.open(tmp_path / "p4.png").save(tmp_path / "p4.png", bits=4)
    assert np.array_equal(read_values(tmp_path / "p4.png")[0], values % 16)
    write.labels("w.png", (values * 1000).astype(np.uint16))
    read, bits = read_values(tmp_path / "w.png")
    assert np.array_equal(read, values * 1000) and bits == 16
    Image.fromarray(values.astype(np.float32) / 3).save(tmp_path / "f.tif")
    assert np.array_equal(read_values(tmp_path / "f.tif")[0], values.astype(np.float32) / 3)
    np.save(tmp_path / "a.npy", values / 7)
    assert np.array_equal(read_values(tmp_path / "a.npy")[0], values / 7)
    assert label_size(tmp_path / "a.npy") == (6, 8)


@pytest.mark.parametrize("kind", ["RGB", "RGBA", "LA"])
def test_colours_are_not_labels(tmp_path, kind: str) -> None:
    Image.new(kind, (4, 4)).save(tmp_path / "c.png")
    with pytest.raises(DatasetError, match=rf"mode {kind}\b"):
        read_values(tmp_path / "c.png")


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(DatasetError, match=r"gone\.png") as caught:
        read_values(tmp_path / "gone.png")
    assert caught.value.missing
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    with pytest.raises(DatasetError, match=r"bad\.png"):
        read_values(tmp_path / "bad.png")
    # A lossy mask is no mask, whatever its name says.
    buffer = io.BytesIO()
    Image.new("L", (4, 4)).save(buffer, "JPEG")
    (tmp_path / "jpeg.png").write_bytes(buffer.getvalue())
    with pytest.raises(DatasetError, match=r"jpeg\.png"):
        read_values(tmp_path / "jpeg.png")
    # A pickle in a .npy file is not loaded.
    np.save(tmp_path / "o.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(DatasetError, match=r"o\.npy"):
        read_values(tmp_path / "o.npy")
    np.save(tmp_path / "three.npy", np.zeros((2, 2, 3)))
    with pytest.raises(DatasetError, match=r"three\.npy"):
        read_values(tmp_path / "three.npy")


def test_a_mask_of_another_size_than_its_image(write) -> None:
    write.image("train/a.png", 6, 8)
    write.labels("trainannot/a.png", np.zeros((8, 6)))
    dataset = open_dataset("camvid", write.root, "train")
    for read in (dataset.mask, dataset.image, dataset.size):
        with pytest.raises(DatasetError, match="8 x 6"):
            read(0)
    check = check_dataset("camvid", write.root, "train", contents=True)
    assert "8 x 6" in check.splits["train"].problems[0]
    assert check_dataset("camvid", write.root, "train").ok


def turned(write, name: str, orientation: int, height: int = 6, width: int = 8):
    """A PNG with an EXIF orientation; returns its pixels as stored."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return write.image(name, height, width, exif=exif)


UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_public_masks_lie_on_the_pixels_as_stored(write, orientation: int) -> None:
    stored = turned(write, "train/a.png", orientation)
    write.labels("trainannot/a.png", np.zeros((6, 8)))
    dataset = open_dataset("camvid", write.root, "train")
    assert np.array_equal(np.asarray(dataset.image(0)), stored)
    assert dataset.size(0) == (6, 8) == dataset.mask(0).shape


@pytest.mark.parametrize("orientation", range(5, 9))
def test_a_mask_of_the_upright_size_lies_on_the_upright_image(write, orientation: int) -> None:
    stored = turned(write, "images/train/a.png", orientation)
    write.labels("masks/train/a.png", np.zeros((8, 6)))
    dataset = open_dataset("images-masks", write.root, "train", classes=["a"])
    assert np.array_equal(np.asarray(dataset.image(0)), UPRIGHT[orientation](stored))
    write.labels("masks/train/a.png", np.zeros((6, 8)))
    assert np.array_equal(np.asarray(dataset.image(0)), stored)


@pytest.mark.parametrize(("orientation", "size"), [(3, (6, 8)), (2, (6, 8)), (6, (8, 8))])
def test_own_masks_of_turned_images_are_refused_where_the_size_cannot_tell(
    write, orientation: int, size: tuple[int, int]
) -> None:
    turned(write, "images/train/a.png", orientation, *size)
    write.labels("masks/train/a.png", np.zeros(size))
    dataset = open_dataset("images-masks", write.root, "train", classes=["a"])
    with pytest.raises(DatasetError, match=f"orientation {orientation}"):
        dataset.mask(0)


def test_every_image_needs_its_mask_and_the_other_way_round(write) -> None:
    for name in "ab":
        write.image(f"train/{name}.png")
    for name in "bc":
        write.labels(f"trainannot/{name}.png", np.zeros((6, 8)))
    with pytest.raises(DatasetError) as caught:
        open_dataset("camvid", write.root, "train")
    assert caught.value.missing == ("train/c.*", "trainannot/a.png")


def test_two_images_of_one_name(write) -> None:
    write.image("train/a.png")
    write.image("train/a.jpg")
    write.labels("trainannot/a.png", np.zeros((6, 8)))
    with pytest.raises(DatasetError, match=r"train/a\.jpg"):
        open_dataset("camvid", write.root, "train")


def test_the_fingerprint_follows_the_masks(write) -> None:
    write.image("train/a.png")
    write.labels("trainannot/a.png", np.zeros((6, 8)))
    first = open_dataset("camvid", write.root, "train").fingerprint()
    assert open_dataset("camvid", write.root, "train").fingerprint() == first
    write.labels("trainannot/a.png", np.arange(48).reshape(6, 8) % 11)
    assert open_dataset("camvid", write.root, "train").fingerprint() != first
