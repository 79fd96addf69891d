"""Runs on mixed images: the teacher is asked about the very pixels that the student sees."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from distill.small import curve, run, settings
from veca.data import Augmentation, AugmentConfig, DataError, sample_keys
from veca.data.mixing import draw_mixture, mix
from veca.distill import DistillError, distill, load_config, load_targets, read_metrics
from veca.distill import step as steps
from veca.distill.checkpoint import CheckpointStore
from veca.distill.data import open_data
from veca.distill.parallel import World
from veca.teachers import CallableTeacher
from veca.weights import read_provenance

MIX = {"mixup": 0.4, "cutmix": 0.5}
MIXED = {"data": {"augment": MIX}}
OFF = {"mixup": 0.0, "cutmix": 0.0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that went through, on mixed images."""
    out = tmp_path_factory.mktemp("mixed") / "run"
    changes = {
        "data": {"augment": MIX, "hold_out": 5},
        "validation": {"every": 6, "budgets": [8]},
        "checkpoint": {"every": 4, "milestones": [4]},
        "schedule": {"steps": 12},
    }
    return out, changes, run(out, **changes)


def test_it_learns_and_says_how_it_was_taught(finished) -> None:
    out, changes, records = finished
    losses = [r["loss"] for r in records]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    augment = read_provenance(out / "final")["data"]["augment"]
    assert augment == settings(**changes).data.augment.to_dict()
    assert (augment["kind"], augment["mixup"], augment["cutmix"]) == ("rrc", 0.4, 0.5)
    first, last = (r["loss"] for r in read_metrics(out, "validation"))
    assert last < first


def test_it_is_another_run_than_without(finished, tmp_path) -> None:
    _, changes, records = finished
    plain = run(tmp_path, **{**changes, "data": {"hold_out": 5}})
    assert curve(plain)[0] != curve(records)[0]
    assert [r["cores"] for r in plain] == [r["cores"] for r in records]


def test_stopped_and_resumed_it_is_the_same_run(finished, tmp_path) -> None:
    _, changes, records = finished
    stopped = distill(settings(**changes, max_minutes=1e-9), tmp_path / "run")
    assert stopped.stopped == "time"
    assert curve(run(tmp_path / "run", resume=True, **changes)) == curve(records)


class Colours(nn.Module):
    """A patch's brightest colours; remembers what it was shown."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride, self.shown = stride, []

    def forward(self, images):
        self.shown.append(images.clone())
        return nn.functional.max_pool2d(images, self.stride)


@pytest.mark.parametrize("stride", [16, 32])  # of 32: the teacher sees 64 pixels, the student 32
def test_targets_are_of_the_mixed_pixels(tmp_path, monkeypatch, stride: int) -> None:
    learnt, batches = [], []
    learn, step = steps.forward_backward, steps.training_step

    def note_learning(trainer, loss, pixels, targets, *args, **more):
        learnt.append((pixels.clone(), targets[0]))
        return learn(trainer, loss, pixels, targets, *args, **more)

    def note_step(group, planned, batch):
        batches.append(batch)
        return step(group, planned, batch)

    monkeypatch.setattr(steps, "forward_backward", note_learning)
    monkeypatch.setattr("veca.distill.loop.training_step", note_step)
    network = Colours(stride)
    teacher = CallableTeacher(network, width=3, stride=stride, name="colours")
    table = {"name": "colours", "standardise": True, "standardise_images": 8}
    config = settings(teachers=[table], schedule={"steps": 4}, **MIXED)
    result = distill(config, tmp_path, teachers=[teacher])

    shown = network.shown[-4:]  # after the batches that the scale of the targets was taken from
    scale = load_targets(result.final)["colours"]
    images = open_data(config.data, World()).source.images
    clean = Augmentation(AugmentConfig.from_dict({**config.data.augment.to_dict(), **OFF}))
    mixed = 0
    for batch, pixels, (student, target) in zip(batches, shown, learnt, strict=True):
        # By hand: the images of the batch as they are without mixing, then mixed in pairs.
        keys = sample_keys(config.seed, 0, batch.indices.numpy())
        views = clean(images[batch.indices], keys, 32, 2 * stride)
        drawn = draw_mixture(keys, 100, 0.4, 0.5)
        mixed += int((drawn.shares > 0).sum())
        assert torch.equal(student, mix(views.student, drawn))
        wanted = student if views.teacher is None else mix(views.teacher, drawn)
        assert (views.teacher is None) == (stride == 16)
        assert torch.equal(pixels, wanted)
        found = teacher.features(wanted, (2, 2))
        cls = (found.cls - scale.cls.mean) / scale.cls.std
        patches = (found.patches - scale.dense.mean) / scale.dense.std
        torch.testing.assert_close(target.cls, cls, rtol=0, atol=1e-5)
        torch.testing.assert_close(target.patches, patches, rtol=0, atol=1e-5)
    assert len(batches) == 4 and mixed > 8


def test_parts_of_a_batch_are_parts_of_the_mixed_batch(tmp_path) -> None:
    """Pairs are made before a step is split: parts of one image are as good as any."""
    whole = run(tmp_path / "a", **MIXED)
    parts = run(tmp_path / "b", optimizer={"accumulate": 4}, **MIXED)
    for a, b in zip(whole, parts, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)


def test_a_run_from_before_there_was_mixing_goes_on(tmp_path) -> None:
    changes = {"checkpoint": {"every": 3, "milestones": [3]}}
    whole = run(tmp_path / "run", **changes)
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "run", old)
    store = CheckpointStore(old)
    shutil.rmtree(store.path(6))
    path = store.path(3) / "about.json"
    about = json.loads(path.read_text())
    for table in (about["config"]["data"]["augment"], about["provenance"]["data"]["augment"]):
        assert table.pop("mixup") == table.pop("cutmix") == 0
    del about["sha256"], about["sections"]  # checkpoints of then have no hashes
    path.write_text(json.dumps(about))
    assert curve(run(old, resume=True, **changes)) == curve(whole)


def test_mixing_switched_on_in_mid_run_is_named(tmp_path) -> None:
    run(tmp_path, schedule={"steps": 3})
    text = io.StringIO()
    config = settings(**MIXED)
    distill(config, tmp_path, resume=True, console=Console(file=text, width=200))
    assert "data.augment.cutmix 0.0 -> 0.5, data.augment.mixup 0.0 -> 0.4" in text.getvalue()
    assert read_metrics(tmp_path)[-1]["step"] == 6


def test_settings_there_and_back(tmp_path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(settings(**MIXED).to_toml())
    assert load_config(path) == settings(**MIXED)
    path.write_text(
        "[schedule]\nsteps = 1\nsize = 32\n"
        '[data]\naugment = { kind = "rrc", area = [0.25, 1.0], mixup = 0.5 }\n'
    )
    assert load_config(path).data.augment == AugmentConfig("rrc", area=(0.25, 1.0), mixup=0.5)
    changed = load_config(path, overrides=["data.augment.mixup=0.25", "data.augment.cutmix=0.75"])
    assert (changed.data.augment.mixup, changed.data.augment.cutmix) == (0.25, 0.75)
    with pytest.raises(DistillError, match=r"augment\.mixup.*augment\.cutmix"):
        load_config(path, overrides=["data.augment.cutmix=0.75"])
    with pytest.raises(DistillError, match="'often'"):
        load_config(path, overrides=["data.augment.mixup=often"])


def test_an_odd_batch_is_refused_before_it_starts(tmp_path) -> None:
    with pytest.raises(DataError, match="batch of 3"):
        distill(settings(schedule={"batch": 3}, **MIXED), tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()
    distill(settings(schedule={"batch": 3, "steps": 1, "warmup": 0}), tmp_path / "run")
