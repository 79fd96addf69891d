"""Mutants of images, four ways: the reader, features, packing for training, the demo's upload."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import veca
from attack.campaign import Case, run_campaign
from attack.damage import Mutant, image_damage, mutate
from attack.pictures import photo, pictures, suffix_of
from attack.registry import Options, Report
from attack.sandbox import Result, digest, judged
from veca.app.content import Limits
from veca.app.handlers import Controls, Handlers
from veca.app.model_cache import ModelCache
from veca.app.uploads import Uploads
from veca.data import open_source, pack
from veca.embed import extract
from veca.errors import ImageError
from veca.images import preprocess, read_image

SMALLEST = veca.VecaConfig(depth=2, width=32, heads=2, num_cores=8)
_WAYS = ("read", "features", "pack", "demo")
_COVERED = ("png",)
"""Formats with a checksum over every byte that an image is made of."""


class Images:
    """The campaign "images". Everything is below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.originals = pictures()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = veca.create_model(SMALLEST).eval()
        self.expected = {name: self._digest(data) for name, data in self.originals.items()}
        weights = veca.save(self.model, folder / "weights")
        place = folder / "demo"
        place.mkdir(parents=True, exist_ok=True)
        models = ModelCache([str(weights)], "cpu")
        self.demo = Handlers(models, Limits(), Uploads(place / "uploads"), place)
        self.controls = Controls("weights", 64, 4, 2, 1, "norm")

    def targets(self, count: int) -> dict[str, int]:
        """All are read; a quarter of them goes the other ways too, which take far longer."""
        share = {way: count if way == "read" else -(-count // 4) for way in _WAYS}
        return {f"{name}/{way}": share[way] for name in self.originals for way in _WAYS}

    @staticmethod
    def row_of(target: str) -> str:
        """The row of the table: the kind of file and the way, "jpeg/read"."""
        name, _, way = target.partition("/")
        return f"{name.partition('-')[0]}/{way}"

    @staticmethod
    def _digest(data: bytes) -> str:
        return digest(read_image(data))

    def _mutant(self, case: Case) -> Mutant:
        return mutate(self.originals[case.file], image_damage(case.file), case.rng)

    def costs(self, case: Case) -> int:
        return int(case.way != "read")

    def whole(self, case: Case) -> bytes:
        return self.originals[case.file]

    def mutant(self, case: Case) -> tuple[bytes, str]:
        made = self._mutant(case)
        return made.data, made.how

    def run(self, case: Case) -> Result:
        made = self._mutant(case)
        covered = case.file.startswith(_COVERED) and not made.resealed
        return self.read(case, made.data, covered=covered)

    def read(self, case: Case, data: bytes, *, covered: bool = False) -> Result:
        if case.way == "read":
            return judged(lambda: self._digest(data), self.expected[case.file], covered=covered)
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            place = Path(name)
            (place / "photos").mkdir()
            file = place / "photos" / f"mutant{suffix_of(case.file)}"
            file.write_bytes(data)
            way = {"features": self._features, "pack": self._pack, "demo": self._upload}[case.way]
            return judged(lambda: way(file), True, covered=False)

    def _features(self, file: Path) -> bool:
        """Beside a whole image, which has to be done whatever the other is. True: it was read."""
        photo().save(file.with_name("whole.png"))
        done = extract(self.model, file.parent, file.parents[1] / "out", size=32, workers=1)
        return _one_of_two(done.computed, done.failed)

    def _pack(self, file: Path) -> bool:
        photo().save(file.with_name("whole.png"))
        done = pack(file.parent, file.parents[1] / "out", size=32, workers=0)
        source = open_source(file.parents[1] / "out")
        for place in range(len(source)):
            preprocess(source.read(place), 32, model=self.model)
        return _one_of_two(done.images, done.failures)

    def _upload(self, file: Path) -> bool:
        """As the page does it: the answer is a message or pictures, never an exception."""
        size = file.stat().st_size
        with self.demo.uploads.place("visitor", size) as place, file.open("rb") as data:
            self.demo.uploads.write(place, file.name, data)
        changes = self.demo.upload(None, self.controls, {"path": place})
        if "visit" not in changes and "error" not in changes["message"]["value"]:
            raise AssertionError(f"the page was told nothing: {sorted(changes)}")
        if "visit" not in changes:
            raise ImageError(changes["message"]["value"])
        return True


def _one_of_two(done: int, failed: Sequence[tuple[str, str]]) -> bool:
    """True where both images were done; else the one that was not has to be listed."""
    if done < 1 or done + len(failed) != 2:
        raise AssertionError(f"of two images {done} were done and {len(failed)} listed")
    if failed:
        raise ImageError(failed[0][1])
    return True


def run(options: Options) -> Report:
    return run_campaign(options, "images", Images)
