"""How far chance reaches in a score: 95 % intervals, by drawing the test images again.

A score is made of sums over the test images, so to draw the images again is to count each as often
as it was drawn. All rows of a table are counted with the same draws. The share that one keeps of
another therefore has an interval of its own, without the chance that hits both alike: a budget
that is a little worse on every image is told apart from one that was unlucky.

Images of one scene are drawn together. Where images follow each other in time, neighbours are
alike, and blocks of them are drawn: n images in time say less than n images from anywhere. With
few scenes or blocks draws alone would give too narrow an interval, which is therefore stretched as
Student's t asks for; how alike scenes and blocks are to each other remains unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from veca.probe.metrics import HIGHER_IS_BETTER, mean_iou, over
from veca.probe.schedule import generator

Array = np.ndarray[Any, Any]
Interval = tuple[float, float]
"""(low, high)"""

DRAWS = 2000
SHARE = 0.95
FEWEST = 5
"""Images, scenes or blocks that a draw is made of; with fewer there is no interval."""
_NORMAL = 1.959964  # as many standard deviations to either side hold 95 % of a normal distribution
_AT_ONCE = 2**22  # counts of images held in memory


@dataclass(frozen=True)
class Sums:
    """What each test image adds to the sums of a score, and the score of such sums."""

    images: Array
    """float64 [images, terms]; zeros for an image that is not scored."""
    score: Callable[[Array], Array]
    """[draws, terms] -> [draws]; nan where nothing is there to score."""


def mean_sums(values: Sequence[float | None]) -> Sums:
    """Of a score that is the mean of a value by image; None is not scored."""
    terms = [(0.0, 0.0) if value is None else (float(value), 1.0) for value in values]
    return Sums(
        np.array(terms, dtype=np.float64).reshape(-1, 2),
        lambda sums: over(sums[:, 0], sums[:, 1]),
    )


def iou_sums(images: Sequence[Array]) -> Sums:
    """Of the mean intersection over union; see `Confusion.images`."""
    terms = np.array(images, dtype=np.float64)

    def score(sums: Array) -> Array:
        return mean_iou(*np.moveaxis(sums.reshape(-1, *terms.shape[1:]), 1, 0))

    return Sums(terms.reshape(len(terms), -1), score)


class Resampling:
    """Draws of the test images, again and again: the same ones whoever asks.

    Args:
        images: how many there are.
        groups: a number by image; those with the same number are drawn together.
        in_time: the images follow each other, and are drawn in blocks of about the root of their
            number that follow each other too; the last is followed by the first. Comes before
            `groups`.
        seed: of the draws.
    """

    def __init__(
        self,
        images: int,
        *,
        groups: Sequence[int] | None = None,
        in_time: bool = False,
        seed: int = 0,
    ) -> None:
        self.images = images
        self.seed = seed
        self.block = math.ceil(math.sqrt(images)) if in_time and images else 1
        found = groups if groups is not None and not in_time else range(images)
        self._unit = np.unique(np.asarray(found, dtype=np.int64), return_inverse=True)[1]
        self._units = int(self._unit.max()) + 1 if images else 0
        self.drawn = "blocks" if in_time else "images" if groups is None else "groups"
        self.per_draw = round(self._units / self.block)
        """Images, groups or blocks that each draw is made of."""

    def describe(self) -> dict[str, Any]:
        """For the record of a run, as JSON types."""
        table = {"share": SHARE, "draws": DRAWS, "drawn": self.drawn, "of": self.per_draw}
        return {**table, **({"block": self.block} if self.drawn == "blocks" else {})}

    def counts(self) -> Iterator[Array]:
        """How often each image is drawn, float64 [some draws, images], `DRAWS` of them in all."""
        random = generator(self.seed, "resample")
        at_once = max(1, _AT_ONCE // max(1, self.images))
        for begin in range(0, DRAWS, at_once):
            draws = min(at_once, DRAWS - begin)
            chosen = random.integers(0, self._units, (draws, self.per_draw))
            flat = (chosen + self._units * np.arange(draws)[:, None]).ravel()
            starts = np.bincount(flat, minlength=draws * self._units).reshape(draws, self._units)
            counts = np.zeros(starts.shape)
            for shift in range(self.block):
                counts += np.roll(starts, shift, axis=1)
            yield counts[:, self._unit]

    def scores(self, rows: Sequence[Sums]) -> list[Array]:
        """The score of each draw, float64 [DRAWS], of every row of a table; nan where there is too
        little to draw from."""
        for sums in rows:
            if len(sums.images) != self.images:
                raise ValueError(f"sums of {len(sums.images)} images, expected {self.images}")
        if self.per_draw < FEWEST:
            return [np.full(DRAWS, np.nan) for _ in rows]
        parts = [[sums.score(counts @ sums.images) for sums in rows] for counts in self.counts()]
        return [np.concatenate(scores) for scores in zip(*parts, strict=True)]

    def interval(self, scores: Array) -> Interval | None:
        """Of what `scores` gave, none of which is below 0; None where a draw has no score."""
        if not np.isfinite(scores).all():
            return None
        tail = (1 - SHARE) / 2
        low, middle, high = np.quantile(scores, [tail, 0.5, 1 - tail])
        stretch = _student(self.per_draw - 1) / _NORMAL
        stretch *= math.sqrt(self.per_draw / (self.per_draw - 1))
        least, most = middle - stretch * (middle - low), middle + stretch * (high - middle)
        return max(0.0, float(least)), float(most)

    def score_interval(self, scores: Array, metric: str) -> Interval | None:
        """Of a score itself, no further than it can go. None also where all draws give the same,
        such as a perfect score: images that were not seen need not be like that."""
        found = self.interval(scores)
        if found is None or np.ptp(scores) == 0:
            return None
        low, high = found
        return low, min(high, 1.0) if HIGHER_IS_BETTER[metric] else high

    def share_interval(self, scores: Array, reference: Array, metric: str) -> Interval | None:
        """Of the share that is kept of a reference; see `retention`."""
        ours_above = HIGHER_IS_BETTER[metric]
        return self.interval(over(scores, reference) if ours_above else over(reference, scores))


def _student(freedom: int) -> float:
    """How far to either side 95 % of Student's t reach: Fisher's expansion of the quantile, right
    to 0.3 % from 4 degrees of freedom on."""
    z = _NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
