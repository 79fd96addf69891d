"""One student's part in a training step, and all that a checkpoint has to hold of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from veca.distill.config import DistillConfig, StudentConfig
from veca.distill.draws import seed_torch
from veca.distill.ema import WeightAverage
from veca.distill.graphs import PassGraphs
from veca.distill.optim import Optimizers
from veca.distill.parallel import World, shard
from veca.distill.schedule import Plan, Step
from veca.distill.setup import Start, build_student, compile_blocks
from veca.distill.teaching import Target, Teaching
from veca.errors import DistillError


class Trainer:
    """Student, optimisers and average, as one thing that steps, saves and loads.

    Nothing here knows how many processes there are, or writes a file.

    Args:
        settings: the student's, where it is not `config.student`.
    """

    def __init__(
        self,
        config: DistillConfig,
        teaching: Teaching,
        world: World,
        settings: StudentConfig | None = None,
    ) -> None:
        self.config, self.teaching, self.world = config, teaching, world
        self.settings = config.student if settings is None else settings
        self.start: Start = build_student(self.settings, teaching, config.seed)
        self.student = self.start.student.to(world.device).train()
        self.architecture = self.student.backbone.config
        precision = config.precision
        if precision == "auto":
            precision = "bfloat16" if world.device.type == "cuda" else "float32"
        self.half = precision == "bfloat16"
        mean, std = self.architecture.image_mean, self.architecture.image_std
        self._mean = torch.tensor(mean, device=world.device).view(1, 3, 1, 1)
        self._std = torch.tensor(std, device=world.device).view(1, 3, 1, 1)

    @property
    def dense(self) -> bool:
        """Whether the student is a dense ViT, which has no budget."""
        return self.settings.dense

    def prepare(self, plan: Plan) -> None:
        """Compile, spread over the processes and make the optimisers."""
        o = self.config.optimizer
        if self.settings.compile:
            variants = len(plan.budgets.budgets) * len(plan.sizes.sizes)
            compile_blocks(self.student, variants)
        self.wrapped = self.world.wrap(self.student, self.student.blocks())
        self.parameters = list(self.student.parameters())
        self.optimizers = Optimizers(
            self.student,
            name=o.name,
            lr=o.lr,
            weight_decay=o.weight_decay,
            mu=o.mu,
            beta2=o.beta2,
            nesterov=o.nesterov,
            cautious=o.cautious,
            betas=o.betas,
            eps=o.eps,
        )
        self.ema = WeightAverage(self.student, self.config.ema) if self.config.ema else None
        self.graphs: PassGraphs | None = None
        if self.settings.graphs:
            if self.world.device.type != "cuda" or self.world.kind != "none":
                raise DistillError(
                    f"graphs records a student's passes on one CUDA GPU, this is {self.world.size} "
                    f"process(es) on {self.world.device}; set student.graphs to false, and that of "
                    "siblings too."
                )
            self.graphs = PassGraphs(self._pass, self.parameters)

    # ------------------------------------------------------------------------------------ a step

    def learn(
        self, pixels: Tensor, targets: Sequence[Target], step: Step, share: float, *, last: bool
    ) -> Tensor:
        """Forward and backward on a part of a step's batch; returns its loss terms, on the device.

        Args:
            pixels: [B, 3, H, W] in 0..1, and what the teachers say about them.
            share: of the part in the step's batch, 0..1.
            last: whether the part is the step's last.
        """
        images = self.normalise(pixels)
        # A dense student has no budgets, hence one pass, however many the others make.
        budgets = (0,) if self.dense else step.budgets
        share = share / len(budgets)
        terms: Tensor | None = None
        for number, budget in enumerate(budgets):
            seed_torch(self.config.seed, step.number, number)
            final = last and number + 1 == len(budgets)
            with self.world.backward(self.wrapped, last=final):
                here = (self.graphs or self._pass)(images, targets, budget, share)
            terms = here if terms is None else terms + here
        assert terms is not None
        return terms

    def _pass(self, images: Tensor, targets: Sequence[Target], cores: int, share: float) -> Tensor:
        """Forward and backward at one budget; adds to the gradients, returns the loss terms."""
        with self.autocast():
            predictions = self.wrapped(images, cores=cores)
        losses = self.teaching.judge(predictions, targets)
        (self.teaching.total(losses) * share).backward()
        return self.teaching.terms(losses) * share

    def update(self, step: Step) -> Tensor:
        """Move the weights after all parts of a step; returns the gradient's length."""
        self.optimizers.set_lr(step.lr * self.settings.lr_scale, self.settings.adamw_scale)
        norm = self.world.clip_gradients(self.parameters, self.config.optimizer.clip)
        self.optimizers.step()
        self.optimizers.zero_grad(keep=self.graphs is not None)
        if self.ema is not None:
            self.ema.update(step.number + 1)
        return norm

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels in 0..1 -> what the student expects."""
        return (pixels - self._mean) / self._std

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.half:
            return contextlib.nullcontext()
        # No copies of weights kept from one pass for the next: a recorded pass makes its own.
        return torch.autocast(
            self.world.device.type, dtype=torch.bfloat16, cache_enabled=not self.settings.graphs
        )

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the student has its averaged weights, if an average is kept."""
        if self.ema is None:
            yield
            return
        self.world.weights_changed(self.student)
        with self.ema.applied():
            yield
            self.world.weights_changed(self.student)

    # --------------------------------------------------------------------------------- its state

    def state(self, *, optimizer: bool = True) -> dict[str, dict[str, Tensor]]:
        """Whole tensors on the host of the first rank, by section and name. All ranks call it."""
        sections: dict[str, Mapping[str, Tensor]] = {
            "student": dict(self.student.named_parameters())
        }
        if optimizer:
            sections["optimizer"] = self.optimizers.state_tensors()
        if self.ema is not None:
            sections["ema"] = self.ema.tensors
        return {name: self.world.gather(tensors) for name, tensors in sections.items()}

    def load_state(self, sections: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `state` gave, on any number of processes; all ranks pass the same."""
        self._load_student(sections["student"])
        self.optimizers.load_state_tensors(dict(sections.get("optimizer", {})), shard)
        if self.ema is not None:
            # An average that is asked for only now starts from the weights as they are.
            stored = sections.get("ema", sections["student"])
            pieces = {name: shard(stored[name], p) for name, p in self.ema.parameters.items()}
            self.ema.load(pieces)

    @torch.no_grad()
    def _load_student(self, stored: Mapping[str, Tensor]) -> None:
        mine = dict(self.student.named_parameters())
        shapes = {name: tuple(p.shape) for name, p in mine.items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        if shapes != theirs:
            name = next(n for n in [*shapes, *theirs] if shapes.get(n) != theirs.get(n))
            raise DistillError(
                f"the checkpoint belongs to another architecture: {name} is "
                f"{_shape(theirs.get(name))} there and {_shape(shapes.get(name))} here; resume "
                "with the settings it was made with, or choose another --out."
            )
        for name, p in mine.items():
            p.copy_(shard(stored[name].to(p.dtype), p))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
