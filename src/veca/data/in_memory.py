"""A whole set decoded once, as uint8 squares in memory or on a GPU, for sets that fit.

A set is kept on disk as one safetensors file, written once and mapped (not read) afterwards:
`images` uint8 [M, 3, S, S], `ids` int64 [M] and the names of the images.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca._util.files import atomic_write, from_json, open_file
from veca.data.decode import EncodedImage, check_shape, shaped
from veca.data.faults import LIMIT, Faults, OnBad
from veca.data.index import digest
from veca.data.names import Names
from veca.data.pool import default_workers, ordered_map
from veca.data.sources import ImageSource
from veca.errors import BadImageError, DataError

Progress = Callable[[int, int], None]
"""Called now and then with (images done, images in all)."""

SUFFIX = ".safetensors"
_FORMAT = "veca-images-1"
_HEADER = 2048  # bytes kept free for the header, which is written last
_CHUNK = 16  # images a worker handles at a time
_COPY = 1024  # images moved to a device at a time


class InMemoryImages:
    """Decoded squares, ready to be indexed.

    Attributes:
        images: uint8 [M, 3, S, S], on any device.
        ids: int64 [M], the place of each in the source it came from.
        names: M names.
        mode: "square" (the centred square of each image) or "squash" (the whole image, its aspect
            lost); see `build`.
        bad: (name, reason) of the images left out.
    """

    def __init__(
        self,
        images: Tensor,
        ids: NDArray[np.int64],
        names: Sequence[str],
        *,
        mode: str,
        source_fingerprint: str,
        bad: Sequence[tuple[str, str]] = (),
    ) -> None:
        if images.ndim != 4 or images.dtype != torch.uint8 or images.shape[1] != 3:
            raise DataError(
                f"images must be uint8 [M, 3, S, S]; got {images.dtype} {list(images.shape)}."
            )
        if not len(images) == len(ids) == len(names) or not len(images):
            raise DataError(
                f"{len(images)} images, {len(ids)} ids and {len(names)} names do not belong "
                f"together; expected the same number of each, at least one."
            )
        self.images, self.ids, self.names, self.mode = images, ids, names, mode
        self.source_fingerprint, self.bad = source_fingerprint, list(bad)

    @property
    def size(self) -> int:
        """The side of the squares in pixels."""
        return self.images.shape[2]

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """What to call an image in a message."""
        return self.names[index]

    def fingerprint(self) -> str:
        """Depends on the source and on how it was stored."""
        return digest(self.source_fingerprint, self.size, self.mode, len(self))

    def to(self, device: torch.device | str) -> InMemoryImages:
        """The same set with its pixels on `device`."""
        wanted, here = torch.device(device), self.images.device
        # "cuda" means the current card; a set must not be copied to the card it is on.
        if wanted.type == "cuda" and wanted.index is None:
            wanted = torch.device("cuda", torch.cuda.current_device())
        if here == wanted or (here.type == wanted.type and wanted.index is None):
            return self
        try:
            images = torch.empty(self.images.shape, dtype=torch.uint8, device=wanted)
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"{len(self)} images of {self.size} px take {self.images.numel() / 2**30:.1f} GiB, "
                f"more than is free on {wanted}; use a smaller size, or read them from disk."
            ) from error
        for start in range(0, len(self), _COPY):
            images[start : start + _COPY] = self.images[start : start + _COPY].to(wanted)
        return InMemoryImages(
            images,
            self.ids,
            self.names,
            mode=self.mode,
            source_fingerprint=self.source_fingerprint,
            bad=self.bad,
        )

    # ------------------------------------------------------------------------------------- making

    @classmethod
    def build(
        cls,
        source: ImageSource,
        *,
        size: int,
        mode: str = "square",
        device: torch.device | str = "cpu",
        cache: str | os.PathLike[str] | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
        bad_limit: float = LIMIT,
        on_bad: OnBad | None = None,
    ) -> InMemoryImages:
        """Decode every image of a source, or map the file an earlier call left.

        Args:
            size: the side of the stored squares in pixels: at least 9/8 of the largest crop for
                full detail. They take 3 * size^2 bytes each.
            mode: "square" cuts the largest centred square; "squash" resizes the whole image, so
                nothing is lost but its aspect.
            cache: a `.safetensors` file, or a folder in which it is named by source, size and mode.
                It is used if it belongs to this source, and written if not. Without it the set is
                decoded at every call.
            workers: processes that decode; 0 decodes in this one. Default: one for each CPU.
            bad_limit: the share of bad images above which the set is refused.

        Raises:
            DataError: no image can be read, too many cannot, or the set does not fit.
        """
        if not isinstance(size, int) or size < 1:
            raise DataError(f"size must be a whole number of pixels, at least 1; got {size!r}.")
        if mode == "short":
            raise DataError("images in memory are squares: mode must be 'square' or 'squash'.")
        check_shape(mode)
        reader = _PixelReader(source, size, mode)
        workers = default_workers() if workers is None else workers
        faults = Faults(len(source), limit=bad_limit, on_bad=on_bad)
        if cache is None:
            return _decode(reader, workers, faults, progress).to(device)
        path = cache_file(cache, source, size, mode)
        try:
            known = cls.load(path, device=device, source=source, size=size, mode=mode)
        except DataError:
            _decode_to(path, reader, workers, faults, progress)
            return cls.load(path, device=device, source=source, size=size, mode=mode)
        faults.note(len(source), known.bad)  # perhaps more than are allowed now
        return known

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the set to one file, all or nothing."""
        target = Path(path)
        with atomic_write(target) as file:
            writer = _FileWriter(file, self.size, self.mode, self.source_fingerprint)
            for start in range(0, len(self), _COPY):
                stop = min(start + _COPY, len(self))
                chosen = slice(start, stop)
                writer.add(
                    self.images[chosen].cpu().numpy(), self.ids[chosen], list(self.names[chosen])
                )
            writer.finish(self.bad)
        return target

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        source: ImageSource | None = None,
        size: int | None = None,
        mode: str | None = None,
    ) -> InMemoryImages:
        """Map a file that `save` or `build` wrote; on the CPU its pixels are read when touched.

        Args:
            source, size, mode: refuse a file made from another source or in another way.
        """
        target = Path(path)
        head, arrays = _read_file(target)
        for what, wanted, found in (
            ("source", None if source is None else source.fingerprint(), head["fingerprint"]),
            ("size", size, arrays["images"].shape[2]),
            ("mode", mode, head["mode"]),
        ):
            if wanted is not None and wanted != found:
                raise DataError(
                    f"{target} was made from another {what} ({found}, expected {wanted}); "
                    f"build it again."
                )
        return cls(
            torch.from_numpy(arrays["images"]),
            np.array(arrays["ids"]),
            Names(arrays["text"], arrays["ends"]),
            mode=head["mode"],
            source_fingerprint=head["fingerprint"],
            bad=[(name, reason) for name, reason in from_json(arrays["bad"].tobytes() or b"[]")],
        ).to(device)


def cache_file(
    cache: str | os.PathLike[str], source: ImageSource, size: int, mode: str = "square"
) -> Path:
    """The file that `InMemoryImages.build(source, cache=cache)` reads or writes.

    In a folder its name depends on where the images are: a set that was moved is decoded again.
    """
    path = Path(cache).expanduser()
    if path.suffix == SUFFIX:
        return path
    # The fingerprint does not tell two lists of the same names in different folders apart.
    place = hashlib.sha256(os.fsencode(f"{source.name(0)}\n{source.name(len(source) - 1)}"))
    return path / f"{source.fingerprint()}-{place.hexdigest()[:8]}-{size}-{mode}{SUFFIX}"


# --------------------------------------------------------------------------------------- decoding


class _Chunk(NamedTuple):
    images: NDArray[np.uint8]
    ids: list[int]
    names: list[str]
    bad: list[tuple[str, str]]


class _PixelReader:
    """Decodes a run of images; picklable."""

    def __init__(self, source: ImageSource, size: int, mode: str) -> None:
        self.source, self.size, self.mode = source, size, mode

    def __call__(self, indices: range) -> _Chunk:
        images = np.empty((len(indices), 3, self.size, self.size), np.uint8)
        ids: list[int] = []
        names: list[str] = []
        bad: list[tuple[str, str]] = []
        for index in indices:
            try:
                image = shaped(EncodedImage.of(self.source, index), self.size, self.mode)
            except BadImageError as error:
                bad.append((error.name, error.reason))
                continue
            images[len(ids)] = np.asarray(image).transpose(2, 0, 1)
            ids.append(index)
            names.append(self.source.name(index))
        return _Chunk(images[: len(ids)], ids, names, bad)

    def chunks(self, workers: int, faults: Faults, progress: Progress | None) -> Iterator[_Chunk]:
        total = len(self.source)
        pieces = [range(i, min(i + _CHUNK, total)) for i in range(0, total, _CHUNK)]
        done = 0
        for piece, chunk in zip(pieces, ordered_map(self, pieces, workers), strict=False):
            faults.note(len(piece), chunk.bad)
            yield chunk
            done += len(piece)
            if progress is not None:
                progress(done, total)
        faults.finish()
        if len(faults.bad) == total:
            name, reason = faults.bad[0]
            raise DataError(f"no image of {total} can be read; the first: {name}: {reason}.")


def _decode(
    reader: _PixelReader, workers: int, faults: Faults, progress: Progress | None
) -> InMemoryImages:
    images = np.empty((len(reader.source), 3, reader.size, reader.size), np.uint8)
    ids: list[int] = []
    names: list[str] = []
    for chunk in reader.chunks(workers, faults, progress):
        images[len(ids) : len(ids) + len(chunk.ids)] = chunk.images
        ids += chunk.ids
        names += chunk.names
    return InMemoryImages(
        torch.from_numpy(images[: len(ids)]),
        np.array(ids, np.int64),
        Names.of(names),
        mode=reader.mode,
        source_fingerprint=reader.source.fingerprint(),
        bad=faults.bad,
    )


def _decode_to(
    path: Path, reader: _PixelReader, workers: int, faults: Faults, progress: Progress | None
) -> None:
    with atomic_write(path) as file:
        writer = _FileWriter(file, reader.size, reader.mode, reader.source.fingerprint())
        for chunk in reader.chunks(workers, faults, progress):
            writer.add(chunk.images, np.array(chunk.ids, np.int64), chunk.names)
        writer.finish(faults.bad)


# ------------------------------------------------------------------------------------------- file


class _FileWriter:
    """Writes a safetensors file front to back, though the number of images is known last."""

    def __init__(self, file: IO[bytes], size: int, mode: str, fingerprint: str) -> None:
        self.file, self.size = file, size
        self.about = {"format": _FORMAT, "mode": mode, "fingerprint": fingerprint}
        self.ids: list[NDArray[np.int64]] = []
        self.names: list[str] = []
        file.write(b"\0" * (8 + _HEADER))

    def add(self, images: NDArray[np.uint8], ids: NDArray[np.int64], names: list[str]) -> None:
        self.file.write(np.ascontiguousarray(images).data)
        self.ids.append(ids)
        self.names += names

    def finish(self, bad: Sequence[tuple[str, str]]) -> None:
        names = Names.of(self.names)
        listed = np.frombuffer(json.dumps(bad, ensure_ascii=True).encode(), np.uint8)
        tail = {
            "ids": np.concatenate([*self.ids, np.empty(0, np.int64)]),
            "ends": names.ends,
            "text": names.text,
            "bad": listed,
        }
        shape = [len(self.names), 3, self.size, self.size]
        end = int(np.prod(shape))
        head: dict[str, Any] = {"__metadata__": self.about}
        head["images"] = {"dtype": "U8", "shape": shape, "data_offsets": [0, end]}
        for key, array in tail.items():
            kind = {"int64": "I64", "uint8": "U8"}[str(array.dtype)]
            place = [end, end + array.nbytes]
            head[key] = {"dtype": kind, "shape": list(array.shape), "data_offsets": place}
            end += array.nbytes
            self.file.write(array.tobytes())
        text = json.dumps(head).encode().ljust(_HEADER)
        self.file.seek(0)
        self.file.write(len(text).to_bytes(8, "little") + text)


def _read_file(path: Path) -> tuple[dict[str, str], dict[str, NDArray]]:
    """The header's own part and all arrays, mapped copy-on-write: nothing changes the file."""
    wrong = "it is no set of images, or it is cut short; build it again"
    try:
        with open_file(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > 2**20:
                raise DataError(f"{path}: {wrong}.")
            head = from_json(file.read(length))
        about = head.pop("__metadata__")
        if about["format"] != _FORMAT:
            raise DataError(f"{path}: {wrong}.")
        total = path.stat().st_size - 8 - length
        arrays = {}
        for key, entry in head.items():
            begin, end = entry["data_offsets"]
            kind = np.dtype({"I64": "<i8", "U8": "u1"}[entry["dtype"]])
            shape = tuple(entry["shape"])
            if not begin <= end <= total or end - begin != int(np.prod(shape)) * kind.itemsize:
                raise DataError(f"{path}: {wrong}.")
            arrays[key] = (
                np.memmap(path, kind, mode="c", offset=8 + length + begin, shape=shape)
                if end > begin
                else np.empty(shape, kind)
            )
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: {wrong}.") from error
    missing = {"images", "ids", "ends", "text", "bad"} - set(arrays)
    if missing:
        raise DataError(f"{path}: {wrong}.")
    return about, arrays
