"""The network that learns, with a head for each teacher whose features it does not give itself.

The backbone's own output is for the first teacher, so that what is shipped is a plain Veca. Every
further teacher gets linear heads on the backbone's final, normed tokens; they are trained with
it and stored apart (`heads.safetensors`). So does a first teacher whose global and dense
features differ in width, which one shared projection cannot give.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from veca.config import VecaConfig, preset
from veca.dense import DenseVit
from veca.distill.config import StudentConfig
from veca.distill.teachers import Teachers
from veca.errors import DistillError
from veca.model import Veca, create_model, initialize
from veca.teachers import read_dense_vit
from veca.teachers.base import Teacher
from veca.weights import load, read_provenance
from veca.weights.store import HEADS
from veca.weights.tensors import read_file, write_file

TRAINING_FIELDS = ("rope_shift", "rope_jitter", "rope_rescale")
"""Fields of `VecaConfig` that matter in training alone, so that stored weights can change them."""


class Prediction(NamedTuple):
    """What the student says a teacher would say."""

    cls: Tensor
    """[B, D]."""
    patches: Tensor
    """[B, N, D']."""


class Head(nn.Module):
    """Linear maps from the backbone's tokens to a teacher's global and dense features."""

    def __init__(self, width: int, cls_width: int, dense_width: int) -> None:
        super().__init__()
        self.cls = nn.Linear(width, cls_width)
        # One map for both where it can be, as the backbone's own projection does.
        self.dense = nn.Linear(width, dense_width) if dense_width != cls_width else None
        initialize(self)

    def forward(self, cls: Tensor, patches: Tensor) -> Prediction:
        dense = self.cls if self.dense is None else self.dense
        return Prediction(self.cls(cls), dense(patches))


class Student(nn.Module):
    """A backbone and its heads; gives one prediction for each teacher.

    A `DenseVit` learns the same way, for comparison; it has no budget.

    Args:
        widths: (global, dense) widths of each teacher's features, in order.
    """

    def __init__(self, backbone: Veca | DenseVit, widths: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.backbone = backbone
        self.widths = list(widths)
        own = uses_own_output(widths[0])
        if own and backbone.config.feature_width != widths[0][0]:
            raise DistillError(
                f"the student's features are {backbone.config.feature_width} wide, the teacher's "
                f"{widths[0][0]}; leave student.config.output_width out, or start from weights "
                "made for this teacher."
            )
        width = backbone.config.width
        self.heads = nn.ModuleDict(
            {str(i): Head(width, *pair) for i, pair in enumerate(widths) if i or not own}
        )

    def forward(
        self, images: Tensor, cores: int | None = None, keep: float | None = None
    ) -> list[Prediction]:
        """Predictions of every teacher's features for normalised `images` [B, 3, H, W]."""
        backbone = self.backbone
        dense = isinstance(backbone, DenseVit)
        out = backbone.tokens(images) if dense else backbone.tokens(images, cores, keep)  # type: ignore[call-arg]
        cls, patches = out.cls, out.patches
        return [
            self.heads[str(i)](cls, patches)
            if str(i) in self.heads
            else Prediction(backbone.project(cls), backbone.project(patches))
            for i in range(len(self.widths))
        ]

    def blocks(self) -> list[nn.Module]:
        return list(self.backbone.blocks)


def uses_own_output(widths: tuple[int, int]) -> bool:
    """Whether the backbone's own output can be the first teacher's features."""
    return widths[0] == widths[1]


def student_config(name: str, changes: dict[str, object], first: tuple[int, int]) -> VecaConfig:
    """A preset's configuration with some fields changed, its output as wide as the teacher's."""
    config = preset(name).replace(**changes)
    if uses_own_output(first) and config.output_width is None and config.width != first[0]:
        config = config.replace(output_width=first[0])
    return config


def take_patch_embedding(backbone: Veca | DenseVit, teachers: Sequence[Teacher]) -> str | None:
    """Copy the patch convolution of the first teacher that has one of the student's shape.

    Returns that teacher's name. The copy allows for the two normalising pixels differently.
    """
    conv = backbone.patch_embed
    config = backbone.config
    for teacher in teachers:
        found = teacher.patch_embedding(config.image_mean, config.image_std)
        if found is not None and found[0].shape == conv.weight.shape:
            with torch.no_grad():
                conv.weight.copy_(found[0])
                if conv.bias is not None:
                    conv.bias.copy_(found[1])
            return teacher.name
    return None


# ----------------------------------------------------------------------------------- the heads


def save_heads(
    tensors: dict[str, Tensor], teachers: Sequence[str], folder: str | os.PathLike[str]
) -> Path:
    """Write heads beside a model's weights: "TEACHER/cls.weight" and so on.

    `tensors` are named "INDEX.cls.weight" by the teacher's place, as in `Student.heads`.
    """
    path = Path(folder) / HEADS
    named = {}
    for name, tensor in tensors.items():
        index, _, rest = name.partition(".")
        named[f"{teachers[int(index)]}/{rest}"] = tensor.detach().cpu().contiguous()
    write_file(named, path)
    return path


def load_heads(folder: str | os.PathLike[str]) -> dict[str, Head]:
    """The heads stored beside a model's weights, by teacher; none gives an empty dict.

    >>> raw = model.forward_intermediates(images, layers=(model.config.depth,), norm=False)[0]
    >>> heads["clip"](model.norm(raw.cls), model.norm(raw.patches))
    """
    path = Path(folder).expanduser() / HEADS
    if not path.is_file():
        return {}
    tensors, _ = read_file(path, DistillError)
    by_teacher: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        teacher, _, rest = name.rpartition("/")
        by_teacher.setdefault(teacher, {})[rest] = tensor.float()
    heads = {}
    for teacher, state in by_teacher.items():
        try:
            cls_width, width = state["cls.weight"].shape
            dense_width = len(state.get("dense.weight", state["cls.weight"]))
            head = Head(width, cls_width, dense_width)
            head.load_state_dict(state)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise DistillError(
                f"{path}: the tensors of {teacher!r} are no head ({error}); write it again."
            ) from error
        heads[teacher] = head.eval()
    return heads


def load_backbone(source: str, *, backend: str) -> Veca:
    """Stored weights as a network to train on, float32 on the host."""
    return load(source, backend=backend).train()


# ------------------------------------------------------------------------------- first weights


@dataclass
class InitialStudent:
    """Where the student's first weights come from."""

    student: Student
    patch_from: str | None = None
    """The teacher whose patch convolution was taken."""
    provenance: dict[str, Any] | None = None
    """Of the stored weights it starts from."""


def build_student(config: StudentConfig, teachers: Teachers, seed: int) -> InitialStudent:
    """Fresh or stored weights, on the host; the same on every rank."""
    widths = [teacher.widths for teacher in teachers]
    torch.manual_seed(seed)
    backbone: Veca | DenseVit
    if config.init:
        if fixed := sorted(set(config.config) - set(TRAINING_FIELDS)):
            raise DistillError(
                f"student.init takes the stored architecture, so student.config cannot change "
                f"{fixed[0]}; with stored weights only {', '.join(TRAINING_FIELDS)} can be changed."
            )
        if config.dense:
            backbone, provenance = read_dense_vit(config.init)
            backbone = backbone.float().train()
        else:
            backbone = load_backbone(config.init, backend=config.backend)
            provenance = read_provenance(config.init)
        backbone.config = backbone.config.replace(**config.config)
        start = InitialStudent(Student(backbone, widths), provenance=provenance)
        stored = load_heads(config.init) if Path(config.init).expanduser().is_dir() else {}
        for place, teacher in enumerate(teachers):
            if teacher.name in stored and str(place) in start.student.heads:
                head = stored[teacher.name].state_dict()
                start.student.heads[str(place)].load_state_dict(head)
    else:
        fields = student_config(config.preset, dict(config.config), widths[0])
        dense = config.dense
        backbone = DenseVit(fields) if dense else create_model(fields, backend=config.backend)
        start = InitialStudent(Student(backbone, widths))
        if config.patch_from_teacher:
            models = [teacher.model for teacher in teachers]
            start.patch_from = take_patch_embedding(backbone, models)
    if isinstance(backbone, Veca):
        backbone.set_grad_checkpointing(config.gradient_checkpointing)
    elif config.gradient_checkpointing:
        raise DistillError("student.gradient_checkpointing is for VECA, not for a dense student.")
    return start


def compile_blocks(student: Student, variants: int) -> None:
    """Compile each block on its own; `variants` is how many shapes each will see."""
    import torch._dynamo

    # A new graph for each budget, size and mode; torch would give up after a handful.
    # All students share the code of a block, so their graphs add up.
    wanted = 4 * variants + 8
    limits = torch._dynamo.config
    limits.recompile_limit += wanted
    limits.accumulated_recompile_limit += wanted * len(student.blocks())
    for block in student.blocks():
        block.compile(dynamic=False)
