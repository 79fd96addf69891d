"""Every file that is read here, small and whole, and how it is read: what file mutants are made of.

Each maker writes a folder; each target names a file in it and a reader of the folder. A reader
gives what it read, so that another result than that of the whole file is seen.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import veca
from attack import damage
from attack.campaign import Case, run_campaign
from attack.damage import Damage, Mutant, mutate
from attack.pictures import photo
from attack.registry import Options, Report
from attack.sandbox import Result, digest, in_a_fork, judged
from veca import content, weights
from veca._util.tensor_file import SEAL
from veca.core_memory import CoreMemory
from veca.data.decode import EncodedImage
from veca.dense import DenseVit
from veca.distill import (
    distill,
    export_checkpoint,
    load_config,
    load_heads,
    load_targets,
    read_metrics,
)
from veca.distill.checkpoint import CheckpointStore, check_about
from veca.distill.config import DistillConfig
from veca.errors import BadImageError, LargeError
from veca.points import OperatingPoint, read_point
from veca.probe import available_protocols, load_protocol, read_run
from veca.probe.cache import Entry
from veca.probe.datasets.pairs import label_size, read_values
from veca.probe.record import Row, Run, write_run
from veca.teachers import load_teacher, read_dense_vit, save_dense_vit
from veca.weights.card import model_card
from veca.weights.tensors import write_file

SMALLEST = veca.VecaConfig(depth=2, width=32, heads=2, num_cores=8)
RUN: dict[str, Any] = {
    "device": "cpu",
    "student": {
        "preset": "tiny",
        "config": {"depth": 2, "width": 32, "heads": 2, "num_cores": 8},
    },
    "teachers": [{"name": "filters", "standardise": True, "standardise_images": 16}],
    "data": {
        "source": "photos:24",
        "memory_size": 48,
        "hold_out": 4,
        "augment": {"kind": "rrc", "brightness": 0.2},
    },
    "optimizer": {"lr": 2e-3, "lr_min": 1e-4},
    "schedule": {"steps": 4, "warmup": 1, "batch": 4, "size": 32},
    "checkpoint": {"every": 2},
    "validation": {"every": 2},
    "follow": {"every": 1, "tensorboard": False},
    "ema": 0.9,
}
"""A distillation of a second or two."""

Reader = Callable[[Path], object]
Covered = Callable[[bytes, bytes], bool]


def model(seed: int = 0) -> veca.Veca:
    """A small model, every parameter away from its initial value."""
    torch.manual_seed(seed)
    made = veca.create_model(SMALLEST).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def photos(folder: Path, count: int, size: tuple[int, int] = (64, 48)) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        image = photo(size=size).rotate(90 * (number % 4)).resize(size)
        image.point([(value + 37 * number) % 256 for value in range(256)] * 3).save(
            folder / f"{number:03d}.png"
        )
    return folder


# ---------------------------------------------------------------------------------- what is covered


def never(whole: bytes, damaged: bytes) -> bool:
    return False


def always(whole: bytes, damaged: bytes) -> bool:
    return True


def while_it_holds(key: str) -> Covered:
    """Covered as long as the file still has its own checksum: files of 0.1 have none."""
    return lambda whole, damaged: f'"{key}"'.encode() in damaged


def before_the_footer(whole: bytes, damaged: bytes) -> bool:
    """The pages of a Parquet file have checksums, its footer has none."""
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    return damaged[-footer:] == whole[-footer:]


class Target(NamedTuple):
    """A file of a folder, and who reads it."""

    maker: str
    file: str
    """In the folder; the first that this pattern finds."""
    read: Reader
    damages: tuple[Damage, ...]
    covered: Covered = never
    resealed_too: bool = False
    """Whether the checksum covers damage that fits the archive's own, too."""


# ----------------------------------------------------------------------------------------- weights


def _make_weights(folder: Path) -> None:
    made = model()
    veca.save(
        made, folder / "w", provenance={"licence": "apache-2.0", "teacher": "x", "samples": 3}
    )
    veca.save(made, folder / "lone.safetensors", provenance={"licence": "apache-2.0"})
    save_dense_vit(DenseVit(SMALLEST), folder / "dense.safetensors")
    head = {"t/cls.weight": torch.ones(4, 8), "t/cls.bias": torch.ones(4)}
    scale = {f"t/{part}.{n}": torch.ones(3) for part in ("cls", "dense") for n in ("mean", "std")}
    write_file(head, folder / "w" / "heads.safetensors")
    write_file(scale, folder / "targets.safetensors")
    veca.export_official(made, folder / "official.pt")
    plain = torch.load(folder / "official.pt", weights_only=True)
    torch.save(plain, folder / "old.pt", _use_new_zipfile_serialization=False)


def _weights(place: Path) -> object:
    read = veca.load(place)
    return read, read.config.to_dict(), weights.weights_hash(place)


def _provenance(place: Path) -> object:
    said = weights.read_provenance(place)
    model_card(SMALLEST, said)
    return said


def _official(place: Path) -> object:
    read = veca.import_official(place)
    return read, read.config.to_dict()


# --------------------------------------------------------------------------------------------- runs


def _make_run(folder: Path) -> None:
    distill(DistillConfig.from_dict(RUN), folder / "run")
    text = DistillConfig.from_dict(RUN).to_toml()
    (folder / "base.toml").write_text(text)
    (folder / "recipe.toml").write_text('extends = "base.toml"\n\n[schedule]\nsteps = 9\n')


def _checkpoint(folder: Path) -> object:
    read = CheckpointStore(folder / "run").load()
    assert read is not None
    check_about(read)
    about = {name: value for name, value in read.about.items() if name != "sha256"}
    return read.step, about, read.sections


def _exported_run(folder: Path) -> object:
    return veca.load(export_checkpoint(folder / "run", folder / "out"))


def _metrics(folder: Path) -> object:
    return read_metrics(folder / "run"), read_metrics(folder / "run", "validation")


def _resumed(folder: Path) -> object:
    """A finished run, asked to go on: it reads all that lies in the folder."""
    distill(load_config(folder / "run" / "config.toml"), folder / "run", resume=True)
    return True


# --------------------------------------------------------------------------------------- exports


def _make_export(folder: Path) -> None:
    from veca.export import export_model

    for to, place in (("onnx", "onnx"), ("torch-export", "pt2")):
        export_model(model(), folder / place, to=to, name="small", check_sizes=[(32, 48)])
    for kind in ("onnx", "pt2"):
        lone = folder / f"lone-{kind}"
        lone.mkdir()
        shutil.copy(next((folder / kind).glob(f"*.{kind}")), lone / f"small.{kind}")


def _exported(pattern: str) -> Reader:
    def read(folder: Path) -> object:
        from veca.export import load_exported

        run = load_exported(next(folder.glob(pattern)))
        out = run(torch.ones(1, 3, 32, 48), cores=4)
        return out.patches, out.cores, run.config.to_dict()

    return read


# ---------------------------------------------------------------------------------------- features


def _make_features(folder: Path) -> None:
    from veca.embed import extract

    source = photos(folder / "photos", 4)
    (source / "bad.png").write_bytes(b"no image")
    for format in ("npz", "safetensors"):
        extract(model(), source, folder / format, size=32, format=format, workers=1)
        extract(model(), source / "000.png", folder / f"one.{format}", size=32, workers=1)


def _features(name: str) -> Reader:
    def read(folder: Path) -> object:
        from veca.embed import read_features

        return read_features(folder / name)

    return read


def _features_again(format: str) -> Reader:
    """Finished features, asked to go on: damaged ones are computed again."""

    def read(folder: Path) -> object:
        from veca.embed import extract, read_features

        out = folder / format
        extract(model(), folder / "photos", out, size=32, format=format, workers=1)
        return [read_features(path) for path in sorted(out.rglob(f"*.{format}"))]

    return read


def _make_embeddings(folder: Path) -> None:
    from veca.embed import Collection, embed

    source = photos(folder / "photos", 6)
    (source / "bad.png").write_bytes(b"no image")
    veca.save(model(), folder / "w")
    embed(source, folder / "out", **_embed_options(folder))
    Collection(folder / "out").search(np.ones(32, np.float32), exact=False)


def _embed_options(folder: Path) -> dict[str, Any]:
    return {
        "weights": folder / "w", "size": 32, "batch_size": 4, "shard_rows": 4, "workers": 0,
        "dtype": "float32", "threads": 1,
    }  # fmt: skip


def _embeddings(folder: Path) -> object:
    from veca.embed import read_embeddings

    return read_embeddings(folder / "out")


def _search(folder: Path) -> object:
    from veca.embed import Collection

    query = np.linspace(-1, 1, 32).astype(np.float32)
    found = Collection(folder / "out").search(query, top=3, exact=False)
    return [(Path(match.path).name, round(match.score, 4)) for match in found]


def _embed_again(folder: Path) -> object:
    from veca.embed import embed, read_embeddings

    embed(folder / "photos", folder / "out", **_embed_options(folder))
    names, cls = read_embeddings(folder / "out")
    return [Path(name).name for name in names], cls


# --------------------------------------------------------------------------------------- image sets


def _make_packed(folder: Path) -> None:
    from veca.data import pack

    source = photos(folder / "photos", 6)
    (source / "bad.png").write_bytes(b"no image")
    pack(source, folder / "out", size=32, per_shard=3, workers=0)
    lines = [f"photos/{path.name}" for path in sorted(source.iterdir())]
    (folder / "list.txt").write_text("\n".join(lines) + "\n")


def _pack_again(folder: Path) -> object:
    from veca.data import pack

    done = pack(folder / "photos", folder / "out", size=32, per_shard=3, workers=0)
    return done.images, sorted(Path(name).name for name, _ in done.failures)


def _images_of(name: str) -> Reader:
    def read(folder: Path) -> object:
        from veca.data import open_source

        source, found = open_source(folder / name), []
        for place in range(min(len(source), 20)):
            try:  # as the loader reads them: one bad image is replaced by another
                found.append(EncodedImage.of(source, place).decode())
            except BadImageError as error:
                found.append(error.reason)
        return found

    return read


def _make_labels(folder: Path) -> None:
    photo("L").save(folder / "label.png")
    np.save(folder / "depth.npy", np.linspace(0, 1, 48).reshape(6, 8).astype(np.float32))


def _labels(name: str) -> Reader:
    return lambda folder: (label_size(folder / name), read_values(folder / name))


# ----------------------------------------------------------------------------------------- settings


def _make_settings(folder: Path) -> None:
    import importlib.resources

    name = available_protocols()[0]
    shipped = importlib.resources.files("veca.probe") / "protocols" / f"{name}.toml"
    (folder / "protocol.toml").write_text(shipped.read_text(encoding="utf-8"))
    measured = {"ms": 3.0, "cls": 0.99}
    OperatingPoint("x", "0" * 64, "a machine", 224, 8, 0.5, "float32", measured=measured).save(
        folder / "point.json"
    )
    row = Row("small", "student", 8, 224, (224, 224), (14, 14), {"top1": 0.8}, 0.9, 0.95, 3, 4, 7.0,
              0.5, {"features": "cls"})  # fmt: skip
    protocol = dataclasses.asdict(load_protocol(name))
    facts = {"name": "pets", "classes": 37}
    write_run(Run("knn", facts, protocol, {"small": {"kind": "veca"}}, [row], [], {"total": 1.0},
                  {"images": 3}, {"cpu": "one", "date": "2026-01-02"}), folder)  # fmt: skip


def _make_tuning(folder: Path) -> None:
    photos(folder / "photos", 20)
    _tuned(folder)
    (folder / "calibration.json").write_bytes(_calibrate(folder).to_bytes())


def _calibrate(folder: Path) -> content.Calibration:
    from veca.calibrate import calibrate

    return calibrate(
        model(), folder / "photos", sizes=[32], count=20, measured=folder / "measured.json"
    )


def _calibrated(folder: Path) -> object:
    return _calibrate(folder).sizes


def _tuned(folder: Path) -> object:
    from veca.tune import tune

    done = tune(model(), folder / "photos", folder / "out", sizes=[32], cores=[4, 8], keep=[1.0],
                precisions=["float32"], count=2)  # fmt: skip
    return sorted(map(str, (point.candidate for point in done.points)))


# -------------------------------------------------------------------------------- large pictures


def _make_memory(folder: Path) -> None:
    _, memory = model().remember(torch.ones(1, 3, 64, 48), cores=4)
    memory.save(folder / "core.safetensors")


def _memory(folder: Path) -> object:
    read = CoreMemory.load(folder / "core.safetensors")
    return read.keys, read.values, read.cores, read.core_xy, read.grid, read.weights


class _Stop(Exception):
    """Ends a pass in the middle."""


def _picture() -> np.ndarray[Any, Any]:
    return np.asarray(photo(size=(96, 80)))


def _make_pass(folder: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 7:
            raise _Stop

    try:
        _pass(folder, stop)
    except _Stop:
        return
    raise LargeError("the pass was over before it was stopped")


def _pass(folder: Path, progress: Any = None) -> object:
    from veca import large

    out = large.features(model(), _picture(), folder / "out.npy", tile=3, spill="disk",
                         state=folder / "state", progress=progress)  # fmt: skip
    return np.load(folder / "out.npy").round(3), out.cores.numpy().round(3)


# -------------------------------------------------------------------------- probes' cache, teachers


def _make_cache(folder: Path) -> None:
    entry = _entry(folder)
    for part in entry.parts:
        entry.write(part, _part(entry, part))


def _entry(folder: Path) -> Entry:
    return Entry(folder / "cache", {"weights": "abc"}, 10, 4)


def _part(entry: Entry, part: int) -> dict[str, Any]:
    rows = len(entry.members(part))
    return {"x": np.full((rows, 4), part, np.float16), "n": np.arange(rows)}


def _cache(folder: Path) -> object:
    """What is damaged is told, and computed again."""
    entry = _entry(folder)
    for part in entry.missing():
        entry.write(part, _part(entry, part))
    return [entry.read(part, "x") for part in entry.parts]


def _make_teacher(folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        patch_size=14, image_size=56, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    transformers.Dinov2Model(config).save_pretrained(folder / "t")
    means = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (folder / "t" / "preprocessor_config.json").write_text(json.dumps(means))


def _teacher(folder: Path) -> object:
    teacher = load_teacher(folder / "t")
    return teacher(torch.full((1, 3, 28, 28), 0.5), (2, 2))


def _our_teacher(place: Path) -> object:
    return load_teacher(place)(torch.full((1, 3, 32, 32), 0.5), (2, 2))


# ---------------------------------------------------------------------------------------- tables

MAKERS: Mapping[str, Callable[[Path], None]] = {
    "weights": _make_weights, "run": _make_run, "export": _make_export, "features": _make_features,
    "embeddings": _make_embeddings, "packed": _make_packed, "labels": _make_labels,
    "settings": _make_settings, "tuning": _make_tuning, "memory": _make_memory, "pass": _make_pass,
    "cache": _make_cache, "teacher": _make_teacher,
}  # fmt: skip

_B, _J, _T, _S, _Z = (damage.BYTES, damage.JSON, damage.TEXT, damage.SAFETENSORS, damage.ZIP)
_SEALED = while_it_holds(SEAL)
_LAST = "run/checkpoints/step-00000004"

TARGETS: Mapping[str, Target] = {
    "weights-folder": Target(
        "weights", "w/model.safetensors", lambda f: _weights(f / "w"), _S, _SEALED, True
    ),
    "weights-config": Target("weights", "w/config.json", lambda f: _weights(f / "w"), _J),
    "weights-provenance": Target(
        "weights", "w/provenance.json", lambda f: _provenance(f / "w"), _J
    ),
    "weights-file": Target(
        "weights", "lone.safetensors", lambda f: (_weights(f / "lone.safetensors"),
        _provenance(f / "lone.safetensors")), _S, _SEALED, True
    ),
    "dense-vit": Target(
        "weights", "dense.safetensors", lambda f: read_dense_vit(f / "dense.safetensors"), _S,
        _SEALED, True
    ),
    "heads": Target(
        "weights", "w/heads.safetensors", lambda f: load_heads(f / "w"), _S, _SEALED, True
    ),
    "targets": Target(
        "weights", "targets.safetensors", lambda f: load_targets(f / "targets.safetensors"), _S,
        _SEALED, True
    ),
    "our-teacher": Target(
        "weights", "lone.safetensors", lambda f: _our_teacher(f / "lone.safetensors"), _S, _SEALED,
        True
    ),
    "official-pt": Target(
        "weights", "official.pt", lambda f: _official(f / "official.pt"), _Z, always
    ),
    "official-pt-bombs": Target(
        "weights", "official.pt", lambda f: _official(f / "official.pt"),
        (damage.inflate_a_bomb,)
    ),
    "official-old-pt": Target("weights", "old.pt", lambda f: _official(f / "old.pt"), _B),
    "checkpoint-about": Target(
        "run", f"{_LAST}/about.json", _checkpoint, _J, while_it_holds("sha256"), True
    ),
    "checkpoint-student": Target(
        "run", f"{_LAST}/student.safetensors", _checkpoint, _S, always, True
    ),
    "checkpoint-optimizer": Target(
        "run", f"{_LAST}/optimizer.safetensors", _checkpoint, _S, always, True
    ),
    "checkpoint-best": Target("run", "run/checkpoints/best.json", _exported_run, _J),
    "checkpoint-exported": Target("run", f"{_LAST}/about.json", _exported_run, _J),
    "run-metrics": Target("run", "run/metrics.jsonl", _metrics, _J),
    "run-settings": Target("run", "run/config.toml", _resumed, _T),
    "run-record": Target("run", "run/run.json", _resumed, _J),
    "recipe": Target("run", "recipe.toml", lambda f: load_config(f / "recipe.toml"), _T),
    "recipe-base": Target("run", "base.toml", lambda f: load_config(f / "recipe.toml"), _T),
    "onnx": Target("export", "onnx/*.onnx", _exported("onnx/*.onnx"), _B, always),
    "onnx-alone": Target("export", "lone-onnx/small.onnx", _exported("lone-onnx/*.onnx"), _B,
                         always),
    "onnx-report": Target("export", "onnx/*.json", _exported("onnx/*.onnx"), _J),
    "pt2": Target("export", "pt2/*.pt2", _exported("pt2/*.pt2"), _Z, always, True),
    "pt2-alone": Target("export", "lone-pt2/small.pt2", _exported("lone-pt2/*.pt2"), _Z, always),
    "features-npz": Target("features", "one.npz", _features("one.npz"), _Z, always),
    "features-npz-bombs": Target(
        "features", "one.npz", _features("one.npz"), (damage.inflate_a_bomb,)
    ),
    "features-safetensors": Target(
        "features", "one.safetensors", _features("one.safetensors"), _S, _SEALED, True
    ),
    "features-again-npz": Target(
        "features", "npz/000.png.npz", _features_again("npz"), _Z, always
    ),
    "features-again-safetensors": Target(
        "features", "safetensors/000.png.safetensors", _features_again("safetensors"), _S, _SEALED,
        True
    ),
    "features-manifest": Target("features", "npz/features.json", _features_again("npz"), _J),
    "features-failures": Target("features", "npz/failures.jsonl", _features_again("npz"), _J),
    "embeddings-shard": Target(
        "embeddings", "out/shards/part-000000.parquet", _embeddings, _B, before_the_footer
    ),
    "embeddings-manifest": Target("embeddings", "out/*.json", _embeddings, _J),
    "embeddings-again-shard": Target(
        "embeddings", "out/shards/part-000001.parquet", _embed_again, _B
    ),
    "embeddings-again-manifest": Target("embeddings", "out/*.json", _embed_again, _J),
    "embeddings-plan": Target("embeddings", "out/plan/*.npz", _embed_again, _Z, always),
    "embeddings-failures": Target("embeddings", "out/failures.jsonl", _embed_again, _J),
    "search-index": Target("embeddings", "out/index-*.usearch", _search, _B),
    "search-recall": Target("embeddings", "out/index-*.json", _search, _J),
    "packed-manifest": Target("packed", "out/manifest.json", _pack_again, _J),
    "packed-shard": Target("packed", "out/shard-000000.tar", _images_of("out"), _B),
    "image-list": Target("packed", "list.txt", _images_of("list.txt"), _T),
    "label-png": Target("labels", "label.png", _labels("label.png"), damage.image_damage("png"),
                        always),
    "label-npy": Target("labels", "depth.npy", _labels("depth.npy"), _B),
    "protocol": Target("settings", "protocol.toml", lambda f: load_protocol(f / "protocol.toml"),
                       _T),
    "point": Target("settings", "point.json", lambda f: read_point(f / "point.json"), _J),
    "probe-record": Target("settings", "results.json", lambda f: read_run(f / "results.json"),
                           _J),
    "calibration": Target(
        "tuning",
        "calibration.json",
        lambda f: content.read((f / "calibration.json").read_bytes()),
        _J,
    ),
    "calibrate-measurements": Target("tuning", "measured.json", _calibrated, _J),
    "tune-measurements": Target("tuning", "out/measurements.json", _tuned, _J),
    "core-memory": Target("memory", "core.safetensors", _memory, _S, _SEALED, True),
    "large-manifest": Target("pass", "state/manifest.json", _pass, _J, always, True),
    "large-layer": Target("pass", "state/layer-001.safetensors", _pass, _S, always, True),
    "large-sums": Target("pass", "state/sums.safetensors", _pass, _S, always, True),
    "large-states": Target("pass", "state/states.bin", _pass, _B),
    "probe-cache": Target("cache", "cache/*/part-00000.safetensors", _cache, _S, always, True),
    "probe-cache-entry": Target("cache", "cache/*/entry.json", _cache, _J),
    "teacher-weights": Target("teacher", "t/model.safetensors", _teacher, _S),
    "teacher-config": Target("teacher", "t/config.json", _teacher, _J),
    "teacher-images": Target("teacher", "t/preprocessor_config.json", _teacher, _J),
}  # fmt: skip


class Files:
    """The campaign "files". Everything is below `folder`."""

    def __init__(self, folder: Path, names: list[str] | None = None) -> None:
        self.folder = folder
        self.names = list(TARGETS) if names is None else names
        torch.set_num_threads(1)
        for maker in sorted({TARGETS[name].maker for name in self.names}):
            self._place.mkdir(parents=True)
            in_a_fork(lambda maker=maker: MAKERS[maker](self._place))  # type: ignore[misc]
            (folder / "whole").mkdir(exist_ok=True)
            self._place.rename(self._whole(maker))
        self.expected: dict[str, str] = in_a_fork(
            lambda: {name: self._read(name, None) for name in self.names}
        )
        self.files = {name: self._file(name) for name in self.names}

    def targets(self, count: int) -> dict[str, int]:
        return dict.fromkeys(self.names, count)

    @staticmethod
    def row_of(target: str) -> str:
        return target

    @property
    def _place(self) -> Path:
        """Where folders are made and read: always the same, as some files name others by path."""
        return self.folder / "case"

    def _whole(self, maker: str) -> Path:
        return self.folder / "whole" / maker

    def _file(self, name: str) -> Path:
        target = TARGETS[name]
        place = self._whole(target.maker)
        found = sorted(place.glob(target.file))
        if not found:
            raise FileNotFoundError(f"{name}: no {target.file} among {sorted(place.rglob('*'))}")
        return found[0].relative_to(place)

    def costs(self, case: Case) -> int:
        return 0

    def whole(self, case: Case) -> bytes:
        return (self._whole(TARGETS[case.file].maker) / self.files[case.file]).read_bytes()

    def _mutant(self, case: Case) -> Mutant:
        return mutate(self.whole(case), TARGETS[case.file].damages, case.rng)

    def mutant(self, case: Case) -> tuple[bytes, str]:
        made = self._mutant(case)
        return made.data, made.how

    def _read(self, name: str, data: bytes | None) -> str:
        """What is read of a copy of the folder, with `data` in place of the file."""
        target = TARGETS[name]
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(self._whole(target.maker), self._place)
        if data is not None:
            (self._place / self.files[name]).write_bytes(data)
        return digest(target.read(self._place))

    def run(self, case: Case) -> Result:
        made = self._mutant(case)
        return self.read(case, made.data, resealed=made.resealed)

    def read(self, case: Case, data: bytes, *, resealed: bool = True) -> Result:
        target = TARGETS[case.file]
        covered = target.covered(self.whole(case), data) and (target.resealed_too or not resealed)
        return judged(
            lambda: self._read(case.file, data), self.expected[case.file], covered=covered
        )


def run(options: Options) -> Report:
    return run_campaign(options, "files", Files)
