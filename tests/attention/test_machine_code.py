"""GPU kernels as machine code, where there is no GPU: nothing spills, nothing exceeds a limit.

The table is what `python -m benchmarks kernels` compiled of every launch; here it is held to the
source it was made of, and a sample is compiled again. In a process of its own: in this one Triton
interprets.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kernels
from benchmarks.rows import read_csv
from veca.attention.knobs import resident

ROOT = Path(__file__).parents[2]
ROWS = read_csv(kernels.TABLE)
ARCHES = [f"sm_{arch}" for arch in kernels.SHARED_LIMIT]


def test_the_table_is_of_the_source_that_is_here():
    stale = sorted({row["kernel"] for row in ROWS if kernels.stale(row)})
    assert not stale, "run python -m benchmarks kernels"


@pytest.mark.parametrize("arch", ARCHES)
def test_nothing_spills_and_no_limit_is_exceeded(arch):
    rows = [row for row in ROWS if row["arch"] == arch]
    assert {row["kernel"] for row in rows} >= {"forward_kernel", "depthwise_kernel"}
    assert {len(row["pointers"].split("-")) for row in rows} == {1, 2}  # multiplicity, and none
    assert [fault for row in rows for fault in kernels.faults(row)] == []


def test_a_spill_and_too_much_shared_memory_are_faults():
    row = ROWS[0] | {"spilled": "8"}
    assert [fault.split(": ")[1] for fault in kernels.faults(row)] == ["spills 8 bytes a thread"]
    row = ROWS[0] | {"shared": str(int(ROWS[0]["limit"]) + 1)}
    assert "shared memory" in kernels.faults(row)[0]


def test_a_fingerprint_sees_code_and_what_it_calls_but_no_comments(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    code = (
        '"""Page."""\nSIZE = 3\n\ndef deep(x):\n    return x + SIZE\n\n'
        "def top(x):\n    return deep(x)\n"
    )
    texts = {
        "same": f"# a remark\n{code}".replace("def top(x):", 'def top(x):\n    """Words."""'),
        "aside": code + "\ndef unused(x):\n    return x\n",
        "constant": code.replace("SIZE = 3", "SIZE = 4"),
        "called": code.replace("x + SIZE", "x - SIZE"),
    }
    found = {}
    for name, text in {"plain": code, **texts}.items():
        (tmp_path / f"fingerprinted_{name}.py").write_text(text)
        found[name] = kernels.fingerprint(f"fingerprinted_{name}", "top")
    assert found["same"] == found["aside"] == found["plain"]
    assert len({found["plain"], found["constant"], found["called"]}) == 3


def test_a_check_tells_what_is_missing_and_what_differs(monkeypatch, capsys):
    row = ROWS[0]
    one = type("Job", (), {"arch": 80, "name": row["kernel"], "settings": row["settings"]})
    monkeypatch.setattr(kernels, "jobs", lambda: {row["key"]: one, "new": one})
    monkeypatch.setattr(kernels, "sample", lambda: [row["key"]])
    monkeypatch.setattr(kernels, "compile_key", lambda *_: row | {"registers": "1"})
    assert kernels.check({row["key"]: row}) == 1
    told = capsys.readouterr().err
    assert "not in the table" in told and "registers is 1" in told
    monkeypatch.setattr(kernels, "jobs", lambda: {row["key"]: one})
    monkeypatch.setattr(kernels, "compile_key", lambda *_: row)
    assert kernels.check({row["key"]: row}) == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_launch_is_in_the_table_and_a_sample_compiles_to_what_it_says(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "kernels", "--check"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_faster_launches_only_where_they_do_not_spill():
    def launch(name, cores, patches):
        return resident(name, 2, 64, 4, (9, 0), cores=cores, patches=patches)

    few_or_all, any_number = (launch("forward", cores, 1000) for cores in (64, 50))
    assert few_or_all != any_number
    assert launch("forward", 8, 1000) == few_or_all and launch("forward", 32, 1000) == any_number
    whole, with_a_rest = (launch("backward", 64, patches) for patches in (1024, 1000))
    assert whole.block > with_a_rest.block
    assert launch("backward", 50, 1024) == with_a_rest
