"""From a run to weights that `veca.load` reads, with everything they come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from veca._util.files import place_for
from veca.config import VecaConfig
from veca.dense import DenseVit
from veca.distill.checkpoint import CheckpointStore
from veca.distill.cohort import MAIN, sections_of
from veca.distill.standardise import from_tensors, save_targets
from veca.distill.student import save_heads
from veca.errors import DistillError, suggest
from veca.teachers import save_dense_vit
from veca.weights import store

FINAL = "final"
SIBLINGS = "siblings"

_BACKBONE, _HEADS = "backbone.", "heads."


def export_sections(
    sections: Mapping[str, Mapping[str, Tensor]],
    about: Mapping[str, Any],
    folder: Path,
    *,
    student: str = MAIN,
) -> Path:
    """Write a student as a weights folder; the averaged weights where an average was kept.

    Beside the model: `heads.safetensors` for further teachers, `targets.safetensors` to map
    features back to the teacher's own scale. A dense student is written by `save_dense_vit`.

    Args:
        student: the name of a sibling; without it, the run's own student.
    """
    sections = sections_of(sections, student)
    whose = about["siblings"][student] if student else about
    tensors = sections.get("ema", sections["student"])
    backbone = {n.removeprefix(_BACKBONE): t for n, t in tensors.items() if n.startswith(_BACKBONE)}
    heads = {n.removeprefix(_HEADS): t for n, t in tensors.items() if n.startswith(_HEADS)}
    config = VecaConfig.from_dict(whose["architecture"])
    provenance = {**about["provenance"], "steps": about["step"], "samples": about["samples"]}
    provenance.setdefault("lr_scales", [1.0, 1.0])  # checkpoints of before there were any
    if student:
        provenance["init"] = whose["init"]
        provenance["lr_scales"] = whose.get("lr_scales", [1.0, 1.0])
    provenance["complete"] = about["step"] >= provenance["steps_planned"]
    provenance["averaged"] = "ema" in sections
    if heads:
        save_heads(heads, [t["name"] for t in provenance["teachers"]], folder)
    if "targets" in sections:
        save_targets(from_tensors(sections["targets"]), folder)
    if whose.get("dense"):
        model = DenseVit(config)
        model.load_state_dict(backbone)
        return save_dense_vit(model, folder, provenance=provenance)
    return store.save_state(backbone, config, folder, provenance=provenance)


def export_checkpoint(
    run: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    which: str | int = "best",
    student: str = MAIN,
) -> Path:
    """Turn a checkpoint of a run into a weights folder.

    Args:
        run: the run's folder (its --out).
        which: "best" (by validation), "last", or the number of steps of a checkpoint.
        student: the name of a sibling; without it, the run's own student.
    """
    checkpoints = CheckpointStore(Path(run).expanduser())
    steps = checkpoints.steps()
    if not steps:
        raise DistillError(f"{run} holds no checkpoints; expected the --out folder of a run.")
    step: int | None
    if which == "best":
        step = checkpoints.best_step()
    elif which == "last":
        step = steps[-1]
    else:
        step = which if isinstance(which, int) else None
    if step not in steps:
        known = ", ".join(map(str, steps))
        raise DistillError(f"{run} has no checkpoint {which!r}; it has those of steps {known}.")
    found = checkpoints.load(step)
    assert found is not None
    siblings = found.about["siblings"]
    if student and student not in siblings:
        raise DistillError(f"{run} has no sibling {suggest(student, siblings)}")
    return export_sections(found.sections, found.about, place_for(to), student=student)
