"""Every GPU kernel in every launch that dispatch can choose, as machine code: no GPU needed.

    python -m benchmarks kernels            # what the table lacks or has of an older source
    python -m benchmarks kernels --check    # a sample, compared with the table

The package's own launch code runs on tensors without values, once for each family of GPUs, and
what it would launch is compiled for sm_80, sm_90 and sm_100 instead. Registers, bytes spilled and
shared memory are read from the machine code and kept in results/kernels.csv. A spill, or more
shared memory than the GPUs of a family have, fails.

A launch is compiled with the flags that add most to its code: padded cores and patches, gradients
of the tables, the largest block of cores, in bfloat16 and float32. `--all` compiles every
combination: float16, half-precision tables, whole tiles, smaller blocks of cores, every width of a
teacher; a day on one core.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import functools
import hashlib
import importlib
import itertools
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import RESULTS, read_csv, write_rows
from veca.attention import fused
from veca.attention import launch as launching
from veca.teachers import convolutions
from veca.teachers.efficientnet import CENTRED, SAME, VARIANTS, EfficientNetLite

TABLE = RESULTS / "kernels.csv"
ATTENTION, CONVOLUTIONS = "veca.attention.kernels", "veca.teachers.convolution_kernels"
SHARED_LIMIT = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory of a program. sm_80 stands for all of 8.x; 8.6 and 8.9 have the least."""

RESIDENT = ("forward_kernel", "backward_kernel")
LETTERS = {torch.bfloat16: "b", torch.float16: "h", torch.float32: "f"}
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
SAMPLE = ("stem_kernel", "delta_kernel", "merge_forward_kernel", "tiled_forward_kernel")
"""What `--check` compiles again, one launch of each for each family: what compiles in seconds."""


# -- what would be launched ------------------------------------------------------------------------


@dataclass
class Job:
    """One launch of one kernel for one family of GPUs, as Triton's compiler takes it."""

    arch: int
    kernel: Any
    signature: dict[str, str] = field(default_factory=dict)
    constants: dict[tuple[int], Any] = field(default_factory=dict)
    divisible: list[int] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    pointers: str = ""

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def settings(self) -> str:
        """The constants that the launch sets: numbers as D=64, flags that are on by name."""
        shown = []
        for (index,), value in self.constants.items():
            parameter = self.kernel.params[index]
            if parameter.is_constexpr and value is not False:
                shown.append(parameter.name if value is True else f"{parameter.name}={value}")
        return " ".join(shown)

    @property
    def key(self) -> str:
        """Names the machine code, together with the source and Triton's version."""
        parts = (self.arch, self.name, self.signature, self.constants, self.divisible)
        text = repr((*parts, sorted(self.options.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def compile(self) -> dict[str, object]:
        """A row of the table."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime import driver

        target = GPUTarget("cuda", self.arch, 32)
        attributes = {(i,): [["tt.divisibility", 16]] for i in self.divisible}
        source = ASTSource(self.kernel, self.signature, self.constants, attributes)
        driver.set_active(_Pretended(target))
        done = triton.compile(source, target=target, options=self.options)
        registers, stack = _resources(done.asm["cubin"])
        return {
            "arch": f"sm_{self.arch}", "kernel": self.name, "pointers": self.pointers,
            "settings": self.settings, "warps": self.options.get("num_warps", 4),
            "stages": self.options.get("num_stages", 3), "cap": self.options.get("maxnreg", ""),
            "registers": registers, "spilled": stack, "shared": done.metadata.shared,
            "limit": SHARED_LIMIT[self.arch], "triton": triton.__version__,
            "source": fingerprint(self.kernel.fn.__module__, self.name), "key": self.key,
        }  # fmt: skip


def job(arch: int, kernel: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Job:
    """What Triton's own launcher would make of these arguments."""
    values = dict(zip((p.name for p in kernel.params), args, strict=False))
    known = {p.name for p in kernel.params}
    values |= {name: value for name, value in given.items() if name in known}
    made = Job(arch, kernel, options={k: v for k, v in given.items() if k not in known})
    for index, parameter in enumerate(kernel.params):
        value, special = values[parameter.name], not parameter.do_not_specialize
        kind, aligned = "constexpr", False
        if parameter.is_constexpr:
            pass
        elif value is None:
            made.pointers += "-" if parameter.name == "multiplicity" else ""
        elif isinstance(value, Tensor):
            kind, aligned = POINTERS[value.dtype], _address(value) % 16 == 0
            made.pointers += LETTERS[value.dtype]
        elif isinstance(value, float):
            kind = "fp32"
        elif not (special and value == 1):
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = special and value % 16 == 0
        made.signature[parameter.name] = kind
        if kind == "constexpr":
            made.constants[(index,)] = value
        elif aligned:
            made.divisible.append(index)
    return made


def _address(x: Tensor) -> int:
    """Of the first element, from the start of the memory, which is aligned."""
    return int(x.storage_offset()) * x.element_size()


class Recorder:
    """In place of a module of kernels: notes what would be launched."""

    def __init__(self, module: str, arch: int, jobs: dict[str, Job]) -> None:
        self.module, self.arch, self.jobs = importlib.import_module(module), arch, jobs

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.module, name)

        def note(*args: Any, **given: Any) -> None:
            noted = job(self.arch, kernel, args, given)
            self.jobs.setdefault(noted.key, noted)

        return _AnyGrid(note)


@dataclass
class _AnyGrid:
    launch: Callable[..., None]

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch


def attend(
    dtype: torch.dtype, width: int, tables: torch.dtype | None, cores: int, patches: int,
    splits: int, weighted: bool,
) -> None:  # fmt: skip
    """A pass forward and one backward, on tensors without values."""
    packed = torch.empty(2, cores + patches, 3, 2, width, dtype=dtype, device="meta")
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    turn: list[Tensor | None] = [None] * 4
    if tables is not None:
        core = torch.empty(2, cores, width // 2, dtype=tables, device="meta")
        patch = torch.empty(1, patches, width // 2, dtype=tables, device="meta")
        turn = [core, core, patch, patch]
    counts = torch.empty(2, patches, device="meta") if weighted else None
    tail: Any = (*turn, cores, width**-0.5)  # mypy cannot count what is unpacked twice
    out, lse = launching.launch_forward(q, k, v, *tail, counts, splits=splits)  # type: ignore[misc, call-arg]
    saved = (out, q, k, v, out, lse)
    launching.launch_backward(*saved, *tail, tables is not None, counts, splits=splits)  # type: ignore[misc, call-arg]


def attend_all(everything: bool, arch: int) -> None:
    """Every launch of attention that dispatch can choose."""
    halves = (torch.bfloat16, torch.float16) if everything else (torch.bfloat16,)
    for dtype, width, weighted in itertools.product(
        (*halves, torch.float32), fused.WIDTHS, (False, True)
    ):
        kinds = [None, torch.float32, *([dtype] if dtype in halves else [])]
        for tables in kinds[:2]:
            attend(dtype, width, tables, 50, 1000, 1, weighted)
        attend(dtype, width, torch.float32, 100, 1000, 2, weighted)
        if arch == 90 and dtype in halves:  # there, launches go by the cores and patches, too
            for tables, cores, patches in itertools.product(kinds, (8, 64), (1000, 1024)):
                attend(dtype, width, tables, cores, patches, 1, weighted)
        if not everything:
            continue
        for tables, cores, patches, splits in itertools.product(
            kinds, (8, 16, 24, 32, 50, 64, 100), (1000, 1024), (1, 2)
        ):
            attend(dtype, width, tables, cores, patches, splits, weighted)


def convolve_all(everything: bool) -> None:
    """Every convolution of the EfficientNet-Lite teachers."""
    dtypes = (torch.bfloat16, torch.float16) if everything else (torch.bfloat16,)
    networks = VARIANTS if everything else ("efficientnet-lite2",)
    for dtype, variant, phases in itertools.product(dtypes, networks, (CENTRED, SAME)):
        with torch.no_grad(), torch.device("meta"):
            network = EfficientNetLite(variant, phases).to(dtype)
            network.fused(torch.empty(2, 3, 224, 224))


@functools.cache
def jobs(everything: bool = False) -> dict[str, Job]:
    """All launches, by their keys. Without `everything`, the most demanding flags of each."""
    found: dict[str, Job] = {}
    honest = (launching._kernels, launching._capability, convolutions._kernels)
    try:
        for arch in SHARED_LIMIT:
            attention = Recorder(ATTENTION, arch, found)
            convolution = Recorder(CONVOLUTIONS, arch, found)
            launching._kernels = functools.partial(_value, attention)
            convolutions._kernels = functools.partial(_value, convolution)
            launching._capability = functools.partial(_capability, arch)  # type: ignore[assignment]
            attend_all(everything, arch)
            convolve_all(everything)
    finally:
        launching._kernels, launching._capability, convolutions._kernels = honest
    return found if everything else _widest_channels(found)


def _value(x: Any) -> Any:
    return x


def _capability(arch: int, _device: torch.device) -> tuple[int, int]:
    return divmod(arch, 10)


def _widest_channels(found: dict[str, Job]) -> dict[str, Job]:
    """Of depthwise kernels that differ in the number of channels alone, the one with most."""
    kept: dict[object, Job] = {}
    for one in found.values():
        if one.name != "depthwise_kernel":
            kept[one.key] = one
            continue
        channels = int(one.settings.split("C=")[1].split()[0])
        like = (one.arch, re.sub(r"\bC=\d+", "", one.settings))
        if like not in kept or channels > int(kept[like].settings.split("C=")[1].split()[0]):
            kept[like] = one
    return {one.key: one for one in kept.values()}


# -- compiling -------------------------------------------------------------------------------------


class _Pretended:
    """In place of a GPU's driver, for kernels that ask which GPU they are compiled for."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, which holds what is spilled."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        told = subprocess.run(
            [tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", told)
    if found is None:
        raise RuntimeError(f"cuobjdump tells no registers: {told!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


@functools.cache
def fingerprint(module: str, name: str) -> str:
    """Of a kernel's source and of all it calls: not of comments, docstrings and layout."""
    path = importlib.util.find_spec(module)
    assert path is not None and path.origin is not None
    tree = ast.parse(Path(path.origin).read_text(encoding="utf-8"))
    defined: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {one.id: node for one in node.targets if isinstance(one, ast.Name)}
    reached, left = {name}, [name]
    while left:
        for part in ast.walk(defined[left.pop()]):
            if isinstance(part, ast.Name) and part.id in defined and part.id not in reached:
                reached.add(part.id)
                left.append(part.id)
    text = "\n".join(ast.dump(defined[one]) for one in sorted(reached))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def compile_key(key: str, everything: bool) -> dict[str, object]:
    return jobs(everything)[key].compile()


def compiled(keys: list[str], everything: bool, workers: int) -> Iterator[dict[str, object]]:
    """Rows in the order in which they are ready."""
    if workers == 1:
        yield from (compile_key(key, everything) for key in keys)
        return
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        waiting = [pool.submit(compile_key, key, everything) for key in keys]
        for done in concurrent.futures.as_completed(waiting):
            yield done.result()


# -- the table -------------------------------------------------------------------------------------


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row: a spill, or a limit exceeded."""
    found = []
    if int(row["spilled"]):
        found.append(f"spills {row['spilled']} bytes a thread")
    if int(row["registers"]) > 255:
        found.append(f"needs {row['registers']} registers of 255")
    if int(row["shared"]) > int(row["limit"]):
        found.append(f"needs {row['shared']} bytes of shared memory of {row['limit']}")
    where = f"{row['arch']} {row['kernel']} {row['pointers']} {row['settings']}"
    return [f"{where}: {fault}" for fault in found]


def stale(row: dict[str, Any]) -> bool:
    """Whether a row is of an older source of its kernel."""
    module = CONVOLUTIONS if row["kernel"] in ("depthwise_kernel", "stem_kernel") else ATTENTION
    return bool(row["source"] != fingerprint(module, row["kernel"]))


def sample() -> list[str]:
    """Keys that `--check` compiles again: one launch of each of a few kernels, for each family."""
    picked: dict[tuple[int, str], str] = {}
    for key, one in jobs().items():
        if one.name in SAMPLE and "-" not in one.pointers:  # with multiplicity, where it matters
            picked.setdefault((one.arch, one.name), key)
    return list(picked.values())


def check(table: dict[str, dict[str, Any]]) -> int:
    """Compile a sample and set it beside the table; the exit status."""
    wrong = [f"not in the table: {one.arch} {one.name} {one.settings}"
             for key, one in jobs().items() if key not in table]  # fmt: skip
    for key in sample():
        row = compile_key(key, False)
        wrong += faults(row)
        kept = table.get(key)
        if kept is None or kept["triton"] != row["triton"]:
            continue  # another compiler: only the limits hold
        wrong += [
            f"{row['arch']} {row['kernel']}: {name} is {row[name]}, the table has {kept[name]}"
            for name in ("registers", "spilled", "shared", "source")
            if str(row[name]) != kept[name]
        ]
    print(f"{len(jobs())} launches, {len(sample())} compiled again")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        print("run python -m benchmarks kernels", file=sys.stderr)
    return 1 if wrong else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="compile a sample, write nothing")
    parser.add_argument("--all", action="store_true", help="every combination of flags; hours")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile")
    parser.add_argument("--out", type=Path, default=TABLE)


def run(options: argparse.Namespace) -> int:
    import triton

    rows = read_csv(options.out) if options.out.is_file() else []
    table: dict[str, dict[str, Any]] = {row["key"]: dict(row) for row in rows}
    if options.check:
        return check(table)
    possible, wanted = jobs(True), jobs(options.all)
    table = {
        key: row
        for key, row in table.items()
        if key in possible and not stale(row) and row["triton"] == triton.__version__
    }
    missing = [key for key in wanted if key not in table]
    # What takes longest, and is most likely to fail, first.
    missing.sort(key=lambda key: (wanted[key].name not in RESIDENT, -wanted[key].arch))
    print(f"{len(wanted)} launches, {len(missing)} to compile", flush=True)
    order = list(possible)
    for count, row in enumerate(compiled(missing, options.all, options.workers), start=1):
        table[str(row["key"])] = row
        print(f"{count}/{len(missing)} {row['arch']} {row['kernel']} {row['settings']}", flush=True)
        for fault in faults(row):
            print(f"  FAILS: {fault}", flush=True)
        write_rows(options.out, [table[key] for key in order if key in table])
    failed = [fault for row in table.values() for fault in faults(row)]
    print("\n".join(failed) if failed else f"no spills, all limits kept; wrote {options.out}")
    return 1 if failed else 0
