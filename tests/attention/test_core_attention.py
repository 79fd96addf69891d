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


def run(backend, q, k, v, cores, tables, upstream, **kwargs):
    """Output, and gradients of q, k, v and, with rotation, of the cores' tables."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    leaves = [q, k, v]
    if tables is not None:
        core = [x.detach().clone().requires_grad_() for x in tables[0]]
        leaves += core
        kwargs |= {"core_rotation": core, "patch_rotation": tables[1]}
    out = core_attention(q, k, v, cores, backend=backend, **kwargs)
    return out, torch.autograd.grad(out, leaves, upstream)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    cores=st.integers(1, 64),
    patches=st.integers(0, 97),
    quarter=st.sampled_from([1, 2, 3, 8]),
    layout=st.sampled_from(["plain", "heads last", "strided", "permuted"]),
    rotated=st.booleans(),
    weighted=st.sampled_from(["no", "shared", "each"]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_sdpa_equals_the_definition_values_and_gradients(
    batch, heads, cores, patches, quarter, layout, rotated, weighted, dtype, seed
):
    torch.manual_seed(seed)
    width, count = 4 * quarter, cores + patches
    q, k, v = (tokens(batch, heads, count, width, dtype, layout) for _ in range(3))
    tables = rotations(batch, cores, patches, width, dtype) if rotated else None
    upstream = torch.randn(batch, heads, count, width, dtype=dtype)
    counts = {}
    if weighted != "no":  # whole, in between and none at all
        counts["multiplicity"] = torch.tensor([0, 0.5, 1, 4])[
            torch.randint(4, (1 if weighted == "shared" else batch, patches))
        ]
    out, grads = run("sdpa", q, k, v, cores, tables, upstream, **counts)
    expected, expected_grads = run("reference", q, k, v, cores, tables, upstream, **counts)
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


# -- multiplicity --------------------------------------------------------------------------------

EACH = pytest.mark.parametrize("backend", ["reference", "sdpa", "auto"])


def crowd(counts, cores=3, width=8):
    """Two pictures of one token for each of `counts`; and what it stands for, token by token.

    Returns q, k, v, tables with each patch token once, and the same with token j repeated
    counts[j] times.
    """
    total = cores + len(counts)
    once = [tokens(2, 2, total, width, torch.float64) for _ in range(3)]
    tables = rotations(2, cores, len(counts), width, torch.float64)
    repeats = torch.tensor([1] * cores + counts)
    many = [x.repeat_interleave(repeats, dim=2) for x in once]
    patch = rope.Rotation(*(x.repeat_interleave(repeats[cores:], dim=1) for x in tables[1]))
    return once, tables, many, (tables[0], patch)


@EACH
def test_a_token_of_multiplicity_m_is_m_equal_tokens(backend):
    counts = [1, 3, 2, 1, 5]
    once, tables, many, many_tables = crowd(counts)
    expected = core_attention(
        *many, 3, core_rotation=many_tables[0], patch_rotation=many_tables[1], backend="reference"
    )
    got = core_attention(
        *once, 3, core_rotation=tables[0], patch_rotation=tables[1],
        multiplicity=torch.tensor(counts), backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(got[:, :, :3], expected[:, :, :3])
    first = [3 + sum(counts[:j]) for j in range(len(counts))]  # of each token's equals
    torch.testing.assert_close(got[:, :, 3:], expected[:, :, first])


@EACH
def test_multiplicity_zero_is_a_token_that_is_not_there(backend):
    """Outputs of the others are as without it, its own is zero; and so are its gradients."""
    counts = [1, 0, 2, 0, 1]
    left = [j for j, count in enumerate(counts) if count]
    there = [0, 1, 2, *(3 + j for j in left)]
    once, tables, _, _ = crowd(counts)
    fewer = [x[:, :, there] for x in once]
    fewer_tables = (tables[0], rope.Rotation(*(x[:, left] for x in tables[1])))
    upstream = torch.randn_like(once[0])
    weights = torch.tensor(counts, dtype=torch.float64)
    got, grads = run(backend, *once, 3, tables, upstream, multiplicity=weights)
    expected, expected_grads = run(
        "reference", *fewer, 3, fewer_tables, upstream[:, :, there], multiplicity=weights[left]
    )
    torch.testing.assert_close(got[:, :, there], expected)
    assert not got[:, :, [4, 6]].any()
    for grad, expected_grad in zip(grads[:3], expected_grads[:3], strict=True):
        torch.testing.assert_close(grad[:, :, there], expected_grad)
        assert not grad[:, :, [4, 6]].any()
    for grad, expected_grad in zip(grads[3:], expected_grads[3:], strict=True):  # of the tables
        torch.testing.assert_close(grad, expected_grad)


@EACH
def test_where_all_patches_are_padding_cores_see_cores(backend):
    q, k, v = (tokens(1, 2, 12, 8) for _ in range(3))
    got = core_attention(q, k, v, 4, multiplicity=torch.zeros(8), backend=backend)
    full = core_attention(*(x[:, :, :4] for x in (q, k, v)), 4, backend="reference")
    torch.testing.assert_close(got[:, :, :4], full)
    assert not got[:, :, 4:].any()


@EACH
def test_multiplicity_one_changes_nothing(backend):
    q, k, v = (tokens(2, 2, 30, 8) for _ in range(3))
    plain = core_attention(q, k, v, 5, backend=backend)
    for ones in (torch.ones(25), torch.ones(1, 25), torch.ones(2, 25, dtype=torch.bool)):
        torch.testing.assert_close(
            core_attention(q, k, v, 5, multiplicity=ones, backend=backend), plain
        )
    empty = core_attention(q, k, v, 30, multiplicity=torch.ones(0), backend=backend)
    torch.testing.assert_close(empty, core_attention(q, k, v, 30, backend=backend))


def test_multiplicity_stays_on_the_fused_path_and_makes_no_scores():
    """sdpa with multiplicity runs torch's fused kernel, with a bias of one row."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            results = out if isinstance(out, (tuple, list)) else (out,)
            size = max((x.numel() for x in results if isinstance(x, torch.Tensor)), default=0)
            seen.append((str(function), size))
            return out

    q, k, v = (tokens(1, 2, 300, 8) for _ in range(3))
    with torch.no_grad(), Watch():
        core_attention(q, k, v, 100, multiplicity=torch.full((200,), 4.0), backend="sdpa")
    assert sum("flash_attention" in name for name, _ in seen) == 2
    assert max(size for _, size in seen) <= q.numel() < 2 * 100 * 300  # of the cores' scores


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_multiplicity_in_low_precision(dtype):
    q, k, v = (tokens(2, 2, 40, 16) for _ in range(3))
    counts = torch.randint(0, 5, (2, 33))
    exact = core_attention(q, k, v, 7, multiplicity=counts, backend="reference")
    low = [x.to(dtype) for x in (q, k, v)]
    for backend in ("reference", "sdpa"):
        rough = core_attention(*low, 7, multiplicity=counts.to(dtype), backend=backend)
        assert rough.dtype == dtype
        assert (rough.float() - exact).norm() / exact.norm() < 1e-2


def test_multiplicity_under_torch_func():
    q, k, v = (tokens(3, 2, 12, 8, torch.float64) for _ in range(3))
    counts = torch.randint(0, 3, (3, 8)).double()

    def loss(q, k, v, counts):
        whole = (x[None] for x in (q, k, v))
        return core_attention(*whole, 4, multiplicity=counts).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(q, k, v, counts)
    q.requires_grad_()
    out = core_attention(q, k, v, 4, multiplicity=counts, backend="sdpa").square().sum()
    torch.testing.assert_close(found, torch.autograd.grad(out, q)[0])


@pytest.mark.slow
def test_multiplicity_compiled_exported_and_without_values():
    from torch._subclasses import FakeTensorMode

    class Module(torch.nn.Module):
        def forward(self, q, k, v, counts):
            return core_attention(q, k, v, 4, multiplicity=counts)

    q, k, v = (tokens(2, 2, 12, 8) for _ in range(3))
    counts = torch.tensor([[0.0, 1, 2, 3, 4, 0, 1, 1]])
    expected = core_attention(q, k, v, 4, multiplicity=counts, backend="reference")
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(q, k, v, counts), expected)
    patches = torch.export.Dim("patches", min=2, max=100)
    shapes = ({2: 4 + patches}, {2: 4 + patches}, {2: 4 + patches}, {1: patches})
    program = torch.export.export(Module(), (q, k, v, counts), dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(q, k, v, counts), expected)
    fewer = (q[:, :, :9], k[:, :, :9], v[:, :, :9])
    torch.testing.assert_close(
        program.module()(*fewer, counts[:, :5]),
        core_attention(*fewer, 4, multiplicity=counts[:, :5], backend="reference"),
    )
    with torch.device("meta"):
        x = torch.empty(2, 2, 12, 8)
        assert core_attention(x, x, x, 4, multiplicity=torch.empty(8)).shape == x.shape
    with FakeTensorMode():
        x = torch.empty(2, 2, 12, 8)
        assert core_attention(x, x, x, 4, multiplicity=torch.empty(8)).shape == x.shape


def test_multiplicity_counts_as_many_flops():
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    counted = []
    name = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for counts in (None, torch.ones(8)):
        q, k, v = (tokens(2, 2, 12, 8) for _ in range(3))
        mapping = {name: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            core_attention(q, k, v, 4, multiplicity=counts)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


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
        "multiplicity, no tensor": ((q, q, q, 4), {"multiplicity": 4}, "multiplicity.* int"),
        "multiplicity shape": (
            (q, q, q, 4),
            {"multiplicity": torch.ones(3, 6)},
            r"multiplicity.*\[1 or 2, 6\].*\(3, 6\)",
        ),
        "multiplicity of all tokens": (
            (q, q, q, 4),
            {"multiplicity": torch.ones(2, 10)},
            r"multiplicity.*\(2, 10\)",
        ),
        "complex multiplicity": (
            (q, q, q, 4),
            {"multiplicity": torch.ones(6, dtype=torch.complex64)},
            "multiplicity.*complex",
        ),
        "negative multiplicity": (
            (q, q, q, 4),
            {"multiplicity": torch.tensor([1.0, 1, -2, 1, 1, 1])},
            r"multiplicity.*-2\.0",
        ),
        "multiplicity NaN": (
            (q, q, q, 4),
            {"multiplicity": torch.tensor([1.0, torch.nan, 1, 1, 1, 1])},
            "multiplicity.*nan",
        ),
        "multiplicity infinite": (
            (q, q, q, 4),
            {"multiplicity": torch.tensor([1.0, torch.inf, 1, 1, 1, 1])},
            "multiplicity.*inf",
        ),
        "multiplicity to learn": (
            (q, q, q, 4),
            {"multiplicity": torch.ones(6, requires_grad=True)},
            "multiplicity.*detach",
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


@pytest.mark.parametrize("cores", [1, 3])
def test_few_cores_of_many_patches_round_no_more_than_many(cores):
    """Matrix products of CPUs sum a single row one by one; 65,536 patches are 4096 px a side."""
    shape = (1, 2, cores + 65_536, 16)
    q, k, v = (torch.randn(shape) + shift for shift in (0, 0, 1))
    exact = core_attention(q.double(), k.double(), v.double(), cores, backend="sdpa")[:, :, :cores]
    found = core_attention(q, k, v, cores, backend="sdpa")[:, :, :cores]
    assert found.shape == exact.shape
    assert (found - exact).norm() / exact.norm() < 1e-6
