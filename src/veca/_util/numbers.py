"""Numbers as a user writes them in an option, and as we write them to a user."""

from __future__ import annotations

import re

from veca.errors import InputError, VecaError

_UNITS = {
    "": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": 2**10, "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
}  # fmt: skip


def count(number: int, what: str, several: str | None = None) -> str:
    """'1 image', '2,000 images', '2 entries'."""
    return f"{number:,} {what if number == 1 else several or what + 's'}"


def parse_numbers(text: str, what: str) -> list[int]:
    """'8,16,64' -> [8, 16, 64]; at least one whole number of at least 1."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise InputError(
            f"{what} must be whole numbers of at least 1, such as 8,32,64; got {text!r}."
        )
    return numbers


def parse_bytes(text: int | str, error: type[VecaError] = InputError, *, least: int = 1) -> int:
    """A number of bytes: 65536, "64MiB", "500 MB", "1g"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise error(f"{text!r} is no size in bytes; write it like 64MiB, 500MB or 1GiB.")
    number = int(float(match[1]) * _UNITS[match[2].lower()])
    if number < least:
        raise error(f"{text!r} is too few bytes; write a size like 64MiB, 500MB or 1GiB.")
    return number


def gigabytes(number: float) -> str:
    """12.3 GB, 340 MB, 12 kB: decimal units, as disks and people count."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            value = number / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{number:.0f} bytes"
