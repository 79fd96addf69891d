"""The model against the paper: prefixes, who influences whom, any size, any budget."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap

from conftest import SMALLEST, stirred
from veca import (
    PRESETS,
    DenseVit,
    Veca,
    VecaConfig,
    VecaOutput,
    cost,
    create_model,
    load,
    preprocess,
)
from veca.errors import ConfigError, InputError
from veca.model import spread_points

IMAGES = (2, 3, 48, 64)  # 3 x 4 patches


def test_outputs_have_the_documented_shapes(tiny):
    out = tiny(torch.randn(IMAGES), cores=5)
    assert isinstance(out, VecaOutput)
    assert out.cores.shape == (2, 5, 32) and out.patches.shape == (2, 12, 32)
    assert out.core_xy.shape == (2, 5, 2) and out.grid == (3, 4)
    assert torch.equal(out.cls, out.cores[:, 0])
    assert out.feature_map().shape == (2, 32, 3, 4)
    assert torch.equal(out.feature_map()[0, :, 1, 2], out.patches[0, 1 * 4 + 2])
    assert out.core_xy.abs().max() <= 1


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_builds_and_runs(name):
    with torch.device("meta"):
        model = Veca(PRESETS[name])
    out = model.train()(torch.empty(1, 3, 32, 48, device="meta"), cores=8)
    assert out.patches.shape == (1, 6, PRESETS[name].width)


def test_shapes_without_values(tiny):
    """Meta and fake tensors have no pixels to look at."""
    with torch.device("meta"):
        model = Veca(SMALLEST).eval()
        assert model(torch.empty(IMAGES)).patches.shape == (2, 12, 32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert tiny(torch.empty(IMAGES)).patches.shape == (2, 12, 32)


@pytest.mark.parametrize("keep", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_torch_counts_its_flops(tiny, keep):
    from torch.utils.flop_counter import FlopCounterMode  # imports triton; see tests/interpreter.py

    with FlopCounterMode(display=False) as counter, keep():
        tiny(torch.randn(IMAGES))
    assert counter.get_total_flops() > 0


def test_gradients_of_each_image_by_torch_func(tiny):
    weights = {name: p.detach() for name, p in tiny.named_parameters()}
    images = torch.randn(IMAGES)

    def loss(weights, image):
        out = functional_call(tiny, weights, (image[None],), {"cores": 3})
        return out.patches.square().mean() + out.cls.sum()

    found = vmap(grad(loss), (None, 0))(weights, images)
    for i in range(len(images)):
        tiny.zero_grad()
        out = tiny(images[i : i + 1], cores=3)
        (out.patches.square().mean() + out.cls.sum()).backward()
        for name, p in tiny.named_parameters():
            torch.testing.assert_close(found[name][i], p.grad, rtol=1e-4, atol=1e-5)


def test_torch_func_around_a_model_that_it_does_not_change(tiny):
    """What is inside a transform need not be changed by it: here the heads are, or one weight."""
    images, heads = torch.randn(IMAGES), torch.randn(4, 32)
    expected = tiny(images, cores=3).cls @ heads.T
    found = vmap(lambda head: tiny(images, cores=3).cls @ head)(heads)
    torch.testing.assert_close(found, expected.T, rtol=1e-4, atol=1e-5)
    places = torch.stack([tiny.bank.coordinates.detach() * k for k in (0.5, 1.0)])
    run = vmap(lambda xy: functional_call(tiny, {"bank.coordinates": xy}, (images,)).cls)
    torch.testing.assert_close(run(places)[1], tiny(images).cls, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
def test_derivatives_along_a_direction_by_torch_func(tiny):
    tiny = tiny.double()
    images, direction = torch.randn(2, *IMAGES, dtype=torch.float64)
    _, along = jvp(lambda x: tiny(x, cores=3).cls, (images,), (direction,))
    step = 1e-6 * direction
    slope = (tiny(images + step, cores=3).cls - tiny(images - step, cores=3).cls) / 2e-6
    torch.testing.assert_close(along, slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cores", [1, 3, 8])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_budget_is_a_prefix_bit_for_bit(tiny, cores, backend):
    """`cores=C` on the full model equals a model whose bank holds only the first C cores."""
    tiny.backend = backend
    small = create_model(SMALLEST.replace(num_cores=cores), backend=backend).eval()
    state = tiny.state_dict()
    for name in ("bank.tokens", "bank.coordinates"):
        state[name] = state[name][:cores]
    small.load_state_dict(state)
    images = torch.randn(IMAGES)
    for ours, theirs in zip(tiny(images, cores=cores)[:3], small(images)[:3], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(("depth", "reached"), [(1, False), (2, True)])
def test_patches_meet_only_through_cores(backend, depth, reached):
    """After one layer no patch depends on another; after two, through the cores, it does."""
    model = stirred(create_model(SMALLEST.replace(depth=depth), backend=backend)).eval()
    images = torch.randn(1, 3, 32, 32, requires_grad=True)
    out = model(images, cores=4)
    grad = torch.autograd.grad(out.patches[0, 0].sum(), images)[0][0]
    own, other = grad[:, :16, :16], grad[:, 16:, 16:]
    assert own.abs().max() > 0
    assert bool((other != 0).any()) == reached
    core_grad = torch.autograd.grad(model(images, cores=4).cls.sum(), images)[0][0]
    assert (core_grad[:, 16:, 16:] != 0).any()


def test_patch_order_follows_the_image(tiny):
    """Changing one patch of pixels changes its own token most: rows first, then columns."""
    model = stirred(create_model(SMALLEST.replace(depth=1))).eval()
    images = torch.randn(1, 3, 48, 64)
    changed = images.clone()
    changed[:, :, 16:32, 48:64] += 1.0
    moved = (model(images).patches - model(changed).patches).abs().sum(-1)[0]
    assert moved.nonzero().flatten().tolist() == [1 * 4 + 3]


@pytest.mark.parametrize("size", [(16, 16), (16, 80), (112, 48)])
def test_any_grid_with_the_same_weights(tiny, size):
    out = tiny(torch.randn(1, 3, *size), cores=8)
    assert out.grid == (size[0] // 16, size[1] // 16)
    assert torch.isfinite(out.patches).all()


def test_no_state_is_kept_between_calls(tiny):
    images = torch.randn(IMAGES)
    before = tiny(images)
    state = set(tiny.__dict__)
    tiny(torch.randn(1, 3, 96, 32), cores=2)
    assert set(tiny.__dict__) == state
    assert torch.equal(before.patches, tiny(images).patches)


def test_batch_items_do_not_mix(tiny):
    images = torch.randn(3, 3, 32, 32)
    together = tiny(images).patches
    alone = torch.cat([tiny(image[None]).patches for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_cores_move_by_the_published_rule(tiny):
    """raw += alpha * Linear(residual core), then tanh: recomputed from the intermediates."""
    images = torch.randn(IMAGES)
    layers = tiny.forward_intermediates(images, cores=6, norm=False)
    raw = tiny.bank.coordinates[:6].expand(2, -1, -1)
    torch.testing.assert_close(layers[0].core_xy, raw.tanh())
    for move, before, after in zip(tiny.moves, layers, layers[1:], strict=False):
        raw = raw + move.alpha * (before.cores @ move.head.weight.T + move.head.bias)
        torch.testing.assert_close(after.core_xy, raw.tanh())


def test_intermediates_end_in_the_output(tiny):
    images = torch.randn(IMAGES)
    out = tiny(images, cores=4)
    third, first = tiny.forward_intermediates(images, cores=4, layers=(3, 1))
    assert torch.equal(third.patches, out.patches) and torch.equal(third.cores, out.cores)
    assert not torch.allclose(first.patches, out.patches)
    assert len(tiny.forward_intermediates(images)) == 3


def test_a_walk_shows_every_layer_on_the_way_to_the_output(tiny):
    images = torch.randn(IMAGES)
    layers = list(tiny.walk(images, cores=4))
    assert [layer.number for layer in layers] == [0, 1, 2, 3]
    patches = tiny.patch_embed(images).flatten(2).transpose(1, 2)
    first = torch.cat([tiny.bank.tokens[:4].expand(2, -1, -1), patches], dim=1)
    assert torch.equal(layers[0].tokens, first) and layers[0].grid == (3, 4)
    assert torch.equal(layers[0].core_xy, layers[1].core_xy)
    for norm in (True, False):
        expected = tiny.forward_intermediates(images, cores=4, norm=norm)
        for layer, out in zip(layers[1:], expected, strict=True):
            for ours, theirs in zip(tiny.output(layer, norm)[:3], out[:3], strict=True):
                assert torch.equal(ours, theirs)
    for ours, theirs in zip(tiny.output(layers[-1])[:3], tiny(images, cores=4)[:3], strict=True):
        assert torch.equal(ours, theirs)


def test_a_walk_runs_no_block_that_is_not_asked_for(tiny):
    ran = []
    for number, block in enumerate(tiny.blocks, start=1):
        block.register_forward_hook(lambda *_, number=number: ran.append(number))
    assert [layer.number for layer in tiny.walk(torch.randn(IMAGES), last=2)] == [0, 1, 2]
    assert ran == [1, 2]
    ran.clear()
    for layer in tiny.walk(torch.randn(IMAGES)):
        if layer.number == 1:
            break
    assert ran == [1]


def test_a_walk_takes_what_the_model_takes(tiny):
    with pytest.raises(InputError, match="cores"):
        next(tiny.walk(torch.randn(IMAGES), cores=9))
    with pytest.raises(InputError, match="33 x 32"):
        next(tiny.walk(torch.randn(1, 3, 33, 32)))


def test_what_a_layer_takes_from_the_patches_is_in_the_maps(tiny):
    images = torch.randn(IMAGES)
    maps = tiny.attention_maps(images, cores=5, per_head=True)
    layers = list(tiny.walk(images, cores=5))
    for number in (1, 2, 3):
        weights = tiny.core_to_patch(layers[number - 1], layers[number])
        assert torch.equal(weights.unflatten(-1, (3, 4)), maps[:, number - 1])


def test_output_projection_is_shared_by_cores_and_patches():
    model = stirred(create_model(SMALLEST, output_width=20)).eval()
    images = torch.randn(IMAGES)
    raw = model.forward_intermediates(images, layers=[3], norm=False)[0]
    out = model(images)
    for got, tokens in ((out.cores, raw.cores), (out.patches, raw.patches)):
        torch.testing.assert_close(got, model.project(model.norm(tokens)))
        assert got.shape[-1] == 20


def test_softmax_maps_are_what_attention_used(tiny):
    """Rebuild one layer's core outputs from the maps of every head."""
    images = torch.randn(IMAGES)
    maps = tiny.attention_maps(images, cores=5, per_head=True)
    assert maps.shape == (2, 3, 2, 5, 3, 4)
    assert (maps >= 0).all() and (maps.flatten(-2).sum(-1) <= 1 + 1e-5).all()
    averaged = tiny.attention_maps(images, cores=5, layers=[2])
    torch.testing.assert_close(averaged[:, 0], maps[:, 1].mean(dim=1))

    # The definition, written out for layer 1, where core coordinates are the bank's own.
    model, block = tiny, tiny.blocks[0]
    before = torch.cat(
        [
            model.bank.tokens[:5].expand(2, -1, -1),
            model.patch_embed(images).flatten(2).transpose(1, 2),
        ],
        dim=1,
    )
    from veca import rope

    c = model.config
    periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction)
    xy = torch.cat([model.bank.coordinates[:5].tanh(), rope.grid_coordinates(3, 4)])
    tables = rope.rotation(xy[None], periods)
    x = block.norm_attn(before)
    q, k = (
        rope.rotate(proj(x).view(2, 17, 2, 16).transpose(1, 2), tables)
        for proj in (block.attn.q, block.attn.k)
    )
    weights = (q[:, :, :5] @ k.transpose(-2, -1) / 4).softmax(-1)[..., 5:]
    torch.testing.assert_close(maps[:, 0].flatten(-2), weights)

    # Norm-based: explicit vectors, no Gram matrix.
    v = block.attn.v(x).view(2, 17, 2, 16).transpose(1, 2)[:, :, 5:]
    out = block.attn.out.weight.view(32, 2, 16)
    vectors = torch.einsum("bhcn,ehd,bhnd->bcne", weights, out, v)
    length = vectors.norm(dim=-1)
    expected = length / length.sum(-1, keepdim=True)
    norm_maps = model.attention_maps(images, cores=5, layers=[1], kind="norm")
    torch.testing.assert_close(norm_maps[:, 0].flatten(-2), expected, rtol=1e-4, atol=1e-6)


def test_initial_core_coordinates_cover_the_image_at_every_prefix():
    points = spread_points(64)
    assert points.abs().max() <= 0.95
    assert points[0].norm() < 0.15  # nearest the origin of a thousand draws
    for count in (8, 16, 64):
        distance = torch.cdist(points[:count], points[:count]) + torch.eye(count) * 9
        # n points in a 1.9 x 1.9 square: evenly spread ones keep about 1.9 / sqrt(n) apart.
        assert distance.min() > 0.55 * 1.9 / count**0.5


def test_fresh_weights_follow_the_publication():
    model = create_model("tiny")
    assert model.bank.tokens.std().item() == pytest.approx(192**-0.5, rel=0.05)
    assert all(move.alpha.item() == pytest.approx(0.01) for move in model.moves)
    weight = model.blocks[0].ffn.up.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not model.blocks[0].attn.q.bias.any() and (model.norm.weight == 1).all()
    assert len(model.moves) == 11


def test_training_augments_patch_coordinates_only_in_training(tiny):
    images = torch.randn(IMAGES)
    assert torch.equal(tiny(images).patches, tiny(images).patches)
    tiny.train()
    assert not torch.equal(tiny(images).patches, tiny(images).patches)
    torch.manual_seed(3)
    first = tiny(images).patches
    torch.manual_seed(3)
    assert torch.equal(first, tiny(images).patches)


def test_gradient_checkpointing_changes_nothing_but_memory(tiny):
    tiny.train()
    images = torch.randn(IMAGES)

    def gradients():
        torch.manual_seed(1)
        tiny.zero_grad()
        tiny(images, cores=4).patches.square().sum().backward()
        return [p.grad.clone() for p in tiny.parameters()]

    def saved_bytes():
        seen = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: seen.update({t.data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
        ):
            tiny(images, cores=4)
        return sum(seen.values())

    plain, plain_bytes = gradients(), saved_bytes()
    tiny.set_grad_checkpointing()
    again, kept_bytes = gradients(), saved_bytes()
    for one, two in zip(plain, again, strict=True):
        assert torch.equal(one, two)
    assert kept_bytes < 0.5 * plain_bytes


def test_feed_forward_in_parts_is_the_same(tiny, monkeypatch):
    """Without gradients a CPU takes the tokens in parts; their edges must not show."""
    images = torch.randn(IMAGES)
    whole = tiny(images)
    monkeypatch.setattr("veca.model.CPU_ROWS", 7)
    with torch.inference_mode():
        parts = tiny(images)
    torch.testing.assert_close(parts.patches, whole.patches, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.cores, whole.cores, rtol=1e-5, atol=1e-5)


def test_every_parameter_gets_a_gradient(tiny):
    tiny.train()
    out = tiny(torch.randn(IMAGES))
    (out.patches.square().sum() + out.cores.square().sum()).backward()
    silent = [n for n, p in tiny.named_parameters() if p.grad is None or not p.grad.any()]
    # A key bias adds the same amount to every score of a softmax only without rotation.
    assert silent == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_and_autocast(tiny, dtype):
    images = torch.randn(IMAGES)
    exact = tiny(images)
    with torch.autocast("cpu", dtype=dtype):
        cast = tiny(images)
    low = copy.deepcopy(tiny).to(dtype)(images)
    assert low.patches.dtype == dtype and low.core_xy.dtype == torch.float32
    for rough in (cast, low):
        error = (rough.patches.float() - exact.patches).norm() / exact.patches.norm()
        assert error < 0.03


def test_float64_works_for_those_who_check_gradients():
    model = (
        stirred(create_model(VecaConfig(depth=2, width=8, heads=1, num_cores=3))).double().eval()
    )
    images = torch.randn(1, 3, 16, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: model(x, cores=2).patches, images, fast_mode=True, atol=1e-6
    )


@pytest.mark.slow
def test_compiles_whole_and_for_new_sizes(tiny):
    compiled = torch.compile(tiny, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in ((48, 64), (32, 80), (96, 96)):
        images = torch.randn(2, 3, *size)
        torch.testing.assert_close(
            compiled(images, cores=4).patches, tiny(images, cores=4).patches, rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
def test_exports_with_dynamic_batch_and_size(tiny):
    batch, h, w = (torch.export.Dim(n, min=2, max=64) for n in ("batch", "h", "w"))
    program = torch.export.export(
        tiny,
        (torch.randn(2, 3, 48, 64),),
        {"cores": 4},
        dynamic_shapes={"images": {0: batch, 2: 16 * h, 3: 16 * w}, "cores": None},
    )
    images = torch.randn(3, 3, 80, 112)
    torch.testing.assert_close(
        program.module()(images, cores=4).patches,
        tiny(images, cores=4).patches,
        rtol=1e-5,
        atol=1e-5,
    )


def _bad_images():
    good = torch.randn(2, 3, 32, 32)
    with_nan = good.clone()
    with_nan[1, 0, 3, 3] = float("nan")
    with_inf = good.clone()
    with_inf[0, 0, 0, 0] = float("inf")
    return {
        "list": ([1, 2], "list"),
        "rank 3": (good[0], r"images\[None\]"),
        "rank 2": (good[0, 0], r"\(32, 32\)"),
        "channels": (good[:, :1], "channels"),
        "channels last": (good.permute(0, 2, 3, 1), "channels-last"),
        "uint8": ((good * 0).to(torch.uint8), "uint8"),
        "empty batch": (good[:0], "empty"),
        "15 px": (good[:, :, :15, :15], "15 x 15"),
        "0 px": (good[:, :, :0], "0 x 32"),
        "off grid": (good[:, :, :, :31], "32 x 31"),
        "nan": (with_nan, r"\[1\].*NaN"),
        "inf": (with_inf, r"\[0\].*infinite"),
    }


@pytest.mark.parametrize("case", sorted(_bad_images()))
@pytest.mark.parametrize("build", [lambda: create_model(SMALLEST), lambda: DenseVit(SMALLEST)])
def test_bad_images_are_named(case, build):
    images, noun = _bad_images()[case]
    with pytest.raises(InputError, match=noun):
        build().eval()(images)


@pytest.mark.parametrize("value", [1.01e6, 3e38, float("inf"), float("nan")])
def test_pixels_beyond_all_reason_are_refused(tiny, value):
    assert tiny(torch.full((1, 3, 32, 32), 1e6)).patches.isfinite().all()
    with pytest.raises(InputError, match=r"images \[0\] of the batch have pixels"):
        tiny(torch.full((1, 3, 32, 32), value))


@pytest.mark.parametrize("cores", [0, 9, 65, -1, 2.5, True, "8"])
def test_bad_budgets_are_named(tiny, cores):
    with pytest.raises(InputError, match="cores"):
        tiny(torch.randn(1, 3, 32, 32), cores=cores)


def test_numpys_whole_numbers_are_numbers(tiny):
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(tiny(images, cores=np.int64(3)).patches, tiny(images, cores=3).patches)
    for layers in (np.array([1, 3]), (np.int32(1), 3)):
        found = tiny.forward_intermediates(images, layers=layers)
        assert len(found) == 2
    with pytest.raises(InputError, match="cores"):
        tiny(images, cores=np.float32(3))
    assert cost("tiny", size=np.int64(64)) == cost("tiny", size=64)


def test_what_preprocess_gives_is_named(tiny):
    photo = preprocess(Image.new("RGB", (32, 32)))
    with pytest.raises(InputError, match=r"\.pixels"):
        tiny(photo)


def test_other_bad_requests_are_named(tiny):
    images = torch.randn(1, 3, 32, 32)
    for layers in ([0], [4], [], [1.5], [True], 2):
        with pytest.raises(InputError, match="layers"):
            tiny.forward_intermediates(images, layers=layers)
    with pytest.raises(InputError, match="'softmx'"):
        tiny.attention_maps(images, kind="softmx")
    with pytest.raises(InputError, match="per_head"):
        tiny.attention_maps(images, kind="norm", per_head=True)
    with pytest.raises(InputError, match="'spda'"):
        tiny.backend = "spda"
    with pytest.raises(ConfigError, match="num_cors"):
        create_model("tiny", num_cors=3)


def test_norm_maps_of_an_attention_that_adds_nothing_are_zero(tiny):
    for block in tiny.blocks:
        torch.nn.init.zeros_(block.attn.out.weight)
    maps = tiny.attention_maps(torch.randn(IMAGES), cores=3, kind="norm")
    assert torch.equal(maps, torch.zeros_like(maps))  # not NaN


def test_dropout_acts_after_the_attention_and_twice_in_the_feed_forward(monkeypatch):
    model = stirred(create_model(SMALLEST.replace(depth=1, dropout=0.25)))
    seen = []

    def note(x, p, training):
        seen.append((x.shape[-1], p, training))
        return x

    monkeypatch.setattr("veca.model.F.dropout", note)
    width, hidden = model.config.width, model.config.hidden_width
    for training in (True, False):
        seen.clear()
        model.train(training)(torch.randn(IMAGES))
        assert seen == [(side, 0.25, training) for side in (width, hidden, width)]


def test_every_norm_has_the_configured_eps():
    model = create_model(SMALLEST.replace(norm_eps=1e-3))
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(norms) == 2 * SMALLEST.depth + 1 and {m.eps for m in norms} == {1e-3}


def test_reset_parameters_starts_the_steps_of_the_cores_anew(tiny):
    tiny.reset_parameters()
    assert all(move.alpha.item() == pytest.approx(0.01) for move in tiny.moves)


def test_training_does_not_look_at_the_pixels(tiny, monkeypatch):
    monkeypatch.setattr("veca.model.check_finite", lambda images: pytest.fail("a wait for the GPU"))
    tiny.train()(torch.randn(IMAGES))


@pytest.mark.parametrize("build", [Veca, DenseVit])
def test_what_users_of_other_libraries_try_first(build):
    model = build(SMALLEST.replace(output_width=20, patch_size=8))
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert (model.num_features, model.embed_dim, model.patch_size) == (20, 32, 8)
    assert model.to(torch.bfloat16).dtype == torch.bfloat16
    assert model.to("meta").device.type == "meta"


def test_a_model_shows_itself_in_one_line(tiny):
    facts = "12 layers, width 192, 64 cores, patch 16, 5.5 M parameters, cpu float32"
    assert repr(create_model("tiny")) == f"Veca({facts})"
    assert repr(create_model("tiny").half()).endswith("cpu float16)")
    count = sum(p.numel() for p in tiny.parameters())
    small = "3 layers, width 32, 8 cores, patch 16"
    assert repr(tiny) == f"Veca({small}, {count} parameters, cpu float32)"
    dense = repr(DenseVit(SMALLEST))
    assert dense.startswith("DenseVit(3 layers, width 32, patch 16, ") and "cores" not in dense


@pytest.mark.parametrize("last", [0, -1, 99])
def test_a_walk_ends_at_a_block_that_there_is(tiny, last):
    with pytest.raises(InputError, match=str(last)):
        next(tiny.walk(torch.zeros(1, 3, 32, 32), last=last))


def test_a_name_is_no_weight_and_survives_a_copy():
    model = load("tiny")
    assert model.name == "veca_tiny_patch16" and repr(model).startswith('Veca("veca_tiny_patch16"')
    assert copy.deepcopy(model).name == pickle.loads(pickle.dumps(model)).name == model.name
    assert not [key for key in model.state_dict() if "name" in key]
    assert create_model("tiny").name is None, "fresh weights have no name"


@pytest.mark.parametrize("keep", [torch.enable_grad, torch.inference_mode])
def test_a_photo_becomes_features_with_the_models_own_settings(keep):
    config = SMALLEST.replace(patch_size=8, image_mean=(0.5, 0.4, 0.3), image_std=(0.2, 0.3, 0.4))
    model = stirred(create_model(config)).eval()
    photo = Image.effect_noise((40, 24), 80).convert("RGB")
    batch = model.preprocess(photo, size=32)
    assert batch.grid == (4, 7)
    with keep():
        found = model(batch.pixels)
        pixels = torch.from_numpy(np.array(photo.resize((56, 32), Image.Resampling.BICUBIC)))
        pixels = pixels.permute(2, 0, 1)[None] / 255
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in (config.image_mean, config.image_std))
        expected = model((pixels - mean) / std)
    torch.testing.assert_close(found.patches, expected.patches, rtol=1e-4, atol=1e-5)
