"""`veca embed` and `veca search` as a user meets them."""

from __future__ import annotations

import json

import pytest

from veca.cli.main import main
from veca.embed import read_embeddings

pytest.importorskip("pyarrow")


@pytest.fixture
def run(weights, images, tmp_path, capsys):
    """Embed with the command; its exit code and what it said."""
    common = ["embed", images, "--out", tmp_path / "out", "--weights", weights, "--size", "32"]
    common += ["--workers", 0, "--threads", 1, "--device", "cpu", "--shard-rows", 8]

    def call(*arguments):
        code = main([str(a) for a in (*common, *arguments)])
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    return call


def test_embed_again_and_again(run, images, tmp_path):
    code, said = run("--cores", 4, "--dtype", "float32")
    assert code == 0 and "about 3.84 kB on disk: 30 images x (cls 32)" in said
    assert "30 images embedded (" in said and "4 shards in" in said
    assert read_embeddings(tmp_path / "out")[1].shape == (30, 32)
    code, said = run("--cores", 4, "--dtype", "float32")
    assert code == 0 and "nothing to do, 30 images there already" in said
    code, said = run("--cores", 5, "--dtype", "float32")
    assert code == 2 and "cores: 4" in said
    first, *_ = sorted(images.rglob("*.png"))
    first.rename(images / "new.png")
    (images / "bad.png").write_bytes(b"no image")
    code, said = run("--cores", 4, "--dtype", "float32")
    assert code == 0
    for part in ("1 image embedded", "30 there already", "2 new in the source",
                 "1 not in the source any more", "1 could not be read (listed in"):  # fmt: skip
        assert part in said


def test_files_that_are_no_images_are_counted(run, images):
    (images / "a.nef").touch()
    code, said = run()
    assert code == 0
    assert said.startswith("passed over 1 file of kinds that are not read: 1 .nef ")
    assert " about " in said


def test_search(run, images, tmp_path, capsys):
    run("--patches")
    query = str(sorted(images.rglob("*.png"))[4])
    search = ["search", str(tmp_path / "out"), query, "--device", "cpu", "--exact"]
    assert main([*search, "--json", "--top", "3", "--page", str(tmp_path / "p.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 3 and found[0]["path"] == query
    assert found[0]["score"] == pytest.approx(1, abs=1e-2)
    assert (tmp_path / "p.html").read_text().count("<img") == 4
    assert main(search) == 0
    said = capsys.readouterr().out
    assert "cosine" in said and "1.0000" in said


def test_errors_are_one_line(run, images, tmp_path, capsys):
    for arguments, part in [
        (["embed", str(tmp_path / "none"), "--out", str(tmp_path / "x")], "/none"),
        (["embed", str(images), "--out", str(tmp_path / "x"), "--weights", "nope"], "nope"),
        (["search", str(tmp_path / "x"), "a.png"], "embed.json"),
    ]:
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("veca: ") and said.count("\n") == 1 and part in said


def test_features_stay_out_of_a_folder_of_embeddings(run, weights, images, tmp_path, capsys):
    assert run()[0] == 0
    before = sorted(tmp_path.rglob("*"))
    words = ["features", images, "--out", tmp_path / "out", "--weights", weights, "--overwrite"]
    assert main([str(word) for word in words]) == 2
    assert "embeddings" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
