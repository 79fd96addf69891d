"""What veca 0.1 gave, written down once: `python tests/make_pinned.py RECORD.json` makes a record.

`tests/pinned.json` was made by the code of 0.1 and is never made again: `tests/test_pinned.py`
holds every later version to it. Only the command line and public names are used here.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file

import veca

PHOTOS = Path(veca.__file__).parent / "assets" / "photos"
SAMPLES = 12
"""Numbers of each array that stand in the record, to compare where bits may differ."""

Arrays = dict[str, np.ndarray]

RECIPE = """
device = "cpu"
[student]
preset = "tiny"
config = { depth = 2, width = 64, heads = 2, num_cores = 16 }
[[teachers]]
name = "filters"
standardise = true
standardise_images = 8
[data]
source = "photos:12"
memory_size = 48
augment = { kind = "rrc", brightness = 0.2, contrast = 0.2, saturation = 0.2 }
[optimizer]
lr = 2e-3
lr_min = 1e-4
[schedule]
steps = 2
warmup = 1
batch = 4
size = 48
[follow]
tensorboard = false
"""


def command(*arguments: Any) -> None:
    """`veca` with one thread, in a process of its own, where nothing is in a cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "VECA_CACHE": cache}
        called = [sys.executable, "-m", "veca", *map(str, arguments)]
        done = subprocess.run(called, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{' '.join(called[2:])}\n{done.stdout}{done.stderr}")


def model(out: Path) -> Arrays:
    """Features of bundled photos at two budgets and two sizes."""
    weights = veca.load("tiny").eval()
    arrays = {}
    with torch.no_grad():
        for size in (96, 160):
            for name in ("chelsea", "rocket"):
                pixels = veca.preprocess(PHOTOS / f"{name}.jpg", size=size).pixels
                arrays[f"{name} {size} pixels"] = pixels.numpy()
                for cores in (8, 64):
                    found = weights(pixels, cores=cores)
                    for part in ("cls", "patches", "cores", "core_xy"):
                        key = f"{name} {size} {cores} {part}"
                        arrays[key] = getattr(found, part).numpy()
    return arrays


def features(out: Path) -> Arrays:
    """`veca features` to a folder and to one file, in both formats."""
    common = [photos(out), "--device", "cpu", "--threads", 1, "--workers", 1]
    command("features", *common, "--out", out / "folder", "--size", 96, "--cores", 8)
    command("features", *common, "--out", out / "tensors", "--size", 96, "--format", "safetensors")
    for file in ("all.npz", "all.safetensors"):
        whole = ["--size", "96x128", "--dtype", "float32", "--batch-size", 2]
        command("features", *common, "--out", out / file, *whole)
    kept = [p for p in sorted(out.rglob("*")) if p.suffix in (".npz", ".safetensors")]
    return {key: value for path in kept for key, value in contents(path, out).items()}


def embed(out: Path) -> Arrays:
    """`veca embed`: every column of the Parquet shards."""
    import pyarrow.parquet as parquet

    command(
        "embed", photos(out), "--out", out / "vectors", "--size", 96, "--cores", 16, "--patches",
        "--device", "cpu", "--threads", 1, "--workers", 0, "--shard-rows", 3,
    )  # fmt: skip
    arrays = {}
    for path in sorted(out.rglob("*.parquet")):
        table = parquet.read_table(path)
        for name in table.column_names:
            rows = table[name].to_pylist()
            if isinstance(rows[0], str):
                rows = [Path(row).name for row in rows]  # photos lie anywhere
            for i, row in enumerate(rows):
                arrays[f"{path.name} {name} {i}"] = plain(row)
    return arrays


def probe(out: Path) -> Arrays:
    """`veca probe` on made-up datasets: all that is scored, but for times."""
    shapes(out / "data")
    common = ["--weights", "tiny", "--cores", "8,64", "--no-time", "--device", "cpu"]
    common += ["--threads", 1, "--workers", 1, "--protocol", "quick"]
    few = ["iterations=10", "warmup=2", "batch=4"]
    changes = {
        "knn": ["knn.k=[1,3]", "knn.report_k=3"],
        "linear": ["linear.iterations=20", "linear.batch=8", "linear.learning_rates=[0.01,0.1]"],
        "logreg": ["logreg.c_exponents=[-2.0,0.0,3]"],
        "segmentation": [f"segmentation.optimizer.{change}" for change in few],
        "depth": [f"depth.optimizer.{change}" for change in few],
    }
    layouts = {"segmentation": "images-masks", "depth": "rgb-depth"}
    arrays = {}
    for task, settings in changes.items():
        dataset = layouts.get(task, "folder")
        sets = [part for change in settings for part in ("--set", change)]
        where = ["--data", out / "data" / dataset, "--dataset", dataset, "--out", out / task]
        command("probe", task, *where, *common, "--size", 64, *sets)
        rows = json.loads((out / task / "results.json").read_text())["rows"]
        for row in rows:
            for name, score in sorted(row["metrics"].items()):
                if isinstance(score, int | float):
                    arrays[f"{task} {row['cores']} {name}"] = np.float64(score)
    return arrays


def distill(out: Path) -> Arrays:
    """The checkpoint after two steps, and the student."""
    (out / "recipe.toml").write_text(RECIPE)
    command("distill", "--config", out / "recipe.toml", "--out", out / "run")
    kept = sorted((out / "run").rglob("*.safetensors"))
    return {key: value for path in kept for key, value in contents(path, out / "run").items()}


def export(out: Path) -> Arrays:
    """What exported files answer."""
    from veca.export import load_exported

    images = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    arrays = {}
    for format, suffix in (("onnx", "onnx"), ("torch-export", "pt2")):
        common = ["--to", format, "--cores", 8, "--out", out, "--name", "tiny", "--threads", 1]
        command("export", "tiny", *common, "--check-sizes", "64x64")
        found = load_exported(out / f"tiny_cores8.{suffix}")(images)
        for part in ("cls", "patches"):
            arrays[f"{suffix} {part}"] = np.asarray(getattr(found, part))
    return arrays


CASES: dict[str, Callable[[Path], Arrays]] = {
    case.__name__: case for case in (model, features, embed, probe, distill, export)
}


def contents(path: Path, root: Path) -> Arrays:
    """Every array of a file, by the file's name and its own."""
    if path.suffix == ".safetensors":
        inside: Any = load_file(path)
    else:
        inside = np.load(path)
    name = path.relative_to(root).as_posix()
    return {f"{name} {key}": inside[key] for key in sorted(inside)}


def photos(out: Path) -> Path:
    """The bundled photos with one date, since files of features hold it."""
    folder = out / "photos"
    folder.mkdir()
    for path in PHOTOS.glob("*.jpg"):
        (folder / path.name).write_bytes(path.read_bytes())
        os.utime(folder / path.name, (1_700_000_000, 1_700_000_000))
    return folder


def plain(value: Any) -> np.ndarray:
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype=np.uint8)
    return np.asarray(value)


def shapes(root: Path) -> None:
    """Small datasets in the three plain layouts, of seeded noise."""
    random = np.random.default_rng(0)

    def save(name: str, pixels: np.ndarray) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)

    for split, count in (("train", 6), ("test", 4)):
        for i in range(count):
            for channel, name in enumerate(("red", "green", "blue")):
                pixels = random.integers(0, 200, (40, 52, 3))
                pixels[..., channel] += random.integers(0, 56)
                save(f"folder/{split}/{name}/{i}.png", pixels.astype(np.uint8))
            mask = np.zeros((48, 64), dtype=np.uint8)
            mask[:, : int(random.integers(16, 48))] = 1
            pixels = random.integers(0, 60, (48, 64, 3)) + 150 * mask[..., None]
            save(f"images-masks/images/{split}/{i}.png", pixels.astype(np.uint8))
            save(f"images-masks/masks/{split}/{i}.png", mask)
            near = random.uniform(0, 1, (4, 4)).repeat(16, axis=0).repeat(16, axis=1)
            pixels = np.repeat((near * 255).astype(np.uint8)[..., None], 3, axis=2)
            save(f"rgb-depth/rgb/{split}/{i}.png", pixels)
            save(f"rgb-depth/depth/{split}/{i}.png", (1000 + 6000 * near).astype(np.uint16))
    about = {"images-masks": {"classes": ["dark", "bright"]}, "rgb-depth": {"depth_scale": 1000}}
    about["rgb-depth"]["max_depth"] = 8  # type: ignore[assignment]
    for name, table in about.items():
        (root / name / "dataset.json").write_text(json.dumps(table))


def described(arrays: Arrays) -> dict[str, list[Any]]:
    """Of each array: kind and shape, the hash of its bytes, and a few of its numbers."""
    return {name: [*kind(value), digest(value), sample(value)] for name, value in arrays.items()}


def kind(array: np.ndarray) -> tuple[str, list[int]]:
    array = np.asarray(array)
    return "text" if array.dtype.kind == "U" else str(array.dtype), list(array.shape)


def digest(array: np.ndarray) -> str:
    array = np.asarray(array)
    content = "\n".join(array.reshape(-1)).encode() if array.dtype.kind == "U" else array.tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def sample(array: np.ndarray) -> list[Any]:
    """Evenly spaced numbers, rounded to what float32 holds; text whole."""
    flat = np.asarray(array).reshape(-1)
    if flat.dtype.kind == "U":
        return flat.tolist()
    places = np.unique(np.linspace(0, max(len(flat) - 1, 0), min(SAMPLES, len(flat))).astype(int))
    return [float(f"{float(number):.7g}") for number in flat[places]]


def machine() -> dict[str, str]:
    """Where bits are equal: the same torch, with the same instructions, of the same maker."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    maker = next((line.split()[-1] for line in lines if line.startswith("vendor_id")), "unknown")
    instructions = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "cpu": f"{maker} {instructions}"}


def main(path: Path) -> None:
    torch.set_num_threads(1)
    cases = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as out:
            cases[name] = described(case(Path(out)))
        print(name, len(cases[name]))
    rows = ",\n".join(
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f" {json.dumps(key)}: {json.dumps(row)}" for key, row in case.items())
        + "\n}"
        for name, case in cases.items()
    )
    about = json.dumps({"veca": veca.__version__, **machine()})
    path.write_text(f'{{"machine": {about},\n"cases": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
