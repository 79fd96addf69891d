"""It really learns, at every budget, and nested dropout is why small budgets work."""

from __future__ import annotations

import pytest

from distill.small import run
from veca.distill import read_metrics


def learn(out, **nested):
    """A hundred steps on forty images; losses at the start and, by budget, at the end."""
    records = run(
        out,
        student={"config": {"depth": 2, "width": 48, "heads": 2, "num_cores": 64}},
        teachers=[{"name": "filters", "standardise": True, "standardise_images": 40}],
        data={
            "source": "photos:40",
            "validation": "photos:40",  # the same images: this is about learning them
            "augment": {
                "kind": "rrc",
                "area": [0.9, 1.0],
                "brightness": 0.0,
                "contrast": 0.0,
                "saturation": 0.0,
            },
        },
        optimizer={"lr": 5e-3},
        schedule={"steps": 120, "warmup": 10, "batch": 20, "size": 48},
        validation={"budgets": [8, 64], "batch": 40},
        nested=nested,
    )
    grid = read_metrics(out, "validation")[-1]["grid"]
    return records[0]["loss"], {row["cores"]: row for row in grid}


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    return learn(tmp_path_factory.mktemp("nested"))


@pytest.mark.slow
def test_loss_falls_to_a_third_at_small_and_large_budgets(nested) -> None:
    first, by_budget = nested
    for cores in (8, 64):
        assert by_budget[cores]["loss"] < first / 3
        assert by_budget[cores]["cls_cos"] > 0.7


@pytest.mark.slow
def test_without_nested_dropout_a_small_budget_is_worse(nested, tmp_path) -> None:
    _, with_dropout = nested
    _, without = learn(tmp_path, budgets=[64], weights=[1.0])
    assert without[64]["cls_cos"] > 0.7  # it learned as well, at the budget it was trained at
    assert without[8]["cls_cos"] < with_dropout[8]["cls_cos"] - 0.05
    assert without[8]["loss"] > with_dropout[8]["loss"] + 0.05
