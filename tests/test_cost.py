"""The published figures, and the counts against torch's own counter and the real models."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import veca
from conftest import SMALLEST
from veca import DenseVit, VecaConfig, create_model
from veca.errors import InputError


@pytest.mark.parametrize(("cores", "published"), [(64, 0.129), (8, 0.016)])
def test_interactions_as_published(cores, published):
    result = veca.cost("veca_base_patch16", size=512, cores=cores)
    assert round(result.interaction_ratio, 3) == published
    assert result.veca.interactions == 2 * 1024 * cores + cores**2


@pytest.mark.parametrize(
    ("name", "size", "published"),
    [
        ("base", 256, 1.127),
        ("base", 384, 0.863),
        ("base", 512, 0.684),
        ("base", 768, 0.443),
        ("base", 1024, 0.299),
        ("small", 1024, 0.186),
        ("large", 1024, 0.359),
    ],
)
def test_attention_block_flops_as_published(name, size, published):
    assert round(veca.cost(name, size=size, cores=64).attention_ratio, 3) == published


@pytest.mark.parametrize("output_width", [None, 48])
@pytest.mark.parametrize("cores", [3, 8])
def test_counts_equal_torchs_counter(cores, output_width):
    """With attention as plain matrix products, which torch counts on every device."""
    config = SMALLEST.replace(output_width=output_width)
    expected = veca.cost(config, size=(48, 64), cores=cores)
    images = torch.randn(1, 3, 48, 64)
    for model, kwargs, counted in (
        (create_model(config, backend="sdpa"), {"cores": cores}, expected.veca),
        (DenseVit(config), {}, expected.dense),
    ):
        assert sum(p.numel() for p in model.parameters()) == counted.parameters
        model.eval()
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(images, **kwargs)
        assert counter.get_total_flops() == counted.flops


@pytest.mark.parametrize("size", [(64, 96), (80, 112), (48, 16)])
@pytest.mark.parametrize("keep", [0.22, 0.5])
@pytest.mark.parametrize("output_width", [None, 48])
@torch.no_grad()
def test_counts_of_merging_equal_torchs_counter(keep, size, output_width):
    config = SMALLEST.replace(depth=5, output_width=output_width)
    expected = veca.cost(config, size, cores=4, keep=keep)
    model = create_model(config, backend="sdpa").eval()
    images = torch.randn(1, 3, *size)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images, cores=4, keep=keep)
    assert counter.get_total_flops() == expected.veca.flops
    states = [s for s in model.walk(images, 4, keep=keep) if s.number and not s.merging]
    seen = [state.tokens.shape[1] - 4 for state in states]
    assert list(expected.patch_tokens) == seen
    pairs = [2 * 4 * tokens + 4**2 for tokens in seen]
    assert expected.veca.interactions == round(sum(pairs) / len(pairs))
    full = veca.cost(config, size, cores=4)
    assert full.keep == 1 and set(full.patch_tokens) == {full.grid[0] * full.grid[1]}
    assert expected.dense == full.dense


def test_merging_saves_work_and_memory_but_not_in_the_first_blocks():
    full, half = veca.cost("tiny", 512, 64), veca.cost("tiny", 512, 64, keep=0.5)
    assert half.veca.inference_bytes == full.veca.inference_bytes  # before anything merges
    assert half.veca.training_bytes < 0.9 * full.veca.training_bytes
    assert 0.6 < half.veca.flops / full.veca.flops < 0.85


def kept_for_training(model, keep):
    """Bytes that autograd keeps beside the parameters."""
    images = torch.randn(1, 3, 256, 256)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(images, keep=keep)
    assert out.grid == (16, 16)
    return sum(kept.values())


def test_training_memory_estimate_is_near_what_autograd_keeps():
    config = VecaConfig(depth=4, width=192, heads=3, num_cores=16)
    model = create_model(config, backend="sdpa").train()
    shares = (1.0, 0.4)
    estimates = [veca.cost(config, 256, 16, keep=keep).veca.training_bytes for keep in shares]
    kept = [kept_for_training(model, keep) for keep in shares]
    assert kept[0] == pytest.approx(estimates[0], rel=0.2)
    assert kept[1] / kept[0] == pytest.approx(estimates[1] / estimates[0], rel=0.05)


def test_memory_estimates_scale_with_precision_and_tokens():
    full = veca.cost("tiny", 512, 64)
    half = veca.cost("tiny", 512, 64, bytes_per_number=2)
    assert half.veca.inference_bytes * 2 == full.veca.inference_bytes
    assert full.veca.score_bytes < 0.2 * full.dense.score_bytes


@pytest.mark.parametrize("size", [0, 15, 500, -16, 16.0, (16,), (16, 17), True])
def test_bad_sizes_are_named(size):
    with pytest.raises(InputError, match="patch size"):
        veca.cost("tiny", size=size)


@pytest.mark.parametrize("keep", [0, 1.5, "half", float("nan"), "auto"])
def test_bad_shares_are_named(keep):
    with pytest.raises(InputError, match="keep"):
        veca.cost("tiny", keep=keep)


def test_bad_budget_is_named():
    with pytest.raises(InputError, match="cores"):
        veca.cost("tiny", cores=65)
