"""One process, DDP or FSDP2: what differs between them, so that the loop need not know.

Processes are those of torchrun (RANK, WORLD_SIZE, LOCAL_RANK). Every rank holds the same number
of images of a step, so the mean over ranks is the mean over the batch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from veca._util.device import usable_device
from veca.errors import DistillError, InputError

_TIMEOUT = timedelta(minutes=15)
"""How long a rank waits for the others: longer than any validation or save takes."""
_SETTLING_S = 0.2
"""What gloo's threads get to let go of the tensors of the last exchange, for which they need
Python's lock: a thread that asks for it while the interpreter closes down aborts the process. To
end the group is not enough, since torch's caches about sharded tensors keep it and its threads."""

T = TypeVar("T")


@dataclass
class World:
    """This process among the others."""

    kind: str = "none"
    """none, ddp or fsdp."""
    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _scalars: list[Tensor] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    # ------------------------------------------------------------------------------- the model

    def wrap(self, module: nn.Module, blocks: Sequence[nn.Module] = ()) -> nn.Module:
        """The module to call in training; `module` keeps its parameter names.

        `blocks` are the parts that FSDP2 gathers one at a time.
        """
        if self.kind == "ddp":
            ids = [self.device] if self.device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(
                module, device_ids=ids, gradient_as_bucket_view=True
            )
        if self.kind == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            # Nothing here changes a prediction in place, which is what it warns of.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            mesh = init_device_mesh(self.device.type, (self.size,))
            # FSDP2 cannot cut a single number; those stay whole and `finish_backward` averages
            # their gradients.
            ignored = {p for p in module.parameters() if p.ndim == 0}
            self._scalars += [p for p in module.parameters() if p in ignored]
            for block in blocks:
                fully_shard(block, mesh=mesh, ignored_params=ignored)  # type: ignore[arg-type]
            fully_shard(module, mesh=mesh, ignored_params=ignored)  # type: ignore[arg-type]
        return module

    @contextlib.contextmanager
    def backward(self, wrapped: nn.Module, *, last: bool) -> Iterator[None]:
        """Around forward and backward of a part of the batch; gradients meet in the last one."""
        if self.kind == "ddp" and not last:
            with wrapped.no_sync():  # type: ignore[operator]
                yield
            return
        if self.kind == "fsdp":
            wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    def weights_changed(self, module: nn.Module) -> None:
        """After weights were replaced outside a step: FSDP2 may hold gathered copies of the old."""
        if self.kind == "fsdp":
            from torch.distributed.fsdp import FSDPModule

            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def finish_backward(self) -> None:
        """After the last backward: average the gradients that FSDP2 does not handle."""
        grads = [p.grad for p in self._scalars if p.grad is not None]
        if self.kind == "fsdp" and grads:
            mean = self.mean(torch.stack(grads))
            torch._foreach_copy_(grads, list(mean.unbind()))

    def clip_gradients(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Scale all gradients so that together they are at most `limit` long (if above 0).

        Returns their length before that, without waiting for the device.
        """
        grads = [p.grad for p in parameters if p.grad is not None]
        locals_ = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        shares = [g for g, whole in zip(locals_, grads, strict=True) if isinstance(whole, DTensor)]
        others = [g for g, whole in zip(locals_, grads, strict=True) if g is whole]
        total = torch.zeros((), device=self.device)
        if shares:
            total = self.sum(_squares(shares))
        if others:
            total = total + _squares(others)
        norm = total.sqrt()
        if limit > 0:
            torch._foreach_mul_(locals_, (limit / (norm + 1e-6)).clamp_max(1.0))
        return norm

    # --------------------------------------------------------------------------------- numbers

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all ranks, in place."""
        return self.sum(tensor).div_(self.size) if self.size > 1 else tensor

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes; the same answer on all."""
        if self.size == 1:
            return flag
        tensor = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return bool(tensor.item())

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def from_first(self, value: T | None) -> T:
        """The first rank's plain value, on all ranks."""
        if self.size == 1:
            return value  # type: ignore[return-value]
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]  # type: ignore[return-value]

    # --------------------------------------------------------------------------------- tensors

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the host, whole; empty on all ranks but the first. All ranks must call it."""
        gathered = {}
        for name, tensor in tensors.items():
            whole = tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            if self.is_first:
                gathered[name] = whole.to("cpu", copy=True)
        return gathered

    def spread(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """The first rank's tensors, on all ranks, on the host; others pass None."""
        if self.size == 1:
            return dict(tensors or {})
        about = self.from_first(
            [(name, t.shape, t.dtype) for name, t in (tensors or {}).items()]
            if self.is_first
            else None
        )
        result = {}
        for name, shape, dtype in about:
            if tensors is not None and self.is_first:
                box = tensors[name].to(self.device).contiguous()
            else:
                box = torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(box, src=0)
            result[name] = box.cpu()
        return result


def shard(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor that every rank has, cut as `like` is."""
    whole = whole.to(like.device)
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _squares(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square().sum()


@contextlib.contextmanager
def launch(kind: str, device: str | torch.device) -> Iterator[World]:
    """Join the other processes of torchrun, if there are any, and leave them at the end.

    Args:
        kind: none, ddp, fsdp, or auto: ddp under torchrun.
        device: auto, or a torch device; under torchrun each process takes its own GPU.
    """
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    size = int(os.environ.get("WORLD_SIZE", "1")) if under_torchrun else 1
    if kind == "auto":
        kind = "ddp" if under_torchrun and size > 1 else "none"
    if kind in ("ddp", "fsdp") and not under_torchrun:
        raise DistillError(
            f"parallel {kind!r} needs several processes; start it with "
            "`torchrun --standalone --nproc_per_node=N -m veca distill ...`."
        )
    if kind == "none" and size > 1:
        raise DistillError(
            f"parallel 'none' under torchrun with {size} processes would train {size} times the "
            "same; use auto, ddp or fsdp."
        )
    place = _device(device, int(os.environ.get("LOCAL_RANK", "0")) if under_torchrun else None)
    if kind == "none":
        yield World(device=place)
        return

    ours = not dist.is_initialized()
    if ours:
        options: dict[str, Any] = {"timeout": _TIMEOUT}
        if place.type == "cuda":
            torch.cuda.set_device(place)
            options["device_id"] = place
        store, rank, size = next(rendezvous("env://", timeout=_TIMEOUT))
        store.set_timeout(_TIMEOUT)
        dist.init_process_group(
            "nccl" if place.type == "cuda" else "gloo",
            store=dist.PrefixStore(meet(store, rank, size), store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            **options,
        )
    yield World(kind, dist.get_rank(), dist.get_world_size(), place)
    # Not after an error: others may be in a collective, and tidying up would wait for them.
    # Leaving instead makes torchrun end them.
    if dist.get_backend() == "gloo":
        time.sleep(_SETTLING_S)
    if ours:
        dist.destroy_process_group()


def meet(store: Any, rank: int, size: int) -> str:
    """Agree with the other ranks on a name for this start of the job.

    torchrun keeps one store for all its restarts, and with it the addresses of processes that are
    dead: a rank that starts faster than another would call one of those. Nor can restarts be
    counted, since each machine's torchrun counts only its own. So every rank says hello with a
    number made up now, and the first answers that very number.
    """
    mine = secrets.token_hex(8)
    if rank > 0:
        store.set(f"veca/hello/{rank}", mine)
        session = store.get(f"veca/go/{rank}/{mine}").decode()
        store.set(f"veca/here/{session}/{rank}", "yes")
        return f"veca/{session}"
    answered: dict[int, bytes] = {}
    missing = set(range(1, size))
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"veca/here/{mine}/{other}"]):
                missing.discard(other)
            elif store.check([f"veca/hello/{other}"]):
                said = store.get(f"veca/hello/{other}")
                if answered.get(other) != said:  # a later hello replaces that of a dead process
                    store.set(f"veca/go/{other}/{said.decode()}", mine)
                    answered[other] = said
        if time.monotonic() > deadline:
            raise DistillError(
                f"{len(missing)} of {size} processes did not start in time; look at their output."
            )
        time.sleep(0.01)
    return f"veca/{mine}"


def _device(device: str | torch.device, local_rank: int | None) -> torch.device:
    name = str(device)
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available() and local_rank is None:
            name = "mps"
        else:
            name = "cpu"
    if name == "cuda" and local_rank is not None:
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise DistillError(
                f"process {local_rank} of this machine has no GPU of its own: there are {count}; "
                "start fewer processes (--nproc_per_node) or use --set device=cpu."
            )
        name = f"cuda:{local_rank}"
    try:
        place = usable_device(name)
    except InputError as error:
        raise DistillError(str(error)) from error
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    return place


@contextlib.contextmanager
def own_torch_state(device: torch.device) -> Iterator[None]:
    """Fast settings on a GPU; torch's random state and its settings are left as they were found."""
    cuda = device.type == "cuda"
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices=[device] if cuda else []):
        if cuda:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            torch.backends.cudnn.benchmark = benchmark
