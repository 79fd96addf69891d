"""Limits that stand beside the fields of settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest

from veca._util.limits import Count, Whole, above_zero, between, check_limits, one_of, ordered
from veca.errors import InputError


@dataclass
class Part:
    weight: Annotated[float, above_zero] = 1.0


@dataclass
class Everything:
    steps: Whole = 0
    sizes: tuple[Count, ...] = (1, 2)
    by_size: dict[int, Count] = field(default_factory=dict)
    share: Annotated[float, between(0.0, 1.0)] = 0.5
    pair: Annotated[tuple[float, float], ordered(above=0.0)] = (1.0, 2.0)
    kind: Annotated[str, one_of(("cosine", "poly"))] = "poly"
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    named: dict[str, Part] = field(default_factory=dict)


def test_what_is_within_its_limits_passes():
    part = Part()
    check_limits(
        Everything(part=part, parts=(part,), named={"a": part}, by_size={8: 1}), InputError
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Everything(steps=-1), "steps must be at least 0, got -1."),
        (Everything(sizes=(1, 0)), "sizes must be at least 1, got 0."),
        (Everything(by_size={8: 0}), "by_size.8 must be at least 1, got 0."),
        (Everything(share=1.5), "share must be from 0.0 to 1.0, got 1.5."),
        (Everything(pair=(2.0, 1.0)), "pair must be [low, high], got [2.0, 1.0]."),
        (Everything(kind="cosin"), "unknown kind 'cosin'; did you mean 'cosine'?"),
        (Everything(part=Part(0.0)), "part.weight must be above 0, got 0.0."),
        (Everything(parts=(Part(), Part(0.0))), "parts.1.weight must be above 0"),
        (Everything(named={"a": Part(0.0)}), "named.a.weight must be above 0"),
    ],
)
def test_what_is_outside_is_told_with_its_place(settings, message):
    with pytest.raises(InputError) as caught:
        check_limits(settings, InputError)
    assert str(caught.value).startswith(message)
    with pytest.raises(InputError) as caught:
        check_limits(settings, InputError, "run")
    assert "run." in str(caught.value)
