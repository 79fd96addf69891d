"""Weights to choose from: by name, one visitor at a time, fresh ones called so."""

from __future__ import annotations

import threading

import pytest
import torch

from conftest import SMALLEST
from veca import create_model, save
from veca.app.model_cache import FRESH_NAME, ModelCache
from veca.errors import WeightsError


def test_given_weights_come_first_and_fresh_ones_last(weights, monkeypatch):
    monkeypatch.setattr("veca.app.model_cache.available", lambda: ["local", weights])
    models = ModelCache([weights])
    assert models.names == ["weights", "local", FRESH_NAME] and models.default == "weights"
    assert "random" in FRESH_NAME
    monkeypatch.setattr("veca.app.model_cache.available", lambda: [])
    assert ModelCache().names == [FRESH_NAME]


def test_the_bundled_weights_come_first(monkeypatch):
    names = ["veca_small_patch16", "veca_tiny_patch16", "veca_unknown"]
    monkeypatch.setattr("veca.app.model_cache.available", lambda: names)
    assert ModelCache().names[:3] == ["veca_tiny_patch16", "veca_small_patch16", "veca_unknown"]


def test_weights_are_loaded_once_and_say_whether_they_are_fresh(models):
    with models.use(models.default) as entry:
        assert not entry.fresh and entry.model.config == SMALLEST and not entry.model.training
        assert entry.dense.config == SMALLEST
    with models.use(models.default) as again:
        assert again is entry
    with models.use(FRESH_NAME) as fresh:
        assert fresh.fresh and fresh.model.config.width == 192


def test_models_and_their_yardstick_compute_in_one_precision(weights):
    with ModelCache([weights], precision="int8").use("weights") as entry:
        assert not entry.fresh and entry.model.precision == entry.dense.precision == "int8"
        images = torch.zeros(1, 3, 32, 32)
        assert entry.dense(images).patches.shape == entry.model(images).patches.shape
    auto = ModelCache([weights], precision="auto")
    with auto.use("weights") as entry:
        assert entry.model.precision == entry.dense.precision


def test_paths_are_called_by_their_last_part(tmp_path, monkeypatch):
    monkeypatch.setattr("veca.app.model_cache.available", lambda: ["x"])
    paths = [str(save(create_model(SMALLEST), tmp_path / name / "x")) for name in "ab"]
    models = ModelCache([*paths, "owner/name"])
    assert models.names == ["x", "x (2)", "owner/name", "x (3)", FRESH_NAME]
    with models.use("x (2)") as entry:
        assert entry.name == "x (2)"


def test_only_two_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("veca.app.model_cache.available", lambda: [])
    models = ModelCache([str(save(create_model(SMALLEST), tmp_path / name)) for name in "abc"])
    for name in "abac":
        with models.use(name):
            pass
    assert list(models._loaded) == ["a", "c"]


def test_unknown_weights_are_told(models):
    with pytest.raises(WeightsError, match="'x'"), models.use("x"):
        pass


def test_one_visitor_at_a_time(models):
    order = []
    inside, go = threading.Event(), threading.Event()

    def first():
        with models.use(models.default):
            inside.set()
            go.wait(10)
            order.append("first")

    def second():
        with models.use(models.default):
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert order == []  # the second waits
    go.set()
    for thread in threads:
        thread.join(10)
    assert order == ["first", "second"]
