"""Weights made ready for others."""

from __future__ import annotations

import json

import pytest
import torch

import veca
from conftest import SMALLEST
from distill.small import run, settings
from veca.cli.main import main
from veca.distill import DistillError, distill, load_targets, publish
from veca.quickstart import bundled_photos
from veca.weights import read_provenance


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Two runs, the second from the first one's weights."""
    place = tmp_path_factory.mktemp("stages")
    run(place / "one")
    second = {"init": str(place / "one" / "final"), "config": {}}
    distill(settings(student=second, schedule={"steps": 2, "warmup": 0}), place / "two")
    return place


def test_what_is_written(stages, tmp_path) -> None:
    to = tmp_path / "ready"
    publish(stages / "two" / "final", to, licence="Apache-2.0", data="five photos", name="first")
    ready, trained = veca.load(to), veca.load(stages / "two" / "final")
    assert ready.state_dict().keys() == trained.state_dict().keys()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(ready.state_dict()[name].half(), tensor.half())
    assert (to / "model.safetensors").stat().st_size < 0.7 * (
        stages / "two" / "final" / "model.safetensors"
    ).stat().st_size
    assert load_targets(to).keys() == {"filters"}
    card = (to / "README.md").read_text()
    assert card.startswith("---\n") and "# first" in card and "five photos" in card


@pytest.mark.slow
def test_results_go_into_the_card(stages, tmp_path, capsys) -> None:
    (tmp_path / "reached.md").write_text("10-NN **50 %**\n")
    words = ["publish", str(stages / "one" / "final"), "--out", str(tmp_path / "ready")]
    assert main([*words, "--results", str(tmp_path / "reached.md")]) == 0
    assert (
        "## Results\n\n10-NN **50 %**\n\n## Architecture"
        in (tmp_path / "ready" / "README.md").read_text()
    )
    assert main([*words, "--results", str(tmp_path / "none.md")]) != 0
    assert "none.md" in capsys.readouterr().err
    # Where the weights lie, the card keeps what it says of them; over others it does not.
    ready = str(tmp_path / "ready")
    assert main([*words, "--results", str(tmp_path / "reached.md")]) == 0
    assert main(["publish", ready, "--out", ready, "--name", "another"]) == 0
    card = (tmp_path / "ready" / "README.md").read_text()
    assert "# another" in card and "## Results\n\n10-NN **50 %**\n\n## Architecture" in card
    assert main(words) == 0
    assert "## Results" not in (tmp_path / "ready" / "README.md").read_text()


def test_by_name_nothing_is_left_behind(stages, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    publish(stages / "one" / "final", tmp_path / "cache" / "mine")
    publish("mine", tmp_path / "ready")
    assert load_targets(tmp_path / "ready").keys() == {"filters"}
    names = [sorted(p.name for p in folder.iterdir())
             for folder in (tmp_path / "ready", tmp_path / "cache" / "mine")]  # fmt: skip
    assert names[0] == names[1]


def test_the_cards_code_for_transformers_runs(stages, tmp_path) -> None:
    pytest.importorskip("transformers", reason="the classes need the extra hf")
    folder = publish(stages / "two" / "final", tmp_path / "ready")
    card = (folder / "README.md").read_text()
    code = card.split("```python\n")[2].split("```")[0]
    photo = next(iter(bundled_photos()))
    code = code.replace("path/to/ready", str(folder)).replace("photo.jpg", str(photo))
    there: dict = {}
    exec(code, there)
    assert there["out"].patches.shape[1] == 32 * 32
    assert there["out"].patches.dtype == torch.float32


@pytest.mark.slow
def test_provenance_of_every_stage_without_paths(stages, tmp_path) -> None:
    publish(stages / "two" / "final", tmp_path / "ready", data_licence="CC0")
    about = read_provenance(tmp_path / "ready")
    assert str(stages) not in json.dumps(about)
    assert about["init"]["weights"] == "final"
    assert about["init"]["provenance"]["data"]["licence"] == "CC0" == about["data"]["licence"]
    assert (about["samples"], about["samples_in_all"]) == (8, 32)
    assert about["tensors_sha256"] != read_provenance(stages / "two" / "final")["tensors_sha256"]


def test_paths_of_elsewhere_are_cut_too(tmp_path) -> None:
    """Weights that were trained on another machine, whose folders are not here."""
    before = {"data": {"source": "/somewhere/else/photos"}, "init": {"weights": None}}
    provenance = {
        "data": {"source": "owner/set"},
        "init": {"weights": "/a/b", "provenance": before},
    }
    veca.save(veca.create_model("tiny", depth=1), tmp_path / "w", provenance=provenance)
    publish(tmp_path / "w", tmp_path / "ready")
    about = read_provenance(tmp_path / "ready")
    assert about["data"]["source"] == "owner/set" and about["init"]["weights"] == "b"
    assert about["init"]["provenance"]["data"]["source"] == "photos"


def test_a_folder_of_something_else_is_kept(stages, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DistillError, match="not empty"):
        publish(stages / "two" / "final", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_command(stages, tmp_path, capsys) -> None:
    final = str(stages / "one" / "final")
    assert main(["publish", final, "--out", str(tmp_path / "x"), "--dtype", "bfloat16"]) == 0
    assert "wrote" in capsys.readouterr().out
    assert main(["publish", final, "--out", str(tmp_path / "y"), "--dtype", "int8"]) == 2
    assert "float16" in capsys.readouterr().err


def test_nothing_of_older_weights_stays_beside_new_ones(tmp_path) -> None:
    veca.save(veca.create_model(SMALLEST), tmp_path / "w")
    (tmp_path / "ready").mkdir()
    publish(tmp_path / "w", tmp_path / "ready")
    for extra in ("heads.safetensors", "targets.safetensors"):
        (tmp_path / "ready" / extra).write_bytes(b"of other weights")
    publish(tmp_path / "w", tmp_path / "ready")
    assert not list((tmp_path / "ready").glob("[ht]*.safetensors"))


def test_weights_published_where_they_lie_keep_what_is_beside_them(tmp_path) -> None:
    folder = veca.save(veca.create_model(SMALLEST), tmp_path / "w")
    for extra in ("heads.safetensors", "targets.safetensors"):
        (folder / extra).write_bytes(b"theirs")
    for weights in (folder, folder / "model.safetensors"):
        publish(weights, folder, results="50 %")
        assert len(list(folder.glob("[ht]*.safetensors"))) == 2
    publish(folder / "model.safetensors", folder)
    assert "50 %" in (folder / "README.md").read_text()


def test_a_name_with_brackets_is_printed_as_it_is(tmp_path, capsys) -> None:
    veca.save(veca.create_model(SMALLEST), tmp_path / "w")
    main(["publish", str(tmp_path / "w"), "--out", str(tmp_path / "ship[fp16]")])
    assert "ship[fp16]: " in capsys.readouterr().out.replace("\n", "")


def test_new_results_replace_those_of_the_card(tmp_path) -> None:
    veca.save(veca.create_model(SMALLEST), tmp_path / "w")
    publish(tmp_path / "w", tmp_path / "ready", results="50 %")
    publish(tmp_path / "ready", tmp_path / "ready", results="60 %")
    card = (tmp_path / "ready" / "README.md").read_text()
    assert "60 %" in card and "50 %" not in card
