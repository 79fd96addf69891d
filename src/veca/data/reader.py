"""Reading and cutting views in worker processes."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from veca._util.room import Room, one_by_one, use_room
from veca.data.augment import Augmentation
from veca.data.decode import GAP, EncodedImage
from veca.data.draws import choice
from veca.data.resample import Size, crop_resize
from veca.data.sources import ImageSource
from veca.errors import BadImageError, DataError

_TRIES = 10
_REPLACE = 1000  # streams from here on pick replacements


class ReadJob(NamedTuple):
    """Some samples of one batch, to be cut at one size."""

    start: int
    """Place of the first in the sequence of samples."""
    indices: NDArray[np.int64]
    keys: NDArray[np.uint64]
    size: Size
    teacher_size: Size | None

    @property
    def tag(self) -> str:
        """Tells jobs apart; a string, because pinning turns tuples into lists."""
        return f"{self.start}+{len(self.indices)} {self.size} {self.teacher_size}"


class Piece(NamedTuple):
    """What became of a job: views cut, not yet recoloured."""

    tag: str
    student: Tensor
    """uint8 [n, 3, h, w]."""
    teacher: Tensor | None
    bad: list[tuple[str, str]]
    """(name, reason) of the images another one stands in for."""
    error: str | None
    """What makes going on impossible; the views are then worth nothing."""


class CropReader(Dataset[Piece]):
    """Reads jobs. A bad image is replaced by another, drawn from the sample's own key.

    Args:
        allowed: the images to draw replacements from; None for all.
    """

    def __init__(
        self,
        source: ImageSource,
        augmentation: Augmentation,
        allowed: NDArray[np.int64] | None = None,
    ) -> None:
        self.source, self.augmentation, self.allowed = source, augmentation, allowed

    def __getitem__(self, job: ReadJob) -> Piece:
        count = len(job.indices)
        student = np.zeros((count, 3, *job.size), np.uint8)
        teacher = None
        if job.teacher_size is not None:
            teacher = np.zeros((count, 3, *job.teacher_size), np.uint8)
        bad: list[tuple[str, str]] = []
        error = None
        try:
            for row in range(count):
                with one_by_one():
                    views = self._views(int(job.indices[row]), job.keys[row : row + 1], job, bad)
                student[row] = views[0]
                if teacher is not None:
                    teacher[row] = views[1]
        except DataError as problem:  # as text: a traceback from another process helps nobody
            error = str(problem)
        return Piece(
            job.tag,
            torch.from_numpy(student),
            None if teacher is None else torch.from_numpy(teacher),
            bad,
            error,
        )

    def _views(
        self, index: int, key: NDArray[np.uint64], job: ReadJob, bad: list[tuple[str, str]]
    ) -> list[NDArray[np.uint8]]:
        for attempt in range(_TRIES + 1):
            try:
                return self._cut(index, key, job)
            except BadImageError as error:
                bad.append((error.name, error.reason))
            pool = len(self.source) if self.allowed is None else len(self.allowed)
            place = int(choice(key, _REPLACE + attempt, pool)[0])
            index = place if self.allowed is None else int(self.allowed[place])
        name, reason = bad[-1]
        raise DataError(
            f"{_TRIES + 1} images in a row cannot be read, the last {name} ({reason}); check that "
            f"the images are still there."
        )

    def _cut(self, index: int, key: NDArray[np.uint64], job: ReadJob) -> list[NDArray[np.uint8]]:
        encoded = EncodedImage.of(self.source, index)
        height, width = encoded.size
        crops = self.augmentation.crops(key, np.array([height]), np.array([width]), job.size)
        box, flip = crops.boxes[0], bool(crops.flips[0])
        tall, wide = (box[3] - box[1]) * height, (box[2] - box[0]) * width
        sizes = [job.size] if job.teacher_size is None else [job.size, job.teacher_size]
        needed = max(max(size[0] / tall, size[1] / wide) for size in sizes)
        image = encoded.decode(GAP * needed)
        return [crop_resize(image, box, flip, size) for size in sizes]


class CropStream:
    """Pieces in the order of the jobs, read ahead by worker processes."""

    def __init__(self, reader: CropReader, *, workers: int, prefetch: int, pin: bool) -> None:
        self._queue = _Queue()
        self._loader = DataLoader(
            reader,
            sampler=self._queue,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch,
            persistent_workers=True,
            pin_memory=pin,
            collate_fn=_unchanged,
            worker_init_fn=partial(_begin, Room(makers=multiprocessing.get_context())),
            # Its own generator: otherwise starting workers would move the global random state.
            generator=torch.Generator(),
        )
        self._pieces: Iterator[Piece] | None = None

    def start(self, jobs: Iterator[ReadJob]) -> None:
        """Forget what was read ahead, and begin with these jobs."""
        self._queue.jobs = jobs
        pieces = iter(self._loader)
        if pieces is not self._pieces:  # the same one again as long as its workers live
            atexit.register(_end_workers, weakref.ref(pieces))
        self._pieces = pieces

    def close(self) -> None:
        """End the workers."""
        if self._pieces is not None:
            _end_workers(weakref.ref(self._pieces))
        self._pieces = None

    def next(self) -> Piece | None:
        """The next piece; None when the jobs have run out or none were started."""
        try:
            return None if self._pieces is None else next(self._pieces, None)
        except RuntimeError as error:
            if "worker" not in str(error):
                raise
            raise DataError(
                f"a worker that reads images died ({str(error).splitlines()[0]}), perhaps for lack "
                f"of memory or shared memory; use fewer workers."
            ) from error


class _Queue:
    """What the data loader draws its jobs from."""

    jobs: Iterator[ReadJob] = iter(())

    def __iter__(self) -> Iterator[ReadJob]:
        return self.jobs


def _unchanged(piece: Any) -> Any:
    return piece


def _begin(room: Room, worker: int) -> None:
    use_room(room)
    # Ctrl-C reaches every process of a terminal, SIGTERM every one that torchrun, Slurm or systemd
    # ends. The main process stops cleanly, needs its workers until then, and ends them itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _let_pass)


def _let_pass(number: int, frame: object) -> None:
    """The first SIGTERM; the next ends this worker, as it ends the main process."""
    signal.signal(number, signal.SIG_DFL)


def _end_workers(pieces: weakref.ref[Iterator[Piece]]) -> None:
    """Have a data loader's workers leave, if it is still there.

    At exit this comes before multiprocessing, which sends each worker one SIGTERM, and would wait
    for ever for one that lets it pass.
    """
    end = getattr(pieces(), "_shutdown_workers", None)
    if end is not None:
        end()
