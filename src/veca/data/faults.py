"""Bad images: skipped, counted, named, and too many of them stop the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from veca.errors import DataError, TooManyBadError

LIMIT = 0.01
"""The share of bad images above which a run stops."""

OnBad: TypeAlias = "Callable[[str, str], None]"
"""Called once for each bad image with its name and what is wrong with it."""

_FIRST_LOOK = 100
_SHOWN = 50

log = logging.getLogger("veca.data")


class Faults:
    """Counts what was read and what was bad in a set of `total` images.

    A run stops when more than `limit` of the whole set is known to be bad, or earlier, when the
    share among those read is above it by more than chance explains (three standard deviations).
    Nothing stops before 100 images (or the whole set) are read, and one bad image never does.
    """

    def __init__(self, total: int, *, limit: float = LIMIT, on_bad: OnBad | None = None) -> None:
        if not 0 <= limit <= 1:
            raise DataError(f"the share of bad images allowed must lie in 0..1; got {limit!r}.")
        self.total, self.limit, self.on_bad = total, limit, on_bad
        self.seen = 0
        self._bad: dict[str, str] = {}

    @property
    def bad(self) -> list[tuple[str, str]]:
        """(name, reason) of each bad image, once."""
        return list(self._bad.items())

    def note(self, read: int, bad: Sequence[Sequence[str]]) -> None:
        """Count images that were read, and name those of them that were bad."""
        self.seen += read
        for name, reason in bad:
            if name in self._bad:
                continue
            self._bad[name] = reason
            if self.on_bad is not None:
                self.on_bad(name, reason)
            else:
                log.warning("image skipped: %s: %s", name, reason)
        if bad and self.seen >= min(_FIRST_LOOK, self.total):
            self._check()

    def finish(self) -> None:
        """Every image was read once: the share is known."""
        if len(self._bad) > max(1, self.limit * self.total):
            self._stop()

    def _check(self) -> None:
        expected = self.limit * min(self.seen, self.total)
        surely = expected + 3 * math.sqrt(expected) + 1
        if len(self._bad) > max(1, min(self.limit * self.total, surely)):
            self._stop()

    def _stop(self) -> None:
        shown = "; ".join(f"{name}: {reason}" for name, reason in self.bad[:_SHOWN])
        if len(self._bad) > _SHOWN:
            shown += f"; and {len(self._bad) - _SHOWN} more, named in the log"
        raise TooManyBadError(
            f"{len(self._bad)} of {min(self.seen, self.total)} images read are bad, above the "
            f"limit of {self.limit:.3g}; repair or remove them, or raise bad_limit (of a "
            f"distillation: data.bad_limit). They are: {shown}.",
            self.bad,
        )
