"""Checkpoints that survive anything: whole folders that appear in one step, written aside.

    OUT/checkpoints/step-00001000/   about.json and one .safetensors file a section
    OUT/checkpoints/best.json        which of them validated best

`about.json` lists the sections with the hash of each, and its own: a run never goes on from a
checkpoint that lacks a part, or in which one bit is another. Those of 0.1 have no hashes; what they
must hold follows from their settings.

A folder is written under another name, flushed to the disk and renamed; a kill at any moment
leaves the older ones whole. Tensors are whole and go by parameter name, whatever the number of
processes that wrote or read them. No pickle. Last, best and milestones are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from veca._util import files
from veca._util.extras import upgrade_advice
from veca._util.settings import flat
from veca.distill.config import DistillConfig
from veca.distill.schedule import TrainingPlan
from veca.distill.student import TRAINING_FIELDS
from veca.distill.teachers import Teachers
from veca.distill.trainer import StudentGroup
from veca.errors import CheckpointError, DistillError, shown
from veca.weights.tensors import SEAL, content_hash, read_file, seal, write

FORMAT_VERSION = 1
FOLDER, ABOUT, BEST = "checkpoints", "about.json", "best.json"

_SUFFIX, _OPTIMIZER = ".safetensors", "optimizer"
_HASH, _SECTIONS = "sha256", "sections"
_FIELDS: dict[str, Any] = {
    "step": int,
    "samples": int,
    "siblings": dict,
    "teachers": list,
    "optimizer": str,
    "seed": int,
    "loader": dict,
    "loader.step": int,
    "loader.position": int,
    "best": (int, float, type(None)),
    "config": dict,
    "config.schedule": dict,
    "provenance": dict,
    "provenance.standardised": list,
    "provenance.steps_planned": int,
}
"""Of `about.json`, what a run or an export needs."""

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
        hashes = {name: seal(content_hash(tensors), {}) for name, tensors in sections.items()}
        about = _sealed({**about, _SECTIONS: hashes})
        temporary = self.folder / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            with files.output_errors(target):
                if not target.exists():  # a run that was resumed reaches the same step again
                    temporary.mkdir(parents=True)
                    for name, tensors in sections.items():
                        path = temporary / f"{name}{_SUFFIX}"
                        path.touch()
                        write(tensors, path, target, {SEAL: hashes[name]})
                        files.flush(path)
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
            step = files.read_json(self.folder / BEST, CheckpointError).get("step")
        except CheckpointError:
            return None
        return step if isinstance(step, int) else None

    def clean(self) -> None:
        """Remove what a killed process left half-written."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if _TEMPORARY.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def load(self, step: int | None = None, *, optimizer: bool = True) -> TrainingCheckpoint | None:
        """The checkpoint of a step, by default the last; None if there is none.

        Args:
            optimizer: read its state, which only training needs.
        """
        steps = self.steps()
        if step is None and not steps:
            return None
        return read(self.path(steps[-1] if step is None else step), optimizer=optimizer)


def read(path: Path, *, optimizer: bool = True) -> TrainingCheckpoint:
    """One checkpoint folder, every part of it compared with its hash.

    Args:
        optimizer: read its state, which only training needs.

    Raises:
        CheckpointError: a part is missing or not what was written.
    """
    about = _read_about(path)
    hashes = _expected(path, about)
    wanted = [name for name in hashes if optimizer or name.rpartition(":")[2] != _OPTIMIZER]
    try:
        return TrainingCheckpoint(
            path, about, {name: _section(path, name, hashes[name]) for name in wanted}
        )
    except CheckpointError as error:
        advice = "delete that folder to go on from an older one"
        raise CheckpointError(f"{str(error).rstrip('.')}; {advice}.") from error.__cause__


def _read_about(path: Path) -> dict[str, Any]:
    place = path / ABOUT
    about = files.read_json(place, CheckpointError)
    version = about.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise CheckpointError(f"{place}: format_version is {shown(version)}, no whole number.")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format version {shown(version)}, this veca reads up to "
            f"{FORMAT_VERSION}; {upgrade_advice()}."
        )
    files.check_fields(about, {"step": int}, place, CheckpointError)
    if _HASH in about and about != _sealed(about):
        raise CheckpointError(
            f"{place} is not what was written (its sha256 differs from the one recorded); delete "
            f"the folder {path.name} to go on from an older one."
        )
    return about


def _sealed(about: Mapping[str, Any]) -> dict[str, Any]:
    """`about` as JSON will give it back, with the hash of all the rest in it."""
    rest: dict[str, Any] = json.loads(files.to_json({k: about[k] for k in about if k != _HASH}))
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, _HASH: hashlib.sha256(text.encode()).hexdigest()}


def _expected(path: Path, about: Mapping[str, Any]) -> dict[str, str]:
    """The sections that a checkpoint has, with their hashes; "" where there are none, as in 0.1."""
    if _SECTIONS in about:
        hashes = about[_SECTIONS]
        plain = isinstance(hashes, dict) and all(isinstance(x, str) for x in hashes.values())
        if not plain or any(Path(name).name != name for name in hashes):
            raise CheckpointError(f"{path / ABOUT}: {_SECTIONS} is no table of hashes.")
        return dict(hashes)
    names = [file.name.removesuffix(_SUFFIX) for file in sorted(path.glob(f"*{_SUFFIX}"))]
    config, siblings, provenance = (
        found if isinstance(found := about.get(key), dict) else {}
        for key in ("config", "siblings", "provenance")
    )
    own = ["student", _OPTIMIZER, *(["ema"] if config.get("ema") else [])]
    needed = [*own, *(f"{sibling}:{name}" for sibling in siblings for name in own)]
    needed += ["targets"] if provenance.get("standardised") else []
    return dict.fromkeys([*names, *needed], "")


def _section(path: Path, name: str, recorded: str) -> dict[str, Tensor]:
    file = path / f"{name}{_SUFFIX}"
    if not file.exists():
        raise CheckpointError(f"checkpoint {path} lacks its section {name!r} ({file.name}).")
    tensors, metadata = read_file(file, CheckpointError)
    if recorded and metadata.get(SEAL) != recorded:
        raise CheckpointError(f"{file} is not what was written (its sha256 is another).")
    return tensors


# ------------------------------------------------------------------------------------ going on


def check_about(checkpoint: TrainingCheckpoint) -> None:
    """Refuse a checkpoint whose `about.json` lacks a field, or has something odd in it."""
    about, place = checkpoint.about, checkpoint.path / ABOUT
    files.check_fields(about, _FIELDS, place, CheckpointError)
    of_all = {"architecture": (dict, type(None))}
    files.check_fields({"architecture": None, **about}, of_all, place, CheckpointError)
    for name, sibling in about["siblings"].items():
        where = f"{place}: siblings.{name}"
        whose = sibling if isinstance(sibling, dict) else {}
        files.check_fields(whose, {"architecture": dict, "init": object}, where, CheckpointError)


def check_resume(
    checkpoint: TrainingCheckpoint, config: DistillConfig, group: StudentGroup, plan: TrainingPlan
) -> None:
    """Refuse to go on with another student, other teachers, another optimiser or a rate that rises.

    Raises:
        DistillError: says what differs.
    """
    about = checkpoint.about
    check_about(checkpoint)
    for student, trainer in group.trainers.items():
        stored = about["siblings"].get(student, {}) if student else about
        mine = {"dense": trainer.dense, **trainer.architecture.to_dict()}
        known = {"dense": stored.get("dense"), **(stored.get("architecture") or {})}
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
    steps = about["provenance"]["steps_planned"]
    schedule = {"cooldown": 0, **about["config"]["schedule"]}
    place = f"{checkpoint.path / ABOUT}, config.schedule"
    files.check_fields(schedule, {"cooldown": int}, place, CheckpointError)
    cooldown = schedule["cooldown"]
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
