"""Features, scores, checkpoints and exported files are those of 0.1, to the bit but for ONNX.

`pinned.json` was made by 0.1 (see `make_pinned.py`). Hashes hold on the kind of machine that made
it; elsewhere matrix products round differently, and sampled numbers are compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import make_pinned

RECORD = json.loads((Path(__file__).parent / "pinned.json").read_text())
TO_THE_BIT = RECORD["machine"].items() >= make_pinned.machine().items()
TOLERANCE = {"probe": 0.05, "distill": 2e-3}
"""Of scores that were trained for: rounding grows with the steps."""
ARRANGED = "onnx "
"""What ONNX files answer: since 0.2 their work is in another order."""


@pytest.mark.slow
@pytest.mark.parametrize("case", RECORD["cases"])
def test_as_in_0_1(case: str, tmp_path: Path) -> None:
    if case == "embed":
        pytest.importorskip("pyarrow")
    if case == "export":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    wanted = RECORD["cases"][case]
    found = make_pinned.described(make_pinned.CASES[case](tmp_path))
    assert list(found) == list(wanted)
    for name, (dtype, shape, digest, sample) in wanted.items():
        assert found[name][:2] == [dtype, shape], name
        if (TO_THE_BIT and not name.startswith(ARRANGED)) or dtype == "text":
            assert found[name][2] == digest, name
        else:
            tolerance = TOLERANCE.get(case, 2e-3 if dtype == "float16" else 2e-4)
            assert found[name][3] == pytest.approx(sample, rel=tolerance, abs=tolerance), name
