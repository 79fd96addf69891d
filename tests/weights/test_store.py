"""Saving and loading: what survives, and what is refused with which words."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import veca
from conftest import SMALLEST
from veca.errors import ConfigError, InputError, OutputError, WeightsError
from veca.model import Veca, create_model
from veca.weights import load, read_config, read_provenance, save, store, weights_hash
from veca.weights.tensors import content_hash

PLACES = ["folder", "one.safetensors"]


def same(a: Veca, b: Veca) -> bool:
    theirs = b.state_dict()
    return a.config == b.config and all(
        torch.equal(t, theirs[n]) for n, t in a.state_dict().items()
    )


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a file and keep its header's words, but not the recorded hashes."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    del metadata["veca_sha256"]
    record = json.loads(metadata["veca_provenance"])
    del record["tensors_sha256"]
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={**metadata, "veca_provenance": json.dumps(record)})


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def folder(tiny: Veca, tmp_path: Path) -> Path:
    return save(tiny, tmp_path / "folder")


@pytest.mark.parametrize("place", PLACES)
def test_round_trip(tiny: Veca, tmp_path: Path, place: str) -> None:
    before = torch.get_rng_state()
    path = save(tiny, tmp_path / "new" / place)
    assert path == tmp_path / "new" / place
    model = load(path)
    assert torch.equal(before, torch.get_rng_state()), "loading draws no random numbers"
    assert type(model) is Veca
    assert same(model, tiny)
    assert not model.training
    assert all(p.requires_grad for p in model.parameters())
    images = torch.randn(1, 3, 32, 48)
    assert torch.equal(model(images, 5).patches, tiny(images, 5).patches)


def test_a_folder_holds_three_files(folder: Path, tiny: Veca) -> None:
    assert sorted(p.name for p in folder.iterdir()) == sorted(store.FILES)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "veca"
    assert config["format_version"] == 1
    assert config["width"] == tiny.config.width
    for path in folder.iterdir():
        umask = os.umask(0)
        os.umask(umask)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_other_files_in_the_folder_stay(folder: Path, tiny: Veca) -> None:
    (folder / "README.md").write_text("kept")
    save(tiny, folder)
    assert (folder / "README.md").read_text() == "kept"
    assert len(list(folder.iterdir())) == 4


def test_saving_over_another_architecture(folder: Path) -> None:
    other = create_model("tiny", depth=2, num_cores=4, output_width=64)
    save(other, folder)
    assert same(load(folder), other)
    assert read_config(folder) == other.config


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(tiny: Veca, tmp_path: Path, dtype: torch.dtype, place: str) -> None:
    path = save(tiny, tmp_path / place, dtype=dtype)
    assert next(tiny.parameters()).dtype == torch.float32, "the model itself is not touched"
    as_float = load(path)
    as_stored = load(path, dtype=None)
    for name, original in tiny.state_dict().items():
        assert torch.equal(as_float.state_dict()[name], original.to(dtype).float())
        assert as_stored.state_dict()[name].dtype == dtype
    assert load(path, dtype=torch.float64).norm.weight.dtype == torch.float64


def test_shipping_as_float16_halves_the_file(tiny: Veca, tmp_path: Path) -> None:
    full = save(tiny, tmp_path / "full.safetensors").stat().st_size
    half = save(tiny, tmp_path / "half.safetensors", dtype=torch.float16).stat().st_size
    assert half < 0.6 * full


def test_the_loaded_model_does_not_hang_on_the_file(folder: Path, tiny: Veca) -> None:
    model = load(folder)
    (folder / "model.safetensors").write_bytes(b"")
    assert same(model, tiny)


def test_one_layer_without_moves(tmp_path: Path) -> None:
    model = create_model("tiny", depth=1, num_cores=1)
    assert same(load(save(model, tmp_path / "x.safetensors")), model)


@pytest.mark.parametrize("place", PLACES)
def test_provenance(tiny: Veca, tmp_path: Path, place: str) -> None:
    given = {"teacher": "t", "budgets": (8, 16), "data": {"images": 3, "name": "Ångström"}}
    path = save(tiny, tmp_path / place, provenance={**given, "code_version": "a lie"})
    read = read_provenance(path)
    assert read["teacher"] == "t"
    assert read["budgets"] == [8, 16]
    assert read["data"] == {"images": 3, "name": "Ångström"}
    assert read["code_version"] == veca.__version__
    assert read["format_version"] == 1
    assert read["tensors_sha256"] == weights_hash(path)
    if path.is_dir():
        assert read["file_sha256"] == store.file_hash(path / "model.safetensors")
        (path / "provenance.json").unlink()
        assert read_provenance(path)["teacher"] == "t"


def test_provenance_of_earlier_tensors_is_not_believed(folder: Path, tiny: Veca) -> None:
    old = (folder / "provenance.json").read_text()
    save(create_model(tiny.config), folder, provenance={"teacher": "new"})
    (folder / "provenance.json").write_text(old)
    assert read_provenance(folder)["teacher"] == "new"


@pytest.mark.parametrize("bad", [{"x": {1, 2}}, {"x": float("nan")}, ["x"], {"x": torch.ones(1)}])
def test_provenance_must_be_json(tiny: Veca, tmp_path: Path, bad: Any) -> None:
    with pytest.raises(InputError, match="provenance"):
        save(tiny, tmp_path / "x", provenance=bad)
    assert not (tmp_path / "x").exists()


def test_hash(tiny: Veca, tmp_path: Path) -> None:
    value = weights_hash(tiny)
    assert re.fullmatch("[0-9a-f]{64}", value)
    full, half = tmp_path / "full", tmp_path / "half.safetensors"
    save(tiny, full)
    save(tiny, half, dtype=torch.float16)
    assert value == weights_hash(full) == weights_hash(str(full)) == weights_hash(load(full))
    assert weights_hash(half) != value
    assert weights_hash(half) == weights_hash(load(half, dtype=None))
    assert weights_hash(load(half)) != weights_hash(half), "the dtype counts"
    with torch.no_grad():
        tiny.norm.bias[0] += 1e-3
    assert weights_hash(tiny) != value


def test_hash_is_the_same_everywhere() -> None:
    """Caches outlive a version; a change of the definition must be deliberate."""
    state = {"b": torch.arange(3.0), "a": torch.tensor(2.0, dtype=torch.bfloat16)}
    first = b"a\0bfloat16\0[]\0" + bytes.fromhex("0040")
    second = b"b\0float32\0[3]\0" + struct.pack("<3f", 0, 1, 2)
    assert content_hash(state) == hashlib.sha256(first + second).hexdigest()


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("place", PLACES)
def test_truncated_anywhere(tiny: Veca, tmp_path: Path, place: str) -> None:
    path = save(tiny, tmp_path / place)
    file = store.tensors_file(path)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in (0, 1, 7, 8, 9, header // 2, header, header + 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        for use in (load, weights_hash, read_provenance):
            if use is read_provenance and path.is_dir():
                continue
            with pytest.raises(WeightsError, match="damaged") as caught:
                use(path)
            assert str(file) in str(caught.value)
    file.write_bytes(whole + b"x")
    with pytest.raises(WeightsError, match="damaged"):
        load(path)
    file.write_bytes(whole)
    assert same(load(path), tiny)


def test_a_flipped_bit(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-2] ^= 1
    file.write_bytes(whole)
    with pytest.raises(WeightsError, match="sha256"):
        load(folder)


def test_git_lfs_pointer(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(WeightsError, match="git lfs pull"):
        load(folder)


@pytest.mark.parametrize("place", PLACES)
def test_missing_extra_misshapen(tiny: Veca, tmp_path: Path, place: str) -> None:
    path = save(tiny, tmp_path / place)

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["blocks.1.ffn.up.bias"]
        tensors["blocks.7.surplus"] = torch.ones(2)
        tensors["bank.tokens"] = torch.ones(8, 31)

    rewrite(store.tensors_file(path), change)
    with pytest.raises(WeightsError) as caught:
        load(path)
    for noun in ("blocks.1.ffn.up.bias", "blocks.7.surplus", "bank.tokens", "[8, 31]", "[8, 32]"):
        assert noun in str(caught.value)
    assert str(store.tensors_file(path)) in str(caught.value)


def test_long_lists_are_cut(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("blocks.2.")]:
            del tensors[name]

    rewrite(folder / "model.safetensors", change)
    with pytest.raises(WeightsError, match="11 more") as caught:
        load(folder)
    assert str(caught.value).count("blocks.2.") == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite(folder: Path, value: float) -> None:
    rewrite(folder / "model.safetensors", lambda t: t["moves.1.head.weight"][0, 3].fill_(value))
    with pytest.raises(WeightsError, match=r"moves\.1\.head\.weight"):
        load(folder)


def test_not_floating(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda t: t.update({"norm.bias": torch.ones(32).int()}))
    with pytest.raises(WeightsError, match="I32"):
        load(folder)


def test_a_config_of_other_tensors_is_refused(folder: Path, tiny: Veca) -> None:
    edit(folder / "config.json", rope_base=50.0)
    for use in (load, read_config):
        with pytest.raises(WeightsError, match="rope_base"):
            use(folder)
    (folder / "config.json").unlink()
    assert same(load(folder), tiny)


def foreign(folder: Path) -> Path:
    """As another tool would write it: tensors with no words in the header, and a config.json."""
    file = folder / "model.safetensors"
    save_file(load_file(file), file)
    return folder


def test_tensors_of_another_tool(folder: Path, tiny: Veca) -> None:
    foreign(folder)
    edit(folder / "config.json", architectures=["X"], transformers_version="5", torch_dtype="f")
    assert same(load(folder), tiny)
    (folder / "provenance.json").unlink()
    assert read_provenance(folder) == {}
    (folder / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config\.json"):
        load(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "noun"),
    [
        ("{", "valid JSON"),
        ("", "valid JSON"),
        ("[" * 100_000, "valid JSON"),
        ("[1]", "list"),
        ('"x"', "str"),
        ('{"widht": 32}', "'width'"),
        ('{"width": "wide"}', "'wide'"),
        ('{"width": NaN}', "NaN"),
        ('{"norm_eps": Infinity}', "Infinity"),
        ('{"format_version": 2}', "version 2"),
        ('{"format_version": "x"}', "format_version"),
        ('{"architecture": "veca_tiny_patch16"}', "timm"),
        ('{"model_type": "bert"}', "bert"),
        ('{"depth": 1000000000}', "1000000000"),
        ('{"width": 4000000000000, "heads": 1}', "4000000000000"),
        ('{"num_cores": 1000000000}', "bank.tokens"),
    ],
)
def test_bad_configs(folder: Path, text: str, noun: str) -> None:
    foreign(folder)
    (folder / "config.json").write_text(text)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    assert noun in message.replace(str(folder), ""), "the folder's name holds the case's"


def test_a_config_that_is_not_text(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WeightsError, match="utf-8"):
        load(folder)


def test_a_future_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    del metadata["veca_sha256"]
    fields = json.loads(metadata["veca_config"])
    metadata["veca_config"] = json.dumps({**fields, "format_version": 3, "new_field": 1})
    save_file(load_file(file), file, metadata=metadata)
    with pytest.raises(WeightsError, match="version 3"):
        load(folder)


def test_saving_refuses_what_is_not_finite(tiny: Veca, tmp_path: Path) -> None:
    with torch.no_grad():
        tiny.blocks[0].attn.q.weight[0, 0] = float("nan")
    with pytest.raises(WeightsError, match=r"blocks\.0\.attn\.q\.weight"):
        save(tiny, tmp_path / "x")
    with torch.no_grad():
        tiny.blocks[0].attn.q.weight[0, 0] = 1e6
    with pytest.raises(WeightsError, match=r"torch\.float16"):
        save(tiny, tmp_path / "x", dtype=torch.float16)
    assert not (tmp_path / "x").exists()
    save(tiny, tmp_path / "x", dtype=torch.bfloat16)


def test_saving_refuses_an_empty_path(
    tiny: Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="empty"):
        save(tiny, "")
    assert not list(tmp_path.iterdir())


def test_saving_refuses_what_is_no_model(tiny: Veca, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Linear"):
        save(torch.nn.Linear(1, 1), tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="DataParallel"):
        save(torch.nn.DataParallel(tiny), tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"torch\.int8"):
        save(tiny, tmp_path / "x", dtype=torch.int8)
    state = tiny.state_dict()
    del state["norm.bias"]
    with pytest.raises(WeightsError, match=r"norm\.bias"):
        store.save_state(state, tiny.config, tmp_path / "x")


def test_targets_that_cannot_be_written(tiny: Veca, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(OutputError, match="folder"):
        save(tiny, tmp_path / "file")
    with pytest.raises(OutputError, match=r"folder\.safetensors"):
        save(tiny, tmp_path / "folder.safetensors")
    with pytest.raises(OutputError, match="deeper"):
        save(tiny, tmp_path / "file" / "deeper")
    with pytest.raises(OutputError, match="/proc/nowhere"):
        save(tiny, "/proc/nowhere/x")


def test_bad_arguments_of_load(folder: Path) -> None:
    with pytest.raises(InputError, match=r"torch\.int64"):
        load(folder, dtype=torch.int64)
    with pytest.raises(InputError, match="device"):
        load(folder, device="nonsense")
    with pytest.raises(InputError, match="backend"):
        load(folder, backend="nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="'cuda'"):
            load(folder, device="cuda")


def test_errors_are_value_errors_too(folder: Path) -> None:
    edit(folder / "config.json", nonsense=1)
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert isinstance(caught.value.__cause__, ConfigError)


def test_the_hash_of_another_file_is_not_carried_over(tmp_path):
    path = veca.save(
        veca.create_model(SMALLEST), tmp_path / "x.safetensors", provenance={"file_sha256": "old"}
    )
    assert "file_sha256" not in read_provenance(path)
