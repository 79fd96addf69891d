"""Nothing in a file is ever executed; what is honest in it still comes through."""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from veca.errors import WeightsError
from veca.weights import import_official, safe_pickle
from veca.weights.safe_pickle import Inert, StoredTensor
from weights import authors


def archive(path: Path, program: bytes, **members: bytes) -> Path:
    """A torch-like zip around a hand-written pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", program)
        for name, data in members.items():
            file.writestr(f"archive/data/{name}", data)
    return path


class Calls:
    """Pickles as a call of `function`: pickle's REDUCE."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


class CallsTwice:
    """A function made by a call, then called: getattr(__import__('os'), 'system')(command)."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return functools.partial(os.system, self.command), ()


class Benign:
    """A class of somebody's training code."""

    def __init__(self) -> None:
        self.step = 3


class BenignList(list):  # type: ignore[type-arg]
    pass


class BenignDict(dict):  # type: ignore[type-arg]
    pass


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def attacks(command: str) -> dict[str, bytes]:
    """Pickles that run `command` when loaded by `pickle.loads`, each by other opcodes."""
    argument = text(command)
    importing = b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n" + text("os") + b"\x85R"
    made = b"\x80\x04cfunctools\npartial\n(cos\nsystem\n" + argument + b"t"
    changed = b"\x80\x02cfunctools\npartial\n(cbuiltins\nlen\nt\x81(cos\nsystem\n" + argument
    state = b"\x80\x02cbuiltins\nexec\n" + text(f"import os; os.system({command!r})") + b"\x85R."
    return {
        "REDUCE": b"cos\nsystem\n" + argument + b"\x85R.",
        "INST": b"(" + argument + b"ios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + argument + b"o.",
        "STACK_GLOBAL": b"\x80\x04" + text("os") + text("system") + b"\x93" + argument + b"\x85R.",
        "getattr of __import__": importing + text("system") + b"tR" + argument + b"\x85R.",
        "NEWOBJ": made + b"\x81)R.",
        "NEWOBJ_EX": made + b"}\x92)R.",
        "BUILD": changed + b"\x85}}tb)R.",
        "eval": b"cbuiltins\neval\n" + text(f"__import__('os').system({command!r})") + b"\x85R.",
        "nested": b"cpickle\nloads\nC" + struct.pack("B", len(state)) + state + b"\x85R.",
        "in a dict": b"}" + text("student") + b"cos\nsystem\n" + argument + b"\x85Rs.",
        "in a set": b"\x80\x04\x8f(cos\nsystem\n" + argument + b"\x85R\x90.",
        "partial": pickle.dumps(CallsTwice(command), protocol=2),
        "dotted": b"\x80\x04"
        + text("os")
        + text("system.__call__")
        + b"\x93"
        + argument
        + b"\x85R.",
    }


ATTACKS = list(attacks(""))


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "executed"
    program = attacks(f"touch {marker}")[name]
    path = archive(tmp_path / "x.pt", program)
    with contextlib.suppress(WeightsError):
        safe_pickle.read(path)
    with pytest.raises(WeightsError):
        import_official(path)
    assert not marker.exists()


def test_the_attacks_are_real(tmp_path: Path) -> None:
    """Python's own loader does run them, so the test above shows something."""
    script = """
import pickle, sys
for program in sys.argv[1:]:
    try:
        pickle.loads(bytes.fromhex(program))
    except Exception:
        pass
"""
    programs = [attacks(f"touch {tmp_path / str(i)}")[name].hex() for i, name in enumerate(ATTACKS)]
    subprocess.run([sys.executable, "-S", "-c", script, *programs], check=True)
    missing = [name for i, name in enumerate(ATTACKS) if not (tmp_path / str(i)).exists()]
    assert missing == []


def test_no_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_side_effect.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    for program in (b"cwith_side_effect\nthing\n.", b"(iwith_side_effect\nthing\n."):
        assert safe_pickle.read(archive(tmp_path / "x.pt", program)) is not None
    assert "with_side_effect" not in sys.modules
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "target",
    [
        "ctorch._utils\n_rebuild_tensor_v2\n",
        "ctorch._utils\n_rebuild_parameter\n",
        "ctorch\nFloatStorage\n",
        "ccollections\nOrderedDict\n",
        "cos\nsystem\n",
    ],
)
def test_allowed_names_cannot_be_altered(tmp_path: Path, target: str) -> None:
    """BUILD sets attributes on whatever lies on the stack, functions and classes included."""
    before = dict(vars(safe_pickle._tensor)), dict(vars(Inert)), dict(vars(safe_pickle._Dict))
    for state in (b"}" + text("__defaults__") + b"(Nts", b"N}" + text("__code__") + b"Ns\x86"):
        program = target.encode() + state + b"b0}."
        with contextlib.suppress(WeightsError):
            assert safe_pickle.read(archive(tmp_path / "x.pt", program)) == {}
    after = dict(vars(safe_pickle._tensor)), dict(vars(Inert)), dict(vars(safe_pickle._Dict))
    assert before == after
    assert safe_pickle._tensor.__defaults__ is None


def test_extension_codes_are_refused(tmp_path: Path) -> None:
    import copyreg

    copyreg.add_extension("os", "getcwd", 240)
    try:
        pickle.loads(b"\x80\x02\x82\xf0.")  # now in the cache, which find_class does not see
        with pytest.raises(WeightsError, match="extension codes"):
            safe_pickle.read(archive(tmp_path / "x.pt", b"\x80\x02\x82\xf0)R."))
    finally:
        copyreg.remove_extension("os", "getcwd", 240)
        copyreg.clear_extension_cache()


def test_a_vast_memo_is_refused(tmp_path: Path) -> None:
    """Python's unpickler would reserve gigabytes for it."""
    with pytest.raises(WeightsError, match="more memory"):
        safe_pickle.read(archive(tmp_path / "x.pt", b"}r\xff\xff\xff\xef."))


def test_a_checkpoint_with_poison_and_foreign_classes(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    command = f"touch {marker}"
    c = authors.settings()
    weights = authors.state(c)
    content = {
        "student": weights,
        "config": c,
        "optimizer": {
            "evil": Calls(os.system, command),
            "eval": Calls(builtins.eval, f"__import__('os').system({command!r})"),
            "getattr": Calls(getattr, "x", "upper"),
            "partial": CallsTwice(command),
            "nested": [{"deeper": (Calls(os.system, command),)}],
            "benign": Benign(),
            "list": BenignList([1, 2]),
            "dict": BenignDict(a=1),
            "set": {1, 2},
            "path": tmp_path,
            "complex": 1j,
            "bytes": b"xyz",
            "dtype": torch.float32,
            "numpy": torch.ones(1).numpy(),
            "state": {0: torch.randn(5)},
        },
        "epoch": 3,
    }
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "x.pt", weights_only=True)
    model = import_official(tmp_path / "x.pt")
    assert not marker.exists()
    assert torch.equal(model.blocks[1].attn.q.weight, weights["blocks.1.attn.q_proj.weight"])
    read: Any = safe_pickle.read(tmp_path / "x.pt")
    assert read["epoch"] == 3
    assert read["config"] == c
    assert isinstance(read["optimizer"]["evil"], Inert)
    assert safe_pickle.kind(read["optimizer"]["benign"]).endswith(".Benign")


def test_tensors_come_out_as_torch_reads_them(tmp_path: Path) -> None:
    base = torch.randn(6, 5)
    tensors = {
        "plain": base,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "window": base[2:4, 1:3],
        "half": base.half(),
        "bfloat16": base.bfloat16(),
        "double": base.double(),
        "long": torch.arange(4),
        "bool": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(base + 1),
    }
    torch.save(tensors, tmp_path / "x.pt")
    read: Any = safe_pickle.read(tmp_path / "x.pt")
    for name, tensor in tensors.items():
        assert isinstance(read[name], StoredTensor)
        got = read[name].read()
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor), name


def test_state_dicts_with_metadata(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    torch.save({"m": module.state_dict(), "x": Benign()}, tmp_path / "x.pt")
    read: Any = safe_pickle.read(tmp_path / "x.pt")
    for name, tensor in module.state_dict().items():
        assert torch.equal(read["m"][name].read(), tensor)


def tensor_program(
    count: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> bytes:
    """A pickle of one float32 tensor, with any numbers in it."""

    class Reference:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, Reference):
                return ("storage", torch.FloatStorage, "0", "cpu", count)
            return None

    import io

    out = io.BytesIO()
    call = Calls(torch._utils._rebuild_tensor_v2, Reference(), offset, size, stride, False, {})
    Pickler(out, protocol=2).dump(call)
    return out.getvalue()


def test_honest_numbers(tmp_path: Path) -> None:
    data = struct.pack("<6f", *range(6))
    path = archive(tmp_path / "x.pt", tensor_program(6, 1, (2, 2), (3, 1)), **{"0": data})
    read: Any = safe_pickle.read(path)
    assert read.read().tolist() == [[1, 2], [4, 5]]


@pytest.mark.parametrize(
    ("count", "offset", "size", "stride"),
    [
        (6, 0, (7,), (1,)),
        (6, 3, (4,), (1,)),
        (6, 0, (2, 2), (5, 2)),
        (6, -1, (2,), (1,)),
        (6, 0, (-2,), (1,)),
        (6, 5, (2,), (-1,)),
        (6, 0, (2,), (1, 1)),
        (6, 0, (10**12,), (0,)),
        (7, 0, (7,), (1,)),
        (2**62, 0, (2**62,), (1,)),
        (-1, 0, (1,), (1,)),
    ],
)
def test_dishonest_numbers(
    tmp_path: Path, count: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    data = struct.pack("<6f", *range(6))
    path = archive(tmp_path / "x.pt", tensor_program(count, offset, size, stride), **{"0": data})
    with pytest.raises(WeightsError, match=r"x\.pt"):
        safe_pickle.read(path)


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    """torch never compresses; a small file that unpacks to terabytes does."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"}.")
    with pytest.raises(WeightsError, match=r"not one written by torch\.save"):
        safe_pickle.read(tmp_path / "x.pt")


def test_damaged_programs_only_ever_raise_our_error(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": Benign(), "c": [1, {"d": (2.5, None)}]}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        name = next(n for n in file.namelist() if n.endswith("data.pkl"))
        program = file.read(name)
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(program)
        for _ in range(rng.choice((1, 2, 5))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        del damaged[rng.randrange(len(damaged) + 1) :]
        path = archive(tmp_path / "y.pt", bytes(damaged), **{"0": b"\0" * 8})
        try:
            safe_pickle.read(path)
        except WeightsError:
            refused += 1
    assert refused > 100


def test_a_big_endian_archive_is_refused(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "little.pt")
    with (
        zipfile.ZipFile(tmp_path / "little.pt") as old,
        zipfile.ZipFile(tmp_path / "x.pt", "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    with pytest.raises(WeightsError, match="big-endian"):
        safe_pickle.read(tmp_path / "x.pt")
