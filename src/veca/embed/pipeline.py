"""Images on their way to features: read ahead, batched by shape, computed, in bounded memory.

Every way from images to features is built of these: `veca features`, `veca embed` (here and on a
cluster) and the probes. What comes out goes to one of the `writers`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca._util.memory import is_out_of_memory
from veca._util.numbers import count
from veca._util.room import one_by_one
from veca._util.threads import compute_pool
from veca.checks import dial
from veca.config import VecaConfig
from veca.errors import InputError, VecaError, check_choice
from veca.images import normalize
from veca.model import Veca

WHAT = ("cls", "patches")
"""Kinds of feature: the global embedding, the dense features."""
DTYPES = {"float16": torch.float16, "float32": torch.float32}
"""What features can be written as."""

# Decoded pixels held beside the batches that are being computed, at most about twice this: once
# read ahead, once waiting for others of their shape. The images of a batch are held whatever their
# size.
HOLD_BYTES = 512 * 2**20

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def read_ahead(
    read: Callable[[Job], Answer],
    jobs: Iterable[Job],
    *,
    workers: int,
    ahead: int,
    nbytes: Callable[[Answer], int] = lambda answer: 0,
) -> Generator[Answer, None, None]:
    """What `read` gives for each job, in order, in advance by threads.

    Args:
        ahead: answers that may wait, at most.
        nbytes: the size of an answer; when `HOLD_BYTES` wait, no more are begun.
    """

    def read_one(job: Job) -> Answer:
        with one_by_one():
            return read(job)

    waiting: deque[Future[Answer]] = deque()
    left = iter(jobs)
    with ThreadPoolExecutor(workers, "veca-read") as pool:
        try:
            while True:
                # A failure waits for its turn, like an answer.
                ready = (f for f in waiting if f.done() and f.exception() is None)
                held = sum(nbytes(future.result()) for future in ready)
                while len(waiting) < ahead and held < HOLD_BYTES:
                    try:
                        waiting.append(pool.submit(read_one, next(left)))
                    except StopIteration:
                        break
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class _HasPixels(Protocol):
    @property
    def pixels(self) -> Tensor | NDArray[Any]: ...


Image = TypeVar("Image", bound=_HasPixels)


class ShapeBatches(Generic[Image]):
    """Gathers images into batches of one shape."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._groups: dict[tuple[int, ...], list[Image]] = {}
        self.images = self.nbytes = 0
        """What waits for others of its shape."""

    def add(self, image: Image) -> Iterator[list[Image]]:
        """Take an image; gives its batch if that is full now."""
        shape = tuple(image.pixels.shape)
        group = self._groups.setdefault(shape, [])
        group.append(image)
        self.images, self.nbytes = self.images + 1, self.nbytes + image.pixels.nbytes
        if len(group) == self._batch_size:
            yield self._pop(shape)

    def largest(self) -> list[Image]:
        """The batch that has waited for the most company."""
        return self._pop(max(self._groups, key=lambda shape: len(self._groups[shape])))

    def rest(self) -> Iterator[list[Image]]:
        """All that waits."""
        yield from [self._pop(shape) for shape in list(self._groups)]

    def _pop(self, shape: tuple[int, ...]) -> list[Image]:
        batch = self._groups.pop(shape)
        self.images -= len(batch)
        self.nbytes -= sum(image.pixels.nbytes for image in batch)
        return batch


def batch_by_shape(images: Iterable[Image], batch_size: int) -> Iterator[list[Image]]:
    """Batches of one shape. When too much waits for company, the largest group goes as it is."""
    batches: ShapeBatches[Image] = ShapeBatches(batch_size)
    for image in images:
        yield from batches.add(image)
        if batches.images >= 4 * batch_size or batches.nbytes >= HOLD_BYTES:
            yield batches.largest()
    yield from batches.rest()


def compute_ahead(
    compute: Callable[[Job], Answer],
    batches: Iterable[Job],
    *,
    at_once: int,
    threads: int | None,
    queued: int = 1,
) -> Generator[Answer, None, None]:
    """What `compute` gives for each batch, in order; several batches at a time.

    Answers for what came before an error of `batches` are given all the same.

    Args:
        threads: of torch, for each batch. None: one batch at a time, with what threads there are.
        queued: batches that wait to be computed, so that no worker is ever idle.
    """
    if threads is None:
        yield from map(compute, batches)
        return
    # A caller's autocast holds in its own thread only.
    autocast = partial(
        torch.autocast,
        "cpu",
        dtype=torch.get_autocast_dtype("cpu"),
        enabled=torch.is_autocast_enabled("cpu"),
    )

    def compute_as_caller(batch: Job) -> Answer:
        with autocast():
            return compute(batch)

    waiting: deque[Future[Answer]] = deque()
    with compute_pool(at_once, threads=threads) as pool:
        try:
            for batch in batches:
                waiting.append(pool.submit(compute_as_caller, batch))
                if len(waiting) >= at_once + queued:
                    yield waiting.popleft().result()
        except VecaError:
            while waiting:
                yield waiting.popleft().result()
            raise
        while waiting:
            yield waiting.popleft().result()


class Computed(NamedTuple):
    """Of a batch."""

    features: dict[str, NDArray[Any]]
    """As they are written: "cls" [B, D] and "patches" [B, h, w, D], as far as asked for."""
    grid: tuple[int, int]


class ModelRunner:
    """A model, which is in evaluation mode, and what is wanted of it. Any thread may call it.

    Args:
        width: "native", "projected" or "mixed"; see `feature_widths`.
        reduce: what makes features narrower, by their kind, or None.
        keep, agreement: as the model takes them.
    """

    def __init__(
        self,
        model: Veca,
        *,
        cores: int,
        what: Sequence[str],
        dtype: str,
        width: str = "projected",
        reduce: Callable[[str, Tensor], Tensor] | None = None,
        keep: float | str | None = None,
        agreement: float | None = None,
    ) -> None:
        self._model, self._cores, self._what, self._dtype = model, cores, tuple(what), dtype
        self._width, self._reduce = width, reduce
        self._dial = dial(keep, agreement)
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Computed:
        """Of float [B, 3, H, W] as `preprocess` makes it, or plain uint8 [B, H, W, 3]."""
        config, plain = self._model.config, images.dtype == torch.uint8
        height, width = images.shape[1:3] if plain else images.shape[2:]
        with explained_out_of_memory(
            f"out of memory with {count(len(images), 'image')} of {height} x {width} pixels; "
            "use a smaller batch size, a smaller size or, on a CPU, fewer threads."
        ):
            pixels = images.to(self.device)
            if plain:
                pixels = pixels.permute(0, 3, 1, 2).contiguous().float().div(255)
                pixels = normalize(pixels, config.image_mean, config.image_std)
            found, grid = self._features(pixels)
            if self._reduce is not None:
                found = {name: self._reduce(name, found[name]) for name in self._what}
            return Computed(
                {name: as_written(found[name], self._dtype) for name in self._what}, grid
            )

    def _features(self, pixels: Tensor) -> tuple[dict[str, Tensor], tuple[int, int]]:
        projected = self._width == "projected"
        if self._what == ("cls",):
            alone = self._model.cores_only(
                pixels,
                self._cores,
                first=1,
                projection=self._width != "native",
                **self._dial,
            )
            return {"cls": alone.cls}, alone.grid
        out = (self._model if projected else self._model.tokens)(
            pixels, cores=self._cores, **self._dial
        )
        # One vector an image through the projection, not one a patch.
        cls = self._model.project(out.cls) if self._width == "mixed" else out.cls
        return {"cls": cls, "patches": out.patches.unflatten(1, out.grid)}, out.grid


def checked_what(what: Sequence[str] | str) -> tuple[str, ...]:
    """The kinds of feature that are wanted, in their own order."""
    wanted = [what] if isinstance(what, str) else list(what)
    for name in wanted:
        check_choice("kind of feature", name, WHAT)
    if not wanted:
        raise InputError("no kind of feature is chosen; choose cls, patches or both.")
    return tuple(name for name in WHAT if name in wanted)


def feature_widths(config: VecaConfig, width: str) -> dict[str, int]:
    """Numbers in a vector of each kind of feature.

    "native" is what goes into the output projection, as wide as the network; "projected" what comes
    out of it, as wide as the teacher; "mixed" has cls projected and patches native.
    """
    narrow, wide = config.width, config.feature_width
    return {
        "cls": narrow if width == "native" else wide,
        "patches": wide if width == "projected" else narrow,
    }


@contextlib.contextmanager
def explained_out_of_memory(says: str, kind: type[VecaError] = InputError) -> Iterator[None]:
    """In place of an error that means a lack of memory, one that says what to do."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise kind(says) from error


def as_written(features: Tensor, dtype: str) -> NDArray[Any]:
    """Features in the dtype of a file; InputError where that cannot hold them."""
    written = features.to(DTYPES[dtype])
    if not torch.isfinite(written).all():
        hint = "write them as float32" if torch.isfinite(features).all() else "check the weights"
        raise InputError(f"features are NaN or too large for {dtype}; {hint}.")
    array: np.ndarray[Any, Any] = written.cpu().numpy()
    return array
