"""To follow a run: a live line, metrics.jsonl, run.json, TensorBoard, wandb."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import platform
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from torch import Tensor

import veca
from veca._util import files
from veca._util.extras import require
from veca._util.progress import Update, progress_bar
from veca.distill.parallel import World
from veca.distill.schedule import StepPlan
from veca.errors import DistillError, DivergedError

_BOARD = "tensorboard"
METRICS, RUN = "metrics.jsonl", "run.json"
_PLAIN_EVERY_S = 30.0
"""Seconds between lines where the output is no terminal."""


class StepMeter:
    """Keeps what each step measured on the device, and reads it back many steps at a time.

    Args:
        names: what is measured, in order.
        elastic: whether the steps' budgets mean anything to the students.
    """

    def __init__(self, names: Sequence[str], world: World, *, elastic: bool = True) -> None:
        self.names, self.world, self.elastic = list(names), world, elastic
        self._steps: list[StepPlan] = []
        self._terms: list[Tensor] = []

    def add(self, step: StepPlan, terms: Tensor, grad_norms: Tensor) -> None:
        """Note a step; nothing waits for the device."""
        self._steps.append(step)
        self._terms.append(torch.cat([terms, grad_norms.to(terms).reshape(-1)]))

    def flush(self) -> list[dict[str, Any]]:
        """One record a step since the last flush, the mean over all ranks. All ranks call it.

        Raises:
            DivergedError: a loss or a gradient is not finite; `records` holds the steps before.
        """
        if not self._steps:
            return []
        values = self.world.mean(torch.stack(self._terms)).tolist()
        records: list[dict[str, Any]] = []
        for step, row in zip(self._steps, values, strict=True):
            numbers = dict(zip(self.names, row, strict=True))
            bad = [name for name, value in numbers.items() if not math.isfinite(value)]
            budgets = step.budgets if self.elastic else ()
            merged = {"keep": step.keep} if self.elastic and step.keep < 1 else {}
            if bad:
                at = f"budget {'+'.join(map(str, budgets))}, " if budgets else ""
                at += f"keep {step.keep}, " if merged else ""
                error = DivergedError(
                    f"{_words(bad[0])} became {numbers[bad[0]]} at step {step.number + 1} "
                    f"({at}{step.size} px, learning rate {step.lr:.3g})"
                )
                error.records = records  # type: ignore[attr-defined]
                raise error
            unused = [n for n, v in numbers.items() if n.split(":")[-1][:2] == "kl" and not v]
            for name in unused:
                del numbers[name]
            records.append(
                {
                    "kind": "train",
                    "step": step.number + 1,
                    **numbers,
                    "cores": list(budgets),
                    **merged,
                    "size": step.size,
                    "batch": step.batch,
                    "lr": step.lr,
                }
            )
        self._steps, self._terms = [], []
        return records


def _words(term: str) -> str:
    student, _, name = term.rpartition(":")
    whose = f" of {student}" if student else ""
    return f"the gradient's length{whose}" if name == "grad_norm" else f"the loss ({name}){whose}"


class RunLogger:
    """Writes and shows what happens; on all ranks but the first it does nothing.

    Args:
        out: the run's folder.
        steps: of the whole run.
        start: steps that an earlier process did; records after them are dropped from the file,
            because those steps are about to be done again.
        console: where to show progress; None for nowhere.
    """

    def __init__(
        self,
        out: Path,
        *,
        steps: int,
        start: int = 0,
        active: bool = True,
        console: Console | None = None,
        tensorboard: bool = True,
        wandb: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.out, self.steps, self.active = out, steps, active
        self.console = console if active else None
        self._bar: Update | None = None
        self._closing = contextlib.ExitStack()
        self._said = 0.0
        self._board: Any = None
        self._wandb: Any = None
        self._file: Any = None
        if not active:
            return
        if wandb:  # first: it may not be installed, and nothing is written yet
            self._wandb = _start_wandb(wandb, out, config or {})
        _drop_after(out / METRICS, start)
        self._file = (out / METRICS).open("a", encoding="utf-8")
        if tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            with files.output_errors(out / _BOARD):
                self._board = SummaryWriter(str(out / _BOARD), purge_step=start + 1)
        if self.console is not None and self.console.is_terminal:
            bar = progress_bar("starting", self.console, counts=False)
            self._bar = self._closing.enter_context(bar)
            self._bar(start, steps)

    # ------------------------------------------------------------------------------- while it runs

    def train(self, records: Sequence[dict[str, Any]], *, rate: float, waited: float) -> None:
        """Some steps were done at `rate` images/s, `waited` (0..1) of the time waiting for data."""
        if not self.active or not records:
            return
        last = {**records[-1], "images_per_second": round(rate, 1), "data_wait": round(waited, 4)}
        self.write([*records[:-1], last])
        numbers = {name: v for name, v in last.items() if isinstance(v, (int, float))}
        for name in ("loss", "cls", "dense_cos", "dense_mse", "kl"):
            if name in numbers:
                numbers[name] = sum(r[name] for r in records) / len(records)
        self._report("train", numbers, last["step"])
        self._show(last, rate)

    def validation(self, record: dict[str, Any], *, dense: Collection[str] = ()) -> None:
        """A validation was done; `record` holds its grid, in which `dense` students' budgets
        mean nothing.
        """
        if not self.active:
            return
        self.write([{"kind": "validation", **record}])
        flat = {"loss": record["loss"]}
        for row in record["grid"]:
            label = f"{row['size']}/{row['cores']}"
            label += f"/keep {row['keep']}" if "keep" in row else ""
            label += "".join(f"/{row[key]}" for key in ("student", "teacher") if key in row)
            flat |= {f"{label}/{k}": v for k, v in row.items() if isinstance(v, float)}
        self._report("validation", flat, record["step"])
        cells = []
        for row in record["grid"]:
            who = row.get("student", "")
            words = [who] if who else []
            words += [f"{row['size']} px"] + ([] if who in dense else [f"C={row['cores']}"])
            words += [f"K={row['keep']}"] if "keep" in row else []
            cosines = f"cls {row['cls_cos']:.3f} dense {row['dense_cos']:.3f}"
            cells.append(f"{' '.join(words)}: {cosines}")
        shown = ", ".join(cells)
        self.say(f"step {record['step']}: validation loss {record['loss']:.4f} (cosines: {shown})")

    def skipped(self, name: str, reason: str) -> None:
        """An image could not be read."""
        if self.active:
            self.write([{"kind": "skipped", "name": name, "reason": reason}])
            self.say(f"skipped {name}: {reason}")

    def say(self, line: str) -> None:
        """One line for people."""
        if self.console is not None:
            self.console.print(files.printable(line), highlight=False, markup=False, soft_wrap=True)

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records to metrics.jsonl."""
        if self._file is None:
            return
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        with files.output_errors(self.out / METRICS):
            self._file.write(text)
            self._file.flush()
            (self.out / METRICS).stat()  # an open file outlives its folder: nobody would see it

    def close(self) -> None:
        board, wandb, file = self._board, self._wandb, self._file
        self._file = self._board = self._wandb = self._bar = None
        with contextlib.ExitStack() as closing:
            closing.enter_context(self._closing)
            if file is not None:
                closing.enter_context(contextlib.suppress(OSError))
                closing.callback(file.close)
            if wandb is not None:
                closing.callback(wandb.finish)
            if board is not None:
                with files.output_errors(self.out / _BOARD):
                    board.close()

    # ------------------------------------------------------------------------------------- inside

    def _report(self, kind: str, numbers: Mapping[str, float], step: int) -> None:
        if self._board is not None:
            # A thread of its own writes them, and what stopped it comes out here.
            with files.output_errors(self.out / _BOARD):
                for name, value in numbers.items():
                    if name != "step":
                        self._board.add_scalar(f"{kind}/{name}", value, step)
        if self._wandb is not None:
            named = {f"{kind}/{name}": v for name, v in numbers.items() if name != "step"}
            self._wandb.log(named, step=step)

    def _show(self, record: Mapping[str, Any], rate: float) -> None:
        left = (self.steps - record["step"]) * record["batch"] / rate if rate else math.inf
        cores = f"C={'+'.join(map(str, record['cores']))}  " if record["cores"] else ""
        keep = f"K={record['keep']}  " if "keep" in record else ""
        line = (
            f"step {record['step']}/{self.steps}  loss {record['loss']:.4f}  {cores}{keep}"
            f"{record['size']} px  {rate:,.0f} images/s  {_duration(left)} left"
        )
        if self._bar is not None:
            self._bar(record["step"], self.steps, line)
            return
        now = time.monotonic()
        if now - self._said >= _PLAIN_EVERY_S or record["step"] == self.steps:
            self._said = now
            self.say(line)


def read_metrics(out: str | os.PathLike[str], kind: str = "train") -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl: of kind "train", "validation" or "skipped"."""
    path = Path(out) / METRICS
    try:
        lines = _lines(path)
    except OSError as error:
        raise DistillError(f"cannot read {path} ({error.strerror}); is {out} a run?") from error
    records = [record for line in lines if (record := _parsed(line)) is not None]
    return [record for record in records if record.get("kind") == kind]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _parsed(line: str) -> dict[str, Any] | None:
    """A record; None for the half line that a kill may leave, or a damaged one."""
    try:
        record = files.from_json(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step", 0), int)
    return record if whole else None


def _drop_after(path: Path, step: int) -> None:
    """Keep the records up to a step, and those of no step unless the run starts anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    lines = _lines(path) if step else []
    kept = [x for x in lines if (r := _parsed(x)) is not None and r.get("step", 0) <= step]
    files.atomic_write_text(path, "".join(f"{line}\n" for line in kept))


def _start_wandb(project: str, out: Path, config: Mapping[str, Any]) -> Any:
    wandb = require("wandb", "follow.wandb")
    name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]
    return wandb.init(project=project, name=out.name, id=name, resume="allow", config=dict(config))


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


# ------------------------------------------------------------------------------------ run.json


@lru_cache(maxsize=1)
def code_version() -> str:
    """The version, and a hash of the package's own source: what really ran."""
    digest = hashlib.sha256()
    package = Path(veca.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return f"{veca.__version__}+{digest.hexdigest()[:12]}"


def versions() -> dict[str, str]:
    return {
        "veca": code_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def machine(world: World) -> dict[str, Any]:
    """What the run runs on, as far as it changes numbers or speed."""
    about: dict[str, Any] = {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(world.device),
        "processes": world.size,
        "parallel": world.kind,
    }
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        about["gpu"] = properties.name
        about["gpu_memory"] = properties.total_memory
        about["cuda"] = torch.version.cuda
    return about


def write_run(out: Path, about: Mapping[str, Any], launch: Mapping[str, Any]) -> None:
    """Write run.json: what the run is, and one entry for each time it was started."""
    path = out / RUN
    launches = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        launches = list(files.from_json(path.read_text(encoding="utf-8"))["launches"])
    if not launch.get("from_step"):
        launches = []
    entry = {"command": sys.argv, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **launch}
    files.atomic_write_json(path, {**about, "launches": [*launches, entry]})
