"""Large pictures in bf16 and int8, and tiles that are computed side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import veca
from conftest import SMALLEST, stirred
from veca import create_model, large
from veca.errors import LargeError
from veca.large import layers
from veca.model import Block
from veca.precision import at_precision
from veca.rope import region_coordinates, rotation

PICTURE = np.random.default_rng(0).integers(0, 256, (150, 212, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return stirred(create_model(SMALLEST.replace(num_cores=8)), 0.02).eval()


def near(found, wanted, share):
    return (found - wanted).abs().max() <= share * wanted.abs().max()


@pytest.mark.parametrize(("precision", "share"), [("bf16", 0.03), ("int8", 0.06)])
@torch.no_grad()
def test_a_layer_is_that_of_the_plain_block(model, precision, share):
    """What FastBlock has of its own: patches through a layer, what the cores take, and reading."""
    fast = at_precision(model, precision)
    x = torch.randn(2, 30, model.config.width, generator=torch.Generator().manual_seed(0))
    places = rotation(region_coordinates((40, 50), (3, 7), (5, 6))[None], layers.periods_of(model))
    for number in (1, 2):
        tokens, raw = layers.bank_of(model, 8, 2)
        start = layers.begin(model, number, tokens, raw)
        queries = layers.core_queries(model, number, start)
        given = (x, places, start, queries)
        wanted, taken = layers.through(layers.block_of(model, number), *given)
        found, part = layers.through(layers.block_of(fast, number), *given)
        assert near(found, wanted, share) and not torch.equal(found, wanted)
        assert near(part.result(), taken.result(), share)
        beside = layers.Beside(places, start.keys.flip(2) * 0.5, 20 * start.values.flip(2))
        wanted_so, _ = layers.through(layers.block_of(model, number), *given, beside)
        found_so, _ = layers.through(layers.block_of(fast, number), *given, beside)
        assert near(found_so, wanted_so, share) and not near(found_so, found, 1e-3)
        read = layers.block_of(fast, number).read(x, start.keys, start.values, places)
        assert torch.equal(read, found)


@pytest.mark.parametrize(("precision", "least"), [("bf16", 0.9995), ("int8", 0.998)])
@pytest.mark.parametrize("context", large.CONTEXTS)
@torch.no_grad()
def test_a_pass_in_a_precision_agrees_with_float32(
    model, tmp_path, monkeypatch, precision, least, context
):
    pytest.importorskip("zarr")
    fast = at_precision(model, precision)
    wanted = large.features(model, PICTURE, context=context, tile=4)
    monkeypatch.setattr(Block, "read", None)  # no tile may fall back on the slow linear layers
    found = large.features(fast, PICTURE, tmp_path / "f.zarr", context=context, tile=4)
    store = large.FeatureStore(tmp_path / "f.zarr")
    assert store.facts["precision"] == precision
    similar = torch.cosine_similarity(
        torch.from_numpy(store.features[:].astype(np.float32)),
        torch.from_numpy(wanted.features),
        -1,
    )
    assert similar.min() > least
    if found.memory is not None:
        region = store.compute(fast, (32, 16, 100, 64), large.ArrayPicture(PICTURE))
        assert np.abs(region - store.read((32, 16, 100, 64))).max() <= 2e-3 * np.abs(region).max()


def test_threads_change_no_bit(model, tmp_path):
    """Each computes a tile of its own."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(
                [
                    large.features(one, PICTURE, tile=3, spill="disk", state=tmp_path / "s")
                    for one in (model, at_precision(model, "int8"))
                ]
            )
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one.features, other.features)
        assert torch.equal(one.memory.keys, other.memory.keys)


def test_another_precision_does_not_go_on_with_a_pass(model, tmp_path):
    class Stopped(Exception):
        pass

    def stop(done, total):
        if done == 20:
            raise Stopped

    given = (PICTURE, tmp_path / "f.npy")
    with pytest.raises(Stopped):
        large.features(model, *given, tile=3, progress=stop)
    with pytest.raises(LargeError, match="another precision"):
        large.features(at_precision(model, "int8"), *given, tile=3)


@pytest.mark.slow
@torch.no_grad()
def test_int8_of_the_shipped_weights_agrees_on_photos():
    from veca.images.bundled import bundled_photos

    model = veca.load("tiny").eval()
    picture = large.open_picture(bundled_photos()[0])
    found, wanted = (
        large.features(one, picture, width="native").features
        for one in (at_precision(model, "int8"), model)
    )
    similar = torch.cosine_similarity(torch.from_numpy(found), torch.from_numpy(wanted), -1)
    assert similar.mean() > 0.995
