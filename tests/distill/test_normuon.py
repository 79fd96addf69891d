"""NorMuon against a plain definition: singular values, rows, signs; and that it descends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from veca.distill import DistillError, NorMuon, polar_express
from veca.distill.normuon import POLAR_EXPRESS, even_out


def plain_polar(matrix: np.ndarray) -> np.ndarray:
    """The orthogonal factor, by singular values."""
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    return u @ vt


def plain_iteration(matrix: np.ndarray) -> np.ndarray:
    """What five steps of the iteration give: its polynomials, applied to the singular values."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s = s / (np.linalg.norm(matrix) * 1.01 + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return u @ np.diag(s) @ vt


def plain_steps(weight, grads, *, lr, mu, beta2, wd, nesterov=True, cautious=True):
    """NorMuon on one matrix in float64, by singular values."""
    w = weight.astype(np.float64)
    m, v = np.zeros_like(w), np.zeros((w.shape[0], 1))
    for g in grads:
        m = mu * m + g
        o = plain_iteration(g + mu * m if nesterov else m)
        v = beta2 * v + (1 - beta2) * (o**2).mean(axis=1, keepdims=True)
        e = o / (np.sqrt(v) + 1e-8)
        e *= np.linalg.norm(o) / np.linalg.norm(e)
        keep = (w * e >= 0) if cautious else np.ones_like(w, bool)
        w = w - lr * wd * w * keep - lr * 0.2 * math.sqrt(max(w.shape)) * e
    return w


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12), (3, 6, 9)])
def test_polar_factor_has_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape)
    found = polar_express(matrices)
    assert found.shape == matrices.shape
    values = torch.linalg.svdvals(found)
    assert bool(((values - 1).abs() < 0.15).all())
    exact = np.stack([plain_polar(m) for m in matrices.reshape(-1, *shape[-2:]).numpy()])
    assert np.abs(found.reshape(exact.shape).numpy() - exact).max() < 0.1


def test_polar_factor_of_matrices_of_any_scale() -> None:
    matrix = torch.randn(6, 6)
    for scale in (1e-3, 1e6):
        assert torch.allclose(polar_express(matrix * scale), polar_express(matrix), atol=0.01)


def test_iteration_brings_small_singular_values_to_one() -> None:
    x = torch.logspace(-3, 0, 200, dtype=torch.float64) / 1.01
    for a, b, c in POLAR_EXPRESS:
        x = a * x + b * x**3 + c * x**5
    assert bool(((x - 1).abs() < 0.15).all())


def test_bfloat16_is_good_enough() -> None:
    found = polar_express(torch.randn(16, 32), dtype=torch.bfloat16)
    values = torch.linalg.svdvals(found.float())
    assert found.dtype == torch.bfloat16 and bool(((values - 1).abs() < 0.15).all())


def test_zero_stays_zero() -> None:
    assert bool((polar_express(torch.zeros(3, 4)) == 0).all())


def test_even_out_gives_rows_the_same_length_and_keeps_the_whole() -> None:
    orthogonal = torch.randn(2, 5, 7) * torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])[:, None]
    evened, second = even_out(orthogonal, torch.zeros(2, 5, 1), beta2=0.95)
    rows = evened.norm(dim=-1)
    assert torch.allclose(rows, rows[:, :1].expand_as(rows), rtol=1e-4)
    assert torch.allclose(evened.flatten(1).norm(dim=1), orthogonal.flatten(1).norm(dim=1))
    assert torch.allclose(second, 0.05 * orthogonal.square().mean(-1, keepdim=True))


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_follow_the_definition(shape: tuple[int, int], nesterov: bool) -> None:
    torch.manual_seed(1)
    weight, grads = torch.randn(shape), [torch.randn(shape) for _ in range(4)]
    p = torch.nn.Parameter(weight.clone())
    options = {"lr": 0.1, "mu": 0.9, "beta2": 0.95, "nesterov": nesterov}
    optimizer = NorMuon([p], weight_decay=0.1, **options)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    wanted = plain_steps(weight.numpy(), [g.numpy() for g in grads], wd=0.1, **options)
    assert np.allclose(p.detach().numpy(), wanted, atol=1e-4)


def test_an_update_is_as_large_as_adamws() -> None:
    p = torch.nn.Parameter(torch.zeros(24, 48))
    p.grad = torch.randn(24, 48)
    NorMuon([p], lr=1.0).step()
    assert float(p.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.1)


def test_cautious_decay_spares_weights_that_the_update_grows() -> None:
    p = torch.nn.Parameter(torch.randn(6, 6))
    before = p.detach().clone()
    grad = torch.randn(6, 6)
    results = []
    for wd in (0.0, 0.5):
        with torch.no_grad():
            p.copy_(before)
        p.grad = grad.clone()
        NorMuon([p], lr=0.1, weight_decay=wd).step()
        results.append(p.detach().clone())
    update = before - results[0]
    decayed = results[0] - results[1]
    shrinking = before * update >= 0
    assert bool(shrinking.any()) and not bool(shrinking.all())
    assert torch.allclose(decayed[shrinking], 0.1 * 0.5 * before[shrinking], atol=1e-6)
    assert bool((decayed[~shrinking].abs() < 1e-7).all())


def test_plain_decay_shrinks_all() -> None:
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.zeros(3, 3)
    NorMuon([p], lr=0.1, weight_decay=0.5, cautious=False).step()
    assert torch.allclose(p.detach(), torch.full((3, 3), 0.95))


def test_together_is_the_same_as_one_by_one() -> None:
    torch.manual_seed(2)
    shapes = [(5, 8), (8, 5), (5, 8), (8, 5), (5, 8), (4, 4)]
    start = [torch.randn(s) for s in shapes]
    together = [torch.nn.Parameter(t.clone()) for t in start]
    apart = [torch.nn.Parameter(t.clone()) for t in start]
    optimizers = [NorMuon(together, lr=0.1, weight_decay=0.1)]
    optimizers += [NorMuon([p], lr=0.1, weight_decay=0.1) for p in apart]
    for _ in range(3):
        for a, b in zip(together, apart, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(together, apart, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_it_descends_a_quadratic() -> None:
    target = torch.randn(6, 10)
    p = torch.nn.Parameter(torch.zeros(6, 10))
    optimizer = NorMuon([p], lr=0.2)
    first = float(target.square().mean())
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - step / 200)
        optimizer.zero_grad()
        (p - target).square().mean().backward()
        optimizer.step()
    assert float((p - target).square().mean().detach()) < 1e-3 * first


def test_only_matrices_are_taken() -> None:
    with pytest.raises(DistillError, match="2D"):
        NorMuon([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(DistillError, match=r"\bmu\b"):
        NorMuon([torch.nn.Parameter(torch.zeros(3, 3))], mu=1.0)
