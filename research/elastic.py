"""Which rule merges best? Where, in how many steps, by which windows, criterion and return?

    python -m research.elastic photos --voc VOC2012 --davis DAVIS/JPEGImages/480p --out PHOTOS
    python -m research.elastic rules --photos PHOTOS/choose --large CROPS/choose

`photos` cuts the largest square out of VOC photos that are no part of the segmentation's validation
split, and of DAVIS frames, and divides them into those that choose ("choose"), those on which
nothing is chosen ("benchmark") and the rest ("more"). With `--pictures` it cuts pictures of many
megapixels into squares of 1024 pixels instead, with `--whole` a folder of large photos: the largest
square of each, reduced to 1024 pixels.

`rules` writes research/results/elastic_rules.csv: mean cosines with the full pass and the share of
its work, for each rule, share kept, size and weights.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import veca
from benchmarks.common import print_table, write_csv
from research import RESULTS
from veca import rope
from veca.attention import core_attention
from veca.config import VecaConfig
from veca.images import EXTENSIONS
from veca.merging import Periphery
from veca.model import Block, Veca

KEEPS = (0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
WORKS = (0.8, 0.7, 0.6, 0.55)
"""Shares of the full pass's work at which rules are compared."""


class Rule(NamedTuple):
    """How patches merge. The default is that of the package when this was asked."""

    steps: tuple[int, ...] = (3, 6, 9)
    """The blocks before which windows merge; a block may be named twice."""
    fall: str | float = "geometric"
    """How the share falls: keep ** (step / steps), to this power; "linear" in equal parts."""
    windows: tuple[tuple[int, int], ...] = ()
    """(down, across) at each step; () are 2 x 2, and 4 x 4 where the share is below a quarter."""
    criterion: str = "cos x length"
    returned: float = 0.0
    """What a patch takes of its own difference from its window's mean, back at the end."""
    counted: bool = True
    """Cores see a token as often as it has patches."""
    alone: int = 0
    """The block before which patches stand alone again; 0 is none."""
    length: bool = False
    """A window's token is as long as its patches on average, instead of their mean."""
    smooth: float | str = 0.0
    """How far merged patches go, in the end, to the mean of the 3 x 3 patches around them;
    "bilinear": windows of 2 x 2 are enlarged."""

    def shares(self, keep: float) -> list[float]:
        parts = [step / len(self.steps) for step in range(1, len(self.steps) + 1)]
        if self.fall == "linear":
            return [1 - (1 - keep) * part for part in parts]
        power = 1.0 if self.fall == "geometric" else float(self.fall)
        return [keep ** (part**power) for part in parts]


TWO, FOUR, PAIR = (2, 2), (4, 4), (1, 2)
EITHER = (0, 2)
"""Pairs side by side or above each other, whichever differ less in their window of 2 x 2."""
RULES: dict[str, Rule] = {
    "3-6-9": Rule(),
    **{
        "-".join(map(str, steps)): Rule(steps)
        for steps in [
            *[(4,), (5,), (6,), (3, 7), (4, 7), (4, 8), (5, 8)],
            *[(2, 5, 8), (4, 7, 10), (3, 5, 7), (4, 6, 8), (5, 7, 9), (4, 5, 6)],
            *[(2, 4, 6, 8), (3, 5, 7, 9), (4, 6, 8, 10), (3, 4, 5, 6, 7, 8, 9, 10)],
            tuple(range(4, 12)),
        ]
    },
    "3-6-9, linear": Rule(fall="linear"),
    "3-6-9, early": Rule(fall=0.6),
    "3-6-9, late": Rule(fall=1.5),
    "4-6-8, early": Rule((4, 6, 8), fall=0.6),
    "4-6-8, late": Rule((4, 6, 8), fall=1.5),
    "3-5-7, late": Rule((3, 5, 7), fall=1.5),
    "3-6-9, 4 x 4 last": Rule(windows=(TWO, TWO, FOUR)),
    "3-6-9, 2 x 2 and 4 x 4 last": Rule((3, 6, 9, 9), windows=(TWO, TWO, TWO, FOUR)),
    "4-6-8, 4 x 4 last": Rule((4, 6, 8), windows=(TWO, TWO, FOUR)),
    "3-6-9, pairs first": Rule(windows=(PAIR, TWO, TWO)),
    "3-6-9, pairs": Rule(windows=(PAIR, PAIR, PAIR)),
    "3-6-9, pairs, pairs, squares": Rule(windows=(PAIR, PAIR, TWO)),
    **{
        f"3-6-9, {name}": Rule(criterion=name)
        for name in ("cos", "worst cos", "squares", "normed squares", "cos x root", "random")
    },
    "3-6-9, half returned": Rule(returned=0.5),
    "3-6-9, own returned": Rule(returned=1.0),
    "3-6-9, twice returned": Rule(returned=2.0),
    "3-6-9, as long": Rule(length=True),
    "3-6-9, not counted": Rule(counted=False),
    "3-6-9, alone from 12": Rule(returned=1.0, alone=12),
    "3-6-9, alone from 11": Rule(returned=1.0, alone=11),
    "5, own returned": Rule((5,), returned=1.0),
}
STEPS = (
    *[(3, 6, 9), (2, 5, 8), (4, 7, 10), (2, 4, 6, 8), (3, 5, 7, 9), (4, 6, 8, 10)],
    *[(2, 4, 6, 8, 10), (3, 4, 5, 6, 7, 8, 9, 10), (2, 3, 4, 5, 6, 7, 8, 9, 10)],
)
RULES |= {
    f"{'-'.join(map(str, steps))}, {fall}, {criterion}": Rule(steps, fall, criterion=criterion)
    for steps in STEPS
    for criterion in ("cos", "normed squares")
    for fall in ("geometric", "linear", "1.5", "2")
}
PAIRS = {
    "3-6-9": (PAIR, TWO, TWO),
    "2-4-6-8": (PAIR, TWO, TWO, TWO),
    "3-5-7-9": (PAIR, TWO, TWO, TWO),
    "2-4-6-8, late squares": (PAIR, PAIR, TWO, TWO),
    "3-5-7-9, late squares": (PAIR, PAIR, TWO, TWO),
    "2-3-5-7-9": (PAIR, TWO, TWO, TWO, TWO),
    "3-3-6-6-9-9": (PAIR, TWO) * 3,
}
RULES |= {
    f"{name}, {fall}, cos, pairs first": Rule(
        tuple(int(step) for step in name.split(",")[0].split("-")), fall, windows, "cos"
    )
    for name, windows in PAIRS.items()
    for fall in ("linear", "1.5")
}
RULES |= {
    f"3-5-7-9, linear, {name}": Rule((3, 5, 7, 9), "linear", **changes)
    for name, changes in {
        "keys": {"criterion": "keys"},
        "normed cos": {"criterion": "normed cos"},
        "worst cos": {"criterion": "worst cos"},
        "random": {"criterion": "random"},
        "cos, as long": {"criterion": "cos", "length": True},
        "cos, half returned": {"criterion": "cos", "returned": 0.5},
        "cos, own returned": {"criterion": "cos", "returned": 1.0},
        "cos, not counted": {"criterion": "cos", "counted": False},
    }.items()
}
FINER = {
    "3-5-7-9": (PAIR, TWO, TWO, TWO),
    "3-5-7-9, late squares": (PAIR, PAIR, TWO, TWO),
    "2-4-6-8": (PAIR, TWO, TWO, TWO),
    "2-4-6-8, late squares": (PAIR, PAIR, TWO, TWO),
    "2-4-6-8-10": (PAIR, PAIR, TWO, TWO, TWO),
    "2-3-5-7-9": (PAIR, PAIR, TWO, TWO, TWO),
    "3-6-9": (PAIR, TWO, TWO),
    "3-5-7": (PAIR, TWO, TWO),
    "2-5-8": (PAIR, TWO, TWO),
}
RULES |= {
    f"{name}, {fall}, cos, as long, smoothed, {kind} first": Rule(
        tuple(int(step) for step in name.split(",")[0].split("-")),
        fall,
        tuple(pair if window == PAIR else window for window in windows),
        "cos",
        length=True,
        smooth=0.5,
    )
    for name, windows in FINER.items()
    for fall in ("geometric", "linear")
    for kind, pair in (("pairs", PAIR), ("either", EITHER))
}
BEST = Rule((3, 5, 7, 9), "linear", (EITHER, EITHER, TWO, TWO), "cos", length=True, smooth=0.5)
RULES |= {
    f"3-5-7-9, linear, either twice, {name}": BEST._replace(**changes)
    for name, changes in {
        "not smoothed": {"smooth": 0.0},
        "smoothed .25": {"smooth": 0.25},
        "smoothed .75": {"smooth": 0.75},
        "smoothed 1": {"smooth": 1.0},
        "bilinear": {"smooth": "bilinear"},
        "mean": {"length": False},
        "own returned": {"returned": 1.0},
        "half returned": {"returned": 0.5},
        "normed squares": {"criterion": "normed squares"},
        "normed cos": {"criterion": "normed cos"},
        "cos x length": {"criterion": "cos x length"},
        "cos x root": {"criterion": "cos x root"},
        "worst cos": {"criterion": "worst cos"},
        "random": {"criterion": "random"},
        "not counted": {"counted": False},
        "1.5": {"fall": "1.5"},
        "either thrice": {"windows": (EITHER, EITHER, EITHER, TWO)},
        "either always": {"windows": (EITHER,) * 4},
        "either once": {"windows": (EITHER, TWO, TWO, TWO)},
    }.items()
}
RULES |= {
    f"3-5-7-9, squares, {name}": BEST._replace(**{"windows": (TWO,) * 4, **changes})
    for name, changes in {
        "smoothed .25": {"smooth": 0.25},
        "smoothed .75": {"smooth": 0.75},
        "smoothed 1": {"smooth": 1.0},
        "bilinear": {"smooth": "bilinear"},
        "not smoothed": {"smooth": 0.0},
        "mean": {"length": False},
        "geometric": {"fall": "geometric"},
        "1.5": {"fall": "1.5"},
        "normed squares": {"criterion": "normed squares"},
        "normed cos": {"criterion": "normed cos"},
        "cos x root": {"criterion": "cos x root"},
        "cos x length": {"criterion": "cos x length"},
        "own returned": {"returned": 1.0},
        "4 x 4 last": {"windows": (TWO, TWO, TWO, FOUR)},
        "4 x 4 twice": {"windows": (TWO, TWO, FOUR, FOUR)},
    }.items()
}
RULES |= {
    f"{'-'.join(map(str, steps))}, linear, either {either} times": BEST._replace(
        steps=steps, windows=(EITHER,) * either + (TWO,) * (len(steps) - either)
    )
    for steps in (
        *[(2, 4, 6, 8, 10), (2, 3, 5, 7, 9), (3, 4, 5, 6, 7, 8, 9, 10), (2, 3, 4, 5, 6, 7, 8, 9)],
        *[(2, 5, 8), (3, 6, 9), (2, 4, 6), (3, 5, 7), (2, 4, 6, 8), (3, 5, 7, 9), (4, 6, 8, 10)],
        *[(2, 5), (3, 7), (4,), (5,), (6,), (1, 3, 5, 7), (1, 3, 5), (2, 4, 6, 8, 10, 12)],
    )
    for either in ((0, 1, 2, 3) if len(steps) < 6 else (0, 2, 4))
    if either <= len(steps)
}
LARGE = [
    *("3-6-9", "3-6-9, cos", "3-6-9, as long", "3-5-7-9", "3-5-7-9, linear, cos"),
    *(name for name in RULES if "twice, " in name or "squares, " in name),
    *(name for name in RULES if "either 0 times" in name),
]
"""Asked at 1024 pixels, too."""
NEW = [name for name in RULES if name in LARGE or ", cos" in name]
"""What the second round asks."""


def own_rule(config: VecaConfig) -> Rule:
    """What the package does with `keep`."""
    return Rule(config.merge_blocks, "linear", criterion="cos", length=True, smooth="bilinear")


class Merged(NamedTuple):
    """Patches in their places, some of which stand for others."""

    x: Tensor
    """[B, N, D]; only the rows of tokens mean something."""
    xy: Tensor
    """[B, N, 2]"""
    count: Tensor
    """[B, N] patches of a token, 0 in places that have none any more."""
    owner: Tensor
    """[B, N] the place of each patch's token."""
    own: Tensor
    """[B, N, D] each patch less its token."""

    def spread(self, returned: float) -> Tensor:
        return _rows(self.x, self.owner) + returned * self.own


def _rows(x: Tensor, index: Tensor) -> Tensor:
    shape = (*index.shape, x.shape[-1])
    return x.gather(1, index.flatten(1).unsqueeze(-1).expand(-1, -1, x.shape[-1])).view(shape)


def _merge(
    m: Merged,
    grid: tuple[int, int],
    window: tuple[int, int],
    target: int,
    rule: Rule,
    block: Block,
) -> Merged:
    h, w = grid
    if window == EITHER:
        members = _pairs(m, grid, rule, block)
    else:
        members = _windows(grid, window, m.x.device).expand(len(m.x), -1, -1)  # [B, W, S]
    owners = m.owner.gather(1, members.flatten(1)).view_as(members)
    inside = _rows(m.x, owners)
    mean = inside.mean(dim=2)
    score = _score(inside, mean, rule.criterion, block)
    saved = (1 / m.count).gather(1, owners.flatten(1)).view_as(owners).sum(2).round() - 1
    score = score.masked_fill(saved < 1, torch.inf)
    order = score.argsort(dim=1, stable=True)
    saved = saved.gather(1, order)
    need = (m.count > 0).sum(1, keepdim=True) - target
    first = (saved.cumsum(1) - saved < need) & score.gather(1, order).isfinite()
    chosen = torch.zeros_like(first).scatter(1, order, first)  # [B, W]

    size = members.shape[2]
    patches = members.flatten(1)
    goes = torch.zeros_like(m.owner, dtype=torch.bool)
    goes.scatter_(1, patches, chosen.repeat_interleave(size, dim=1))
    places = torch.arange(h * w, device=m.x.device).expand_as(m.owner)
    head = places.scatter(1, patches, members[..., :1].expand_as(members).flatten(1))
    token = mean
    if rule.length:
        token = F.normalize(mean, dim=-1) * inside.norm(dim=-1).mean(2, keepdim=True)
    before = m.spread(1.0)
    first_of = members[..., :1]
    at = chosen.unsqueeze(-1)
    x = _put(m.x, first_of, torch.where(at, token, _rows(m.x, first_of[..., 0])))
    centre = _rows(m.xy, owners).mean(2)
    xy = _put(m.xy, first_of, torch.where(at, centre, _rows(m.xy, first_of[..., 0])))
    count = torch.where(goes, (head == places) * float(size), m.count)
    owner = torch.where(goes, head, m.owner)
    return Merged(x, xy, count, owner, before - _rows(x, owner))


def _put(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    return x.scatter(1, rows.expand(-1, -1, x.shape[-1]), values)


def _windows(grid: tuple[int, int], window: tuple[int, int], device: torch.device) -> Tensor:
    """The patches of each window: [W, S]."""
    (h, w), (a, b) = grid, window
    places = torch.arange(h * w, device=device).view(h, w)[: h // a * a, : w // b * b]
    return places.view(h // a, a, w // b, b).transpose(1, 2).reshape(-1, a * b)


def _pairs(m: Merged, grid: tuple[int, int], rule: Rule, block: Block) -> Tensor:
    """[B, W, 2] the pairs of each window of 2 x 2, in the direction in which they differ less."""
    windows = _windows(grid, TWO, m.x.device).expand(len(m.x), -1, -1)
    ways = [windows[..., order].unflatten(2, (2, 2)) for order in ([0, 1, 2, 3], [0, 2, 1, 3])]
    found = []
    for pairs in ways:  # [B, W, 2, 2]
        flat = pairs.flatten(1, 2)
        inside = _rows(m.x, m.owner.gather(1, flat.flatten(1)).view_as(flat))
        score = _score(inside, inside.mean(2), rule.criterion, block)
        found.append(score.view(len(flat), -1, 2).sum(2))
    across = (found[0] <= found[1])[..., None, None]
    return torch.where(across, ways[0], ways[1]).flatten(1, 2)


def _score(inside: Tensor, mean: Tensor, criterion: str, block: Block) -> Tensor:
    """How much a window [B, W, S, D] differs from its mean: [B, W]."""
    normed = block.norm_attn
    if criterion == "random":
        draws = np.random.default_rng(0).random(mean.shape[1], dtype=np.float32)
        return torch.from_numpy(draws).to(mean.device).expand(mean.shape[0], -1)
    if criterion in ("keys", "normed cos"):
        # Of the block that comes next: its keys, or what it reads.
        inside = normed(inside)
        inside = block.attn.k(inside) if criterion == "keys" else inside
        return (1 - F.cosine_similarity(inside, inside.mean(2, keepdim=True), dim=-1)).sum(2)
    if criterion == "squares":
        return (inside - mean.unsqueeze(2)).square().sum(dim=(2, 3))
    if criterion == "normed squares":
        inside = normed(inside)
        return (inside - inside.mean(2, keepdim=True)).square().sum(dim=(2, 3))
    angles = 1 - F.cosine_similarity(inside, mean.unsqueeze(2), dim=-1)
    if criterion == "worst cos":
        return angles.amax(dim=2)
    power = {"cos": 0.0, "cos x root": 0.5, "cos x length": 1.0}[criterion]
    return angles.sum(dim=2) * mean.norm(dim=-1) ** power


@torch.inference_mode()
def run(model: Veca, images: Tensor, rule: Rule, keep: float) -> tuple[Tensor, Tensor, list[float]]:
    """CLS and patches by a rule, and the tokens that were left in each block.

    Merged patches keep their places, with count 0, so that nothing is saved: it asks what merging
    does to the features, and what a rule would save is counted.
    """
    c = model.config
    patches = model.patch_embed(images)
    grid = (patches.shape[-2], patches.shape[-1])
    patches = patches.flatten(2).transpose(1, 2)
    batch, count, _ = patches.shape
    tokens, raw = model.bank.prefix(c.num_cores)
    cores, raw = tokens.expand(batch, -1, -1), raw.unsqueeze(0)
    periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction, images.device)
    xy = rope.grid_coordinates(*grid, images.device).expand(batch, -1, -1)
    places = torch.arange(count, device=images.device).expand(batch, -1)
    ones = torch.ones(batch, count, device=images.device)
    m = single = Merged(patches, xy, ones, places, torch.zeros_like(patches))
    steps = list(zip(rule.steps, rule.shares(keep), strict=True)) if keep < 1 else []
    left = []
    for number, block in enumerate(model.blocks, start=1):
        for step, (at, share) in enumerate(steps):
            if at == number:
                window = rule.windows[step] if rule.windows else TWO if share >= 0.25 else FOUR
                whole = (grid[0] // max(window)) * (grid[1] // max(window))
                least = count - whole * (max(window) ** 2 - 1)
                m = _merge(m, grid, window, max(least, round(count * share)), rule, block)
        if number == rule.alone and keep < 1:
            m = single._replace(x=m.spread(rule.returned))
        if number > 1:
            raw = model.moves[number - 2](raw, cores)
        rotations = [rope.rotation(places, periods) for places in (raw.tanh(), m.xy)]
        seen = m.count if rule.counted else (m.count > 0).float()
        x = torch.cat([cores, m.x], dim=1)
        a = block.attn
        q, k, v = (a.split_heads(f(block.norm_attn(x))) for f in (a.q, a.k, a.v))
        mixed = core_attention(
            q,
            k,
            v,
            c.num_cores,
            core_rotation=rotations[0],
            patch_rotation=rotations[1],
            multiplicity=seen if keep < 1 else None,
            backend="sdpa",
        )
        x = x + a.out(mixed.transpose(1, 2).flatten(2))
        x = x + block.ffn(block.norm_ffn(x))
        cores, m = x[:, : c.num_cores], m._replace(x=x[:, c.num_cores :])
        left.append((m.count > 0).sum(1).float().mean().item())
    ends = [model.project(model.norm(part)) for part in (cores[:, 0], m.spread(rule.returned))]
    if rule.smooth:
        ends[1] = _smoothed(ends[1], grid, m.count.gather(1, m.owner) > 1, rule.smooth)
    return ends[0], ends[1], left


def _smoothed(patches: Tensor, grid: tuple[int, int], merged: Tensor, share: float | str) -> Tensor:
    """[B, N, D] with merged patches nearer to what is around them."""
    if isinstance(share, str):
        places = torch.arange(patches.shape[1], device=patches.device).expand_as(merged)
        periphery = Periphery(patches[..., :2], 1 + merged.float(), places)
        return periphery.spread(patches, grid)
    maps = patches.transpose(1, 2).unflatten(2, grid)
    around = F.avg_pool2d(maps, 3, 1, padding=1, count_include_pad=False)
    around = around.flatten(2).transpose(1, 2)
    return torch.where(merged.unsqueeze(-1), patches + share * (around - patches), patches)


def work(config: VecaConfig, left: Sequence[float], patches: int, whole_end: bool) -> float:
    """Multiplications of a pass with these tokens left in each block, over those of the full."""
    c, width, cores = config, config.width, config.num_cores

    def of(left: Sequence[float], end: float) -> float:
        block = 4 * width**2 + 3 * width * c.hidden_width + 4 * cores * width
        blocks = sum(tokens + cores for tokens in left) * block
        embed = patches * c.patch_size**2 * c.in_channels * width
        return blocks + embed + (cores + end) * width * c.feature_width

    return of(left, patches if whole_end else left[-1]) / of([patches] * c.depth, patches)


def agreement(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """CLS and patches of each photo: [B, 2]."""
    pairs = zip(a, b, strict=True)
    cls, patches = (F.cosine_similarity(x.float(), y.float(), dim=-1) for x, y in pairs)
    return torch.stack([cls, patches.mean(dim=1)], dim=1)


def load(files: Sequence[Path], size: int, device: torch.device) -> Tensor:
    """[P, 3, size, size] normalised; photos are squares already."""

    def one(file: Path) -> Tensor:
        return veca.preprocess(file, (size, size)).pixels

    with ThreadPoolExecutor() as pool:
        return torch.cat(list(pool.map(one, files))).to(device)


def in_folder(folders: Sequence[Path], limit: int | None = None) -> list[Path]:
    files = sorted((f for folder in folders for f in folder.iterdir()), key=_rank)
    if not files:
        raise SystemExit(f"no photos in {', '.join(map(str, folders))}.")
    return files[:limit]


def _rank(file: Path) -> str:
    """An order that says nothing about a photo but its name."""
    return hashlib.sha256(file.stem.encode()).hexdigest()


# ---------------------------------------------------------------------------------- the questions


def rules(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    chosen = {n: r for n, r in RULES.items() if not options.rules or n in options.rules}
    sets = [(options.size, options.photos), (1024, options.large or [])]
    rows: list[dict[str, object]] = []
    each: dict[str, np.ndarray] = {}
    for (size, folders), name in itertools.product(sets, options.weights):
        if not folders:
            continue
        model = veca.load(name).eval().to(device)
        files = in_folder(folders, options.limit)
        images = load(files, size, device)
        each[f"{size} photos"] = np.array([f.stem for f in files])
        parts = images.split(max(1, options.batch * 512**2 // size**2))
        full = [run(model, part, Rule(), 1)[:2] for part in parts]
        for rule_name, rule in chosen.items():
            if size == 1024 and rule_name not in LARGE:
                continue
            for keep in options.keeps:
                found, tokens = [], []
                for part, whole in zip(parts, full, strict=True):
                    cls, patches, left = run(model, part, rule, keep)
                    found.append(agreement((cls, patches), whole))
                    tokens.append((len(part), left))
                agreed = torch.cat(found).cpu().numpy()
                left = np.average([t for _, t in tokens], 0, [n for n, _ in tokens]).tolist()
                share = work(model.config, left, (size // 16) ** 2, rule.returned > 0)
                each[f"{name} {size} {rule_name} {keep}"] = agreed.astype(np.float32)
                rows.append(
                    {
                        "weights": name,
                        "size": size,
                        "photos": len(files),
                        "rule": rule_name,
                        "keep": keep,
                        "work": share,
                        "cls": float(agreed[:, 0].mean()),
                        "patches": float(agreed[:, 1].mean()),
                    }
                )
        write_csv("elastic_rules", rows, options.out, device=options.device)
        np.savez_compressed(options.each or options.out / "elastic_rules.npz", **each)  # type: ignore[arg-type]
    print_table(compared(rows))


def compared(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Each rule's 1 - cosine, in thousandths, at the same shares of work."""
    out = []
    keys = dict.fromkeys((r["weights"], r["size"], r["rule"]) for r in rows)
    for key in keys:
        points = [r for r in rows if (r["weights"], r["size"], r["rule"]) == key]
        points.sort(key=lambda r: float(str(r["work"])))
        xs = [float(str(r["work"])) for r in points]
        row: dict[str, object] = dict(zip(("weights", "size", "rule"), key, strict=True))
        for at in WORKS:
            for part in ("cls", "patches"):
                ys = [1000 * (1 - float(str(r[part]))) for r in points]
                inside = xs[0] <= at <= xs[-1]
                row[f"{part} {at}"] = float(np.interp(at, xs, ys)) if inside else ""
        out.append(row)
    return out


def photos(options: argparse.Namespace) -> None:
    """Squares of full detail, by lot."""
    if options.pictures or options.whole:
        large(options)
        return
    val = set((options.voc / "ImageSets/Segmentation/val.txt").read_text().split())
    voc = [f for f in (options.voc / "JPEGImages").iterdir() if f.stem not in val]
    sharp: list[tuple[str, Path]] = []
    rest: list[tuple[str, Path]] = []
    for file in sorted(voc, key=_rank):
        with Image.open(file) as image:
            side = min(image.size)
        if side >= options.least:
            sharp.append(("voc", file))
        elif side >= 375 and len(rest) < options.more:
            rest.append(("voc", file))
    films = sorted((f for f in options.davis.iterdir()), key=_rank)
    frames = [[("davis", f) for f in sorted(film.iterdir())[5::30][:2]] for film in films]
    half = [list(itertools.chain(*frames[i::2])) for i in (0, 1)]
    sets = {
        "choose": sharp[:130] + half[0],
        "benchmark": sharp[130:260] + half[1],
        "more": sharp[260:] + rest,
    }
    for name, members in sets.items():
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        for source, file in members:
            stem = file.stem if source == "voc" else f"{file.parent.name}-{file.stem}"
            with Image.open(file) as image:
                side, (w, h) = min(image.size), image.size
                box = ((w - side) // 2, (h - side) // 2, (w + side) // 2, (h + side) // 2)
                image.crop(box).save(folder / f"{source}-{stem}.webp", quality=options.quality)
        print(name, len(members))


def large(options: argparse.Namespace) -> None:
    """Squares of 1024 pixels, less those with nearly nothing in them."""
    Image.MAX_IMAGE_PIXELS = None
    found = list(squares(options) if options.whole else crops(options))
    found.sort(key=lambda one: _rank(one[0]))
    choose = min(40, max(len(found) - 150, len(found) // 8))
    for name, members in (("choose", found[:choose]), ("benchmark", found[choose:])):
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        for path, crop in members:
            crop.save(folder / f"{path}.webp", quality=options.quality)
        print(name, len(members))


def crops(options: argparse.Namespace) -> Iterator[tuple[Path, Image.Image]]:
    """Squares that touch nowhere."""
    for file in options.pictures:
        picture = Image.open(file).convert("RGB")
        across, down = (n // 1024 for n in picture.size)
        left, top = (n % 1024 // 2 for n in picture.size)
        for j, i in itertools.product(range(down), range(across)):
            x, y = left + 1024 * i, top + 1024 * j
            crop = picture.crop((x, y, x + 1024, y + 1024))
            if _has_detail(crop):
                yield Path(f"{file.stem}-{j:02d}-{i:02d}"), crop


def squares(options: argparse.Namespace) -> Iterator[tuple[Path, Image.Image]]:
    """The largest of each photo that is large enough, at 1024 pixels; of equal ones, the first."""
    seen: set[bytes | str] = set()
    files = sorted((f for f in options.whole.rglob("*") if f.suffix in EXTENSIONS), key=_rank)
    for file in files:
        with Image.open(file) as image:
            if min(image.size) < 1024:
                continue
            image.draft("RGB", (2048, 2048))
            side, (w, h) = min(image.size), image.size
            box = ((w - side) // 2, (h - side) // 2, (w + side) // 2, (h + side) // 2)
            crop = image.convert("RGB").crop(box).resize((1024, 1024), Image.Resampling.LANCZOS)
        name = re.sub(r"[^A-Za-z0-9-]+", "-", file.stem)
        look = crop.resize((8, 8)).convert("L").point(lambda v: v // 32).tobytes()
        if not {look, name} & seen and _has_detail(crop):
            seen |= {look, name}
            yield Path(name), crop


def _has_detail(crop: Image.Image) -> bool:
    grey = np.asarray(crop.convert("L"), dtype=float).reshape(64, 16, 64, 16)
    return bool(np.median(grey.std(axis=(1, 3))) >= 6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for run_, doc in ((rules, "rules"), (photos, "photos")):
        command = commands.add_parser(doc)
        command.set_defaults(run=run_)
        command.add_argument("--out", type=Path, default=RESULTS)
        if run_ is photos:
            command.add_argument("--voc", type=Path)
            command.add_argument("--davis", type=Path)
            command.add_argument("--pictures", type=Path, nargs="+")
            command.add_argument("--whole", type=Path, help="folder of photos of 1024 px and more")
            command.add_argument("--least", type=int, default=440, help="short side of VOC photos")
            command.add_argument("--more", type=int, default=270, help="with a smaller one")
            command.add_argument("--quality", type=int, default=88)
            continue
        command.add_argument("--photos", type=Path, nargs="+", required=True)
        command.add_argument("--weights", nargs="+", default=["tiny", "small"])
        command.add_argument("--limit", type=int, help="photos")
        command.add_argument("--batch", type=int, default=50, help="photos of 512 pixels")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--size", type=int, default=512, help="of the photos")
        command.add_argument("--large", type=Path, nargs="+", help="of 1024 pixels")
        command.add_argument("--rules", nargs="+", choices=RULES)
        command.add_argument("--keeps", type=float, nargs="+", default=KEEPS)
        command.add_argument("--each", type=Path, help="photo by photo, as .npz")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    options.run(options)


if __name__ == "__main__":
    main()
