"""The definition, and every backend that runs on a CPU against it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veca import rope
from veca.attention import core_attention, default_backend
from veca.attention.reference import visibility
from veca.errors import InputError


def tokens(batch, heads, count, width, dtype=torch.float32, layout="plain"):
    """Random [B, H, T, d] with the memory layouts that real models hand over."""
    if layout == "plain":
        return torch.randn(batch, heads, count, width, dtype=dtype)
    if layout == "heads last":  # a view of a [B, T, H * d] projection
        return torch.randn(batch, count, heads, width, dtype=dtype).transpose(1, 2)
    if layout == "strided":  # every second channel of a wider tensor
        return torch.randn(batch, heads, count, 2 * width, dtype=dtype)[..., ::2]
    return torch.randn(width, count, heads, batch, dtype=dtype).permute(3, 2, 1, 0)


def rotations(batch, cores, patches, width, dtype):
    periods = rope.periods(width, 100.0, 0.125)
    core_xy = torch.rand(batch, cores, 2, dtype=dtype) * 2 - 1
    patch_xy = torch.rand(1, patches, 2, dtype=dtype) * 2 - 1
    return rope.rotation(core_xy, periods), rope.rotation(patch_xy, periods)


def run(backend, q, k, v, cores, tables, upstream):
    """Output, and gradients of q, k, v and, with rotation, of the cores' tables."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    leaves = [q, k, v]
    kwargs = {}
    if tables is not None:
        core = [x.detach().clone().requires_grad_() for x in tables[0]]
        leaves += core
        kwargs = {"core_rotation": core, "patch_rotation": tables[1]}
    out = core_attention(q, k, v, cores, backend=backend, **kwargs)
    return out, torch.autograd.grad(out, leaves, upstream)


@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    cores=st.integers(1, 64),
    patches=st.integers(0, 97),
    quarter=st.sampled_from([1, 2, 3, 8]),
    layout=st.sampled_from(["plain", "heads last", "strided", "permuted"]),
    rotated=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_sdpa_equals_the_definition_values_and_gradients(
    batch, heads, cores, patches, quarter, layout, rotated, dtype, seed
):
    torch.manual_seed(seed)
    width, count = 4 * quarter, cores + patches
    q, k, v = (tokens(batch, heads, count, width, dtype, layout) for _ in range(3))
    tables = rotations(batch, cores, patches, width, dtype) if rotated else None
    upstream = torch.randn(batch, heads, count, width, dtype=dtype)
    out, grads = run("sdpa", q, k, v, cores, tables, upstream)
    expected, expected_grads = run("reference", q, k, v, cores, tables, upstream)
    limit = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out, expected, rtol=limit, atol=limit)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        # Gradients add up over many tokens; their rounding is relative to their size.
        scale = max(1.0, expected_grad.abs().max().item())
        torch.testing.assert_close(grad, expected_grad, rtol=limit, atol=limit * scale)


def test_definition_is_who_sees_whom():
    seen = visibility(5, 2).int().tolist()
    assert seen == [
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1],
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
    ]


def test_reference_against_arithmetic_by_hand():
    """Two cores and one patch, width 1: small enough to write the softmax out."""
    q, k, v = (
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([0.5, -1.0, 2.0]),
        torch.tensor([1.0, 10, 100]),
    )
    got = core_attention(*(x.view(1, 1, 3, 1) for x in (q, k, v)), 2, backend="reference").flatten()
    core = (1.0 * k).exp() / (1.0 * k).exp().sum()
    patch = (3.0 * k[:2]).exp() / (3.0 * k[:2]).exp().sum()
    assert torch.allclose(got[0], (core * v).sum())
    assert torch.allclose(got[2], (patch * v[:2]).sum())


@pytest.mark.parametrize("backend", ["reference", "sdpa", "auto"])
def test_all_cores_is_full_attention(backend):
    q, k, v = (tokens(2, 2, 9, 8) for _ in range(3))
    full = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(core_attention(q, k, v, 9, backend=backend), full)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near_and_keeps_its_dtype(backend, dtype):
    q, k, v = (tokens(2, 2, 40, 16) for _ in range(3))
    core_rotation, patch_rotation = rotations(2, 7, 33, 16, torch.float32)
    exact = core_attention(
        q, k, v, 7, core_rotation=core_rotation, patch_rotation=patch_rotation, backend="reference"
    )
    rough = core_attention(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        7,
        core_rotation=core_rotation,
        patch_rotation=patch_rotation,
        backend=backend,
    )
    assert rough.dtype == dtype
    assert (rough.float() - exact).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_scale_is_used(backend):
    q, k, v = (tokens(1, 1, 6, 4) for _ in range(3))
    torch.testing.assert_close(
        core_attention(q, k, v, 2, scale=0.3, backend=backend),
        core_attention(q * 0.6, k, v, 2, scale=0.5, backend=backend),
    )


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_large_logits_stay_finite(backend):
    q, k, v = (tokens(1, 2, 30, 8) for _ in range(3))
    out = core_attention(q * 500, k, v, 5, backend=backend)
    assert torch.isfinite(out).all()


def test_auto_runs_and_says_what_it_takes():
    q, k, v = (tokens(1, 2, 30, 8) for _ in range(3))
    torch.testing.assert_close(
        core_attention(q, k, v, 5), core_attention(q, k, v, 5, backend="reference")
    )
    choice = default_backend("cpu")
    assert choice.backend == "sdpa" and choice.reason


def _bad_calls():
    q = torch.randn(2, 3, 10, 8)
    tables = (torch.ones(1, 4, 4), torch.zeros(1, 4, 4))
    patches = (torch.ones(1, 6, 4), torch.zeros(1, 6, 4))
    return {
        "rank": ((q[0], q[0], q[0], 4), {}, r"\(3, 10, 8\)"),
        "shapes": ((q, q[:, :, :9], q, 4), {}, r"\(2, 3, 9, 8\)"),
        "dtypes": ((q, q.double(), q, 4), {}, "float64"),
        "integers": ((q.long(), q.long(), q.long(), 4), {}, "int64"),
        "no cores": ((q, q, q, 0), {}, "num_cores.* 0"),
        "too many cores": ((q, q, q, 11), {}, "num_cores.* 11"),
        "fraction": ((q, q, q, 2.5), {}, r"num_cores.* 2\.5"),
        "backend": ((q, q, q, 4), {"backend": "sdap"}, "'sdap'"),
        "half a rotation": (
            (q, q, q, 4),
            {"core_rotation": tables},
            "and patch_rotation",
        ),
        "table shape": (
            (q, q, q, 5),
            {"core_rotation": tables, "patch_rotation": patches},
            r"core_rotation.*\(1, 4, 4\)",
        ),
        "odd width": (
            (q[..., :7], q[..., :7], q[..., :7], 4),
            {"core_rotation": tables, "patch_rotation": patches},
            "head width 7",
        ),
    }


@pytest.mark.parametrize("case", sorted(_bad_calls()))
def test_bad_input_is_named(case):
    args, kwargs, noun = _bad_calls()[case]
    with pytest.raises(InputError, match=noun):
        core_attention(*args, **kwargs)
