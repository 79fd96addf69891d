"""Folders that transformers and `veca.load` both read, and their way to and from the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import cached_file

from veca._util import files
from veca.errors import OutputError, VecaError
from veca.integrations.transformers.configuration import VecaConfig
from veca.weights import processor, store
from veca.weights import tensors as ts
from veca.weights.card import FILE as CARD

HUB_OPTIONS = ("repo_id", "commit_message", "commit_description", "private", "token", "create_pr")
"""Options of `save_pretrained` that concern the hub."""

_DOWNLOAD_OPTIONS = ("cache_dir", "revision", "token", "local_files_only", "subfolder", "proxies")
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def is_simple(
    model: Any,
    state: Mapping[str, Tensor],
    variant: str | None,
    options: Mapping[str, Any],
) -> bool:
    """Whether a model is stored as plain tensors, which is what `veca.load` reads."""
    return (
        variant is None
        and not getattr(model, "_hf_peft_config_loaded", False)
        and getattr(model, "hf_quantizer", None) is None
        and not options.get("distributed_checkpoint")
        and all(tensor.is_floating_point() for tensor in state.values())
        and not any(tensor.is_meta for tensor in state.values())
        and not any(hasattr(tensor, "full_tensor") for tensor in state.values())  # one rank's part
    )


def fits_one_file(state: Mapping[str, Tensor], max_shard_size: int | str) -> bool:
    """Whether transformers would not split the tensors."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    return size <= _bytes(max_shard_size)


def _bytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    for unit in sorted(_UNITS, key=len, reverse=True):
        if size.upper().endswith(unit) and size[: -len(unit)].strip().isdigit():
            return int(size[: -len(unit)]) * _UNITS[unit]
    return 0  # not understood here: left to transformers


def write_plain(
    folder: Path,
    state: Mapping[str, Tensor],
    config: VecaConfig,
    provenance: Mapping[str, Any],
    beside: Mapping[str, bytes],
) -> None:
    """Tensors, configuration, provenance and what lay beside them, as `veca.save` writes them."""
    carried = store.carried(provenance, state)
    store.save_state(state, config.to_veca(), folder, provenance=carried)
    store.write_beside(beside, folder)
    # A superset of what is there now; a crash before this leaves a folder that both still read.
    files.atomic_write_text(folder / store.CONFIG, config.to_json_string(use_diff=True))
    _remove_shards(folder)


def write_provenance(
    folder: Path, state: Mapping[str, Tensor], provenance: Mapping[str, Any]
) -> None:
    """The provenance beside tensors that are in shards, which have no place for it."""
    record = store.full_record(store.carried(provenance, state), ts.content_hash(state))
    files.atomic_write_json(folder / store.PROVENANCE, record)


@contextmanager
def replacing(folder: Path) -> Iterator[None]:
    """Remove older weights and their provenance once transformers has written newer ones.

    It writes one file, or shards and an index, and leaves the other kind in place: an old file
    beside a new index would be loaded. A save of adapters or of a variant, which lie beside the
    weights, removes nothing.
    """
    whole, index = folder / store.TENSORS, folder / store.INDEX
    old_whole, old_index = _stamp(whole), _stamp(index)
    yield
    if _stamp(index) not in (None, old_index):
        for path in (*_shards(folder), index):
            files.flush(path)  # on the disk before the old ones go
        whole.unlink(missing_ok=True)
    elif _stamp(whole) != old_whole:
        _remove_shards(folder)
    else:
        return
    (folder / store.PROVENANCE).unlink(missing_ok=True)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever a file is written."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _remove_shards(folder: Path) -> None:
    """Take away shards that a whole file has replaced; the index first, which is useless alone."""
    (folder / store.INDEX).unlink(missing_ok=True)
    for path in _shards(folder):
        path.unlink(missing_ok=True)


def _shards(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _SHARD.fullmatch(path.name)]


def carry_code(model: Any, folder: Path) -> None:
    """Take the code along that a model came with, or no longer name code that is not there."""
    if model._auto_class is not None:
        folder.mkdir(parents=True, exist_ok=True)
        custom_object_save(model, folder)
    if (folder / processor.CODE_FILE).is_file():
        model.config.auto_map = processor.auto_map()
    elif hasattr(model.config, "auto_map"):
        del model.config.auto_map


def complete(folder: Path, config: VecaConfig, card: str) -> None:
    """A card and a processor's settings, where there are none."""
    if not (folder / processor.FILE).exists():
        code = (folder / processor.CODE_FILE).is_file()
        settings = processor.processor_settings(config.to_veca(), code=code)
        files.atomic_write_json(folder / processor.FILE, settings)
    if not (folder / CARD).exists():
        files.atomic_write_text(folder / CARD, card)


def read_provenance(source: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance beside weights in a folder or on the hub; empty if there is none to be had."""
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
    subfolder = options.get("subfolder") or ""
    try:
        if name and Path(name).is_dir():
            return store.read_provenance(Path(name) / subfolder)
        found = name and cached_file(
            name,
            store.PROVENANCE,
            **{k: v for k, v in options.items() if k in _DOWNLOAD_OPTIONS and v is not None},
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        held = files.from_json(Path(found).read_text(encoding="utf-8")) if found else {}
        return held if isinstance(held, dict) else {}
    except (VecaError, OSError, ValueError, TypeError):
        return {}  # it is a remark; the weights are loaded already


def read_beside(source: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, bytes]:
    """The files that belong to weights in a folder; none are fetched from the hub."""
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        return {}
    return store.read_beside(Path(source) / (options.get("subfolder") or ""))


def upload(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    tags: list[str] | None = None,
) -> Any:
    """Put a folder on the hub. A card that the repository has already is kept."""
    import huggingface_hub

    api = huggingface_hub.HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    ignored = [CARD] if api.file_exists(repo, CARD, revision=revision) else []
    if tags and not ignored:
        _add_tags(folder / CARD, tags)
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo, branch=revision, exist_ok=True)
    wanted = [p.name for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")]
    if store.TENSORS not in wanted and not any(n.endswith(store.SUFFIX) for n in wanted):
        raise OutputError(f"{folder} holds no weights to upload; save the model there first.")
    return api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        allow_patterns=_patterns(wanted),
        ignore_patterns=ignored,
        commit_message=commit_message or "Upload model",
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )


def _patterns(names: list[str]) -> list[str]:
    """The files of a model, not whatever else lies in its folder."""
    suffixes = (".safetensors", ".json", ".md")
    return sorted(name for name in names if name.endswith(suffixes))


def _add_tags(card: Path, tags: list[str]) -> None:
    text = card.read_text(encoding="utf-8")
    lines = "".join(f"- {json.dumps(tag)}\n" for tag in tags)
    files.atomic_write_text(card, text.replace("tags:\n", f"tags:\n{lines}", 1))
