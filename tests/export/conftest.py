"""One small model and its files, made once: exporting is slow."""

from __future__ import annotations

import pytest
import torch

from conftest import stirred
from veca import Veca, VecaConfig, create_model

CONFIG = VecaConfig(depth=2, width=64, heads=2, num_cores=16, output_width=48)
SIZES = [(96, 64), (32, 112)]
"""Neither is the traced one; small, so that checks are quick."""


@pytest.fixture(scope="session")
def model() -> Veca:
    torch.manual_seed(7)
    return stirred(create_model(CONFIG)).eval()


@pytest.fixture(scope="session")
def onnx_any(model, tmp_path_factory):
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    from veca.export import export_model

    (entry,) = export_model(model, tmp_path_factory.mktemp("any"), name="small", check_sizes=SIZES)
    return entry


@pytest.fixture(scope="session")
def torch_any(model, tmp_path_factory):
    from veca.export import export_model

    (entry,) = export_model(
        model,
        tmp_path_factory.mktemp("pt2"),
        to="torch-export",
        name="small",
        check_sizes=SIZES,
    )
    return entry


@pytest.fixture(scope="session")
def onnx_half(model, tmp_path_factory):
    """Half of the patch tokens go on; at any size and budget."""
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    from veca.export import export_model

    folder = tmp_path_factory.mktemp("half")
    (entry,) = export_model(model, folder, name="small", keep=0.5, check_sizes=SIZES)
    return entry


@pytest.fixture(scope="session")
def onnx_int8(model, tmp_path_factory):
    """Whole numbers of 8 bit, for any budget, share of tokens and size."""
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    from veca.export import export_model

    folder = tmp_path_factory.mktemp("int8")
    options = {"precision": "int8", "keep": "any", "gate": 0.9, "check_sizes": SIZES[:1]}
    (entry,) = export_model(model, folder, name="small", **options)
    return entry
