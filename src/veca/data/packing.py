"""Write an image set as tar shards of small, uniform files, which any machine reads fast.

Shards follow the webdataset layout: plain tar files of `key.jpg` or `key.webp`, the key made of the
image's place in the source and its file name. Their bytes depend on the source and the settings
alone, not on the number of workers or on how often the work was interrupted: each shard appears
whole, `manifest.json` records what it holds, and a second run goes on after the last one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from PIL import features

from veca._util.files import (
    atomic_write_json,
    atomic_write_text,
    check_fields,
    commit,
    exclusive,
    one_line,
    output_errors,
    place_for,
    printable,
    read_json,
    temporary_beside,
)
from veca._util.numbers import parse_bytes
from veca.data.decode import EncodedImage, check_shape, shaped
from veca.data.pool import default_workers, ordered_map
from veca.data.sources import ImageSource, Spec, open_source
from veca.errors import BadImageError, DataError, OutputError, check_choice, shown

MANIFEST, FAILURES = "manifest.json", "failures.txt"
FORMATS = {"jpeg": ".jpg", "webp": ".webp"}
_LAYOUT = "veca-shards-1"
_LOCK = ".pack.lock"
_MANIFEST = {"settings": dict, "complete": bool, "next": int, "shards": list, "failures": list}
_SHARD_ENTRY = {"file": str, "bytes": int, "images": int, "first": int, "stop": int}
_FAILURE = {"index": int, "name": str, "reason": str}
_CHUNK = 16  # images a worker handles at a time
_BLOCK = 512
_TAIL = 2 * _BLOCK  # the end mark of a tar file
_IN_A_ROW = 100  # this many failures without a success are no accident


@dataclass(frozen=True)
class PackReport:
    """What a call of `pack` left behind."""

    out: Path
    images: int
    """Images in the shards."""
    failures: list[tuple[str, str]]
    """(name, reason) of the images that could not be read."""
    shards: list[Path]
    bytes: int
    """Size of all shards together."""
    written: int
    """Images packed by this call; the others were there already."""


def pack(
    source: Spec,
    out: str | os.PathLike[str],
    *,
    size: int | None = 224,
    mode: str = "short",
    format: str = "jpeg",
    quality: int = 75,
    shard_size: int | str = "64MiB",
    per_shard: int | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PackReport:
    """Pack images into shards, or go on with a folder where that was interrupted.

    Args:
        source: anything `open_source` takes.
        out: a folder; `manifest.json`, and `failures.txt` if images could not be read, are written
            beside the shards.
        size: in pixels; None keeps each image's own.
        mode: "short" scales the short side to `size` (never up); "square" cuts the centred square;
            "squash" makes a square of the whole image.
        format: "jpeg" or "webp".
        quality: 1..100.
        shard_size: a shard is closed before it would grow beyond this: bytes, or "64MiB", "1GB".
        per_shard: this many images per shard instead.
        workers: processes; 0 works in this one. Default: one for each CPU.
        progress: called with (images done, images in all).

    Raises:
        DataError: no images, 100 unreadable ones in a row, or a folder that was packed from
            another source or with other settings.
        OutputError: the folder cannot be written, or another process is writing to it.
    """
    encoder = _Encoder(open_source(source), size, mode, format, quality)
    settings = {
        "layout": _LAYOUT,
        "size": size,
        "mode": mode if size is not None else None,
        "format": format,
        "quality": quality,
        "shard_size": None if per_shard is not None else parse_bytes(shard_size, DataError),
        "per_shard": per_shard,
        "source": encoder.source.fingerprint(),
        "images": len(encoder.source),
    }
    if per_shard is not None and (not isinstance(per_shard, int) or per_shard < 1):
        raise DataError(f"per_shard must be a whole number of at least 1; got {per_shard!r}.")
    folder = place_for(out)
    busy = f"{folder} is being packed by another process; wait for it or choose another."
    with exclusive(folder / _LOCK, busy):
        packer = _Packer(folder, encoder, settings)
        packer.run(default_workers() if workers is None else workers, progress)
    return packer.report()


# --------------------------------------------------------------------------------------- encoding


@dataclass(frozen=True)
class _PackedImage:
    index: int
    name: str
    """In the source."""
    data: bytes | None
    reason: str
    """Why there is no data."""


class _Encoder:
    """Re-encodes a run of images; picklable."""

    def __init__(
        self, source: ImageSource, size: int | None, mode: str, format: str, quality: int
    ) -> None:
        check_shape(mode)
        check_choice("format", format, FORMATS, DataError)
        if format == "webp" and not features.check("webp"):
            raise DataError("this Pillow was built without WebP; use format='jpeg'.")
        if size is not None and (not isinstance(size, int) or size < 1):
            raise DataError(f"size must be a whole number of pixels, at least 1; got {size!r}.")
        if not isinstance(quality, int) or not 1 <= quality <= 100:
            raise DataError(f"quality must be a whole number in 1..100; got {quality!r}.")
        self.source, self.size, self.mode = source, size, mode
        self.format, self.quality = format, quality

    def __call__(self, indices: range) -> list[_PackedImage]:
        return [self._encode(index) for index in indices]

    def _encode(self, index: int) -> _PackedImage:
        name = self.source.name(index)
        try:
            encoded = EncodedImage.of(self.source, index)
            if self.size is None:
                image = encoded.decode()
            else:
                image = shaped(encoded, self.size, self.mode)
            buffer = io.BytesIO()
            image.save(buffer, self.format, quality=self.quality)
        except BadImageError as error:
            return _PackedImage(index, name, None, error.reason)
        except (OSError, ValueError) as error:  # such as a side too long for the format
            if isinstance(error, DataError):
                raise
            return _PackedImage(index, name, None, f"cannot be written as {self.format} ({error})")
        return _PackedImage(index, name, buffer.getvalue(), "")

    def items(self, start: int, workers: int) -> Iterator[_PackedImage]:
        total = len(self.source)
        pieces = (range(i, min(i + _CHUNK, total)) for i in range(start, total, _CHUNK))
        for chunk in ordered_map(self, pieces, workers):
            yield from chunk

    def member(self, item: _PackedImage) -> str:
        """A unique name without a second dot, which would end the key."""
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePath(item.name).stem)[:64].strip("-")
        return f"{item.index:08d}{'_' if stem else ''}{stem}{FORMATS[self.format]}"


# ---------------------------------------------------------------------------------------- writing


class _Packer:
    """Fills one shard after another and keeps the manifest."""

    def __init__(self, folder: Path, encoder: _Encoder, settings: dict[str, Any]) -> None:
        self.folder, self.encoder, self.settings = folder, encoder, settings
        self.manifest = self._resume()
        self.before = sum(shard["images"] for shard in self.manifest["shards"])

    def run(self, workers: int, progress: Callable[[int, int], None] | None) -> None:
        total = len(self.encoder.source)
        if progress is not None:
            progress(self.manifest["next"], total)
        items = self.encoder.items(self.manifest["next"], workers)
        try:
            with output_errors(self.folder / MANIFEST):
                self._fill(items, total, progress)
        finally:
            items.close()  # type: ignore[attr-defined]
        if not self.manifest["shards"]:
            failed = self.manifest["failures"]
            raise DataError(
                f"no image of {total} can be read; the first: {failed[0]['name']}: "
                f"{failed[0]['reason']}. {self.folder / FAILURES} lists them all."
            )

    def _fill(
        self, items: Iterator[_PackedImage], total: int, progress: Callable[[int, int], None] | None
    ) -> None:
        shard: _ShardWriter | None = None
        failures: list[dict[str, Any]] = []
        in_a_row = 0
        try:
            for item in items:
                if progress is not None and item.index % _CHUNK == 0:
                    progress(item.index, total)
                if item.data is None:
                    name, reason = printable(item.name), printable(item.reason)
                    failures.append({"index": item.index, "name": name, "reason": reason})
                    in_a_row += 1
                    if in_a_row >= _IN_A_ROW and total > _IN_A_ROW:
                        raise DataError(
                            f"{in_a_row} images in a row cannot be read, the last {item.name} "
                            f"({item.reason}); put that right and run again, what is packed stays."
                        )
                    continue
                in_a_row = 0
                if shard is not None and self._is_full(shard, len(item.data)):
                    self._close(shard, item.index, failures)
                    shard = None
                if shard is None:
                    shard = _ShardWriter(self.folder, len(self.manifest["shards"]))
                shard.add(self.encoder.member(item), item.data)
            if shard is not None or failures:
                self._close(shard, total, failures)
            shard = None
            self._check_shards()
            self._save(complete=True)
        finally:
            if shard is not None:
                shard.drop()
        if progress is not None:
            progress(total, total)

    def _check_shards(self, *, all_of_them: bool = True) -> None:
        """Raise unless what the manifest lists is there: somebody may have removed it meanwhile."""
        shards = self.manifest["shards"]
        gone = [
            entry for entry in (shards if all_of_them else shards[-1:]) if not self._is_there(entry)
        ]
        if gone:
            raise OutputError(
                f"{self.folder / gone[0]['file']} was written and is gone or changed: something "
                "else has changed the folder meanwhile; run it again, what is missing is packed."
            )

    def _is_full(self, shard: _ShardWriter, size: int) -> bool:
        if self.settings["per_shard"] is not None:
            return shard.images >= self.settings["per_shard"]
        return shard.bytes + _BLOCK + _padded(size) + _TAIL > self.settings["shard_size"]

    def _close(self, shard: _ShardWriter | None, stop: int, failures: list[dict[str, Any]]) -> None:
        """Put a shard in place and record it, with all failures before the image at `stop`."""
        self._check_shards(all_of_them=False)
        if shard is not None:
            first = self.manifest["next"]
            self.manifest["shards"].append({**shard.finish(), "first": first, "stop": stop})
        self.manifest["failures"] += failures
        failures.clear()
        self.manifest["next"] = stop
        self._save(complete=False)

    def _save(self, *, complete: bool) -> None:
        self.manifest["complete"] = complete
        if self.manifest["failures"]:
            lines = [
                f"{one_line(entry['name'])}\t{one_line(entry['reason'])}\n"
                for entry in self.manifest["failures"]
            ]
            atomic_write_text(self.folder / FAILURES, "".join(lines))
        atomic_write_json(self.folder / MANIFEST, self.manifest)

    def _resume(self) -> dict[str, Any]:
        """The manifest to go on with, cut back to the shards that are really there."""
        path = self.folder / MANIFEST
        for mine in ("shard-*.tar", MANIFEST, FAILURES):
            for rest in self.folder.glob(f".{mine}.*.tmp"):  # of a run that was killed
                rest.unlink(missing_ok=True)
        if not path.exists():
            self._refuse_strangers()
            return {
                "settings": self.settings, "complete": False, "next": 0, "shards": [],
                "failures": [],
            }  # fmt: skip
        manifest = read_json(path, DataError)
        check_fields(manifest, _MANIFEST, path, DataError)
        found, shards = manifest["settings"], manifest["shards"]
        for name, wanted in self.settings.items():
            if found.get(name) != wanted:
                what = "the source has changed" if name in ("source", "images") else f"its {name}"
                raise DataError(
                    f"{self.folder} was packed differently: {what} ({shown(found.get(name))} then, "
                    f"{wanted!r} now); choose another folder, or remove this one to start afresh."
                )
        for what, kinds in (("shards", _SHARD_ENTRY), ("failures", _FAILURE)):
            for place, entry in enumerate(manifest[what]):
                where = f"{path}: {what}.{place}"
                check_fields(entry if isinstance(entry, dict) else {}, kinds, where, DataError)
        numbers = [n for entry in shards for n in (entry["first"], entry["stop"])]
        numbers = [0, *numbers, manifest["next"], len(self.encoder.source)]
        told = sum(entry["images"] for entry in shards) + len(manifest["failures"])
        if numbers != sorted(numbers) or told != manifest["next"]:
            raise DataError(
                f"{path}: the images that its shards and 'next' name do not follow one another; "
                "remove the folder, or choose another."
            )
        whole = 0
        while whole < len(shards) and self._is_there(shards[whole]):
            whole += 1
        if whole < len(shards):
            manifest["next"] = shards[whole]["first"]
            manifest["complete"] = False
            manifest["shards"] = shards[:whole]
            manifest["failures"] = [
                entry for entry in manifest["failures"] if entry["index"] < manifest["next"]
            ]
        return manifest

    def _is_there(self, entry: dict[str, Any]) -> bool:
        path = self.folder / entry["file"]
        return path.is_file() and path.stat().st_size == entry["bytes"]

    def _refuse_strangers(self) -> None:
        strange = sorted(self.folder.glob("*.tar"))
        # The first shard may stand without a manifest, if a run was killed just then.
        if strange and [path.name for path in strange] != [_shard_name(0)]:
            raise DataError(
                f"{self.folder} already holds {strange[0].name}, which no manifest explains; "
                f"choose another folder."
            )

    def report(self) -> PackReport:
        shards = self.manifest["shards"]
        images = sum(shard["images"] for shard in shards)
        return PackReport(
            self.folder,
            images,
            [(entry["name"], entry["reason"]) for entry in self.manifest["failures"]],
            [self.folder / shard["file"] for shard in shards],
            sum(shard["bytes"] for shard in shards),
            images - self.before,
        )


class _ShardWriter:
    """A tar file in the making; it has its name only when it is finished."""

    def __init__(self, folder: Path, number: int) -> None:
        self.path = folder / _shard_name(number)
        self.images, self.bytes = 0, 0
        self._stack = contextlib.ExitStack()
        self._temporary = self._stack.enter_context(temporary_beside(self.path))
        self._file = self._stack.enter_context(self._temporary.open("wb"))
        self._hash = hashlib.sha256()

    def add(self, name: str, data: bytes) -> None:
        entry = tarfile.TarInfo(name)  # owner, group and time stay zero: equal input, equal bytes
        entry.size = len(data)
        header = entry.tobuf(tarfile.USTAR_FORMAT)
        with output_errors(self.path):
            self._write(header + data + b"\0" * (_padded(len(data)) - len(data)))
        self.images += 1

    def finish(self) -> dict[str, Any]:
        with output_errors(self.path):
            self._write(b"\0" * _TAIL)
            self._file.close()
        commit(self._temporary, self.path)
        self._stack.close()
        return {
            "file": self.path.name,
            "images": self.images,
            "bytes": self.bytes,
            "sha256": self._hash.hexdigest(),
        }

    def drop(self) -> None:
        self._stack.close()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)


def _shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
