"""Weights that were changed, are odd or are no files: one line that names them, and no waiting."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import veca
from conftest import SMALLEST
from veca import VecaConfig, create_model, weights
from veca.data import open_source
from veca.dense import DenseVit
from veca.distill import load_config
from veca.distill.export import publish
from veca.distill.standardise import load_targets
from veca.distill.student import load_heads
from veca.errors import ConfigError, VecaError, WeightsError
from veca.images import read_image
from veca.probe.datasets.pairs import read_values
from veca.probe.record import read_run
from veca.teachers import load_teacher, read_dense_vit, save_dense_vit
from veca.weights.card import model_card
from veca.weights.tensors import write_file


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return create_model(SMALLEST)


def edited(path: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Rewrite the text in the header of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"rope_base": 100.0', '"rope_base": 200.0'),
        ('"image_mean": [0.485', '"image_mean": [0.5'),
        ('"norm_eps": 1e-05', '"norm_eps": 1e-04'),
    ],
)
def test_a_changed_configuration_in_the_header_is_seen(model, tmp_path, old, new) -> None:
    path = veca.save(model, tmp_path / "x.safetensors")
    veca.load(path)

    def change(metadata: dict[str, str]) -> None:
        assert old in metadata["veca_config"]
        metadata["veca_config"] = metadata["veca_config"].replace(old, new)

    edited(path, change)
    for read in (veca.load, weights.read_config, weights.read_provenance):
        with pytest.raises(WeightsError, match="header"):
            read(path)


def test_a_changed_provenance_is_seen_and_files_of_0_1_load(model, tmp_path) -> None:
    path = veca.save(model, tmp_path / "x.safetensors", provenance={"licence": "apache-2.0"})
    edited(path, lambda metadata: metadata.pop("veca_sha256"))
    veca.load(path)
    path = veca.save(model, tmp_path / "y.safetensors", provenance={"licence": "apache-2.0"})
    edited(path, lambda m: m.update(veca_provenance=m["veca_provenance"].replace("apache", "bsd")))
    with pytest.raises(WeightsError, match="header"):
        veca.load(path)


def test_each_flipped_bit_of_heads_targets_and_dense_vits_is_seen(tmp_path) -> None:
    config = VecaConfig(depth=1, width=16, heads=2)
    head = {"t/cls.weight": torch.ones(4, 8), "t/cls.bias": torch.ones(4)}
    scale = {f"t/{p}.{n}": torch.ones(3) for p in ("cls", "dense") for n in ("mean", "std")}
    write_file(head, tmp_path / "heads.safetensors")
    write_file(scale, tmp_path / "targets.safetensors")
    save_dense_vit(DenseVit(config), tmp_path / "dense.safetensors")
    rng = random.Random(0)
    for name, read in (
        ("heads", lambda path: load_heads(path.parent)),
        ("targets", load_targets),
        ("dense", read_dense_vit),
    ):
        path = tmp_path / f"{name}.safetensors"
        good = path.read_bytes()
        read(path)
        for _ in range(20):
            damaged = bytearray(good)
            damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            hash_lost = bytes(damaged).count(b'"veca_sha256"') == 0  # and nothing else
            with nullcontext() if hash_lost else pytest.raises(VecaError, match=name):
                read(path)


ODD = [None, True, -1, 10**400, -(10**400), 2**63, 1e308, float("inf"), "x", [], {}, [[]], "1"]


@pytest.mark.parametrize("name", list(VecaConfig().to_dict()))
def test_odd_values_in_a_configuration(name: str) -> None:
    fields = VecaConfig().to_dict()
    for value in (*ODD, 10**5000):
        try:
            VecaConfig.from_dict({**fields, name: value})
        except ConfigError as error:
            assert len(str(error)) < 1000
    with pytest.raises(ConfigError, match="width"):
        VecaConfig.from_dict({**fields, "width": 10**5000})
    with pytest.raises(ConfigError, match="depth"):
        VecaConfig.from_dict({**fields, "depth": 2**31 - 1})


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 5000, '{"depth": ' + "9" * 5000 + "}", '{"depth": 1e999}']
)
def test_json_that_is_none(model, tmp_path, text: str) -> None:
    folder = veca.save(model, tmp_path / "w")
    for name in ("config.json", "provenance.json"):
        kept = (folder / name).read_text()
        (folder / name).write_text(text)
        with pytest.raises(WeightsError, match=name):
            weights.read_config(folder) and weights.read_provenance(folder)
        (folder / name).write_text(kept)
    lone = veca.save(model, tmp_path / "x.safetensors")
    edited(lone, lambda metadata: metadata.update(veca_config=text))
    with pytest.raises(WeightsError, match=r"x\.safetensors"):
        veca.load(lone)


def test_an_odd_provenance_still_gives_a_card(model, tmp_path) -> None:
    fields = (
        "teacher",
        "teachers",
        "data",
        "budgets",
        "derived_from",
        "init",
        "samples",
        "licence",
    )
    for name in fields:
        for value in (*ODD[:7], *ODD[8:], {"provenance": 3}, {"name": {}}, [3, "x"], "\ud800"):
            model_card(SMALLEST, {name: value})
    said = {"init": {"weights": 3, "provenance": "x"}, "samples": "many", "data": ["\ud800"]}
    veca.save(model, tmp_path / "w", provenance=said)
    publish(tmp_path / "w", tmp_path / "out")


@pytest.mark.parametrize(
    "line",
    [
        "seed = " + "9" * 6000,
        "x = " + "[" * 20_000,
        "seed = 99999999999999999999999999",
        "[optimizer]\nlr = " + "9" * 400,
        "seed = 1979-05-27",
        "teachers = [[1]]",
        "siblings = [1]",
        "data = 3",
    ],
)
def test_odd_settings(tmp_path, line: str) -> None:
    (tmp_path / "x.toml").write_text(line)
    with pytest.raises(VecaError, match=r"x\.toml"):
        load_config(tmp_path / "x.toml")


READERS: dict[str, Callable[[Path], object]] = {
    "x.safetensors": veca.load,
    "y.safetensors": weights.weights_hash,
    "a.safetensors": weights.read_config,
    "b.safetensors": load_teacher,
    "dense.safetensors": read_dense_vit,
    "x.pt": weights.import_official,
    "x.toml": load_config,
    "x.tar": open_source,
    "x.txt": open_source,
    "x.png": read_image,
    "y.png": read_values,
    "x.npy": read_values,
    "targets.safetensors": load_targets,
    "results.json": read_run,
}


@pytest.mark.parametrize("name", list(READERS))
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_pipes_and_sockets_are_refused(tmp_path, monkeypatch, name: str, kind: str) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(name)
    with pytest.raises(VecaError, match=name):
        READERS[name](path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "provenance.json"])
def test_pipes_in_a_folder(model, tmp_path, name: str) -> None:
    folder = veca.save(model, tmp_path / "w")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    try:  # what lies beside the weights may as well be missing
        veca.load(folder)
        weights.read_provenance(folder)
    except WeightsError as error:
        assert str(folder) in str(error)
