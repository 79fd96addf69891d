"""Files of torch.save: damage is seen, and a small file costs little."""

from __future__ import annotations

import pickle
import random
import struct
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from veca.errors import TeacherError, WeightsError
from veca.teachers import openclip
from veca.weights import import_official, pickled
from weights import authors
from weights.test_untrusted import Calls, archive, refused


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Half a gigabyte more than now, and an attempt to take more fails."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, limit[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limit)


def test_each_flipped_bit_of_a_checkpoint_is_seen(tmp_path: Path) -> None:
    c = authors.settings()
    torch.save({"student": authors.state(c), "config": c}, tmp_path / "good.pt")
    good = (tmp_path / "good.pt").read_bytes()
    model = import_official(tmp_path / "good.pt").state_dict()
    rng = random.Random(0)
    seen = 0
    for _ in range(40):
        damaged = bytearray(good)
        damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        (tmp_path / "x.pt").write_bytes(damaged)
        try:
            other = import_official(tmp_path / "x.pt").state_dict()
        except WeightsError:
            seen += 1
            continue
        # In the padding between the members, or a time.
        assert all(torch.equal(model[name], other[name]) for name in model)
    assert seen > 20


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "call",
    [
        Calls(bytearray, 10**10),
        Calls(torch.FloatTensor, 10**9),
        Calls(torch.DoubleTensor, 1000, 10**6),
    ],
)
def test_a_small_file_that_asks_for_gigabytes(tmp_path: Path, call: Any) -> None:
    content = {"student": {}, "more": call}
    refused(archive(tmp_path / "x.pt", pickle.dumps(content, protocol=2)), "numbers")


def test_tensors_that_share_their_data(tmp_path: Path) -> None:
    """6 KB that would be gigabytes once each tensor is copied."""
    one = torch.zeros(20_000)
    many = {f"blocks.{i}.norm_attn.weight": one.view(-1) for i in range(50)}
    torch.save({"student": many}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "times")
    flat = {f"blocks.{i}.norm_attn.weight": torch.zeros(1).expand(10**6) for i in range(50)}
    torch.save({"student": flat}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "larger")


def test_so_do_the_teachers(tmp_path: Path) -> None:
    torch.save({"visual.conv1.weight": torch.zeros(1).expand(10**9)}, tmp_path / "x.bin")
    with pytest.raises(TeacherError, match="larger"):
        openclip._read(tmp_path / "x.bin")


@pytest.mark.usefixtures("little_memory")
def test_a_file_of_before_1_6_that_says_it_is_large(tmp_path: Path) -> None:
    c = authors.settings()
    content = {"student": authors.state(c), "config": c}
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    import_official(tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    place = data.index(b"cpuq")
    number = data.index(b"K", place)  # how many numbers the first tensor has
    data = data[:number] + b"J" + struct.pack("<i", 2**31 - 1) + data[number + 2 :]
    (tmp_path / "y.pt").write_bytes(data)
    refused(tmp_path / "y.pt", "stores")


@pytest.mark.parametrize("times", ["key", "setting", "set"])
def test_tuples_in_tuples_do_not_take_for_ever(tmp_path: Path, times: str) -> None:
    """Each holds the one before twice: its hash takes 2**60 steps."""
    nested = b")" + b"q\x00h\x00\x86" * 60
    c = authors.settings()
    program = {
        "key": b"}X\x07\x00\x00\x00student}" + nested + b"Nss.",
        "setting": b"}" + nested + b"Ns.",
        "set": b"c__builtin__\nset\n](" + nested + b"e\x85R.",
    }[times]
    began = time.monotonic()
    refused(archive(tmp_path / "x.pt", b"\x80\x02" + program), "nested")
    assert time.monotonic() - began < 2
    assert c


def test_odd_names_and_settings(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    c = authors.settings()
    state = authors.state(c)
    for changes in (
        {"rope_zero_freqs_from": nested},
        {"model_family": nested, "num_heads": 10**5000},
        {"num_layers": 10**400},
        {"mlp_ratio": 10**400},
        {"mlp_ratio": 1e308},
        {"hidden_dim": 10**30},
        {"rope_shift_coords": -(10**400)},
        {"patch_embed_use_ln": torch.ones(2)},
        {"num_query_tokens": 2**80},
    ):
        torch.save({"student": state, "config": {**c, **changes}}, tmp_path / "x.pt")
        refused(tmp_path / "x.pt")
    for name in ((1, 2), 7, None, b"x"):
        torch.save({"student": {**state, name: torch.ones(1)}, "config": c}, tmp_path / "x.pt")
        refused(tmp_path / "x.pt", "name")
    torch.save({"student": state, "config": c, "epoch": 10**400}, tmp_path / "x.pt")
    import_official(tmp_path / "x.pt")


def test_members_that_overlap(tmp_path: Path) -> None:
    c = authors.settings()
    torch.save({"student": authors.state(c), "config": c}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        names = [m.filename for m in file.infolist() if "/data/" in m.filename]
    data = (tmp_path / "x.pt").read_bytes()
    first, second = (name.encode() for name in names[:2])
    directory = data.rindex(b"PK\x01\x02" + data[data.rindex(second) - 42 : data.rindex(second)])
    assert directory
    swapped = data[:directory] + data[directory:].replace(second, first, 1)
    (tmp_path / "y.pt").write_bytes(swapped)
    refused(tmp_path / "y.pt")


def test_what_honest_files_hold_is_read(tmp_path: Path) -> None:
    from collections import Counter, OrderedDict

    content = {
        "a": torch.ones(3, dtype=torch.bfloat16),
        "b": OrderedDict(x=(1, (2.5, None)), y=[{1, 2}, 10**12, b"bytes", bytearray(b"more")]),
        "c": torch.nn.Parameter(torch.zeros(2, 2)),
        "d": (torch.Size([3, 4]), torch.float16, torch.device("cpu"), 1j, Counter("aab")),
        (1, 2): "x" * 70_000,
    }
    torch.save(content, tmp_path / "x.pt")
    found = pickled.read(tmp_path / "x.pt", "a file", WeightsError)
    assert isinstance(found, dict) and found.keys() == content.keys()
    assert found["b"] == content["b"] and found["d"] == content["d"]
