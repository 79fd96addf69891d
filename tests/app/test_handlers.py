"""What a touch changes, and that visitors do not see each other."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from conftest import SMALLEST
from veca import create_model, save
from veca.app import content
from veca.app.content import Limits
from veca.app.handlers import Controls, Handlers, bundled
from veca.app.model_cache import FRESH_NAME, ModelCache
from veca.app.page import CHANGED
from veca.app.uploads import Uploads
from veca.embed.writers.files import read_features
from veca.errors import InputError
from veca.quickstart import bundled_photos

WEIGHTS = "weights"
SET = Controls(weights=WEIGHTS, size=64, cores=4, layer=3, core=1, kind="norm")
PICTURES = ("photo", "features", "merged", "similarity", "paths", "attention")


def _pixels(changes, name):
    return np.array(changes[name]["value"])


def _upload(handlers, path, name=None):
    """Send a file as the page does."""
    with handlers.uploads.place("visitor", path.stat().st_size) as place, path.open("rb") as file:
        handlers.uploads.write(place, name or path.name, file)
    return handlers.upload(None, SET, {"path": place})


def test_a_new_visitor_sees_the_first_bundled_photo(handlers):
    seen = handlers.start(None, SET)
    visit = seen["visit"]
    assert visit.photo.name == bundled_photos()[0].stem and visit.point is None
    assert seen["message"]["value"] == ""  # nothing to warn of
    assert "VECA, 4 cores" in seen["numbers"]["value"]
    assert seen["cores"] == {"maximum": 8, "value": 4} and seen["layer"]["maximum"] == 3
    for name in PICTURES:
        assert _pixels(seen, name).ndim == 3


def test_handlers_change_what_the_page_expects_of_them(handlers, tmp_path, noise):
    noise().save(tmp_path / "a.png")
    visit = handlers.start(None, SET)["visit"]
    changes = {name: getattr(handlers, name)(visit, SET) for name in CHANGED if name not in _MORE}
    changes |= {name: getattr(handlers, name)(visit, SET, value) for name, value in _MORE.items()}
    changes["upload"] = _upload(handlers, tmp_path / "a.png")
    for name, changed in changes.items():
        assert set(changed) - {"visit"} <= set(CHANGED[name]), name


_MORE = {"pick": 1, "click": (3, 4), "upload": None}


def test_moving_the_budget_changes_pictures_and_numbers(handlers):
    seen = handlers.start(None, SET)
    moved = handlers.redraw(seen["visit"], SET._replace(cores=8))
    for name in ("features", "paths", "attention", "similarity"):
        assert (_pixels(moved, name) != _pixels(seen, name)).any(), name
    assert (_pixels(moved, "photo") == _pixels(seen, "photo")).all()
    assert "VECA, 8 cores" in moved["numbers"]["value"]
    assert moved["features"]["label"] == "dense features, 8 cores"
    back = handlers.redraw(seen["visit"], SET)
    for name in PICTURES:
        assert (_pixels(back, name) == _pixels(seen, name)).all(), name


def test_keeping_fewer_tokens_changes_pictures_and_numbers(handlers):
    seen = handlers.start(None, SET)
    merged = handlers.redraw(seen["visit"], SET._replace(keep=0.35))
    for name in ("features", "merged", "attention", "similarity"):
        assert (_pixels(merged, name) != _pixels(seen, name)).any(), name
    assert "VECA, 4 cores, keep 0.35" in merged["numbers"]["value"]
    assert "keep" not in seen["numbers"]["value"]
    assert seen["merged"]["label"] == "16 of 16 patch tokens go on"
    assert (_pixels(seen, "merged") == _pixels(seen, "photo")).all()
    back = handlers.redraw(seen["visit"], SET)
    for name in PICTURES:
        assert (_pixels(back, name) == _pixels(seen, name)).all(), name
    for wrong in (0, 1.5, "half", float("nan")):
        told = handlers.redraw(seen["visit"], SET._replace(keep=wrong))
        assert set(told) == {"message"} and "keep" in told["message"]["value"]
    file = handlers.download(seen["visit"], SET._replace(keep=0.35))["file"]["value"]
    assert read_features(file)["keep"] == 0.35 and "keep-0.35" in file


def test_core_layer_and_kind_change_the_attention_alone(handlers):
    seen = handlers.start(None, SET)
    for change in ({"core": 2}, {"layer": 1}, {"kind": "softmax"}):
        changes = handlers.attention(seen["visit"], SET._replace(**change))
        assert set(changes) == {"attention"}
        assert (_pixels(changes, "attention") != _pixels(seen, "attention")).any()
    changes = handlers.attention(seen["visit"], SET._replace(layer=2, core=64))
    assert changes["attention"]["label"] == "attention of core 4 of 4, layer 2"


def test_a_click_is_kept_through_the_next_move(handlers):
    seen = handlers.start(None, SET)
    clicked = handlers.click(seen["visit"], SET, (10, 300))
    visit = clicked["visit"]
    assert visit.point == pytest.approx((10.5 / 384, 300.5 / 384))
    assert (_pixels(clicked, "similarity") != _pixels(seen, "similarity")).any()
    moved = handlers.redraw(visit, SET)
    assert (_pixels(moved, "similarity") == _pixels(clicked, "similarity")).all()
    bigger = handlers.relook(visit, SET._replace(size=128))
    assert bigger["visit"].point == visit.point and bigger["visit"].size == 128


def test_a_bad_upload_is_a_message_and_changes_nothing_else(handlers, tmp_path):
    path = tmp_path / "text.jpg"
    path.write_text("<script>alert(1)</script>")
    changes = _upload(handlers, path)
    assert set(changes) == {"message", "upload"} and changes["upload"] == {"value": None}
    message = changes["message"]["value"]
    assert "text.jpg" in message and "Traceback" not in message
    assert handlers.upload(None, SET, None) == {}


def test_names_in_messages_are_escaped(handlers, tmp_path):
    path = tmp_path / "text"
    path.write_text("x")
    message = _upload(handlers, path, "<b>.jpg")["message"]["value"]
    assert "&lt;b&gt;.jpg" in message and "<b>" not in message


def test_an_upload_is_seen_and_its_file_is_gone(handlers, tmp_path, noise):
    noise(40, 30).save(tmp_path / "small.png")
    changes = _upload(handlers, tmp_path / "small.png")
    assert changes["visit"].photo.name == "small"
    assert "small at 64 x 80" in changes["numbers"]["value"]
    assert list(handlers.uploads.folder.iterdir()) == []
    picked = handlers.pick(changes["visit"], SET, 2)
    assert picked["visit"].photo.name == bundled_photos()[2].stem


def test_a_file_that_was_not_uploaded_is_not_read(handlers, tmp_path, noise):
    noise().save(tmp_path / "private.png")
    for path in (str(tmp_path / "private.png"), "/etc/passwd", "http://127.0.0.1:1/x.png"):
        changes = handlers.upload(None, SET, {"path": path})
        assert "visit" not in changes and "error" in changes["message"]["value"]
    assert (tmp_path / "private.png").exists()


def test_one_photo_is_decoded_at_a_time(handlers, tmp_path, noise, monkeypatch):
    noise().save(tmp_path / "a.png")
    at_once, most = [], []
    open_photo = content.open_photo

    def counted(*arguments):
        at_once.append(1)
        most.append(len(at_once))
        try:
            threading.Event().wait(0.05)
            return open_photo(*arguments)
        finally:
            at_once.pop()

    monkeypatch.setattr(content, "open_photo", counted)
    threads = [
        threading.Thread(target=_upload, args=(handlers, tmp_path / "a.png")) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_memory_is_given_back_after_each_drawing(handlers, monkeypatch):
    """Or each of the web server's threads keeps what a large photo took: 2.6 GB after twelve."""
    given = []
    monkeypatch.setattr("veca.app.handlers.give_back", lambda: given.append(1))
    visit = handlers.start(None, SET)["visit"]
    handlers.redraw(visit, SET)
    assert len(given) == 2


def test_unknown_weights_photos_and_sizes_are_messages(handlers):
    assert "no weights" in handlers.start(None, SET._replace(weights="x"))["message"]["value"]
    assert "size=8" in handlers.start(None, SET._replace(size=8))["message"]["value"]
    for index in (-1, 99, [1, 2]):
        assert "photos" in handlers.pick(None, SET, index)["message"]["value"]
    with pytest.raises(InputError):
        bundled(99)


def test_fresh_and_smaller_weights(tmp_path, weights, monkeypatch):
    monkeypatch.setattr("veca.app.model_cache.available", lambda: [])
    small = str(save(create_model(SMALLEST, num_cores=2, depth=2), tmp_path / "small"))
    uploads = Uploads(tmp_path / "uploads")
    handlers = Handlers(ModelCache([weights, small]), Limits(), uploads, tmp_path)
    before = SET._replace(cores=8, core=5)
    seen = handlers.start(None, before)
    other = handlers.relook(seen["visit"], before._replace(weights="small"))
    assert other["cores"] == {"maximum": 2, "value": 2} and other["layer"]["value"] == 2
    assert "random weights" in other["message"]["value"]  # saved, but never trained
    fresh = handlers.relook(other["visit"], SET._replace(weights=FRESH_NAME))
    assert "random weights" in fresh["message"]["value"] and fresh["cores"]["maximum"] == 64


def test_the_download_is_a_file_of_this_visitor(handlers):
    visit = handlers.start(None, SET)["visit"]
    first, second = (
        handlers.download(visit, SET._replace(cores=c))["file"]["value"] for c in (2, 8)
    )
    assert first != second and first.startswith(str(handlers.folder))
    assert read_features(first)["cores"] == 2 and read_features(second)["cores"] == 8


def test_a_forgotten_visitor_is_told(handlers):
    for touch in (handlers.redraw, handlers.attention, handlers.download, handlers.time_dense):
        changes = touch(None, SET)
        assert set(changes) == {"message"} and "photo" in changes["message"]["value"]
    assert set(handlers.click(None, SET, (1, 1))) == {"message"}
    assert handlers.relook(None, SET)["visit"].photo.name == bundled_photos()[0].stem


def test_few_photos_are_kept_as_the_model_sees_them(handlers):
    """What is computed is many times a photo; it is computed again when it is needed."""
    visit = handlers.start(None, SET)["visit"]
    before = handlers.redraw(visit, SET)
    for i in range(8):
        handlers.redraw(dataclasses.replace(visit, size=80 + 16 * i), SET)
    assert len(handlers.looks) == 4
    after = handlers.redraw(visit, SET)
    assert all((_pixels(before, name) == _pixels(after, name)).all() for name in PICTURES)


@pytest.mark.slow
def test_visitors_at_once_do_not_mix(handlers, tmp_path, noise):
    """Two visitors with other photos and budgets, at the same time and one after the other."""
    for i in range(2):
        noise(64 + 32 * i, 64, seed=i).save(tmp_path / f"{i}.png")
    budgets = [(2, 8, 3, 7), (5, 1, 8, 2)]

    def visit(i):
        seen = _upload(handlers, tmp_path / f"{i}.png")
        steps = [handlers.redraw(seen["visit"], SET._replace(cores=c)) for c in budgets[i]]
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
        assert seen["visit"].photo.name == str(i)
        assert all(
            f"VECA, {c} core" in s["numbers"]["value"]
            for c, s in zip(budgets[i], steps, strict=True)
        )
        for ours, theirs in zip(pictures, alone[i][0], strict=True):
            assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
