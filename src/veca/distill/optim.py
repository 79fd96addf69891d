"""Which optimiser moves which parameter, behind one small face.

Published split: NorMuon for the 2D weights of linear layers, except the coordinate heads and the
last block's second feed-forward weight; AdamW for everything else. One learning rate and one
schedule for both, unless asked otherwise. `muon` (torch's) and plain `adamw` are choices.

The core bank is moved row by row: a core outside the step's prefix got no gradient, and neither
its momentum nor weight decay may move it meanwhile.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from veca.distill.normuon import NorMuon, local
from veca.errors import CheckpointError, DistillError

NAMES = ("normuon", "muon", "adamw")

_COORDINATE_HEAD = re.compile(r"(^|\.)moves\.\d+\.head\.")
_BANK = re.compile(r"(^|\.)bank\.(tokens|coordinates)$")


class Split:
    """Names of parameters by what moves them."""

    def __init__(self, module: nn.Module, *, matrices: bool = True) -> None:
        linear = {name for name, m in module.named_modules() if isinstance(m, nn.Linear)}
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        last = _last_feed_forward(names)
        self.bank = [name for name in names if _BANK.search(name)]
        self.matrix = [
            name
            for name in names
            if matrices
            and name.endswith(".weight")
            and name.removesuffix(".weight") in linear
            and not _COORDINATE_HEAD.search(name)
            and name != last
        ]
        taken = {*self.bank, *self.matrix}
        self.rest = [name for name in names if name not in taken]


def _last_feed_forward(names: Iterable[str]) -> str | None:
    """The name of the last block's second feed-forward weight."""
    found = [(int(m[1]), m[0]) for name in names if (m := _FFN_DOWN.match(name))]
    return max(found)[1] if found else None


_FFN_DOWN = re.compile(r"(?:.*\.)?blocks\.(\d+)\.ffn\.down\.weight$")


class Optimizers:
    """All parameters of a module under their optimisers, with states that go by name."""

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str = "normuon",
        lr: float = 4e-4,
        weight_decay: float = 0.015,
        mu: float = 0.95,
        beta2: float = 0.95,
        nesterov: bool = True,
        cautious: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if name not in NAMES:
            raise DistillError(f"unknown optimiser {name!r}; expected one of {', '.join(NAMES)}.")
        self.name = name
        self.parameters = dict(module.named_parameters())
        self.split = Split(module, matrices=name != "adamw")
        self.members: list[Optimizer] = []
        adam: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
        }

        matrix = self._pick(self.split.matrix)
        if matrix and name == "normuon":
            muon: Optimizer = NorMuon(
                matrix,
                lr=lr,
                mu=mu,
                beta2=beta2,
                weight_decay=weight_decay,
                nesterov=nesterov,
                cautious=cautious,
            )
            self.members.append(muon)
        elif matrix:
            if any(isinstance(p, DTensor) for p in matrix):
                raise DistillError(
                    "optimizer 'muon' (torch.optim.Muon) does not know sharded parameters; with "
                    "parallel 'fsdp' use 'normuon' or 'adamw'."
                )
            self.members.append(
                torch.optim.Muon(
                    matrix,
                    lr=lr,
                    weight_decay=weight_decay,
                    momentum=mu,
                    nesterov=nesterov,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if bank := self._pick(self.split.bank):
            self.members.append(RowAdamW(bank, **adam))
        # A group of its own for each kind: multi-tensor kernels take no mixture of the two.
        rest = self._pick(self.split.rest)
        whole = [p for p in rest if not isinstance(p, DTensor)]
        sharded = [p for p in rest if isinstance(p, DTensor)]
        groups = [{"params": kind} for kind in (whole, sharded) if kind]
        if groups:
            cuda = all(p.is_cuda for p in rest)
            speed: dict[str, Any] = {"fused": True} if cuda else {"foreach": True}
            self.members.append(torch.optim.AdamW(groups, **adam, **speed))

    def _pick(self, names: Iterable[str]) -> list[Tensor]:
        return [self.parameters[name] for name in names]

    def set_lr(self, lr: float, adamw_scale: float = 1.0) -> None:
        """Set the learning rate, `adamw_scale` times as large where AdamW moves."""
        for member in self.members:
            moves_matrices = isinstance(member, (NorMuon, torch.optim.Muon))
            for group in member.param_groups:
                group["lr"] = lr if moves_matrices else lr * adamw_scale

    def step(self) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self, *, keep: bool = False) -> None:
        """Forget the gradients; `keep` their tensors, filled with zeros."""
        for member in self.members:
            member.zero_grad(set_to_none=not keep)

    # --------------------------------------------------------------------------------- states

    def state_tensors(self) -> dict[str, Tensor]:
        """Every state tensor as "parameter/state", as the optimisers hold it (perhaps sharded).

        Empty before the first step.
        """
        names = {id(p): name for name, p in self.parameters.items()}
        return {
            f"{names[id(p)]}/{key}": value
            for member in self.members
            for p, state in member.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def load_state_tensors(self, state: dict[str, Tensor], shard: Shard) -> None:
        """Put states back that `state_tensors` gave and were gathered.

        `shard(whole, parameter)` cuts a whole tensor of a parameter's shape as that parameter is.
        """
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, part = key.rpartition("/")
            by_parameter.setdefault(name, {})[part] = value
        if unknown := sorted(set(by_parameter) - set(self.parameters)):
            raise DistillError(
                f"the checkpoint holds optimiser states of parameters that this run does not have "
                f"({', '.join(unknown[:3])}); it belongs to another architecture or set of "
                "teachers."
            )
        for member in self.members:
            for group in member.param_groups:
                for p in group["params"]:
                    name = next(n for n, q in self.parameters.items() if q is p)
                    if name in by_parameter:
                        _check_state(name, by_parameter[name], p, member)
                        member.state[p] = {
                            part: _place(value, part, p, member, shard)
                            for part, value in by_parameter[name].items()
                        }


Shard = Callable[[Tensor, Tensor], Tensor]

_STATES = {"NorMuon": {"momentum", "second"}, "Muon": {"momentum_buffer"}}
_ADAM_STATES = {"step", "exp_avg", "exp_avg_sq"}


def _check_state(name: str, parts: Mapping[str, Tensor], p: Tensor, member: Optimizer) -> None:
    """Refuse what is not the state of an optimiser for a parameter."""
    wanted = _STATES.get(type(member).__name__, _ADAM_STATES)
    if parts.keys() != wanted:
        raise CheckpointError(
            f"the checkpoint's optimiser holds {', '.join(sorted(parts))} of {name}, expected "
            f"{', '.join(sorted(wanted))}; it is damaged."
        )
    for part, value in parts.items():
        # As large as the parameter, a number for each row, or one number.
        sizes = zip(value.shape, p.shape, strict=False)
        if value.ndim not in (0, p.ndim) or any(mine not in (1, its) for mine, its in sizes):
            raise CheckpointError(
                f"the checkpoint's optimiser holds {part} of {name} with the shape "
                f"{list(value.shape)}, which does not fit {list(p.shape)}; it is damaged."
            )


def _place(value: Tensor, part: str, p: Tensor, member: Optimizer, shard: Shard) -> Tensor:
    """One state tensor where its optimiser wants it: sharded like p, whole, or on the host."""
    if part == "step" and not isinstance(member, RowAdamW):
        # torch keeps the count of steps on the host, unless its fused kernels need it beside p.
        on_device = bool(member.param_groups[0].get("fused"))
        return value.to(p.device if on_device else "cpu", torch.float32)
    if value.shape == p.shape or isinstance(member, RowAdamW):
        return shard(value.to(p.device), p)
    return value.to(p.device)


class RowAdamW(Optimizer):
    """AdamW in which a row without any gradient stays as it is: weight, averages and step count.

    For the core bank: the rows are cores, and those outside a step's prefix have gradient zero.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_one(p, group)
        return loss

    def _step_one(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
            state["step"] = torch.zeros_like(p[:, :1])
        # Rows never cross shards, so that each rank can see to its own.
        assert p.grad is not None
        weight, grad = local(p), local(p.grad)
        mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        steps = local(state["step"])
        beta1, beta2 = group["betas"]

        active = (grad != 0).any(dim=1, keepdim=True)
        steps.add_(active)
        mean.copy_(torch.where(active, torch.lerp(mean, grad, 1 - beta1), mean))
        square.copy_(torch.where(active, torch.lerp(square, grad.square(), 1 - beta2), square))
        first = mean / (1 - beta1**steps)
        denominator = (square / (1 - beta2**steps)).sqrt() + group["eps"]
        change = weight * group["weight_decay"] + first / denominator
        weight.sub_(torch.where(active, group["lr"] * change, 0.0))


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
            [local(t) for t in self.tensors.values()],
            [local(p) for p in self.parameters.values()],
            1 - self.decay_at(step),
        )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over averages that are already cut like the parameters."""
        for name, tensor in self.tensors.items():
            local(tensor).copy_(local(tensors[name]))

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
            weights, average = local(p), local(self.tensors[name])
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)
