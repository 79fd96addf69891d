"""What the page remembers: each visitor's photo, and the last few photos as a model sees them.

A photo is megabytes and stays for as long as there is room; what a model made of it is many times
larger and is computed again when it is needed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from veca.app.content import Limits, Look, Photo, look
from veca.app.model_cache import LoadedModel
from veca.viz.similarity import Point

TOTAL_BYTES = 256 * 2**20
"""Of the photos of all visitors; those of one client may have half of it."""
_LOOKS = 4


@dataclass(frozen=True, eq=False)
class Visit:
    """What one visitor is looking at: a photo, seen by some weights at a size."""

    photo: Photo
    weights: str
    size: int
    point: Point | None = None
    """Where the photo was clicked, (x, y) in 0..1."""

    @property
    def bytes(self) -> int:
        width, height = self.photo.image.size
        return 3 * width * height


class Visitors:
    """Visits by session. The longest unseen are forgotten, those of a greedy client first."""

    def __init__(self, total: int = TOTAL_BYTES) -> None:
        self.total = total
        self._visits: OrderedDict[str, tuple[str, Visit]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._visits)

    def get(self, session: str) -> Visit | None:
        with self._lock:
            if session not in self._visits:
                return None
            self._visits.move_to_end(session)
            return self._visits[session][1]

    def keep(self, session: str, client: str, visit: Visit) -> None:
        """Remember a visit of a client, in place of the session's last one."""
        with self._lock:
            self._visits.pop(session, None)
            self._visits[session] = (client, visit)
            own = [name for name, (whose, _) in self._visits.items() if whose == client]
            self._forget(own, self.total // 2)
            self._forget(list(self._visits), self.total)

    def _forget(self, sessions: list[str], most: int) -> None:
        """Drop the first of some sessions until the others hold at most so many bytes."""
        held = sum(self._visits[session][1].bytes for session in sessions)
        for session in sessions[:-1]:
            if held <= most:
                break
            held -= self._visits.pop(session)[1].bytes


class Looks:
    """The last few photos as a model sees them. Call it while the model is in use."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._looks: OrderedDict[tuple[int, int, int], Look] = OrderedDict()

    def __len__(self) -> int:
        return len(self._looks)

    def at(self, visit: Visit, entry: LoadedModel) -> Look:
        """What a visitor is looking at, computed if it is not among the last."""
        # Both are kept alive by the look, so their ids are not used again.
        key = (id(visit.photo), id(entry.model), visit.size)
        if key not in self._looks:
            self._looks[key] = look(entry, visit.photo, visit.size, self.limits)
            while len(self._looks) > _LOOKS:
                self._looks.popitem(last=False)
        self._looks.move_to_end(key)
        return self._looks[key]
