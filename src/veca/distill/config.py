"""The settings of a run: dataclasses, read from and written as TOML.

One set of settings serves both stages: stage 1 has one image size, stage 2 has phases of sizes
and starts from stored weights.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from veca._util.limits import Count, NotNegative, Whole, at_least, check_limits, one_of
from veca._util.settings import SettingsReader, SettingsTables, Words, to_table, to_toml
from veca.data.augment import AugmentConfig
from veca.data.faults import LIMIT
from veca.distill.optim import NAMES as OPTIMIZERS
from veca.distill.recipe import find_recipe
from veca.errors import DistillError

PRECISIONS = ("auto", "bfloat16", "float32")
PARALLELS = ("auto", "none", "ddp", "fsdp")

READER = SettingsReader(
    DistillError,
    Words(
        no_file="there is no settings file {path}; `veca recipes` lists those that go by a name.",
        form="an override is written section.name=value, such as optimizer.lr=1e-3; got {line!r}.",
    ),
    find_recipe,
)


@dataclass(frozen=True)
class StudentConfig:
    """The network that learns."""

    preset: str = "small"
    """A preset of `veca.PRESETS`; its output width follows the first teacher's."""
    dense: bool = False
    """The yardstick instead: a dense ViT (full attention) of the preset's size."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of `VecaConfig` that differ from the preset's. With `init` only those of the
    augmentation of coordinates (rope_shift, rope_jitter, rope_rescale) can be changed."""
    init: str = ""
    """Stored weights to start from (a folder, a file, a name), instead of a fresh preset."""
    patch_from_teacher: bool = True
    """Fresh weights only: take the patch convolution of the first teacher where shapes agree."""
    lr_scale: NotNegative = 1.0
    """Times the schedule's learning rate, for this student: siblings that differ in nothing else
    find a good one in a single run."""
    adamw_scale: NotNegative = 1.0
    """Times that again for what AdamW moves: cores, norms, biases, the patch convolution."""
    gradient_checkpointing: bool = False
    compile: bool = False
    """Compile each block, and the loss, with torch.compile."""
    graphs: bool = False
    """Record each pass as a CUDA graph and replay it, one for every size and budget: for steps so
    short that the host cannot launch their kernels in time. One process on one GPU."""
    backend: str = "auto"
    """The attention backend."""


@dataclass(frozen=True)
class TeacherConfig:
    """One frozen teacher."""

    name: str
    """What `veca.teachers.load_teacher` understands."""
    weight: NotNegative = 1.0
    """Of its loss, where there are several."""
    dtype: str = "auto"
    """float32, bfloat16 or float16; auto is bfloat16 on a GPU and float32 elsewhere."""
    autocast: bool = False
    """Keep its weights in float32 and compute under autocast: more exact, a little slower."""
    feature: str = "cls"
    """The global feature, where there is a choice: cls, mean or projected."""
    cores: Whole = 0
    """The budget of a VECA teacher; 0 for all its cores."""
    allow_remote_code: bool = False
    """Run Python code that comes with a hub repository; only for those you trust."""
    compile: bool = False
    micro_batch: Whole = 0
    """Images it sees at once on a process, at the smallest size of the schedule, and fewer in
    proportion at larger ones; 0 for all of the step's."""
    standardise: bool = False
    """Bring each channel of its features to mean 0 and deviation 1 before the student sees them."""
    standardise_images: Annotated[int, at_least(2)] = 4096
    """How many training images the means and deviations are estimated on, before training."""
    statistics: str = ""
    """A targets.safetensors, or a folder with one, to take them from instead."""
    global_size: Whole = 0
    """Side in pixels at which its global feature is taken, or the nearest it takes, whatever the
    student's size; 0 for that of its dense features. Enlarged photos can make a classifier unsure
    and a feature small."""
    kl: NotNegative = 0.0
    """Weight of the divergence of its own classifier on both global features, where it has one."""


@dataclass(frozen=True)
class DataConfig:
    """The images. Validation images are never trained on."""

    source: str = ""
    """A folder, a .txt list, .tar shards or a pattern, or "photos:N" for N crops of the bundled
    photos."""
    name: str = ""
    """What the images are, for the provenance of the weights; empty for the source's own name."""
    licence: str = ""
    """Their licence or terms, likewise."""
    hold_out: Whole = 0
    """Validate on this many images, drawn from the source and kept out of training."""
    validation: str = ""
    """Or validate on another source."""
    split_seed: int = 0
    """Which images are held out; not the run's seed, so that repeats share the split."""
    in_memory: bool = False
    """Decode once and keep everything as uint8 on the device; for sets that fit."""
    memory_size: Count = 256
    """Side in pixels of the images kept in memory."""
    memory_mode: str = "square"
    """square keeps the centred square of each, squash the whole image without its aspect."""
    workers: int = -1
    """Processes that decode; -1 for the cores at hand."""
    bad_limit: float = LIMIT
    """The share of images that cannot be read, above which the run stops; others take their place
    below it."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)


@dataclass(frozen=True)
class LossConfig:
    """L = L_cls + dense * (cosine + mse * MSE)."""

    dense: float = 1.0
    mse: float = 1.0


@dataclass(frozen=True)
class NestedConfig:
    """Nested dropout along the core axis, and how many patch tokens go on."""

    budgets: tuple[int, ...] = ()
    """Empty for eighths of the bank: 8, 16, ... 64 as published."""
    weights: tuple[float, ...] = ()
    """Empty for the published 1, 1, 2, 2, 3, 3, 4, 4."""
    per_step: int = 1
    """Budgets trained in one step, on one pass of the teacher."""
    always: tuple[int, ...] = ()
    """Those of them that every step trains, such as [64]; the others are drawn."""
    keep: tuple[float, ...] = ()
    """Shares of patch tokens, one of which each step draws, such as [1.0, 0.5, 0.35]; empty for
    all of them at every step: nothing merges, as published."""
    keep_weights: tuple[float, ...] = ()
    """How often each share, in any unit; empty for all alike."""


@dataclass(frozen=True)
class OptimizerConfig:
    name: Annotated[str, one_of(OPTIMIZERS)] = "normuon"
    """normuon (with AdamW, as published), muon (torch's, with AdamW) or adamw."""
    lr: NotNegative = 4e-4
    lr_min: NotNegative = 5e-5
    weight_decay: NotNegative = 0.015
    mu: float = 0.95
    beta2: float = 0.95
    nesterov: bool = True
    cautious: bool = True
    """Weight decay only where the update shrinks the weight as well (NorMuon)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    eps: float = 1e-8
    clip: NotNegative = 0.0
    """Largest length of the gradient; 0 for no clipping."""
    accumulate: Count = 1
    """Parts in which a step's batch is run, to save memory."""
    accumulate_by_size: dict[int, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """A stretch of steps in which sizes are drawn alike."""

    draw: Mapping[int, float]
    """Image side in pixels -> how often, in any unit."""
    until: int | None = None
    """The first step after it; None for the last phase."""


@dataclass(frozen=True)
class ScheduleConfig:
    """How long, how fast, at which sizes."""

    steps: Whole = 0
    epochs: NotNegative = 0.0
    """Instead of steps: passes over the training images; needs one batch for all sizes."""
    warmup: Whole = 0
    """Steps of linear warm-up."""
    warmup_epochs: NotNegative = 0.0
    cooldown: Whole = 0
    """Keep the full learning rate until so many steps before the end, and come down in a line; 0
    for half a cosine over all steps. The checkpoint before the cool-down is kept: a longer run can
    start from it without a rate that rises again."""
    batch: Count = 128
    """Images a step, over all processes together."""
    batch_by_size: dict[int, int] = field(default_factory=dict)
    size: int = 0
    """Side of the images in pixels, where it is always the same."""
    phases: tuple[Phase, ...] = ()
    """Or phases that draw sizes."""


@dataclass(frozen=True)
class ValidationConfig:
    """Cosine and squared error over the grid of sizes x budgets x keep, on images never trained
    on."""

    every: Whole = 0
    """Steps; 0 for the end only."""
    sizes: tuple[int, ...] = ()
    """Empty for the sizes trained at."""
    budgets: tuple[int, ...] = ()
    """Empty for the smallest, the middle and the largest trained."""
    keep: tuple[float, ...] = ()
    """Shares of patch tokens; empty for all of them."""
    batch: Whole = 0
    """Images at once, over all processes; 0 for the training batch of the size."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: Whole = 1000
    """Steps; 0 for the end only. Last and best are kept."""
    minutes: NotNegative = 0.0
    """Also after so many minutes; 0 for never."""
    milestones: tuple[int, ...] = ()
    """Steps whose checkpoints are kept for good."""


@dataclass(frozen=True)
class FollowConfig:
    every: Count = 10
    """Steps between looks at the loss; each look makes a GPU wait."""
    tensorboard: bool = True
    """Where it is installed."""
    wandb: str = ""
    """A project of wandb's to report to."""


@dataclass(frozen=True)
class DistillConfig:
    """Everything that makes a run what it is."""

    seed: int = 0
    device: str = "auto"
    precision: Annotated[str, one_of(PRECISIONS)] = "auto"
    """auto is bfloat16 (autocast) on CUDA and float32 elsewhere."""
    parallel: Annotated[str, one_of(PARALLELS)] = "auto"
    """none, ddp or fsdp (FSDP2) under torchrun; auto is ddp there."""
    max_minutes: NotNegative = 0.0
    """Stop with a checkpoint after so much wall time of this process; 0 for no limit."""
    ema: float = 0.0
    """Decay of an average of the weights, which is then validated and exported; 0 for none."""
    student: StudentConfig = field(default_factory=StudentConfig)
    siblings: dict[str, StudentConfig] = field(default_factory=dict)
    """Further students by name, which learn in the same steps from the same answers of the
    teachers: a family for the price of one teacher, and comparisons that share every batch."""
    teachers: tuple[TeacherConfig, ...] = ()
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    nested: NestedConfig = field(default_factory=NestedConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    follow: FollowConfig = field(default_factory=FollowConfig)

    def __post_init__(self) -> None:
        check_limits(self, DistillError)
        s, o = self.schedule, self.optimizer
        if s.steps and s.epochs:
            raise DistillError("schedule takes either steps or epochs, not both.")
        if not s.steps and not s.epochs:
            raise DistillError(
                "schedule.steps is not set, nor schedule.epochs, so the run has no length; start "
                "from a recipe (--config), such as laptop, or set schedule.steps and "
                "schedule.size (--set schedule.steps=1000)."
            )
        if s.warmup and s.warmup_epochs:
            raise DistillError("schedule takes warmup (steps) or warmup_epochs, not both.")
        if bool(s.size) == bool(s.phases):
            raise DistillError(
                "schedule needs either size (one image side for all steps) or phases."
            )
        if o.lr_min > o.lr:
            raise DistillError(f"optimizer.lr_min ({o.lr_min}) is above optimizer.lr ({o.lr}).")
        if not 0 <= self.data.bad_limit <= 1:
            raise DistillError(f"data.bad_limit is a share from 0 to 1, got {self.data.bad_limit}.")
        if not 0 <= self.ema < 1:
            raise DistillError(f"ema must be at least 0 and below 1, got {self.ema}.")
        for name in self.siblings:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise DistillError(
                    f"a sibling's name becomes a folder: letters, digits, - and _; got {name!r}."
                )
        for where, one in self.students.items():
            if one.graphs and one.gradient_checkpointing:
                raise DistillError(
                    f"{where} takes graphs or gradient_checkpointing, not both: a pass that "
                    "computes parts of itself again cannot be recorded."
                )
        if self.data.hold_out and self.data.validation:
            raise DistillError("data takes hold_out or validation, not both.")
        if self.validation.every and not (self.data.hold_out or self.data.validation):
            raise DistillError(
                "validation.every is set but there is nothing to validate on; set data.hold_out "
                "(a number of images) or data.validation (another source)."
            )

    @property
    def students(self) -> dict[str, StudentConfig]:
        """The student and its siblings, by where their settings stand."""
        others = {f"siblings.{name}": one for name, one in self.siblings.items()}
        return {"student": self.student, **others}

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, or the one that `schedule.size` stands for."""
        s = self.schedule
        return s.phases or (Phase({s.size: 1.0}),)

    def replace(self, **changes: Any) -> DistillConfig:
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON and TOML."""
        return to_table(self)

    def to_toml(self) -> str:
        return to_toml(self.to_dict())

    @classmethod
    def from_dict(cls, table: object) -> DistillConfig:
        """Unknown settings are refused, with the nearest known name."""
        return READER.build(cls, SettingsTables(table))


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Sequence[str] = (),
    data: str | None = None,
    teacher: str | None = None,
) -> DistillConfig:
    """Settings from a recipe, with some changed.

    Args:
        path: the name of a recipe that comes with the package (`list_recipes`), or a TOML file,
            which may build on another (`extends = "base.toml"`, `extends = "laptop"`); without
            one, the defaults and the overrides.
        overrides: "optimizer.lr=1e-3", "student.config.depth=6", "teachers.0.weight=2", ...
        data: replaces `data.source`.
        teacher: replaces the first teacher's name.
    """
    settings = SettingsTables() if path is None else READER.read(path)
    if data is not None:
        READER.set(settings, ("data", "source"), data)
    if teacher is not None:
        first = settings.table.setdefault("teachers", [{}])
        if isinstance(first, list) and first and isinstance(first[0], dict):
            first[0]["name"] = teacher
    for line in overrides:
        READER.change(settings, line)
    return READER.build(DistillConfig, settings)
