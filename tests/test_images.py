"""Reading, fitting and finding images: real files, exact sizes, and the words of the errors."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import veca
from veca import VecaConfig
from veca.config import DEFAULT_SIZE
from veca.errors import ImageError
from veca.images import (
    EXTENSIONS,
    FITS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    denormalize,
    find_images,
    normalize,
    preprocess,
    read_image,
    target_size,
    to_tensor,
)

ORIENTATION = 0x0112
WHITE, BLACK, RED, BLUE = (255, 255, 255), (0, 0, 0), (255, 0, 0), (0, 0, 255)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def save(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def pixels_of(image: Image.Image) -> list[list[tuple[int, ...]]]:
    return [[tuple(int(v) for v in pixel) for pixel in row] for row in np.asarray(image)]


def png(width: int, height: int, depth: int, colour: int, rows: bytes, trns: bytes = b"") -> bytes:
    """A PNG file made by hand, for what Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    transparency = chunk(b"tRNS", trns) if trns else b""
    body = transparency + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body


# ---------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".tiff", ".ppm", ".pnm"])
def test_lossless_formats_give_the_exact_pixels(tmp_path: Path, suffix: str) -> None:
    original = noise(7, 5)
    image = read_image(save(tmp_path / f"image{suffix}", original))
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), np.asarray(original))


def test_lossless_webp_and_gif_give_the_exact_pixels(tmp_path: Path) -> None:
    original = noise(7, 5)
    webp = read_image(save(tmp_path / "a.webp", original, lossless=True))
    assert np.array_equal(np.asarray(webp), np.asarray(original))
    gif = read_image(save(tmp_path / "a.gif", original))  # 35 colours fit a palette
    assert np.array_equal(np.asarray(gif), np.asarray(original))


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg", ".webp"])
def test_lossy_formats_are_close(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"image{suffix}", Image.new("RGB", (20, 30), (200, 100, 50)), quality=95)
    image = read_image(path)
    assert (image.mode, image.size) == ("RGB", (20, 30))
    assert np.abs(np.asarray(image).astype(int) - [200, 100, 50]).max() <= 4


def test_phone_jpeg_with_several_pictures_reads_the_first(tmp_path: Path) -> None:
    path = tmp_path / "phone.jpg"
    first, second = Image.new("RGB", (16, 16), RED), Image.new("RGB", (16, 16), BLUE)
    first.save(path, "MPO", save_all=True, append_images=[second])
    red, _, blue = read_image(path).getpixel((8, 8))
    assert red > 240 and blue < 15


@pytest.mark.parametrize("suffix", [".gif", ".tiff", ".png", ".webp"])
def test_multi_frame_files_read_the_first_frame(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    path = tmp_path / f"frames{suffix}"
    options = {"lossless": True} if suffix == ".webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)
    assert read_image(path).getpixel((4, 4)) == RED


def test_other_decoders_are_not_reachable(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(encode(Image.new("RGB", (8, 8)), "EPS"))
    with pytest.raises(ImageError, match=r"photo\.png.*format"):
        read_image(path)


# ------------------------------------------------------------------------------------------ modes


def test_greyscale_and_one_bit(tmp_path: Path) -> None:
    grey = Image.new("L", (2, 1))
    grey.putdata([7, 200])
    assert pixels_of(read_image(save(tmp_path / "grey.png", grey))) == [[(7,) * 3, (200,) * 3]]
    bits = Image.new("1", (2, 1))
    bits.putdata([0, 1])
    assert pixels_of(read_image(save(tmp_path / "bits.png", bits))) == [[BLACK, WHITE]]
    assert pixels_of(read_image(save(tmp_path / "bits.pbm", bits))) == [[BLACK, WHITE]]


def test_alpha_is_composited_on_white(tmp_path: Path) -> None:
    rgba = Image.new("RGBA", (3, 1))
    rgba.putdata([(255, 0, 0, 255), (255, 0, 0, 0), (0, 0, 0, 128)])
    opaque, clear, half = pixels_of(read_image(save(tmp_path / "rgba.png", rgba)))[0]
    assert (opaque, clear) == (RED, WHITE)
    assert half == pytest.approx((127,) * 3, abs=1)
    la = Image.new("LA", (3, 1))
    la.putdata([(9, 255), (9, 0), (0, 128)])
    opaque, clear, half = pixels_of(read_image(save(tmp_path / "la.png", la)))[0]
    assert (opaque, clear) == ((9,) * 3, WHITE)
    assert half == pytest.approx((127,) * 3, abs=1)


def test_webp_alpha_is_composited_on_white(tmp_path: Path) -> None:
    rgba = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    path = save(tmp_path / "clear.webp", rgba, lossless=True, exact=True)
    assert read_image(path).getpixel((0, 0)) == WHITE


@pytest.mark.parametrize(
    ("transparency", "expected"), [(1, WHITE), (b"\xff\x00", WHITE), (None, RED)]
)
def test_palette_with_and_without_transparency(
    tmp_path: Path, transparency: object, expected: tuple[int, ...]
) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 255, 255, 0, 0])
    image.putdata([0, 1])
    options = {} if transparency is None else {"transparency": transparency}
    path = save(tmp_path / "palette.png", image, **options)
    with Image.open(path) as opened:
        assert opened.mode == "P"
    assert pixels_of(read_image(path)) == [[BLUE, expected]]


def test_transparent_colour_keys() -> None:
    grey = png(2, 1, 8, 0, bytes([0, 100, 50]), struct.pack(">H", 100))
    assert pixels_of(read_image(grey)) == [[WHITE, (50,) * 3]]
    rows = b"\0" + struct.pack(">2H", 1000, 25700)
    deep = png(2, 1, 16, 0, rows, struct.pack(">H", 1000))
    assert pixels_of(read_image(deep)) == [[WHITE, (100,) * 3]]


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.array([[0, 128, 129, 257, 300, 25700, 32768, 65535]], dtype=np.uint16)
    expected = [0, 0, 1, 1, 1, 100, 128, 255]
    deep = Image.fromarray(values)
    assert deep.mode == "I;16"
    for suffix in (".png", ".tif"):
        image = read_image(save(tmp_path / f"deep{suffix}", deep))
        assert [pixel[0] for pixel in pixels_of(image)[0]] == expected, suffix
    whole = Image.fromarray(values.astype(np.int32))
    assert whole.mode == "I"
    files = [save(tmp_path / f"whole{suffix}", whole) for suffix in (".tif", ".pgm")]
    for source in (whole, *files):
        assert [pixel[0] for pixel in pixels_of(read_image(source))[0]] == expected


def test_sixteen_bit_colour_keeps_the_high_byte() -> None:
    rows = b"\0" + struct.pack(">3H", 0x1280, 0x80FF, 0xFFFF)
    assert pixels_of(read_image(png(1, 1, 16, 2, rows))) == [[(0x12, 0x80, 0xFF)]]


def test_integers_of_eight_bit_are_not_taken_for_dark_ones_of_sixteen() -> None:
    image = Image.new("L", (2, 2), 200)
    with pytest.raises(ImageError, match=r"200.*convert\('L'\)"):
        read_image(image.convert("I"))
    assert pixels_of(read_image(image.convert("I").convert("I;16"))) == [[(1,) * 3] * 2] * 2
    assert pixels_of(read_image(Image.new("I", (2, 2)))) == [[(0,) * 3] * 2] * 2


@pytest.mark.parametrize("values", [[0, 70000], [-1, 5]])
def test_integers_beyond_sixteen_bit_are_refused(values: list[int]) -> None:
    with pytest.raises(ImageError, match="65535"):
        read_image(Image.fromarray(np.array([values], dtype=np.int32)))


def test_float_images_hold_zero_to_one(tmp_path: Path) -> None:
    unit = Image.fromarray(np.array([[0, 0.5, 1]], dtype=np.float32))
    assert [p[0] for p in pixels_of(read_image(save(tmp_path / "f.tif", unit)))[0]] == [0, 128, 255]
    for bad in ([0, 1.01], [-0.1, 1], [0, 255], [0, np.nan], [0, np.inf]):
        with pytest.raises(ImageError, match="mode F"):
            read_image(Image.fromarray(np.array([bad], dtype=np.float32)))


@pytest.mark.parametrize("suffix", [".jpg", ".tif"])
@pytest.mark.parametrize(
    ("ink", "colour"),
    [
        ((0, 255, 255, 0), RED),
        ((255, 255, 0, 0), BLUE),
        ((0, 0, 0, 0), WHITE),
        ((0, 0, 0, 255), BLACK),
    ],
)
def test_cmyk_is_not_inverted(
    tmp_path: Path, suffix: str, ink: tuple[int, ...], colour: tuple[int, ...]
) -> None:
    path = save(tmp_path / f"print{suffix}", Image.new("CMYK", (16, 16), ink), quality=95)
    if suffix == ".jpg":
        assert b"Adobe" in path.read_bytes()  # the marker that says the inks are stored inverted
    assert read_image(path).getpixel((8, 8)) == pytest.approx(colour, abs=6)


@pytest.mark.parametrize("mode", ["YCbCr", "HSV"])
def test_other_colour_spaces(mode: str) -> None:
    image = read_image(Image.new("RGB", (4, 4), (200, 100, 50)).convert(mode))
    assert image.mode == "RGB"
    assert image.getpixel((0, 0)) == pytest.approx((200, 100, 50), abs=4)


def test_lab(tmp_path: Path) -> None:
    path = save(tmp_path / "lab.tif", Image.new("LAB", (4, 4), (128, 128, 128)))
    assert read_image(path).getpixel((0, 0)) == pytest.approx((119, 119, 119), abs=2)


@pytest.mark.parametrize("mode", ["La", "RGBa", "PA", "RGBX"])
def test_rare_modes(mode: str) -> None:
    source = Image.new("RGBA", (2, 2), (40, 40, 40, 255))
    source = source.convert("LA").convert(mode) if mode in ("La", "PA") else source.convert(mode)
    assert read_image(source).getpixel((0, 0)) == (40, 40, 40)


# ------------------------------------------------------------------------------------------- EXIF

# Where the corners of the stored image go: (top left, top right, bottom left, bottom right) of the
# upright image, as indices into the stored order (0 top left, 1 top right, 2 and 3 below).
UPRIGHT = {
    1: (0, 1, 2, 3),
    2: (1, 0, 3, 2),
    3: (3, 2, 1, 0),
    4: (2, 3, 0, 1),
    5: (0, 2, 1, 3),
    6: (2, 0, 3, 1),
    7: (3, 1, 2, 0),
    8: (1, 3, 0, 2),
}


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int, format: str) -> None:
    greys = np.array([[0, 80], [160, 240]], dtype=np.uint8)
    stored = Image.fromarray(greys.repeat(16, axis=0).repeat(24, axis=1)).convert("RGB")
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / "photo"
    stored.save(path, format, exif=exif, quality=95)
    image = read_image(path)
    width, height = image.size
    assert (width, height) == ((48, 32) if orientation < 5 else (32, 48))
    corners = [(4, 4), (width - 5, 4), (4, height - 5), (width - 5, height - 5)]
    seen = [round(image.getpixel(corner)[0] / 80) for corner in corners]
    assert tuple(seen) == UPRIGHT[orientation]


@pytest.mark.parametrize("block", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\x7f", b"x"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_broken_exif_block_does_not_cost_the_photo(tmp_path: Path, block: bytes) -> None:
    original = noise(8, 24)
    path = save(tmp_path / "a.png", original, exif=block)
    assert np.array_equal(np.asarray(read_image(path)), np.asarray(original))
    assert read_image(save(tmp_path / "a.jpg", original, exif=block)).size == (24, 8)


def test_an_unknown_orientation_is_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 9
    assert read_image(save(tmp_path / "a.png", noise(8, 24), exif=exif)).size == (24, 8)


def test_a_second_read_changes_nothing(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    once = read_image(save(tmp_path / "a.png", noise(4, 6), exif=exif))
    assert np.array_equal(np.asarray(read_image(once)), np.asarray(once))
    key = png(1, 1, 8, 2, bytes([0, 9, 9, 9]), struct.pack(">3H", 9, 9, 9))
    assert read_image(read_image(key)).getpixel((0, 0)) == WHITE
    assert not once.info


# ---------------------------------------------------------------------------------------- sources


def test_every_kind_of_source_gives_the_same_pixels(tmp_path: Path) -> None:
    original = noise(6, 9)
    path = save(tmp_path / "a.png", original)
    array = np.asarray(original)
    opened = Image.open(path)
    stream = io.BytesIO(path.read_bytes())
    stream.seek(11)  # read from the start all the same
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    for source in (path, str(path), path.read_bytes(), stream, opened, original, array, tensor):
        assert np.array_equal(np.asarray(read_image(source)), array), type(source)
    with path.open("rb") as file:
        assert np.array_equal(np.asarray(read_image(file)), array)
        assert not file.closed
    opened.close()


def test_a_pillow_source_is_not_changed() -> None:
    source = noise(4, 4)
    source.info["comment"] = b"kept"
    image = read_image(source)
    image.putpixel((0, 0), (1, 2, 3))
    assert source.info == {"comment": b"kept"}
    assert np.array_equal(np.asarray(source), np.asarray(noise(4, 4)))


def test_a_stream_that_cannot_seek_is_read() -> None:
    class Pipe(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self.inner = io.BytesIO(data)

        def read(self, size: int = -1) -> bytes:
            return self.inner.read(size)

    assert read_image(Pipe(encode(noise(5, 4), "PNG"))).size == (4, 5)
    with pytest.raises(ImageError, match="Pipe"):
        read_image(Pipe(b"no image"))


@pytest.mark.parametrize(
    ("source", "noun"),
    [
        (np.zeros((4, 4, 3), np.int64), "int64"),
        (torch.zeros(3, 4, 4, dtype=torch.int32), r"torch\.int32"),
        (np.zeros((4, 4), np.uint8), r"\[4, 4\].*RGB"),
        (np.zeros((4, 4, 4), np.uint8), r"\[4, 4, 4\].*RGB"),
        (np.zeros((3, 4, 5), np.uint8), r"transpose\(1, 2, 0\)"),
        (torch.zeros(4, 5, 3, dtype=torch.uint8), r"permute\(2, 0, 1\)"),
        (torch.zeros(2, 3, 5, 5, dtype=torch.uint8), r"list\(batch\)"),
        (np.zeros((0, 4, 3), np.uint8), r"\[0, 4, 3\].*pixels"),
        (Image.new("RGB", (0, 4)), "4 x 0"),
        (17, "<int>"),
        (None, "<NoneType>"),
        (io.StringIO("text"), "'rb'"),
    ],
)
def test_unsuitable_objects_are_refused_with_the_remedy(source: object, noun: str) -> None:
    with pytest.raises(ImageError, match=noun):
        read_image(source)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ broken files


@settings(deadline=None, max_examples=150)
@given(
    format=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]),
    damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8),
)
@pytest.mark.filterwarnings("ignore")  # Pillow's, about the metadata
def test_damage_anywhere_is_an_image_or_an_image_error(
    format: str, damage: list[tuple[float, int]]
) -> None:
    data = bytearray(encode(noise(16, 16), format))
    for place, value in damage:
        data[int(place * (len(data) - 1))] = value
    try:
        image = read_image(bytes(data), max_pixels=1_000_000)
    except ImageError as error:
        assert str(error).startswith("<bytes>: ")
    else:
        assert image.mode == "RGB"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("part", [0.004, 0.05, 0.3, 0.6, 0.9, 0.98])
@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about a truncated TIFF header
def test_truncated_files_name_the_path(tmp_path: Path, format: str, part: float) -> None:
    data = encode(noise(64, 64), format)
    path = tmp_path / "holiday.jpg"
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(ImageError, match=r"holiday\.jpg.*damaged"):
        read_image(path)


def test_a_corrupt_png_names_the_path(tmp_path: Path) -> None:
    data = bytearray(encode(noise(64, 64), "PNG"))
    data[len(data) // 2] ^= 0xFF
    path = tmp_path / "flipped.png"
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"flipped\.png.*damaged"):
        read_image(path)


def test_files_that_are_no_image(tmp_path: Path) -> None:
    text = tmp_path / "text.jpg"
    text.write_text("this is not a picture\n" * 40)
    empty = tmp_path / "empty.png"
    empty.touch()
    folder = tmp_path / "folder.png"
    folder.mkdir()
    pipe = tmp_path / "pipe.jpg"
    os.mkfifo(pipe)
    for source, noun in (
        (text, r"text\.jpg.*format"),
        (empty, r"empty\.png.*0 bytes"),
        (folder, r"folder\.png.*find_images"),
        (tmp_path / "missing.jpg", r"missing\.jpg"),
        (pipe, r"pipe\.jpg.*socket"),
        ("", "^''"),
        ("a\0b.jpg", r"b\.jpg.*null"),
        (b"", "<bytes>.*0 bytes"),
        (b"some text", "<bytes>.*format"),
    ):
        with pytest.raises(ImageError, match=noun) as caught:
            read_image(source)
        assert "\n" not in str(caught.value)


def test_a_closed_pillow_image_is_an_image_error(tmp_path: Path) -> None:
    with Image.open(save(tmp_path / "a.png", noise(4, 4))) as image:
        pass
    with pytest.raises(ImageError, match=r"a\.png"):
        read_image(image)


# ----------------------------------------------------------------------------------------- bombs


@pytest.mark.parametrize("side", [50_000, 14_000])  # above and below the count Pillow refuses
def test_bombs_are_refused_before_decoding(tmp_path: Path, side: int) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png(side, side, 8, 2, b""))
    before = Image.MAX_IMAGE_PIXELS
    with pytest.raises(ImageError, match=r"bomb\.png.*max_pixels") as caught:
        read_image(path)
    assert before == Image.MAX_IMAGE_PIXELS
    assert "\n" not in str(caught.value)


def test_the_limit_is_inclusive_and_a_parameter(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", noise(10, 12))
    assert read_image(path, max_pixels=120).size == (12, 10)
    with pytest.raises(ImageError, match="max_pixels=119"):
        read_image(path, max_pixels=119)
    for bad in (0, -1, True, 1e6):
        with pytest.raises(ImageError, match="max_pixels"):
            read_image(path, max_pixels=bad)  # type: ignore[arg-type]


def test_the_check_precedes_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.png", noise(10, 12))

    def load(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(ImageError, match="max_pixels=119"):
        read_image(path, max_pixels=119)
    with pytest.raises(ImageError, match="decoded"):  # the trap works
        read_image(path)


def test_pillows_warning_stays_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.png", noise(10, 12))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow warns from 101 to 200 pixels
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_image(path).size == (12, 10)
        assert preprocess(path, (32, 32), fit="crop").grid == (2, 2)
    with pytest.warns(Image.DecompressionBombWarning):  # the caller's own filters are untouched
        Image.open(path).close()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    with pytest.raises(ImageError, match="MAX_IMAGE_PIXELS"):
        read_image(path)


def test_reader_threads_do_not_share_the_warning_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []
    most: list[int] = []
    pillow_open = Image.open

    def slow_open(*args: object, **options: object) -> Image.Image:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.005)  # long enough for another thread to come in, if it could
        inside.pop()
        return pillow_open(*args, **options)

    monkeypatch.setattr(Image, "open", slow_open)
    data = encode(noise(4, 4), "PNG")
    before = list(warnings.filters)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read_image, [data] * 8))
    assert max(most) == 1
    assert list(warnings.filters) == before


def test_a_sliver_cannot_be_blown_up() -> None:
    sliver = Image.new("RGB", (100, 1))
    with pytest.raises(ImageError, match=r"<Image>.*25,600"):
        preprocess(sliver, 16, max_pixels=25_599)
    assert preprocess(sliver, 16, max_pixels=25_600).grid == (1, 100)


# ---------------------------------------------------------------------------------------- tensors


def test_to_tensor_is_value_over_255() -> None:
    image = noise(3, 5)
    tensor = to_tensor(image)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float32, (3, 3, 5))
    assert tensor.is_contiguous()
    for x, y in ((0, 0), (4, 0), (2, 2)):
        assert tensor[:, y, x].tolist() == pytest.approx([v / 255 for v in image.getpixel((x, y))])
    for bad in (Image.new("L", (4, 4)), Image.new("RGB", (0, 4)), np.zeros((4, 4, 3), np.uint8)):
        with pytest.raises(ImageError, match="read_image"):
            to_tensor(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(3, 2, 4), (5, 3, 2, 4), (2, 5, 3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalize_and_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pixels = torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    normal = normalize(pixels)
    assert normal.dtype == dtype
    for channel in range(3):
        expected = (pixels.select(-3, channel) - IMAGENET_MEAN[channel]) / IMAGENET_STD[channel]
        torch.testing.assert_close(normal.select(-3, channel), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(denormalize(normal), pixels)
    doubled = denormalize(normalize(pixels, (0, 0, 0), (0.5, 0.5, 0.5)), (0, 0, 0), (1, 1, 1))
    torch.testing.assert_close(doubled, pixels * 2)


def test_normalize_refuses_other_tensors_and_statistics() -> None:
    with pytest.raises(ImageError, match="uint8"):
        normalize(torch.zeros(3, 4, 4, dtype=torch.uint8))
    for shape in ((4, 4), (4, 4, 3), (1, 4, 4)):
        with pytest.raises(ImageError, match="shape"):
            normalize(torch.zeros(shape))
    ok = (0.5, 0.5, 0.5)
    for mean, std in ((ok, (1, 0, 1)), (ok, (1, -1, 1)), ((1, 1), ok), (0.5, ok), (ok, "abc")):
        with pytest.raises(ImageError, match="std="):
            normalize(torch.zeros(3, 4, 4), mean, std)  # type: ignore[arg-type]
    with pytest.raises(ImageError, match="mean="):
        denormalize(torch.zeros(3, 4, 4), (0, float("nan"), 0), ok)


# ------------------------------------------------------------------------------------ target_size


@pytest.mark.parametrize(
    ("height", "width", "size", "fit", "expected"),
    [
        (480, 640, None, "resize", (480, 640)),
        (481, 633, None, "resize", (480, 640)),
        (24, 40, None, "resize", (32, 48)),  # half way goes up
        (23, 39, None, "resize", (16, 32)),
        (1, 1, None, "resize", (16, 16)),
        (15, 15, None, "resize", (16, 16)),
        (481, 633, None, "pad", (496, 640)),
        (15, 15, None, "pad", (16, 16)),
        (481, 633, None, "crop", (480, 624)),
        (480, 640, None, "error", (480, 640)),
        (480, 640, 224, "resize", (224, 304)),  # 224 x 298.67 -> 299 -> 304
        (640, 480, 224, "resize", (304, 224)),
        (480, 640, 224, "pad", (224, 304)),
        (480, 640, 224, "crop", (224, 288)),
        (480, 640, 240, "error", (240, 320)),
        (480, 640, (100, 200), "resize", (96, 208)),
        (480, 640, (100, 200), "pad", (112, 208)),
        (480, 640, (100, 200), "crop", (96, 192)),
        (480, 640, (96, 208), "error", (96, 208)),
        (480, 640, [96, 208], "error", (96, 208)),
    ],
)
def test_target_size(
    height: int, width: int, size: object, fit: str, expected: tuple[int, int]
) -> None:
    assert target_size(height, width, size, fit) == expected  # type: ignore[arg-type]


def test_target_size_of_another_patch() -> None:
    assert target_size(100, 101, None, "resize", 14) == (98, 98)
    assert target_size(100, 101, None, "pad", patch_size=14) == (112, 112)
    assert target_size(22, 23, None, "resize", 15) == (15, 30)


@pytest.mark.parametrize(
    ("args", "noun"),
    [
        ((15, 64, None, "crop"), "15 x 64"),
        ((480, 641, None, "error"), "480 x 641"),
        ((480, 640, 224, "error"), "224 x 299"),
        ((64, 64, None, "reszie"), "'reszie'.*mean 'resize'"),
        ((64, 64, None, "Pad"), "'Pad'.*mean 'pad'"),
        ((64, 64, None, None), "fit.*None"),
        ((64, 64, 0, "resize"), "size.* 0"),
        ((64, 64, -16, "resize"), "size.* -16"),
        ((64, 64, True, "resize"), "size.* True"),
        ((64, 64, 224.0, "resize"), r"size.* 224\.0"),
        ((64, 64, "224", "resize"), "size.* '224'"),
        ((64, 64, (224, 0), "resize"), "size.* 0"),
        ((64, 64, (224, 224.5), "resize"), r"size.* 224\.5"),
        ((64, 64, (224,), "resize"), "1 entries"),
        ((64, 64, (1, 2, 3), "resize"), "3 entries"),
        ((64, 64, 15, "resize"), "size=15"),
        ((64, 64, (224, 8), "pad"), r"size=\(224, 8\)"),
        ((0, 64, None, "resize"), "height.* 0"),
        ((64, -1, None, "resize"), "width.* -1"),
        ((64, 64, None, "resize", 0), "patch_size"),
        ((64, 64, None, "resize", 16.0), "patch_size"),
    ],
)
def test_target_size_errors(args: tuple[object, ...], noun: str) -> None:
    with pytest.raises(ImageError, match=noun) as caught:
        target_size(*args)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


sides = st.integers(1, 5000)
patches = st.integers(1, 40)


@settings(deadline=None, max_examples=300)
@given(height=sides, width=sides, fit=st.sampled_from(FITS), patch=patches)
def test_native_sizes_land_on_the_grid(height: int, width: int, fit: str, patch: int) -> None:
    if fit == "error" and (height % patch or width % patch):
        with pytest.raises(ImageError, match=f"{height} x {width}"):
            target_size(height, width, None, fit, patch)
        return
    if fit == "crop" and min(height, width) < patch:
        with pytest.raises(ImageError, match=f"{height} x {width}"):
            target_size(height, width, None, fit, patch)
        return
    for side, out in zip(
        (height, width), target_size(height, width, None, fit, patch), strict=True
    ):
        assert out % patch == 0
        assert out >= patch
        if fit == "resize" and side >= patch:
            assert abs(out - side) * 2 <= patch
        if fit == "pad":
            assert side <= out < side + patch
        if fit == "crop":
            assert side - patch < out <= side
        if side % patch == 0:
            assert out == side


@settings(deadline=None, max_examples=300)
@given(height=sides, width=sides, size=st.integers(1, 2000))
def test_a_short_side_is_exact_and_keeps_the_aspect(height: int, width: int, size: int) -> None:
    # A patch of one pixel shows the size before the grid.
    out = target_size(height, width, size, "error", 1)
    assert min(out) == size
    for side, scaled in zip((height, width), out, strict=True):
        assert abs(scaled * min(height, width) - side * size) * 2 <= min(height, width)


# ------------------------------------------------------------------------------------- preprocess


def plain(image: Image.Image) -> torch.Tensor:
    """The definition, in numpy and double precision: (value / 255 - mean) / std, [3, H, W]."""
    values = (np.asarray(image, dtype=np.float64) / 255 - IMAGENET_MEAN) / IMAGENET_STD
    return torch.from_numpy(values.transpose(2, 0, 1).copy()).float()


def test_native_image_on_the_grid_is_not_resampled() -> None:
    image = noise(32, 48)
    out = preprocess(image, size=None)
    assert out.pixels.dtype == torch.float32
    assert out.pixels.is_contiguous()
    torch.testing.assert_close(out.pixels, plain(image)[None])
    assert (out.grid, out.valid, out.original_sizes) == ((2, 3), (32, 48), [(32, 48)])
    assert (out.crop_box, out.skipped) == ([(0, 0, 48, 32)], [])


def test_resize_is_one_bicubic_step_to_the_final_size() -> None:
    image = noise(45, 61)
    out = preprocess(image, 64, fit="resize")
    assert tuple(out.pixels.shape) == (1, 3, 64, 80)  # 64 x 87 -> nearest 80
    expected = image.resize((80, 64), Image.Resampling.BICUBIC)
    torch.testing.assert_close(out.pixels[0], plain(expected))
    assert (out.valid, out.original_sizes, out.grid) == ((64, 80), [(45, 61)], (4, 5))
    assert out.crop_box == [(0, 0, 80, 64)]


def test_downscaling_is_antialiased() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    middle = denormalize(preprocess(stripes, 16).pixels)[..., 4:-4]
    assert middle.min() > 0.45
    assert middle.max() < 0.55


def test_pad_keeps_every_pixel_and_adds_zeros_right_and_below() -> None:
    image = noise(30, 17)
    out = preprocess(image, size=None, fit="pad")
    assert tuple(out.pixels.shape) == (1, 3, 32, 32)
    assert (out.valid, out.grid, out.crop_box) == ((30, 17), (2, 2), [(0, 0, 17, 30)])
    torch.testing.assert_close(out.pixels[0, :, :30, :17], plain(image))
    assert not out.pixels[:, :, 30:].any()
    assert not out.pixels[:, :, :, 17:].any()
    scaled = preprocess(image, 20, fit="pad")  # 35 x 20 -> 48 x 32
    assert (scaled.valid, tuple(scaled.pixels.shape[-2:])) == ((35, 20), (48, 32))
    expected = plain(image.resize((20, 35), Image.Resampling.BICUBIC))
    torch.testing.assert_close(scaled.pixels[0, :, :35, :20], expected)


def test_crop_is_central_and_reported() -> None:
    image = noise(37, 63)
    out = preprocess(image, size=None, fit="crop")
    assert tuple(out.pixels.shape) == (1, 3, 32, 48)
    assert out.crop_box == [(7, 2, 55, 34)]
    torch.testing.assert_close(out.pixels[0], plain(image.crop(out.crop_box[0])))
    assert (out.valid, out.original_sizes) == ((32, 48), [(37, 63)])
    scaled = preprocess(image, (40, 50), fit="crop")
    assert scaled.crop_box == [(1, 4, 49, 36)]
    resized = image.resize((50, 40), Image.Resampling.BICUBIC)
    torch.testing.assert_close(scaled.pixels[0], plain(resized.crop((1, 4, 49, 36))))


def test_fifteen_by_fifteen() -> None:
    image = noise(15, 15)
    assert preprocess(image, size=None).grid == (1, 1)
    assert preprocess(image, size=None, fit="pad").valid == (15, 15)
    for fit in ("crop", "error"):
        with pytest.raises(ImageError, match="15 x 15"):
            preprocess(image, size=None, fit=fit)


def test_without_a_size_the_short_side_is_the_one_default() -> None:
    image = noise(40, 60)
    assert preprocess(image).pixels.shape[2:] == (DEFAULT_SIZE, DEFAULT_SIZE * 3 // 2)
    assert torch.equal(preprocess(image).pixels, preprocess(image, DEFAULT_SIZE).pixels)


def test_patch_size_mean_and_std_are_used() -> None:
    out = preprocess(
        noise(28, 43), size=None, patch_size=14, mean=(0, 0, 0), std=(1, 1, 1), fit="crop"
    )
    assert (out.grid, out.crop_box) == ((2, 3), [(0, 0, 42, 28)])
    torch.testing.assert_close(out.pixels[0], to_tensor(noise(28, 43))[..., :42])
    with pytest.raises(ImageError, match="std="):
        preprocess(noise(16, 16), std=(0, 0, 0))


def test_a_batch_keeps_order_and_names(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", noise(20, 40, seed=1))
    array = np.asarray(noise(40, 20, seed=2))
    sources = [path, encode(noise(40, 40, seed=3), "PNG"), array, noise(64, 64, seed=4)]
    out = preprocess(sources, (32, 32))
    assert tuple(out.pixels.shape) == (4, 3, 32, 32)
    assert out.names == [
        str(path),
        "<bytes at index 1>",
        "<ndarray at index 2>",
        "<Image at index 3>",
    ]
    assert out.original_sizes == [(20, 40), (40, 40), (40, 20), (64, 64)]
    for index, source in enumerate(sources):
        torch.testing.assert_close(out.pixels[index], preprocess(source, (32, 32)).pixels[0])
    again = preprocess((source for source in sources), (32, 32))
    assert torch.equal(again.pixels, out.pixels)


def test_preprocess_turns_photos_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    out = preprocess(save(tmp_path / "a.png", noise(32, 64), exif=exif), size=None)
    assert (out.original_sizes, out.grid) == ([(64, 32)], (4, 2))
    turned = noise(32, 64).transpose(Image.Transpose.ROTATE_270)
    torch.testing.assert_close(out.pixels[0], plain(turned))


def test_a_file_object_is_one_image(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", noise(16, 16))
    with path.open("rb") as file:
        out = preprocess(file, size=None)
    assert (len(out.names), out.names[0]) == (1, str(path))


def test_mixed_sizes_name_both_and_the_remedy(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a.png", noise(32, 32)), save(tmp_path / "b.png", noise(32, 64))
    with pytest.raises(ImageError, match=r"a\.png.*32 x 32.*b\.png.*32 x 64"):
        preprocess([a, b], size=None)
    assert preprocess([a, b], (32, 32)).pixels.shape[0] == 2
    with pytest.raises(ImageError, match=r"30 x 30.*31 x 32"):
        preprocess([noise(30, 30), noise(31, 32)], size=None, fit="pad")
    cropped = preprocess([noise(33, 36), noise(32, 47)], size=None, fit="crop")
    assert cropped.crop_box == [(2, 0, 34, 32), (7, 0, 39, 32)]


def test_skip_leaves_out_counts_and_names(tmp_path: Path) -> None:
    good = save(tmp_path / "good.png", noise(32, 32))
    bad = tmp_path / "bad.jpg"
    bad.write_text("text")
    missing = tmp_path / "missing.jpg"
    bomb = png(50_000, 50_000, 8, 2, b"")
    sources = [bad, good, missing, bomb, good]
    out = preprocess(sources, on_error="skip")
    assert out.names == [str(good), str(good)]
    assert out.pixels.shape[0] == len(out.original_sizes) == len(out.crop_box) == 2
    assert [name for name, _ in out.skipped] == [str(bad), str(missing), "<bytes at index 3>"]
    assert "not an image" in out.skipped[0][1] and "bad.jpg" in out.skipped[0][1]
    with pytest.raises(ImageError, match=r"^\S*bad\.jpg"):
        preprocess(sources)
    with pytest.raises(ImageError, match=r"2 images.*bad\.jpg"):
        preprocess([bad, missing], size=None, on_error="skip")
    with pytest.raises(ImageError, match="<bytes at index 1>"):
        preprocess([good, b""])


def test_skip_does_not_hide_a_wrong_option() -> None:
    with pytest.raises(ImageError, match="15 x 15"):
        preprocess([noise(32, 32), noise(15, 15)], size=None, fit="crop", on_error="skip")
    for options, noun in (
        ({"on_error": "ignore"}, "on_error"),
        ({"fit": "resiz", "on_error": "skip"}, "'resiz'"),
        ({"size": 8, "on_error": "skip"}, "size=8"),
        ({"patch_size": 0, "on_error": "skip"}, "patch_size"),
        ({"max_pixels": 0, "on_error": "skip"}, "max_pixels"),
    ):
        with pytest.raises(ImageError, match=noun):
            preprocess(["missing.png"], **options)


OTHER = VecaConfig(
    depth=1, width=32, heads=2, num_cores=4, patch_size=14,
    image_mean=(0.5, 0.4, 0.3), image_std=(0.5, 0.25, 0.2),
)  # fmt: skip
"""Weights that want nothing of what is usual."""


@pytest.mark.parametrize(
    "build",
    [
        lambda: OTHER,
        lambda: veca.create_model(OTHER),
        lambda: veca.DenseVit(OTHER),
        lambda: veca.compile_for_inference(veca.create_model(OTHER).eval()),
        lambda: torch.compile(veca.create_model(OTHER)),
    ],
    ids=["config", "model", "dense", "engine", "compiled"],
)
@pytest.mark.parametrize("fit", ["resize", "pad"])
def test_a_model_says_how_its_images_are_made(build: Callable[[], Any], fit: str) -> None:
    image = noise(45, 60)
    expected = preprocess(
        image, 28, fit=fit, patch_size=14, mean=OTHER.image_mean, std=OTHER.image_std
    )
    model = build()
    found = [preprocess(image, 28, fit=fit, model=model)]
    found += [model.preprocess(image, size=28, fit=fit)] if model is not OTHER else []
    for out in found:
        assert torch.equal(out.pixels, expected.pixels)
        assert (out.grid, out.valid) == (expected.grid, expected.valid)
    assert not torch.equal(preprocess(image, 28, patch_size=14, fit=fit).pixels, expected.pixels)


def test_what_is_said_wins_over_the_model() -> None:
    image = noise(28, 42)
    plain = to_tensor(image)[None]
    for options, expected in (
        ({"mean": (0, 0, 0), "std": (1, 1, 1)}, plain),
        ({"mean": (0, 0, 0)}, normalize(plain, (0, 0, 0), OTHER.image_std)),
        ({"std": (1, 1, 1)}, normalize(plain, OTHER.image_mean, (1, 1, 1))),
    ):
        torch.testing.assert_close(
            preprocess(image, size=None, model=OTHER, **options).pixels, expected
        )
    assert preprocess(image, size=None, model=OTHER).grid == (2, 3)
    assert preprocess(image, size=None, model=OTHER, patch_size=7).grid == (4, 6)


def test_without_a_model_images_are_imagenets() -> None:
    image = noise(32, 48)
    out = preprocess(image, size=None)
    assert torch.equal(out.pixels[0], normalize(to_tensor(image), IMAGENET_MEAN, IMAGENET_STD))
    assert out.grid == (2, 3)
    assert torch.equal(out.pixels, preprocess(image, size=None, model=VecaConfig()).pixels)


@pytest.mark.parametrize("model", ["tiny", torch.nn.Linear(2, 2), 16])
def test_what_is_no_model_is_named(model: object) -> None:
    with pytest.raises(ImageError, match=f"model.*{type(model).__name__}"):
        preprocess(noise(32, 32), model=model)


def test_no_images_at_all() -> None:
    with pytest.raises(ImageError, match="no images"):
        preprocess([])


def test_preprocessed_moves() -> None:
    out = preprocess(noise(32, 32), size=None)
    moved = out.to("cpu", torch.float64)
    assert (moved.pixels.dtype, out.pixels.dtype) == (torch.float64, torch.float32)
    assert (moved.names, moved.grid) == (out.names, out.grid)
    assert out.to("meta").pixels.device.type == "meta"


# ------------------------------------------------------------------------------------ find_images


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        *("img10.jpg", "img2.JPG", "img1.png", "notes.txt", ".hidden.png", "scan[1].png"),
        *("sub/b.webp", "sub/deep/c.tif", ".cache/d.png", "empty/readme.md", "raw.dat"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "folder.png").mkdir()
    return tmp_path


def names(paths: list[Path], root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in paths]


TOP = ["img1.png", "img2.JPG", "img10.jpg", "scan[1].png"]


def test_a_folder_is_listed_in_natural_order(tree: Path) -> None:
    assert names(find_images(tree), tree) == [*TOP, "sub/b.webp", "sub/deep/c.tif"]
    assert names(find_images(str(tree), recursive=False), tree) == TOP
    assert names(find_images(tree / ".cache"), tree) == [".cache/d.png"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jpg", ["img10.jpg"]),
        ("*.png", ["img1.png", "scan[1].png"]),
        ("*", TOP),
        ("**/*", [*TOP, "sub/b.webp", "sub/deep/c.tif"]),
        ("sub/**/*.tif", ["sub/deep/c.tif"]),
        ("img[12].*", ["img1.png", "img2.JPG"]),
        ("img?.png", ["img1.png"]),
    ],
)
def test_patterns(tree: Path, pattern: str, expected: list[str]) -> None:
    assert names(find_images(str(tree / pattern)), tree) == expected


def test_files_folders_and_patterns_together_without_duplicates(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    sources = ["sub", tree / "img2.JPG", "./sub/b.webp", "raw.dat", "img*", Path("scan[1].png")]
    found = find_images(sources)
    assert [path.name for path in found] == [
        *("b.webp", "c.tif", "img2.JPG", "raw.dat", "img1.png", "img10.jpg", "scan[1].png"),
    ]


def test_find_images_errors(tree: Path) -> None:
    for source, noun in (
        (tree / "nope.jpg", r"nope\.jpg"),
        (str(tree / "*.gif"), r"\*\.gif.*pattern.*\.webp"),
        (str(tree / "*.txt"), r"\*\.txt.*pattern"),
        (tree / "empty", r"empty.*subfolders.*\.webp"),
        ("", "^''"),
        ([], "^no files"),
        ([tree, tree / "gone"], r"\bgone\b"),
    ):
        with pytest.raises(ImageError, match=noun):
            find_images(source)
    with pytest.raises(ImageError, match=r"empty\b(?!.*subfolders)"):
        find_images(tree / "empty", recursive=False)


def test_an_unreadable_folder_is_not_passed_over(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refuse(path: str | Path) -> object:
        if Path(path).name == "deep":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # a mode of 000 would not stop root
    with pytest.raises(ImageError, match=r"deep\b.*Permission denied"):
        find_images(tree)


def test_broken_links_are_listed_so_that_reading_reports_them(tree: Path) -> None:
    (tree / "sub" / "a.png").symlink_to(tree / "gone.png")
    found = find_images(tree / "sub")
    assert names(found, tree)[0] == "sub/a.png"
    assert find_images(found[0]) == found[:1]
    with pytest.raises(ImageError, match=r"a\.png"):
        read_image(found[0])


def test_other_files_are_counted_by_suffix(tree: Path) -> None:
    others = Counter[str]()
    find_images([tree, str(tree / "img*"), tree / "raw.dat"], passed_over=others)
    assert others == {".txt": 1, ".md": 1, ".dat": 1}
    others.clear()
    find_images(str(tree / "*"), passed_over=others)
    assert others == {".txt": 1, ".dat": 1}


def test_natural_order_with_digits_of_another_script(tmp_path: Path) -> None:
    for name in ("b", "\u0663", "10", "9"):  # the second is a decimal digit too, to str.isdecimal
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").touch()
    assert [path.parent.name for path in find_images(tmp_path)] == ["9", "10", "b", "\u0663"]


def test_every_extension_is_lower_case_and_opens(tmp_path: Path) -> None:
    assert {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"} <= EXTENSIONS
    assert all(suffix == suffix.lower() and suffix.startswith(".") for suffix in EXTENSIONS)
    for suffix in EXTENSIONS:
        image = Image.new("1" if suffix == ".pbm" else "RGB", (4, 4))
        assert read_image(save(tmp_path / f"a{suffix}", image)).size == (4, 4)


def test_a_png_is_read_only_if_all_its_checksums_hold(tmp_path: Path) -> None:
    """Pillow looks neither at those of the pixels nor at those of what follows them."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    good = encode(noise(20, 30).convert("RGBA"), "PNG", exif=exif)
    assert read_image(good).size == (20, 30)
    places = [good.index(kind) for kind in (b"IHDR", b"IDAT", b"IEND", b"eXIf")]
    for place in places:
        length = int.from_bytes(good[place - 4 : place], "big")
        end = place + 4 + length
        for at in (end, end + 3):  # the recorded checksum; what it is of, Pillow mostly sees
            damaged = bytearray(good)
            damaged[at] ^= 1
            (tmp_path / "x.png").write_bytes(damaged)
            with pytest.raises(ImageError, match=r"x\.png"):
                read_image(tmp_path / "x.png")
    for cut in range(1, 13):
        with pytest.raises(ImageError, match="decoded"):
            read_image(good[:-cut])
    assert read_image(good + b"more").size == (20, 30)


@pytest.mark.parametrize("format", ["JPEG", "TIFF", "BMP", "WEBP", "PPM", "PNG"])
def test_every_truncation_that_changes_pixels_is_seen(format: str) -> None:
    data = encode(noise(24, 40), format)
    wanted = read_image(data).tobytes()
    for length in range(1, len(data), 7):
        with contextlib.suppress(ImageError):
            assert read_image(data[:length]).tobytes() == wanted


def test_a_webp_takes_more_memory_and_may_be_less_large() -> None:
    data = encode(noise(20, 30), "WEBP")
    assert read_image(data, max_pixels=1050).size == (30, 20)
    with pytest.raises(ImageError, match="pixels"):
        read_image(data, max_pixels=1049)
    assert read_image(encode(noise(20, 30), "PNG"), max_pixels=600).size == (30, 20)


def test_the_source_is_not_changed_and_the_result_knows_no_file(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 3
    path = save(tmp_path / "x.jpg", noise(20, 30), exif=exif)
    with Image.open(path) as opened:
        before = opened.copy()
        assert read_image(opened).tobytes() != before.tobytes()
        assert opened.tobytes() == before.tobytes() and opened.getexif()[ORIENTATION] == 3
    assert type(read_image(path)) is Image.Image
    assert type(read_image(encode(noise(20, 30), "PNG"))) is Image.Image
