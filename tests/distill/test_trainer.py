"""Several students in one run: each learns what it would have learnt alone."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

import veca
from distill.small import DENSE, TABLE, curve, run, settings
from veca.dense import DenseVit
from veca.distill import DistillError, distill, export_checkpoint, load_targets, read_metrics
from veca.distill.dry_run import dry_run
from veca.distill.samples import FilterBank
from veca.distill.trainer import MAIN, section_name, sections_of
from veca.teachers import CallableTeacher, read_dense_vit
from veca.weights import read_provenance

SMALLER = {"preset": "tiny", "config": {"depth": 1, "width": 32, "heads": 2, "num_cores": 8}}
BOTH = {"smaller": SMALLER, "dense": DENSE}
VALIDATED = {"data": {"hold_out": 5}, "validation": {"every": 3, "budgets": [2, 8], "batch": 3}}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    out = tmp_path_factory.mktemp("family") / "run"
    return out, run(out, siblings=BOTH, checkpoint={"every": 3}, **VALIDATED)


@pytest.mark.parametrize("which", ["", "smaller", "dense"])
def test_each_learns_what_it_would_alone(family, tmp_path, which) -> None:
    out, records = family
    student = {"smaller": SMALLER, "dense": DENSE}.get(which, TABLE["student"])
    table = {**TABLE, "student": student, **VALIDATED}
    table["data"] = {**TABLE["data"], **VALIDATED["data"]}
    alone = distill(veca.distill.DistillConfig.from_dict(table), tmp_path / "alone")
    prefix = f"{which}:" if which else ""
    together = [(r["step"], r[f"{prefix}loss"], r[f"{prefix}grad_norm"]) for r in records]
    assert together == curve(read_metrics(tmp_path / "alone"))
    folder = out / "siblings" / which if which else out / "final"
    if which == "dense":
        mine, theirs = (read_dense_vit(path)[0] for path in (folder, alone.final))
    else:
        mine, theirs = veca.load(folder), veca.load(alone.final)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, mine.state_dict()[name]), name


def test_what_is_said_of_dense_students_names_no_budget(tmp_path, capsys) -> None:
    both = settings(siblings={"dense": DENSE}, **VALIDATED)
    distill(both, tmp_path / "both", console=Console(width=500))
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("step 6: valid"))
    assert "32 px C=8: cls" in line and "dense 32 px: cls" in line
    distill(settings(student=DENSE, **VALIDATED), tmp_path / "alone", console=Console(width=500))
    said = capsys.readouterr().out
    assert "step 6: validation loss" in said and "C=" not in said and "budget" not in said


def test_validated_as_it_would_be_alone_on_the_same_passes_of_the_teacher(tmp_path) -> None:
    bank, asked = FilterBank(), []

    def say(images):
        asked.append(tuple(images.shape))
        return bank(images)

    passes, grids = [], []
    for name, siblings in (("alone", {}), ("family", BOTH)):
        asked.clear()
        teacher = CallableTeacher(say, width=bank.WIDTH, stride=bank.STRIDE, name="filters")
        distill(settings(siblings=siblings, **VALIDATED), tmp_path / name, teachers=[teacher])
        passes.append(list(asked))
        records = read_metrics(tmp_path / name, "validation")
        grids.append([row for r in records for row in r["grid"] if "student" not in row])
    assert passes[0] == passes[1] and grids[0] == grids[1]
    assert len(grids[0]) == 2 * 2  # validations x budgets
    named = [row["student"] for r in records for row in r["grid"] if "student" in row]
    assert named == ["smaller", "smaller", "dense"] * 2


def test_a_sibling_at_another_learning_rate(tmp_path) -> None:
    """Twice the scale is twice the rate of a run of its own; everything else is shared."""
    twin = {**TABLE["student"], "lr_scale": 2.0}
    records = run(tmp_path / "both", siblings={"twin": twin})
    lr, least = (TABLE["optimizer"][name] for name in ("lr", "lr_min"))
    alone = run(tmp_path / "alone", optimizer={"lr": 2 * lr, "lr_min": 2 * least})
    assert [(r["step"], r["twin:loss"], r["twin:grad_norm"]) for r in records] == curve(alone)
    assert curve(records) != curve(alone)
    assert read_provenance(tmp_path / "both" / "siblings" / "twin")["lr_scales"] == [2.0, 2.0]
    assert read_provenance(tmp_path / "both" / "final")["lr_scales"] == [1.0, 1.0]
    with pytest.raises(DistillError, match=r"siblings\.twin\.lr_scale"):
        settings(siblings={"twin": {**twin, "lr_scale": -1.0}})


def test_what_it_leaves(family) -> None:
    out, _ = family
    dense, provenance = read_dense_vit(out / "siblings" / "dense")
    assert isinstance(dense, DenseVit) and provenance["steps"] == 6
    smaller = out / "siblings" / "smaller"
    assert veca.load(smaller).config.depth == 1
    assert read_provenance(smaller)["teacher"]["name"] == "filters"
    assert load_targets(smaller).keys() == load_targets(out / "final").keys()
    (record, *_) = read_metrics(out, "validation")
    cells = [(row.get("student", ""), row["cores"]) for row in record["grid"]]
    assert cells == [("", 2), ("", 8), ("smaller", 2), ("smaller", 8), ("dense", 8)]


def test_a_checkpoint_holds_them_all(family, tmp_path) -> None:
    out, _ = family
    whole = veca.load(out / "siblings" / "smaller").state_dict()
    export_checkpoint(out, tmp_path / "x", which="last", student="smaller")
    assert all(torch.equal(t, whole[n]) for n, t in veca.load(tmp_path / "x").state_dict().items())
    with pytest.raises(DistillError, match=r"'smalle'.*'smaller'"):
        export_checkpoint(out, tmp_path / "y", which="last", student="smalle")


def test_goes_on_exactly(family, tmp_path) -> None:
    _, records = family
    settings_ = {"siblings": BOTH, "checkpoint": {"every": 3}, **VALIDATED}
    out = tmp_path / "run"
    first = settings(**settings_).replace(max_minutes=1e-9)
    assert distill(first, out).step < 6
    assert curve(run(out, resume=True, **settings_)) == curve(records)
    with pytest.raises(DistillError, match="siblings"):
        run(out, resume=True, **{**settings_, "siblings": {"smaller": SMALLER}})
    other = {**SMALLER, "config": {**SMALLER["config"], "depth": 2}}
    with pytest.raises(DistillError, match="depth"):
        run(out, resume=True, **{**settings_, "siblings": {**BOTH, "smaller": other}})


def test_a_dense_student_starts_from_a_dense_one(family, tmp_path) -> None:
    out, _ = family
    dense = {"init": str(out / "siblings" / "dense"), "dense": True, "preset": "", "config": {}}
    run(tmp_path / "run", student=dense, schedule={"steps": 1, "warmup": 0})
    _, provenance = read_dense_vit(tmp_path / "run" / "final")
    assert provenance["init"]["provenance"]["steps"] == 6


@pytest.mark.parametrize(
    ("siblings", "noun"),
    [
        ({"a/b": SMALLER}, "'a/b'"),
        ({"x": {**SMALLER, "config": {**SMALLER["config"], "patch_size": 8}}}, "patches of 8"),
        ({"x": {**SMALLER, "config": {**SMALLER["config"], "num_cores": 4}}}, "4 cores"),
        ({"x": {**DENSE, "gradient_checkpointing": True}}, "gradient_checkpointing"),
    ],
)
def test_what_is_refused(siblings, noun, tmp_path) -> None:
    with pytest.raises(DistillError, match=noun):
        run(tmp_path / "run", siblings=siblings)


def test_a_dry_run_counts_them_all() -> None:
    one, three = dry_run(settings()), dry_run(settings(siblings=BOTH))
    assert three.memory.weights > 2 * one.memory.weights
    assert any("sibling dense: 2 layers, width 32, full attention" in x for x in three.lines)


def test_budgets_are_told_where_a_student_has_one() -> None:
    for student, told in ((TABLE["student"], True), (DENSE, False)):
        lines = dry_run(settings(student=student)).lines
        assert any(line.startswith("budgets: ") for line in lines) is told


def test_sections_by_student() -> None:
    sections = {"student": {}, "targets": {}, "a:student": {"x": torch.ones(1)}}
    assert set(sections_of(sections, MAIN)) == {"student", "targets"}
    assert set(sections_of(sections, "a")) == {"student", "targets"}
    assert section_name("a", "student") == "a:student" and section_name(MAIN, "ema") == "ema"
