"""From a run to weights that `veca.load` reads, and from those to weights made ready for others:
small, with a model card, and nothing of this machine in them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from veca._util import files
from veca.config import VecaConfig
from veca.dense import DenseVit
from veca.distill.checkpoint import CheckpointStore, check_about
from veca.distill.standardise import from_tensors, save_targets
from veca.distill.student import save_heads
from veca.distill.trainer import MAIN, sections_of
from veca.errors import DistillError, suggest
from veca.teachers import save_dense_vit
from veca.weights import load, processor, read_provenance, remote_code, save, store
from veca.weights.card import FILE as CARD
from veca.weights.card import model_card, results_in
from veca.weights.names import locate, public_name
from veca.weights.store import HEADS, TARGETS

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
    found = checkpoints.load(step, optimizer=False)
    assert found is not None
    check_about(found)
    siblings = found.about["siblings"]
    if student and student not in siblings:
        raise DistillError(f"{run} has no sibling {suggest(student, siblings)}")
    return export_sections(found.sections, found.about, files.place_for(to), student=student)


def publish(
    weights: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    name: str = "",
    licence: str = "",
    data: str = "",
    data_licence: str = "",
    results: str = "",
    dtype: torch.dtype = torch.float16,
    code: bool = True,
) -> Path:
    """Write weights as a folder to ship: float16, with provenance, a model card, target scales and
    what transformers needs: the settings of an image processor, and the code of the model.

    Args:
        weights: what `veca.load` takes, such as `runs/first/final`.
        to: the folder; one that is not empty is refused unless it holds older weights.
        name: what readers of the card will call them; by default the folder's name.
        licence: of the weights.
        data, data_licence: what they were trained on, where the provenance does not say it well.
        results: what they were measured to reach, as Markdown, for the card. Without it, weights
            that are published where they lie keep what their card says.
        code: with the model's code, by which `AutoModel.from_pretrained(folder,
            trust_remote_code=True)` works where this package is not installed.
    """
    folder = files.place_for(to)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise DistillError(f"{folder} is not empty and holds no weights; choose another folder.")
    source = locate(weights, (*store.FILES, *store.BESIDE))
    home = source if source.is_dir() else source.parent
    in_place = home.resolve() == folder.resolve()
    model = load(source)
    provenance = _cleaned(read_provenance(source))
    if not results and in_place and (home / CARD).is_file():
        results = results_in((home / CARD).read_text(encoding="utf-8"))
    if licence:
        provenance["licence"] = licence
    stages: list[dict[str, Any]] = [provenance]
    while before := _table(_table(stages[-1], "init"), "provenance"):
        stages.append(before)
    for stage in stages:
        about = dict(_table(stage, "data"))
        about |= {k: v for k, v in (("source", data), ("licence", data_licence)) if v}
        stage["data"] = about
    counts = [stage.get("samples") for stage in stages]
    provenance["samples_in_all"] = sum(count for count in counts if isinstance(count, int))
    save(model, folder, provenance=provenance, dtype=dtype)
    settings = processor.processor_settings(model.config, code=code)
    files.atomic_write_json(folder / processor.FILE, settings)
    if code:
        remote_code.write_code(folder)
        about = json.loads((folder / store.CONFIG).read_text(encoding="utf-8"))
        about |= {"architectures": ["VecaModel"], "auto_map": processor.auto_map()}
        files.atomic_write_json(folder / store.CONFIG, about)
    else:
        remote_code.remove_code(folder)
    for extra in () if in_place else (TARGETS, HEADS):
        if source.is_dir() and (source / extra).is_file():
            with files.temporary_beside(folder / extra) as temporary:
                shutil.copyfile(source / extra, temporary)
                files.commit(temporary, folder / extra)
        else:
            (folder / extra).unlink(missing_ok=True)  # of the weights that were there before
    card = model_card(
        model.config,
        read_provenance(folder),
        name=name or folder.name,
        results=results,
        code=code,
    )
    files.atomic_write_text(folder / CARD, card)
    return folder


def _table(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table inside another that somebody wrote; empty if it is none."""
    found = fields.get(name)
    return found if isinstance(found, dict) else {}


def _cleaned(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Without hashes of the files that were, and with names where there were paths."""
    kept = {k: v for k, v in provenance.items() if k not in ("tensors_sha256", "file_sha256")}
    if isinstance(kept.get("data"), Mapping):
        about = dict(kept["data"])
        kept["data"] = about | {"source": public_name(str(about.get("source", "")))}
    if isinstance(kept.get("init"), Mapping):
        init = dict(kept["init"])
        init["weights"] = public_name(str(init["weights"])) if init.get("weights") else None
        if isinstance(init.get("provenance"), Mapping):
            init["provenance"] = _cleaned(init["provenance"])
        kept["init"] = init
    return kept
