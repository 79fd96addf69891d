"""Checkpoints that survive anything: whole folders that appear in one step, written aside.

    OUT/checkpoints/step-00001000/   about.json and one .safetensors file a section
    OUT/checkpoints/best.json        which of them validated best

A folder is written under another name, flushed to the disk and renamed; a kill at any moment
leaves the older ones whole. Tensors are whole and go by parameter name, whatever the number of
processes that wrote or read them. No pickle. Last, best and milestones are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from veca._util import files
from veca._util.extras import upgrade_advice
from veca._util.settings import flat
from veca.distill.config import DistillConfig
from veca.distill.schedule import TrainingPlan
from veca.distill.student import TRAINING_FIELDS
from veca.distill.teachers import Teachers
from veca.distill.trainer import StudentGroup
from veca.errors import DistillError
from veca.weights.tensors import write

FORMAT_VERSION = 1
FOLDER, ABOUT, BEST = "checkpoints", "about.json", "best.json"

_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.step-\d+\..*\.tmp")

_FREE = ("follow", "max_minutes", "device", "parallel", "checkpoint", "validation")
"""Settings that no curve depends on."""

Sections = Mapping[str, Mapping[str, Tensor]]
"""Tensors by section ("student", "optimizer", ...) and name."""


class TrainingCheckpoint(NamedTuple):
    """What was read back."""

    path: Path
    about: dict[str, Any]
    sections: dict[str, dict[str, Tensor]]

    @property
    def step(self) -> int:
        """Steps that were done."""
        return int(self.about["step"])


class CheckpointStore:
    """The checkpoints of one run, in `out / "checkpoints"`; saves in the background."""

    def __init__(self, out: Path, *, milestones: Iterable[int] = ()) -> None:
        self.folder = out / FOLDER
        self.milestones = frozenset(milestones)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    # ---------------------------------------------------------------------------------- saving

    def save(self, step: int, sections: Sections, about: dict[str, Any], *, best: bool) -> None:
        """Write a checkpoint in the background; the tensors must not change meanwhile.

        Waits for the one before, and raises what that met.
        """
        self.wait()
        record = {"format_version": FORMAT_VERSION, "step": step, **about}
        self._thread = threading.Thread(
            target=self._work, args=(step, sections, record, best), name="veca-checkpoint"
        )
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong in the background, if anything did."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Until the last save is on the disk; raises what it met."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _work(self, step: int, sections: Sections, about: dict[str, Any], best: bool) -> None:
        try:
            self.write(step, sections, about, best=best)
        except BaseException as error:
            self._error = error

    def write(self, step: int, sections: Sections, about: dict[str, Any], *, best: bool) -> Path:
        """Write a checkpoint now."""
        target = self.path(step)
        temporary = self.folder / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            with files.output_errors(target):
                if not target.exists():  # a run that was resumed reaches the same step again
                    temporary.mkdir(parents=True)
                    for name, tensors in sections.items():
                        _write_tensors(temporary / f"{name}.safetensors", tensors, target)
                    text = files.to_json(about)
                    (temporary / ABOUT).write_text(text, encoding="utf-8")
                    files.flush(temporary / ABOUT)
                    files.flush_folder(temporary)
                    temporary.rename(target)
                    files.flush_folder(self.folder)
            if best:
                files.atomic_write_json(self.folder / BEST, {"step": step})
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._prune(step)
        return target

    def _prune(self, last: int) -> None:
        """Delete what is neither the last, nor the best, nor a milestone."""
        keep = {last, self.best_step(), *self.milestones}
        for step in self.steps():
            if step not in keep and step < last:
                # Renamed first: a kill in the middle of deleting must not leave half a checkpoint.
                doomed = self.folder / f".{self.path(step).name}.{secrets.token_hex(4)}.tmp"
                with contextlib.suppress(OSError):
                    self.path(step).rename(doomed)
                    shutil.rmtree(doomed, ignore_errors=True)

    # --------------------------------------------------------------------------------- reading

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, increasing."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def best_step(self) -> int | None:
        try:
            return int(json.loads((self.folder / BEST).read_text(encoding="utf-8"))["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def clean(self) -> None:
        """Remove what a killed process left half-written."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if _TEMPORARY.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def load(self, step: int | None = None) -> TrainingCheckpoint | None:
        """The checkpoint of a step, by default the last; None if there is none."""
        steps = self.steps()
        if step is None and not steps:
            return None
        return read(self.path(steps[-1] if step is None else step))


def read(path: Path) -> TrainingCheckpoint:
    """One checkpoint folder."""
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        version = about["format_version"]
        if version > FORMAT_VERSION:
            raise DistillError(
                f"checkpoint {path} has format version {version}, this veca reads up to "
                f"{FORMAT_VERSION}; {upgrade_advice()}."
            )
        sections = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                sections[file.stem] = {
                    name: tensors.get_tensor(name).clone()
                    for name in tensors.keys()  # noqa: SIM118
                }
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, DistillError):
            raise
        raise DistillError(
            f"checkpoint {path} cannot be read ({error}); delete that folder to go on from an "
            "older one."
        ) from error
    return TrainingCheckpoint(path, about, sections)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], target: Path) -> None:
    path.touch()
    write(tensors, path, target)
    files.flush(path)


# ------------------------------------------------------------------------------------ going on


def check_resume(
    checkpoint: TrainingCheckpoint, config: DistillConfig, group: StudentGroup, plan: TrainingPlan
) -> None:
    """Refuse to go on with another student, other teachers, another optimiser or a rate that rises.

    Raises:
        DistillError: says what differs.
    """
    about = checkpoint.about
    for student, trainer in group.trainers.items():
        stored = about["siblings"].get(student, {}) if student else about
        mine = {"dense": trainer.dense, **trainer.architecture.to_dict()}
        known = {"dense": stored.get("dense"), **stored.get("architecture", {})}
        different = [
            name for name in mine if known.get(name) != mine[name] and name not in TRAINING_FIELDS
        ]
        if stored and different:
            name = different[0]
            raise DistillError(
                f"{checkpoint.path} belongs to another architecture: its {name} is "
                f"{known.get(name)!r}, here it is {mine[name]!r}; resume with the settings it "
                "was made with, or choose another --out."
            )
    teachers = group.teachers
    for what, theirs, ours in (
        ("siblings", sorted(about["siblings"]), sorted(config.siblings)),
        ("optimizer", about["optimizer"], config.optimizer.name),
        ("teachers", about["teachers"], [teacher.name for teacher in teachers]),
        ("seed", about["seed"], config.seed),
        ("standardised teachers", about["provenance"]["standardised"], _standardised(teachers)),
        *_global_sizes(teachers, about["provenance"]),
    ):
        if theirs != ours:
            raise DistillError(
                f"{checkpoint.path} was made with {what} {theirs!r}, here it is {ours!r}; "
                "resume with the same, or choose another --out."
            )
    _check_cooldown(checkpoint, plan)


def _check_cooldown(checkpoint: TrainingCheckpoint, plan: TrainingPlan) -> None:
    """Refuse a new plan for a run that has begun to cool down: its rate would rise again."""
    about, out = checkpoint.about, str(checkpoint.path.parents[1])
    steps = int(about["provenance"]["steps_planned"])
    cooldown = int(about["config"]["schedule"].get("cooldown", 0))
    begun, same = steps - cooldown, (plan.steps, plan.cooldown) == (steps, cooldown)
    if cooldown and checkpoint.step > begun and not same:
        raise DistillError(
            f"{out} has been cooling down since step {begun} of {steps}, and {plan.steps} steps "
            f"with a cool-down of {plan.cooldown} are another plan; start a new run from that "
            f'step: veca.distill.export_checkpoint({out!r}, "trunk", which={begun}), then --set '
            "student.init=trunk --set schedule.warmup=0."
        )


def _standardised(teachers: Teachers) -> list[str]:
    """The teachers whose targets are: the student would not notice, but would learn others."""
    return sorted(teacher.name for teacher in teachers if teacher.settings.standardise)


def _global_sizes(teachers: Teachers, provenance: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Sizes of the global features there and here: with another the targets' scale is wrong."""
    return [
        (f"{teacher.name}'s global_size", stored, teacher.global_size)
        for teacher in teachers
        if (stored := teacher.global_size_of(provenance)) is not None
    ]


def changed_settings(before: dict[str, Any], config: DistillConfig) -> list[str]:
    """The settings that differ from those of a checkpoint, in words: the curve will too."""
    with contextlib.suppress(DistillError):  # settings added since had their defaults then
        before = DistillConfig.from_dict(before).to_dict()
    old, new = (flat(table) for table in (before, config.to_dict()))
    return [
        f"{name} {old.get(name)} -> {new.get(name)}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name) and name.split(".")[0] not in _FREE
    ]
