"""Whole runs on tiny data: right, repeatable, cached, and loud about bad data."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

from probe import sets
from probe.test_backbone import teacher
from veca import DenseVit
from veca.errors import ImageError, MissingExtraError
from veca.probe import (
    ElasticBackbone,
    ProbeError,
    TeacherBackbone,
    as_backbone,
    planned_subject,
    run_probe,
)
from veca.probe.datasets import DatasetError, open_dataset
from veca.probe.record import Run, check_out, read_run, write_run
from veca.probe.tasks.knn import predict
from veca.probe.tasks.shared import require_sklearn
from veca.teachers import load_teacher

SETS = {
    "knn": ("folder", sets.class_folders),
    "linear": ("folder", sets.class_folders),
    "logreg": ("folder", sets.class_folders),
    "segmentation": ("images-masks", sets.images_masks),
    "depth": ("rgb-depth", sets.rgb_depth),
}


@pytest.fixture
def go(tmp_path):
    """Run a task on its tiny set, made once."""

    def run(task, backbones=None, settings=(), make=True, **options):
        name, write = SETS[task]
        root = tmp_path / name
        if make and not root.exists():
            write(root)
        chosen = options.pop("protocol", None) or sets.protocol(*settings)
        return run_probe(
            task,
            backbones or sets.backbone().at([2, 8]),
            dataset=name,
            data=root,
            protocol=chosen,
            cache=options.pop("cache", tmp_path / "cache"),
            **options,
        )

    run.root = lambda task: tmp_path / SETS[task][0]
    return run


def metrics(run: Run):
    return [row.metrics for row in run.rows]


@pytest.mark.parametrize("task", SETS)
def test_every_task_gives_a_row_for_every_budget(go, task):
    cells = TeacherBackbone(teacher(16))
    run = go(task, [cells, *sets.backbone().at([2, 8])])
    assert [row.label for row in run.rows] == ["cells16", "veca C=2", "veca C=8"]
    assert all(np.isfinite(list(row.metrics.values())).all() for row in run.rows)
    assert run.rows[0].retention_teacher == 1 and run.rows[0].retention_full is None
    assert run.rows[2].retention_full == 1 and run.rows[1].retention_teacher is not None
    assert run.rows[1].interactions < run.rows[2].interactions and run.rows[1].ms is None
    assert run.protocol[task]["view"] and run.task == task
    json.dumps(run.to_dict(), allow_nan=False)


@pytest.mark.parametrize("task", SETS)
def test_again_is_the_same_and_touches_no_image(go, task, monkeypatch):
    first = go(task)
    assert first.cache["decoded"] > 0

    def refuse(self, i):
        raise AssertionError("an image was read")

    dataset = open_dataset(SETS[task][0], go.root(task), "train")
    for cls in type(dataset).__mro__:
        if "image" in vars(cls):
            monkeypatch.setattr(cls, "image", refuse)
    second = go(task)
    assert metrics(first) == metrics(second) and second.cache["decoded"] == 0
    assert second.cache["computed"] == 0 and second.cache["damaged"] == 0


@pytest.mark.parametrize("task", ["knn", "segmentation"])
def test_a_fresh_cache_gives_the_same(go, task, tmp_path):
    first = go(task, cache=tmp_path / "one")
    assert metrics(first) == metrics(go(task, cache=tmp_path / "two"))
    assert metrics(first) == metrics(go(task, cache=None))


@pytest.mark.parametrize("task", ["knn", "depth"])
def test_a_damaged_cache_is_noticed_and_mended(go, task, tmp_path):
    first = go(task)
    for path in (tmp_path / "cache").rglob("part-00000.safetensors"):
        path.write_bytes(path.read_bytes()[:-7])
    second = go(task)
    assert second.cache["damaged"] > 0 and metrics(first) == metrics(second)
    assert any("damaged" in note for note in second.notes)


def test_the_seed_decides(go):
    a, b, c = (go("linear", settings=[f"seed={seed}", "linear.iterations=5"]) for seed in (0, 0, 1))
    assert metrics(a) == metrics(b)
    assert a.rows[0].details["tried_on_validation"] != c.rows[0].details["tried_on_validation"]


def test_knn_is_the_knn_of_the_features(go):
    """The same number from the model, the images and the bare function."""
    run = go("knn", sets.backbone().at([4]), settings=["knn.center=false"])
    data = [open_dataset("folder", go.root("knn"), split) for split in ("train", "test")]
    backbone = sets.backbone(4)
    features, labels = [], []
    for part in data:
        rows = []
        for i in range(len(part)):
            image = part.image(i)  # 40 x 52: the short side to 32, then the middle
            resized = image.resize((42, 32), Image.Resampling.BICUBIC).crop((5, 0, 37, 32))
            pixels = torch.from_numpy(np.asarray(resized).copy()).permute(2, 0, 1) / 255
            rows.append(backbone.features(pixels[None], (2, 2)).cls)
        features.append(torch.cat(rows))
        labels.append(torch.tensor([part.label(i) for i in range(len(part))]))
    found = predict(features[0], labels[0], features[1], [3], num_classes=3, temperature=0.07)
    expected = float((found[3] == labels[1]).double().mean())
    assert run.rows[0].metrics["top1"] == pytest.approx(expected)
    assert run.rows[0].metrics["top1"] > 1 / 3


def test_several_sizes(go):
    run = go("knn", sets.backbone().at([2, 8]), sizes=[32, 48])
    assert [(row.cores, row.size) for row in run.rows] == [(2, 32), (8, 32), (2, 48), (8, 48)]
    assert run.cache["decoded"] == 39  # 24 + 15: one decode for both sizes
    alone = go("knn", sets.backbone().at([2, 8]), sizes=[48])
    assert metrics(alone) == metrics(run)[2:]
    assert alone.protocol["knn"]["view"]["size"] == 48 and alone.protocol["name"].endswith("+")


def test_the_first_core_and_more(go):
    rows = {}
    for features in ("cls", "mean", "cls+mean"):
        run = go("knn", sets.backbone().at([8]), settings=[f"knn.features={features}"])
        rows[features] = run.rows[0]
        assert run.rows[0].details["features"] == features
    assert run.cache["decoded"] == 0  # one extraction holds all three


def test_a_dense_vit_is_a_row_too(go):
    torch.manual_seed(0)
    dense = as_backbone(DenseVit(sets.CONFIG).eval())
    run = go("knn", [dense, *sets.backbone().at([8])])
    assert run.rows[0].role == "baseline" and run.rows[0].interactions == 4**2


def test_a_patch_14_model_of_transformers_beside_patch_16(go, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    transformers.Dinov2Model(config).save_pretrained(tmp_path / "dino")
    dino = TeacherBackbone(load_teacher(str(tmp_path / "dino")), name="dino")
    run = go("knn", [dino, *sets.backbone().at([8])], sizes=[64])
    teacher_row, student = run.rows
    assert teacher_row.grid == (5, 5) and student.grid == (4, 4)  # 70 pixels and 64
    assert teacher_row.interactions == 25**2 and teacher_row.flops > 0
    assert teacher_row.metrics["top1"] > 1 / 3
    again = TeacherBackbone(load_teacher(str(tmp_path / "dino")), name="dino")
    assert go("knn", [again], sizes=[64]).cache["decoded"] == 0


def test_timing(go):
    run = go("knn", settings=["timing.repeats=2", "timing.seconds=0.0"])
    assert all(row.ms > 0 and row.spread_ms >= 0 for row in run.rows)


class TestLearning:
    """Not noise: cells of mean colours solve tasks that are about colours."""

    def test_classification(self, go):
        cells = [TeacherBackbone(teacher(16))]
        for task in ("knn", "linear", "logreg"):
            assert go(task, cells).rows[0].metrics["top1"] > 0.7

    def test_segmentation(self, go):
        run = go(
            "segmentation",
            [TeacherBackbone(teacher(16))],
            ["segmentation.optimizer.lr=0.05", "segmentation.optimizer.iterations=60"],
        )
        assert run.rows[0].details["iou"]["bright"] > 0.7
        assert run.rows[0].details["iou"]["never"] in (None, 0.0)

    def test_depth(self, go):
        learned = go(
            "depth",
            [TeacherBackbone(teacher(16))],
            ["depth.optimizer.lr=0.05", "depth.optimizer.iterations=100"],
        )
        untrained = go("depth", [TeacherBackbone(teacher(16))], ["depth.optimizer.iterations=1"])
        assert learned.rows[0].metrics["rmse"] < 0.6 * untrained.rows[0].metrics["rmse"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestGpu:
    def rows(self):
        return ElasticBackbone(sets.model().cuda()).at([2, 8])

    @pytest.mark.parametrize("task", SETS)
    def test_repeats_to_the_last_digit(self, go, task):
        settings = ["segmentation.optimizer.iterations=50", "depth.optimizer.iterations=50"]
        a, b = (go(task, self.rows(), settings, cache=None) for _ in range(2))
        assert metrics(a) == metrics(b)

    @pytest.mark.parametrize("task", SETS)
    def test_learns_what_a_cpu_learns(self, go, task):
        on_cpu, on_gpu = go(task, cache=None), go(task, self.rows(), cache=None)
        for a, b in zip(on_cpu.rows, on_gpu.rows, strict=True):
            for name, value in a.metrics.items():
                assert b.metrics[name] == pytest.approx(value, abs=0.1)


class TestRandomViews:
    """The full protocols train on random crops."""

    LINEAR = ("linear.augment.enabled=true", "linear.normalize=none", "linear.iterations=6")

    def test_linear(self, go):
        a, b = (go("linear", settings=self.LINEAR, sizes=[32, 48]) for _ in range(2))
        assert metrics(a) == metrics(b) and len(a.rows) == 4
        once = go("linear", settings=[*self.LINEAR, "linear.refit=false"], sizes=[32])
        assert once.rows[0].details["validation_top1"] is not None
        one = go("linear", settings=[*self.LINEAR, "linear.learning_rates=[0.1]"], sizes=[32])
        assert one.rows[0].details["validation_top1"] is None

    def test_segmentation(self, go):
        settings = [
            "segmentation.augment.enabled=true",
            "segmentation.augment.crop=48",
            "segmentation.view.window=32",
            "segmentation.view.stride=16",
            "segmentation.optimizer.iterations=4",
        ]
        a, b = (go("segmentation", settings=settings, sizes=[48, 64]) for _ in range(2))
        assert metrics(a) == metrics(b)
        views = [row.details["view"]["window"] for row in a.rows]
        assert views == [32, 32, 48, 48]  # 32 * 64 / 48, on the grid
        assert a.rows[0].input == (32, 32)

    def test_depth(self, go):
        settings = [
            "depth.augment.enabled=true",
            "depth.augment.crop=[48, 64]",
            "depth.optimizer.iterations=4",
        ]
        a, b = (go("depth", settings=settings) for _ in range(2))
        assert metrics(a) == metrics(b)


class TestVerify:
    @pytest.mark.parametrize("task", SETS)
    def test_other_code_agrees(self, go, task):
        pytest.importorskip("sklearn", reason="needs the extra probe")
        settings = ["logreg.max_iterations=500", "logreg.tolerance=1e-7"]
        run = go(task, settings=settings, verify=True)
        for row in run.rows:
            found = row.details["verified"]
            if task == "segmentation":
                assert found["equal_matrix"] and found["miou"] == row.metrics["miou"]
            elif task == "knn":
                assert found["k3"]["equal_predictions"] == 1.0
                assert found["k3"]["top1"] == row.metrics["top1"]
            elif task == "depth":
                for name in ("rmse", "abs_rel"):
                    assert found[name] == pytest.approx(row.metrics[name], rel=1e-9)
            else:
                assert found["equal_predictions"] == 1.0

    def test_random_crops_cannot_be_compared_and_it_says_so(self, go):
        run = go("linear", settings=TestRandomViews.LINEAR, verify=True)
        assert any(note.startswith("not verified") for note in run.notes)
        assert "verified" not in run.rows[0].details

    def test_without_scikit_learn(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
        with pytest.raises(MissingExtraError, match=r"\[probe\]"):
            require_sklearn()


class TestBadData:
    def test_a_mask_of_another_size(self, go):
        go("segmentation")
        sets.photo(go.root("segmentation") / "masks/test/1.png", np.zeros((9, 9), dtype=np.uint8))
        with pytest.raises(DatasetError, match="9 x 9"):
            go("segmentation")

    def test_a_label_outside_the_classes(self, go):
        go("segmentation")
        path = go.root("segmentation") / "masks/train/2.png"
        mask = np.array(Image.open(path))
        mask[5, 6] = 9
        sets.photo(path, mask)
        with pytest.raises(DatasetError, match="value 9"):
            go("segmentation")

    def test_a_missing_file(self, go):
        go("depth")
        (go.root("depth") / "depth/test/0.png").unlink()
        with pytest.raises(DatasetError, match=r"0\.png"):
            go("depth")

    def test_an_image_that_is_none(self, go):
        go("knn")
        path = go.root("knn") / "test/red/000.png"
        path.write_bytes(b"nothing of the sort")
        with pytest.raises(ImageError, match=r"test/red/000\.png"):
            go("knn")

    def empty(self, go, split):
        go("depth")
        path = go.root("depth") / f"depth/{split}/1.png"
        sets.photo(path, np.zeros(np.array(Image.open(path)).shape, dtype=np.uint16))

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_no_valid_depth_is_an_error_where_the_protocol_says_so(self, go, split):
        self.empty(go, split)
        with pytest.raises(DatasetError, match=rf"depth/{split}/1\.png"):
            go("depth", settings=["depth.empty_depth=error"])

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_no_valid_depth_is_skipped_and_counted_where_it_says_so(self, go, split):
        self.empty(go, split)
        run = go("depth", settings=["depth.empty_depth=skip"])
        assert any("without valid depth left out" in note for note in run.notes)
        assert run.rows[0].details["scored"] == (4 if split == "train" else 3)

    def test_depth_beyond_the_bins(self, go):
        with pytest.raises(ProbeError, match=r"depth\.max_depth"):
            go("depth", settings=["depth.max_depth=5.0"])

    def test_everything_ignored(self, go):
        go("segmentation")
        for path in (go.root("segmentation") / "masks/test").iterdir():
            sets.photo(path, np.full(np.array(Image.open(path)).shape, 255, dtype=np.uint8))
        with pytest.raises(ProbeError, match="ignored"):
            go("segmentation")


class TestSettings:
    def test_the_k_that_is_reported_must_exist(self, go):
        with pytest.raises(ProbeError, match="k = 50"):
            go("knn", settings=["knn.k=[50]", "knn.report_k=50"])
        run = go("knn", settings=["knn.k=[3,50]"])
        assert "top1_k50" not in run.rows[0].metrics
        assert any("k = 50 left out" in note for note in run.notes)

    def test_one_teacher(self, go):
        two = [TeacherBackbone(teacher(16)), TeacherBackbone(teacher(8))]
        with pytest.raises(ProbeError, match="retention"):
            go("knn", two)

    def test_nothing_to_probe(self, tmp_path):
        with pytest.raises(ProbeError, match="backbone"):
            run_probe("knn", [], dataset="folder", data=tmp_path)

    def test_an_unknown_task(self, tmp_path):
        with pytest.raises(ProbeError, match="'knn'"):
            run_probe("kn", [sets.backbone()], dataset="folder", data=tmp_path)

    def test_a_size_off_the_grid(self, go):
        with pytest.raises(ProbeError, match="size 40"):
            go("knn", sizes=[40])


class TestRecord:
    def test_round_trip(self, go, tmp_path):
        run = go("knn")
        write_run(run, tmp_path / "out")
        assert read_run(tmp_path / "out") == run
        assert read_run(tmp_path / "out").subject() == run.subject()

    def test_what_is_planned_is_what_is_run(self, go):
        rows = sets.backbone().at([2, 8])
        planned = planned_subject(
            "knn", rows, dataset="plain", protocol=sets.protocol(), sizes=[48]
        )
        assert planned == go("knn", rows, sizes=[48]).subject()

    def test_other_results_are_not_replaced(self, go, tmp_path):
        run = go("knn")
        write_run(run, tmp_path / "out")
        check_out(tmp_path / "out", run.subject())
        other = {**run.subject(), "dataset": "food101"}
        with pytest.raises(ProbeError, match="--overwrite"):
            check_out(tmp_path / "out", other)
        check_out(tmp_path / "out", other, overwrite=True)
        check_out(tmp_path / "nowhere", other)

    @pytest.mark.parametrize(
        ("content", "noun"),
        [
            ("{", "JSON"),
            ("[]", "got list"),
            ('{"format": "veca-probe", "format_version": 99}', "version 99"),
            ('{"format": "veca-probe", "format_version": 1}', "'task'"),
        ],
    )
    def test_bad_records(self, tmp_path, content, noun):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(ProbeError, match=r"results\.json") as caught:
            read_run(tmp_path)
        assert noun in str(caught.value).replace(str(tmp_path), ""), "its name holds the case's"

    def test_no_paths_of_this_machine(self, go, tmp_path):
        text = json.dumps(go("knn").to_dict())
        assert str(tmp_path) not in text

    def test_rows_are_plain(self, go):
        row = go("knn").rows[0]
        assert dataclasses.asdict(row)["metrics"] == row.metrics
