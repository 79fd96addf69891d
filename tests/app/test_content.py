"""What the page shows, without the page."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from PIL import Image

from veca import cost, preprocess
from veca.app import content
from veca.app.content import Limits, Photo, Times
from veca.embed.writers.files import read_features
from veca.errors import ImageError
from veca.viz.project import Palette


@pytest.fixture
def entry(models):
    with models.use(models.default) as entry:
        yield entry


@pytest.fixture
def look(entry, photo):
    return content.look(entry, photo, 64)


def test_photos_are_read_and_named(tmp_path, noise):
    path = tmp_path / "my photo.png"
    noise().save(path)
    photo = content.open_photo(path)
    assert photo.name == "my photo" and photo.image.size == (96, 64)


def test_only_what_the_page_can_show_is_kept(tmp_path):
    """Twelve photos of 7000 x 7000 pixels, 143 KB each, took 2.6 GB."""
    limits = Limits(size=256, patches=1024)

    def kept(*size):
        Image.new("RGB", size, "teal").save(tmp_path / "p.png")
        photo = content.open_photo(tmp_path / "p.png", limits)
        assert photo.original == size[::-1]
        return photo.image.size

    assert kept(1750, 1750) == (256, 256)
    assert kept(200, 900) == (200, 900)
    width, height = kept(4500, 300)
    assert width * height == pytest.approx(1024 * 16**2, rel=0.01)
    assert width / height == pytest.approx(15, rel=0.01)


def test_bad_files_get_a_message_for_the_visitor(tmp_path, noise):
    text = tmp_path / "text.jpg"
    text.write_text("not a photo")
    empty = tmp_path / "empty.png"
    empty.write_bytes(b"")
    cut = tmp_path / "cut.png"
    noise().save(cut)
    cut.write_bytes(cut.read_bytes()[:5000])
    large = tmp_path / "large.png"
    noise(200, 200).save(large)
    limits = Limits(pixels=100 * 100)
    for path, reason in (
        (text, "format"),
        (empty, "empty"),
        (cut, "decoded"),
        (large, "40,000 pixels"),
        (tmp_path / "missing.png", "No such file"),
    ):
        with pytest.raises(ImageError) as error:
            content.open_photo(path, limits)
        message = str(error.value)
        assert path.name in message and reason in message
        assert str(tmp_path) not in message and "JPEG" in message.split(".")[-2]
        assert "bytes>" not in message and "on_error" not in message


def test_files_that_are_too_large_are_not_read(tmp_path, noise):
    path = tmp_path / "p.png"
    noise().save(path)
    with pytest.raises(ImageError, match=r"p\.png.* 0 MiB"):
        content.open_photo(path, Limits(file_bytes=1000))


@pytest.mark.parametrize("size", [(4000, 3000), (40, 30)])
def test_large_and_small_photos(entry, size):
    look = content.look(entry, Photo("p", Image.new("RGB", size, "teal"), size[::-1]), 64)
    assert look.view.grid == (4, 5)  # 64 x 85, to the nearest patch
    assert content.features_picture(look, 3).size == (512, 384)


def test_long_thin_photos_are_refused_when_they_would_be_too_many_patches(entry):
    strip = Photo("strip", Image.new("RGB", (4000, 20)), (20, 4000))
    with pytest.raises(ImageError, match="204,800 patches"):
        content.look(entry, strip, 512)


def test_colours_keep_their_meaning_at_every_budget(entry, photo, look):
    """The palette is that of the full budget, whatever is shown first."""
    pixels = preprocess(photo.image, 64).pixels
    with torch.inference_mode():
        full, some = (entry.model(pixels, cores=c).patches[0] for c in (8, 3))
    expected = (Palette.fit([full])(some).view(4, 6, 3) * 255).round().byte().numpy()
    picture = np.array(content.features_picture(look, 3))
    assert (picture[::96, ::96][:4, :6] == expected).all()
    assert (picture == np.array(content.features_picture(look, 3))).all()
    assert (picture != np.array(content.features_picture(look, 8))).any()


def test_colours_keep_their_meaning_when_patches_merge(entry, photo, look):
    half = content.merging(look, 0.5)
    pixels = preprocess(photo.image, 64).pixels
    with torch.inference_mode():
        out = entry.model(pixels, cores=3, keep=0.5)
    expected = (look.palette(out.patches[0]).view(4, 6, 3) * 255).round().byte().numpy()
    picture = np.array(content.features_picture(half, 3))
    assert (picture[::96, ::96][:4, :6] == expected).all()
    shown, tokens, patches = content.merged_picture(half, 3)
    assert patches == 24 and 12 <= tokens < 24 and shown.size == look.view.shown.size
    counted = content.photo_cost(half, 3)
    assert counted.veca.flops == cost(entry.model.config, (64, 96), 3, keep=0.5).veca.flops
    assert counted.veca.flops < content.photo_cost(look, 3).veca.flops


def test_sliders_beyond_the_weights_mean_the_last(look):
    assert content.budget_of(look, 64) == 8
    last = np.array(content.attention_picture(look, 8, 3, 8, "norm"))
    assert (np.array(content.attention_picture(look, 64, 12, 64, "norm")) == last).all()
    assert (np.array(content.attention_picture(look, 8, 3, 8, "softmax")) != last).any()
    assert (np.array(content.attention_picture(look, 8, 3, 1, "norm")) != last).any()


def test_paths_and_their_mean_length(look):
    picture, length = content.paths_picture(look, 8)
    path = look.view.run(8).path * torch.tensor([3.0, 2.0])  # in patches: 6 across, 4 down
    expected = path.diff(dim=0).norm(dim=-1).sum(dim=0).mean().item()
    assert length == pytest.approx(expected, rel=1e-5) and picture.size == look.view.shown.size


def test_similarity_of_a_click_and_of_the_whole(look):
    (picture, (low, high)), (at_spot, (_, most)) = (
        content.similarity_picture(look, 8, point) for point in (None, (0.1, 0.9))
    )
    assert -1 <= low < high <= 1 and most == pytest.approx(1, abs=1e-5)  # the patch with itself
    whole, spot = np.array(picture), np.array(at_spot)
    assert whole.shape == spot.shape and (whole != spot).any()
    marked, plain = content.photo_picture(look, (0.1, 0.9)), content.photo_picture(look)
    assert (np.array(plain) == np.array(look.view.shown)).all()
    assert (np.array(marked) != np.array(plain)).any()


def test_clicked_pixels_become_points():
    assert content.point_at((0, 99), (200, 100)) == (0.0025, 0.995)
    assert content.point_at((500, -3), (200, 100)) == (1.0, 0.0)


def test_times_are_measured_and_the_numbers_are_the_costs(entry, look):
    times = content.measure_times(look, entry, 3)
    assert times.veca > 0 and times.dense > 0 and entry.dense_ms == {(64, 96): times.dense}
    table = content.costs_table(look, 3, Times(2.0, 8.0, 8.0))
    expected = cost(entry.model.config, (64, 96), 3)
    assert "VECA, 3 cores" in table and "2.0" in table and "25.0%" in table
    assert f"{expected.veca.interactions:,}" in table
    assert f"{expected.dense.interactions:,}" in table
    assert f"{expected.veca.flops / 1e9:.2f}" in table and f"{expected.flops_ratio:.1%}" in table


def test_the_dense_network_is_timed_once_for_each_size(entry, look, monkeypatch):
    first = content.measure_times(look, entry, 3)
    monkeypatch.setattr(entry.dense, "forward", lambda images: pytest.fail("was run"))
    assert content.measure_times(look, entry, 8).dense == first.dense


def test_a_slow_dense_network_is_timed_when_asked_for_alone(entry, look, monkeypatch):
    """At 1,024 px it took most of the 25 s until the first picture."""
    runs = []
    forward = entry.dense.forward
    monkeypatch.setattr(entry.dense, "forward", lambda x: (runs.append(1), forward(x))[1])
    monkeypatch.setattr(content, "_QUICK_MS", 0.0)
    times = content.measure_times(look, entry, 3)
    assert times.dense is None and times.expected > 0 and not runs
    assert "not timed" in content.costs_table(look, 3, times)
    asked = content.time_dense(look, entry, 3)
    assert asked.dense > 0 and runs
    assert content.measure_times(look, entry, 8).dense == asked.dense
    entry.dense_ms.clear()
    monkeypatch.setattr(content, "_ENDLESS_MS", 0.0)
    with pytest.raises(ImageError, match="dense ViT"):
        content.time_dense(look, entry, 3)


def test_names_are_escaped(entry, photo):
    look = content.look(entry, Photo("<b>x</b>", photo.image, photo.original), 64)
    assert "<b>" not in re.sub("</?(table|thead|tbody|tr|th|td|p)>", "", _table(look))


def _table(look):
    return content.costs_table(look, 3, Times(1.0, 1.0, 1.0))


def test_the_file_holds_the_features(entry, look, tmp_path):
    path = content.features_file(look, 3, tmp_path)
    assert path.name == "a_photo-3-cores.npz"
    saved = read_features(path)
    with torch.inference_mode():
        out = entry.model(look.view.pixels, cores=3)
    np.testing.assert_allclose(saved["cls"], out.cls[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        saved["patches"].reshape(24, -1), out.patches[0], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(saved["core_xy"], out.core_xy[0], rtol=1e-5, atol=1e-6)
    assert saved["grid"].tolist() == [4, 6] and saved["cores"] == 3
    assert saved["original_size"].tolist() == [64, 96] and saved["image"] == "a photo"
