"""The loss against its definition, written out with loops and plain numbers."""

from __future__ import annotations

import math

import pytest
import torch

from veca.distill.losses import classifier_kl, cosine_distance, distillation_loss


def plain_cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def test_loss_is_the_published_sum() -> None:
    cls, target_cls = torch.randn(3, 5), torch.randn(3, 5)
    patches, target_patches = torch.randn(3, 4, 6), torch.randn(3, 4, 6)
    found = distillation_loss(cls, patches, target_cls, target_patches, dense=0.7, mse=1.3)

    wanted_cls = sum(
        1 - plain_cosine(a, b) for a, b in zip(cls.tolist(), target_cls.tolist(), strict=True)
    )
    pairs = list(
        zip(patches.flatten(0, 1).tolist(), target_patches.flatten(0, 1).tolist(), strict=True)
    )
    cos = sum(1 - plain_cosine(a, b) for a, b in pairs) / len(pairs)
    mse = sum((x - y) ** 2 for a, b in pairs for x, y in zip(a, b, strict=True)) / (len(pairs) * 6)
    assert float(found.cls) == pytest.approx(wanted_cls / 3, abs=1e-6)
    assert float(found.dense_cos) == pytest.approx(cos, abs=1e-6)
    assert float(found.dense_mse) == pytest.approx(mse, abs=1e-5)
    assert float(found.total) == pytest.approx(wanted_cls / 3 + 0.7 * (cos + 1.3 * mse), abs=1e-5)


def test_defaults_are_published() -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 4, 3)
    found = distillation_loss(a, b, -a, 2 * b)
    assert float(found.cls) == pytest.approx(2.0, abs=1e-6)
    assert float(found.dense_cos) == pytest.approx(0.0, abs=1e-6)
    assert float(found.total) == pytest.approx(2 + float(b.square().mean()), abs=1e-5)


def test_loss_is_float32_whatever_comes_in() -> None:
    a, b = torch.randn(2, 3, dtype=torch.bfloat16), torch.randn(2, 4, 3, dtype=torch.bfloat16)
    assert all(part.dtype == torch.float32 for part in distillation_loss(a, b, a, b))


def test_a_zero_vector_has_a_finite_gradient() -> None:
    zero = torch.zeros(2, 4, requires_grad=True)
    cosine_distance(zero, torch.randn(2, 4)).mean().backward()
    assert zero.grad is not None and bool(torch.isfinite(zero.grad).all())


def test_kl_is_the_teachers_against_the_students() -> None:
    student, teacher = torch.randn(3, 5), torch.randn(3, 5)
    p, q = teacher.softmax(1).tolist(), student.softmax(1).tolist()
    wanted = [
        sum(a * math.log(a / b) for a, b in zip(x, y, strict=True))
        for x, y in zip(p, q, strict=True)
    ]
    assert classifier_kl(student, teacher).tolist() == pytest.approx(wanted, abs=1e-6)
    assert classifier_kl(teacher, teacher).tolist() == pytest.approx([0] * 3, abs=1e-6)
