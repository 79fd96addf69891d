"""Every tuning constant of the kernels of core attention, and what chooses by them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

RESIDENT_CORES = 64
"""Cores that stay on the chip while a program walks over the patches; with more, all is tiled."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: patches per tile, and warps and stages as Triton means them.

    `per_sm` is how many programs a multiprocessor holds at a time, from the compiler's report of
    registers and shared memory; with it `choose_splits` decides into how many spans a sequence is
    cut. `registers` caps the registers of a thread; 255, all there are, keeps the compiler from
    spilling a few for the sake of more programs at a time. `fused` gives a program both roles.
    """

    block: int
    warps: int = 4
    stages: int = 3
    per_sm: int = 4
    registers: int | None = None
    fused: bool = False


# (pass, bytes of an element, head width, bytes of a table's element or 0 without rotation). The
# first choice everywhere is what does not spill: `python -m benchmarks kernels` compiles all of it,
# and its results file has registers and shared memory of each. An H200 multiprocessor has 512
# registers for each of 128 threads, and 228 KB (1 a program lost). Heads of 64 were timed there by
# `python -m benchmarks tune_attention`.
HOPPER: dict[tuple[str, int, int, int], Launch] = {
    ("forward", 2, 32, 0): Launch(64, stages=3, per_sm=3),
    ("forward", 2, 32, 2): Launch(64, stages=3, per_sm=2),
    ("forward", 2, 32, 4): Launch(64, stages=3, per_sm=2),
    ("forward", 2, 64, 0): Launch(64, stages=3, per_sm=3, registers=168),
    ("forward", 2, 64, 2): Launch(64, stages=3, per_sm=2),
    ("forward", 2, 64, 4): Launch(64, stages=3, per_sm=2),
    ("forward", 2, 128, 0): Launch(32, stages=2, per_sm=2),
    ("forward", 2, 128, 2): Launch(64, warps=8, stages=3, per_sm=1),
    ("forward", 2, 128, 4): Launch(64, warps=8, stages=3, per_sm=1),
    ("forward", 4, 32, 0): Launch(32, warps=8, stages=1, per_sm=1),
    ("forward", 4, 32, 4): Launch(32, warps=8, stages=1, per_sm=1),
    ("backward", 2, 32, 0): Launch(64, stages=3, per_sm=2),
    ("backward", 2, 32, 2): Launch(64, stages=3, per_sm=2),
    ("backward", 2, 32, 4): Launch(64, stages=3, per_sm=2),
    ("backward", 2, 64, 0): Launch(64, stages=3, per_sm=2),
    ("backward", 2, 64, 2): Launch(32, stages=3, per_sm=2),
    ("backward", 2, 64, 4): Launch(32, stages=3, per_sm=2),
    ("backward", 2, 128, 0): Launch(16, warps=8, stages=1, per_sm=1),
    ("backward", 2, 128, 2): Launch(16, warps=8, stages=1, per_sm=1),
    ("backward", 2, 128, 4): Launch(16, warps=8, stages=1, per_sm=1),
}

# The same where cores fill their rows, or are so few that they take few registers: what hides the
# rows of cores that are not there costs 50 registers a thread, and faster launches would spill.
HOPPER_FEW_OR_ALL: dict[tuple[str, int, int, int], Launch] = {
    ("forward", 2, 32, 0): Launch(64, stages=3, per_sm=4, registers=128),
    ("forward", 2, 32, 2): Launch(64, stages=3, per_sm=4, registers=128),
    ("forward", 2, 32, 4): Launch(64, stages=3, per_sm=4, registers=128),
    ("forward", 2, 64, 2): Launch(64, stages=3, per_sm=3, registers=168),
    ("forward", 2, 64, 4): Launch(64, stages=1, per_sm=3, registers=168),
    ("forward", 2, 128, 0): Launch(64, stages=3, per_sm=2),
    ("forward", 2, 128, 2): Launch(64, stages=2, per_sm=2),
}
# And where patches fill every tile besides, so that the last one is like all others.
HOPPER_WHOLE: dict[tuple[str, int, int, int], Launch] = {
    ("backward", 2, 64, 2): Launch(64, stages=3, per_sm=2),
    ("backward", 2, 64, 4): Launch(64, stages=3, per_sm=2),
}
FEW_CORES = 16

# (pass, bytes of an element, head width). Data-centre Blackwell keeps accumulators in a memory of
# their own; what is resident leaves its registers to the rest.
BLACKWELL: dict[tuple[str, int, int], Launch] = {
    ("forward", 2, 32): Launch(64, stages=2),
    ("forward", 2, 64): Launch(64, stages=2),
    ("forward", 2, 128): Launch(64, stages=1, per_sm=2),
    ("forward", 4, 32): Launch(32, warps=8, stages=1, per_sm=1),
    ("backward", 2, 64): Launch(32, stages=2, per_sm=2),
}

# Elsewhere the tensor cores read their operands from registers, where every warp would hold all
# cores: too many of them for a backward pass or for wide heads.
AMPERE: dict[tuple[str, int, int], Launch] = {
    ("forward", 2, 32): Launch(64, stages=2),
    ("forward", 2, 64): Launch(32, stages=2, per_sm=2),
    ("forward", 4, 32): Launch(32, warps=8, stages=1, per_sm=1),
}

# More cores than stay resident, and whatever has no line above (most of float32, whose cores alone
# overflow the chip). `block` is the side of a square tile of scores.
TILED: dict[tuple[int, int], Launch] = {
    (2, 32): Launch(64, stages=1, per_sm=3),
    (2, 64): Launch(64, stages=1, per_sm=2),
    (2, 128): Launch(64, warps=8, stages=1, per_sm=1),
    (4, 32): Launch(32, warps=8, stages=1, per_sm=2),
    (4, 64): Launch(32, warps=8, stages=1, per_sm=1, registers=255),
    (4, 128): Launch(16, warps=8, stages=1, per_sm=1),
}
AMPERE_TILED: dict[tuple[int, int], Launch] = {
    (2, 32): Launch(32, stages=1, per_sm=4),
    (2, 64): Launch(32, stages=1, per_sm=3),
}
HOPPER_TILED: dict[tuple[int, int], Launch] = {
    (2, 128): Launch(32, warps=8, stages=1, per_sm=1),
}
BLACKWELL_TILED: dict[tuple[int, int], Launch] = {
    (2, 64): Launch(64, stages=1, per_sm=2, registers=255),
}
"""Where that differs."""


def resident(
    name: str,
    size: int,
    width: int,
    tables: int,
    capability: tuple[int, int],
    *,
    cores: int = RESIDENT_CORES,
    patches: int = 0,
) -> Launch | None:
    """The launch of the pass `name` that keeps the cores on the chip; None where they do not fit.

    Args:
        size, tables: bytes of an element of q, and of a rotary table's, 0 without rotation.
        capability: of the GPU; (0, 0) is the interpreter, where everything fits.
        cores, patches: how many there are.
    """
    major = capability[0]
    if major == 0:
        return Launch(32 if size == 4 else 64) if size * width < 512 else None
    if major != 9:
        return (BLACKWELL if major == 10 else AMPERE).get((name, size, width))
    key = (name, size, width, tables)
    if key not in HOPPER:
        key = (name, size, width, tables and size)
    if cores == RESIDENT_CORES or cores <= FEW_CORES:
        whole = HOPPER_WHOLE.get(key)
        if whole is not None and patches % whole.block == 0:
            return whole
        if key in HOPPER_FEW_OR_ALL:
            return HOPPER_FEW_OR_ALL[key]
    return HOPPER.get(key)


def tiled(size: int, width: int, capability: tuple[int, int]) -> Launch:
    """The launch of the kernels that walk over everything in tiles."""
    launch = TILED[size, width]
    major = capability[0]
    others = {0: {}, 9: HOPPER_TILED, 10: BLACKWELL_TILED}.get(major, AMPERE_TILED)
    return others.get((size, width), launch)


MAX_SPLITS = 64  # more would make merging cost as much as attending
MERGE_ELEMENTS = 2048  # per program that merges splits: 16 for each of its 128 threads
CPU_MULTIPROCESSORS = 4  # what the interpreter pretends to have


def span_cost(sequences: int, tiles: int, multiprocessors: int, launch: Launch, splits: int) -> int:
    """Tiles in a row on one multiprocessor when a walk over `tiles` is cut into `splits` spans.

    A multiprocessor runs `per_sm` programs at a time and needs nearly all of them to keep memory
    busy, so a last round with fewer takes as long as one with `per_sm - 1`. A program costs its
    tiles, plus one for reading the cores, one for each stage beyond three that it must fill, and
    one for writing partial results if it has only a span of the sequence.
    """
    per_sm = launch.per_sm
    busy = max(per_sm - 1, min(per_sm, 2))
    span = -(-tiles // splits)
    rounds, rest = divmod(-(-sequences * splits // multiprocessors), per_sm)
    turns = rounds * per_sm + (max(rest, busy) if rest else 0)
    return turns * (span + max(1, launch.stages - 2) + (splits > 1))


@functools.lru_cache(maxsize=1024)  # asked at every call, and a hundred microseconds long
def choose_splits(sequences: int, tiles: int, multiprocessors: int, launch: Launch) -> int:
    """Into how many spans to cut a walk over `tiles` tiles that `sequences` programs would take.

    The cheapest number by `span_cost`, the smallest if several are.
    """
    # Only numbers of spans that leave none empty.
    candidates = {-(-tiles // -(-tiles // s)) for s in range(1, min(tiles, MAX_SPLITS) + 1)}
    return min(
        sorted(candidates or {1}),
        key=lambda splits: span_cost(sequences, tiles, multiprocessors, launch, splits),
    )
