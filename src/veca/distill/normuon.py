"""NorMuon: momentum, made orthogonal, then evened out neuron by neuron.

For a weight matrix W with gradient G (arXiv:2510.05491, and Polar Express, arXiv:2505.16932):

    M <- mu M + G                     momentum
    U  = G + mu M                     Nesterov's look ahead (else U = M)
    O  = polar(U)                     the nearest orthogonal matrix: all singular values near 1
    V <- beta2 V + (1 - beta2) mean of O^2 along each row      one number per neuron
    O' = O / sqrt(V), scaled back to the length of O
    W <- W - lr wd W  where W and O' have the same sign (cautious decay)
    W <- W - lr 0.2 sqrt(max(rows, columns)) O'

An orthogonal matrix has entries of RMS 1 / sqrt(max(rows, columns)), so the last line moves
entries by about 0.2 lr each, as AdamW does: one learning rate serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from veca.errors import DistillError

# Odd polynomials a x + b x^3 + c x^5, each the best fit to 1 on the interval that the ones before
# leave singular values in, which start in [0.001, 1]. All but the last give 1 % away, so that
# rounding in bfloat16 cannot push a value out of its interval.
POLAR_EXPRESS = (
    (8.237312490495555, -23.157747414558198, 16.680568411445915),
    (4.082441999064836, -2.8930477353325887, 0.5252849256975651),
    (3.9263479922546556, -2.8547468034765293, 0.5318022422894989),
    (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
    (2.320007312889811, -1.6862169729967622, 0.42068027340235137),
)
_RMS = 0.2
"""RMS of an AdamW update, by experience, for lr 1."""
_TINY = 1e-8


def polar_express(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The orthogonal polar factors of `matrices` [..., rows, columns], roughly.

    Singular values come out between 0.86 and 1.14, which is all that an update needs. Computed in
    `dtype`, by default bfloat16 on a GPU and float32 elsewhere, and returned so.
    """
    if dtype is None:
        dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the Gram matrix of the short side is the smaller one
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) * 1.01 + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class NorMuon(Optimizer):
    """NorMuon for 2D weights; give other parameters to AdamW, with the same learning rate.

    Matrices of one shape are orthogonalised together, as one batch. Parameters sharded by FSDP2
    (DTensors) keep their momentum sharded; the update is gathered, worked out whole on every
    rank and cut again, so that the numbers are those of a single process.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 4e-4,
        *,
        mu: float = 0.95,
        beta2: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        cautious: bool = True,
    ) -> None:
        for name, value in (("mu", mu), ("beta2", beta2)):
            if not 0 <= value < 1:
                raise DistillError(f"{name} must be at least 0 and below 1, got {value}.")
        defaults = {
            "lr": lr,
            "mu": mu,
            "beta2": beta2,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "cautious": cautious,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise DistillError(
                        f"NorMuon takes 2D weights only, got one of shape {list(p.shape)}; give "
                        "the others to AdamW."
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault((p.shape, p.dtype, p.device), []).append(p)
            for alike in by_shape.values():
                self._step_alike(alike, group)
        return loss

    def _step_alike(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One update of matrices of one shape."""
        momenta = [self._state(p)["momentum"] for p in params]
        second = [self._state(p)["second"] for p in params]
        updates = _momentum(params, momenta, group["mu"], group["nesterov"])

        stacked = torch.stack([_whole(update) for update in updates])
        orthogonal = polar_express(stacked).float()
        evened, new_second = even_out(orthogonal, torch.stack(second), group["beta2"])
        torch._foreach_copy_(second, list(new_second.unbind()))

        rows, columns = params[0].shape
        scale = group["lr"] * _RMS * math.sqrt(max(rows, columns))
        pieces = [_like(update, p) for update, p in zip(evened.unbind(), params, strict=True)]
        weights = [local(p) for p in params]
        change = _change(
            torch.stack(weights),
            torch.stack(pieces),
            scale,
            group["lr"] * group["weight_decay"],
            group["cautious"],
        )
        torch._foreach_sub_(weights, list(change.unbind()))

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
            # Whole on every rank even where p is sharded: one number a row is nothing.
            state["second"] = torch.zeros(p.shape[0], 1, device=p.device, dtype=torch.float32)
        return state


def even_out(orthogonal: Tensor, second: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """Divide each row of [K, rows, columns] by its running RMS; each matrix keeps its length.

    Returns the matrices and the new running mean squares [K, rows, 1].
    """
    second = torch.lerp(second, orthogonal.square().mean(dim=-1, keepdim=True), 1 - beta2)
    evened = orthogonal / (second.sqrt() + _TINY)
    before = torch.linalg.matrix_norm(orthogonal, keepdim=True)
    after = torch.linalg.matrix_norm(evened, keepdim=True).clamp_min(_TINY)
    return evened * (before / after), second


def _momentum(
    params: list[Tensor], momenta: list[Tensor], mu: float, nesterov: bool
) -> list[Tensor]:
    """Add the gradients to the momenta; return the directions, sharded like the parameters."""
    grads = [p.grad.float() for p in params]  # type: ignore[union-attr]
    torch._foreach_mul_(momenta, mu)
    torch._foreach_add_(momenta, grads)
    if not nesterov:
        return momenta
    return list(torch._foreach_add(grads, momenta, alpha=mu))


def _change(weights: Tensor, updates: Tensor, scale: float, decay: float, cautious: bool) -> Tensor:
    """What is taken from the weights [K, rows, columns]: the scaled update and the decay.

    Cautious decay shrinks only the weights that the update shrinks as well (or leaves alone).
    """
    change = updates * scale
    if decay:
        shrink = weights.float() * decay
        if cautious:
            shrink = torch.where(weights * updates >= 0, shrink, 0.0)
        change += shrink
    return change.to(weights.dtype)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(whole: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a whole matrix that every rank has, cut as `p` is."""
    if not isinstance(p, DTensor):
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local()
