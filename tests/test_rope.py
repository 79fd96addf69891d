import math

import pytest
import torch

from veca import rope


def test_grid_coordinates_are_patch_centres_x_first():
    xy = rope.grid_coordinates(2, 4)
    assert xy.shape == (8, 2)
    assert torch.allclose(xy[0], torch.tensor([-0.75, -0.5]))
    assert torch.allclose(xy[1], torch.tensor([-0.25, -0.5]))
    assert torch.allclose(xy[7], torch.tensor([0.75, 0.5]))


def test_periods_as_published():
    periods = rope.periods(64, base=100.0, zero_fraction=0.125)
    expected = [100 ** (2 * j / 32) for j in range(14)] + [math.inf] * 2
    assert periods.tolist() == pytest.approx(expected, rel=1e-6)


def test_rotation_turns_adjacent_pairs_x_half_then_y_half():
    """Against the definition, channel by channel, with scalar arithmetic."""
    d, x, y = 16, 0.3, -0.7
    periods = rope.periods(d, base=100.0, zero_fraction=0.25)
    tables = rope.rotation(torch.tensor([[[x, y]]]), periods)
    vector = torch.randn(d)
    got = rope.rotate(vector.view(1, 1, 1, d), tables).flatten()
    for pair in range(d // 2):
        coordinate = x if pair < d // 4 else y
        j = pair % (d // 4)
        angle = 0.0 if j >= 3 else 2 * math.pi * coordinate / 100 ** (2 * j / (d / 2))
        even, odd = vector[2 * pair].item(), vector[2 * pair + 1].item()
        assert got[2 * pair].item() == pytest.approx(
            even * math.cos(angle) - odd * math.sin(angle), abs=1e-5
        )
        assert got[2 * pair + 1].item() == pytest.approx(
            even * math.sin(angle) + odd * math.cos(angle), abs=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_both_forms_of_rotate_agree(dtype):
    x = torch.randn(2, 3, 5, 16, dtype=dtype)
    tables = rope.rotation(torch.rand(2, 5, 2) * 2 - 1, rope.periods(16, 100.0, 0.125))
    complex_form = rope.rotate(x, tables)
    real_form = torch.compile(rope.rotate, backend="eager", fullgraph=True)(x, tables)
    assert complex_form.dtype == real_form.dtype == dtype
    torch.testing.assert_close(complex_form, real_form)


def test_tables_of_lower_precision_are_taken():
    x = torch.randn(1, 2, 5, 16)
    tables = rope.rotation(torch.rand(1, 5, 2), rope.periods(16, 100.0, 0.125))
    low = rope.Rotation(*(table.bfloat16() for table in tables))
    torch.testing.assert_close(rope.rotate(x, low), rope.rotate(x, tables), rtol=2e-2, atol=2e-2)


def test_rotate_takes_any_strides():
    tables = rope.rotation(torch.rand(1, 4, 2), rope.periods(8, 100.0, 0.125))
    x = torch.randn(1, 2, 4, 8)
    expected = rope.rotate(x, tables)
    odd_offset = torch.cat([torch.zeros(1), x.flatten()])[1:].view_as(x)
    odd_stride = torch.nn.functional.pad(x, (0, 1))[..., :8]
    every_second = x.repeat_interleave(2, dim=-1)[..., ::2]
    for view in (odd_offset, odd_stride, every_second):
        torch.testing.assert_close(rope.rotate(view, tables), expected, rtol=0, atol=0)


def test_rotate_keeps_lengths_and_relative_angles():
    periods = rope.periods(32, 100.0, 0.125)
    q, k = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)

    def score(a, b):
        left = rope.rotate(q, rope.rotation(torch.tensor([[a]]), periods))
        right = rope.rotate(k, rope.rotation(torch.tensor([[b]]), periods))
        return (left * right).sum().item()

    assert score([0.1, 0.2], [0.4, -0.3]) == pytest.approx(score([0.3, 0.1], [0.6, -0.4]), abs=1e-4)


def test_augmentation_is_one_draw_for_all_within_the_published_range():
    xy = rope.grid_coordinates(4, 4)
    scales = []
    for _ in range(200):
        moved = rope.augment_coordinates(xy, 0.08, None, 2.0)
        step = moved[1, 0] - moved[0, 0]
        scale = (step / (xy[1, 0] - xy[0, 0])).item()
        shift = moved / scale - xy
        assert torch.allclose(shift, shift[0].expand_as(shift), atol=1e-5)
        assert shift.abs().max() <= 0.08 + 1e-5
        scales.append(scale)
    assert 0.5 - 1e-5 <= min(scales) < 0.6 and 1.8 < max(scales) <= 2.0 + 1e-5


def test_the_share_of_periods_that_stand_still_is_rounded():
    periods = rope.periods(48, 100.0, 0.125)  # 1.5 of 12
    assert periods.isinf().tolist() == [False] * 10 + [True] * 2


def test_jitter_scales_each_axis_by_its_own_draw():
    xy = rope.grid_coordinates(4, 4)
    scales = torch.stack(
        [(rope.augment_coordinates(xy, None, 1.5, None) / xy)[0] for _ in range(200)]
    )
    low, high = scales.min(dim=0).values, scales.max(dim=0).values
    assert (low >= 1 / 1.5 - 1e-5).all() and (low < 0.72).all()
    assert (high <= 1.5 + 1e-5).all() and (high > 1.4).all()
    assert (scales[:, 0] - scales[:, 1]).abs().max() > 0.3


def test_shifts_go_both_ways_on_each_axis():
    xy = rope.grid_coordinates(2, 2)
    moves = torch.stack(
        [(rope.augment_coordinates(xy, 0.08, None, None) - xy)[0] for _ in range(200)]
    )
    assert (moves.min(dim=0).values < -0.07).all() and (moves.max(dim=0).values > 0.07).all()
