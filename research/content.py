"""What tells how few tokens an image needs, before it has run?

    python -m research.content measure --photos PHOTOS/choose PHOTOS/more --out FOLDER

`measure` runs photos through the shipped weights with every share of tokens that can be chosen, and
writes photo by photo what each loses, and what could have told: the unlikeness of windows, where
cores look, lengths of tokens, edges in the picture, the state of CLS and of the patches on average.
Beside the plain rule it runs three others:

- "threshold": each step merges all windows whose unlikeness is below a threshold, so that images
  differ in how many tokens they have after each step;
- "second" and "third": the share is chosen at the second or third step, after one or two steps of
  the plain rule with .4, and what could have told is what is there then.

One .npz for each weights and size, written anew after every fifty photos. Photos of a folder
"benchmark" are measured like all others, and nothing may be chosen by them: `set` has the folder of
each photo.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import veca
from research import RESULTS
from research.elastic import agreement, in_folder
from veca._util.files import atomic_write
from veca.bench import DTYPES
from veca.merging import _compared, _windows, take
from veca.model import EarlyWalk, LayerState, Veca

SHARES = (0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.85)
"""That are run; losses at others lie between them."""
THRESHOLDS = (0.4, 0.55, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
"""Times the threshold that the plain rule has at each step with `BEGUN`, on average."""
BEGUN = 0.4
"""The share that the first steps go by where a later one chooses."""

RULES = ("second", "third", "threshold")

Targets = Callable[[int, Tensor], Tensor]
"""Of a step, from 0, and the unlikeness of windows [B, W]: the tokens left of each image, [B]."""


class Pass(NamedTuple):
    """A pass with merging, to its end."""

    end: LayerState
    before: list[list[LayerState]]
    """The states that led to each step, from the one before."""
    after: list[LayerState]
    """The state right after each step."""
    left: Tensor
    """[B, steps] tokens."""
    lost: Tensor
    """[B, steps] the unlikeness of the windows that merged, summed up, over all windows."""
    highest: Tensor
    """[B, steps] that of the last window that merged."""


def unlikeness(state: LayerState) -> Tensor:
    """Of each window of 2 x 2, as `veca.merging.merge` ranks them: [B, W], inf where merged."""
    patches = state.tokens[:, state.core_xy.shape[1] :]
    members = _windows(state.grid, 2, patches.device).expand(len(patches), -1)
    token_of = state.periphery.token_of
    tokens_of = members if token_of is None else token_of.gather(1, members)
    score = _compared(take(patches, tokens_of.unflatten(1, (-1, 4))))[1] / 4
    return score.masked_fill(merged(state), torch.inf)


def merged(state: LayerState) -> Tensor:
    """Which windows are one token: [B, W]."""
    members = _windows(state.grid, 2, state.tokens.device)[::4].expand(len(state.tokens), -1)
    token_of, counts = state.periphery.token_of, state.periphery.multiplicity
    if token_of is None or counts is None:
        return torch.zeros_like(members, dtype=torch.bool)
    return counts.gather(1, token_of.gather(1, members)) > 1


def run(model: Veca, early: EarlyWalk, targets: Targets) -> Pass:
    """`model.walk` with any number of tokens after each step."""
    blocks = model.config.merge_blocks
    state, states = early.states[-1], list(early.states)
    before, after, left, lost, highest = [], [], [], [], []
    for step, block in enumerate(blocks):
        scores = unlikeness(state)
        before.append(states)
        wanted = targets(step, scores)
        end = blocks[step + 1] - 1 if step + 1 < len(blocks) else model.config.depth
        most = int(wanted.max())
        plan = {block: (2, most, None if (wanted == most).all() else wanted.unsqueeze(1))}
        states = list(model._blocks(state, end, plan))
        new = merged(states[0]) & scores.isfinite()
        after.append(states[0])
        left.append((states[0].periphery.multiplicity > 0).sum(dim=1))
        lost.append(scores.masked_fill(~new, 0).sum(dim=1) / scores.shape[1])
        highest.append(scores.masked_fill(~new, 0).amax(dim=1))
        state = states[-1]
    stacked = (torch.stack(x, dim=1) for x in (left, lost, highest))
    return Pass(state, before, after, *stacked)


def by_share(model: Veca, grid: tuple[int, int], keep: float, begun: int = 0) -> Targets:
    """As `veca.merging.merge_plan` has it; after `begun` steps with `BEGUN`, in equal parts."""
    steps = len(model.config.merge_blocks)
    first = 1 - (1 - BEGUN) * begun / steps
    shares = [1 - (1 - BEGUN) * (n + 1) / steps for n in range(begun)]
    shares += [first - (first - keep) * (n + 1) / (steps - begun) for n in range(steps - begun)]
    patches = grid[0] * grid[1]
    least = patches - 3 * (grid[0] // 2) * (grid[1] // 2)
    left, before = [], patches
    for share in shares:
        wanted = max(least, (patches * round(share * 10_000) + 5_000) // 10_000)
        before -= (before - wanted + 2) // 3 * 3  # each window that merges saves three
        left.append(before)

    def targets(step: int, scores: Tensor) -> Tensor:
        return torch.full((len(scores),), left[step], device=scores.device)

    return targets


def by_threshold(grid: tuple[int, int], thresholds: Sequence[float]) -> Targets:
    def targets(step: int, scores: Tensor) -> Tensor:
        below = (scores < thresholds[step]) | scores.isinf()  # those that have merged, too
        return grid[0] * grid[1] - 3 * below.sum(dim=1)

    return targets


@torch.inference_mode()
def thresholds(model: Veca, images: Tensor) -> list[float]:
    """What the plain rule has with `BEGUN`, at each step, on average."""
    early = model.before_merging(images)
    found = run(model, early, by_share(model, early.states[-1].grid, BEGUN))
    return [float(x) for x in found.highest.mean(dim=0)]


def windows_of(values: Tensor) -> Tensor:
    """Mean over windows of 2 x 2: [B, h, w] -> [B, W]."""
    return F.avg_pool2d(values.unsqueeze(1), 2).flatten(1)


def seen(model: Veca, states: Sequence[LayerState]) -> dict[str, Tensor]:
    """What could tell, of the last of these states."""
    before, state = states[-2:]
    budget = state.core_xy.shape[1]
    cores, patches = state.tokens[:, :budget].float(), state.spread()[:, budget:].float()
    looks = state.on_grid(model.core_to_patch(before, state).mean(dim=1))  # [B, C, h, w]
    return {
        "scores": unlikeness(state).nan_to_num(posinf=-1),
        "cls looks": windows_of(looks[:, 0]),
        "cores look": windows_of(looks.mean(dim=1)),
        "lengths": windows_of(patches.norm(dim=-1).unflatten(1, state.grid)),
        "cls": cores[:, 0],
        "cores": cores.mean(dim=1),
        "patches": patches.mean(dim=1),
    }


def edges(images: Tensor, patch: int) -> Tensor:
    """Mean absolute difference of neighbouring pixels, of windows of 2 x 2 patches."""
    grey = images.mean(dim=1, keepdim=True)
    across = F.pad((grey[..., 1:] - grey[..., :-1]).abs(), (0, 1))
    down = F.pad((grey[..., 1:, :] - grey[..., :-1, :]).abs(), (0, 0, 0, 1))
    return windows_of(F.avg_pool2d(across + down, patch).squeeze(1))


@torch.inference_mode()
def measured(
    model: Veca, images: Tensor, scale: Sequence[float], rules: Sequence[str] = RULES
) -> dict[str, Tensor]:
    """All of it for a batch, by name.

    Args:
        scale: what thresholds are multiples of, for each step.
        rules: those to run beside the plain one.
    """
    early = model.before_merging(images)
    grid = early.states[-1].grid
    *_, last = full = list(model.walk(early))
    whole = model.output(last)
    found: dict[str, Tensor] = {}

    def losses(out: veca.VecaOutput) -> Tensor:
        return 1 - agreement((out.cls, out.patches), (whole.cls, whole.patches))

    def note(name: str, passes: Sequence[Pass]) -> None:
        found[f"{name} losses"] = torch.stack([losses(model.output(p.end)) for p in passes], 1)
        for part in ("left", "lost", "highest"):
            found[f"{name} {part}"] = torch.stack([getattr(p, part) for p in passes], dim=1)

    found |= {f"first {k}": x for k, x in seen(model, early.states).items()}
    found["first block scores"] = unlikeness(early.states[1])
    looks = model.core_to_patch(*early.states[:2]).mean(dim=1)
    found["first block cls looks"] = windows_of(early.states[1].on_grid(looks[:, 0]))
    found["edges"] = edges(images, model.config.patch_size)

    passes = []
    for keep in SHARES:
        one = run(model, early, by_share(model, grid, keep))
        if keep == BEGUN:
            for name, states in zip(("second", "third"), one.before[1:3], strict=True):
                found |= {f"{name} {k}": x for k, x in seen(model, states).items()}
        passes.append(one._replace(before=[]))
    note("plain", passes)
    # How far CLS and the cores have gone from those of the full pass after the next block.
    nexts = []
    number = model.config.merge_blocks[0]
    block, goal = model.blocks[number - 1], full[number].tokens[:, : early.budget]
    for one in passes:
        (state,) = model._blocks(one.after[0], number, {}, early.budget)
        apart = 1 - F.cosine_similarity(state.tokens.double(), goal.double(), dim=-1)
        nexts.append(torch.stack([apart[:, 0], apart.mean(dim=1)], dim=1))
    found["plain next"] = torch.stack(nexts, dim=1)
    del passes, full, block

    for name, begun in (("second", 1), ("third", 2)):
        if name not in rules:
            continue
        most = 1 - (1 - BEGUN) * begun / len(model.config.merge_blocks)
        shares = [keep for keep in SHARES if keep <= most + 1e-9]
        note(name, [run(model, early, by_share(model, grid, keep, begun)) for keep in shares])
    if "threshold" in rules:
        ways = [by_threshold(grid, [t * one for one in scale]) for t in THRESHOLDS]
        note("threshold", [run(model, early, way) for way in ways])
    return found


def measure(options: argparse.Namespace) -> None:
    """Photo by photo in an order by lot, so that any part is a fair one; batch by batch kept."""
    device, dtype = torch.device(options.device), DTYPES[options.precision]
    torch.set_num_threads(options.threads)
    files = in_folder(options.photos, options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, size in itertools.product(options.weights, options.sizes):
        model = veca.load(name, backend="sdpa").eval().to(device, dtype)

        def load(some: Sequence[Path], model: Veca = model, size: int = size) -> Tensor:
            pixels = [veca.preprocess(file, (size, size), model=model).pixels for file in some]
            return torch.cat(pixels).to(device, dtype)

        rows: list[dict[str, np.ndarray]] = []
        scale = thresholds(model, load(files[:8]))
        begin = time.perf_counter()
        for start in range(0, len(files), options.batch):
            part = files[start : start + options.batch]
            values = measured(model, load(part), scale, options.rules)
            rows.append({k: _small(k, x) for k, x in values.items()})
            done = start + len(part)
            if done % 50 and done < len(files):
                continue
            joined = {k: np.concatenate([row[k] for row in rows]) for k in rows[0]}
            about = {
                "photo": np.array([f.stem for f in files[:done]]),
                "set": np.array([f.parent.name for f in files[:done]]),
                "shares": np.array(SHARES),
                "thresholds": np.outer(THRESHOLDS, scale),
            }
            with atomic_write(options.out / f"content_{name}_{size}.npz") as file:
                np.savez_compressed(file, **about, **joined)  # type: ignore[arg-type]
            print(f"{name}, {size} px, {done}: {time.perf_counter() - begin:.0f} s", flush=True)


def _small(name: str, values: Tensor) -> np.ndarray:
    """What may be tiny as it is, the rest in halves."""
    exact = name.endswith(("losses", "next"))
    return values.to(torch.float32 if exact else torch.float16).cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("measure")
    command.set_defaults(run=measure)
    command.add_argument("--out", type=Path, default=RESULTS)
    command.add_argument("--photos", type=Path, nargs="+", required=True)
    command.add_argument("--weights", nargs="+", default=["tiny", "small"])
    command.add_argument("--sizes", type=int, nargs="+", default=[512, 224])
    command.add_argument("--limit", type=int, help="photos")
    command.add_argument("--batch", type=int, default=1, help="photos that run together")
    command.add_argument("--precision", choices=DTYPES, default="float32")
    command.add_argument("--rules", nargs="*", choices=RULES, default=RULES)
    command.add_argument("--threads", type=int, default=1)
    command.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    options.run(options)


if __name__ == "__main__":
    main()
