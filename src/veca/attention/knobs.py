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
    cut. `registers` caps the registers of a thread. `fused` gives a program both roles.
    """

    block: int
    warps: int = 4
    stages: int = 3
    per_sm: int = 4
    registers: int | None = None
    fused: bool = False


# (pass, bytes of an element, head width, bytes of a table's element or 0 without rotation). Where
# several are given, `cheapest` picks by how evenly they fill the chip. The remarks are what Triton
# 3.6 and its ptxas report for sm_90 and 64 cores: registers a thread, KB of shared memory a
# program. An H200 multiprocessor has 512 registers for each of 128 threads, and 228 KB (1 a program
# lost).
KNOBS: dict[tuple[str, int, int, int], tuple[Launch, ...]] = {
    ("forward", 2, 32, 0): (Launch(64, stages=3, per_sm=5, registers=96),),  # 28 KB
    ("forward", 2, 32, 2): (Launch(64, stages=3, per_sm=4, registers=128),),
    ("forward", 2, 32, 4): (Launch(64, stages=3, per_sm=4, registers=128),),  # 44 KB
    ("forward", 2, 64, 0): (
        Launch(64, stages=3, per_sm=4, registers=128),  # 124 registers, 56 KB
        Launch(64, stages=4, per_sm=3),  # 72 KB
    ),
    ("forward", 2, 64, 2): (Launch(64, stages=3, per_sm=4),),
    ("forward", 2, 64, 4): (Launch(64, stages=2, per_sm=4, registers=128),),  # 129 uncapped, 56 KB
    ("forward", 2, 128, 0): (Launch(64, stages=3, per_sm=2),),  # 168 registers, 112 KB
    ("forward", 2, 128, 2): (Launch(64, stages=2, per_sm=2),),
    ("forward", 2, 128, 4): (Launch(64, stages=2, per_sm=2),),  # 220 registers, 112 KB
    ("forward", 4, 32, 0): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("forward", 4, 32, 4): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("forward", 4, 64, 0): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("forward", 4, 64, 4): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("backward", 2, 32, 0): (Launch(64, stages=3, per_sm=3, registers=168),),  # 145, 41 KB
    ("backward", 2, 32, 2): (Launch(64, stages=3, per_sm=2),),
    ("backward", 2, 32, 4): (Launch(64, stages=3, per_sm=2),),  # 190 registers, 60 KB
    ("backward", 2, 64, 0): (Launch(64, stages=3, per_sm=2),),  # 207 registers, 73 KB
    ("backward", 2, 64, 2): (Launch(64, stages=3, per_sm=2),),
    ("backward", 2, 64, 4): (Launch(64, stages=3, per_sm=2),),  # 252 registers, 112 KB
    ("backward", 2, 128, 0): (Launch(64, warps=8, stages=2, per_sm=1),),  # 239 registers, 113 KB
    ("backward", 2, 128, 2): (Launch(64, warps=8, stages=2, per_sm=1),),
    ("backward", 2, 128, 4): (Launch(64, warps=8, stages=2, per_sm=1),),  # 255 registers, 160 KB
    ("backward", 4, 32, 0): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("backward", 4, 32, 4): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("backward", 4, 64, 0): (Launch(32, warps=8, stages=1, per_sm=1),),
    ("backward", 4, 64, 4): (Launch(32, warps=8, stages=1, per_sm=1),),
}

# More cores than stay resident, and whatever has no line above (float32 of width 128, whose cores
# alone overflow the chip). `block` is the side of a square tile of scores.
TILED: dict[tuple[int, int], Launch] = {
    (2, 32): Launch(64, stages=1, per_sm=3),
    (2, 64): Launch(64, stages=1, per_sm=2),
    (2, 128): Launch(64, warps=8, stages=2, per_sm=1),
    (4, 32): Launch(32, stages=1, per_sm=2),
    (4, 64): Launch(32, stages=1, per_sm=2),
    (4, 128): Launch(32, warps=8, stages=1, per_sm=1),
}

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
