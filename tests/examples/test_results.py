"""The tables of docs/fine-tuning.md are what the results files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "finetune"
TASKS = ("classification", "segmentation")
BUDGETS = ("8", "16", "24", "32", "40", "48", "56", "64")


def _read(task: str, length: str, kind: str) -> dict:
    return json.loads((RESULTS / f"{task}{length}-{kind}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("length", "row"), [("", "first table"), ("-long", "second table")])
def test_tables_are_those_of_the_files(length, row):
    text = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    scores = [_read(task, length, kind)["scores"] for task in TASKS for kind in ("nested", "full")]
    for cores in BUDGETS:
        assert f"| {cores} | {' | '.join(f'{one[cores]:.3f}' for one in scores)} |" in text
    kept = [f"{one['8'] / one['64']:.1%}".replace("%", " %") for one in scores]
    assert f"| {row} | {' | '.join(kept)} |" in text


@pytest.mark.parametrize("length", ["", "-long"])
@pytest.mark.parametrize("task", TASKS)
def test_columns_differ_in_nested_dropout_alone(task, length):
    nested, full = (_read(task, length, kind) for kind in ("nested", "full"))
    assert (nested["nested"], full["nested"]) == (True, False)
    for name in ("metric", "weights", "weights_sha256", "settings", "dataset", "images"):
        assert nested[name] == full[name]
