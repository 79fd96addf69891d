"""Features with a share of the patch tokens: recorded, resumed, searched, refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import veca
from veca.embed import Collection, extract, iter_embeddings, read_embeddings, read_features, search
from veca.embed.settings import Settings, with_later, without_later
from veca.errors import InputError, VecaWarning

SIZE = (64, 96)
BOTH = ("cls", "patches")
WRONG = [0, 1.5, "half", float("nan"), -1]


@pytest.fixture
def model(weights):
    return veca.load(weights)


def settings_of(folder, name):
    return json.loads((folder / name).read_text())


def test_embeddings_are_the_models_at_that_share(embed, model, images, tmp_path):
    embed(images, tmp_path / "out", what=BOTH, size=SIZE, keep=0.4)
    assert settings_of(tmp_path / "out", "embed.json")["settings"]["keep"] == 0.4
    rows = next(iter_embeddings(tmp_path / "out", patches=True))
    pixels = model.preprocess(rows.paths[3], SIZE).pixels
    with torch.inference_mode():
        merged, plain = (model(pixels, cores=4, keep=keep) for keep in (0.4, 1))
    np.testing.assert_allclose(rows.cls[3], merged.cls[0], atol=1e-5)
    np.testing.assert_allclose(rows.patches[3].reshape(24, -1), merged.patches[0], atol=1e-5)
    assert np.abs(rows.cls[3] - plain.cls[0].numpy()).max() > 1e-3


@pytest.mark.parametrize("out", ["out", "out.npz", "out.safetensors"])
def test_features_are_the_models_at_that_share(model, images, tmp_path, out):
    extract(model, images, tmp_path / out, size=SIZE, keep=0.4, dtype="float32")
    if out == "out":
        assert settings_of(tmp_path / out, "features.json")["keep"] == 0.4
        found = read_features(next((tmp_path / out).rglob("*.npz")))
        name, cls = found["image"], found["cls"]
    else:
        found = read_features(tmp_path / out)
        name, cls = found["images"][0], found["cls"][0]
    assert found["keep"] == 0.4
    with torch.inference_mode():
        merged = model(model.preprocess(images / name, SIZE).pixels, keep=0.4)
    np.testing.assert_allclose(cls, merged.cls[0], atol=1e-5)


def test_native_features_merge_as_well(model, images, tmp_path):
    extract(model, images, tmp_path / "out", size=SIZE, keep=0.4, width="native", dtype="float32")
    found = read_features(next((tmp_path / "out").rglob("*.npz")))
    with torch.inference_mode():
        tokens = model.tokens(model.preprocess(images / found["image"], SIZE).pixels, keep=0.4)
    np.testing.assert_allclose(found["cls"], tokens.cls[0], atol=1e-5)


def test_all_tokens_leave_no_word_as_in_0_1(embed, model, images, tmp_path):
    """The fingerprints of folders that 0.1 left have to stay what they are."""
    for name, keep in (("a", None), ("b", 1), ("c", 0.5)):
        embed(images, tmp_path / name, keep=keep)
    a, b, c = (settings_of(tmp_path / name, "embed.json") for name in "abc")
    assert a["settings"] == b["settings"] and not {"keep", "agreement"} & a["settings"].keys()
    prints = [Settings.from_dict(one["settings"]).fingerprint for one in (a, b, c)]
    assert prints[0] == prints[1] != prints[2]
    extract(model, images, tmp_path / "f", size=32, what=["cls"])
    assert not {"keep", "agreement"} & settings_of(tmp_path / "f", "features.json").keys()
    found = read_features(next((tmp_path / "f").rglob("*.npz")))
    assert "keep" not in found
    old = {"cores": 4}
    assert with_later(old)["keep"] == 1.0 and without_later(with_later(old)) == old


def test_going_on_with_another_share_is_refused(embed, model, images, tmp_path):
    embed(images / "0", tmp_path / "e", keep=0.5)
    extract(model, images / "0", tmp_path / "f", size=32, keep=0.5, root=images)
    assert embed(images, tmp_path / "e", keep=0.5).added
    assert extract(model, images, tmp_path / "f", size=32, keep=0.5).reused
    for other in (0.6, None):
        with pytest.raises(InputError, match=r"keep: 0\.5 there"):
            embed(images, tmp_path / "e", keep=other)
        with pytest.raises(InputError, match=r"keep: 0\.5 there"):
            extract(model, images, tmp_path / "f", size=32, keep=other)


def test_a_query_keeps_what_the_collection_keeps(embed, images, tmp_path):
    pytest.importorskip("usearch")
    embed(images, tmp_path / "out", size=SIZE, keep=0.4)
    photo, vectors = (found[7] for found in read_embeddings(tmp_path / "out"))
    collection = Collection(tmp_path / "out")
    np.testing.assert_allclose(collection.embed(photo), vectors, atol=1e-5)
    assert collection.asked_otherwise(keep=0.4) == []
    with pytest.warns(VecaWarning, match="keep 0.4, not 1"):
        assert search(collection, photo, 1, keep=1.0)[0].path == photo
    embed(images, tmp_path / "full", size=SIZE)
    with pytest.raises(InputError, match=r"keep 0\.4 and 1"):
        search([tmp_path / "out", tmp_path / "full"], photo)


@pytest.mark.parametrize("keep", WRONG)
def test_shares_that_are_none_leave_nothing(embed, model, images, tmp_path, keep):
    with pytest.raises(InputError, match="keep"):
        embed(images, tmp_path / "e", keep=keep)
    with pytest.raises(InputError, match="keep"):
        extract(model, images, tmp_path / "f", keep=keep)
    assert not (tmp_path / "e").exists() and not (tmp_path / "f").exists()


def test_a_promise_without_auto_is_refused(embed, model, images, tmp_path):
    with pytest.raises(InputError, match="agreement"):
        embed(images, tmp_path / "e", agreement=0.98)
    with pytest.raises(InputError, match="agreement"):
        extract(model, images, tmp_path / "f", keep=0.5, agreement=0.98)
