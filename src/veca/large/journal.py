"""What a stopped pass needs to go on: a folder with a manifest, the layers so far, and the sums.

Everything is replaced in one step, so that the process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from veca._util import files, tensor_file
from veca.attention import PartialAttention
from veca.errors import LargeError, OutputError, VecaError, shown
from veca.large.layers import LayerStart
from veca.large.plan import SAVED_EVERY

MANIFEST, SUMS, STATES = "manifest.json", "sums.safetensors", "states.bin"
_NEW = "sums.new"
_FORMAT = 1


class Journal:
    """The folder of one pass; without a folder nothing is kept.

    Attributes:
        resumed: an earlier pass was found in the folder.
        layers: how each layer began, so far.
        tiles: those of the layer that is under way which are done.
        sums: what the cores took from them.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.resumed = False
        self.layers: list[LayerStart] = []
        self.tiles = 0
        self.sums: PartialAttention | None = None

    @contextlib.contextmanager
    def opened(self, settings: Mapping[str, Any], device: torch.device) -> Iterator[Journal]:
        """Take the folder, and what an earlier pass of the same settings left in it."""
        if self.folder is None:
            yield self
            return
        busy = f"another pass is using {self.folder}; wait for it, or name another folder."
        with files.exclusive(self.folder / "lock", busy):
            self._begin({"format": _FORMAT, **settings})
            if self.resumed:
                self._recover(device)
            try:
                yield self
            finally:
                if not self.layers:  # nothing has been done that could be gone on with
                    self.remove()
                elif (self.folder / MANIFEST).exists():
                    with contextlib.suppress(VecaError):  # then what was written down last holds
                        self._save()

    def _begin(self, settings: dict[str, Any]) -> None:
        assert self.folder is not None
        manifest = self.folder / MANIFEST
        files.remove_leftovers(self.folder.glob(".*.tmp"))
        if not manifest.exists():
            ours = {self.folder / "lock", *self._kept()}
            strange = sorted(path.name for path in self.folder.iterdir() if path not in ours)
            if strange:
                raise LargeError(
                    f"{self.folder} holds other things ({strange[0]}); name a folder of its own "
                    "for the state of a pass."
                )
            self._remove_kept()  # of what, without a manifest nobody knows
            files.atomic_write_json(manifest, settings)
            return
        found = files.read_json(manifest, LargeError)
        for name in settings.keys() | found.keys():
            if found.get(name) != settings.get(name):
                raise LargeError(
                    f"{self.folder} holds a stopped pass with another {name} "
                    f"({shown(found.get(name))}, now {shown(settings.get(name))}); ask for that, "
                    "or remove the folder to begin anew."
                )
        self.resumed = True

    def _recover(self, device: torch.device) -> None:
        for number in range(1, 10_000):
            path = self._layer(number)
            try:
                tensors = _read(path)
                start = LayerStart(**{name: tensors[name] for name in LayerStart._fields})
            except (VecaError, KeyError):  # not there, or cut short when the power went
                break
            self.layers.append(LayerStart(*(tensor.to(device) for tensor in start)))
        assert self.folder is not None
        with contextlib.suppress(VecaError, ValueError, KeyError):
            tensors = _read(self.folder / SUMS)
            number, tiles = tensors.pop("place").tolist()
            if number == len(self.layers):
                self.sums = PartialAttention(*(tensors[n] for n in PartialAttention._fields))
                self.sums = PartialAttention(*(part.to(device) for part in self.sums))
                self.tiles = tiles

    def _layer(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"layer-{number:03d}.safetensors"

    def begin_layer(self, start: LayerStart) -> None:
        """A layer begins; its number is one more than those before."""
        self.layers.append(start)
        self.tiles, self.sums = 0, None
        if self.folder is not None:
            if not (self.folder / MANIFEST).exists():  # before its folder is made again
                raise OutputError(
                    f"{self.folder} is gone: something else has removed it meanwhile; run it again."
                )
            tensor_file.write_file(start._asdict(), self._layer(len(self.layers)))

    def forget_tiles(self) -> None:
        """Begin the layer that is under way anew."""
        self.tiles, self.sums = 0, None

    def add_tile(self, tiles: int, sums: PartialAttention) -> None:
        """So many tiles of the layer are done. It is written down now and then, and at the end."""
        self.tiles, self.sums = tiles, sums
        if tiles % SAVED_EVERY == 0:
            self._save()

    def _save(self) -> None:
        """Not flushed: when the power goes the layer begins anew."""
        if self.folder is None or self.sums is None:
            return
        tiles, sums = self.tiles, self.sums
        place = torch.tensor([len(self.layers), tiles])
        tensors = {name: part.cpu().contiguous() for name, part in sums._asdict().items()}
        tensors["place"] = place
        seal = {tensor_file.SEAL: tensor_file.seal(tensor_file.content_hash(tensors), {})}
        target = self.folder / SUMS
        temporary = self.folder / _NEW
        with files.output_errors(self.folder):
            temporary.write_bytes(safetensors.torch.save(tensors, seal))
            os.replace(temporary, target)  # noqa: PTH105

    def _kept(self) -> list[Path]:
        """What lies in the folder of a pass beside its manifest."""
        assert self.folder is not None
        ours = [self.folder / name for name in (SUMS, _NEW, STATES)]
        return [*ours, *self.folder.glob("layer-*.safetensors")]

    def _remove_kept(self) -> None:
        for path in self._kept():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Nothing that was kept is needed any more; what else is in the folder stays."""
        if self.folder is None:
            return
        self._remove_kept()
        with contextlib.suppress(OSError):
            (self.folder / MANIFEST).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.folder / "lock").unlink(missing_ok=True)
            self.folder.rmdir()


def _read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of ours, whose checksum has to be there and right."""
    tensors, facts = tensor_file.read_file(path, LargeError)
    if tensor_file.SEAL not in facts:
        raise LargeError(f"{path} has no checksum; it is damaged.")
    return tensors
