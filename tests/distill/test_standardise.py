"""Targets at mean 0 and deviation 1, and the way back."""

from __future__ import annotations

import pytest
import torch

from veca.distill import DistillError, load_targets
from veca.distill.standardise import (
    Moments,
    RunningMoments,
    TargetStatistics,
    find_targets,
    save_targets,
)


def statistics(cls: torch.Tensor, dense: torch.Tensor) -> TargetStatistics:
    return TargetStatistics(*(_moments([part]) for part in (cls, dense)))


def _moments(parts: list[torch.Tensor]) -> Moments:
    running = RunningMoments()
    for part in parts:
        running.add(part)
    return running.moments()


def test_moments_are_those_of_all_values() -> None:
    features = torch.randn(10, 7, 4) * torch.tensor([1.0, 5.0, 20.0, 3.0]) + 3
    found = _moments([features[:3], features[3:]])
    flat = features.flatten(0, 1)
    assert torch.allclose(found.mean, flat.mean(0), atol=1e-4)
    assert torch.allclose(found.std, flat.std(0, correction=0), rtol=1e-4)
    once = found.standardise(features).flatten(0, 1)
    assert torch.allclose(once.mean(0), torch.zeros(4), atol=1e-4)
    assert torch.allclose(once.std(0, correction=0), torch.ones(4), rtol=1e-4)
    assert torch.allclose(found.unstandardise(found.standardise(features)), features, atol=1e-4)


def test_a_dead_channel_does_not_explode() -> None:
    features = torch.randn(50, 3) * torch.tensor([1.0, 0.0, 1.0])
    found = _moments([features])
    assert bool((found.std > 1e-3).all())
    assert bool(torch.isfinite(found.standardise(features)).all())


def test_file_there_and_back(tmp_path) -> None:
    one = statistics(torch.randn(9, 4), torch.randn(9, 5, 6))
    save_targets({"a/b": one, "c": one}, tmp_path)
    back = load_targets(tmp_path)
    assert sorted(back) == ["a/b", "c"]
    for part, other in zip(back["a/b"], one, strict=True):
        assert torch.equal(part.mean, other.mean) and torch.equal(part.std, other.std)
    cls, patches = one.unstandardise(torch.zeros(2, 4), torch.zeros(2, 3, 6))
    assert torch.allclose(cls[0], one.cls.mean) and torch.allclose(patches[0, 0], one.dense.mean)


def test_targets_that_do_not_fit_are_refused(tmp_path) -> None:
    save_targets({"a": statistics(torch.randn(9, 4), torch.randn(9, 4))}, tmp_path)
    with pytest.raises(DistillError, match="'b'"):
        find_targets(["b"], [(4, 4)], tmp_path)
    with pytest.raises(DistillError, match=r"\(5, 5\)"):
        find_targets(["a"], [(5, 5)], tmp_path)
    with pytest.raises(DistillError, match="/none"):
        load_targets(tmp_path / "none")
    with pytest.raises(DistillError, match="features"):
        RunningMoments().moments()


def test_features_that_never_change_are_brought_to_zero() -> None:
    moments = RunningMoments()
    moments.add(torch.full((4, 3), 2.0))
    assert torch.equal(moments.moments().standardise(torch.full((2, 3), 2.0)), torch.zeros(2, 3))
