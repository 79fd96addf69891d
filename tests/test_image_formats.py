"""Kinds of images that not every Pillow reads, and what is no image: found, read or said."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, features

from veca.data import open_source
from veca.errors import DataError, ImageError
from veca.images import EXTENSIONS, extensions, find_images, formats, pixel_limit, read_image
from veca.images.find import left_out

needs_avif = pytest.mark.skipif(
    "avif" not in features.modules or not features.check("avif"), reason="a Pillow without AVIF"
)
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


@pytest.fixture(autouse=True)
def forgotten():
    """Nothing is remembered of plugins that a test invents."""
    formats._extensions.cache_clear()
    yield
    formats._extensions.cache_clear()


def ramp() -> Image.Image:
    values = np.linspace(0, 255, 64 * 48, dtype=np.uint8).reshape(48, 64)
    return Image.fromarray(np.stack([values, values[::-1], np.full_like(values, 90)], axis=-1))


def near(image: Image.Image, other: Image.Image) -> bool:
    a, b = (np.asarray(one).astype(int) for one in (image, other))
    return a.shape == b.shape and np.abs(a - b).mean() < 4


# ------------------------------------------------------------------------------ more kinds are read


@needs_avif
def test_avif(tmp_path: Path) -> None:
    path = tmp_path / "a.avif"
    ramp().save(path, quality=95)
    assert ".avif" in extensions() and find_images(tmp_path) == [path]
    assert near(read_image(path), ramp()) and near(read_image(path.read_bytes()), ramp())
    turned = Image.Exif()
    turned[0x0112] = 6
    ramp().save(path, quality=95, exif=turned)
    assert near(read_image(path), ramp().rotate(-90, expand=True))


@pytest.mark.skipif(importlib.util.find_spec("pillow_heif") is None, reason="no pillow-heif")
def test_heic(tmp_path: Path) -> None:
    import pillow_heif

    path = tmp_path / "IMG_1.HEIC"
    pillow_heif.from_pillow(ramp()).save(path, quality=95)
    assert find_images(tmp_path) == [path]
    assert near(read_image(path), ramp())


@pytest.mark.skipif(importlib.util.find_spec("pillow_jxl") is None, reason="no pillow-jxl-plugin")
def test_jpeg_xl(tmp_path: Path) -> None:
    import pillow_jxl  # noqa: F401

    path = tmp_path / "a.jxl"
    ramp().save(path, lossless=True)
    assert find_images(tmp_path) == [path]
    assert np.array_equal(np.asarray(read_image(path)), np.asarray(ramp()))


class Toy(ImageFile.ImageFile):
    """Stands in for a plugin's format: any HEIC header is one red pixel."""

    format = "HEIF"

    def _open(self) -> None:
        self._size, self._mode, self.tile = (1, 1), "RGB", []
        self.im = Image.new("RGB", (1, 1), "red").im


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A `pillow_heif` that counts how often it is registered."""
    calls: Counter[str] = Counter()
    library = types.ModuleType("pillow_heif")
    library.__spec__ = importlib.util.spec_from_loader("pillow_heif", None)

    def register_heif_opener() -> None:
        calls["registered"] += 1
        Image.register_open("HEIF", Toy, lambda start: start[4:12] == b"ftypheic")
        Image.register_extensions("HEIF", [".heic", ".heif"])

    library.register_heif_opener = register_heif_opener
    for table in (Image.OPEN, Image.EXTENSION):
        for key in [k for k in table if k == "HEIF" or k in formats.HEIC.suffixes]:
            monkeypatch.delitem(table, key)
        before = dict(table)
        monkeypatch.setattr(Image, "OPEN" if table is Image.OPEN else "EXTENSION", before)
    monkeypatch.setattr(Image, "ID", list(Image.ID))
    monkeypatch.setitem(sys.modules, "pillow_heif", library)
    return calls


def test_a_plugin_is_registered_at_the_first_file_that_needs_it(
    tmp_path: Path, toy: Counter[str]
) -> None:
    (tmp_path / "a.heic").write_bytes(HEIC)
    Image.new("RGB", (2, 2)).save(tmp_path / "b.png")
    assert [path.name for path in find_images(tmp_path)] == ["a.heic", "b.png"]
    read_image(tmp_path / "b.png")
    assert not toy
    for _ in range(2):
        assert read_image(tmp_path / "a.heic").getpixel((0, 0)) == (255, 0, 0)
    assert toy == {"registered": 1}


def test_without_its_library_a_kind_is_passed_over_and_says_what_to_install(
    tmp_path: Path, toy: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "a.heic").write_bytes(HEIC)
    assert extensions() & set(formats.HEIC.suffixes) == set()
    with pytest.raises(ImageError, match=r"found 1 \.heic.*pillow-heif"):
        find_images(tmp_path)
    with pytest.raises(DataError, match=r"found 1 \.heic.*pillow-heif"):
        open_source(tmp_path, cache_dir=tmp_path / "cache")
    for source in (tmp_path / "a.heic", HEIC):
        with pytest.raises(ImageError, match="pillow-heif"):
            read_image(source)


def test_a_kept_list_of_a_folder_is_made_again_when_a_plugin_comes(
    tmp_path: Path, toy: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "photos", tmp_path / "cache"
    folder.mkdir()
    (folder / "a.heic").write_bytes(HEIC)
    Image.new("RGB", (2, 2)).save(folder / "b.png")
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        source = open_source(folder, cache_dir=cache, natural=True)
        assert len(source) == 1 and source.passed_over == {".heic": 1}
    formats._extensions.cache_clear()
    assert len(open_source(folder, cache_dir=cache, natural=True)) == 2


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf", formats.AVIF),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", formats.AVIF),
        (HEIC, formats.HEIC),
        (b"\0\0\0\x14ftypmif1\0\0\0\0mif1", formats.HEIC),
        (b"\xff\x0a\x00", formats.JPEG_XL),
        (b"\0\0\0\x0cJXL \r\n\x87\n", formats.JPEG_XL),
        (b"\0\0\0\x20ftypisom\0\0\2\0isomiso2", formats.VIDEO),
        (b"\0\0\0\x14ftypqt  \0\0\2\0qt  ", formats.VIDEO),
        (b"RIFF\0\0\0\0AVI LIST", formats.VIDEO),
        (b"RIFF\0\0\0\0WEBPVP8 ", None),
        (b"\xff\xd8\xff\xe0", None),
        (b"\x89PNG", None),
        (b"", None),
    ],
)
def test_kinds_are_known_by_their_start(header: bytes, kind: object) -> None:
    assert formats.kind_of(header) == kind


# --------------------------------------------------------------------------------- what is no image


@pytest.mark.parametrize("take", [read_image, find_images, open_source])
@pytest.mark.parametrize(
    "name", ["https://host/a.jpg", "https:/host/a.jpg", "s3://bucket/photos", "file:///a.jpg"]
)
def test_addresses_are_refused_in_the_same_words_everywhere(take, name: str) -> None:
    with pytest.raises((ImageError, DataError)) as caught:
        take(name)
    whole = name if "://" in name else name.replace(":/", "://")
    assert str(caught.value).startswith(f"{whole}: an address, and images are read from disk")
    if "/host" in name:
        with pytest.raises((ImageError, DataError), match="https://host"):
            take(Path("https://host/a.jpg"))  # which has lost a slash


@pytest.mark.parametrize("take", [read_image, find_images, open_source])
@pytest.mark.parametrize("name", ["clip.mp4", "a b.MOV"])
def test_videos_are_refused_in_the_same_words_everywhere(
    take, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # whether it is there or not
        with pytest.raises((ImageError, DataError), match=r"video.*ffmpeg"):
            take(name)
        Path(name).write_bytes(b"\0\0\0\x20ftypisom\0\0\2\0isomiso2")
    with pytest.raises(ImageError, match="video"):
        read_image(Path(name).read_bytes())
    (tmp_path / "frames.mp4").mkdir()
    Image.new("RGB", (2, 2)).save("frames.mp4/a.png")
    assert len(find_images("frames.mp4")) == len(open_source("frames.mp4")) == 1


def test_a_list_of_addresses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a.jpg\nhttps://host/b.jpg\n")
    with pytest.raises(DataError, match=r"https://host/b\.jpg.*address"):
        open_source(tmp_path / "list.txt")


def test_a_kind_that_is_much_of_a_folder_is_no_side_matter() -> None:
    assert left_out({}, 0) is None
    assert left_out({".json": 5}, 95) is None
    said = left_out({".json": 5, ".mp4": 6}, 89)
    assert said is not None and "6 of 100 files (6%)" in said
    assert "6 .mp4" in said and "json" not in said and "ffmpeg" in said


# --------------------------------------------------------------------------------- the pixel limit


def test_the_limit_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (12, 10)).save(path)
    monkeypatch.setenv("VECA_MAX_PIXELS", "119")
    with pytest.raises(ImageError, match="max_pixels=119"):
        read_image(path)
    assert read_image(path, max_pixels=120).size == (12, 10)  # what a caller asks for wins
    monkeypatch.setenv("VECA_MAX_PIXELS", "120")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # Pillow would refuse more than 20
    assert read_image(path).size == (12, 10)
    assert Image.MAX_IMAGE_PIXELS == 10
    for bad in ("0", "many", "-3", "1.5", ""):
        monkeypatch.setenv("VECA_MAX_PIXELS", bad)
        with pytest.raises(ImageError, match="VECA_MAX_PIXELS"):
            read_image(path)
    monkeypatch.delenv("VECA_MAX_PIXELS")
    assert pixel_limit() == 178_956_970


def test_extensions_hold_what_every_machine_reads() -> None:
    assert extensions() >= EXTENSIONS
