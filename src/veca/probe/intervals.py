"""How much a score depends on the images it was measured on: 95 % intervals, by resampling them.

A score is made of sums over the test images, so to draw the images anew is to count each as often
as it was drawn. All rows of a table are counted with the same draws: the share that one keeps of
another has an interval of its own, and a budget that is a little worse on every image is told
apart from one that is worse by chance, however wide the intervals of the two scores are.

Images of one scene are drawn together. Where images follow each other in time, neighbours are
alike, and blocks of them are drawn: n images in time say less than n images from anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from veca.probe.metrics import HIGHER_IS_BETTER, mean_iou
from veca.probe.schedule import generator

Array = np.ndarray[Any, Any]
Interval = tuple[float, float]

DRAWS = 2000
SHARE = 0.95
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

    def score(sums: Array) -> Array:
        return _over(sums[:, 0], sums[:, 1])

    return Sums(np.array(terms, dtype=np.float64).reshape(-1, 2), score)


def iou_sums(images: Sequence[Array]) -> Sums:
    """Of the mean intersection over union; see `Confusion.images`."""
    terms = np.array(images, dtype=np.float64)

    def score(sums: Array) -> Array:
        return mean_iou(*np.moveaxis(sums.reshape(-1, *terms.shape[1:]), 1, 0))

    return Sums(terms.reshape(len(terms), -1), score)


class Resampling:
    """Draws of the same test images, again and again: the same ones whoever asks.

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
        self.block = math.ceil(math.sqrt(images)) if in_time else 1
        found = groups if groups is not None and not in_time else range(images)
        self._unit = np.unique(np.asarray(found, dtype=np.int64), return_inverse=True)[1]
        self.units = int(self._unit.max()) + 1 if images else 0
        self.drawn = "blocks" if in_time else "images" if groups is None else "groups"

    def describe(self) -> dict[str, Any]:
        """For the record of a run, as JSON types."""
        table = {"share": SHARE, "draws": DRAWS, "drawn": self.drawn, "units": self.units}
        return {**table, **({"block": self.block} if self.drawn == "blocks" else {})}

    def counts(self) -> Iterator[Array]:
        """How often each image is drawn, float64 [some draws, images], `DRAWS` of them in all."""
        random = generator(self.seed, "resample")
        per_draw = -(-self.units // self.block)
        at_once = max(1, _AT_ONCE // max(1, self.images))
        for begin in range(0, DRAWS, at_once):
            draws = min(at_once, DRAWS - begin)
            chosen = random.integers(0, self.units, (draws, per_draw))
            flat = (chosen + self.units * np.arange(draws)[:, None]).ravel()
            counts = np.bincount(flat, minlength=draws * self.units).reshape(draws, self.units)
            blocks = np.zeros(counts.shape)
            for shift in range(self.block):
                blocks += np.roll(counts, shift, axis=1)
            yield blocks[:, self._unit]

    def scores(self, sums: Sums) -> Array:
        """The score of each draw, float64 [DRAWS]; nan where there is nothing to choose from."""
        if len(sums.images) != self.images:
            raise ValueError(f"sums of {len(sums.images)} images, expected {self.images}")
        if self.units < 2:
            return np.full(DRAWS, np.nan)
        return np.concatenate([sums.score(counts @ sums.images) for counts in self.counts()])


def interval(scores: Array) -> Interval | None:
    """The middle 95 % of what was drawn; None where a draw has no score."""
    if not np.isfinite(scores).all():
        return None
    tail = 50 * (1 - SHARE)
    low, high = np.percentile(scores, [tail, 100 - tail])
    return float(low), float(high)


def kept(scores: Array, reference: Array, metric: str) -> Interval | None:
    """Of the share that is kept of a reference with the same draws; see `retention`."""
    ours_above = HIGHER_IS_BETTER[metric]
    return interval(_over(scores, reference) if ours_above else _over(reference, scores))


def _over(above: Array, below: Array) -> Array:
    """above / below; nan where that is 0."""
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)
