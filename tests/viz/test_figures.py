"""Each figure: the right panels, the right values, the same each time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import veca
from veca import viz
from veca.errors import InputError
from veca.quickstart import bundled_photos
from veca.viz.colour import core_colour
from veca.viz.cores import path_marks
from veca.viz.figure import Dot, Line


def _titles(figure):
    return [[panel.title for panel in row] for row in figure.rows]


def _patch_colour(panel, view, row, column):
    """The colour at the middle of a patch in a panel."""
    h, w = view.grid
    x = round((column + 0.5) / w * panel.picture.width)
    y = round((row + 0.5) / h * panel.picture.height)
    return panel.picture.getpixel((x, y))


def test_the_same_patch_has_the_same_colour_in_every_panel(view, tiny, photo):
    """The full budget is drawn in two panels, and the same photo in two rows."""
    other = viz.View(tiny, photo, 64, name="again", height=80)
    figure = viz.draw_features([view, other], [3, 8, 8])
    assert _titles(figure) == [[name, "3 cores", "8 cores", "8 cores"] for name in ("p", "again")]
    first, second = figure.rows
    for row in range(4):
        for column in range(6):
            seen = {
                _patch_colour(panel, view, row, column)
                for panel in (first[2], first[3], second[2], second[3])
            }
            assert len(seen) == 1
    assert np.array(first[1].picture).tolist() != np.array(first[2].picture).tolist()


def test_colours_in_pictures_are_the_joint_projection(view):
    figure = viz.draw_features([view], [3, 8])
    expected = viz.joint_colours([view.run(3).patches, view.run(8).patches])
    for panel, colours in zip(figure.rows[0][1:], expected, strict=True):
        for i in (0, 7, 23):
            wanted = (colours[i] * 255).round().int().tolist()
            assert list(_patch_colour(panel, view, i // 6, i % 6)) == wanted
    assert torch.equal(figure.arrays["colours"][1].flatten(0, 1), expected[1])


def test_the_same_input_gives_the_same_bytes(tiny, photo):
    def draw_all():
        view = viz.View(tiny, photo, 64, height=80)
        return [f.png() + f.svg().encode() for name in viz.FIGURES for f in _draw(name, view)]

    def _draw(name, view):
        return viz.draw(name, view, viz.Options(cores=[2, 8], sizes=[32, 64], which=[1, 2]))

    assert draw_all() == draw_all()


def test_features_by_layer_have_a_row_a_budget(view):
    figure = viz.draw_features([view], [2, 8], [1, 3])
    assert _titles(figure) == [
        ["p", "2 cores, layer 1", "2 cores, layer 3"],
        ["p", "8 cores, layer 1", "8 cores, layer 3"],
    ]
    assert "layer 3" in figure.caption


@pytest.mark.slow
def test_every_layer_of_the_bundled_weights_is_seen():
    """Their last layer has a tenth of the spread of those before it."""
    view = viz.View(veca.load("tiny"), bundled_photos()[0], 128, height=80)
    figure = viz.draw_features([view], [8, 64], [8, 12])
    spread = [colours.flatten(0, 1).std(dim=0) for colours in figure.arrays["colours"]]
    assert len(spread) == 4 and min(channel for one in spread for channel in one) > 0.15


def test_the_last_layer_has_the_colours_that_it_has_alone(view):
    by_layer = viz.draw_features([view], [2, 8], [1, 2, 3]).arrays["colours"]
    alone = viz.draw_features([view], [2, 8]).arrays["colours"]
    assert torch.equal(by_layer[2], alone[0]) and torch.equal(by_layer[5], alone[1])


def test_what_merged_is_drawn_over_the_photo():
    token_of = torch.tensor([0, 0, 1, 0, 0, 2])  # 2 x 3: a window of four, and two alone
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8))
    before = np.array(photo)
    shown = np.array(viz.merged_picture(photo, token_of, (2, 3)))
    inside = np.s_[2:38, 2:38]
    assert shown[inside].std() < 0.3 * before[inside].std()
    assert shown[inside].mean() == pytest.approx(before[inside].mean(), abs=3)
    alone = np.s_[22:, 42:]
    assert np.array_equal(shown[alone], before[alone])
    assert (shown[:, 40] > 0.7 * 255).all()  # the edge of the window
    assert not (shown[20, 2:38] > 0.7 * 255).all()  # and none within it
    every = torch.arange(6)
    assert np.array_equal(np.array(viz.merged_picture(photo, every, (2, 3))), before)


def test_a_panel_for_each_step_of_merging(view):
    figure = viz.draw("merged", view.merging(0.4))[0]
    steps = view.merging(0.4).run().steps
    wanted = [f"before layer {s.layer}: {s.tokens} of 24 tokens" for s in steps]
    assert _titles(figure) == [["p", *wanted]] and "keep 0.4" in figure.caption
    assert [t.shape for t in figure.arrays["tokens"][0]] == [(4, 6)] * len(steps)
    usual = viz.draw_merged([view])  # half of them
    assert _titles(usual) == _titles(viz.draw_merged([view.merging(0.5)]))
    assert "keep" not in viz.draw("paths", view)[0].caption


def test_agreement_of_merging_is_with_every_patch_of_the_full_budget(view):
    half = view.merging(0.4)
    figure = viz.draw_agreement([half], [3, 8])
    full = view.run(8).patches
    for got, cores in zip(figure.arrays["agreement"][0], (3, 8), strict=True):
        expected = F.cosine_similarity(half.run(cores).patches, full, dim=1).view(4, 6)
        torch.testing.assert_close(got, expected)
        assert got.min() < 0.9999


def test_overlay_mixes_in_the_photo(view):
    plain = viz.draw_features([view], [8]).panels[1].picture
    mixed = viz.draw_features([view], [8], overlay=0.5).panels[1].picture
    expected = Image.blend(plain, view.shown, 0.5)
    assert np.array_equal(np.array(mixed), np.array(expected))
    with pytest.raises(InputError, match="overlay"):
        viz.draw_features([view], [8], overlay=2)


def test_sizes_stand_side_by_side(view):
    figure = viz.draw_sizes([view], [32, 64], [8])
    assert _titles(figure) == [["p, 8 cores", "32 x 48 px", "64 x 96 px"]]
    small, large = (view.at(size).run().patches for size in (32, 64))
    expected = viz.joint_colours([small, large])
    assert [tuple(c.shape) for c in figure.arrays["colours"]] == [(2, 3, 3), (4, 6, 3)]
    assert torch.equal(figure.arrays["colours"][0].flatten(0, 1), expected[0])
    with pytest.raises(InputError, match="no sizes"):
        viz.draw_sizes([view], [])


def test_a_strip_is_not_made_enormous(tiny):
    strip = viz.View(tiny, Image.new("RGB", (3000, 20)), 32, name="strip")
    with pytest.raises(InputError, match="614,400"):
        viz.draw_sizes([strip], [16, 1024])
    assert viz.draw_sizes([strip], [16]).rows


def test_feature_pictures_of_bare_maps():
    shared = torch.randn(16)
    maps = [torch.randn(16, 3, 4), torch.randn(16, 5, 2)]
    maps[0][:, 1, 2] = shared
    maps[1][:, 4, 0] = shared
    first, second = (np.array(p) for p in viz.feature_pictures(maps))
    assert first.shape == (3, 4, 3) and second.shape == (5, 2, 3)
    assert (first[1, 2] == second[4, 0]).all()
    scaled = np.array(viz.feature_pictures(maps, (30, 40))[0])
    assert scaled.shape == (30, 40, 3) and (scaled[10:20, 20:30] == first[1, 2]).all()


def test_heat_is_brightest_where_the_value_is():
    values = torch.zeros(4, 4)
    values[1, 3] = 0.2
    picture = np.array(viz.heat(Image.new("RGB", (64, 64), "grey"), values)).astype(int).sum(-1)
    row, column = np.unravel_index(picture.argmax(), picture.shape)
    assert 16 <= row < 32 and 48 <= column < 64
    flat = viz.heat(Image.new("RGB", (8, 8)), torch.zeros(2, 2), strength=1)
    assert len(np.unique(np.array(flat).reshape(-1, 3), axis=0)) == 1
    same = viz.heat(Image.new("RGB", (8, 8)), torch.full((2, 2), 0.3), low=0.3, high=0.3)
    assert same.size == (8, 8)


def test_attention_is_a_grid_of_layers_and_budgets(view):
    for kind in ("norm", "softmax"):
        figure = viz.draw_attention(view, [2, 8], [1, 2, 3], kind=kind)
        assert _titles(figure) == [
            [f"p, {cores} cores", "layer 1", "layer 2", "layer 3"] for cores in (2, 8)
        ]
        assert torch.equal(figure.arrays["8 cores"], view.attention(8, [1, 2, 3], kind))
        expected = viz.joint_colours([m.flatten(1).T for m in view.attention(8, [1, 2, 3], kind)])
        wanted = (expected[2][13] * 255).round().int().tolist()
        assert list(_patch_colour(figure.rows[1][3], view, 2, 1)) == wanted


def test_single_cores_are_heat_with_a_dot_where_they_stand(view):
    figure = viz.draw_single_cores(view, [8], [1, 5], [1, 3])
    assert _titles(figure)[1] == ["core 1 of 8, layer 3", "core 5 of 8, layer 3"]
    panel = figure.rows[1][1]
    x, y = view.run(8).path[2, 4].tolist()
    (dot,) = panel.marks
    assert (dot.x, dot.y) == pytest.approx(((x + 1) / 2, (y + 1) / 2))
    expected = viz.heat(view.shown, view.attention(8, [3])[0, 4])
    assert np.array_equal(np.array(panel.picture), np.array(expected))
    with pytest.raises(InputError, match=r"cores.*\[5\]"):
        viz.draw_single_cores(view, [4], [5])


def test_paths_are_drawn_where_the_cores_go(view):
    path = torch.tensor([[[-1.0, -1.0], [0.0, 0.0]], [[0.0, -1.0], [0.5, 1.0]]])
    marks = path_marks(path)
    lines = [mark for mark in marks if isinstance(mark, Line)]
    assert [list(line.points) for line in lines] == [[(0, 0), (0.5, 0)], [(0.5, 0.5), (0.75, 1)]]
    ends = [mark for mark in marks if isinstance(mark, Dot) and mark.outline is not None]
    assert [(dot.x, dot.y) for dot in ends] == [(0.5, 0), (0.75, 1)]
    # 4 x 6 patches: one half side is three patches across, two down.
    assert viz.path_lengths(path, (4, 6)).tolist() == pytest.approx([3, (1.5**2 + 2**2) ** 0.5])
    figure = viz.draw_paths(view, [2, 8])
    assert torch.equal(figure.arrays["2 cores"], view.run(2).path)
    assert len(figure.panels[2].marks) == 3 * 8


def test_a_core_has_one_colour_at_every_budget(view):
    assert len({core_colour(i) for i in range(64)}) == 64
    few, many = (viz.draw_paths(view, [c]).panels[1].marks[0].colour for c in (2, 8))
    assert few == many


def test_states_of_all_layers_share_one_projection(view):
    figure = viz.draw_states(view, [4, 8], [1, 3])
    assert _titles(figure)[1] == ["8 cores, layer 1", "8 cores, layer 3"]
    states = [view.states(c, layer) for c in (4, 8) for layer in (1, 3)]
    expected = viz.project([s - s.mean(dim=0) for s in states], 2)
    for place, wanted in zip(figure.arrays["places"], expected, strict=True):
        assert torch.equal(place, wanted)
    dots = [mark for panel in figure.panels for mark in panel.marks]
    assert len(dots) == 4 + 1 + 4 + 1 + 8 + 1 + 8 + 1
    assert all(0 <= dot.x <= 1 and 0 <= dot.y <= 1 for dot in dots)


def test_cosine_maps_against_the_plain_definition(view):
    run = view.run(8)
    patches = F.normalize(run.patches, dim=1)
    query = patches[2 * 6 + 3]
    expected = (patches @ query).view(4, 6)
    torch.testing.assert_close(viz.point_map(view, (0.55, 0.6), 8), expected)
    cls = F.normalize(run.states[-1, 0], dim=0)
    torch.testing.assert_close(viz.cls_map(view, 8), (patches @ cls).view(4, 6))


def test_similarity_shows_the_image_and_every_point(view):
    points = [(0.55, 0.6), (0.0, 0.0)]
    figure = viz.draw_similarity(view, points, [2, 8])
    assert len(figure.rows) == 2 and len(figure.rows[0]) == 4
    assert figure.rows[0][2].title == "patch at (53, 38) to patches"
    # One scale a column, over both budgets.
    column = [row[2] for row in figure.rows]
    values = torch.stack([viz.point_map(view, points[0], c) for c in (2, 8)])
    assert column[0].scale == column[1].scale
    assert column[0].scale == pytest.approx((values.min().item(), values.max().item()))
    with pytest.raises(InputError, match="point"):
        viz.draw_similarity(view, [(2, 0)])


def test_agreement_is_one_with_itself_and_below_with_fewer(view):
    figure = viz.draw_agreement([view], [2, 8])
    assert len(figure.rows[0]) == 2  # the photo and two cores: the full budget says nothing
    (agreement,) = figure.arrays["agreement"][0]
    expected = F.cosine_similarity(view.run(2).patches, view.run(8).patches, dim=1).view(4, 6)
    torch.testing.assert_close(agreement, expected)
    assert f"mean {expected.mean().item():.3f}" in figure.rows[0][1].title
    whole = viz.draw_agreement([view], [8])
    torch.testing.assert_close(whole.arrays["agreement"][0][0], torch.ones(4, 6))


def test_figures_by_name(view, tiny, photo):
    two = [view, viz.View(tiny, photo, 32, name="q", height=80)]
    assert len(viz.draw("features", two)) == 1 and len(viz.draw("paths", two)) == 2
    with pytest.raises(InputError, match="'path'"):
        viz.draw("path", view)
    with pytest.raises(InputError, match="no photos"):
        viz.draw("paths", [])
    for name, value in (("kind", "nrom"), ("method", "tsne")):
        with pytest.raises(InputError, match=f"'{value}'"):
            viz.Options(**{name: value})


def test_files_are_named_after_figure_and_photo(view, tiny, photo, tmp_path):
    two = [view, viz.View(tiny, photo, 32, name="p", height=80)]
    options = viz.Options(cores=[8], layers=[3])
    names = [p.name for p in viz.save("attention", two, tmp_path, options, format="svg")]
    assert names == ["p-attention-norm.svg", "p-2-attention-norm.svg"]
    assert [p.name for p in viz.save("features", two, tmp_path, options)] == ["features.png"]
    (one,) = viz.save("paths", [view], tmp_path / "new" / "x.html", options)
    assert one.read_text().startswith("<!doctype html>")
    with pytest.raises(InputError, match=r"y\.png"):
        viz.save("paths", two, tmp_path / "y.png", options)
    assert not (tmp_path / "y.png").exists()
