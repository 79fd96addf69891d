"""What comes out of our models: parts by attribute or by name, a line to see, tokens by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from veca.errors import OutputKeyError, suggest


def part(output: Any, name: str) -> Any:
    """A part of an output by its name, as `output[name]` gives it."""
    if name not in output.keys():  # noqa: SIM118  # `in` asks for this very function
        raise OutputKeyError(f"{type(output).__name__} has no part {suggest(name, output.keys())}")
    value = getattr(output, name)
    return value() if callable(value) else value


def one_line(output: Any, shown: Sequence[str]) -> str:
    """An output as its shapes, dtype and device: the numbers themselves would fill pages."""
    if not all(isinstance(value, Tensor) for value in output[:-1]):  # as tracers make them
        return tuple.__repr__(output)
    first = output[0]
    facts = [f"{name} {list(output[name].shape)}" for name in shown]
    facts += [f"grid {' x '.join(map(str, output.grid))}"]
    facts += [str(first.dtype).removeprefix("torch."), str(first.device)]
    return f"{type(output).__name__}({', '.join(facts)})"


class VecaOutput(NamedTuple):
    """What the model knows about a batch of images."""

    cores: Tensor
    """[B, C, D'] every active core; D' is `config.feature_width`."""
    patches: Tensor
    """[B, N, D'] dense features, row by row."""
    core_xy: Tensor
    """[B, C, 2] where each core ended, (x, y) in [-1, 1]."""
    grid: tuple[int, int]
    """(h, w): patches down and across."""

    @property
    def cls(self) -> Tensor:
        """[B, D'] the first core: the global embedding."""
        return self.cores[:, 0]

    def feature_map(self) -> Tensor:
        """[B, D', h, w] the dense features as an image."""
        return self.patches.transpose(1, 2).unflatten(2, self.grid)

    def keys(self) -> tuple[str, ...]:
        """Names that `out[name]` takes, which gives what `out.name` does; `dict(out)` has them."""
        return ("cls", "patches", "cores", "core_xy", "grid", "feature_map")

    def __getitem__(self, key: Any) -> Any:
        return part(self, key) if isinstance(key, str) else tuple.__getitem__(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self.keys() if isinstance(key, str) else tuple.__contains__(self, key)

    def __repr__(self) -> str:
        return one_line(self, ("cls", "patches", "cores"))


class CoresOutput(NamedTuple):
    """What `Veca.cores_only` gives: a `VecaOutput` without patches."""

    cores: Tensor
    """[B, R, D'] the cores that were asked for, the global embedding first."""
    core_xy: Tensor
    """[B, R, 2] where they ended, (x, y) in [-1, 1]."""
    grid: tuple[int, int]
    """(h, w): patches down and across."""

    @property
    def cls(self) -> Tensor:
        """[B, D'] the first core: the global embedding."""
        return self.cores[:, 0]

    def keys(self) -> tuple[str, ...]:
        """Names that `out[name]` takes, which gives what `out.name` does; `dict(out)` has them."""
        return ("cls", "cores", "core_xy", "grid")

    def __getitem__(self, key: Any) -> Any:
        return part(self, key) if isinstance(key, str) else tuple.__getitem__(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self.keys() if isinstance(key, str) else tuple.__contains__(self, key)

    def __repr__(self) -> str:
        return one_line(self, ("cls", "cores"))


class LayerTokens(NamedTuple):
    """The tokens after one layer."""

    prefix: Tensor
    """[B, P, D] those that are no patches, the global one first."""
    patches: Tensor
    """[B, N, D] row by row."""
    grid: tuple[int, int]


def as_dino(
    layers: Iterable[LayerTokens], *, reshape: bool, class_token: bool, extra_tokens: bool
) -> tuple[Any, ...]:
    """What DINO's `get_intermediate_layers` returns for some layers."""
    found: list[Any] = []
    for prefix, patches, grid in layers:
        if reshape:
            patches = patches.transpose(1, 2).unflatten(2, grid).contiguous()
        beside = [prefix[:, 0]] if class_token else []
        beside += [prefix[:, 1:]] if extra_tokens else []
        found.append((patches, *beside) if beside else patches)
    return tuple(found)
