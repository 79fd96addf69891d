"""A running average of the student's weights, which is steadier than the last ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WeightAverage:
    """Exponential moving average; young averages forget faster, so that the start is lost soon."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(module.named_parameters())
        self.tensors: dict[str, Tensor] = {
            name: p.detach().clone() for name, p in self.parameters.items()
        }

    def decay_at(self, step: int) -> float:
        """The decay used after `step` steps (1 for the first)."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        torch._foreach_lerp_(
            [_local(t) for t in self.tensors.values()],
            [_local(p) for p in self.parameters.values()],
            1 - self.decay_at(step),
        )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over averages that are already cut like the parameters."""
        for name, tensor in self.tensors.items():
            _local(tensor).copy_(_local(tensors[name]))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the module has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, p in self.parameters.items():
            weights, average = _local(p), _local(self.tensors[name])
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
