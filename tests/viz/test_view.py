"""A view gives what the model gives, for photos of any size."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from veca import preprocess, viz
from veca.errors import InputError
from veca.viz.default_weights import fresh_model, is_fresh, load_or_fresh
from veca.viz.view import default_layers, fitting_budgets, unique_names


def test_a_view_holds_what_the_model_says(tiny, view, photo):
    pixels = preprocess(photo, 64).pixels
    with torch.inference_mode():
        out = tiny(pixels, cores=5)
        layers = tiny.forward_intermediates(pixels, 5)
        maps = tiny.attention_maps(pixels, 5, kind="norm")[0]
    run = view.run(5)
    assert view.grid == out.grid == (4, 6)
    torch.testing.assert_close(run.patches, out.patches[0])
    torch.testing.assert_close(run.states, torch.stack([layer.cores[0] for layer in layers]))
    torch.testing.assert_close(run.path, torch.stack([layer.core_xy[0] for layer in layers]))
    torch.testing.assert_close(view.features(5, [2])[0], layers[1].patches[0])
    torch.testing.assert_close(view.attention(5), maps)
    assert view.run(5) is run
    view.forget(keep={3})
    assert view.run(5) is not run


def test_a_view_may_merge(tiny, view, photo):
    pixels = preprocess(photo, 64).pixels
    merging = viz.View(tiny, photo, 64, keep=0.4)
    with torch.inference_mode():
        out = tiny(pixels, cores=5, keep=0.4)
        layers = tiny.forward_intermediates(pixels, 5, keep=0.4)
        maps = tiny.attention_maps(pixels, 5, kind="norm", keep=0.4)[0]
        states = [layer for layer in tiny.walk(pixels, 5, keep=0.4) if layer.merging]
    run = merging.run(5)
    torch.testing.assert_close(run.patches, out.patches[0])
    torch.testing.assert_close(run.states, torch.stack([layer.cores[0] for layer in layers]))
    torch.testing.assert_close(merging.features(5, [2])[0], layers[1].patches[0])
    torch.testing.assert_close(merging.attention(5), maps)
    assert [step.layer for step in run.steps] == list(tiny.config.merge_blocks)
    for step, state in zip(run.steps, states, strict=True):
        assert torch.equal(step.token_of, state.periphery.token_of[0])
    assert run.steps[-1].tokens < 24 and merging.merges and not view.merges
    assert merging.at(32).keep == 0.4
    with pytest.raises(InputError, match="keep"):
        viz.View(tiny, photo, 64, keep=1.5)


def test_a_view_with_another_share_knows_what_was_run(view):
    full, half = view.run(5), view.merging(0.5)
    few = half.run(5)
    assert half.merging(None).run(5) is full and view.run(5) is full
    assert not torch.equal(few.patches, full.patches) and not full.steps
    third = view.merging(0.3)
    third.run(5)
    third.forget(keep={5})
    assert view.run(5) is full and half.run(5) is not few


def test_both_kinds_of_attention_sum_to_one(view):
    for kind in ("norm", "softmax"):
        sums = view.attention(4, [1, 3], kind).sum(dim=(-2, -1))
        torch.testing.assert_close(sums, torch.ones(2, 4))


def test_a_model_in_training_is_looked_at_in_evaluation(tiny, photo):
    expected = viz.View(tiny, photo, 64).run().patches
    tiny.train()
    assert torch.equal(viz.View(tiny, photo, 64).run().patches, expected)
    assert tiny.training


@pytest.mark.parametrize("size", [(4000, 3000), (40, 30), (30, 40), (700, 20)])
def test_photos_of_any_size_are_shown_at_the_height_of_a_panel(tiny, size):
    view = viz.View(tiny, Image.new("RGB", size, "orange"), 32, height=90)
    wide = min(size[0] / size[1], 3)
    assert view.shown.width <= 270 and view.shown.height <= 90
    assert view.shown.width / view.shown.height == pytest.approx(size[0] / size[1], rel=0.2)
    assert wide < 3 or view.shown.width == 270
    figure = viz.draw_features([view], [8])
    assert figure.panels[0].picture.size == figure.panels[1].picture.size == view.shown.size


def test_photos_are_upright_however_they_are_given(tiny, photo, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    path = tmp_path / "turned.png"
    photo.save(path, exif=exif)
    with Image.open(path) as opened:
        views = [viz.View(tiny, source, 32) for source in (path, opened, path.read_bytes())]
    assert [view.photo.size for view in views] == [(64, 96)] * 3
    assert views[0].name == "turned"
    assert viz.View(tiny, photo, 32).photo is photo  # nothing to do: no copy
    grey = viz.View(tiny, photo.convert("L"), 32)
    assert grey.photo.mode == "RGB"


def test_points_fall_on_patches(view):
    assert view.patch_at((0.0, 0.0)) == (0, 0)
    assert view.patch_at((1.0, 1.0)) == (3, 5)
    assert view.patch_at((0.5, 0.49)) == (1, 3)
    with pytest.raises(InputError, match=r"\(1\.2, 0\.5\)"):
        view.patch_at((1.2, 0.5))


def test_budgets_and_layers_of_a_figure(tiny, view):
    assert fitting_budgets(tiny) == [8] and fitting_budgets(tiny, (16, 64)) == [8]
    assert default_layers(tiny) == [1, 2, 3] and default_layers(tiny, 2) == [1, 3]
    assert default_layers(fresh_model("tiny")) == [1, 5, 8, 12]
    with pytest.raises(InputError, match="cores"):
        view.run(9)
    with pytest.raises(InputError, match="layers"):
        view.states(4, 4)
    for options, noun in (
        ({"cores": [9]}, "cores"),
        ({"layers": [0]}, "layers"),
        ({"cores": []}, "budgets"),
    ):
        with pytest.raises(InputError, match=noun):
            viz.Options(**options).check(tiny)


def test_names_become_file_names_that_differ(tiny, photo):
    names = ["x", "a/b c", "x", "x-2", ""]
    views = [viz.View(tiny, photo, 32, name=name) for name in names]
    assert [name for name, _ in unique_names(views)] == ["x", "a_b_c", "x-2", "x-2-2", "photo"]


def test_fresh_weights_are_recognised(tiny, tmp_path, monkeypatch):
    from veca import save

    monkeypatch.setenv("VECA_CACHE", str(tmp_path))
    monkeypatch.setattr("veca.viz.default_weights.find", lambda name: None)
    state = torch.random.get_rng_state()
    chosen = load_or_fresh()
    assert chosen.fresh and "fresh" in chosen.name and not chosen.model.training
    assert torch.equal(state, torch.random.get_rng_state())
    again = load_or_fresh().model.state_dict()
    assert all(torch.equal(again[k], v) for k, v in chosen.model.state_dict().items())
    assert not is_fresh(tiny)
    assert not load_or_fresh(str(save(tiny, tmp_path / "stirred"))).fresh
    fresh = viz.View(chosen.model, Image.new("RGB", (32, 32)), 32).model
    assert load_or_fresh(str(save(fresh, tmp_path / "fresh"))).fresh


def test_names_of_0_1_still_work():
    with pytest.warns(DeprecationWarning, match="PhotoFeatures"):
        assert viz.Run is viz.PhotoFeatures
    with pytest.warns(DeprecationWarning, match="fitting_budgets"):
        assert viz.default_budgets is viz.fitting_budgets
    with pytest.raises(AttributeError, match="nonsense"):
        _ = viz.nonsense
