"""The scripts of `benchmarks/` around runs of distillation."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from veca.data import hold_out, open_source
from veca.distill import load_config

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="no benchmarks beside these tests")


def test_held_out_photos_are_those_the_settings_hold_out(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = spec_from_file_location("held_out", SCRIPTS / "held_out.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

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
    module.main()

    config, source = load_config(settings).data, open_source(photos)
    _, held = hold_out(len(source), config.hold_out, seed=config.split_seed)
    wanted = {f"{place:06d}.png": source.read(place) for place in held if place >= 5}
    assert 0 < len(wanted) < len(held)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == wanted
    assert f"{len(wanted)} of 6" in capsys.readouterr().out
