"""Whole runs, each a second or so: what they leave, how they stop and go on, what they refuse."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

import veca
from distill.small import TABLE, curve, run, settings
from veca.data import (
    Augmentation,
    AugmentConfig,
    DataError,
    sample_keys,
)
from veca.distill import (
    DistillError,
    DivergedError,
    distill,
    export_checkpoint,
    load_heads,
    load_targets,
    read_metrics,
)
from veca.distill import step as steps
from veca.distill.checkpoint import CheckpointStore
from veca.distill.data import open_data
from veca.distill.loop import TrainingRun
from veca.distill.parallel import World
from veca.distill.samples import filter_teacher
from veca.distill.schedule import BudgetSampler, Phase, SizeSchedule, TrainingPlan
from veca.distill.validate import mean_loss
from veca.errors import ConfigError, OutputError
from veca.teachers import CallableTeacher, TeacherError, read_dense_vit
from veca.weights import read_provenance


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that went through, with validation and checkpoints: what others compare with."""
    out = tmp_path_factory.mktemp("finished") / "run"
    changes = {
        "data": {"hold_out": 7},
        "validation": {"every": 4, "budgets": [1, 8], "batch": 3},
        "checkpoint": {"every": 2, "milestones": [2]},
        "schedule": {"steps": 8},
    }
    records = run(out, **changes)
    return out, changes, records


# ------------------------------------------------------------------------------ what it leaves


def test_a_student_that_loads_and_says_where_it_comes_from(finished) -> None:
    out, _, _ = finished
    model = veca.load(out / "final")
    assert model.config.num_cores == 8 and model.config.feature_width == 60
    about = read_provenance(out / "final")
    assert about["teacher"]["name"] == "filters" and about["teacher"]["licence"] == "Apache-2.0"
    assert about["data"]["images"] == 17 and "7 of 24" in about["data"]["validation"]
    assert (about["steps"], about["samples"], about["complete"]) == (8, 32, True)
    assert about["budgets"] == [1, 2, 3, 4, 5, 6, 7, 8] and about["seed"] == 0
    assert about["code"].startswith(veca.__version__)


@pytest.mark.slow
def test_training_can_go_on_from_before_the_cool_down(tmp_path) -> None:
    changes = {"schedule": {"steps": 8, "warmup": 1, "cooldown": 3}, "checkpoint": {"every": 4}}
    records = run(tmp_path / "run", **changes)
    rates = [record["lr"] for record in records]
    assert rates[1:6] == [2e-3] * 5 and rates[5] > rates[6] > rates[7]
    assert CheckpointStore(tmp_path / "run").steps() == [5, 8]
    with pytest.raises(DistillError, match="which=5"):
        run(tmp_path / "run", resume=True, **{**changes, "schedule": {"steps": 16, "cooldown": 3}})
    assert CheckpointStore(tmp_path / "run").steps() == [5, 8]
    trunk = export_checkpoint(tmp_path / "run", tmp_path / "trunk", which=5)
    student = {**TABLE["student"], "init": str(trunk), "config": {}}
    onward = run(tmp_path / "on", student=student, schedule={"steps": 2, "warmup": 0}, seed=1)
    assert onward[0]["lr"] == 2e-3
    assert onward[0]["loss"] < records[0]["loss"]


def test_metrics_run_and_config(finished) -> None:
    out, _, records = finished
    assert [r["step"] for r in records] == list(range(1, 9))
    assert all(r["size"] == 32 and r["batch"] == 4 for r in records)
    assert len({tuple(r["cores"]) for r in records}) > 1
    assert "images_per_second" in records[-1] and "data_wait" in records[-1]
    about = json.loads((out / "run.json").read_text())
    assert about["config"] == settings(**finished[1]).to_dict()
    assert about["provenance"]["data"]["fingerprint"] and about["versions"]["torch"]
    assert veca.distill.load_config(out / "config.toml") == settings(**finished[1])


def test_the_end_says_how_fast_it_was(finished) -> None:
    (end,) = read_metrics(finished[0], "end")[:1]
    assert (end["step"], end["samples"], end["stopped"]) == (8, 32, "done")
    assert end["images_per_second"] > 0 and 0 <= end["data_wait"] <= 1


def test_changed_settings_are_named_on_resuming(finished, tmp_path) -> None:
    text = io.StringIO()
    console = Console(file=text, width=200)
    shutil.copytree(finished[0], tmp_path / "run")
    changes = {**finished[1], "schedule": {"steps": 9}, "optimizer": {"clip": 5.0}}
    distill(settings(**changes), tmp_path / "run", resume=True, console=console)
    assert "optimizer.clip 0.0 -> 5.0, schedule.steps 8 -> 9" in text.getvalue()
    assert read_metrics(tmp_path / "run")[-1]["step"] == 9


def test_checkpoints_kept(finished) -> None:
    store = CheckpointStore(finished[0])
    best = min(read_metrics(finished[0], "validation"), key=lambda r: r["loss"])["step"]
    assert store.best_step() == best
    assert store.steps() == sorted({2, best, 8})


def test_validation_is_what_the_exported_student_scores(finished) -> None:
    """The last validation, again by hand: held-out images, own preprocessing, plain formulas."""
    out, changes, _ = finished
    data = open_data(settings(**changes).data, World())
    held = data.validation_subset
    views = Augmentation(AugmentConfig(kind="none"))(
        data.source.images[held], sample_keys(0, 0, held), 32
    )
    teacher = filter_teacher()
    found = teacher.features(views.student, (2, 2))
    scale = load_targets(out / "final")["filters"]
    target_cls = (found.cls - scale.cls.mean) / scale.cls.std
    target = (found.patches - scale.dense.mean) / scale.dense.std
    model = veca.load(out / "final")
    mean, std = (
        torch.tensor(x).view(3, 1, 1) for x in (model.config.image_mean, model.config.image_std)
    )
    grid = read_metrics(out, "validation")[-1]["grid"]
    assert [row["cores"] for row in grid] == [1, 8]
    for row in grid:
        with torch.no_grad():
            said = model((views.student - mean) / std, cores=row["cores"])
        cos = nn.functional.cosine_similarity(said.cls, target_cls, dim=-1).mean()
        dense_cos = nn.functional.cosine_similarity(said.patches, target, dim=-1).mean()
        mse = (said.patches - target).square().mean()
        assert row["cls_cos"] == pytest.approx(float(cos), abs=1e-4)
        assert row["cls_mse"] == pytest.approx(
            float((said.cls - target_cls).square().mean()), abs=1e-4
        )
        assert row["dense_cos"] == pytest.approx(float(dense_cos), abs=1e-4)
        assert row["dense_mse"] == pytest.approx(float(mse), abs=1e-4)
        loss = (1 - cos) + (1 - dense_cos) + mse
        assert row["loss"] == pytest.approx(float(loss), abs=1e-4)


def test_held_out_images_are_never_trained_on(finished) -> None:
    data = open_data(settings(**finished[1]).data, World())
    assert not set(data.subset) & set(data.validation_subset)
    assert len(data.subset) + len(data.validation_subset) == 24


def test_a_checkpoint_becomes_weights(finished, tmp_path) -> None:
    export_checkpoint(finished[0], tmp_path / "last", which="last")
    a, b = veca.load(tmp_path / "last"), veca.load(finished[0] / "final")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    export_checkpoint(finished[0], tmp_path / "early", which=2)
    assert read_provenance(tmp_path / "early")["complete"] is False
    with pytest.raises(DistillError, match="77"):
        export_checkpoint(finished[0], tmp_path / "x", which=77)
    with pytest.raises(DistillError, match="no checkpoints"):
        export_checkpoint(tmp_path, tmp_path / "x")


# ---------------------------------------------------------------------------- stop and go on


def test_stopped_by_a_signal_it_goes_on_exactly(finished, tmp_path, monkeypatch, capfd) -> None:
    _, changes, whole = finished
    real = steps.training_step

    def step(group, step, batch):
        if step.number == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is before
        return real(group, step, batch)

    monkeypatch.setattr("veca.distill.loop.training_step", step)
    before = signal.getsignal(signal.SIGTERM)
    result = distill(settings(**changes), tmp_path / "run")
    assert (result.stopped, result.step) == ("signal", 4)
    said = capfd.readouterr().err
    assert said.count("asked to stop") == 1
    assert signal.getsignal(signal.SIGTERM) is before
    assert read_provenance(result.final)["complete"] is False
    monkeypatch.undo()
    again = run(tmp_path / "run", resume=True, **changes)
    assert curve(again) == curve(whole)
    launches = json.loads((tmp_path / "run" / "run.json").read_text())["launches"]
    assert [x["from_step"] for x in launches] == [0, 4]


@pytest.mark.slow
def test_time_is_up_again_and_again(finished, tmp_path) -> None:
    _, changes, whole = finished
    results = []
    while not results or results[-1].stopped != "done":
        config = settings(**changes, max_minutes=1e-9, ema=0.0)
        results.append(distill(config, tmp_path / "run", resume=True))
        assert len(results) < 9
    assert len(results) > 2 and {r.stopped for r in results[:-1]} == {"time"}
    assert curve(read_metrics(tmp_path / "run")) == curve(whole)
    a, b = veca.load(results[-1].final), veca.load(finished[0] / "final")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_finished_run_can_be_resumed_to_nothing(finished) -> None:
    result = distill(settings(**finished[1]), finished[0], resume=True)
    assert result.stopped == "done" and result.step == 8
    assert curve(read_metrics(finished[0])) == curve(finished[2])


def test_a_full_disk_in_the_middle_of_a_run(finished, tmp_path, monkeypatch) -> None:
    _, changes, whole = finished
    real = save_file

    def full(tensors, path, **more):
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, **more)

    monkeypatch.setattr("veca._util.tensor_file.save_file", full)
    with pytest.raises(OutputError, match="No space left"):
        distill(settings(**changes), tmp_path / "run")
    monkeypatch.undo()
    assert CheckpointStore(tmp_path / "run").steps() == [2]
    assert curve(run(tmp_path / "run", resume=True, **changes)) == curve(whole)


def test_a_diverged_run_says_where_and_keeps_the_last_good_checkpoint(finished, tmp_path) -> None:
    class Breaks(nn.Module):
        calls = 0

        def forward(self, images):
            self.calls += 1
            value = images.mean() * (float("nan") if self.calls > 5 else 1.0)
            return nn.functional.avg_pool2d(images, 16) * value

    teacher = CallableTeacher(Breaks(), width=3, stride=16, name="breaks")
    config = settings(teachers=[], checkpoint={"every": 2}, schedule={"steps": 8})
    with pytest.raises(DivergedError, match=r"step 6\b.*step 4\b"):
        distill(config, tmp_path / "run", teachers=[teacher])
    assert CheckpointStore(tmp_path / "run").steps() == [4]
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    teacher.fn.calls = -100
    result = distill(config, tmp_path / "run", teachers=[teacher], resume=True)
    assert result.stopped == "done" and result.step == 8


# ------------------------------------------------------------------------- the same, otherwise


def test_another_seed_is_another_run(tmp_path) -> None:
    assert curve(run(tmp_path / "a")) != curve(run(tmp_path / "b", seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_other_optimisers_learn_and_resume(tmp_path, name: str) -> None:
    changes = {"optimizer": {"name": name}, "checkpoint": {"every": 3}}
    whole = run(tmp_path / "a", **changes)
    assert whole[-1]["loss"] < whole[0]["loss"]
    run(tmp_path / "b", max_minutes=1e-9, **changes)
    assert curve(run(tmp_path / "b", resume=True, **changes)) == curve(whole)


def test_nothing_global_is_left_changed(tmp_path) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    run(tmp_path, schedule={"steps": 1, "warmup": 0})
    assert torch.equal(torch.rand(3), wanted)


# -------------------------------------------------------------------------------- averaged weights


def test_the_average_is_exported_and_resumed(tmp_path) -> None:
    changes = {"ema": 0.8, "checkpoint": {"every": 3}}
    result = distill(settings(**changes), tmp_path / "a")
    found = CheckpointStore(tmp_path / "a").load()
    model = veca.load(result.final)
    for name, p in model.named_parameters():
        assert torch.equal(p, found.sections["ema"][f"backbone.{name}"])
    assert not torch.equal(model.norm.weight, found.sections["student"]["backbone.norm.weight"])
    assert read_provenance(result.final)["averaged"] is True
    distill(settings(**changes, max_minutes=1e-9), tmp_path / "b")
    again = veca.load(distill(settings(**changes), tmp_path / "b", resume=True).final)
    assert all(
        torch.equal(x, y) for x, y in zip(again.parameters(), model.parameters(), strict=True)
    )


# ---------------------------------------------------------------------- stages, teachers, images


def test_second_stage_goes_on_from_the_first(finished, tmp_path) -> None:
    first = finished[0] / "final"
    config = settings(
        student={"preset": "", "config": {}, "init": str(first)},
        schedule={
            "size": 0,
            "steps": 6,
            "phases": [{"until": 2, "draw": {"32": 1.0}}, {"draw": {"32": 0.5, "64": 0.5}}],
            "batch_by_size": {"64": 2},
        },
        data={"hold_out": 7},
    )
    result = distill(config, tmp_path)
    records = read_metrics(tmp_path)
    assert {r["size"] for r in records[:2]} == {32} and {r["size"] for r in records} == {32, 64}
    assert all(r["batch"] == (2 if r["size"] == 64 else 4) for r in records)
    about = read_provenance(result.final)
    assert about["samples"] == sum(r["batch"] for r in records)
    assert about["init"]["provenance"]["teacher"]["name"] == "filters"
    # It learns the very same targets, not newly estimated ones.
    old, new = (load_targets(p)["filters"] for p in (first, result.final))
    assert torch.equal(old.dense.mean, new.dense.mean) and torch.equal(old.cls.std, new.cls.std)
    grid = read_metrics(tmp_path, "validation")[-1]["grid"]
    assert {(row["size"], row["cores"]) for row in grid} == {
        (size, cores) for size in (32, 64) for cores in (1, 5, 8)
    }


class Colours(nn.Module):
    """A patch's mean colour, with a classifier that looks at it."""

    def forward(self, images):
        return nn.functional.avg_pool2d(images, 16)


class Classifying(CallableTeacher):
    def classify(self, cls):
        return cls @ torch.tensor([[1.0, -1.0], [0.0, 2.0], [1.0, 1.0]])


@pytest.mark.parametrize("dense", [False, True])
def test_stored_weights_without_the_augmentation_of_coordinates(tmp_path, dense) -> None:
    """What matters in training alone can be changed, and is what the next weights say."""
    first = run_final(tmp_path / "1", dense)
    still = {"rope_rescale": 1.0, "rope_shift": 0.0}
    base = {"preset": "", "init": str(first), "dense": dense}
    again = settings(student={**base, "config": still}, schedule={"steps": 1, "warmup": 0})
    final = distill(again, tmp_path / "2").final
    config = read_dense_vit(final)[0].config if dense else veca.load(final).config
    assert (config.rope_rescale, config.rope_shift) == (1.0, 0.0)
    with pytest.raises(DistillError, match="depth"):
        distill(settings(student={**base, "config": {"depth": 3}}), tmp_path / "3")


def run_final(out, dense):
    run(out, student={**TABLE["student"], "dense": dense}, schedule={"steps": 1, "warmup": 0})
    return out / "final"


def test_several_teachers(tmp_path) -> None:
    teachers = [
        filter_teacher(),
        CallableTeacher(Colours(), width=3, stride=16, name="colours"),
        CallableTeacher(
            lambda x: (x.mean((2, 3)), nn.functional.max_pool2d(x, 8).unfold(2, 2, 2).amax(-1)
                       .unfold(3, 2, 2).amax(-1).repeat(1, 2, 1, 1)),
            width=3, dense_width=6, stride=16, name="both",
        ),
    ]  # fmt: skip
    config = settings(
        teachers=[
            {"name": "filters", "standardise": True, "standardise_images": 16},
            {"name": "colours", "weight": 0.5},
            {"name": "both", "weight": 2.0, "standardise": True, "standardise_images": 16},
        ],
        data={"hold_out": 5},
    )
    result = distill(config, tmp_path, teachers=teachers)
    last = read_metrics(tmp_path)[-1]
    total = 0.0
    for name, weight in (("filters", 1.0), ("colours", 0.5), ("both", 2.0)):
        total += weight * sum(last[f"{part}/{name}"] for part in ("cls", "dense_cos", "dense_mse"))
    assert last["loss"] == pytest.approx(total, abs=1e-5)
    assert veca.load(result.final).config.feature_width == 60
    heads = load_heads(result.final)
    assert sorted(heads) == ["both", "colours"]
    assert heads["both"].dense.out_features == 6
    assert sorted(load_targets(result.final)) == ["both", "filters"]
    grid = read_metrics(tmp_path, "validation")[-1]["grid"]
    assert {row["teacher"] for row in grid} == {"filters", "colours", "both"}
    # And a second stage takes the heads along.
    again = settings(
        student={"preset": "", "config": {}, "init": str(result.final)},
        teachers=[{"name": "filters"}, {"name": "colours"}, {"name": "both"}],
        optimizer={"lr": 0.0, "lr_min": 0.0},
        schedule={"steps": 1, "warmup": 0},
    )
    final = distill(again, tmp_path / "2", teachers=teachers).final
    assert torch.equal(load_heads(final)["colours"].cls.weight, heads["colours"].cls.weight)


def test_the_teachers_classifier_judges_both(tmp_path) -> None:
    teacher = Classifying(Colours(), width=3, stride=16, name="colours")
    table = {"name": "colours", "standardise": True, "standardise_images": 16, "kl": 0.3}
    distill(settings(teachers=[table]), tmp_path, teachers=[teacher])
    last = read_metrics(tmp_path)[-1]
    assert last["kl"] > 0
    parts = last["cls"] + last["dense_cos"] + last["dense_mse"] + 0.3 * last["kl"]
    assert last["loss"] == pytest.approx(parts, abs=1e-5)


def test_validation_asks_the_teachers_classifier_too(tmp_path) -> None:
    """`kl` and `agree`, again by hand from the exported student; without kl neither is there."""
    teacher = Classifying(Colours(), width=3, stride=16, name="colours")
    table = {"name": "colours", "standardise": True, "standardise_images": 16, "kl": 0.3}
    config = settings(teachers=[table], data={"hold_out": 6})
    result = distill(config, tmp_path, teachers=[teacher])
    data = open_data(config.data, World())
    held = data.validation_subset
    views = Augmentation(AugmentConfig(kind="none"))(
        data.source.images[held], sample_keys(0, 0, held), 32
    )
    theirs = teacher.classify(teacher.features(views.student, (2, 2)).cls).softmax(dim=-1)
    model = veca.load(result.final)
    mean, std = (
        torch.tensor(x).view(3, 1, 1) for x in (model.config.image_mean, model.config.image_std)
    )
    scale = load_targets(result.final)["colours"].cls
    rows = read_metrics(tmp_path, "validation")[-1]["grid"]
    for row in rows:
        with torch.no_grad():
            said = model((views.student - mean) / std, cores=row["cores"]).cls
        ours = teacher.classify(said * scale.std + scale.mean).softmax(dim=-1)
        kl = (theirs * (theirs / ours).log()).sum(dim=-1).mean()
        agree = (theirs.argmax(dim=-1) == ours.argmax(dim=-1)).float().mean()
        assert row["kl"] == pytest.approx(float(kl), abs=1e-5)
        assert row["agree"] == pytest.approx(float(agree), abs=1e-6)
    assert len(rows) > 1


def test_a_scale_of_another_global_size_is_refused(tmp_path) -> None:
    def brightest(images):
        return nn.functional.max_pool2d(images, 16)

    def teacher():
        return CallableTeacher(brightest, width=3, stride=16, name="colours")

    table = {"name": "colours", "standardise": True, "standardise_images": 16}
    first = settings(teachers=[table], schedule={"steps": 2, "warmup": 0})
    result = distill(first, tmp_path / "1", teachers=[teacher()])
    assert read_provenance(result.final)["targets"]["colours"]["global_size"] == 0
    other = {**table, "global_size": 50}  # 48 is the nearest it takes
    student = {"preset": "", "config": {}, "init": str(result.final)}
    again = settings(teachers=[other], student=student)
    with pytest.raises(DistillError, match=r"global_size.*statistics"):
        distill(again, tmp_path / "2", teachers=[teacher()])
    plain = settings(teachers=[{**table, "standardise": False}], schedule={"steps": 4, "warmup": 0})
    with pytest.raises(DistillError, match="standardised"):
        distill(plain, tmp_path / "1", teachers=[teacher()], resume=True)
    longer = settings(teachers=[other], schedule={"steps": 4, "warmup": 0})
    with pytest.raises(DistillError, match=r"global_size.*--out"):
        distill(longer, tmp_path / "1", teachers=[teacher()], resume=True)
    given = {**other, "statistics": str(result.final)}
    distill(
        settings(teachers=[given], student=student, schedule={"steps": 1, "warmup": 0}),
        tmp_path / "3",
        teachers=[teacher()],
    )


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "kind", "noun"),
    [
        ({"data": {"source": ""}}, DistillError, r"data\.source"),
        ({"data": {"source": "no/such/folder"}}, DataError, "no/such/folder"),
        ({"data": {"source": "photos:many"}}, DistillError, "photos:many"),
        ({"data": {"hold_out": 24}}, DataError, "24 of 24"),
        ({"data": {"hold_out": 32}}, DataError, r"32 of 24.*--set data\.hold_out"),
        ({"teachers": []}, DistillError, "--teacher"),
        ({"teachers": [{"name": "dinov33-vitb16"}]}, TeacherError, "'dinov3-vitb16'"),
        ({"teachers": [{"name": "filters", "kl": 1.0}]}, DistillError, r"\bkl\b"),
        ({"teachers": [{"name": "filters", "dtype": "int8"}]}, DistillError, "'int8'"),
        ({"teachers": [{"name": "filters"}] * 2}, DistillError, "filters, filters"),
        ({"schedule": {"size": 40}}, DistillError, r"patch size.*\b40\b"),
        ({"nested": {"budgets": [4, 9]}}, DistillError, r"\[4, 9\]"),
        ({"device": "cuda:9"}, DistillError, "'cuda:9'"),
        ({"parallel": "ddp"}, DistillError, "torchrun"),
        ({"student": {"preset": "tinny"}}, ConfigError, "'tiny'"),
        (
            {"student": {"preset": "tiny", "config": {"output_width": 7}}},
            DistillError,
            "output_width",
        ),
        (
            {"validation": {"budgets": [99]}, "data": {"hold_out": 3}},
            DistillError,
            r"validation\.budgets",
        ),
        (
            {"schedule": {"steps": 0, "epochs": 1, "size": 0, "batch_by_size": {"48": 2},
                          "phases": [{"draw": {"32": 1, "48": 1}}]}},
            DistillError,
            "epochs",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_before_it_starts(tmp_path, changes, kind, noun) -> None:
    with pytest.raises(kind, match=noun):
        distill(settings(**changes), tmp_path / "runs" / "first")
    assert list(tmp_path.iterdir()) == []


def test_a_teacher_that_is_refused_is_said(tmp_path, monkeypatch) -> None:
    def gated(spec, **options):
        raise TeacherError(f"{spec} is gated; accept its licence on the hub and log in.")

    monkeypatch.setattr("veca.teachers.load_teacher", gated)
    with pytest.raises(TeacherError, match="gated"):
        distill(settings(teachers=[{"name": "dinov3-vitb16"}]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_size_that_no_teacher_can_see(tmp_path) -> None:
    teacher = CallableTeacher(Colours(), width=3, stride=16, name="t", sizes=[(48, 48)])
    with pytest.raises(TeacherError, match="grid of 2 x 2"):
        distill(settings(teachers=[]), tmp_path, teachers=[teacher])


def test_a_run_is_not_overwritten_by_accident(finished) -> None:
    with pytest.raises(DistillError, match="--resume"):
        distill(settings(**finished[1]), finished[0])


@pytest.mark.parametrize(
    ("changes", "kind", "noun"),
    [
        (
            {"student": {"config": {"depth": 3, "width": 32, "heads": 2, "num_cores": 8}}},
            DistillError,
            "depth",
        ),
        ({"optimizer": {"name": "adamw"}}, DistillError, "'normuon'"),
        ({"seed": 3}, DistillError, "seed"),
        ({"data": {"source": "photos:25", "hold_out": 7}}, DataError, "samples"),
    ],
)
def test_resuming_something_else_is_refused(finished, changes: dict, kind, noun: str) -> None:
    with pytest.raises(kind, match=noun):
        distill(settings(**{**finished[1], **changes}), finished[0], resume=True)


def test_a_place_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DistillError, match="file/run"):
        distill(settings(), tmp_path / "file" / "run")


def test_a_resumed_run_counts_on_and_remembers_its_best(tmp_path) -> None:
    changes = {"data": {"hold_out": 4}, "checkpoint": {"every": 2}}
    distill(settings(**changes, schedule={"steps": 4}), tmp_path)
    store = CheckpointStore(tmp_path)
    about = store.path(4) / "about.json"
    table = json.loads(about.read_text())
    assert table["best"] == read_metrics(tmp_path, "validation")[-1]["loss"]
    del table["sha256"]  # who edits one means it
    about.write_text(json.dumps({**table, "best": 0.0}))  # which nothing beats
    result = distill(settings(**changes, schedule={"steps": 6}), tmp_path, resume=True)
    assert (result.best, store.best_step(), store.steps()) == (0.0, 4, [4, 6])
    assert read_metrics(tmp_path, "end")[-1]["samples"] == 6 * 4
    assert read_provenance(result.final)["samples"] == 6 * 4


def test_a_checkpoint_is_also_due_after_some_minutes(tmp_path, monkeypatch) -> None:
    saved = []
    save = CheckpointStore.save

    def note(self, step, *rest, **more):
        saved.append(step)
        return save(self, step, *rest, **more)

    monkeypatch.setattr(CheckpointStore, "save", note)
    for minutes, wanted in ((1e-9, [3, 6]), (60.0, [6])):
        saved.clear()
        run(tmp_path / str(minutes), checkpoint={"every": 0, "minutes": minutes})
        assert saved == wanted


def test_before_the_cool_down_another_plan_is_welcome(tmp_path) -> None:
    changes = {"schedule": {"steps": 8, "warmup": 1, "cooldown": 3}}
    run(tmp_path, **changes)
    shutil.rmtree(CheckpointStore(tmp_path).path(8))  # as if it had been stopped at step 5
    records = run(tmp_path, resume=True, schedule={"steps": 12, "warmup": 1, "cooldown": 3})
    assert [r["lr"] for r in records[5:10]] == [2e-3] * 5 and records[-1]["step"] == 12


def test_the_validation_loss_is_a_mean_over_the_grid_of_sums_over_teachers() -> None:
    teachers = [
        SimpleNamespace(name=name, settings=SimpleNamespace(weight=weight))
        for name, weight in (("a", 1.0), ("b", 0.5))
    ]
    rows = [
        {"size": 32, "cores": cores, "teacher": name, "loss": loss}
        for cores, name, loss in ((1, "a", 3.0), (1, "b", 4.0), (8, "a", 1.0), (8, "b", 2.0))
    ]
    assert mean_loss(rows, teachers) == pytest.approx((5.0 + 2.0) / 2)


@pytest.mark.parametrize(
    ("ranks", "batch", "wanted"),
    [
        (1, 0, {32: 12, 64: 8, 128: 2}),  # 128 px: as many pixels as 8 of 64 px
        (4, 0, {32: 12, 64: 8, 128: 4}),
        (2, 3, {32: 2, 64: 2, 128: 2}),
    ],
)
def test_validation_batches_fit_memory_and_ranks(ranks: int, batch: int, wanted: dict) -> None:
    here = TrainingRun.__new__(TrainingRun)
    here.config = settings(validation={"sizes": [32, 64, 128], "batch": batch})
    sizes = SizeSchedule([Phase({32: 1.0, 64: 1.0})], 8, {32: 12})
    here.plan = TrainingPlan(sizes, BudgetSampler(8), steps=4, warmup=0, lr=1.0, lr_min=0.1)
    here.world = SimpleNamespace(size=ranks)
    architecture = SimpleNamespace(num_cores=8, patch_size=16)
    here.group = SimpleNamespace(
        main=SimpleNamespace(architecture=architecture), teacher_size=lambda size: (size, size)
    )
    here._check_sizes()
    assert here.validation_batches == wanted
