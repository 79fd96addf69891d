"""Zarr, HDF5 and GeoTIFF hold the features of the pass; regions come back, stopped passes go on."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conftest import SMALLEST, stirred
from veca import create_model, large
from veca.errors import AlreadyThereError, CoreMemoryError, LargeError, OutputError


def photo(height=150, width=212):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def picture(tmp_path):
    np.save(tmp_path / "photo.npy", photo())
    return large.open_picture(tmp_path / "photo.npy")


@pytest.fixture
def zarr():
    return pytest.importorskip("zarr", reason="needs the extra large")


@pytest.fixture
def rasterio():
    return pytest.importorskip("rasterio", reason="needs the extra geo")


def other_model():
    model = stirred(create_model(SMALLEST)).eval()
    with torch.no_grad():
        model.bank.prefix(1)[0].add_(1)
    return model


def half(array):
    return array.astype(np.float16)


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("tile", [3, 16])
@pytest.mark.parametrize("width", ["native", "projected"])
def test_zarr(tiny, zarr, tmp_path, picture, tile, width):
    out = large.features(tiny, picture, tmp_path / "f.zarr", tile=tile, width=width, cores=5)
    wanted = large.features(tiny, picture, tile=tile, width=width, cores=5)
    store = large.FeatureStore(tmp_path / "f.zarr")
    assert out.features is None and store.grid == (10, 14)
    assert np.array_equal(store.features[:], half(wanted.features))
    assert store.facts["weights"] == wanted.memory.weights
    assert (store.facts["cores"], store.facts["context"]) == (5, "image")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.zarr", "photo.npy"]


def test_a_region_from_the_store_and_from_the_memory(tiny, zarr, tmp_path, picture):
    mask = np.random.default_rng(1).random((10, 14)) < 0.7
    for width in ("native", "projected"):
        path = tmp_path / f"{width}.zarr"
        large.features(tiny, picture, path, tile=4, width=width, mask=mask)
        store = large.FeatureStore(path)
        region = (30, 50, 100, 60)
        assert store.patches(region) == (3, 1, 4, 8)
        found = store.read(region)
        assert np.array_equal(found, store.features[3:7, 1:9])
        assert np.abs(found.astype(float) - store.compute(tiny, region)).max() < 2e-3
        assert not found[~mask[3:7, 1:9]].any()
    with pytest.raises(LargeError, match="outside"):
        store.read((200, 0, 20, 10))
    with pytest.raises(CoreMemoryError, match="other weights"):
        store.compute(other_model(), region)


def test_the_memory_alone(tiny, zarr, tmp_path, picture):
    writer = large.ZarrWriter(tmp_path / "m.zarr", "float32", features=False)
    large.features(tiny, picture, writer, tile=4)
    store = large.FeatureStore(tmp_path / "m.zarr")
    whole = large.features(tiny, picture, tile=4).features
    found = store.compute(tiny, (0, 0, 212, 150))
    assert np.abs(found - whole).max() <= 1e-4 * np.abs(whole).mean()
    with pytest.raises(LargeError, match="memory alone"):
        store.read((0, 0, 20, 20))
    np.save(tmp_path / "photo.npy", 255 - photo())
    with pytest.raises(LargeError, match="changed"):
        store.compute(tiny, (0, 0, 20, 20))


def test_a_store_is_not_replaced_unasked(tiny, zarr, tmp_path, picture):
    path = tmp_path / "f.zarr"
    large.features(tiny, picture, path, tile=4)
    before = files(path)
    with pytest.raises(AlreadyThereError, match="already"):
        large.features(tiny, picture, path, tile=4)
    other = other_model()
    for change, noun in (
        ({"model": other}, "weights"),
        ({"cores": 3}, "cores"),
        ({"width": "native"}, "width"),
    ):
        with pytest.raises(OutputError, match=f"other {noun}"):
            large.features(**{"model": tiny, "picture": picture, "out": path, "tile": 4, **change})
    assert files(path) == before
    large.features(tiny, picture, large.ZarrWriter(path, overwrite=True), tile=4, cores=3)
    assert large.FeatureStore(path).facts["cores"] == 3
    (path / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="other things"):
        large.features(tiny, picture, large.ZarrWriter(path, overwrite=True), tile=4)
    (tmp_path / "folder.zarr").mkdir()
    with pytest.raises(OutputError, match="something else"):
        large.features(tiny, picture, tmp_path / "folder.zarr", tile=4)


class Stopped(Exception):
    pass


@pytest.mark.parametrize(
    ("suffix", "context"),
    [("zarr", "image"), ("zarr", "tile"), ("zarr", "overview"), ("h5", "image"), ("tif", "image")],
)
def test_stopped_passes_end_with_the_same_bytes(tiny, zarr, tmp_path, picture, suffix, context):
    pytest.importorskip({"zarr": "zarr", "h5": "h5py", "tif": "rasterio"}[suffix])
    options = {"tile": 3, "context": context, "spill": "auto"}
    wanted, path = tmp_path / f"wanted.{suffix}", tmp_path / f"f.{suffix}"
    large.features(tiny, picture, wanted, **options)

    def stop(done, total):
        if done in stops:
            stops.remove(done)
            raise Stopped

    stops, seen = [1, 5, 20], []
    for _ in range(3):
        with pytest.raises(Stopped):
            large.features(tiny, picture, path, progress=stop, **options)
        assert not path.exists()
    large.features(tiny, picture, path, progress=lambda d, t: seen.append((d, t)), **options)
    total = 60 if context == "image" else 20
    assert [done for done, _ in seen] == list(range(21, total + 1))
    if suffix == "zarr":
        assert files(path) == files(wanted)
    else:
        assert path.read_bytes() == wanted.read_bytes()
    assert len(list(tmp_path.iterdir())) == 3  # and the picture: nothing is left over


def test_a_disk_that_fills_up_loses_nothing(tiny, zarr, tmp_path, picture, monkeypatch):
    path, options = tmp_path / "f.zarr", {"tile": 3, "spill": "disk"}
    large.features(tiny, picture, tmp_path / "wanted.zarr", **options)
    adds = []

    class Filling:
        def __init__(self, array):
            self.array = array

        def __setitem__(self, place, value):
            adds.append(place)
            if len(adds) == 7:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.array[place] = value

    begin = large.ZarrWriter.begin

    def filling(self, layout, resumed):
        there = begin(self, layout, resumed)
        self._features = Filling(self._features)
        return there

    monkeypatch.setattr(large.ZarrWriter, "begin", filling)
    with pytest.raises(OutputError, match="free some space"):
        large.features(tiny, picture, path, **options)
    assert not path.exists()
    large.features(tiny, picture, path, **options)
    assert len(adds) == 21  # the seventh again, and those after it
    assert files(path) == files(tmp_path / "wanted.zarr")


def test_a_damaged_store_is_seen(tiny, zarr, tmp_path, picture):
    path = tmp_path / "f.zarr"
    large.features(tiny, picture, path, tile=16)
    shard = next(p for p in (path / "features" / "c").rglob("*") if p.is_file())
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(LargeError, match="damaged"):
        large.FeatureStore(path).read((0, 0, 212, 150))
    for name in ("nothing.zarr", "photo.npy"):
        with pytest.raises(LargeError, match="no features"):
            large.FeatureStore(tmp_path / name)


@pytest.mark.parametrize("pool", [1, 4])
def test_hdf5(tiny, tmp_path, picture, pool):
    h5py = pytest.importorskip("h5py", reason="needs the extra large")
    mask = np.random.default_rng(1).random((10, 14)) < 0.5
    mask[:4, :8] = False
    wanted = large.features(tiny, picture, mask=mask, tile=4).features
    writer = large.Hdf5Writer(tmp_path / "f.h5", "float32", pool=pool)
    large.features(tiny, picture, writer, mask=mask, tile=4)
    with h5py.File(tmp_path / "f.h5") as file:
        coords, features = file["coords"][:], file["features"][:]
        assert file["coords"].attrs["patch_size_level0"] == 16 * pool
        assert json.loads(file["features"].attrs["veca"])["context"] == "image"
    if pool == 1:
        rows, columns = np.nonzero(mask)
        assert np.array_equal(coords, np.stack([16 * columns, 16 * rows], axis=1))
        assert np.array_equal(features, wanted[mask])
    else:
        assert [64 * 2, 0] in coords.tolist() and [0, 0] not in coords.tolist()
        at = coords.tolist().index([64 * 2, 64])
        part = np.s_[4:8, 8:12]
        assert np.allclose(features[at], wanted[part][mask[part]].mean(axis=0), atol=1e-6)


def test_coordinates_are_those_of_the_finest_level(tiny, tmp_path):
    h5py = pytest.importorskip("h5py", reason="needs the extra large")
    tifffile = pytest.importorskip("tifffile", reason="needs the extra large")
    tifffile.imwrite(
        tmp_path / "photo.tif", photo(), photometric="rgb", resolution=(20_000, 20_000),
        resolutionunit="CENTIMETER",
    )  # fmt: skip
    picture = large.open_picture(tmp_path / "photo.tif", mpp=1, region=(16, 8, 64, 48))
    large.features(tiny, picture, tmp_path / "f.h5")
    with h5py.File(tmp_path / "f.h5") as file:
        assert file["coords"][:5].tolist() == [[32, 16], [64, 16], [96, 16], [128, 16], [32, 48]]
        assert file["coords"].attrs["patch_size_level0"] == 32


def test_geotiff_of_components(tiny, rasterio, tmp_path):
    transform = rasterio.Affine(2, 0, 500_000, 0, -2, 4_000_000)
    with rasterio.open(
        tmp_path / "aerial.tif", "w", driver="GTiff", height=150, width=212, count=3,
        dtype="uint8", crs="EPSG:32633", transform=transform,
    ) as file:  # fmt: skip
        file.write(np.moveaxis(photo(), 2, 0))
    picture = large.open_picture(tmp_path / "aerial.tif", region=(32, 16, 176, 128))
    mask = np.ones((8, 11), bool)
    mask[0, :3] = False
    large.features(tiny, picture, tmp_path / "f.tif", mask=mask, tile=4)
    features = large.features(tiny, picture, mask=mask, tile=4).features
    with rasterio.open(tmp_path / "f.tif") as file:
        found = np.moveaxis(file.read(), 0, -1)
        assert tuple(file.transform)[:6] == (32, 0, 500_064, 0, -32, 3_999_968)
        assert file.crs.to_epsg() == 32633 and np.isnan(file.nodata)
    assert np.isnan(found[~mask]).all()
    values = features[mask].astype(np.float64)
    values -= values.mean(axis=0)
    variances = np.linalg.eigvalsh(values.T @ values / len(values))[::-1][:3]
    assert np.allclose(found[mask].var(axis=0), variances, rtol=0.01)


def test_geotiff_of_classes(tiny, rasterio, tmp_path, picture):
    width = SMALLEST.feature_width
    weight = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    save_file({"weight": weight, "bias": torch.ones(4)}, tmp_path / "head.safetensors")
    mask = np.ones((10, 14), bool)
    mask[2:4] = False
    writer = large.GeoTiffWriter(tmp_path / "f.tif", head=tmp_path / "head.safetensors")
    large.features(tiny, picture, writer, mask=mask, tile=4)
    features = half(large.features(tiny, picture, mask=mask, tile=4).features)
    wanted = (torch.from_numpy(features).float() @ weight.T + 1).argmax(dim=-1).numpy()
    with rasterio.open(tmp_path / "f.tif") as file:
        found = file.read(1)
    assert (found[~mask] == 255).all() and np.array_equal(found[mask], wanted[mask])
    save_file({"weight": weight[:, 1:].contiguous()}, tmp_path / "small.safetensors")
    for name, noun in (("small", "takes features"), ("nothing", "nothing")):
        with pytest.raises(LargeError, match=noun):
            large.features(
                tiny, picture,
                large.GeoTiffWriter(tmp_path / "g.tif", head=tmp_path / f"{name}.safetensors"),
            )  # fmt: skip
