"""Every public name, parameter, command and option of 0.1 is still there, as it was or as an alias.

`interface_0_1.json` was made from the code of 0.1 and is never made again.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest
import torch
import typer

import veca
from veca.cli.main import app

RECORD = json.loads((Path(__file__).parent / "interface_0_1.json").read_text())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", RECORD["names"])
def test_names_and_parameters(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    if module == "veca.integrations.transformers":
        pytest.importorskip("transformers")
    thing = getattr(importlib.import_module(module), attribute)
    parameters = RECORD["names"][name]
    if parameters is not None:
        assert set(parameters) <= set(inspect.signature(thing).parameters)


@pytest.mark.parametrize("name", RECORD["commands"])
def test_options(name: str) -> None:
    command = typer.main.get_command(app).commands[name]
    known = {text for one in command.params for text in (*one.opts, *one.secondary_opts)}
    assert set(RECORD["commands"][name]) <= known


README = """
model = veca.load("veca_tiny_patch16")
batch = veca.preprocess(photo, size=96)
out = model(batch.pixels, cores=32)
out.cls, out.patches, out.feature_map(), out.cores, out.core_xy
veca.create_model("veca_tiny_patch16")
model.forward_intermediates(batch.pixels, cores=32, layers=(3, 6, 9, 12))
model.attention_maps(batch.pixels, cores=32, kind="norm")
model.set_grad_checkpointing()
engine = veca.compile_for_inference(model, size=96, cores=64, batch=1)
veca.save(model, folder / "my-weights")
veca.export_official(model, folder / "checkpoint.pt")
veca.import_official(folder / "checkpoint.pt")
veca.cost("veca_base_patch16", size=1024, cores=64).attention_ratio
q = k = v = torch.randn(1, 12, 64 + 256, 64)
veca.attention.core_attention(q, k, v, num_cores=64)
"""
"""What the README of 0.1 showed."""


def test_a_script_of_0_1_runs(tmp_path: Path) -> None:
    photo = Path(veca.__file__).parent / "assets" / "photos" / "chelsea.jpg"
    names = {"veca": veca, "torch": torch, "photo": photo, "folder": tmp_path}
    exec(README, names)
    assert names["out"].cls.shape == (1, 1280) and names["engine"] is not None


def test_names_that_moved_warn() -> None:
    with pytest.warns(DeprecationWarning, match="embed"):
        from veca.collections import embed
    assert embed is importlib.import_module("veca.embed").embed
    with pytest.warns(DeprecationWarning, match="ElasticBackbone"):
        from veca.probe import VecaBackbone
    assert VecaBackbone is importlib.import_module("veca.probe").ElasticBackbone
