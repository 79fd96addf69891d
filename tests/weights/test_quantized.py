"""`veca quantize`: what it writes, what it refuses, and what is loaded of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import veca
from veca import VecaConfig, create_model
from veca.errors import GateError, InputError, WeightsError
from veca.images.bundled import bundled_photos
from veca.model import Veca
from veca.precision import at_precision
from veca.quantization import Agreement
from veca.weights.quantized import REPORT, quantize, report_table

PHOTOS = bundled_photos()[:1]


@pytest.fixture(scope="module")
def model() -> Veca:
    torch.manual_seed(0)
    config = VecaConfig(depth=2, width=32, heads=2, num_cores=8, output_width=48, patch_size=8)
    return create_model(config).eval()


def test_weights_are_written_with_a_report_and_load(model: Veca, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "q", PHOTOS, size=32, cores=[2, 8])
    assert report.passes and set(report.budgets) == {2, 8} and len(report.layers) == 12
    assert len(report_table(report)) == 2 + 8
    assert json.loads((tmp_path / "q" / REPORT).read_text()) == report.to_dict()
    loaded = veca.load(tmp_path / "q")
    assert loaded.quantization == report.rounding
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        found = at_precision(loaded, "int8")(images).patches
        similar = torch.cosine_similarity(found, model(images).patches, dim=-1)
    assert similar.mean() > 0.998
    with pytest.raises(InputError, match="already"):
        quantize(tmp_path / "q", tmp_path / "again", PHOTOS)
    # Saved again, it is a plain model.
    assert veca.load(veca.save(loaded, tmp_path / "plain")).quantization is None


def test_a_gate_names_layers_and_writes_nothing(model: Veca, tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"blocks\.\d\.(attn|ffn)"):
        quantize(model, tmp_path / "q", PHOTOS, size=32, cores=[8], gate=Agreement(1, 1))
    assert not (tmp_path / "q").exists()
    with pytest.raises(InputError, match="nothing"):
        quantize(model, tmp_path / "q", PHOTOS, leave=["*"])


def test_damage_is_seen(model: Veca, tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    quantize(model, path, PHOTOS, size=32, cores=[8], layers=False)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="sha256"):
        veca.load(path)
