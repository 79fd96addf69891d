"""Commands that can be stopped and gone on with, each with its inputs and what it leaves behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

import veca
from attack.files import RUN, model, photos
from attack.launch import command
from attack.sandbox import digest

Work = Callable[[], int]


class Scene(NamedTuple):
    """A resumable command. `home` holds its inputs, `out` is where it writes."""

    prepare: Callable[[Path], None]
    work: Callable[[Path, Path], Work]
    """(home, out): what runs in another process, to its end or to go on."""
    left: Callable[[Path], object]
    """What is in `out` at the end, for comparison, by the name of the file."""
    claims: Callable[[Path], object] | None = None
    """The part of it that the command says it wrote; by default all."""


def _photos(count: int) -> Callable[[Path], None]:
    def prepare(home: Path) -> None:
        source = photos(home / "photos", count)
        (source / "bad.png").write_bytes(b"no image")
        (source / "zzz.png").write_bytes(b"no image")
        veca.save(model(), home / "w")

    return prepare


def _bytes(out: Path) -> dict[str, str]:
    """Every file below a folder, to the byte."""
    found = sorted(path for path in out.rglob("*") if path.is_file())
    return {path.relative_to(out).as_posix(): digest(path.read_bytes()) for path in found}


def _features(home: Path, out: Path) -> Work:
    return command(
        ["features", home / "photos", "--out", out, "--weights", home / "w", "--size", "32",
         "--batch-size", "4", "--workers", "2"]
    )  # fmt: skip


def _embed(home: Path, out: Path) -> Work:
    return command(
        ["embed", home / "photos", "--out", out, "--weights", home / "w", "--size", "32",
         "--batch-size", "4", "--shard-rows", "8", "--workers", "2", "--threads", "1"]
    )  # fmt: skip


def _pack(home: Path, out: Path) -> Work:
    return command(
        ["pack", home / "photos", "--out", out, "--size", "32", "--per-shard", "8",
         "--workers", "2"]
    )  # fmt: skip


def _prepare_distill(home: Path) -> None:
    from veca.distill.config import DistillConfig

    table = {**RUN, "schedule": {**RUN["schedule"], "steps": 12}}
    (home / "recipe.toml").write_text(DistillConfig.from_dict(table).to_toml())


def _distill(home: Path, out: Path) -> Work:
    return command(["distill", "--config", home / "recipe.toml", "--out", out, "--resume"])


def _left_by_distill(out: Path) -> object:
    """The student, the checkpoints and the curve; what tells times is left out."""
    from safetensors.torch import load_file

    from veca.distill import read_metrics

    tensors = {
        path.relative_to(out).as_posix(): digest(dict(sorted(load_file(path).items())))
        for path in sorted(out.rglob("*.safetensors"))
    }
    curve = [
        [record[name] for name in ("step", "loss", "grad_norm")] for record in read_metrics(out)
    ]
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    return {**tensors, "metrics.jsonl": digest(curve), "names": ",".join(names)}


def _tune(home: Path, out: Path) -> Work:
    return command(
        ["tune", home / "photos", "--weights", home / "w", "--out", out, "--sizes", "32",
         "--cores", "4,8", "--keep", "1,0.5", "--precisions", "float32", "--photos", "6",
         "--agreement", "0.1"]
    )  # fmt: skip


def _left_by_tune(out: Path) -> object:
    """Times differ from run to run; which photos and points were measured, and how well they
    agree, do not."""
    kept = out / "measurements.json"
    table = json.loads(kept.read_text()) if kept.is_file() else {"rounds": {}}
    agreed = {
        f"{photo} {point}": [round(row["cls"], 4), round(row["patches"], 4)]
        for photo, points in table["rounds"].items()
        for point, row in points.items()
    }
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    return {"names": ",".join(names), "measurements": digest(dict(sorted(agreed.items())))}


def _calibrate(home: Path, out: Path) -> Work:
    return command(
        ["calibrate", home / "w", "--data", home / "photos", "--out", out, "--sizes", "32",
         "--photos", "20", "--threads", "1"]
    )  # fmt: skip


def _left_by_calibrate(out: Path) -> object:
    """Without what is said about it, such as the date."""
    kept = out / "calibration.json"
    table = json.loads(kept.read_text()) if kept.is_file() else {}
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    return {"names": ",".join(names), "sizes": digest(table.get("sizes"))}


def _prepare_large(home: Path) -> None:
    veca.save(model(), home / "w")
    rng = np.random.default_rng(0)
    np.save(home / "picture.npy", rng.integers(0, 256, (288, 384, 3), dtype=np.uint8))


def _large(home: Path, out: Path) -> Work:
    def run() -> int:
        from veca import large

        try:
            picture = np.load(home / "picture.npy")
            model = veca.load(home / "w")
            large.features(model, picture, out / "features.npy", tile=4, spill="disk")
        except veca.VecaError as error:  # as a command says it
            print(f"veca: {error}")
            return 2
        return 0

    return run


def _prepare_probe(home: Path) -> None:
    data = home / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    names = [f"class{number}" for number in range(10)]
    (data / "batches.meta.txt").write_text("\n".join(names) + "\n")
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        records = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(20) % 10
        (data / f"{name}.bin").write_bytes(records.tobytes())
    veca.save(model(), home / "w")


def _probe(home: Path, out: Path) -> Work:
    return command(
        ["probe", "knn", "--dataset", "cifar-10", "--data", home / "data", "--weights", home / "w",
         "--size", "32", "--cores", "4,8", "--cache", out / "cache", "--out", out / "results",
         "--no-time", "--workers", "1"]
    )  # fmt: skip


def _left_by_probe(out: Path) -> object:
    """Headers of safetensors are written in an order of their own each time."""
    cached = {}
    for path in sorted(out.rglob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in sorted(file.keys())}
            cached[path.relative_to(out).as_posix()] = digest(
                [arrays, sorted((file.metadata() or {}).items())]
            )
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    return {**cached, **_claimed_by_probe(out), "names": ",".join(names)}


def _claimed_by_probe(out: Path) -> dict[str, str]:
    """Not the cache, which is no output."""
    results = out / "results" / "results.json"
    return {"scores": digest(json.loads(results.read_text())["rows"])} if results.is_file() else {}


SCENES: Mapping[str, Scene] = {
    "features": Scene(_photos(30), _features, _bytes),
    "embed": Scene(_photos(40), _embed, _bytes),
    "pack": Scene(_photos(120), _pack, _bytes),
    "distill": Scene(_prepare_distill, _distill, _left_by_distill),
    "tune": Scene(_photos(8), _tune, _left_by_tune),
    "calibrate": Scene(_photos(24), _calibrate, _left_by_calibrate),
    "large": Scene(_prepare_large, _large, _bytes),
    "probe": Scene(_prepare_probe, _probe, _left_by_probe, _claimed_by_probe),
}


def differences(wanted: Any, found: Any) -> str:
    """What differs, in words; "" where nothing does."""
    if wanted == found:
        return ""
    if not isinstance(wanted, dict) or not isinstance(found, dict):
        return f"{found} instead of {wanted}"
    missing = sorted(wanted.keys() - found.keys())
    more = sorted(found.keys() - wanted.keys())
    other = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name])
    parts = [("missing", missing), ("left over", more), ("not the same", other)]
    return "; ".join(f"{what}: {', '.join(names[:5])}" for what, names in parts if names)


def forget(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
