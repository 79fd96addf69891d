"""Files of all kinds give the pixels that were written, window by window; damaged ones one line."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from veca import large
from veca.errors import ImageError, InputError, LargeError, MissingExtraError
from veca.large.sources.tiff import TiffSource


def photo(height=300, width=420, seed=0):
    """Smooth, so that JPEG changes little."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def window_agrees(picture, wanted, tolerance=0):
    assert picture.shape == wanted.shape[:2]
    rows, columns = wanted.shape[:2]
    part = (rows // 8, columns // 2, rows // 3, columns // 4)
    for top, left, height, width in ((0, 0, rows, columns), part, (0, 5, 1, 1)):
        found = picture.window(top, left, height, width)
        part = wanted[top : top + height, left : left + width]
        assert found.shape == part.shape and found.dtype == np.uint8
        assert np.abs(found.astype(int) - part).max() <= tolerance


def halved(picture):
    return np.asarray(Image.fromarray(picture).reduce(2))


@pytest.fixture
def tifffile():
    return pytest.importorskip("tifffile", reason="needs the extra large")


@pytest.fixture
def rasterio():
    return pytest.importorskip("rasterio", reason="needs the extra geo")


@pytest.fixture
def zarr():
    return pytest.importorskip("zarr", reason="needs the extra large")


@pytest.mark.parametrize("suffix", ["png", "bmp", "webp", "ppm"])
def test_pillow(tmp_path, suffix):
    path, wanted = tmp_path / f"photo.{suffix}", photo()
    Image.fromarray(wanted).save(path, **({"lossless": True} if suffix == "webp" else {}))
    window_agrees(large.open_picture(path), wanted)


def test_a_picture_that_is_decoded_whole_has_a_limit(tmp_path, monkeypatch):
    path = tmp_path / "photo.png"
    Image.fromarray(photo()).save(path)
    monkeypatch.setenv("VECA_MAX_PIXELS", "1000")
    with pytest.raises(LargeError, match="max-pixels"):
        large.open_picture(path)


@pytest.mark.parametrize("shape", [(300, 420, 3), (300, 420)])
def test_numpy(tmp_path, shape):
    wanted = photo()
    np.save(tmp_path / "photo.npy", wanted if len(shape) == 3 else wanted[:, :, 0])
    grey = np.repeat(wanted[:, :, :1], 3, axis=2)
    window_agrees(large.open_picture(tmp_path / "photo.npy"), wanted if len(shape) == 3 else grey)


TIFFS = {
    "strips": {},
    "tiles": {"tile": (64, 128)},
    "BigTIFF, zlib": {"tile": (64, 64), "bigtiff": True, "compression": "zlib"},
    "zlib strips": {"rowsperstrip": 7, "compression": "zlib", "predictor": True},
    "LZW": {"tile": (64, 64), "compression": "lzw"},
    "planes": {"tile": (64, 64), "planarconfig": "separate"},
    "JPEG": {"tile": (64, 64), "compression": "jpeg", "compressionargs": {"level": 98}},
}


@pytest.mark.parametrize("kind", TIFFS)
def test_tiff(tifffile, tmp_path, kind):
    if kind in ("LZW", "JPEG", "zlib strips"):
        pytest.importorskip("imagecodecs", reason="needs the extra large")
    path, wanted = tmp_path / "photo.tif", photo(384, 512)  # JPEG's tiles are whole
    planes = kind == "planes"
    stored = np.moveaxis(wanted, 2, 0) if planes else wanted
    tifffile.imwrite(path, stored, photometric="rgb", **TIFFS[kind])
    picture = large.open_picture(path)
    assert isinstance(picture.source, TiffSource)
    window_agrees(picture, wanted, tolerance=12 if kind == "JPEG" else 0)


def test_greys_and_palettes_of_tiff(tifffile, tmp_path):
    grey = photo()[:, :, 0]
    three = np.repeat(grey[:, :, None], 3, axis=2)
    tifffile.imwrite(tmp_path / "grey.tif", grey, tile=(64, 64))
    window_agrees(large.open_picture(tmp_path / "grey.tif"), three)
    tifffile.imwrite(tmp_path / "white.tif", 255 - grey, photometric="miniswhite")
    window_agrees(large.open_picture(tmp_path / "white.tif"), three)
    colours = np.random.default_rng(0).integers(0, 256, (3, 256)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "palette.tif", grey, photometric="palette", colormap=colours * 257)
    window_agrees(large.open_picture(tmp_path / "palette.tif"), colours.T[grey].astype(np.uint8))


@pytest.mark.parametrize("ome", [True, False])
def test_levels_and_resolution_of_tiff(tifffile, tmp_path, ome):
    path, wanted = tmp_path / ("photo.ome.tif" if ome else "photo.tif"), photo()
    more = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}
    if ome:
        more["metadata"] = {
            "axes": "YXS", "PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm",
            "PhysicalSizeY": 0.5, "PhysicalSizeYUnit": "µm",
        }  # fmt: skip
    with tifffile.TiffWriter(path, ome=ome) as file:
        file.write(wanted, photometric="rgb", tile=(64, 64), subifds=1, **more)
        file.write(halved(wanted), photometric="rgb", tile=(64, 64), subfiletype=1)
    picture = large.open_picture(path)
    assert picture.source.levels == [(300, 420), (150, 210)]
    assert picture.microns == pytest.approx((0.5, 0.5))
    small = large.open_picture(path, level=1)
    window_agrees(small, halved(wanted))
    assert small.microns == pytest.approx((1, 1))
    for asked in (1, "1.0", "1um", "0.001mm"):
        assert large.open_picture(path, mpp=asked).level == 1
    scaled = large.open_picture(path, mpp=1.5)
    assert (scaled.level, scaled.shape) == (1, (100, 140))
    assert scaled.microns == pytest.approx((1.5, 1.5))


def test_pixels_do_not_depend_on_the_window(tifffile, tmp_path):
    path = tmp_path / "photo.tif"
    tifffile.imwrite(
        path, photo(900, 1300), photometric="rgb", resolution=(20_000, 20_000),
        resolutionunit="CENTIMETER",
    )  # fmt: skip
    for look in ({}, {"mpp": 0.77}, {"mpp": 0.77, "region": (11, 33, 600, 500)}, {"mpp": 0.3}):
        picture = large.open_picture(path, **look)
        whole = picture.window(0, 0, *picture.shape)
        for top, left, height, width in ((5, 7, 400, 300), (250, 111, 77, 390), (40, 3, 1, 1)):
            found = large.open_picture(path, **look).window(top, left, height, width)
            assert np.array_equal(found, whole[top : top + height, left : left + width])


def test_a_scaled_picture_is_the_scaled_picture(tifffile, tmp_path):
    path, wanted = tmp_path / "photo.tif", photo(600, 800)
    tifffile.imwrite(
        path, wanted, photometric="rgb", resolution=(10_000, 10_000), resolutionunit="CENTIMETER"
    )
    found = large.open_picture(path, mpp=2.5)
    scaled = Image.fromarray(wanted).resize((320, 240), Image.Resampling.BICUBIC)
    window_agrees(found, np.asarray(scaled), tolerance=1)
    part = large.open_picture(path, mpp=2.5, region=(40, 30, 200, 100))
    assert np.abs(
        part.window(0, 0, 100, 200).astype(int) - np.asarray(scaled)[30:130, 40:240]
    ).max() <= 1  # fmt: skip
    small = large.overview(large.ArrayPicture(wanted), 200)
    assert small.shape == (150, 200, 3)
    assert np.abs(small.astype(int) - Image.fromarray(wanted).reduce(4)).max() < 20


def test_a_region(tmp_path):
    wanted = photo()
    Image.fromarray(wanted).save(tmp_path / "photo.png")
    picture = large.open_picture(tmp_path / "photo.png", region=(100, 50, 250, 200))
    window_agrees(picture, wanted[50:250, 100:350])
    assert picture.finest(16, 32) == (66, 132)


def test_numbers_of_other_types(tifffile, tmp_path):
    numbers = np.random.default_rng(0).integers(500, 3000, (100, 120, 4)).astype(np.uint16)
    path = tmp_path / "bands.tif"
    tifffile.imwrite(path, numbers, tile=(64, 64), photometric="minisblack", planarconfig="contig")
    with pytest.raises(LargeError, match="range"):
        large.open_picture(path)
    picture = large.open_picture(path, bands=(4, 3, 2), value_range=(500, 3000))
    wanted = np.rint((numbers[..., [3, 2, 1]].astype(np.float32) - 500) / 2500 * 255)
    window_agrees(picture, wanted.astype(np.uint8))
    for options, noun in (
        ({"bands": (5,)}, "bands"), ({"bands": (1, 2)}, "bands"), ({"value_range": (9, 9)}, "range")
    ):  # fmt: skip
        with pytest.raises(LargeError, match=noun):
            large.open_picture(path, **{"value_range": (0, 1), **options})


# -------------------------------------------------------------------------------------- on the map


def geotiff(rasterio, path, wanted, **more):
    transform = rasterio.Affine(2, 0, 500_000, 0, -2, 4_000_000)
    profile = {"driver": "GTiff", "height": wanted.shape[0], "width": wanted.shape[1], "count": 3,
               "dtype": "uint8", "crs": "EPSG:32633", "transform": transform, **more}  # fmt: skip
    with rasterio.open(path, "w", **profile) as file:
        file.write(np.moveaxis(wanted, 2, 0))
        file.build_overviews([2], rasterio.enums.Resampling.average)


def test_geotiff(rasterio, tmp_path):
    path, wanted = tmp_path / "aerial.tif", photo()
    geotiff(rasterio, path, wanted)
    picture = large.open_picture(path)
    window_agrees(picture, wanted)
    assert picture.source.levels == [(300, 420), (150, 210)]
    assert picture.microns == pytest.approx((2e6, 2e6))
    assert "32633" in picture.place.crs
    part = large.open_picture(path, mpp="4m", region=(10, 20, 64, 64))
    assert part.level == 1
    assert part.place.transform == pytest.approx((4, 0, 500_040, 0, -4, 3_999_920))


def test_where_a_raster_has_data(rasterio, tmp_path):
    path, wanted = tmp_path / "aerial.tif", photo().copy()
    wanted[wanted == 0] = 1
    wanted[:160, :96] = 0
    geotiff(rasterio, path, wanted, nodata=0)
    mask = large.mask_of(large.open_picture(path), "nodata", 16)
    assert mask.shape == (19, 27)
    assert not mask[:10, :6].any() and mask[10:].all() and mask[:, 6:].all()
    part = large.open_picture(path, region=(48, 80, 96, 96))
    assert large.mask_of(part, "nodata", 16).sum() == 36 - 15
    with pytest.raises(LargeError, match="data"):
        large.mask_of(large.ArrayPicture(wanted), "nodata", 16)


# ------------------------------------------------------------------------------------------ slides


def aperio(tifffile, path, wanted):
    with tifffile.TiffWriter(path) as file:
        for level in (wanted, halved(wanted)):
            file.write(
                level, photometric="rgb", tile=(64, 64), compression="jpeg", metadata=None,
                compressionargs={"level": 98}, subfiletype=0,
                description="Aperio Image Library v1\r\n|AppMag = 20|MPP = 0.5",
            )  # fmt: skip


def test_slides(tifffile, tmp_path):
    pytest.importorskip("openslide", reason="needs the extra slides")
    path, wanted = tmp_path / "slide.svs", photo(384, 512)
    aperio(tifffile, path, wanted)
    picture = large.open_picture(path)
    window_agrees(picture, wanted, tolerance=12)
    assert picture.microns == pytest.approx((0.5, 0.5))
    assert large.open_picture(path, mpp=1).shape == (192, 256)
    with pytest.raises(LargeError, match="level 7"):
        large.open_picture(path, level=7)
    path.write_bytes(b"no slide")
    with pytest.raises(LargeError, match="slide"):
        large.open_picture(path)


def test_tissue(tmp_path):
    slide = np.full((320, 480, 3), 240, np.uint8)
    slide += np.random.default_rng(0).integers(0, 3, slide.shape, dtype=np.uint8)
    slide[96:256, 160:320] = (180, 70, 140)
    mask = large.mask_of(large.ArrayPicture(slide), "tissue", 16)
    wanted = np.zeros((20, 30), bool)
    wanted[6:16, 10:20] = True
    assert np.array_equal(mask, wanted)
    with pytest.raises(LargeError, match="tissue"):
        large.mask_of(large.ArrayPicture(slide[:96]), "tissue", 16)


# ----------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("axes", ["yxc", "cyx", "yx"])
def test_zarr_arrays(zarr, tmp_path, axes):
    wanted = photo()
    stored = {"yxc": wanted, "cyx": np.moveaxis(wanted, 2, 0), "yx": wanted[:, :, 0]}[axes]
    zarr.create_array(tmp_path / "photo.zarr", data=np.ascontiguousarray(stored))
    grey = np.repeat(wanted[:, :, :1], 3, axis=2)
    window_agrees(large.open_picture(tmp_path / "photo.zarr"), grey if axes == "yx" else wanted)


def test_ome_zarr(zarr, tmp_path):
    path, wanted = tmp_path / "photo.ome.zarr", photo()
    root = zarr.create_group(path)
    for name, level in (("0", wanted), ("1", halved(wanted))):
        root.create_array(name, data=np.ascontiguousarray(np.moveaxis(level, 2, 0)[None, :, None]))
    axes = [
        {"name": "t", "type": "time"}, {"name": "c", "type": "channel"},
        *({"name": n, "type": "space", "unit": "micrometer"} for n in "zyx"),
    ]  # fmt: skip
    scales = [[1, 1, 1, s, s] for s in (0.25, 0.5)]
    sets = [
        {"path": str(i), "coordinateTransformations": [{"type": "scale", "scale": scale}]}
        for i, scale in enumerate(scales)
    ]
    root.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": sets}]}
    picture = large.open_picture(path)
    window_agrees(picture, wanted)
    assert picture.microns == (0.25, 0.25)
    window_agrees(large.open_picture(path, level=1), halved(wanted))
    del root.attrs["ome"]
    with pytest.raises(LargeError, match="multiscales"):
        large.open_picture(path)


def test_deep_zoom(tmp_path):
    wanted = photo()
    levels = [wanted]
    while max(levels[-1].shape[:2]) > 1:
        side = [(s + 1) // 2 for s in levels[-1].shape[1::-1]]
        levels.append(np.asarray(Image.fromarray(levels[-1]).resize(side)))
    for number, level in enumerate(reversed(levels)):
        folder = tmp_path / "photo_files" / str(number)
        folder.mkdir(parents=True)
        for top in range(0, level.shape[0], 100):
            for left in range(0, level.shape[1], 100):
                y, x = max(0, top - 2), max(0, left - 2)
                tile = level[y : top + 102, x : left + 102]
                Image.fromarray(tile).save(folder / f"{left // 100}_{top // 100}.png")
    (tmp_path / "photo.dzi").write_text(
        '<?xml version="1.0"?><Image xmlns="http://schemas.microsoft.com/deepzoom/2008" '
        'Format="png" Overlap="2" TileSize="100"><Size Width="420" Height="300"/></Image>'
    )
    picture = large.open_picture(tmp_path / "photo.dzi")
    window_agrees(picture, wanted)
    window_agrees(large.open_picture(tmp_path / "photo.dzi", level=1), levels[1])
    (tmp_path / "photo.dzi").write_text("<Image")
    with pytest.raises(LargeError, match="dzi"):
        large.open_picture(tmp_path / "photo.dzi")


def test_zoomify(tmp_path):
    """Tiles of one colour each; the finest has 5 x 4."""
    (tmp_path / "TileGroup0").mkdir()
    sizes = [(150, 112), (300, 225), (600, 450), (1200, 900)]
    for level, (width, height) in enumerate(sizes):
        for left in range(0, width, 256):
            for top in range(0, height, 256):
                colour = (40 * level, left // 8, top // 8)
                size = (min(256, width - left), min(256, height - top))
                name = f"{level}-{left // 256}-{top // 256}.jpg"
                Image.new("RGB", size, colour).save(tmp_path / "TileGroup0" / name, quality=95)
    (tmp_path / "ImageProperties.xml").write_text(
        '<IMAGE_PROPERTIES WIDTH="1200" HEIGHT="900" NUMTILES="29" TILESIZE="256" />'
    )
    picture = large.open_picture(tmp_path)
    assert picture.source.levels == [(900, 1200), (450, 600), (225, 300), (112, 150)]
    found = picture.window(250, 500, 20, 30)
    assert np.abs(found[0, 0].astype(int) - (120, 32, 0)).max() < 4
    assert np.abs(found[-1, -1].astype(int) - (120, 64, 32)).max() < 4
    (tmp_path / "TileGroup0" / "3-4-3.jpg").unlink()
    with pytest.raises(ImageError, match=r"3-4-3\.jpg"):
        picture.window(850, 1100, 10, 10)


# --------------------------------------------------------------------------------------- bad input


def test_what_is_no_picture(tmp_path, tifffile):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.tif").write_text("no picture")
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY")
    for place in ("folder", "text.tif", "bad.npy", "not_there.png", "https://some.where/a.tif"):
        name = place if "//" in place else tmp_path / place
        with pytest.raises(LargeError) as error:
            large.open_picture(name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("left", [100_000, 300, 6])
def test_a_truncated_tiff(tifffile, tmp_path, left):
    path = tmp_path / "photo.tif"
    tifffile.imwrite(path, photo(), photometric="rgb", tile=(64, 64))
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(LargeError, match=r"photo\.tif"):
        large.open_picture(path)


def test_looks_that_cannot_be(tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(photo()).save(path)
    for look, noun in (
        ({"level": 1}, "no level"),
        ({"mpp": 0.5}, "resolution"),
        ({"mpp": "wide"}, "resolution"),
        ({"mpp": 1, "level": 0}, "give one"),
        ({"region": (0, 0, 421, 300)}, "outside"),
        ({"region": (-1, 0, 20, 20)}, "outside"),
        ({"region": (0, 0, 20)}, "region"),
    ):
        with pytest.raises((LargeError, InputError), match=noun) as error:
            large.open_picture(path, **look)
        assert "\n" not in str(error.value)


def test_masks_of_files(tmp_path):
    picture = large.ArrayPicture(photo())
    wanted = np.zeros((19, 27), bool)
    wanted[3:10, 5:20] = True
    full = wanted.repeat(16, axis=0).repeat(16, axis=1)[:300, :420]
    for number, mask in enumerate((full, wanted, full[::4, ::4])):
        path = tmp_path / f"{number}.png"
        Image.fromarray(mask.astype(np.uint8)).save(path)
        assert np.array_equal(large.mask_of(picture, path, 16), wanted)
    Image.fromarray(photo()).save(tmp_path / "photo.png")
    part = large.open_picture(tmp_path / "photo.png", region=(64, 32, 160, 160))
    assert np.array_equal(large.mask_of(part, tmp_path / "0.png", 16), wanted[2:12, 4:14])
    Image.fromarray(np.zeros((300, 200), np.uint8)).save(tmp_path / "other.png")
    with pytest.raises(LargeError, match="size"):
        large.mask_of(picture, tmp_path / "other.png", 16)
    with pytest.raises(LargeError, match="mask"):
        large.mask_of(picture, tmp_path / "not_there.png", 16)


def test_a_missing_library_is_told(tmp_path, monkeypatch, tifffile):
    from veca.large.sources import geo

    def absent(*given):
        raise MissingExtraError("reading GeoTIFF files needs rasterio")

    monkeypatch.setattr(geo, "require", absent)
    with pytest.raises(MissingExtraError, match="rasterio"):
        large.open_picture(_vrt(tmp_path))


def _vrt(folder):
    path = folder / "picture.vrt"
    path.write_text("<VRTDataset/>")
    return path
