"""Many strings in two arrays.

A list of two million paths costs a quarter of a gigabyte in every worker process, because counting
references makes each worker copy it. Two arrays are shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from veca.errors import DataError


class Names(Sequence[str]):
    """An immutable sequence of strings, kept as UTF-8 bytes and the end of each."""

    def __init__(self, text: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        lists = all(isinstance(x, np.ndarray) and x.ndim == 1 for x in (text, ends))
        if not lists or (len(ends) and int(ends[-1]) != len(text)):
            raise DataError("names: the bytes and the ends do not belong together.")
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        # A file name may hold bytes that are no UTF-8; surrogateescape brings them back unharmed.
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # checks the range and counts from the end
        start = int(self.ends[place - 1]) if place else 0
        raw = self.text[start : int(self.ends[place])].tobytes()
        return raw.decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def pick(self, indices: Iterable[int]) -> Names:
        """The names at some places."""
        return Names.of(self[i] for i in indices)
