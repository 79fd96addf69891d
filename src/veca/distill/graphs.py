"""Passes of a student as CUDA graphs: recorded once, then replayed without the host.

A forward and backward pass is a thousand small kernels. Where a step is short the host cannot
launch them as fast as the GPU runs them; a recorded pass is a single launch. It is the same pass:
same kernels, same order, gradients added to the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from veca._util.cuda import recording, side_stream
from veca.distill.teachers import TeacherTargets

Pass = Callable[[Tensor, Sequence[TeacherTargets], int, float, float], Tensor]
"""(images, targets, budget, keep, share) -> loss terms; adds the share of the gradients to
`.grad`."""

_WARM_UP = 2
"""Passes before the recording: they compile kernels and set up libraries, which it cannot."""


class Recorded(NamedTuple):
    """One recorded pass, and the loss terms it writes."""

    graph: torch.cuda.CUDAGraph
    terms: Tensor


class PassGraphs:
    """Runs one student's passes, recording each kind at its first use.

    A kind is a shape of the images, a budget, a share of patch tokens and one of the batch. Images
    and targets are copied to where the recorded kernels read them; recordings of one shape share
    that place, and all share one pool of memory for what a pass keeps for itself.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._inputs: dict[tuple[int, ...], tuple[Tensor, list[TeacherTargets]]] = {}
        self._recorded: dict[tuple[tuple[int, ...], int, float, float], Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._gradients: list[Tensor] = []

    def run(
        self,
        one_pass: Pass,
        images: Tensor,
        targets: Sequence[TeacherTargets],
        budget: int,
        keep: float,
        share: float,
    ) -> Tensor:
        """As the pass itself, which must do the same at every call."""
        shape = tuple(images.shape)
        if shape not in self._inputs:
            self._inputs[shape] = (torch.empty_like(images), [_empty(one) for one in targets])
        place, places = self._inputs[shape]
        place.copy_(images)
        for one, its_place in zip(targets, places, strict=True):
            for tensor, where in zip(one, its_place, strict=True):
                if tensor is not None and where is not None:
                    where.copy_(tensor)

        kind = (shape, budget, keep, share)
        if kind not in self._recorded:
            self._recorded[kind] = self._record(one_pass, place, places, budget, keep, share)
        recorded = self._recorded[kind]
        recorded.graph.replay()
        return recorded.terms.clone()

    def _record(
        self,
        one_pass: Pass,
        images: Tensor,
        targets: Sequence[TeacherTargets],
        budget: int,
        keep: float,
        share: float,
    ) -> Recorded:
        device = images.device
        kept = [gradient.clone() for gradient in self._gradients]
        state = torch.cuda.get_rng_state(device)
        with side_stream(device):
            for _ in range(_WARM_UP):
                one_pass(images, targets, budget, keep, share)
        if not self._gradients:
            # Recorded kernels know gradients by their addresses: these stay for the whole run. A
            # parameter that the pass does not reach has none, now as ever.
            for p in self._parameters:
                if p.grad is not None:
                    p.grad = torch.zeros_like(p)
                    self._gradients.append(p.grad)
            kept = [torch.zeros_like(gradient) for gradient in self._gradients]
        # What the warm-up added is taken back, and random numbers begin where they would have.
        torch._foreach_copy_(self._gradients, kept)
        torch.cuda.set_rng_state(state, device)
        graph = torch.cuda.CUDAGraph()
        # Threads that write checkpoints or fetch images go on meanwhile.
        with recording(graph, pool=self._pool, capture_error_mode="thread_local"):
            terms = one_pass(images, targets, budget, keep, share)
        return Recorded(graph, terms)


def _empty(target: TeacherTargets) -> TeacherTargets:
    return TeacherTargets(
        torch.empty_like(target.cls),
        torch.empty_like(target.patches),
        None if target.logits is None else torch.empty_like(target.logits),
    )
