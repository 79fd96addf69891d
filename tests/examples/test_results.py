"""The table of docs/fine-tuning.md is what the results files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "finetune"
COLUMNS = (
    "classification-nested", "classification-full", "segmentation-nested", "segmentation-full"
)  # fmt: skip


@pytest.fixture
def results() -> dict[str, dict]:
    return {
        name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in COLUMNS
    }


def test_table_is_that_of_the_files(results):
    text = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    for cores in ("8", "16", "24", "32", "40", "48", "56", "64"):
        cells = [f"{results[name]['scores'][cores]:.3f}" for name in COLUMNS]
        assert f"| {cores} | {' | '.join(cells)} |" in text


def test_columns_differ_in_nested_dropout_alone(results):
    for task in ("classification", "segmentation"):
        nested, full = (results[f"{task}-{kind}"] for kind in ("nested", "full"))
        assert (nested["nested"], full["nested"]) == (True, False)
        for name in ("metric", "weights", "weights_sha256", "settings", "dataset", "images"):
            assert nested[name] == full[name]
