"""How weights lie on disk: a folder of three files, or one file that holds the same.

`model.safetensors` is complete in itself: its header carries the configuration and the
provenance, and replacing it is the one step that turns an old set into a new one.
`config.json` and `provenance.json` beside it are copies for people and for other tools. A
`config.json` that disagrees with the tensors is refused, never used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from veca import content
from veca._util import files
from veca._util.extras import upgrade_advice
from veca.checks import check_model
from veca.config import VecaConfig
from veca.errors import (
    ConfigError,
    InputError,
    OutputError,
    VecaWarning,
    WeightsError,
    shown,
)
from veca.model import Veca
from veca.quantization import Rounding, quantized_weight
from veca.version import __version__
from veca.weights import tensors as ts

FORMAT_VERSION = 1
TENSORS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"
FILES = (TENSORS, CONFIG, PROVENANCE)
SUFFIX = ".safetensors"
TARGETS, HEADS = "targets.safetensors", "heads.safetensors"
BESIDE = (TARGETS, HEADS, content.FILE)
"""What may lie beside weights: scales of the teachers' features and heads for others, which
training leaves, and what `veca calibrate` found."""
INDEX = f"{TENSORS}.index.json"
"""Beside weights that transformers split into shards: which tensor is in which."""

_MODEL_TYPE = "veca"
# Fields that transformers adds to a config.json: about the file, and how its classes are used. They
# say nothing about the function the weights compute.
_BOOKKEEPING = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("cores", "keep", "agreement", "out_features", "out_indices"),
    *("apply_layernorm", "reshape_hidden_states"),
    *("id2label", "label2id", "problem_type", "return_dict"),
    *("output_attentions", "output_hidden_states"),
}
_HEADER_CONFIG, _HEADER_PROVENANCE = "veca_config", "veca_provenance"
_HEADER_ROUNDING, _SCALE = "veca_rounding", "_scale"
_FETCH_AGAIN = "the file is cut short or damaged; fetch or write it again"
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


# --------------------------------------------------------------------------------------- writing


def save(
    model: Veca,
    path: str | os.PathLike[str],
    *,
    provenance: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a model's weights, replacing older ones in one step; a crash leaves those whole.

    Args:
        path: a name ending in `.safetensors` makes one file; any other is a folder with
            `model.safetensors`, `config.json` and `provenance.json`. Folders are made on the way.
        provenance: where the weights come from, as plain JSON: teacher, its licence, data, steps,
            budgets. The code version, the format version and hashes are added. Without it, what
            the model was loaded with: as it was, or, where the tensors have changed since, as
            "derived_from".
        dtype: store in this dtype, such as `torch.float16` to ship; None keeps the model's.

    A folder also gets the files that lay beside the weights when they were loaded, such as
    `targets.safetensors`.

    Returns:
        The path written.
    """
    check_model(model, "save")
    state = model.state_dict()
    if provenance is None:
        provenance = carried(model.provenance, state)
    written = save_state(state, model.config, path, provenance=provenance, dtype=dtype)
    if written.is_dir():
        beside = _still_holding(model.beside, state, written)
        write_beside(beside, written)
        if content.FILE not in beside:  # of weights that were there before
            (written / content.FILE).unlink(missing_ok=True)
    return written


def carried(provenance: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the provenance that tensors were loaded with says of them now."""
    known = {k: v for k, v in provenance.items() if k not in ("file_sha256", "format_version")}
    recorded = known.get("tensors_sha256")
    if recorded is not None and not ts.are_stored_as(state, recorded):
        # Trained on, or rounded: what is known of them holds no longer as it is.
        known = {"derived_from": known}
    return known


def _still_holding(
    beside: Mapping[str, bytes], state: Mapping[str, Tensor], folder: Path
) -> Mapping[str, bytes]:
    """The files that belong to weights, as they belong to those saved just now.

    A calibration is bound to the hash of the tensors as they are stored. It goes on with the same
    ones in another dtype; of weights that were trained on it says nothing.
    """
    if content.FILE not in beside:
        return beside
    calibration = content.read(beside[content.FILE])
    if not ts.are_stored_as(state, calibration.weights_sha256):
        return {name: data for name, data in beside.items() if name != content.FILE}
    bound = dataclasses.replace(calibration, weights_sha256=read_hash(folder))
    return {**beside, content.FILE: bound.to_bytes()}


def write_beside(beside: Mapping[str, bytes], folder: Path) -> None:
    """Write the files that belong to the weights in a folder."""
    for name, data in beside.items():
        with files.atomic_write(folder / name) as file:
            file.write(data)


def read_beside(folder: Path) -> dict[str, bytes]:
    """The files that belong to the weights in a folder; empty for a single file."""
    found = {}
    for name in BESIDE if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # there is none, or none to be read
            found[name] = (folder / name).read_bytes()
    return found


def save_state(
    state: Mapping[str, Tensor],
    config: VecaConfig,
    path: str | os.PathLike[str],
    *,
    provenance: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """`save` for tensors that are in no model, such as an average or a gathered shard."""
    path = files.place_for(path)
    ts.check_dtype(dtype)
    problems = ts.differences(ts.shapes(state), ts.shapes(ts.blank(config).state_dict()))
    if problems:
        raise WeightsError(f"the tensors to save do not fit their config; {'; '.join(problems)}.")
    ts.require_floating({name: t.dtype for name, t in state.items()}, "the tensors to save")
    ts.require_finite(state, "the tensors to save", "such a model is of no use, so it is not kept.")
    state = {name: t.detach().to("cpu", dtype).contiguous() for name, t in state.items()}
    if dtype is not None:
        advice = "they are out of its range; save as bfloat16 or float32."
        ts.require_finite(state, f"the tensors to save, as {dtype}", advice)

    content = ts.content_hash(state)
    record = full_record(provenance, content)
    metadata = {
        "format": "pt",
        _HEADER_CONFIG: json.dumps(_config_fields(config)),
        _HEADER_PROVENANCE: files.escaped(json.dumps(record, ensure_ascii=False)),
    }
    metadata[ts.SEAL] = ts.seal(content, metadata)
    if path.name.endswith(SUFFIX):
        ts.write_file(state, path, metadata)
    else:
        _write_folder(path, state, metadata, config, record)
    return path


def save_rounded(
    model: Veca, rounding: Rounding, path: Path, *, provenance: Mapping[str, Any]
) -> None:
    """`save` with the layers of `rounding` in int8: `NAME.weight` beside `NAME.weight_scale`."""
    config, state = model.config, dict(model.state_dict())
    ts.require_finite(state, "the tensors to save", "such a model is of no use, so it is not kept.")
    layers = rounding.layers(model)
    for name in layers:
        weight, scale = quantized_weight(state[f"{name}.weight"])
        state[f"{name}.weight"], state[f"{name}.weight{_SCALE}"] = weight, scale
    hashed = ts.content_hash(state)
    record = full_record(provenance, hashed)
    metadata = {
        "format": "pt",
        _HEADER_CONFIG: json.dumps(_config_fields(config)),
        _HEADER_PROVENANCE: files.escaped(json.dumps(record, ensure_ascii=False)),
        _HEADER_ROUNDING: json.dumps({**rounding.to_dict(), "layers": layers}),
    }
    metadata[ts.SEAL] = ts.seal(hashed, metadata)
    if path.name.endswith(SUFFIX):
        ts.write_file(state, path, metadata)
    else:
        _write_folder(path, state, metadata, config, record)
        write_beside({n: d for n, d in model.beside.items() if n != content.FILE}, path)


def _config_fields(config: VecaConfig) -> dict[str, Any]:
    return {"model_type": _MODEL_TYPE, "format_version": FORMAT_VERSION, **config.to_dict()}


def full_record(provenance: Mapping[str, Any] | None, content: str) -> dict[str, Any]:
    """The provenance to store; what is known for certain wins over what was passed in.

    Args:
        content: the hash of the tensors.
    """
    if provenance is not None and not isinstance(provenance, Mapping):
        raise InputError(
            f"provenance must be a mapping of plain JSON values, got {type(provenance).__name__}."
        )
    certain = {
        "code_version": __version__,
        "format_version": FORMAT_VERSION,
        "tensors_sha256": content,
    }
    given = {k: v for k, v in (provenance or {}).items() if k not in {*certain, "file_sha256"}}
    try:
        # Through JSON and back, so that what is stored is what a reader will get.
        plain: dict[str, Any] = json.loads(files.to_json({**given, **certain}))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"provenance must hold plain JSON values only: {error}.") from error
    return plain


def _write_folder(
    folder: Path,
    state: dict[str, Tensor],
    metadata: dict[str, str],
    config: VecaConfig,
    record: dict[str, Any],
) -> None:
    with files.output_errors(folder):
        taken = folder.exists() and not folder.is_dir()
    if taken:
        raise OutputError(
            f"cannot write the folder {folder}: a file of that name is there; choose another name, "
            f"or one ending in {SUFFIX} for a single file."
        )
    tensors_path, config_path, provenance_path = (folder / name for name in FILES)
    with (
        files.temporary_beside(tensors_path) as new_tensors,
        files.temporary_beside(config_path) as new_config,
        files.temporary_beside(provenance_path) as new_provenance,
        files.output_errors(folder),
    ):
        # All three reach the disk before anything old is touched.
        ts.write(state, new_tensors, tensors_path, metadata)
        record = {**record, "file_sha256": file_hash(new_tensors)}
        new_config.write_text(files.to_json(_config_fields(config)), encoding="utf-8")
        new_provenance.write_text(files.to_json(record), encoding="utf-8")
        for path in (new_tensors, new_config, new_provenance):
            files.flush(path)

        with _without_stale_config(config_path, new_config, tensors_path, new_tensors):
            files.commit(new_tensors, tensors_path)
        files.commit(new_config, config_path)
        files.commit(new_provenance, provenance_path)


@contextlib.contextmanager
def _without_stale_config(old: Path, new: Path, tensors: Path, new_tensors: Path) -> Iterator[None]:
    """Take the old config.json away while its tensors are replaced, if it is another one.

    Old tensors without it still load, as do new ones: each carry their own configuration. Old
    beside new would not, and a crash between the two renames would leave just that.
    """
    text = old.read_bytes() if old.is_file() else None
    if text is None or text == new.read_bytes() or not _carries_config(tensors):
        yield
        return
    old.unlink()
    files.flush_folder(old.parent)
    try:
        yield
    finally:
        if new_tensors.exists():  # they were not renamed: the old ones are still in place
            old.write_bytes(text)


def _carries_config(path: Path) -> bool:
    try:
        return _HEADER_CONFIG in _open(path).metadata
    except WeightsError:
        return False


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes, as `sha256sum` prints it."""
    digest = hashlib.sha256()
    with files.open_file(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# --------------------------------------------------------------------------------------- reading


class _Header(NamedTuple):
    """What a safetensors file says before its tensors."""

    path: Path
    metadata: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]


def load_local(
    path: Path, *, device: torch.device, dtype: torch.dtype | None, backend: str
) -> Veca:
    """The model in a folder or a `.safetensors` file, checked in full."""
    header = _open(tensors_file(path))
    config = _config(path, header)
    _check_layout(header, config)
    state = _read(header)
    ts.require_finite(state, str(header.path), "the weights are broken; fetch or train them again.")
    recorded = _embedded(header, _HEADER_PROVENANCE).get("tensors_sha256")
    if recorded is not None and recorded != ts.content_hash(state):
        raise WeightsError(
            f"{header.path}: the tensors are not those that were saved (their sha256 differs from "
            f"the one recorded); {_FETCH_AGAIN}."
        )
    rounding = _embedded(header, _HEADER_ROUNDING)
    for name in _rounded(header):
        scale = state.pop(f"{name}{_SCALE}")
        state[name] = state[name].float() * scale.unsqueeze(1)
    # A copy, because the tensors read are a window on the file, which may change or vanish.
    state = {name: tensor.to(device, dtype, copy=True) for name, tensor in state.items()}
    model = ts.fill(config, state, backend=backend)
    try:
        model.provenance = read_provenance(path)
    except WeightsError:  # the copy beside the tensors, which is for people
        model.provenance = _embedded(header, _HEADER_PROVENANCE)
    model.beside = _of_these(read_beside(path), path, str(recorded or read_hash(path)))
    if rounding:
        model.quantization = Rounding.from_dict(rounding)
    return model


def _of_these(beside: Mapping[str, bytes], path: Path, content_hash: str) -> Mapping[str, bytes]:
    """The files beside weights, less a calibration that was made for others."""
    if content.FILE not in beside:
        return beside
    where = str(path / content.FILE)
    try:
        calibration = content.read(beside[content.FILE], where)
        fault = "" if calibration.weights_sha256 == content_hash else "was made for other weights"
    except WeightsError as error:
        fault = f"cannot be used ({error})"
    if not fault:
        return beside
    warnings.warn(
        f"{where} {fault}; 'auto' is not to be had. veca calibrate makes one for these weights.",
        VecaWarning,
        stacklevel=2,
    )
    return {name: data for name, data in beside.items() if name != content.FILE}


def read_config(path: Path) -> VecaConfig:
    """The configuration of a folder or a file, without its tensors."""
    if _only_config(path):
        return _parse_config(path / CONFIG, files.read_json(path / CONFIG, WeightsError))
    return _config(path, _open(tensors_file(path)))


def read_provenance(path: Path) -> dict[str, Any]:
    """Where the weights come from, as saved; empty if nothing was recorded."""
    beside: dict[str, Any] = {}
    if path.is_dir() and (path / PROVENANCE).is_file():
        beside = files.read_json(path / PROVENANCE, WeightsError)
    if _only_config(path):
        return beside
    inside = _embedded(_open(tensors_file(path)), _HEADER_PROVENANCE)
    # Beside other tensors it is a leftover of an interrupted save: the file's own record holds.
    stale = inside and beside.get("tensors_sha256") != inside.get("tensors_sha256")
    return inside if stale or not beside else beside


def _only_config(path: Path) -> bool:
    """Whether a folder was fetched from the hub without its tensors, to look at the rest."""
    return path.is_dir() and not (path / TENSORS).is_file() and (path / CONFIG).is_file()


def read_hash(path: Path) -> str:
    """The hash of the stored tensors' names, dtypes, shapes and bytes."""
    return ts.content_hash(_read(_open(tensors_file(path))))


def holds_weights(path: Path) -> bool:
    """Whether a path is a weights file, or a folder with weights, be they in shards."""
    if path.is_dir():
        return any((path / name).is_file() for name in (TENSORS, INDEX))
    return path.is_file()


def tensors_file(path: Path) -> Path:
    """The safetensors file of a folder, or the file itself."""
    if path.is_dir():
        if not (path / TENSORS).is_file():
            if (path / INDEX).is_file():
                raise WeightsError(
                    f"the folder {path} holds weights that transformers split into shards, which "
                    f"veca.load does not read; {_resave('leave out max_shard_size')}."
                )
            raise WeightsError(
                f"the folder {path} holds no {TENSORS}; veca.save writes one, and `veca import` "
                "makes one from a checkpoint of the authors'."
            )
        return path / TENSORS
    if not path.name.endswith(SUFFIX):
        raise WeightsError(
            f"{path} is not a {SUFFIX} file; a checkpoint of the authors' (torch-saved) is read by "
            "veca.import_official or `veca import`."
        )
    return path


def _resave(how: str) -> str:
    return (
        "open it with AutoModel.from_pretrained of transformers and save_pretrained it to another "
        f"folder ({how})"
    )


@contextlib.contextmanager
def _safetensors_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        if _is_lfs_pointer(path):
            raise WeightsError(
                f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` to fetch them."
            ) from error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        why = f"{_FETCH_AGAIN}" if isinstance(error, SafetensorError) else "check the file"
        raise WeightsError(f"cannot read {path} ({reason}); {why}.") from error


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with files.open_file(path) as file:
            return file.read(40).startswith(b"version https://git-lfs")
    except OSError:
        return False


def _open(path: Path) -> _Header:
    if not path.exists():
        raise WeightsError(f"there is no weights file {path}.")
    with _safetensors_errors(path), ts.opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        header = _Header(
            path,
            dict(file.metadata() or {}),
            {name: tuple(part.get_shape()) for name, part in slices.items()},
            {name: part.get_dtype() for name, part in slices.items()},
        )
    recorded = _embedded(header, _HEADER_PROVENANCE).get("tensors_sha256", "")
    if ts.SEAL in header.metadata and header.metadata[ts.SEAL] != ts.seal(
        str(recorded), header.metadata
    ):
        raise WeightsError(
            f"{path}: the header is not the one that was saved (its sha256 differs from the one "
            f"recorded); {_FETCH_AGAIN}."
        )
    return header


def _read(header: _Header) -> dict[str, Tensor]:
    dtypes = {name: _DTYPES.get(dtype, dtype) for name, dtype in header.dtypes.items()}
    rounded = _rounded(header)
    floats = {name: dtype for name, dtype in dtypes.items() if name not in rounded}
    ts.require_floating(floats, str(header.path))
    with _safetensors_errors(header.path), ts.opened(header.path) as file:
        return {name: file.get_tensor(name) for name in header.shapes}


def _rounded(header: _Header) -> set[str]:
    """The weights that are stored in int8."""
    layers = _embedded(header, _HEADER_ROUNDING).get("layers", [])
    names = {f"{name}.weight" for name in layers} if isinstance(layers, list) else set()
    wrong = [name for name in names if header.dtypes.get(name) != "I8"]
    if wrong:
        raise WeightsError(
            f"{header.path}: int8 is said of {ts.listed(wrong)}, which are not; {_FETCH_AGAIN}."
        )
    return names


def _check_layout(header: _Header, config: VecaConfig) -> None:
    if config.depth > len(header.shapes):  # keeps a silly depth from being built
        raise WeightsError(
            f"{header.path}: {len(header.shapes)} tensors are too few for the configuration's "
            f"{config.depth} blocks; {_FETCH_AGAIN}."
        )
    expected = ts.shapes(ts.blank(config, where=f"the configuration of {header.path}").state_dict())
    scales = {f"{name}{_SCALE}": (header.shapes[name][0],) for name in _rounded(header)}
    expected = {**expected, **scales}
    problems = ts.differences(header.shapes, expected)
    if problems and all(f"{_MODEL_TYPE}.{name}" in header.shapes for name in expected):
        more = [name for name in header.shapes if not name.startswith(f"{_MODEL_TYPE}.")]
        beside = f", with {ts.listed(more)} beside it" if more else ""
        raise WeightsError(
            f"{header.path} holds the model under transformers' names{beside}, which veca.load "
            f"does not read; {_resave('AutoModel keeps the plain model alone')}."
        )
    if problems:
        raise WeightsError(
            f"{header.path}: the tensors do not fit the configuration; {'; '.join(problems)}."
        )


def _config(path: Path, header: _Header) -> VecaConfig:
    """The configuration inside the tensors file and the one beside it, which must agree."""
    inside = beside = None
    if _HEADER_CONFIG in header.metadata:
        inside = _parse_config(header.path, _embedded(header, _HEADER_CONFIG))
    config_path = path / CONFIG
    if path.is_dir() and config_path.is_file():
        beside = _parse_config(config_path, files.read_json(config_path, WeightsError))
    if inside is not None and beside is not None and inside != beside:
        a, b = inside.to_dict(), beside.to_dict()
        name = next(name for name in a if a[name] != b[name])
        raise WeightsError(
            f"{config_path} does not belong to the tensors beside it: it says {name} {b[name]!r}, "
            f"they were saved with {a[name]!r}; delete it to use the tensors' own configuration."
        )
    config = inside or beside
    if config is None:
        where = f"no {CONFIG} beside it" if path.is_dir() else "put it in a folder with one"
        raise WeightsError(
            f"{header.path} carries no configuration ({where}); veca.save writes both, and "
            "`veca import` reads the authors' checkpoints."
        )
    return config


def _embedded(header: _Header, name: str) -> dict[str, Any]:
    """The table under a name in the header; empty if there is none."""
    text = header.metadata.get(name)
    where = f"{name} in the header of {header.path}"
    return {} if text is None else files.parse_json(text, where, WeightsError)


def _parse_config(path: Path, fields: dict[str, Any]) -> VecaConfig:
    fields = dict(fields)
    version = fields.pop("format_version", FORMAT_VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise WeightsError(f"{path}: format_version must be a whole number, got {shown(version)}.")
    if version > FORMAT_VERSION:
        raise WeightsError(
            f"{path} has format version {shown(version)}, but this veca ({__version__}) reads up "
            f"to {FORMAT_VERSION}; {upgrade_advice()}."
        )
    if "architecture" in fields and "model_type" not in fields:
        raise WeightsError(
            f"{path} was written by timm; open its folder with "
            "timm.create_model('local-dir:FOLDER', pretrained=True) after `import "
            "veca.integrations.timm`, and veca.save its .veca to load it here."
        )
    kind = fields.pop("model_type", _MODEL_TYPE)
    if kind != _MODEL_TYPE:
        raise WeightsError(f"{path} describes a model of type {shown(kind)}, not {_MODEL_TYPE!r}.")
    try:
        return VecaConfig.from_dict({k: v for k, v in fields.items() if k not in _BOOKKEEPING})
    except ConfigError as error:
        raise WeightsError(f"{path}: {error}") from error
