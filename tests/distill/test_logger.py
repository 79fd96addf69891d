"""What a run writes and shows."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
import time

import pytest
import torch
from rich.console import Console

from veca.distill import DistillError, DivergedError, read_metrics
from veca.distill.logger import RunLogger, StepMeter, code_version, write_run
from veca.distill.parallel import World
from veca.distill.schedule import StepPlan
from veca.errors import MissingExtraError, OutputError


def step(number: int) -> StepPlan:
    return StepPlan(number, 32, 4, (8,), 1e-3)


def record(number: int, loss: float = 1.0) -> dict:
    return {"kind": "train", "step": number, "loss": loss, "cores": [8], "size": 32, "batch": 4}


def test_meter_keeps_every_step() -> None:
    meter = StepMeter(["loss", "cls", "kl", "grad_norm"], World())
    for i in range(3):
        meter.add(step(i), torch.tensor([float(i), 0.5, 0.0]), torch.tensor(2.0))
    records = meter.flush()
    assert [r["step"] for r in records] == [1, 2, 3]
    assert [r["loss"] for r in records] == [0.0, 1.0, 2.0]
    assert records[0]["cores"] == [8] and records[0]["grad_norm"] == 2.0
    assert "kl" not in records[0]  # not asked for
    assert meter.flush() == []


def test_steps_without_budgets_speak_of_none(tmp_path, capsys) -> None:
    meter = StepMeter(["loss", "grad_norm"], World(), elastic=False)
    meter.add(step(0), torch.tensor([1.0]), torch.tensor(1.0))
    records = meter.flush()
    assert records[0]["cores"] == []
    log = RunLogger(tmp_path, steps=1, console=Console(), tensorboard=False)
    log.train(records, rate=1.0, waited=0.0)
    log.close()
    assert "loss 1.0000  32 px" in capsys.readouterr().out
    meter.add(step(1), torch.tensor([math.nan]), torch.tensor(1.0))
    with pytest.raises(DivergedError, match="step 2"):
        meter.flush()


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_meter_names_the_step_that_diverged(where: str) -> None:
    meter = StepMeter(["loss", "grad_norm"], World())
    for i in range(3):
        bad = math.nan if i == 1 else 1.0
        loss, norm = (bad, 1.0) if where == "loss" else (1.0, bad)
        meter.add(step(i), torch.tensor([loss]), torch.tensor(norm))
    with pytest.raises(DivergedError, match=f"{where}.*step 2") as caught:
        meter.flush()
    assert [r["step"] for r in caught.value.records] == [1]


def test_a_resumed_run_drops_the_steps_that_come_again(tmp_path) -> None:
    with_steps = RunLogger(tmp_path, steps=9, tensorboard=False)
    with_steps.train([record(i) for i in range(1, 8)], rate=1.0, waited=0.0)
    with_steps.skipped("a.jpg", "broken")
    with_steps.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # a kill in the middle of a line
    RunLogger(tmp_path, steps=9, start=4, tensorboard=False).close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert [r["name"] for r in read_metrics(tmp_path, "skipped")] == ["a.jpg"]
    RunLogger(tmp_path, steps=9, tensorboard=False).close()
    assert read_metrics(tmp_path) == []


def test_other_ranks_write_nothing(tmp_path) -> None:
    log = RunLogger(tmp_path / "x", steps=3, active=False)
    log.train([record(1)], rate=1.0, waited=0.0)
    log.validation({"step": 1, "loss": 1.0, "grid": []})
    log.skipped("a", "b")
    log.close()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_line_says_what_matters(tmp_path, terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=160)
    log = RunLogger(tmp_path, steps=100, console=console, tensorboard=False)
    log.train([record(5, loss=0.25)], rate=2.0, waited=0.125)
    log.validation(
        {
            "step": 5,
            "loss": 0.5,
            "grid": [
                {"size": 32, "cores": 8, "cls_cos": 0.75, "cls_mse": 0.1, "dense_cos": 0.5,
                 "dense_mse": 0.1, "loss": 0.5}
            ],
        }
    )  # fmt: skip
    log.close()
    shown = text.getvalue()
    for words in ("5/100", "loss 0.2500", "C=8", "32 px", "2 images/s", "3:10 left", "cls 0.750"):
        assert words in shown
    last = read_metrics(tmp_path)[-1]
    assert last["images_per_second"] == 2.0 and last["data_wait"] == 0.125


def test_tensorboard_where_it_is_installed(tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is an extra")
    log = RunLogger(tmp_path, steps=3)
    log.train([record(1)], rate=1.0, waited=0.0)
    log.close()
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_wandb_is_asked_for_by_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match="wandb"):
        RunLogger(tmp_path, steps=3, wandb="project")
    assert list(tmp_path.iterdir()) == []

    class Fake:
        logged: list = []  # noqa: RUF012

        @classmethod
        def init(cls, **options):
            cls.options = options
            return cls

        @classmethod
        def log(cls, numbers, step):
            cls.logged.append((step, numbers))

        @classmethod
        def finish(cls):
            cls.logged.append("finished")

    monkeypatch.setitem(sys.modules, "wandb", Fake)
    log = RunLogger(tmp_path, steps=3, wandb="project", config={"seed": 1})
    log.train([record(1, loss=0.5)], rate=1.0, waited=0.0)
    log.close()
    assert Fake.options["project"] == "project" and Fake.options["config"] == {"seed": 1}
    assert Fake.logged[0][0] == 1 and Fake.logged[0][1]["train/loss"] == 0.5
    assert Fake.logged[-1] == "finished"


def test_run_json_remembers_each_start(tmp_path) -> None:
    write_run(tmp_path, {"config": 1}, {"from_step": 0})
    write_run(tmp_path, {"config": 1}, {"from_step": 5})
    about = json.loads((tmp_path / "run.json").read_text())
    assert [entry["from_step"] for entry in about["launches"]] == [0, 5]
    write_run(tmp_path, {"config": 2}, {"from_step": 0})
    assert len(json.loads((tmp_path / "run.json").read_text())["launches"]) == 1


def test_code_version_names_the_source() -> None:
    assert code_version() == code_version()
    assert len(code_version().split("+")[1]) == 12


def test_no_run_no_metrics(tmp_path) -> None:
    with pytest.raises(DistillError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path / "none")


def test_a_run_that_starts_anew_starts_an_empty_file(tmp_path) -> None:
    old = [{"kind": "skipped", "name": "x.jpg", "reason": "bad"}, {"kind": "train", "step": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in old))
    RunLogger(tmp_path, steps=4, tensorboard=False).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def entry(step: int) -> dict:
    return {"kind": "train", "step": step, "loss": 1.0, "cores": [4], "size": 32, "batch": 4,
            "lr": 1e-3}  # fmt: skip


def test_a_folder_that_is_deleted_under_the_logger(tmp_path) -> None:
    log = RunLogger(tmp_path / "run", steps=100, tensorboard=False)
    log.train([entry(1)], rate=1.0, waited=0.0)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(OutputError, match="metrics"):
        log.train([entry(2)], rate=1.0, waited=0.0)
    log.close()


def test_a_folder_that_is_deleted_under_tensorboard(tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `train` is not installed")
    log = RunLogger(tmp_path / "run", steps=100)
    log.train([entry(1)], rate=1.0, waited=0.0)
    log._board.flush()
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    with pytest.raises(OutputError, match="tensorboard"):
        for step in range(2, 40):  # a thread writes, and meets it a little later
            log.train([entry(step)], rate=1.0, waited=0.0)
            time.sleep(0.01)
        log.close()
    log.close()


def test_damaged_lines_are_passed_over(tmp_path) -> None:
    log = RunLogger(tmp_path, steps=2, console=Console(file=io.StringIO()), tensorboard=False)
    log.train([record(1), record(2)], rate=1.0, waited=0.0)
    log.close()
    path = tmp_path / "metrics.jsonl"
    odd = [b"\xff\xfe", b"[" * 100_000, b'{"kind": "train", "step": "x"}', b'{"step": null}', b"3"]
    path.write_bytes(b"\n".join([*odd, path.read_bytes()]))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
    log = RunLogger(
        tmp_path, steps=2, start=1, console=Console(file=io.StringIO()), tensorboard=False
    )
    log.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]
