"""Nothing in a file is ever executed, whatever it asks for: it is refused in one line."""

from __future__ import annotations

import builtins
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

import numpy as np
import pytest
import torch

from veca.errors import WeightsError
from veca.weights import import_official, official
from weights import authors


def archive(path: Path, program: bytes, **members: bytes) -> Path:
    """A torch-like zip around a hand-written pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", sys.byteorder)
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


def refused(path: Path, words: str | None = None) -> None:
    """The file is refused with one line that names it."""
    with pytest.raises(WeightsError, match=words) as caught:
        import_official(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


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
    refused(archive(tmp_path / "x.pt", program))
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
        refused(archive(tmp_path / "x.pt", program))
    assert "with_side_effect" not in sys.modules
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "target",
    [
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch._utils\n_rebuild_parameter\n",
        b"ctorch\nFloatStorage\n",
        b"ccollections\nOrderedDict\n",
    ],
)
def test_allowed_names_cannot_be_altered(tmp_path: Path, target: bytes) -> None:
    """BUILD sets attributes on whatever lies on the stack, functions and classes included."""
    before = torch._utils._rebuild_tensor_v2.__defaults__, torch._utils._rebuild_parameter.__code__
    for state in (b"}" + text("__defaults__") + b"(Nts", b"N}" + text("__code__") + b"Ns\x86"):
        refused(archive(tmp_path / "x.pt", target + state + b"b0}."))
    after = torch._utils._rebuild_tensor_v2.__defaults__, torch._utils._rebuild_parameter.__code__
    assert before == after


def test_extension_codes_are_refused(tmp_path: Path) -> None:
    import copyreg

    copyreg.add_extension("os", "getcwd", 240)
    try:
        pickle.loads(b"\x80\x02\x82\xf0.")  # now in the cache, past any check of names
        refused(archive(tmp_path / "x.pt", b"\x80\x02\x82\xf0)R."))
    finally:
        copyreg.remove_extension("os", "getcwd", 240)
        copyreg.clear_extension_cache()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_vast_memo_costs_nothing(tmp_path: Path) -> None:
    """Python's own unpickler would reserve gigabytes for it."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, limit[1]))
    try:
        refused(archive(tmp_path / "x.pt", b"}r\xff\xff\xff\xef."), "holds none")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (lambda command: Calls(os.system, command), "system"),
        (lambda command: Calls(builtins.eval, f"__import__('os').system({command!r})"), "eval"),
        (lambda command: CallsTwice(command), "partial"),
        (lambda command: [{"deeper": (Calls(os.system, command),)}], "system"),
        (lambda command: Benign(), "Benign"),
        (lambda command: Path(command), "Path"),
    ],
)
def test_a_checkpoint_with_more_than_data(tmp_path: Path, more: Any, name: str) -> None:
    marker = tmp_path / "executed"
    c = authors.settings()
    content = {"student": authors.state(c), "config": c, "more": more(f"touch {marker}")}
    torch.save(content, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", name)
    assert not marker.exists()


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
    assert official._unpickle(path).tolist() == [[1, 2], [4, 5]]  # type: ignore[attr-defined]


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
        (700, 0, (700,), (1,)),
        (2**62, 0, (2**62,), (1,)),
        (-1, 0, (1,), (1,)),
    ],
)
def test_dishonest_numbers(
    tmp_path: Path, count: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    data = struct.pack("<6f", *range(6))
    tensor = tensor_program(count, offset, size, stride)
    program = b"}" + text("student") + b"}" + text("pos_alpha") + tensor[2:-1] + b"ss."
    refused(archive(tmp_path / "x.pt", program, **{"0": data}), "safely|larger|more than its bytes")


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    """torch never compresses; a small file that unpacks to terabytes does."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"}.")
    refused(tmp_path / "x.pt", "zip")


def test_damaged_programs_only_ever_raise_our_error(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "c": [1, {"d": (2.5, None)}]}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        name = next(n for n in file.namelist() if n.endswith("data.pkl"))
        program = file.read(name)
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(program)
        for _ in range(rng.choice((1, 2, 5))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        del damaged[rng.randrange(len(damaged) + 1) :]
        refused(archive(tmp_path / "y.pt", bytes(damaged), **{"0": b"\0" * 8}))


def test_a_file_from_a_machine_of_the_other_byte_order(tmp_path: Path) -> None:
    c = authors.settings()
    state = authors.state(c)
    torch.save({"student": state, "config": c}, tmp_path / "ours.pt")
    other = "big" if sys.byteorder == "little" else "little"
    with (
        zipfile.ZipFile(tmp_path / "ours.pt") as old,
        zipfile.ZipFile(tmp_path / "x.pt", "w") as new,
    ):
        for name in old.namelist():
            data = old.read(name)
            if "/data/" in name:
                data = np.frombuffer(data, np.float32).byteswap().tobytes()
            new.writestr(name, other if name.endswith("byteorder") else data)
    model = import_official(tmp_path / "x.pt")
    assert torch.equal(model.norm.weight, state["final_norm.weight"])
