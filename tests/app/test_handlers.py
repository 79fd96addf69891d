"""What a touch changes, and that visitors do not see each other."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from conftest import SMALLEST
from veca import create_model, save
from veca.app.content import Limits
from veca.app.handlers import Handlers
from veca.app.model_cache import FRESH_NAME, ModelCache
from veca.embed.writers.files import read_features
from veca.quickstart import bundled_photos

CHOICE = (4, 3, 1, "norm")
WEIGHTS = "weights"
PICTURES = ("photo", "features", "similarity", "paths", "attention")


def _pixels(changes, name):
    return np.array(changes[name]["value"])


def test_a_new_visitor_sees_the_first_bundled_photo(handlers):
    seen = handlers.start(WEIGHTS, 64, *CHOICE)
    assert seen["look"].photo.name == bundled_photos()[0].stem and seen["point"] is None
    assert seen["message"]["value"] == ""  # nothing to warn of
    assert "VECA, 4 cores" in seen["numbers"]["value"]
    assert seen["cores"] == {"maximum": 8, "value": 4} and seen["layer"]["maximum"] == 3
    for name in PICTURES:
        assert _pixels(seen, name).ndim == 3


def test_moving_the_budget_changes_pictures_and_numbers(handlers):
    seen = handlers.start(WEIGHTS, 64, *CHOICE)
    moved = handlers.budget(seen["look"], None, 8, 3, 1, "norm")
    for name in ("features", "paths", "attention", "similarity"):
        assert (_pixels(moved, name) != _pixels(seen, name)).any(), name
    assert (_pixels(moved, "photo") == _pixels(seen, "photo")).all()
    assert "VECA, 8 cores" in moved["numbers"]["value"]
    assert moved["features"]["label"] == "dense features, 8 cores"
    back = handlers.budget(seen["look"], None, *CHOICE)
    for name in PICTURES:
        assert (_pixels(back, name) == _pixels(seen, name)).all(), name


def test_core_layer_and_kind_change_the_attention_alone(handlers):
    seen = handlers.start(WEIGHTS, 64, *CHOICE)
    for choice in ((4, 3, 2, "norm"), (4, 1, 1, "norm"), (4, 3, 1, "softmax")):
        changes = handlers.attention(seen["look"], *choice)
        assert set(changes) == {"attention"}
        assert (_pixels(changes, "attention") != _pixels(seen, "attention")).any()
    label = handlers.attention(seen["look"], 4, 2, 64, "norm")["attention"]["label"]
    assert label == "attention of core 4 of 4, layer 2"


def test_a_click_is_kept_through_the_next_move(handlers):
    seen = handlers.start(WEIGHTS, 64, *CHOICE)
    clicked = handlers.click((10, 300), seen["look"], 4)
    assert set(clicked) == {"point", "photo", "similarity"}
    assert clicked["point"] == pytest.approx((10.5 / 384, 300.5 / 384))
    assert (_pixels(clicked, "similarity") != _pixels(seen, "similarity")).any()
    moved = handlers.budget(seen["look"], clicked["point"], *CHOICE)
    assert (_pixels(moved, "similarity") == _pixels(clicked, "similarity")).all()
    bigger = handlers.relook(seen["look"], clicked["point"], WEIGHTS, 128, *CHOICE)
    assert bigger["point"] == clicked["point"] and bigger["look"].view.grid == (8, 8)


def test_a_bad_upload_is_a_message_and_changes_nothing_else(handlers, tmp_path):
    path = tmp_path / "text.jpg"
    path.write_text("<script>alert(1)</script>")
    changes = handlers.upload(str(path), WEIGHTS, 64, *CHOICE)
    assert set(changes) == {"message", "upload"} and changes["upload"] == {"value": None}
    message = changes["message"]["value"]
    assert "text.jpg" in message and "Traceback" not in message
    assert handlers.upload(None, WEIGHTS, 64, *CHOICE) == {}


def test_names_in_messages_are_escaped(handlers, tmp_path):
    path = tmp_path / "<b>.jpg"
    path.write_text("x")
    message = handlers.upload(str(path), WEIGHTS, 64, *CHOICE)["message"]["value"]
    assert "&lt;b&gt;.jpg" in message and "<b>" not in message


def test_an_upload_is_seen(handlers, tmp_path, noise):
    noise(40, 30).save(tmp_path / "small.png")
    changes = handlers.upload(str(tmp_path / "small.png"), WEIGHTS, 64, *CHOICE)
    assert (
        changes["look"].photo.name == "small"
        and "small at 64 x 80" in (changes["numbers"]["value"])
    )
    picked = handlers.pick(2, WEIGHTS, 64, *CHOICE)
    assert picked["look"].photo.name == bundled_photos()[2].stem


def test_unknown_weights_and_sizes_are_messages(handlers):
    assert "no weights" in handlers.start("x", 64, *CHOICE)["message"]["value"]
    assert "size=8" in handlers.start(WEIGHTS, 8, *CHOICE)["message"]["value"]


def test_fresh_and_smaller_weights(tmp_path, weights, monkeypatch):
    monkeypatch.setattr("veca.app.model_cache.available", lambda: [])
    small = str(save(create_model(SMALLEST, num_cores=2, depth=2), tmp_path / "small"))
    handlers = Handlers(ModelCache([weights, small]), Limits(), str(tmp_path))
    seen = handlers.start(WEIGHTS, 64, 8, 3, 5, "norm")
    other = handlers.relook(seen["look"], None, "small", 64, 8, 3, 5, "norm")
    assert other["cores"] == {"maximum": 2, "value": 2} and other["layer"]["value"] == 2
    assert "random weights" in other["message"]["value"]  # saved, but never trained
    fresh = handlers.relook(other["look"], None, FRESH_NAME, 64, 2, 2, 2, "norm")
    assert "random weights" in fresh["message"]["value"] and fresh["cores"]["maximum"] == 64


def test_the_download_is_a_file_of_this_visitor(handlers):
    seen = handlers.start(WEIGHTS, 64, *CHOICE)
    first, second = (handlers.download(seen["look"], c)["file"]["value"] for c in (2, 8))
    assert first != second and first.startswith(handlers.folder)
    assert read_features(first)["cores"] == 2 and read_features(second)["cores"] == 8


def test_touches_before_the_first_photo_do_nothing(handlers):
    assert handlers.budget(None, None, *CHOICE) == {}
    assert handlers.attention(None, *CHOICE) == {}
    assert handlers.click((1, 1), None, 4) == {}
    assert handlers.download(None, 4) == {}


def test_visitors_at_once_do_not_mix(handlers, tmp_path, noise):
    """Two visitors with other photos and budgets, at the same time and one after the other."""
    for i in range(2):
        noise(64 + 32 * i, 64, seed=i).save(tmp_path / f"{i}.png")
    budgets = [(2, 8, 3, 7), (5, 1, 8, 2)]

    def visit(i):
        seen = handlers.upload(str(tmp_path / f"{i}.png"), WEIGHTS, 64, *CHOICE)
        steps = [handlers.budget(seen["look"], None, c, 3, 1, "norm") for c in budgets[i]]
        return [[_pixels(step, name) for name in PICTURES] for step in steps], seen, steps

    alone = [visit(i) for i in range(2)]
    together: dict[int, object] = {}
    threads = [
        threading.Thread(target=lambda i=i: together.__setitem__(i, visit(i))) for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        pictures, seen, steps = together[i]
        assert seen["look"].photo.name == str(i)
        assert all(
            f"VECA, {c} core" in s["numbers"]["value"]
            for c, s in zip(budgets[i], steps, strict=True)
        )
        for ours, theirs in zip(pictures, alone[i][0], strict=True):
            assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
