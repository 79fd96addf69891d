"""Batches for training: which images, cut how, on which rank, and where to go on after a stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca.data.augment import Augmentation, AugmentConfig, as_size
from veca.data.draws import sample_keys
from veca.data.faults import LIMIT, Faults, OnBad
from veca.data.in_memory import InMemoryImages
from veca.data.index import digest
from veca.data.mixing import check_pairs
from veca.data.order import SampleOrder, Stretch
from veca.data.pool import default_workers
from veca.data.reader import CropReader, CropStream, Piece, ReadJob
from veca.data.resample import Size, copy_to_device
from veca.data.sources import Spec, open_source
from veca.errors import DataError

_STATE = 1
_LARGEST_PIECE = 32


@dataclass(frozen=True)
class BatchPlan:
    """The shape of one step's batch; None takes the loader's own value."""

    size: int | Size | None = None
    teacher_size: int | Size | None = None
    batch_size: int | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's part of a step's batch."""

    pixels: Tensor
    """[b, 3, h, w] float32 in 0..1, not normalised: what the student sees."""
    teacher_pixels: Tensor | None
    """[b, 3, H, W]: the same views at the teacher's size; None if it sees `pixels`."""
    indices: Tensor
    """int64 [b] on the CPU: the place of each image in its source."""
    epoch: int
    """The epoch of the global batch's first sample."""
    step: int

    @property
    def shown(self) -> Tensor:
        """What the teacher sees."""
        return self.pixels if self.teacher_pixels is None else self.teacher_pixels


@dataclass(frozen=True)
class _Request:
    """A step's batch, fully said."""

    step: int
    start: int
    count: int
    size: Size
    teacher_size: Size | None

    @property
    def end(self) -> int:
        return self.start + self.count


class Loader:
    """Batches of augmented views, the same for any number of ranks, resumable at any step.

    The samples form one endless sequence, epoch after epoch, each in its own shuffled order
    (`batch_indices`); a step takes the next `batch_size` of it, and rank r of n its r-th n-th. A
    batch at the end of an epoch continues in the next, so every sample comes exactly once per
    epoch. Views depend on the seed, the epoch and the image alone, and where images are mixed on
    the partner's too: samples 2k and 2k + 1 of a step's batch. Each rank's part must then be even.

    Images on disk are read, decoded and cut by worker processes ahead of time, and recoloured on
    `device`. Images in memory are cut there too.

    Args:
        source: anything `open_source` takes, or images in memory.
        batch_size: of all ranks together; must be a multiple of `world_size`.
        size: (height, width) of the student's views, or the side of a square.
        teacher_size: the teacher's, if it differs.
        seed: decides order and views.
        rank, world_size: which part of each batch is this process's.
        device: where batches are delivered.
        shuffle: False keeps the source's order (and still augments as configured).
        subset: places in the source to use; default all. See `hold_out`.
        plan: the shape of any step's batch, where it varies: a pure function of the step. With it
            the workers can read ahead, and any step can be asked for.
        workers: processes that read from disk; 0 reads when asked. Default: one for each CPU.
        prefetch: batches read ahead.
        bad_limit, on_bad: the share of bad images that stops the run, and who is told of each; see
            `veca.data.faults`.
    """

    def __init__(
        self,
        source: Spec | InMemoryImages,
        *,
        batch_size: int,
        size: int | Size,
        teacher_size: int | Size | None = None,
        augment: AugmentConfig | Augmentation | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        shuffle: bool = True,
        subset: Sequence[int] | NDArray[np.integer] | None = None,
        plan: Callable[[int], BatchPlan] | None = None,
        workers: int | None = None,
        prefetch: int = 2,
        bad_limit: float = LIMIT,
        on_bad: OnBad | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise DataError(f"rank {rank} of {world_size}; expected 0 <= rank < world_size.")
        if prefetch < 1:
            raise DataError(f"prefetch must be at least 1 batch; got {prefetch!r}.")
        self.source = source if isinstance(source, InMemoryImages) else open_source(source)
        self.augmentation = augment if isinstance(augment, Augmentation) else Augmentation(augment)
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.device = torch.device(device)
        self.batch_size = self._check_batch(batch_size)
        self.size = as_size(size)
        self.teacher_size = None if teacher_size is None else as_size(teacher_size)
        self.plan = plan
        self.prefetch = prefetch
        self.workers = default_workers() if workers is None else workers
        self._subset = _check_subset(subset, len(self.source))
        samples = len(self.source) if self._subset is None else len(self._subset)
        self.order = SampleOrder(samples, seed=seed, shuffle=shuffle)
        self.faults = Faults(samples, limit=bad_limit, on_bad=on_bad)
        self.waited_s = 0.0
        """Seconds in which a batch was asked for and no image was ready."""
        self._begun: float | None = None
        self._fingerprint: str | None = None
        self._step = self._position = 0
        self._last: _Request | None = None
        self._planned: list[int] = [0]
        self._stream: CropStream | None = None
        self._reader: CropReader | None = None
        if not isinstance(self.source, InMemoryImages):
            self._reader = CropReader(self.source, self.augmentation, self._subset)

    # -------------------------------------------------------------------------------------- order

    @property
    def samples(self) -> int:
        """Images per epoch."""
        return self.order.samples

    @property
    def step(self) -> int:
        """The step whose batch comes next."""
        return self._step

    @property
    def position(self) -> int:
        """Samples taken by all ranks together before that step."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._position // self.samples

    def batch_indices(self, step: int, *, batch_size: int | None = None) -> Stretch:
        """Epochs and source indices of the global batch at `step`: a pure function.

        Steps before it count with the plan's batch sizes, or all with the loader's own. Where
        batch sizes vary without a plan, only the next step is known.
        """
        return self._ids(self.order.take(self._start(step), self._count(step, batch_size)))

    def _start(self, step: int) -> int:
        if step < 0:
            raise DataError(f"steps count from 0; got {step}.")
        if step == self._step:
            return self._position
        if self._last is not None and step == self._last.step:
            return self._last.start
        if self.plan is None:
            if self._position != self._step * self.batch_size:
                raise DataError(
                    f"step {step} was asked for, but the loader is at step {self._step}, and batch "
                    f"sizes varied on the way; load its state, or give the loader a plan."
                )
            return step * self.batch_size
        while len(self._planned) <= step:
            done = len(self._planned) - 1
            self._planned.append(self._planned[-1] + self._count(done, None))
        return self._planned[step]

    def _count(self, step: int, batch_size: int | None) -> int:
        if batch_size is None and self.plan is not None:
            batch_size = self.plan(step).batch_size
        return self.batch_size if batch_size is None else self._check_batch(batch_size)

    def _check_batch(self, batch_size: int) -> int:
        if not isinstance(batch_size, int) or batch_size < 1 or batch_size % self.world_size:
            raise DataError(
                f"a batch of {batch_size!r} does not split evenly among {self.world_size} ranks; "
                f"expected a multiple of {self.world_size}."
            )
        if self.augmentation.config.mixing:
            check_pairs(batch_size, self.world_size)
        return batch_size

    def _ids(self, stretch: Stretch) -> Stretch:
        """From places in the order to places in the source."""
        indices = stretch.indices
        if self._subset is not None:
            indices = self._subset[indices]
        if isinstance(self.source, InMemoryImages):
            indices = self.source.ids[indices]
        return Stretch(stretch.epochs, indices)

    # ------------------------------------------------------------------------------------ batches

    def batch(
        self,
        step: int | None = None,
        *,
        size: int | Size | None = None,
        teacher_size: int | Size | None = None,
        batch_size: int | None = None,
    ) -> Batch:
        """This rank's part of the batch at `step` (default: the next), and stand after it.

        Sizes default to the plan's, then to the loader's own; `batch_size` is that of all ranks.

        Raises:
            DataError: too many images are bad, or a shard is cut short.
        """
        if self._begun is None:
            self._begun = time.perf_counter()
        step = self._step if step is None else step
        request = self._request(step, self._start(step), BatchPlan(size, teacher_size, batch_size))
        self._last = request
        batch = self._make(request)
        self._step, self._position = step + 1, request.end
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """Batches without end, from the current step."""
        while True:
            yield self.batch()

    def sweep(
        self,
        *,
        size: int | Size | None = None,
        teacher_size: int | Size | None = None,
        batch_size: int | None = None,
    ) -> Iterator[Batch]:
        """Every image once, in the order of epoch 0, for validation; the training step stays.

        The last batch may be smaller, and a rank's part of it smaller than another's; a rank whose
        part is empty gets none.
        """
        size, teacher_size = self._sizes(BatchPlan(size, teacher_size))
        count = self.batch_size if batch_size is None else self._check_batch(batch_size)
        requests = [
            _Request(i, start, min(count, self.samples - start), size, teacher_size)
            for i, start in enumerate(range(0, self.samples, count))
        ]
        if self.augmentation.config.mixing and requests:
            check_pairs(requests[-1].count, self.world_size)
        if self._stream is not None or (self._reader is not None and self.workers):
            self._restart(job for request in requests for job in self._jobs(request))
        for request in requests:
            if len(self._rows(request)[1]):
                yield self._make(request)

    def _request(self, step: int, start: int, asked: BatchPlan) -> _Request:
        planned = self.plan(step) if self.plan is not None else BatchPlan()
        merged = BatchPlan(
            asked.size if asked.size is not None else planned.size,
            asked.teacher_size if asked.teacher_size is not None else planned.teacher_size,
        )
        return _Request(step, start, self._count(step, asked.batch_size), *self._sizes(merged))

    def _sizes(self, asked: BatchPlan) -> tuple[Size, Size | None]:
        """Both sizes; the teacher's is None when it equals the student's."""
        size = self.size if asked.size is None else as_size(asked.size)
        teacher = self.teacher_size if asked.teacher_size is None else as_size(asked.teacher_size)
        return size, (None if teacher == size else teacher)

    def _rows(self, request: _Request) -> tuple[NDArray, NDArray, NDArray, int]:
        """This rank's places in the order, source indices and keys, and its offset in the batch."""
        share = -(-request.count // self.world_size)
        first = min(self.rank * share, request.count)
        count = min(share, request.count - first)
        places = self.order.take(request.start + first, count)
        ids = self._ids(places)
        keys = sample_keys(self.seed, ids.epochs, ids.indices)
        return places.indices, ids.indices, keys, first

    def _make(self, request: _Request) -> Batch:
        places, indices, keys, _ = self._rows(request)
        if isinstance(self.source, InMemoryImages):
            if self._subset is not None:
                places = self._subset[places]
            before = time.perf_counter()
            held = self.source.images
            images = held.index_select(0, copy_to_device(places, held.device)).to(self.device)
            if held.device.type != self.device.type:
                self.waited_s += time.perf_counter() - before
            views = self.augmentation(images, keys, request.size, request.teacher_size)
        else:
            student, teacher = self._read(request)
            views = self.augmentation.colour(student, keys, teacher)
        return Batch(
            views.student,
            views.teacher,
            torch.from_numpy(indices),
            request.start // self.samples,
            request.step,
        )

    # -------------------------------------------------------------------------------- from a disk

    def _read(self, request: _Request) -> tuple[Tensor, Tensor | None]:
        """Cut views on `device`, from the workers if there are any."""
        jobs = self._jobs(request)
        count = sum(len(job.indices) for job in jobs)
        out = torch.empty((count, 3, *request.size), dtype=torch.uint8, device=self.device)
        teacher = None
        if request.teacher_size is not None:
            teacher = out.new_empty((count, 3, *request.teacher_size))
        row = 0
        for job in jobs:
            before = time.perf_counter()
            piece = self._piece(job, request)
            self.waited_s += time.perf_counter() - before
            if piece.error is not None:
                raise DataError(piece.error)
            self.faults.note(len(job.indices), piece.bad)
            rows = slice(row, row + len(job.indices))
            out[rows].copy_(piece.student, non_blocking=True)
            if teacher is not None and piece.teacher is not None:
                teacher[rows].copy_(piece.teacher, non_blocking=True)
            row = rows.stop
        return out, teacher

    def _piece(self, job: ReadJob, request: _Request) -> Piece:
        if self._reader is None:  # pragma: no cover - images in memory have no jobs
            raise DataError("images in memory are not read from a disk.")
        if not self.workers:
            return self._reader[job]
        piece = self._stream.next() if self._stream is not None else None
        if piece is None or piece.tag != job.tag:  # not what was foreseen
            self._restart(self._ahead(request))
            piece = self._stream.next() if self._stream is not None else None
        if piece is None or piece.tag != job.tag:
            raise DataError(f"the workers lost their place at step {request.step}; run it again.")
        return piece

    def _restart(self, jobs: Iterator[ReadJob]) -> None:
        if self._stream is None and self._reader is not None:
            pin = self.device.type == "cuda"
            self._stream = CropStream(
                self._reader, workers=self.workers, prefetch=self.prefetch, pin=pin
            )
        if self._stream is not None:
            self._stream.start(jobs)

    def _ahead(self, request: _Request) -> Iterator[ReadJob]:
        """Jobs from this batch on: as planned, or like this one."""
        while True:
            yield from self._jobs(request)
            likely = BatchPlan()
            if self.plan is None:
                likely = BatchPlan(
                    request.size, request.teacher_size or request.size, request.count
                )
            request = self._request(request.step + 1, request.end, likely)

    def _jobs(self, request: _Request) -> list[ReadJob]:
        """One batch as pieces, so that all workers share it."""
        _, indices, keys, first = self._rows(request)
        piece = max(1, min(_LARGEST_PIECE, -(-len(indices) // max(1, self.workers))))
        return [
            ReadJob(
                request.start + first + i,
                indices[i : i + piece],
                keys[i : i + piece],
                request.size,
                request.teacher_size,
            )
            for i in range(0, len(indices), piece)
        ]

    def close(self) -> None:
        """End the worker processes; the loader starts them again when it is used again."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    # -------------------------------------------------------------------------------------- state

    @property
    def waited_share(self) -> float:
        """Share of the time since the first batch that was spent waiting for images, 0..1."""
        if self._begun is None:
            return 0.0
        return self.waited_s / max(time.perf_counter() - self._begun, 1e-9)

    @property
    def bad(self) -> list[tuple[str, str]]:
        """(name, reason) of each image skipped so far on this rank."""
        return self.faults.bad

    def fingerprint(self) -> str:
        """Identifies the images and the choice among them."""
        if self._fingerprint is None:  # kept: hashing millions of names takes a while
            chosen = "all" if self._subset is None else self._subset.tobytes().hex()
            self._fingerprint = digest(self.source.fingerprint(), chosen)
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, as plain JSON values; the same on every rank."""
        return {
            "version": _STATE,
            "step": self._step,
            "position": self._position,
            "seed": self.seed,
            "samples": self.samples,
            "fingerprint": self.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where `state_dict` was taken, on any number of ranks.

        Args:
            strict: refuse the state of another set of images or another seed: some images would
                come twice in an epoch and others not at all.
        """
        missing = {"version", "step", "position", "seed", "samples", "fingerprint"} - set(state)
        if missing or state["version"] != _STATE:
            raise DataError("this is not a loader's state; expected what state_dict() returned.")
        if strict:
            for name, mine in (
                ("seed", self.seed),
                ("samples", self.samples),
                ("fingerprint", self.fingerprint()),
            ):
                if state[name] != mine:
                    raise DataError(
                        f"the state belongs to other data: its {name} is {state[name]}, here it is "
                        f"{mine}; resume with the same images and seed (load_state_dict takes "
                        "strict=False to go on all the same)."
                    )
        self._step, self._position = int(state["step"]), int(state["position"])
        self._last = None


def _check_subset(
    subset: Sequence[int] | NDArray[np.integer] | None, total: int
) -> NDArray[np.int64] | None:
    if subset is None:
        return None
    chosen = np.asarray(subset)
    if chosen.ndim != 1 or not len(chosen) or chosen.dtype.kind not in "iu":
        raise DataError("subset must be a list of places in the source, at least one.")
    if chosen.min() < 0 or chosen.max() >= total:
        raise DataError(
            f"subset names places {chosen.min()}..{chosen.max()}, but the source has {total} "
            f"images; expected 0..{total - 1}."
        )
    return chosen.astype(np.int64)
