"""The model card claims what configuration and provenance say, and nothing else."""

from __future__ import annotations

from veca import PRESETS, VecaConfig
from veca.weights.card import model_card, results_in

PROVENANCE = {
    "method": "distillation",
    "teacher": {"name": "dinov3-vits16", "licence": "dinov3-license"},
    "teachers": [
        {"name": "dinov3-vits16", "licence": "dinov3-license"},
        {"name": "other", "licence": "mit"},
    ],
    "data": {"source": "photos", "images": 1200, "fingerprint": "f"},
    "budgets": [8, 16],
    "steps": 300,
    "note": "a | b\nc",
    "init": {"weights": None},
    "tensors_sha256": "abc",
    "file_sha256": "internal",
}


def test_a_card_from_provenance():
    card = model_card(
        PRESETS["veca_small_patch16"], PROVENANCE, name="me/small", tags=["veca", "x"]
    )
    header = card.split("---")[1]
    assert "pipeline_tag: image-feature-extraction" in header
    assert "license" not in header  # nobody said what the weights' own is
    assert header.count('"veca"') == 1
    assert card.split("---")[2].strip().startswith("# small")
    assert "`veca_small_patch16`" in card
    assert 'AutoModel.from_pretrained("me/small", dtype="float32")' in card
    assert "Trained with 8 cores and more" in card
    assert "| teacher | dinov3-vits16 (licence: dinov3-license), other (licence: mit) |" in card
    assert "| data | photos, 1200 images |" in card
    assert "| budgets | 8, 16 |" in card
    assert "| steps | 300 |" in card
    assert r"| note | a \| b c |" in card
    assert "internal" not in card
    assert "fingerprint" not in card


def test_a_card_without_provenance():
    config = VecaConfig(depth=2, width=64, heads=2, num_cores=16)
    for nothing in (None, {}, {"code_version": "1", "tensors_sha256": "abc"}):
        card = model_card(config, nothing)
        assert "Not recorded with these weights." in card
    assert "a VECA network of its own size" in card
    assert "cores=16" in card
    assert "Trained with" not in card


def test_numbers_of_the_last_stage_say_so():
    config = PRESETS["veca_tiny_patch16"]
    earlier = {"steps": 900, "samples": 4000}
    about = {"steps": 30, "samples": 60, "samples_in_all": 4060, "init": {"provenance": earlier}}
    card = model_card(config, about)
    assert "| steps of the last stage | 30 |" in card
    assert "| samples of the last stage | 60 |" in card
    assert "| samples in all | 4060 |" in card


def test_results_are_found_again():
    for results in ("", "10-NN **50 %**\n\n| a |\n| - |", "First.\n\n## Pets\n\n50 %"):
        card = model_card(PRESETS["veca_tiny_patch16"], results=results)
        assert results_in(card) == results


def test_what_was_changed_is_said():
    card = model_card(
        PRESETS["veca_tiny_patch16"],
        {"derived_from": {"teacher": "t", "steps": 3}, "licence": "mit", "code_version": "2"},
    )
    assert "these weights differ from those whose origin follows" in card
    assert "| teacher | t |" in card
    assert 'license: "mit"' in card
