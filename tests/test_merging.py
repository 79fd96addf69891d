"""Merging windows of patches: against plain loops, in the model, in the engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import veca
from conftest import stirred
from veca import compile_for_inference, create_model, rope
from veca.errors import ConfigError, InputError
from veca.merging import Periphery, merge, merge_plan
from veca.quickstart import bundled_photos

GRIDS = [(8, 8), (9, 12), (10, 11), (5, 6)]


def merged_in_loops(tokens, xy, groups, grid, side, target):
    """One image, one step: lists of patches that share a token, and what each token is."""
    height, width = grid
    group_of = {patch: number for number, group in enumerate(groups) for patch in group}
    candidates = []
    for top in range(0, height - height % side, side):
        for left in range(0, width - width % side, side):
            window = [
                (top + down) * width + left + across
                for down in range(side)
                for across in range(side)
            ]
            inside = sorted({group_of[patch] for patch in window})
            if len(inside) < 2:
                continue
            members = torch.stack([tokens[group_of[patch]] for patch in window])
            mean = members.mean(dim=0)
            angles = sum(1 - F.cosine_similarity(member, mean, dim=0) for member in members)
            token = mean / mean.norm() * members.norm(dim=1).mean()
            candidates.append((float(angles), len(candidates), window, inside, token))
    gone, new = set(), []
    for _, _, window, inside, token in sorted(candidates, key=lambda c: c[:2]):
        if len(groups) - len(gone) + len(new) <= target:
            break
        gone |= set(inside)
        place = torch.stack([xy[group_of[patch]] for patch in window]).mean(dim=0)
        new.append((window, token, place))
    kept = [(g, tokens[i], xy[i]) for i, g in enumerate(groups) if i not in gone]
    return [*kept, *new]


@pytest.mark.parametrize("grid", GRIDS)
def test_merging_is_what_loops_do(grid):
    torch.manual_seed(1)
    height, width = grid
    patches = height * width
    coarse = F.interpolate(torch.randn(2, 6, 3, 3), size=grid, mode="bilinear", align_corners=True)
    tokens = torch.randn(2, patches, 6) + 2 * coarse.flatten(2).transpose(1, 2)
    first = Periphery(rope.grid_coordinates(height, width).unsqueeze(0))
    less = patches - 9
    least = less - (7 if patches > 40 else 3)  # the smallest grid has one window of 4 x 4
    middle, once = merge(tokens, first, grid, 2, less)
    last, twice = merge(middle, once, grid, 4, least)
    assert last.shape == (2, least, 6)
    for image in range(2):
        groups = [[patch] for patch in range(patches)]
        found = list(zip(groups, tokens[image], first.xy[0], strict=True))
        for side, target, (got, periphery) in (
            (2, less, (middle, once)),
            (4, least, (last, twice)),
        ):
            groups, values, places = zip(*found, strict=True)
            found = merged_in_loops(
                torch.stack(values), torch.stack(places), list(groups), grid, side, target
            )
            assert (periphery.multiplicity[image] > 0).sum() == len(found) <= target
            for group, value, place in found:
                for patch in group:
                    index = periphery.token_of[image, patch]
                    torch.testing.assert_close(got[image, index], value)
                    torch.testing.assert_close(periphery.xy[image, index], place)
                    assert periphery.multiplicity[image, index] == len(group)


def test_tokens_that_are_no_numbers_or_zero_reach_the_target_all_the_same():
    for value in (math.nan, 0.0):
        tokens = torch.full((2, 24, 8), value)
        periphery = Periphery(rope.grid_coordinates(4, 6).unsqueeze(0))
        for target in (18, 12, 9):
            tokens, periphery = merge(tokens, periphery, (4, 6), 2, target)
            assert tokens.shape == (2, target, 8)
            assert periphery.token_of.min() >= 0 and periphery.token_of.max() < target
        assert math.isnan(value) or tokens.eq(0).all()


def test_a_plan_falls_in_equal_parts_and_knows_what_cannot_merge():
    plan = merge_plan((3, 6, 9), 0.3, (32, 32))
    assert [side for side, _ in plan.values()] == [2, 2, 2]
    shares = [count / 1024 for _, count in plan.values()]
    assert shares == pytest.approx([1 - 0.7 / 3, 1 - 1.4 / 3, 0.3], abs=3 / 1024)
    assert merge_plan((3, 6, 9), 0.2, (32, 32))[9] == (4, 205)
    assert merge_plan((3, 6, 9), 1, (32, 32)) == {}
    assert merge_plan((1,), 0.25, (3, 3)) == {1: (2, 6)}  # one window; five patches are in none
    assert merge_plan((1,), 0.25, (1, 7)) == {1: (2, 7)}


@pytest.mark.parametrize("grid", GRIDS)
def test_patches_that_share_a_token_are_enlarged_and_others_are_not(grid):
    torch.manual_seed(2)
    height, width = grid
    patches = height * width
    tokens = torch.randn(2, patches, 5)
    first = Periphery(rope.grid_coordinates(height, width).unsqueeze(0))
    assert first.spread(tokens, grid) is tokens
    merged, periphery = merge(tokens.requires_grad_(), first, grid, 2, patches - 9)
    got = periphery.spread(merged, grid).view(2, height, width, 5)
    with torch.no_grad():  # in one pass on a CPU
        torch.testing.assert_close(periphery.spread(merged, grid), got.flatten(1, 2))
    for image in range(2):
        plain = merged[image, periphery.token_of[image]].view(height, width, 5)
        for y in range(height):
            for x in range(width):
                token = periphery.token_of[image, y * width + x]
                expected = plain[y, x]
                if periphery.multiplicity[image, token] > 1:
                    up = min(max(y + (1 if y % 2 else -1), 0), height - 1)
                    aside = min(max(x + (1 if x % 2 else -1), 0), width - 1)
                    expected = (9 * plain[y, x] + 3 * plain[up, x] + 3 * plain[y, aside]) / 16
                    expected = expected + plain[up, aside] / 16
                torch.testing.assert_close(got[image, y, x], expected)


def test_all_patches_is_the_network_as_published_to_the_bit(tiny):
    images = torch.randn(2, 3, 64, 96)
    plain, kept = tiny(images, 5), tiny(images, 5, keep=1)
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], kept[:3], strict=True))


@pytest.mark.parametrize("size", [(64, 96), (80, 112), (16, 16)])
def test_features_cover_the_grid_and_images_of_a_batch_do_not_meet(tiny, size):
    images = torch.randn(3, 3, *size)
    out = tiny(images, 4, keep=0.3)
    assert out.patches.shape[1] == size[0] * size[1] // 256
    for number, image in enumerate(images):
        alone = tiny(image[None], 4, keep=0.3)
        torch.testing.assert_close(alone.patches[0], out.patches[number], rtol=1e-4, atol=1e-5)


def test_the_walk_shows_what_merged(tiny):
    images = torch.randn(2, 3, 128, 128)
    states = list(tiny.walk(images, 4, keep=0.4))
    assert [s.number for s in states if s.merging] == [b - 1 for b in tiny.config.merge_blocks]
    last = states[-1]
    assert last.tokens.shape[1] == 4 + 25  # each window that merges saves three
    assert last.periphery.multiplicity.sum(dim=1).tolist() == [64, 64]
    assert len(tiny.forward_intermediates(images, 4, keep=0.4)) == tiny.config.depth


def test_attention_is_shared_out_among_the_patches_of_a_token(tiny):
    images = torch.randn(1, 3, 96, 96)
    maps = tiny.attention_maps(images, 4, keep=0.4)
    assert maps.shape == (1, tiny.config.depth, 4, 6, 6)
    assert maps.sum(dim=(-1, -2)).max() <= 1 + 1e-5
    norm = tiny.attention_maps(images, 4, keep=0.4, kind="norm")
    torch.testing.assert_close(norm.sum(dim=(-1, -2)), torch.ones(1, tiny.config.depth, 4))


def test_gradients_reach_every_parameter_with_checkpoints_or_without(tiny):
    images = torch.randn(2, 3, 96, 96)
    grads = []
    for checkpoints in (False, True):
        tiny.zero_grad()
        tiny.train()
        tiny.set_grad_checkpointing(checkpoints)
        torch.manual_seed(3)
        out = tiny(images, 8, keep=0.5)
        (out.patches.square().mean() + out.core_xy.sum()).backward()
        grads.append([p.grad.clone() for p in tiny.parameters()])
    assert all(g.isfinite().all() and g.any() for g in grads[0])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_the_last_layer_and_the_tensors_of_other_libraries_are_the_output(tiny):
    images = torch.randn(2, 3, 80, 112)
    with torch.no_grad():
        out = tiny(images, 4, keep=0.4)
        last = tiny.forward_intermediates(images, 4, (tiny.config.depth,), keep=0.4)[0]
        joined = tiny.forward_features(images, 4, 0.4)
        patches, cls, rest = tiny.get_intermediate_layers(
            images, return_class_token=True, return_extra_tokens=True, cores=4, keep=0.4
        )[0]
        (maps,) = tiny.get_intermediate_layers(images, reshape=True, cores=4, keep=0.4)
        states = list(tiny.walk(images, 4, keep=0.4))
        raw = tiny.forward_intermediates(images, 4, (tiny.config.depth,), norm=False, keep=0.4)[0]
        spread = states[-1].spread()
    assert torch.equal(last.patches, out.patches) and torch.equal(last.cores, out.cores)
    assert torch.equal(joined, torch.cat([out.cores, out.patches], dim=1))
    assert torch.equal(patches, out.patches) and torch.equal(cls, out.cls)
    assert torch.equal(rest, out.cores[:, 1:]) and torch.equal(maps, out.feature_map())
    assert torch.equal(spread, torch.cat([raw.cores, raw.patches], dim=1))


@pytest.mark.slow
@torch.no_grad()
def test_compiling_the_model_changes_nothing(tiny):
    compiled = torch.compile(tiny, backend="eager", fullgraph=True)
    for images in (torch.randn(1, 3, 80, 112), torch.randn(2, 3, 80, 112)):
        wanted = tiny(images, 4, keep=0.4)
        found = compiled(images, 4, keep=0.4)
        torch.testing.assert_close(found.patches, wanted.patches)
        torch.testing.assert_close(found.cores, wanted.cores)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(tiny, dtype):
    photo = bundled_photos()[0]
    pixels = tiny.preprocess(photo, size=(144, 208)).pixels
    wanted = tiny(pixels, keep=0.5)
    found = tiny.to(dtype)(pixels.to(dtype), keep=0.5)
    assert found.patches.dtype == found.cls.dtype == dtype and found.core_xy.dtype == torch.float32
    for part in ("cls", "patches"):
        close = F.cosine_similarity(wanted[part], found[part].float(), dim=-1)
        assert close.mean() > 0.99


def test_training_moves_the_patches_of_a_batch_alike_and_merges_them(tiny):
    images = torch.randn(2, 3, 96, 96)
    tiny.train()
    states = list(tiny.walk(images, 4, keep=0.4))
    places = states[0].periphery.xy
    last = states[-1].periphery
    assert last.multiplicity.sum(dim=1).tolist() == [36, 36]
    for image in range(2):
        for token in range(last.multiplicity.shape[1]):
            members = last.token_of[image] == token
            if members.any():
                centre = places[0, members].mean(dim=0)
                torch.testing.assert_close(last.xy[image, token], centre, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [0.5, 0.22])
def test_the_engine_gives_the_models_outputs(keep):
    model = stirred(create_model("tiny", depth=4, num_cores=8), 0.02).eval()
    engine = compile_for_inference(model)
    images = torch.randn(2, 3, 144, 112)
    with torch.no_grad():
        expected = model(images, 6, keep=keep)
    got = engine(images, 6, keep=keep)
    torch.testing.assert_close(got.patches, expected.patches, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.cores, expected.cores, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_half_the_tokens_stay_closer_to_the_full_pass_than_few_cores():
    model = veca.load("tiny").eval()
    pixels = model.preprocess(bundled_photos()[0], size=320).pixels
    full, merged, few = model(pixels), model(pixels, keep=0.5), model(pixels, cores=8)
    for part in ("cls", "patches"):
        close = [F.cosine_similarity(full[part], o[part], dim=-1).mean() for o in (merged, few)]
        assert close[0] > close[1]
    half = model.bfloat16()(pixels.bfloat16(), keep=0.5)
    assert F.cosine_similarity(merged.patches, half.patches.float(), dim=-1).mean() > 0.99


@pytest.mark.parametrize("keep", [0, 0.1, 1.5, -1, "half", math.nan, math.inf, True, [0.5]])
def test_shares_that_are_none_are_refused(tiny, keep):
    images = torch.zeros(1, 3, 64, 64)
    for call in (
        lambda: tiny(images, keep=keep),
        lambda: tiny.attention_maps(images, keep=keep),
        lambda: tiny.forward_intermediates(images, keep=keep),
        lambda: compile_for_inference(tiny)(images, keep=keep),
        lambda: compile_for_inference(tiny, size=64, keep=keep),
    ):
        with pytest.raises(InputError, match="keep"):
            call()


def test_numpy_shares_are_shares(tiny):
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(tiny(images, keep=np.float32(0.5)).cls, tiny(images, keep=0.5).cls)


@pytest.mark.parametrize("blocks", [(), (0,), (3, 2), (2, 2), (99,), "12", (1.5,), 4])
def test_blocks_to_merge_before_are_checked(blocks):
    with pytest.raises(ConfigError, match="merge_before"):
        create_model("tiny", merge_before=blocks)


def test_older_files_say_nothing_of_merging_and_newer_ones_only_what_differs():
    config = create_model("tiny").config
    assert "merge_before" not in config.to_dict()
    other = config.replace(merge_before=[4, 8])
    assert other.to_dict()["merge_before"] == [4, 8]
    assert veca.VecaConfig.from_dict(other.to_dict()).merge_blocks == (4, 8)
