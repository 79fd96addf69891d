"""How wide features are, how many dimensions PCA leaves of them, and what a folder goes on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import veca
from conftest import stirred
from data.pictures import make_folder
from veca import VecaConfig
from veca.config import DEFAULT_SIZE
from veca.embed import Collection, extract, iter_embeddings, pca, read_embeddings, read_features
from veca.embed.estimate import estimate
from veca.embed.sources import open_images
from veca.errors import InputError, OutputError

PROJECTING = VecaConfig(depth=1, width=32, heads=2, num_cores=4, output_width=48)


@pytest.fixture
def weights(tmp_path):
    """Of a network with an output projection."""
    return veca.save(stirred(veca.create_model(PROJECTING)), tmp_path / "projecting")


@pytest.fixture
def model(weights):
    return veca.load(weights)


def settings_of(folder, name):
    return json.loads((folder / name).read_text())


# ------------------------------------------------------------------------------------------ width


@pytest.mark.parametrize(
    ("width", "cls", "patches"), [("native", 32, 32), ("projected", 48, 48), ("mixed", 48, 32)]
)
def test_features_are_as_wide_as_asked_for(model, images, tmp_path, width, cls, patches):
    extract(model, images, tmp_path / "out", size=(32, 48), width=width, dtype="float32")
    found = read_features(next((tmp_path / "out").rglob("*.npz")))
    assert found["cls"].shape == (cls,) and found["patches"].shape == (2, 3, patches)
    photo = images / found["image"]
    pixels = model.preprocess(photo, (32, 48)).pixels
    with torch.inference_mode():
        tokens, projected = model.tokens(pixels), model(pixels)
    wanted = {32: tokens, 48: projected}
    np.testing.assert_allclose(found["cls"], wanted[cls].cls[0], atol=1e-5)
    flat = found["patches"].reshape(6, -1)
    np.testing.assert_allclose(flat, wanted[patches].patches[0], atol=1e-5)


def test_embeddings_are_as_wide_as_asked_for(embed, images, tmp_path):
    for width, cls, patches in (
        ("native", 32, 32),
        ("projected", 48, 48),
        ("auto", 48, 48),
        ("mixed", 48, 32),
    ):
        embed(images, tmp_path / width, what=("cls", "patches"), width=width)
        rows = next(iter_embeddings(tmp_path / width, patches=True))
        assert rows.cls.shape[1] == cls and rows.patches[0].shape == (2, 3, patches)


def test_cls_alone_is_projected_as_in_0_1(embed, model, images, tmp_path):
    embed(images, tmp_path / "a")
    embed(images, tmp_path / "b", width="projected")
    assert "width" not in settings_of(tmp_path / "a", "embed.json")["settings"]
    assert np.array_equal(*(read_embeddings(tmp_path / name)[1] for name in "ab"))
    extract(model, images, tmp_path / "c", size=32, what=["cls"])
    assert "width" not in settings_of(tmp_path / "c", "features.json")


def test_without_a_projection_there_is_one_width(tiny, images, tmp_path):
    extract(tiny.eval(), images, tmp_path / "out", size=32, width="native")
    extract(tiny, images, tmp_path / "out", size=32, width="projected")
    with pytest.raises(InputError, match="narrow"):
        extract(tiny, images, tmp_path / "out", size=32, width="narrow")


def test_search_embeds_the_query_as_wide_as_the_collection(embed, images, tmp_path):
    embed(images, tmp_path / "out", width="native")
    collection = Collection(tmp_path / "out")
    photo = read_embeddings(tmp_path / "out")[0][7]
    vector = collection.embed(photo)
    assert vector.shape == (32,) and collection.search(vector, 1)[0].path == photo


# ------------------------------------------------------------------------- a folder that goes on


def of_0_1(folder, name):
    """A folder as 0.1 left it: another size, and no word of width."""
    path = folder / name
    manifest = json.loads(path.read_text())
    assert not {"width", "pca"} & {**manifest, **manifest.get("settings", {})}.keys()
    manifest["veca"] = "0.1.0"
    path.write_text(json.dumps(manifest))


def test_a_folder_of_embeddings_keeps_its_size_and_width(embed, images, tree, tmp_path):
    both = ("cls", "patches")
    embed(images / "0", tmp_path / "old", what=both, size=48, width="projected")
    embed(images, tmp_path / "whole", what=both, size=48, width="projected")
    of_0_1(tmp_path / "old", "embed.json")
    embed(images, tmp_path / "old", what=both, size="auto")
    found = settings_of(tmp_path / "old", "embed.json")["settings"]
    assert found["size"] == 48
    rows = {p: g for r in iter_embeddings(tmp_path / "old", patches=True)
            for p, g in zip(r.paths, r.patches, strict=True)}  # fmt: skip
    for part in iter_embeddings(tmp_path / "whole", patches=True):
        for path, grid in zip(part.paths, part.patches, strict=True):
            np.testing.assert_allclose(rows[path], grid, atol=1e-5)
    with pytest.raises(InputError, match="size: 48 there"):
        embed(images, tmp_path / "old", what=both, size=32)
    with pytest.raises(InputError, match="width"):
        embed(images, tmp_path / "old", what=both, size="auto", width="native")


def test_a_folder_of_features_keeps_its_size_and_width(model, images, tree, tmp_path):
    extract(model, images, tmp_path / "whole", size=48, width="projected")
    extract(model, images, tmp_path / "old", size=48, width="projected")
    of_0_1(tmp_path / "old", "features.json")
    next((tmp_path / "old").rglob("*.npz")).unlink()
    assert extract(model, images, tmp_path / "old").computed == 1
    for name, content in tree(tmp_path / "whole").items():
        if name != "features.json":
            assert tree(tmp_path / "old")[name] == content
    with pytest.raises(InputError, match="size: 48 there, 32 now"):
        extract(model, images, tmp_path / "old", size=32)
    with pytest.raises(InputError, match="width"):
        extract(model, images, tmp_path / "old", width="mixed")
    extract(model, images, tmp_path / "old", overwrite=True, size=32, width="mixed")
    assert settings_of(tmp_path / "old", "features.json")["width"] == "mixed"
    next((tmp_path / "old").rglob("*.npz")).unlink()
    assert extract(model, images, tmp_path / "old").computed == 1  # at its own size and width


def test_a_new_folder_has_the_one_default_size(embed, model, images, tmp_path):
    photo = next(images.rglob("*.png"))
    embed(photo, tmp_path / "a", size="auto")
    extract(model, photo, tmp_path / "b", what=["cls"])
    assert settings_of(tmp_path / "a", "embed.json")["settings"]["size"] == DEFAULT_SIZE
    assert settings_of(tmp_path / "b", "features.json")["size"] == DEFAULT_SIZE


# -------------------------------------------------------------------------------------------- PCA


def test_components_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    sample = rng.normal(size=(200, 6)) * [9, 7, 5, 3, 2, 1] + 4
    found = pca.fit({"cls": sample}, 3)
    reduced = found("cls", torch.from_numpy(sample)).numpy()
    _, _, right = np.linalg.svd(sample - sample.mean(0), full_matrices=False)
    expected = (sample - sample.mean(0)) @ right[:3].T
    np.testing.assert_allclose(np.abs(reduced), np.abs(expected), atol=1e-3)
    assert pca.fit({"cls": sample}, 3).settings == found.settings
    with pytest.raises(InputError, match="pca=7"):
        pca.fit({"cls": sample}, 7)


def test_rows_and_queries_are_reduced(embed, images, tmp_path):
    both = ("cls", "patches")
    embed(images, tmp_path / "whole", what=both, width="projected")
    embed(images, tmp_path / "out", what=both, width="projected", pca=5)
    reduction = pca.load(
        tmp_path / "out" / pca.FILE, settings_of(tmp_path / "out", "embed.json")["settings"]["pca"]
    )
    assert reduction.dimensions == 5
    for whole, part in zip(
        iter_embeddings(tmp_path / "whole", patches=True),
        iter_embeddings(tmp_path / "out", patches=True),
        strict=True,
    ):
        np.testing.assert_allclose(
            part.cls, reduction("cls", torch.from_numpy(whole.cls)), atol=1e-4
        )
        for wide, narrow in zip(whole.patches, part.patches, strict=True):
            expected = reduction("patches", torch.from_numpy(wide))
            np.testing.assert_allclose(narrow, expected, atol=1e-4)
    collection = Collection(tmp_path / "out")
    photo = read_embeddings(tmp_path / "out")[0][3]
    assert collection.search(collection.embed(photo), 1)[0].path == photo


def test_a_folder_keeps_its_components(embed, images, tree, tmp_path):
    out = tmp_path / "out"
    embed(images / "0", out, pca=5)
    fitted = (out / pca.FILE).read_bytes()
    embed(images, out)
    assert (out / pca.FILE).read_bytes() == fitted and read_embeddings(out)[1].shape == (30, 5)
    for wanted in (4, 6):
        with pytest.raises(InputError, match="pca"):
            embed(images, out, pca=wanted)
    (out / pca.FILE).write_bytes(fitted[:-1] + bytes([fitted[-1] ^ 1]))
    with pytest.raises(InputError, match=r"pca\.safetensors"):
        embed(images, out)
    with pytest.raises(InputError, match=r"pca\.safetensors"):
        Collection(out)
    embed(images, out, overwrite=True)
    assert not (out / pca.FILE).exists() and read_embeddings(out)[1].shape == (30, 48)


@pytest.mark.parametrize("out", ["folder", "file.npz"])
def test_features_are_reduced(model, images, tmp_path, out):
    place = tmp_path / out
    options = {"size": (32, 48), "what": ["cls"], "dtype": "float32"}
    extract(model, images, place, pca=5, **options)
    extract(model, images, tmp_path / "whole", **options)
    beside = place / pca.FILE if place.is_dir() else tmp_path / "file.npz.pca.safetensors"
    reduction = pca.Reduction(__import__("safetensors.torch").torch.load_file(beside))
    path = place if place.is_file() else next(place.rglob("*.npz"))
    found = read_features(path)
    cls, name = (found["cls"][0], found["images"][0]) if place.is_file() else (
        found["cls"], found["image"])  # fmt: skip
    whole = read_features(tmp_path / "whole" / f"{name}.npz")["cls"]
    np.testing.assert_allclose(cls, reduction("cls", torch.from_numpy(whole)), atol=1e-4)


def test_a_folder_of_features_keeps_its_components(model, images, tmp_path):
    out = tmp_path / "out"
    extract(model, images, out, size=32, what=["cls"], pca=5)
    next(out.rglob("*.npz")).unlink()
    assert extract(model, images, out, what=["cls"]).computed == 1
    assert {read_features(path)["cls"].shape for path in out.rglob("*.npz")} == {(5,)}
    with pytest.raises(InputError, match="pca"):
        extract(model, images, out, what=["cls"], pca=6)
    extract(model, images, out, what=["cls"], size=32, overwrite=True)
    assert not (out / pca.FILE).exists()


def test_a_run_that_writes_nothing_leaves_no_components(model, images, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(model, images, tmp_path / "out", size=32, pca=5, progress=stop)
    assert not (tmp_path / "out").exists() or any((tmp_path / "out").rglob("*.npz"))


KILLED = """
import os, signal, sys
from veca._util import files
from veca.embed import embed, extract
import veca

kind, images, out, weights, at = sys.argv[1:6]
commit, left = files.commit, int(at)

def count(temporary, path):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    commit(temporary, path)

import veca.embed.writers.parquet as parquet
files.commit = parquet.commit = count
if kind == "embed":
    embed(images, out, weights=weights, size=(32, 48), batch_size=4, shard_rows=8, workers=0,
          threads=1, dtype="float32", what=("cls", "patches"), pca=5)
else:
    extract(veca.load(weights), images, out, size=(32, 48), batch_size=4, pca=5)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize(("kind", "moments"), [("embed", (1, 2, 4)), ("extract", (1, 2, 9))])
def test_killed_with_new_options_and_resumed(
    embed, images, weights, model, tree, tmp_path, kind, moments
):
    def run(out):
        if kind == "embed":
            embed(images, out, what=("cls", "patches"), pca=5, size=(32, 48))
        else:
            extract(model, images, out, size=(32, 48), batch_size=4, pca=5)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    if kind == "embed":
        embed(images, whole, what=("cls", "patches"), pca=5, cores=None)
    else:
        run(whole)
    words = [sys.executable, "-c", KILLED, kind, images, broken, weights]
    for at in moments:
        done = subprocess.run([*map(str, words), str(at)], check=False, capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    if kind == "embed":
        embed(images, broken, what=("cls", "patches"), pca=5, cores=None)
    else:
        run(broken)
    assert tree(broken) == tree(whole)


# --------------------------------------------------------------------------------------- estimate


def test_the_estimate_is_the_size_on_the_disk(embed, images, tmp_path):
    told = []
    embed(images, tmp_path / "out", what=("cls", "patches"), size=64, dtype="float16",
          on_estimate=told.append)  # fmt: skip
    (one,) = told
    rows = [r for part in iter_embeddings(tmp_path / "out", patches=True)
            for r in zip(part.cls, part.patches, strict=True)]  # fmt: skip
    assert one.bytes == sum(cls.nbytes + grid.nbytes for cls, grid in rows)
    assert "30 images" in str(one) and "kB on disk" in str(one)
    embed(images, tmp_path / "out", what=("cls", "patches"), size=64, dtype="float16",
          on_estimate=told.append)  # fmt: skip
    assert len(told) == 1  # nothing to do


def test_the_estimate_of_images_of_several_shapes(model, tmp_path):
    make_folder(tmp_path / "images", 4, 32, 64)
    make_folder(tmp_path / "images" / "tall", 4, 48, 32)
    settings = {"config": model.config.to_dict(), "size": 32, "dtype": "float32"}
    found = estimate(open_images(tmp_path / "images"), 8, settings, ("patches",))
    assert found.patches == round((2 * 4 + 3 * 2) / 2) and found.bytes == 8 * 7 * 48 * 4


def test_a_folder_that_is_named_like_a_file(embed, model, images, tmp_path):
    for name in ("u.h5", "u.PARQUET"):
        with pytest.raises(OutputError, match=name):
            extract(model, images, tmp_path / name, size=32)
        with pytest.raises(OutputError, match=name):
            embed(images, tmp_path / name)
        assert not (tmp_path / name).exists()
    extract(model, images, tmp_path / "v1.5", size=32)
