"""What patches see: the whole picture, a window, an overview."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from veca import large
from veca.errors import InputError, LargeError
from veca.images import normalize


def photo(height=160, width=224):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def alone(model, pixels, **options):
    images = normalize(torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255)[None]
    with torch.no_grad():
        out = model(images, **options)
    return out.patches[0].view(*out.grid, -1).numpy(), out.cores[0].numpy()


def close(found, wanted):
    return np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).mean()


def test_a_tile_is_the_middle_of_its_window(tiny):
    picture = photo()
    out = large.features(tiny, picture, context="tile", tile=2, cores=5)
    assert out.memory is None
    # Patches 4..5 x 6..7, with four around them.
    window, _ = alone(tiny, picture[:160, 32:192], cores=5)
    assert close(out.features[4:6, 6:8], window[4:6, 4:6])
    corner, _ = alone(tiny, picture[:96, :96], cores=5)
    assert close(out.features[:2, :2], corner[:2, :2])
    whole = large.features(tiny, picture, cores=5).features
    assert not close(out.features[4:6, 6:8], whole[4:6, 6:8])


def test_the_cores_of_tiles_are_their_mean(tiny):
    picture = photo(16 * 3, 16 * 4)
    out = large.features(tiny, picture, context="tile", tile=2)
    parts = [alone(tiny, picture)[1]] * 4  # every window is the whole
    assert close(out.cores.numpy(), np.mean(parts, axis=0))


def test_merging_in_tiles(tiny):
    picture = photo()
    out = large.features(tiny, picture, context="tile", tile=2, keep=0.5)
    window, _ = alone(tiny, picture[:160, 32:192], keep=0.5)
    assert close(out.features[4:6, 6:8], window[4:6, 4:6])
    native = large.features(tiny, picture, context="tile", tile=2, keep=0.5, width="native")
    assert native.features.shape[2] == tiny.config.width
    with pytest.raises(LargeError, match="mask"):
        large.features(tiny, picture, context="tile", keep=0.5, mask=np.ones((10, 14), bool))
    with pytest.raises(LargeError, match=r"keep=0\.5 goes with context='tile'"):
        large.features(tiny, picture, keep=0.5)


def test_an_overview_of_a_small_picture_is_the_picture(tiny):
    """It is scaled down only above its size, so there nothing is lost."""
    picture = photo()
    out = large.features(tiny, picture, context="overview", tile=3)
    assert close(out.features, large.features(tiny, picture).features)


def test_tiles_of_an_overview_change_nothing(tiny, monkeypatch):
    monkeypatch.setattr("veca.large.sweep._OVERVIEW", 96)
    picture = photo()
    mask = np.random.default_rng(1).random((10, 14)) < 0.7
    for context in ("overview", "tile+overview"):
        out = large.features(tiny, picture, context=context, tile=3, mask=mask)
        assert not out.features[~mask].any()
    one, other = (
        large.features(tiny, picture, context="overview", tile=tile, mask=mask) for tile in (3, 20)
    )
    assert close(one.features, other.features)
    assert not close(one.features[mask], large.features(tiny, picture, mask=mask).features[mask])
    # And the memory reads regions of it.
    pixels = large.region(tiny, picture, (32, 48), (64, 32))
    with torch.no_grad():
        read = tiny.read(one.memory, pixels, (32, 48)).patches[0].view(4, 2, -1).numpy()
    assert close(read[mask[2:6, 3:5]], one.features[2:6, 3:5][mask[2:6, 3:5]])


def test_both_are_seen(tiny, monkeypatch):
    """With an overview beside it a tile is neither of the two."""
    monkeypatch.setattr("veca.large.sweep._OVERVIEW", 96)
    picture = photo()
    found = {
        context: large.features(tiny, picture, context=context, tile=3).features
        for context in ("tile", "overview", "tile+overview")
    }
    assert not close(found["tile+overview"], found["tile"])
    assert not close(found["tile+overview"], found["overview"])


def test_masks_of_tiles(tiny):
    picture = photo()
    mask = np.ones((10, 14), bool)
    mask[:, 7:] = False
    half = large.features(tiny, picture, context="tile", tile=2, mask=mask)
    cut = large.features(tiny, picture[:, :112], context="tile", tile=2)
    assert not half.features[:, 7:].any()
    assert close(half.features[:, :2], cut.features[:, :2])


def test_what_cannot_be(tiny):
    with pytest.raises(InputError, match="context"):
        large.features(tiny, photo(), context="sea")
    with pytest.raises(InputError, match="width"):
        large.features(tiny, photo(), width="wide")
    with pytest.raises(LargeError, match="too little"):
        large.features(tiny, photo(), context="tile", memory="100kB")
    estimated = large.estimate(tiny, (4096, 4096), context="tile")
    assert estimated.side == 24 and estimated.work > 1.5 and estimated.spill == "none"
