"""Numbers as a user writes them in an option, and as we write them to a user."""

from __future__ import annotations

from veca.errors import InputError


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
