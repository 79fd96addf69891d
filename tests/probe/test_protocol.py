"""Protocols are data: complete, strict, and the same after a round trip."""

from __future__ import annotations

import math
import re
from importlib import resources

import pytest

from veca.errors import VecaError
from veca.probe import ProbeError, available_protocols, load_protocol
from veca.probe.protocol import from_dict
from veca.probe.tasks import at_size


@pytest.mark.parametrize("name", available_protocols())
def test_every_shipped_protocol_loads_and_survives_a_round_trip(name):
    found = load_protocol(name)
    assert found.name == name and found.tasks and found.description
    assert from_dict(found.to_dict()) == found
    for task in found.tasks:
        assert from_dict(found.only(task)).task(task) == found.task(task)


def test_the_published_ones_are_there():
    names = "knn-dino dinov3-imagenet-linear logreg dinov3-ade20k dinov3-nyu kitti veca-paper quick"
    assert set(names.split()) <= set(available_protocols())


def test_constants_as_published():
    knn = load_protocol("knn-dino").knn
    assert knn.k == (10, 20, 100, 200) and knn.temperature == 0.07 and not knn.center
    linear = load_protocol("dinov3-imagenet-linear").linear
    grid = [a * 10.0**b for b in range(-5, -1) for a in (1, 2, 5)] + [0.1]
    assert linear.learning_rates == pytest.approx(grid, rel=1e-12)
    assert (linear.momentum, linear.weight_decay, linear.init_std) == (0.9, 0.0, 0.01)
    assert (linear.iterations, linear.batch, linear.reference_batch) == (12500, 8 * 128, 256)
    assert linear.features == "cls+mean" and load_protocol("veca-paper").linear.features == "cls"
    c = load_protocol("logreg").logreg.c_values
    assert len(c) == 45 and math.isclose(c[0], 1e-6) and math.isclose(c[-1], 1e5)
    seg = load_protocol("dinov3-ade20k").segmentation
    assert (seg.view.size, seg.view.window, seg.view.stride) == (512, 512, 341)
    assert (seg.optimizer.lr, seg.optimizer.weight_decay, seg.dropout) == (1e-3, 1e-3, 0.1)
    assert (seg.optimizer.iterations, seg.optimizer.warmup, seg.optimizer.batch) == (
        40000,
        1500,
        16,
    )
    assert seg.augment.scale == (0.5, 2.0) and seg.augment.max_class_share == 0.75
    older = load_protocol("dinov2-ade20k").segmentation
    assert (older.dropout, older.optimizer.weight_decay, older.optimizer.schedule) == (
        0.0, 1e-4, "poly",
    )  # fmt: skip
    depth = load_protocol("dinov3-nyu").depth
    assert (depth.bins, depth.min_depth, depth.max_depth, depth.bin_floor) == (256, 0.001, 10, 0.1)
    assert (depth.optimizer.lr, depth.optimizer.clip, depth.optimizer.iterations) == (
        3e-4, 35.0, 38400,
    )  # fmt: skip
    assert depth.view.eval_crop.values == (45, 471, 41, 601) and depth.view.flip
    assert depth.augment.crop == (416, 544) and depth.augment.rotate == 2.5
    kitti = load_protocol("kitti").depth
    assert kitti.max_depth == 80 and kitti.view.image_crop.values == (352, 1216)
    assert kitti.augment.crop == (352, 704)


def edited(tmp_path, old: str, new: str, name: str = "quick"):
    text = (resources.files("veca.probe") / "protocols" / f"{name}.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    return path


def test_a_file_of_ones_own(tmp_path):
    path = edited(tmp_path, "report_k = 10", "report_k = 20")
    assert load_protocol(path).knn.report_k == 20
    assert load_protocol(str(path)).knn.report_k == 20


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("report_k = 10", "report_k = 10\nkk = 3", "'k'"),
        ("report_k = 10", "", r"report_k.*missing"),
        ("report_k = 10", "report_k = 11", "report_k 11"),
        ("report_k = 10", "report_k = 10.0", r"report_k.*10\.0"),
        ("report_k = 10", 'report_k = "10"', "report_k.*'10'"),
        ("seed = 0", "seed = true", "True"),
        ("temperature = 0.07", "temperature = 0.0", r"temperature.*0\.0"),
        ("temperature = 0.07", "temperature = nan", "temperature.*nan"),
        ('features = "cls"', 'features = "clss"', "'cls'"),
        ("seed = 0", "seed = ", "TOML"),
        ("[timing]", "[timming]", "'timing'"),
        ("validation = 0.2", "validation = 0.0", "learning_rates"),
        ("scale = [0.08, 1.0]", "scale = [1.0]", r"scale.*\[1\.0\]"),
        ("scale = [0.08, 1.0]", "scale = [1.0, 0.5]", r"scale.*\[1\.0, 0\.5\]"),
        ("scale = [0.08, 1.0]", "scale = 1.0", r"scale.* 1\.0"),
        ("window = 0\nstride = 0", "window = 32\nstride = 48", "stride"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(tmp_path, old, new, message):
    with pytest.raises(ProbeError, match=message) as caught:
        load_protocol(edited(tmp_path, old, new))
    assert "mine.toml" in str(caught.value)


def test_unknown_names_and_missing_files(tmp_path):
    with pytest.raises(ProbeError, match=r"'quik'.*'quick'"):
        load_protocol("quik")
    with pytest.raises(ProbeError, match=r"no\.toml"):
        load_protocol(tmp_path / "no.toml")
    assert issubclass(ProbeError, VecaError) and issubclass(ProbeError, ValueError)


def test_a_task_that_a_protocol_lacks():
    with pytest.raises(ProbeError, match=r"depth.*dinov3-nyu"):
        load_protocol("knn-dino").task("depth")


class TestSettings:
    def test_values_are_toml_and_the_name_says_so(self):
        base = load_protocol("quick")
        changed = base.with_settings(["knn.k=[5]", "knn.report_k = 5", "linear.features=cls+mean"])
        assert changed.knn.k == (5,) and changed.linear.features == "cls+mean"
        assert changed.name == "quick+" and base.with_settings([]).name == "quick"
        assert base.knn.k == (10, 20, 100, 200)

    @pytest.mark.parametrize("name", ["knn.kk", "knn.k.x", "nothing.at.all"])
    def test_only_what_is_there_can_be_set(self, name):
        with pytest.raises(ProbeError, match=re.escape(f"'{name}'")):
            load_protocol("quick").with_settings([f"{name}=1"])

    def test_form(self):
        with pytest.raises(ProbeError, match="KEY=VALUE"):
            load_protocol("quick").with_settings(["seed"])
        with pytest.raises(ProbeError, match="table"):
            load_protocol("quick").with_settings(["knn=1"])


class TestSize:
    def test_window_stride_and_crop_follow_the_size(self):
        section = at_size(load_protocol("dinov3-ade20k").segmentation, 256, 16)
        assert (section.view.size, section.view.window, section.view.stride) == (256, 256, 170)
        assert section.augment.crop == 256

    def test_its_own_size_changes_nothing(self):
        section = load_protocol("dinov3-ade20k").segmentation
        assert at_size(section, 512, 16) is section

    def test_other_tasks_change_their_size_only(self):
        section = load_protocol("knn-dino").knn
        assert at_size(section, 448, 16).view.size == 448
