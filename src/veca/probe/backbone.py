"""Something that gives features: VECA weights at a budget, a teacher, a dense ViT.

Everybody gets the same pixels (0..1, not normalised) and brings them to its own size and
normalisation. The protocol's cell (16 pixels) says how fine the grid is. A network whose own stride
is at most that runs at the size nearest to the image on its own grid: patch 14 sees 518 x 518
pixels, on 37 x 37 patches, where patch 16 sees 512 x 512 on 32 x 32. A coarser one, such as a CNN
of stride 32, is shown the image enlarged, so that its dense features fall on the protocol's cells.
"""

from __future__ import annotations

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from veca._util.moved import moved
from veca._util.numbers import count
from veca.checks import check_budget, check_dials, dial
from veca.config import AUTO, VecaConfig
from veca.cost import Cost, cost
from veca.dense import DenseVit
from veca.embed.pipeline import explained_out_of_memory
from veca.errors import ProbeError
from veca.images import normalize
from veca.model import Veca
from veca.probe.protocol import Extract
from veca.probe.record import label_of
from veca.weights.names import public_name
from veca.weights.tensors import content_hash

if TYPE_CHECKING:
    from veca.teachers import Teacher

Grid = tuple[int, int]

CPU_PIXELS = 300_000
"""Pixels of a teacher's own input that a CPU takes at a time. With more, the wide early layers of a
CNN take fresh memory from the system again and again, which doubles the time."""

STUDENT, TEACHER, BASELINE = "student", "teacher", "baseline"


class Features(NamedTuple):
    """Of a batch of images, float32."""

    cls: Tensor
    """[B, D] the global feature."""
    patches: Tensor
    """[B, h * w, D'] the dense features, row by row."""
    grid: Grid


class Compute(NamedTuple):
    """What one image costs; None where it is not known."""

    interactions: int | None
    """Query-key pairs in one layer's attention; None for networks without attention."""
    flops: int | None
    """A multiply-add is two."""


class Backbone(ABC):
    """One row of a table: a frozen network, at one budget if it has such."""

    name: str
    role: str
    """"student", "teacher" (what retention is measured against) or "baseline"."""
    cores: int | None = None
    keep: float | str | None = None
    """The share of patch tokens that go on; None: all of them, always."""
    agreement: float | None = None
    """What keep="auto" promises."""
    precision: str | None = None
    """What it computes in, where a run has several; None: what the protocol says."""
    device: torch.device

    @property
    def label(self) -> str:
        return label_of(self.name, self.cores, self.keep, self.agreement, self.precision)

    @abstractmethod
    def grid_for(self, size: Grid, cell: int) -> Grid:
        """Its feature grid (h, w) for images of `size` (height, width) pixels; see the module."""

    @abstractmethod
    def features(self, pixels: Tensor, grid: Grid) -> Features:
        """Features of `pixels` [B, 3, H, W], float in 0..1, on `grid`."""

    def cls(self, pixels: Tensor, grid: Grid) -> Tensor:
        """The global feature of `features` alone, [B, D]: for less, where the network can."""
        return self.features(pixels, grid).cls

    @abstractmethod
    def identity(self) -> dict[str, Any] | None:
        """What its features depend on, as JSON types: the key of a cache. None: cannot be told.

        It may be remembered until `refresh` is called.
        """

    def refresh(self) -> None:
        """Forget what was remembered of the weights; called before every extraction."""
        return

    def under(self, settings: Extract) -> Backbone:
        """This backbone with the features that a protocol asks for; the weights are shared."""
        return self

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the record of a run says of it, as JSON types; the same at every budget."""

    @abstractmethod
    def compute(self, size: Grid, cell: int) -> Compute:
        """What one image of `size` pixels costs."""


class _OwnBackbone(Backbone):
    """What the networks of this package have in common.

    `projection` False: features are those that go into the output projection, after the last norm.
    """

    kind: ClassVar[str]

    def __init__(self, model: Veca | DenseVit, name: str, role: str, projection: bool) -> None:
        self.model = model.eval()
        self.name, self.role = name, role
        self.projection = projection
        # Shared by all budgets of one network: hashing large weights takes a while.
        self._hash: list[str] = []

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return next(self.model.parameters()).device

    def under(self, settings: Extract) -> Backbone:
        row = copy.copy(self)
        row.projection = settings.projection
        return row

    def grid_for(self, size: Grid, cell: int) -> Grid:
        return own_grid(size, self.model.config.patch_size, cell)

    def features(self, pixels: Tensor, grid: Grid) -> Features:
        images = _prepare(pixels, grid, self.model.config, self.device)
        budget = {} if self.cores is None else {"cores": self.cores}
        budget |= dial(self.keep, self.agreement)
        with torch.inference_mode():
            out = (self.model if self.projection else self.model.tokens)(images, **budget)
        return Features(out.cls.float(), out.patches.float(), out.grid)

    def refresh(self) -> None:
        self._hash.clear()

    def hash(self) -> str:
        if not self._hash:
            self._hash.append(content_hash(self.model.state_dict()))
        return self._hash[0]

    def identity(self) -> dict[str, Any]:
        config = self.model.config.to_dict()
        facts = {"kind": self.kind, "weights": self.hash(), "config": config}
        return {**facts, **_named_features(self.projection)}

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "weights_sha256": self.hash(),
            "config": self.model.config.to_dict(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            **_named_features(self.projection),
        }

    def _cost(self, size: Grid, cell: int) -> Cost:
        config, grid = self.model.config, self.grid_for(size, cell)
        return cost(
            config,
            (grid[0] * config.patch_size, grid[1] * config.patch_size),
            self.cores,
            keep=self.keep,
        )


class ElasticBackbone(_OwnBackbone):
    """A VECA network at a budget and a share of tokens; the first core is the global feature.

    `projection` False: features are those that go into the output projection, after the last norm.
    """

    kind = "veca"

    def __init__(
        self,
        model: Veca,
        cores: int | None = None,
        *,
        keep: float | str | None = None,
        agreement: float | None = None,
        name: str = "veca",
        role: str = STUDENT,
        projection: bool = True,
        precision: str | None = None,
    ) -> None:
        super().__init__(model, name, role, projection)
        self.model: Veca = model.eval()
        self.precision = precision
        self._set(cores, keep, agreement)

    def at(
        self,
        budgets: Iterable[int],
        keeps: Sequence[float | str] = (1.0,),
        agreement: float | None = None,
    ) -> list[ElasticBackbone]:
        """The same network at other budgets, each at other shares; the weights are shared."""
        rows = []
        for budget in budgets:
            for keep in keeps:
                rows.append(copy.copy(self))
                rows[-1]._set(budget, keep, agreement if AUTO in (budget, keep) else None)
        return rows

    def _set(self, cores: int | None, keep: float | str | None, agreement: float | None) -> None:
        self.cores = check_budget(cores, self.model.config.num_cores)
        _, self.keep, self.agreement = check_dials(self.model, cores, keep, agreement)

    def identity(self) -> dict[str, Any]:
        # Of all tokens nothing is said, so that what 0.1 computed is found again.
        return {**super().identity(), "cores": self.cores, **dial(self.keep, self.agreement)}

    def cls(self, pixels: Tensor, grid: Grid) -> Tensor:
        images = _prepare(pixels, grid, self.model.config, self.device)
        with torch.inference_mode():
            out = self.model.cores_only(
                images,
                self.cores,
                first=1,
                projection=self.projection,
                **dial(self.keep, self.agreement),
            )
        return out.cls.float()

    def compute(self, size: Grid, cell: int) -> Compute:
        if AUTO in (self.cores, self.keep):
            return Compute(None, None)  # each image has its own
        found = self._cost(size, cell).veca
        return Compute(found.interactions, found.flops)


class DenseBackbone(_OwnBackbone):
    """A dense ViT of this package, the yardstick; `projection` as of a `ElasticBackbone`."""

    kind = "dense"

    def __init__(
        self,
        model: DenseVit,
        *,
        name: str = "dense",
        role: str = BASELINE,
        projection: bool = True,
    ) -> None:
        super().__init__(model, name, role, projection)

    def compute(self, size: Grid, cell: int) -> Compute:
        found = self._cost(size, cell).dense
        return Compute(found.interactions, found.flops)


class TeacherBackbone(Backbone):
    """A teacher of `veca.teachers`: its own size, normalisation, tokens and choice of feature."""

    def __init__(self, teacher: Teacher, *, name: str | None = None, role: str = TEACHER) -> None:
        self.teacher = teacher
        self.name, self.role = name or teacher.name, role
        self._identity: dict[str, Any] | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.teacher.device

    def grid_for(self, size: Grid, cell: int) -> Grid:
        if self.teacher.stride > cell and self.teacher.sizes is None:
            return own_grid(size, cell, cell)
        return self.teacher.grid_for(size)

    def features(self, pixels: Tensor, grid: Grid) -> Features:
        with torch.inference_mode():
            batches = pixels.split(self._at_once(len(pixels), grid))
            parts = [self.teacher.features(batch, grid) for batch in batches]
            cls = torch.cat([part.cls for part in parts])
            patches = torch.cat([part.patches for part in parts])
        return Features(cls.float(), patches.float(), parts[0].grid)

    def _at_once(self, images: int, grid: Grid) -> int:
        """Images in a forward pass; on a CPU few, see `CPU_PIXELS`."""
        if self.device.type != "cpu":
            return images
        height, width = self.teacher.input_size(grid)
        return max(1, CPU_PIXELS // (height * width))

    def refresh(self) -> None:
        self._identity = None

    def identity(self) -> dict[str, Any] | None:
        from veca.teachers import CallableTeacher

        if isinstance(self.teacher, CallableTeacher):
            return None  # its weights may be known, its code is not
        if self._identity is None:
            facts = self.teacher.describe()
            self._identity = {
                "kind": "teacher",
                "weights": content_hash(self.teacher.state_dict()),
                "class": type(self.teacher).__qualname__,
                # Where it was found, and under which name, does not change its features.
                "teacher": jsonable(
                    {k: v for k, v in facts.items() if k not in ("name", "source", "licence")}
                ),
                "structure": hashlib.sha256(str(self.teacher).encode()).hexdigest(),
                **_settings_of(self.teacher),
            }
        return self._identity

    def describe(self) -> dict[str, Any]:
        facts = jsonable(self.teacher.describe())
        named = {key: public_name(str(facts[key])) for key in ("name", "source") if key in facts}
        return {"kind": "teacher", **facts, **named}

    def compute(self, size: Grid, cell: int) -> Compute:
        grid = self.grid_for(size, cell)
        counter = FlopCounterMode(display=False, custom_mapping=_cpu_attention())
        pixels = torch.zeros(1, 3, *size, device=self.device)
        with counter:
            self.features(pixels, grid)
        height, width = self.teacher.input_size(grid)
        patches = (height // self.teacher.stride) * (width // self.teacher.stride)
        attends = any("attention" in type(m).__name__.lower() for m in self.teacher.modules())
        return Compute(patches**2 if attends else None, counter.get_total_flops())


# Of a model's configuration, what says nothing about its features.
_BOOKKEEPING = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")


def _settings_of(module: nn.Module) -> dict[str, str]:
    """The configuration of a model that carries one: weights alone do not show everything."""
    for part in module.modules():
        to_dict = getattr(getattr(part, "config", None), "to_dict", None)
        if callable(to_dict):
            facts = {k: v for k, v in to_dict().items() if k not in _BOOKKEEPING}
            text = json.dumps(facts, sort_keys=True, default=str)
            return {"config": hashlib.sha256(text.encode()).hexdigest()}
    return {}


def _cpu_attention() -> dict[Any, Any]:
    """torch's counter knows the fused attention of GPUs only."""

    def count(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    return {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count}


def as_backbone(
    network: Veca | DenseVit | Teacher | Backbone,
    *,
    cores: int | None = None,
    keep: float | str | None = None,
    agreement: float | None = None,
    name: str | None = None,
    role: str | None = None,
) -> Backbone:
    """A backbone from any network this package knows."""
    if isinstance(network, Backbone):
        return network
    if isinstance(network, Veca):
        return ElasticBackbone(
            network,
            cores,
            keep=keep,
            agreement=agreement,
            name=name or "veca",
            role=role or STUDENT,
        )
    if cores is not None or keep is not None:
        raise ProbeError(
            f"{type(network).__name__} has no cores and merges nothing; leave out cores and keep."
        )
    if isinstance(network, DenseVit):
        return DenseBackbone(network, name=name or "dense", role=role or BASELINE)
    if isinstance(network, nn.Module) and hasattr(network, "grid_for"):
        return TeacherBackbone(network, name=name, role=role or TEACHER)
    raise ProbeError(
        f"cannot take features from {type(network).__name__}; expected a Veca, a DenseVit, a "
        "teacher of veca.teachers, or a subclass of veca.probe.Backbone."
    )


def own_grid(size: Grid, patch: int, cell: int) -> Grid:
    """The grid nearest to `size` pixels with cells of `patch` pixels, or of `cell` if finer."""
    side = min(patch, cell)
    return tuple(max(1, (2 * x + side) // (2 * side)) for x in size)  # type: ignore[return-value]


def guarded_features(
    backbone: Backbone, pixels: Tensor, grid: Grid, *, cls_only: bool = False
) -> Features:
    """`backbone.features`, with an error in plain words for the usual failures.

    With `cls_only` no patches are computed: there are 0 of them.
    """
    number, _, height, width = pixels.shape
    with explained_out_of_memory(
        f"out of memory: {backbone.label} on {count(number, 'image')} of {height} x {width} "
        "pixels; use a smaller --batch-size or --size.",
        ProbeError,
    ):
        if cls_only:
            cls = backbone.cls(pixels, grid)
            out = Features(cls, cls.new_empty(len(cls), 0, cls.shape[1]), grid)
        else:
            out = backbone.features(pixels, grid)
    if not (torch.isfinite(out.cls).all() and torch.isfinite(out.patches).all()):
        raise ProbeError(
            f"{backbone.label} gives NaN or infinite features; its weights or its dtype are not "
            "usable."
        )
    return out


def _named_features(projection: bool) -> dict[str, str]:
    """For keys and records; nothing for what a network gives by itself."""
    return {} if projection else {"features": "before the output projection"}


def _prepare(pixels: Tensor, grid: Grid, config: VecaConfig, device: torch.device) -> Tensor:
    size = (grid[0] * config.patch_size, grid[1] * config.patch_size)
    pixels = pixels.to(device)
    if pixels.shape[-2:] != size:
        pixels = F.interpolate(
            pixels, size, mode="bicubic", align_corners=False, antialias=True
        ).clamp(0, 1)
    return normalize(pixels, config.image_mean, config.image_std)


def jsonable(value: Any) -> Any:
    """Through JSON and back; what JSON lacks is written as text."""
    return json.loads(json.dumps(value, default=str))


def check_unique(backbones: Sequence[Backbone]) -> None:
    """Two rows of one name cannot be told apart."""
    labels = [backbone.label for backbone in backbones]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ProbeError(f"two backbones are called {twice[0]!r}; give each its own name.")


__getattr__ = moved(__name__, {"VecaBackbone": "ElasticBackbone"})
