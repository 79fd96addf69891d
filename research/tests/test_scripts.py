"""The scripts around runs of distillation."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import veca
from distill.small import run
from research import agreement, held_out
from veca.data import hold_out, open_source
from veca.distill import load_config, load_targets
from veca.distill.standardise import Moments, TargetStatistics, save_targets


def test_held_out_photos_are_those_the_settings_hold_out(tmp_path, monkeypatch, capsys):
    photos, settings, out = tmp_path / "photos", tmp_path / "run.toml", tmp_path / "out"
    photos.mkdir()
    random = np.random.default_rng(0)
    for i in range(12):
        pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / f"{i:02d}.png")
    settings.write_text(
        "[data]\nhold_out = 6\nsplit_seed = 3\n[schedule]\nsteps = 1\nsize = 32\n"
        '[[teachers]]\nname = "filters"\n'
    )
    words = ["--config", settings, "--data", photos, "--after", 5, "--out", out]
    monkeypatch.setattr(sys, "argv", ["held_out.py", *map(str, words)])
    held_out.main()

    config, source = load_config(settings).data, open_source(photos)
    _, held = hold_out(len(source), config.hold_out, seed=config.split_seed)
    wanted = {f"{place:06d}.png": source.read(place) for place in held if place >= 5}
    assert 0 < len(wanted) < len(held)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == wanted
    assert f"{len(wanted)} of 6" in capsys.readouterr().out


def test_answers_on_another_scale_are_judged_on_the_first(tmp_path):
    out = tmp_path / "run"
    run(out, data={"hold_out": 4}, schedule={"steps": 2})
    first = out / "final"
    ((teacher, scale),) = load_targets(first).items()

    def moved(moments):
        """A scale on which the same answers lie lower by half a deviation, and twice as wide."""
        return Moments(moments.mean + moments.std / 2, 2 * moments.std)

    other = tmp_path / "other"
    shutil.copytree(first, other)
    save_targets({teacher: TargetStatistics(moved(scale.cls), moved(scale.dense))}, other)
    # On the first scale that network says twice what it says, and half a deviation more.
    same = tmp_path / "same"
    model = veca.load(first)
    with torch.no_grad():
        model.project.weight.mul_(2)
        model.project.bias.mul_(2).add_(0.5)
    veca.save(model, same)

    words = ["--config", out / "config.toml", "--data", "photos:24", "--device", "cpu"]
    for name, folder in (("first", first), ("other", other), ("same", same)):
        words += ["--weights", f"{name}={folder}"]
    parser = agreement.options_of("", images=4)
    agreement.add_weights(parser)
    rows = agreement.Jury(parser.parse_args([str(word) for word in words])).rows([32], [2, 8])
    told = {(r.pop("weights"), r["cores"]): r for r in rows}
    for cores in (2, 8):
        assert told["other", cores] == pytest.approx(told["same", cores], rel=1e-5)
        assert told["other", cores]["cls_cos"] != pytest.approx(told["first", cores]["cls_cos"])
