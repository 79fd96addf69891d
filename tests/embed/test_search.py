"""Search: exact against plain numpy, the index against exact, and its cache."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from PIL import Image

import veca
from data.pictures import encoded, picture
from veca.cli.main import main
from veca.data import pack
from veca.embed import Collection, contact_sheet, read_embeddings, search
from veca.errors import ImageError, InputError, MissingExtraError, VecaWarning, WeightsError


@pytest.fixture
def folder(embed, images, tmp_path):
    embed(images, tmp_path / "out")
    return tmp_path / "out"


def brute_force(folder, query, top):
    """The definition, in float64."""
    names, cls = read_embeddings(folder)
    cls, query = cls.astype(np.float64), np.asarray(query, np.float64)
    cosine = cls @ query / np.linalg.norm(cls, axis=1) / np.linalg.norm(query)
    order = np.argsort(-cosine)[:top]
    return [names[i] for i in order], cosine[order]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_neighbours_are_those_of_brute_force(embed, images, tmp_path, exact, dtype):
    if not exact:
        pytest.importorskip("usearch")
    embed(images, tmp_path / "out", dtype=dtype)
    collection = Collection(tmp_path / "out")
    rng = np.random.default_rng(0)
    for _ in range(5):
        query = rng.normal(size=32).astype(np.float32)
        names, cosine = brute_force(tmp_path / "out", query, 7)
        found = collection.search(query, 7, exact=exact)
        assert [m.path for m in found] == names
        np.testing.assert_allclose([m.score for m in found], cosine, atol=1e-5)


def test_an_image_finds_itself(folder, images):
    query = sorted(images.rglob("*.png"))[17]
    first, second = search(folder, query, 2, exact=True)
    assert first.path == str(query) and first.score == pytest.approx(1, abs=1e-5)
    assert second.score < first.score
    assert search(folder, Image.open(query), 1, exact=True)[0].path == str(query)
    assert search(folder, query.read_bytes(), 1, exact=True)[0].path == str(query)


def test_vectors_from_numpy_and_torch(folder):
    names, cls = read_embeddings(folder)
    for query in (cls[3], torch.from_numpy(cls[3]), cls[3].astype(np.float64)):
        assert search(folder, query, 1, exact=True)[0].path == names[3]


def test_more_than_there_are(folder):
    pytest.importorskip("usearch")
    query = read_embeddings(folder)[1][0]
    for exact in (True, False):
        assert len({m.path for m in search(folder, query, 99, exact=exact)}) == 30


def test_the_index_is_kept_and_made_again_when_shards_change(embed, folder, images):
    pytest.importorskip("usearch")
    query = read_embeddings(folder)[1][0]
    search(folder, query, exact=False)
    (kept,) = folder.glob("index-*.usearch")
    made = kept.stat().st_mtime_ns
    search(folder, query, exact=False)
    assert kept.stat().st_mtime_ns == made
    for i in (0, 1):
        (images / f"new{i}.png").write_bytes(encoded(picture(100 + i)))
    embed(images, folder)
    _, cls = read_embeddings(folder)
    assert search(folder, cls[31], exact=False)[0].path == read_embeddings(folder)[0][31]
    (new,) = folder.glob("index-*.usearch")
    assert new != kept


def test_a_damaged_index_is_made_again(folder):
    pytest.importorskip("usearch")
    names, cls = read_embeddings(folder)
    search(folder, cls[0], exact=False)
    (kept,) = folder.glob("index-*.usearch")
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 0xFF  # usearch takes it, and may end the process
    for damage in (b"no index", bytes(flipped)):
        kept.write_bytes(damage)
        assert search(folder, cls[5], exact=False)[0].path == names[5]
        assert kept.read_bytes() != damage and len(kept.read_bytes()) > 1000


def test_a_place_without_room_for_the_index(folder, monkeypatch, caplog):
    pytest.importorskip("usearch")

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("veca.embed.searching.commit", refuse)
    names, cls = read_embeddings(folder)
    assert search(folder, cls[5], exact=False)[0].path == names[5]
    assert "not kept" in caplog.text and not list(folder.glob("index-*"))


def test_usearch_is_needed_for_the_index_only(folder, monkeypatch):
    for name in ("usearch", "usearch.index"):
        monkeypatch.setitem(sys.modules, name, None)
    query = read_embeddings(folder)[1][0]
    assert search(folder, query)
    with pytest.raises(MissingExtraError, match=r"\[search\]"):
        search(folder, query, exact=False)


def test_a_core_install_is_told_of_the_one_extra_that_search_needs(folder, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] in ("pyarrow", "usearch")]:
        monkeypatch.setitem(sys.modules, name, None)
    for exact in (False, True):
        with pytest.raises(MissingExtraError, match=r"\[search\]"):
            search(folder, folder / "query.png", exact=exact)


def test_bad_queries(folder, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"bad\.png"):
        search(folder, tmp_path / "bad.png")
    with pytest.raises(ImageError, match=r"none\.png"):
        search(folder, tmp_path / "none.png")
    with pytest.raises(InputError, match="32 numbers"):
        search(folder, np.ones(31, np.float32))
    with pytest.raises(InputError, match="NaN"):
        search(folder, np.full(32, np.nan, np.float32))
    with pytest.raises(InputError, match=r"\btop\b"):
        search(folder, np.ones(32, np.float32), 0)


def test_weights_are_found_and_checked(folder, weights, images, tiny, tmp_path):
    query = next(images.rglob("*.png"))
    model = veca.load(weights)
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="--weights"):
        search(folder, query, exact=True)
    assert search(folder, query, exact=True, weights=tmp_path / "elsewhere")[0].path == str(query)
    assert search(folder, query, exact=True, weights=model)[0].path == str(query)
    with torch.no_grad():
        next(tiny.parameters()).add_(1)
    with pytest.raises(InputError, match="model given"):
        search(folder, query, exact=True, weights=tiny)


def test_a_model_of_ones_own_must_be_given_again(embed, images, weights, tmp_path):
    model = veca.load(weights)
    embed(images, tmp_path / "out", weights=model)
    query = next(images.rglob("*.png"))
    with pytest.raises(InputError, match="--weights"):
        search(tmp_path / "out", query, exact=True)
    assert search(tmp_path / "out", query, 1, exact=True, weights=model)[0].path == str(query)


def test_nothing_to_search_in(embed, images, folder, tmp_path):
    with pytest.raises(InputError, match=r"embed\.json"):
        Collection(tmp_path)
    for path in (folder / "shards").iterdir():
        path.unlink()
    with pytest.raises(InputError, match="no embeddings"):
        Collection(folder)


def test_a_contact_sheet_shows_files_and_members_of_shards(embed, images, tmp_path):
    pack(images, tmp_path / "packed", size=None)
    embed([images, tmp_path / "packed"], tmp_path / "out")
    query = tmp_path / "query.png"
    query.write_bytes(encoded(picture(99)))
    matches = search(tmp_path / "out", query, 60, exact=True)
    next(images.rglob("*.png")).unlink()  # a picture that is gone has a line and no picture
    page = contact_sheet(tmp_path / "page.html", query, matches, command="veca s").read_text()
    assert page.count("data:image/jpeg;base64,") == 1 + 59
    assert page.count("no longer there") == 1 and "<code>veca s</code>" in page
    for match in matches:
        assert f">{Path(match.path).name}<" in page and f">{match.score:.4f} <" in page
    links = [unquote(link) for link in re.findall(r'<a href="([^"]+)"', page)]
    files = [match.path for match in matches if Path(match.path).is_file()]
    assert len(files) == 29  # members of shards are no files, and have none
    assert [(tmp_path / link).resolve() for link in links] == [query, *map(Path, files)]


# --------------------------------------------------------------------------- exact, and the index


def test_a_small_collection_is_searched_row_by_row(folder):
    collection = Collection(folder)
    query = np.random.default_rng(0).normal(size=32).astype(np.float32)
    assert collection.search(query, 9) == collection.search(query, 9, exact=True)
    assert collection.recall is None and not list(folder.glob("index-*"))


def test_above_the_limit_the_index_is_asked_and_says_its_recall(folder, monkeypatch):
    pytest.importorskip("usearch")
    monkeypatch.setattr("veca.embed.searching.EXACT_BELOW", 30)
    query = read_embeddings(folder)[1][3]
    collection = Collection(folder)
    collection.search(query)
    assert collection.recall == 1  # of thirty rows nothing is missed
    (kept,) = folder.glob("index-*.json")
    kept.write_text(kept.read_text().replace("1.0", "0.25"))
    again = Collection(folder)
    again.search(query)
    assert again.recall == 0.25  # measured once


def test_recall_is_the_share_of_true_neighbours(folder, monkeypatch):
    pytest.importorskip("usearch")
    collection = Collection(folder)
    exact = Collection._exact

    def half(self, queries, top):
        rows, scores = exact(self, queries, top)
        return np.concatenate([rows[:, : top // 2], rows[:, : top // 2] + 1000], axis=1), scores

    monkeypatch.setattr(Collection, "_exact", half)
    collection.search(read_embeddings(folder)[1][3], exact=False)
    assert collection.recall == 0.5


def test_the_command_says_the_recall(folder, images, monkeypatch, capsys):
    pytest.importorskip("usearch")
    photo = str(next(images.rglob("*.png")))
    words = ["search", str(folder), photo, "--device", "cpu", "--json"]
    assert main(words) == 0
    assert not capsys.readouterr().err
    assert main([*words, "--index"]) == 0
    said = capsys.readouterr()
    assert "100.0%" in said.err and "--exact" in said.err and json.loads(said.out)


# ----------------------------------------------------------------- a collection made another way


def test_what_is_asked_otherwise_is_said_and_not_done(folder, images):
    photo = next(images.rglob("*.png"))
    plain = search(folder, photo, 3)
    with pytest.warns(VecaWarning, match=r"cores 4, not 2.*size \[32, 48\], not 512"):
        assert search(folder, photo, 3, cores=2, size=512) == plain
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert search(folder, photo, 3, cores=4, size=(32, 48), width="native") == plain


def test_other_weights_are_said_and_not_used(folder, images, tiny, tmp_path):
    photo = next(images.rglob("*.png"))
    with torch.no_grad():
        next(tiny.parameters()).add_(1)
    with pytest.warns(VecaWarning, match="embedded with its own"):
        assert search(folder, photo, 3, weights=tiny) == search(folder, photo, 3)


def test_two_folders_together(embed, images, weights, tmp_path):
    embed(images / "0", tmp_path / "a")
    embed(images / "1", tmp_path / "b")
    embed([images / "0", images / "1"], tmp_path / "both")
    photo = next(images.rglob("*.png"))
    together = search([tmp_path / "a", tmp_path / "b"], photo, 7)
    assert [m.path for m in together] == [m.path for m in search(tmp_path / "both", photo, 7)]
    embed(images / "1", tmp_path / "other-cores", cores=2)
    with pytest.raises(InputError, match="cores 4 and 2"):
        search([tmp_path / "a", tmp_path / "other-cores"], photo)
    embed(images / "1", tmp_path / "other-size", size=32)
    with pytest.warns(VecaWarning, match="size"):
        found = search([tmp_path / "a", tmp_path / "other-size"], photo, 99)
    assert len(found) == 20


def test_the_command_takes_several_folders_and_warns_in_a_line(embed, images, tmp_path, capsys):
    embed(images / "0", tmp_path / "a")
    embed(images / "1", tmp_path / "b", size=32)
    photo = str(next(images.rglob("*.png")))
    words = ["search", tmp_path / "a", tmp_path / "b", photo, "--top", 20, "--json", "--cores", 2]
    assert main([str(word) for word in words]) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)) == 20
    assert all(line.startswith("veca: ") for line in said.err.splitlines())
    assert "cores 4, not 2" in said.err and "size" in said.err


def test_an_address_is_named_as_it_was_typed(folder, capsys):
    assert main(["search", str(folder), "https://host/a.jpg", "--device", "cpu"]) == 2
    assert "https://host/a.jpg" in capsys.readouterr().err
