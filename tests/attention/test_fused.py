"""The Triton kernels against a plain float64 definition, values and gradients.

Without a GPU the kernels run in Triton's interpreter: slow, so shapes are small there, but it is
the same code down to every mask. With a GPU the sweep at the end runs instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from interpreter import import_interpreted

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")

if not GPU:
    import_interpreted("veca.attention.kernels")

from veca.attention import core_attention as dispatched  # noqa: E402
from veca.attention import fused as backend  # noqa: E402
from veca.attention import kernels  # noqa: E402
from veca.attention import launch as launching  # noqa: E402
from veca.attention.knobs import MAX_SPLITS, Launch, choose_splits  # noqa: E402
from veca.attention.launch import launch_backward, launch_forward  # noqa: E402
from veca.errors import InputError  # noqa: E402

# The interpreter chops bfloat16 instead of rounding it, which doubles the error.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-2 if GPU else 2e-2,
}

interpreted = pytest.mark.skipif(GPU, reason="small shapes are for the interpreter")
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")


def test_the_interpreter_is_on_where_there_is_no_gpu():
    """Fails if something imported triton before this module could set TRITON_INTERPRET."""
    assert kernels.INTERPRETED.value is not GPU


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Every buffer the backend allocates starts as NaN, so an unwritten element shows."""

    def empty(like, shape, dtype):
        return like.new_full(shape, float("nan"), dtype=dtype)

    monkeypatch.setattr(launching, "empty", empty)


# -- the definition ------------------------------------------------------------------------------


def turned(x, tables):
    if tables is None:
        return x
    cos, sin = (table.unsqueeze(1) for table in tables)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def definition(q, k, v, cores, core_tables, patch_tables, scale, counts=None):
    """A dense softmax over all tokens in which patches see the cores only.

    With `counts` [B or 1, N], patch token j weighs counts[j] * exp(score) in the rows of the cores;
    none is padding, whose own row is zero.
    """

    def rotate(x):
        return torch.cat(
            [turned(x[:, :, :cores], core_tables), turned(x[:, :, cores:], patch_tables)], 2
        )

    scores = rotate(q) @ rotate(k).transpose(-1, -2) * scale
    index = torch.arange(q.shape[2], device=q.device)
    seen = (index[:, None] < cores) | (index[None, :] < cores)
    scores = scores.masked_fill(~seen, float("-inf"))
    if counts is None:
        return scores.softmax(-1) @ v
    weights = torch.nn.functional.pad(counts.to(q.dtype), (cores, 0), value=1.0)[:, None]
    there = scores.masked_fill((weights == 0).unsqueeze(-2), float("-inf"))
    terms = (there - there.detach().amax(-1, keepdim=True)).exp() * weights.unsqueeze(-2)
    return terms / terms.sum(-1, keepdim=True) @ v * (weights > 0).unsqueeze(-1)


def error(got, want):
    """Relative error; a gradient that is zero by nature is measured against one."""
    assert got.shape == want.shape
    return ((got.double() - want).norm() / want.norm().clamp(min=1.0)).item()


def inputs(batch, heads, patches, cores, width, dtype, rotated, layout="fused", gain=1.0):
    shape = (batch, cores + patches, 3, heads, width)
    if layout == "fused":  # slices of one projection
        q, k, v = torch.randn(shape).to(DEVICE, dtype).mul(gain).unbind(2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    elif layout == "separate":  # three projections
        q, k, v = (torch.randn(shape).to(DEVICE, dtype)[:, :, 0].transpose(1, 2) for _ in range(3))
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "plain":
        q, k, v = torch.randn(3, batch, heads, cores + patches, width).to(DEVICE, dtype).unbind(0)
    else:  # tokens outermost, heads innermost but for the channels, channels cut from wider rows
        wide = torch.randn(cores + patches, batch, heads, 3 * width + 8).to(DEVICE, dtype)
        wide = wide.permute(1, 2, 0, 3)
        q, k, v = (wide[..., at : at + width] for at in (0, width + 8, 2 * width + 8))
    tables = [None, None, None, None]
    if rotated:
        # True: one table for all images; "batch": one for the cores of each; "both": patches too.
        core = torch.randn(1 if rotated is True else batch, cores, width // 2).to(DEVICE)
        patch = torch.randn(batch if rotated == "both" else 1, patches, width // 2).to(DEVICE)
        tables = [core.cos(), core.sin(), patch.cos(), patch.sin()]
    upstream = torch.randn(batch, heads, cores + patches, width).to(DEVICE, dtype)
    return q, k, v, tables, upstream


def random_counts(batch, patches, kind):
    """How many patches each token stands for: 0 to 5 and in between, and runs of padding.

    "shared": one row for all images; "strided": numbers that do not lie side by side.
    """
    counts = torch.randint(0, 6, (1 if kind == "shared" else batch, patches)).float()
    counts += 0.5 * (torch.rand(counts.shape) < 0.2)
    counts[:, patches // 3 : patches - patches // 4] = 0  # longer than a tile, in large problems
    counts[:, patches // 2 : patches // 2 + 3] = 2.0
    if kind == "strided":
        counts = torch.stack([counts, counts], dim=-1)[..., 0]
    return counts.to(DEVICE)


def wanted(q, k, v, tables, upstream, cores, scale, counts=None):
    """Output and gradients of q, k, v and the core tables, by the definition in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *tables[:2]) if x is not None]
    core = leaves[3:] or None
    patch = [x.double() for x in tables[2:]] if tables[2] is not None else None
    out = definition(*leaves[:3], cores, core, patch, scale, counts)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.double())]


def through_autograd(q, k, v, tables, upstream, cores, scale, counts=None):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *tables[:2]) if x is not None]
    core = tuple(leaves[3:]) or None
    patch = tuple(tables[2:]) if tables[2] is not None else None
    out = backend.core_attention(*leaves[:3], cores, core, patch, scale, counts)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def launched(q, k, v, tables, upstream, cores, scale, counts=None, **overrides):
    """The same past the registration, with everything the tables decide overridden."""
    args = (*tables, cores, scale)
    out, lse = launch_forward(q, k, v, *args, counts, **overrides)
    rotated = tables[0] is not None
    grads = launch_backward(upstream, q, k, v, out, lse, *args, rotated, counts, **overrides)
    return [out, *grads[: 5 if rotated else 3]]


def check(got, want, tolerance):
    names = ("out", "dq", "dk", "dv", "dcos", "dsin")
    assert len(got) == len(want)
    errors = {name: error(*pair) for name, *pair in zip(names, got, want, strict=False)}
    assert all(value < tolerance for value in errors.values()), errors  # NaN fails too


def compare(
    batch=1, heads=1, patches=20, cores=7, width=32, dtype=torch.float32, rotated=True,
    layout="fused", gain=1.0, run=through_autograd, tolerance=None, weighted=None, **overrides,
):  # fmt: skip
    q, k, v, tables, upstream = inputs(
        batch, heads, patches, cores, width, dtype, rotated, layout, gain
    )
    scale = width**-0.5
    counts = random_counts(batch, patches, weighted) if weighted else None
    got = run(q, k, v, tables, upstream, cores, scale, counts, **overrides)
    want = wanted(q, k, v, tables, upstream, cores, scale, counts)
    check(got, want, tolerance or TOLERANCE[dtype])
    return got


# -- values and gradients ------------------------------------------------------------------------


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("patches", "cores", "heads", "width", "rotated"),
    [
        (0, 1, 1, 32, False),
        (0, 7, 3, 32, True),
        (0, 70, 1, 32, True),
        (1, 1, 3, 32, True),
        (1, 64, 1, 64, True),
        (1, 70, 1, 64, False),
        (15, 8, 3, 64, False),
        (15, 33, 1, 32, True),
        (100, 7, 3, 64, True),
        (100, 33, 1, 32, False),
        (100, 70, 1, 32, True),
        (257, 8, 1, 32, True),
        (257, 64, 1, 64, False),
        (256, 64, 1, 32, True),
    ],
)
def test_odd_sizes(patches, cores, heads, width, rotated):
    compare(patches=patches, cores=cores, heads=heads, width=width, rotated=rotated)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("layout", ["fused", "separate", "plain", "tokens first"])
def test_any_strides_in_and_token_major_out(layout):
    for tensor in compare(batch=2, heads=2, layout=layout, rotated="batch")[:4]:
        assert tensor.transpose(1, 2).is_contiguous()


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotated", [False, True])
def test_half_precision(dtype, rotated):
    compare(patches=70, cores=17, width=64, dtype=dtype, rotated=rotated)


@interpreted
def test_half_precision_tiled():
    compare(patches=70, cores=66, dtype=torch.bfloat16)


@interpreted
def test_tables_in_the_dtype_of_the_tokens():
    q, k, v, tables, upstream = inputs(2, 1, 70, 9, 32, torch.bfloat16, "batch")
    tables = [table.bfloat16() for table in tables]
    got = through_autograd(q, k, v, tables, upstream, 9, 0.2)
    assert got[4].dtype == torch.bfloat16
    check(got, wanted(q, k, v, tables, upstream, 9, 0.2), TOLERANCE[torch.bfloat16])


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("cores", [7, 70])
@pytest.mark.parametrize("rotated", [True, "batch", "both"])
def test_one_table_for_the_batch_or_one_for_each_image(rotated, cores):
    compare(batch=2, cores=cores, patches=10, rotated=rotated)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("cores", [5, 70])
def test_tables_with_strides_of_their_own(cores):
    q, k, v, tables, upstream = inputs(2, 1, 20, cores, 32, torch.float32, "batch")
    want = wanted(q, k, v, tables, upstream, cores, 0.2)
    both = torch.stack(tables[:2], dim=-1)  # as angles would be kept: cos and sin side by side
    tables = [both[..., 0], both[..., 1], tables[2].expand(2, -1, -1), tables[3]]
    check(through_autograd(q, k, v, tables, upstream, cores, 0.2), want, 1e-5)


@interpreted
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("rotate", ["cores", "patches"])
def test_only_one_side_rotated(rotate, tiled):
    q, k, v, tables, upstream = inputs(1, 1, 20, 5, 32, torch.float32, True)
    unused = slice(2, 4) if rotate == "cores" else slice(0, 2)
    tables[unused] = [None, None]
    got = launched(q, k, v, tables, upstream, 5, 0.2, launch=Launch(16), tiled=tiled)
    want = wanted(q, k, v, tables, upstream, 5, 0.2)
    check(got[: len(want)], want, 1e-5)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("cores", [7, 70])
@pytest.mark.parametrize("rotated", [False, True])
def test_large_logits(cores, rotated):
    """Scores in the thousands: nearly one-hot rows, whose gradients are differences of rounding.

    A probability is then exact to about 1e-3, the spacing of float32 at such scores. So is a
    gradient, but on the scale of its terms, products of q, k and v, not of their sum.
    """
    q, k, v, tables, upstream = inputs(1, 1, 40, cores, 32, torch.float32, rotated, gain=50.0)
    got = through_autograd(q, k, v, tables, upstream, cores, 32**-0.5)
    want = wanted(q, k, v, tables, upstream, cores, 32**-0.5)
    assert error(got[0], want[0]) < 1e-3
    terms = [1.0, 50**2, 50**2, 1.0, 50**3, 50**3]  # of out, dq, dk, dv, dcos, dsin
    for a, b, term in zip(got, want, terms, strict=False):
        assert (a - b).norm() < 1e-3 * term * upstream.norm()


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("cores", [5, 50, 70])
def test_scores_far_below_zero(cores):
    """Every score near -200: a padding column's score of zero must neither decide the maximum nor,
    in the backward, turn into exp(200) and from there into NaN."""
    q, k, v, tables, upstream = inputs(1, 1, 20, cores, 32, torch.float32, False)
    q, k = 6 + q / 4, -6 + k / 4
    got = through_autograd(q, k, v, tables, upstream, cores, 32**-0.5)
    check(got, wanted(q, k, v, tables, upstream, cores, 32**-0.5), 2e-3)


@interpreted
@pytest.mark.parametrize("cores", [7, 70])
def test_equal_rows_average(cores):
    q = torch.ones(1, 1, cores + 20, 32)
    v = torch.randn(1, 1, cores + 20, 32)
    out = backend.core_attention(q, q, v, cores)
    assert torch.allclose(out[:, :, :cores], v.mean(2, keepdim=True), atol=1e-6)
    assert torch.allclose(out[:, :, cores:], v[:, :, :cores].mean(2, keepdim=True), atol=1e-6)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_forced_splits(splits, fused):
    launch = Launch(16, fused=fused)
    compare(batch=2, patches=75, cores=9, run=launched, launch=launch, splits=splits)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("splits", [1, 3, 17])
def test_forced_splits_tiled(splits):
    launch = Launch(16)
    compare(patches=40, cores=20, run=launched, launch=launch, splits=splits, tiled=True)


@pytest.mark.slow
@interpreted
def test_more_splits_than_a_merging_program_takes_at_a_time():
    compare(patches=300, cores=3, rotated=False, run=launched, launch=Launch(16), splits=19)


@interpreted
def test_padding_of_cores_in_the_wide_orientation():
    """From 64 padded cores on, the backward of the core rows runs transposed."""
    compare(patches=37, cores=50, run=launched, launch=Launch(16), splits=2)


@interpreted
def test_the_sum_of_a_broadcast_gradient():
    """out.sum().backward() hands over a gradient whose strides are all zero."""
    q, k, v, _, _ = inputs(1, 2, 20, 5, 32, torch.float32, False)
    q.requires_grad_()
    (got,) = torch.autograd.grad(backend.core_attention(q, k, v, 5).sum(), q)
    want = wanted(q, k, v, [None] * 4, torch.ones(1, 2, 25, 32), 5, 32**-0.5)[1]
    assert error(got, want) < 1e-5


@interpreted
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(scale):
    q, k, v, tables, upstream = inputs(1, 1, 20, 5, 32, torch.float32, True)
    got = through_autograd(q, k, v, tables, upstream, 5, scale)
    check(got, wanted(q, k, v, tables, upstream, 5, scale), 1e-5)


@interpreted
def test_an_empty_batch():
    q = torch.randn(0, 2, 10, 32, requires_grad=True)
    out = backend.core_attention(q, q, q, 4)
    assert out.shape == (0, 2, 10, 32)
    out.sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape


@interpreted
def test_log_sum_exps_are_of_base_two_and_of_all_rows():
    q, k, v, tables, _ = inputs(1, 1, 20, 5, 32, torch.float32, False)
    _, lse = torch.ops.veca.core_attention(q, k, v, *tables, 5, 0.2)
    lse = lse.double() * math.log(2)
    scores = q.double() @ k.double().transpose(-1, -2) * 0.2
    assert torch.allclose(lse[..., :5], scores[:, :, :5].logsumexp(-1), atol=1e-5)
    assert torch.allclose(lse[..., 5:], scores[:, :, 5:, :5].logsumexp(-1), atol=1e-5)


# -- multiplicity --------------------------------------------------------------------------------

# The logarithm of zero is -inf, as it should be; numpy, under the interpreter, says so.
of_zero = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@pytest.mark.slow
@interpreted
@of_zero
@pytest.mark.parametrize(
    ("patches", "cores", "heads", "width", "rotated", "weighted"),
    [
        (0, 7, 1, 32, True, "each"),
        (1, 1, 1, 32, False, "each"),
        (15, 33, 1, 64, True, "shared"),
        (33, 70, 1, 32, True, "shared"),
        (100, 7, 1, 32, True, "each"),
        (64, 64, 1, 32, False, "strided"),
    ],
)
def test_multiplicity_at_odd_sizes(patches, cores, heads, width, rotated, weighted):
    compare(2, heads, patches, cores, width, rotated=rotated, weighted=weighted)


@interpreted
@of_zero
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cores", [17, 66])
def test_multiplicity_in_half_precision(dtype, cores):
    compare(patches=70, cores=cores, dtype=dtype, weighted="each")


@pytest.mark.slow
@interpreted
@of_zero
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("how", ["roles", "fused", "tiled"])
def test_multiplicity_where_splits_see_padding_only(how, splits):
    """Every configuration of the kernels, with spans in which no patch is there."""
    compare(
        batch=2, patches=75, cores=9, run=launched, weighted="each", splits=splits,
        launch=Launch(16, fused=how == "fused"), tiled=how == "tiled",
    )  # fmt: skip


@interpreted
@of_zero
@pytest.mark.parametrize("cores", [5, 50, 70])
def test_padding_is_not_there_however_large_its_score(cores):
    """Scores of padding in the thousands, all others near -200: they decide no maximum, and in the
    backward no infinite exponential of theirs meets a zero."""
    q, k, v, tables, upstream = inputs(2, 1, 20, cores, 32, torch.float32, False)
    q, k = 6 + q / 4, -6 + k / 4
    counts = random_counts(2, 20, "each")
    for b in range(2):
        k[b, :, cores:][:, counts[b] == 0] = 400.0
    got = through_autograd(q, k, v, tables, upstream, cores, 32**-0.5, counts)
    check(got, wanted(q, k, v, tables, upstream, cores, 32**-0.5, counts), 2e-3)


@interpreted
@of_zero
@pytest.mark.parametrize("cores", [5, 70])
def test_rows_of_padding_are_zero_and_give_nobody_a_gradient(cores):
    """To the bit: they add nothing to anyone, whatever comes back to them."""
    q, k, v, tables, upstream = inputs(1, 1, 20, cores, 32, torch.float32, True)
    counts = torch.ones(1, 20)
    counts[:, 12:] = 0
    there, padding = slice(0, cores + 12), slice(cores + 12, None)
    first = through_autograd(q, k, v, tables, upstream, cores, 0.2, counts)
    upstream[:, :, padding] *= 1000
    second = through_autograd(q, k, v, tables, upstream, cores, 0.2, counts)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(x[:, :, padding].any() for x in first[:4])
    assert all(x[:, :, there].any() for x in first[:4])


@interpreted
@of_zero
def test_log_sum_exps_count_and_those_of_padding_are_infinite():
    q, k, v, tables, _ = inputs(1, 1, 20, 5, 32, torch.float32, False)
    counts = random_counts(1, 20, "each")
    _, lse = torch.ops.veca.core_attention(q, k, v, *tables, 5, 0.2, counts)
    scores = q.double() @ k.double().transpose(-1, -2) * 0.2
    scores[:, :, :5, 5:] += counts.double().log()
    assert torch.allclose(lse[..., :5].double() * math.log(2), scores[:, :, :5].logsumexp(-1))
    assert torch.equal(lse[0, 0, 5:].isinf(), counts[0] == 0)


@pytest.mark.slow
@interpreted
@of_zero
def test_opcheck_with_multiplicity():
    q, k, v, tables, upstream = inputs(1, 1, 10, 5, 32, torch.float32, False)
    counts = random_counts(1, 10, "each")
    out, lse = torch.ops.veca.core_attention(q, k, v, *tables, 5, 0.2, counts)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.veca.core_attention.default, (*leaves, *tables, 5, 0.2, counts))
    args = (upstream, q, k, v, out, lse, *tables, 5, 0.2, False, counts)
    torch.library.opcheck(
        torch.ops.veca.core_attention_backward.default,
        args,
        test_utils=("test_schema", "test_faketensor"),
    )


@interpreted
@of_zero
def test_export_and_compile_with_multiplicity():
    class Module(torch.nn.Module):
        def forward(self, q, k, v, counts):
            return dispatched(q, k, v, 5, multiplicity=counts, backend="triton")

    q, k, v, _, _ = inputs(1, 1, 10, 5, 32, torch.float32, False)
    counts = random_counts(1, 10, "each")
    want = definition(q.double(), k.double(), v.double(), 5, None, None, 32**-0.5, counts)
    program = torch.export.export(Module(), (q, k, v, counts))
    assert str(program.graph).count("veca.core_attention") == 1
    assert error(program.module()(q, k, v, counts), want) < 1e-5
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")
    assert error(compiled(q, k, v, counts), want) < 1e-5


def test_graphs_saved_before_multiplicity_existed_still_call_the_operation():
    for name, last in (("core_attention", "scale"), ("core_attention_backward", "table_grad")):
        *_, before, multiplicity = getattr(torch.ops.veca, name).default._schema.arguments
        assert (before.name, multiplicity.name) == (last, "multiplicity")
        assert multiplicity.has_default_value() and multiplicity.default_value is None


# -- the plan ------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    sequences=st.integers(1, 5000),
    tiles=st.integers(0, 3000),
    multiprocessors=st.integers(1, 200),
    per_sm=st.integers(1, 8),
)
def test_no_span_is_empty(sequences, tiles, multiprocessors, per_sm):
    splits = choose_splits(sequences, tiles, multiprocessors, Launch(64, per_sm=per_sm))
    assert 1 <= splits <= max(1, min(tiles, MAX_SPLITS))
    if tiles:
        assert -(-tiles // -(-tiles // splits)) == splits


def test_splits_fill_an_h200_and_no_more():
    def programs(batch, patches):
        sequences = batch * 12 * 2
        splits = choose_splits(sequences, patches // 64, 132, Launch(64, per_sm=4))
        return splits, sequences * splits / (132 * 4)

    assert programs(32, 1024)[0] == 1  # a large batch fills the chip by itself
    assert programs(32, 256)[0] == 1
    for batch, patches in ((1, 4096), (1, 16384), (8, 4096)):
        splits, filled = programs(batch, patches)
        assert splits > 1
        assert 0.5 < filled <= 4


# -- registration --------------------------------------------------------------------------------


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("rotated", [False, True])
def test_opcheck(rotated):
    q, k, v, tables, upstream = inputs(2, 1, 10, 5, 32, torch.float32, rotated)
    out, lse = torch.ops.veca.core_attention(q, k, v, *tables, 5, 0.2)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    learned = [x if x is None else x.detach().requires_grad_() for x in tables[:2]]
    torch.library.opcheck(
        torch.ops.veca.core_attention.default, (*leaves, *learned, *tables[2:], 5, 0.2)
    )
    args = (upstream, q, k, v, out, lse, *tables, 5, 0.2, rotated)
    torch.library.opcheck(
        torch.ops.veca.core_attention_backward.default,
        args,
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.slow
@interpreted
def test_compile_sees_one_node_each_way():
    forward, backward = [], []

    def collect(into):
        def compiler(graph, _):
            into.extend(
                str(node.target) for node in graph.graph.nodes if "veca" in str(node.target)
            )
            return make_boxed_func(graph.forward)

        return compiler

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    aot = aot_autograd(fw_compiler=collect(forward), bw_compiler=collect(backward))

    def function(q, k, v, core, patch):
        return dispatched(q, k, v, 5, core_rotation=core, patch_rotation=patch, backend="triton")

    q, k, v, tables, upstream = inputs(1, 1, 10, 5, 32, torch.float32, True)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *tables[:2])]
    out = torch.compile(function, fullgraph=True, backend=aot)(
        *leaves[:3], tuple(leaves[3:]), tuple(tables[2:])
    )
    grads = torch.autograd.grad(out, leaves, upstream)
    assert forward == ["veca.core_attention.default"]
    assert backward == ["veca.core_attention_backward.default"]
    check([out, *grads], wanted(q, k, v, tables, upstream, 5, 32**-0.5), 1e-5)


@interpreted
def test_compile_with_any_number_of_patches():
    counts = []

    def count(graph, _):
        counts.append(len(graph.graph.nodes))
        return graph.forward

    function = torch.compile(
        lambda q: backend.core_attention(q, q, q, 5), fullgraph=True, backend=count, dynamic=True
    )
    for patches in (10, 11, 12):
        q = inputs(1, 1, patches, 5, 32, torch.float32, False)[0]
        assert error(function(q), definition(*[q.double()] * 3, 5, None, None, 32**-0.5)) < 1e-5
    assert len(counts) == 1


@interpreted
def test_export():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return backend.core_attention(q, k, v, 5)

    q, k, v, _, _ = inputs(1, 1, 10, 5, 32, torch.float32, False)
    program = torch.export.export(Module(), (q, k, v))
    assert str(program.graph).count("veca.core_attention") == 1
    want = definition(q.double(), k.double(), v.double(), 5, None, None, 32**-0.5)
    assert error(program.module()(q, k, v), want) < 1e-5


# -- who may run it ------------------------------------------------------------------------------


def test_reasons_for_declining_tensors():
    def why(width=64, dtype=torch.float32, step=1):
        x = torch.empty(1, 1, 10, width * step, dtype=dtype)[..., ::step]
        return backend.unsupported(x, x, x, 4)

    assert why() is None
    assert why(dtype=torch.bfloat16) is None
    assert "float64" in why(dtype=torch.float64)
    assert "48" in why(width=48)
    assert "side by side" in why(step=2)


def test_reasons_for_being_unavailable(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "NVIDIA GPU of compute capability 8.0" in backend.unavailable(cpu)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.unavailable(cpu) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.unavailable() == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "8.0" in backend.unavailable(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    if torch.version.hip is None:
        assert backend.unavailable(torch.device("cuda")) is None
    monkeypatch.setattr(backend, "_INSTALLED", False)
    assert backend.unavailable(cpu) == "triton is not installed"


def test_gradients_of_patch_tables_are_declined():
    q = torch.randn(1, 1, 9, 32)
    tables = (torch.randn(1, 4, 16), torch.randn(1, 4, 16))
    patch = (torch.randn(1, 5, 16, requires_grad=True), torch.randn(1, 5, 16))
    with pytest.raises(InputError, match="patch_rotation"):
        backend.core_attention(q, q, q, 4, tables, patch)


@pytest.mark.slow
def test_the_module_imports_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'triton' else found(name, *a)\n"
        "import torch, veca.attention.fused as backend\n"
        "assert backend.unavailable() == 'triton is not installed'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("rotated", [False, True, "batch"])
@pytest.mark.parametrize(
    ("batch", "heads", "patches", "cores"),
    [
        (1, 1, 0, 1),
        (1, 3, 1, 7),
        (2, 3, 15, 8),
        (2, 3, 100, 33),
        (3, 1, 257, 64),
        (2, 12, 1000, 64),
        (1, 12, 4097, 8),
        (2, 12, 4096, 64),
        (2, 3, 1000, 70),
        (1, 2, 300, 200),
    ],
)
def test_gpu_bfloat16(batch, heads, patches, cores, width, rotated):
    compare(batch, heads, patches, cores, width, torch.bfloat16, rotated)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "patches", "cores", "width", "rotated"),
    [
        (torch.float32, 1000, 33, 32, True),
        (torch.float32, 257, 64, 64, True),
        (torch.float32, 100, 64, 128, True),
        (torch.float32, 100, 70, 64, False),
        (torch.float16, 1000, 64, 64, True),
        (torch.float16, 4097, 8, 128, False),
        (torch.float16, 100, 70, 64, True),
    ],
)
def test_gpu_dtypes(dtype, patches, cores, width, rotated):
    compare(2, 3, patches, cores, width, dtype, rotated)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("weighted", ["each", "shared", "strided"])
@pytest.mark.parametrize(
    ("dtype", "patches", "cores", "width", "rotated"),
    [
        (torch.bfloat16, 0, 8, 64, True),
        (torch.bfloat16, 15, 8, 32, True),
        (torch.bfloat16, 257, 33, 64, "both"),
        (torch.bfloat16, 1000, 64, 128, "batch"),
        (torch.bfloat16, 4097, 64, 64, True),
        (torch.bfloat16, 300, 200, 64, True),
        (torch.float16, 1024, 64, 64, False),
        (torch.float16, 1000, 8, 32, True),
        (torch.float32, 1000, 33, 32, True),
        (torch.float32, 257, 64, 64, True),
        (torch.float32, 100, 70, 128, False),
    ],
)
def test_gpu_multiplicity(dtype, patches, cores, width, rotated, weighted):
    compare(2, 3, patches, cores, width, dtype, rotated, weighted=weighted)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("how", ["roles", "fused", "tiled"])
@pytest.mark.parametrize("splits", [1, 7])
def test_gpu_multiplicity_where_splits_see_padding_only(splits, how):
    launch = Launch(32, stages=1, fused=how == "fused")
    compare(
        1, 3, 1000, 40, 64, torch.bfloat16, run=launched, launch=launch, splits=splits,
        tiled=how == "tiled", weighted="each",
    )  # fmt: skip


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cores", [8, 64, 130])
def test_gpu_multiplicity_same_bits_twice_and_one_is_none(cores):
    args = (*inputs(1, 12, 4097, cores, 64, torch.bfloat16, True), cores, 0.125)
    counts = random_counts(1, 4097, "each")
    first, second = through_autograd(*args, counts), through_autograd(*args, counts)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    ones = through_autograd(*args, torch.ones(1, 4097, device=DEVICE))
    for got, want in zip(ones, through_autograd(*args), strict=True):
        assert error(got, want.double()) < 1e-2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gpu_sdpa_with_multiplicity(dtype):
    """The other backend, on torch's memory-efficient kernel: at an odd number of tokens."""
    q, k, v, _, upstream = inputs(2, 3, 257, 33, 64, dtype, False)
    counts = random_counts(2, 257, "each")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out = dispatched(*leaves, 33, multiplicity=counts, backend="sdpa")
        got = [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
    check(got, wanted(q, k, v, [None] * 4, upstream, 33, 0.125, counts), TOLERANCE[dtype])


@pytest.mark.gpu
@needs_gpu
def test_gpu_multiplicity_waits_for_nothing():
    """Checks must not read values back; a negative count shows as NaN."""
    q, k, v, _, _ = inputs(1, 3, 257, 8, 64, torch.bfloat16, False)
    counts = torch.ones(257, device=DEVICE)
    dispatched(q, k, v, 8, multiplicity=counts)  # compiles
    counts[3] = -1
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = dispatched(q, k, v, 8, multiplicity=counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out[:, :, :8].isnan().all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("layout", ["fused", "separate", "plain", "tokens first"])
def test_gpu_layouts(layout):
    compare(2, 3, 200, 16, 64, torch.bfloat16, True, layout)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_gpu_splits(splits, fused):
    launch = Launch(64, stages=1, fused=fused)
    compare(
        1, 3, 1000, 64, 64, torch.bfloat16, run=launched, launch=launch, splits=splits
    )  # fmt: skip


@pytest.mark.gpu
@needs_gpu
def test_gpu_tables_in_bfloat16():
    q, k, v, tables, upstream = inputs(2, 3, 1000, 64, 64, torch.bfloat16, "batch")
    tables = [table.bfloat16() for table in tables]
    got = through_autograd(q, k, v, tables, upstream, 64, 0.125)
    check(got, wanted(q, k, v, tables, upstream, 64, 0.125), 1e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cores", [64, 70])
def test_gpu_large_logits_stay_finite(cores):
    q, k, v, tables, upstream = inputs(1, 3, 1000, cores, 64, torch.bfloat16, True, gain=50.0)
    for tensor in through_autograd(q, k, v, tables, upstream, cores, 0.125):
        assert tensor.isfinite().all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cores", [8, 64, 130])
def test_gpu_same_bits_twice(cores):
    args = (*inputs(1, 12, 4097, cores, 64, torch.bfloat16, True), cores, 0.125)
    first, second = through_autograd(*args), through_autograd(*args)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_gpu_more_than_two_to_the_31_elements():
    """Only the far end is compared: that is where a 32-bit offset would go wrong."""
    far = torch.randn(2, 12, 1_500_000, 64, device=DEVICE, dtype=torch.bfloat16)
    out = backend.core_attention(far, far, far, 8)
    index = torch.tensor([*range(8), 1_499_990, 1_499_999], device=DEVICE)
    last = far[1:, :, index].double()
    want = definition(last, last, last, 8, None, None, 0.125)[:, :, 8:]
    assert error(out[1:, :, index[8:]], want) < 1e-2
