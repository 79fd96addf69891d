"""What int8 blocks do between two products, compiled by the C++ compiler at hand.

`native.cpp` takes a compiler about a second, once on a machine: what it makes lies in the cache.
Without a compiler `veca.precision` does the same steps in torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veca._util.cache import cache_folder, mark_used
from veca._util.files import commit, temporary_beside
from veca.errors import MissingExtraError, OutputError

_SOURCE = Path(__file__).with_name("native.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")
_SECONDS = 120
_ARGUMENTS = {
    "norm": "pppfiippi",
    "turn_bf16": "ppppppiiiiiiipi",
    "turn_float": "ppppppiiiiiiipi",
    "softmax_bf16": "piiii",
    "gather_bf16": "piiiiippi",
    "gather_float": "piiiiippi",
    "add_norm": "pppppppfiipppi",
    "gate": "ppppiippi",
    "add": "ppppiipi",
}
"""By function: pointers, whole numbers and floats."""
_TYPES = {"p": c_void_p, "i": c_int64, "f": c_float}


class Compiled(NamedTuple):
    """The compiled functions, or why there are none."""

    functions: Functions | None
    reason: str


class Functions:
    """The functions of `native.cpp` on tensors, which have to be contiguous rows."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._calls: dict[str, Any] = {}
        for name, kinds in _ARGUMENTS.items():
            call = getattr(library, f"veca_{name}")
            call.argtypes, call.restype = [_TYPES[kind] for kind in kinds], None
            self._calls[name] = call

    def __call__(self, name: str, *arguments: Tensor | int | float) -> None:
        """Call one; the number of threads, which is its last argument, is torch's."""
        given = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        self._calls[name](*given, torch.get_num_threads())

    def __deepcopy__(self, memo: dict[int, Any]) -> Functions:
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _functions, ()  # another machine compiles its own


@functools.cache
def compiled() -> Compiled:
    """The functions compiled for this machine; the first call here takes a second or two."""
    compiler = _compiler()
    if compiler is None:
        return Compiled(
            None, f"by torch, as there is no C++ compiler ({', '.join(_COMPILERS)}, or $CXX)"
        )
    try:
        library = _library(compiler)
        return Compiled(Functions(ctypes.CDLL(str(library))), f"compiled by {Path(compiler).name}")
    except (OSError, OutputError, AttributeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        lines = [line for line in said.splitlines() if line.strip()] or [type(error).__name__]
        return Compiled(None, f"by torch, as {Path(compiler).name} failed ({lines[0].strip()})")


def _functions() -> Functions:
    functions, reason = compiled()
    if functions is None:
        raise MissingExtraError(
            f"this model's int8 steps were compiled, and here they cannot be: {reason}. Load the "
            "model here, or make it with at_precision(model, 'int8', compile=False)."
        )
    return functions


def _compiler() -> str | None:
    given = os.environ.get("CXX")
    names = [given] if given else _COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def _library(compiler: str) -> Path:
    """The shared library of this source, compiler and processor, made if it is not there yet."""
    version = _said([compiler, "--version"])
    facts = (_SOURCE.read_text(), compiler, version, *_FLAGS, _processor())
    name = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
    path = cache_folder("native") / f"{name}.so"
    if path.is_file():
        mark_used(path)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(path) as temporary:
        _compile(compiler, temporary)
        commit(temporary, path)
    return path


def _compile(compiler: str, out: Path) -> None:
    """With all that helps and the compiler knows."""
    arm = platform.machine() in ("arm64", "aarch64")
    own: list[str] = ["-mcpu=native"] if arm else ["-march=native", "-mprefer-vector-width=512"]
    tries: tuple[list[str], ...] = ([*own, "-fopenmp"], ["-fopenmp"], own, [])
    for left, more in enumerate(tries, start=1 - len(tries)):
        try:
            _said([compiler, *_FLAGS, *more, str(_SOURCE), "-o", str(out)])
            return
        except subprocess.CalledProcessError:
            if not left:
                raise


def _said(command: list[str]) -> str:
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_SECONDS, errors="replace"
    )
    return done.stdout


def _processor() -> str:
    """What the compiler makes code for: the processor's name and what it can do."""
    keys = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))
