"""The loop: one for stage 1 and stage 2, for one process and for many.

Read top-down: `distill` sets up, `TrainingRun.train` is the loop, the rest is what it calls; `step`
is one turn of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from veca._util.files import atomic_write_text, exclusive, place_for
from veca._util.numbers import count
from veca.distill.checkpoint import (
    CheckpointStore,
    TrainingCheckpoint,
    changed_settings,
    check_resume,
)
from veca.distill.config import DistillConfig
from veca.distill.data import Images, ImageSplit, open_data, training_loader, validation_loader
from veca.distill.dry_run import describe
from veca.distill.export import FINAL, SIBLINGS, export_sections
from veca.distill.logger import RunLogger, StepMeter, code_version, machine, versions, write_run
from veca.distill.parallel import World, launch, own_torch_state
from veca.distill.schedule import TrainingPlan, build_plan, checked_keep
from veca.distill.step import training_step
from veca.distill.teachers import open_teachers, scale_targets
from veca.distill.trainer import MAIN, StudentGroup, StudentTrainer
from veca.distill.validate import ValidatedStudent, mean_loss, validate
from veca.errors import DistillError, DivergedError, OutputError, VecaError
from veca.teachers.base import Teacher
from veca.weights.names import public_name

_LOCK = ".distill.lock"


@dataclass(frozen=True)
class DistillResult:
    """How a run ended."""

    out: Path
    step: int
    """Steps done, of `steps`."""
    steps: int
    loss: float
    """Of the last step; NaN if this process did none."""
    best: float | None
    """The lowest validation loss so far."""
    stopped: str
    """done, time (max_minutes) or signal."""
    final: Path
    """The student as a weights folder, for `veca.load`."""


def distill(
    config: DistillConfig,
    out: str | os.PathLike[str],
    *,
    source: Images = None,
    validation: Images = None,
    teachers: Sequence[Teacher] | None = None,
    resume: bool = False,
    console: Console | None = None,
) -> DistillResult:
    """Train a student as the settings say; under torchrun, together with the other processes.

    >>> config = load_config("laptop")
    >>> result = distill(config, "runs/first")
    >>> model = veca.load(result.final)

    Args:
        out: the run's folder: checkpoints/, metrics.jsonl, run.json, config.toml and, at the end,
            final/.
        source, validation, teachers: objects to use instead of those the settings name.
        resume: go on from the last checkpoint in `out`, if there is one.
        console: where to show progress; None for nowhere.

    Raises:
        DistillError: the settings do not fit together, or `out` holds another run.
        DivergedError: the loss became NaN or infinite; the last good checkpoint is kept.
    """
    out = place_for(out)
    with launch(config.parallel, config.device) as world, own_torch_state(world.device):
        run = TrainingRun(config, out, world, source, validation, teachers, resume, console)
        try:
            return run.train()
        finally:
            run.close()


class TrainingRun:
    """One process's part in a run."""

    def __init__(
        self,
        config: DistillConfig,
        out: Path,
        world: World,
        source: Images,
        validation: Images,
        teachers: Sequence[Teacher] | None,
        resume: bool,
        console: Console | None,
    ) -> None:
        self.begun = self._saved = time.monotonic()
        self.config, self.out, self.world = config, out, world
        self.done, self.samples, self.best, self.loss = 0, 0, math.inf, math.nan
        self.store = CheckpointStore(out, milestones=config.checkpoint.milestones)
        with contextlib.ExitStack() as stack:
            self._set_up(source, validation, teachers, resume, console, stack)
            self._closing = stack.pop_all()

    def _set_up(
        self,
        source: Images,
        validation: Images,
        teachers: Sequence[Teacher] | None,
        resume: bool,
        console: Console | None,
        stack: contextlib.ExitStack,
    ) -> None:
        """Everything before the first step; what has to be closed goes on `stack`."""
        config, out, world = self.config, self.out, self.world
        checkpoint = self._find_checkpoint(resume, stack)
        self.data: ImageSplit = open_data(config.data, world, source=source, validation=validation)
        self.teachers = open_teachers(config, world, teachers)
        self.group = StudentGroup(config, self.teachers, world)
        architecture = self.group.main.architecture
        self.plan: TrainingPlan = build_plan(config, architecture, self.data.images, world)
        if self.plan.cooldown:
            self.store.milestones |= {self.plan.steps - self.plan.cooldown}
        if checkpoint is not None:
            check_resume(checkpoint, config, self.group, self.plan)
            self.done = checkpoint.step
        self._check_sizes()
        self.group.prepare(self.plan)

        self.log = RunLogger(
            out,
            steps=self.plan.steps,
            start=self.done,
            active=world.is_first,
            console=console,
            tensorboard=config.follow.tensorboard,
            wandb=config.follow.wandb,
            config=config.to_dict(),
        )
        stack.callback(self.log.close)
        self.meter = StepMeter(self.group.term_names, world, elastic=self.group.elastic)
        self.loader = training_loader(
            config,
            self.data,
            self.plan,
            self.group.teacher_size,
            world,
            self.log.skipped if world.is_first else None,
        )
        stack.callback(self.loader.close)
        self.held_out = validation_loader(config, self.data, self.plan, world)
        if self.held_out is not None:
            stack.callback(self.held_out.close)
        if checkpoint is not None:
            self.group.load_state(checkpoint.sections)
            self.loader.load_state_dict(checkpoint.about["loader"])
            self.samples = checkpoint.about["samples"]
            self.best = math.inf if checkpoint.about["best"] is None else checkpoint.about["best"]
            if changed := changed_settings(checkpoint.about["config"], config):
                self.log.say(f"resuming with other settings: {', '.join(changed)}")
        else:
            patch = architecture.patch_size
            scale_targets(config, self.teachers, self.loader, self.plan, patch, world)
        self._write_run()
        for line in describe(config, self.plan, self.group, self.data, world, self.done):
            self.log.say(line)

    # -------------------------------------------------------------------------------- the loop

    def train(self) -> DistillResult:
        """All steps that are left, or as many as time allows."""
        c = self.config
        stopped, begun_with = "done", self.samples
        self._restart_clock()
        begun = self._since
        tell = ""
        if self.world.is_first:
            tell = (
                f"asked to stop: the run ends cleanly within {c.follow.every} steps; the same "
                "signal again ends it at once.\n"
            )
        with _stop_signals(tell) as signalled:
            for step in self.plan.from_step(self.done):
                batch = self.loader.batch(step.number)
                self.meter.add(step, *training_step(self.group, step, batch))
                self.done += 1
                self.samples += step.batch

                last = self.done == self.plan.steps
                validating = last or _due(self.done, c.validation.every)
                validating = validating and self.held_out is not None
                saving = last or _due(self.done, c.checkpoint.every)
                saving = saving or self.done in self.store.milestones
                if not (validating or saving or _due(self.done, c.follow.every)):
                    continue

                self._log_steps()
                if self.world.any(bool(signalled)):
                    stopped = "signal"
                elif self.world.any(self._minutes() >= c.max_minutes > 0) and not last:
                    stopped = "time"
                late = (time.monotonic() - self._saved) / 60 >= c.checkpoint.minutes > 0
                saving = saving or stopped != "done" or self.world.any(late)
                better = validating and stopped != "signal" and self._validate()
                if saving or better:
                    self._save(better)
                if stopped != "done":
                    break
                self._restart_clock()
        seconds = max(time.monotonic() - begun, 1e-9)
        self.rate = (self.samples - begun_with) / seconds
        return self._finish(stopped)

    def _log_steps(self) -> None:
        """Read the losses back, write them down, and stop if they are not numbers."""
        now = time.monotonic()
        try:
            records = self.meter.flush()
        except DivergedError as error:
            self.log.write(getattr(error, "records", []))
            raise self._diverged(error) from None
        seconds = max(time.monotonic() - self._since, 1e-9)
        images = sum(record["batch"] for record in records)
        waited = (self.loader.waited_s - self._waited) / max(now - self._since, 1e-9)
        self.log.train(records, rate=images / seconds, waited=waited)
        if records:
            self.loss = records[-1]["loss"]
        if self.world.is_first:
            self.store.check()

    def _validate(self) -> bool:
        """Measure on the held-out images; whether it is the best so far."""
        assert self.held_out is not None
        trainers = self.group.trainers
        with contextlib.ExitStack() as averages:
            for trainer in trainers.values():
                averages.enter_context(trainer.averaged())
            found = validate(
                [
                    ValidatedStudent(
                        trainer.student,
                        # A dense student is the same at every budget.
                        [(self.validation_budgets[-1], 1.0)]
                        if trainer.dense
                        else list(product(self.validation_budgets, self.validation_keep)),
                        trainer.normalise,
                        trainer.autocast,
                    )
                    for trainer in trainers.values()
                ],
                self.teachers,
                self.held_out,
                sizes=self.validation_sizes,
                batches=self.validation_batches,
                world=self.world,
            )
        by_name = dict(zip(trainers, found, strict=True))
        loss = mean_loss(by_name[MAIN], self.teachers)
        rows = [
            {"student": name, **row} if name else row
            for name, here in by_name.items()
            for row in here
        ]
        dense = [name for name, trainer in trainers.items() if trainer.dense]
        self.log.validation({"step": self.done, "loss": loss, "grid": rows}, dense=dense)
        better = loss < self.best
        self.best = min(loss, self.best)
        return better

    def _save(self, best: bool) -> None:
        """Copy everything to the host; a thread of the first rank writes it."""
        sections = self.group.state()
        if self.world.is_first:
            self.store.save(self.done, sections, self._about(), best=best)
        self._saved = time.monotonic()

    def _finish(self, stopped: str) -> DistillResult:
        final = self.out / FINAL
        sections = self.group.state(optimizer=False)
        waited = self.loader.waited_share
        if self.world.is_first:
            self.store.wait()
            about = {**self._about(), "step": self.done}
            export_sections(sections, about, final)
            for name in self.config.siblings:
                export_sections(sections, about, self.out / SIBLINGS / name, student=name)
            numbers = {
                "step": self.done,
                "stopped": stopped,
                "samples": self.samples,
                "minutes": round(self._minutes(), 3),
                "images_per_second": round(self.rate, 1),
                "data_wait": round(waited, 4),
            }
            self.log.write([{"kind": "end", **numbers}])
            self.log.say(_ending(stopped, self.done, self.plan.steps, self.out, final))
            self.log.say(
                f"{self.rate:,.0f} images/s with validation and saving; {waited:.1%} of the time "
                "waited for data"
            )
        self.world.barrier()
        best = self.best if math.isfinite(self.best) else None
        return DistillResult(self.out, self.done, self.plan.steps, self.loss, best, stopped, final)

    def close(self) -> None:
        # A save under way is let finish, whatever ended the run.
        with contextlib.suppress(Exception):
            self.store.wait()
        self._closing.close()

    # ------------------------------------------------------------------------------ beginnings

    def _find_checkpoint(
        self, resume: bool, stack: contextlib.ExitStack
    ) -> TrainingCheckpoint | None:
        """The checkpoint to go on from, on all ranks; the first rank reads it.

        That rank locks the run's folder until `stack` is closed, and makes it; if it is still
        empty then, it goes.
        """
        problem: VecaError | None = None
        about, sections = None, None
        busy = f"another process is training into {self.out}; wait for it, or choose another --out."
        if self.world.is_first:
            try:
                stack.enter_context(exclusive(self.out / _LOCK, busy))
                steps = self.store.steps()
                if steps and not resume:
                    raise DistillError(
                        f"{self.out} holds a run that got to step {steps[-1]}; add --resume to go "
                        "on with it, or choose another --out."
                    )
                self.store.clean()
                found = self.store.load()
                if found is not None:
                    about, sections = found.about, found.sections
            except OutputError as error:
                problem = error if str(error) == busy else DistillError(str(error))
            except VecaError as error:
                problem = error
            except OSError as error:
                problem = DistillError(
                    f"cannot write to {self.out} ({error.strerror}); choose another --out."
                )
        problem, about = self.world.from_first((problem, about))
        if problem is not None:
            raise problem
        if about is None:
            return None
        names = self.world.from_first(None if sections is None else list(sections))
        spread = {
            name: self.world.spread(None if sections is None else sections[name]) for name in names
        }
        return TrainingCheckpoint(self.store.path(int(about["step"])), about, spread)

    def _check_sizes(self) -> None:
        """Settle the grid of validation, and have every size refused that a teacher cannot see."""
        v, sizes = self.config.validation, self.plan.sizes
        budgets = self.plan.budgets.budgets
        middle = budgets[len(budgets) // 2]
        self.validation_sizes = v.sizes or sizes.sizes
        self.validation_budgets = v.budgets or tuple(sorted({budgets[0], middle, budgets[-1]}))
        self.validation_keep = checked_keep("validation.keep", v.keep) or (1.0,)
        main = self.group.main
        most = main.architecture.num_cores
        if not all(1 <= budget <= most for budget in self.validation_budgets):
            raise DistillError(
                f"validation.budgets must be from 1 to {most}, got {list(self.validation_budgets)}."
            )
        patch = main.architecture.patch_size
        for size in (*sizes.sizes, *self.validation_sizes):
            if size < patch or size % patch:
                raise DistillError(
                    f"image sizes must be multiples of the patch size {patch}, got {size}."
                )
            self.group.teacher_size(size)
        # Of a size that is not trained at, as many pixels at once as of the largest that is.
        largest = max(sizes.sizes)
        self.validation_batches = {}
        for size in self.validation_sizes:
            scaled = max(1, int(sizes.batches[largest] * min(1.0, (largest / size) ** 2)))
            batch = v.batch or sizes.batches.get(size, scaled)
            self.validation_batches[size] = max(1, batch // self.world.size) * self.world.size

    def _write_run(self) -> None:
        """run.json and config.toml: everything needed to do it again."""
        if not self.world.is_first:
            return
        atomic_write_text(self.out / "config.toml", self.config.to_toml())
        about = {
            "config": self.config.to_dict(),
            "versions": versions(),
            "machine": machine(self.world),
            "provenance": self._provenance(),
        }
        write_run(self.out, about, {"from_step": self.done, "processes": self.world.size})

    def _provenance(self) -> dict[str, Any]:
        """What the weights come from, as plain JSON."""
        c, first = self.config, self.teachers[0]
        return {
            "method": "distillation",
            "teacher": first.model.describe(),
            "teachers": [teacher.model.describe() for teacher in self.teachers],
            "standardised": sorted(self.teachers.statistics()),
            "targets": {
                teacher.name: {
                    "weight": teacher.settings.weight,
                    "global_size": teacher.global_size,
                    "kl": teacher.settings.kl,
                }
                for teacher in self.teachers
            },
            "data": {
                "source": c.data.name
                or public_name(c.data.source)
                or type(self.data.source).__name__,
                "licence": c.data.licence or None,
                "images": self.data.images,
                "fingerprint": self.loader.fingerprint(),
                "validation": self.data.split,
                "augment": c.data.augment.to_dict(),
            },
            "init": _initial_weights(self.group.main),
            "steps_planned": self.plan.steps,
            "sizes": list(self.plan.sizes.sizes),
            "budgets": list(self.plan.budgets.budgets),
            "budget_weights": list(self.plan.budgets.weights),
            **self._keep_provenance(),
            "optimizer": c.optimizer.name,
            "lr": c.optimizer.lr,
            "lr_scales": _scales(self.group.main),
            "seed": c.seed,
            "code": code_version(),
            "torch": str(torch.__version__),
        }

    def _keep_provenance(self) -> dict[str, Any]:
        """Shares of patch tokens that the steps draw; nothing where no windows merge."""
        keep = self.plan.keep
        if not keep.merging:
            return {}
        return {"keep": list(keep.shares), "keep_weights": list(keep.weights)}

    def _about(self) -> dict[str, Any]:
        """What a checkpoint says beside its tensors."""
        return {
            "samples": self.samples,
            "architecture": self.group.main.architecture.to_dict(),
            "dense": self.group.main.dense,
            "siblings": {
                name: {
                    "architecture": trainer.architecture.to_dict(),
                    "dense": trainer.dense,
                    "init": _initial_weights(trainer),
                    "lr_scales": _scales(trainer),
                }
                for name, trainer in self.group.trainers.items()
                if name
            },
            "teachers": [teacher.name for teacher in self.teachers],
            "optimizer": self.config.optimizer.name,
            "seed": self.config.seed,
            "loader": self.loader.state_dict(),
            "best": self.best if math.isfinite(self.best) else None,
            "config": self.config.to_dict(),
            "provenance": self._provenance(),
        }

    # ------------------------------------------------------------------------------------ small

    def _minutes(self) -> float:
        return (time.monotonic() - self.begun) / 60

    def _restart_clock(self) -> None:
        """Speed is measured from here: validation and saving do not count."""
        self._since, self._waited = time.monotonic(), self.loader.waited_s

    def _diverged(self, error: DivergedError) -> DivergedError:
        with contextlib.suppress(Exception):
            self.store.wait()
        kept = self.store.steps()
        where = (
            f"the last good checkpoint, of step {kept[-1]}, is kept in {self.store.folder}"
            if kept
            else "no checkpoint had been written yet"
        )
        return DivergedError(
            f"{error}; {where}. Lower optimizer.lr, set optimizer.clip, or look at the images of "
            "that step and at what the teacher makes of them."
        )


def _scales(trainer: StudentTrainer) -> list[float]:
    """Of a student's learning rate: for all, and for what AdamW moves."""
    scale, adamw = trainer.settings.lr_scale, trainer.settings.adamw_scale
    return [scale, scale * adamw]


def _initial_weights(trainer: StudentTrainer) -> dict[str, Any]:
    """Where a student's first weights came from, as plain JSON."""
    return {
        "weights": public_name(trainer.settings.init) or None,
        "provenance": trainer.initial.provenance,
        "patch_embedding_from": trainer.initial.patch_from,
    }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _ending(stopped: str, done: int, steps: int, out: Path, final: Path) -> str:
    if stopped == "done":
        return f"{count(done, 'step')} done; the student is in {final}"
    why = "max_minutes is over" if stopped == "time" else "asked to stop"
    return (
        f"{why} at step {done} of {steps}; go on with --resume --out {out}. The student so far is "
        f"in {final}"
    )


@contextlib.contextmanager
def _stop_signals(tell: str) -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, for a clean stop; the same one again acts as it always did.

    Args:
        tell: what the first one says on standard error, since the stop may take a while.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before: dict[int, Any] = {}

    def note(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, before[number])
        if len(received) > 1:
            return
        # Not print: a signal may come in the middle of one, which must not be entered again.
        with contextlib.suppress(OSError):
            os.write(2, tell.encode())

    for wanted in (signal.SIGINT, signal.SIGTERM):
        before[wanted] = signal.signal(wanted, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
