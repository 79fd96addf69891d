"""The measurements that are kept in the repository can be read, and name no one's machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.rows import RESULTS as RESULTS_FILES
from veca.probe import load_protocol, read_run
from veca.probe.protocol import from_dict

FOLDER = Path(__file__).parents[1] / "results" / "probes"
RESULTS = sorted(FOLDER.glob("**/results.json"))
BESIDE_TEACHERS = [path for path in RESULTS if not {"keep", "precision"} & set(path.parts)]
"""Those of merging are beside the same weights with all patches, at other sizes, and those of precisions
beside float32 in the same run, some on fewer photos."""


def _name(path: Path) -> str:
    return path.parent.relative_to(FOLDER).as_posix()


@pytest.mark.skipif(not RESULTS, reason="no results beside these tests")
class TestKept:
    @pytest.mark.parametrize("path", RESULTS, ids=_name)
    def test_whole_and_public(self, path):
        run = read_run(path)
        assert run.command.startswith(f"veca probe {run.task} ") and run.rows
        assert from_dict(run.protocol).tasks == (run.task,)
        own = load_protocol("quick").only(run.task)
        if run.protocol["name"] == "quick":  # with any other constant it would be called "quick+"
            for table in (own, run.protocol):
                table["extract"] = {**table["extract"], "batch": 0}
            assert run.protocol == own
        for file in path.parent.glob("results.*"):
            text = file.read_text()
            for word in ("/home/", "/work", "/tmp", "/root"):
                assert word not in text, f"{file.name} holds {word}"

    @pytest.mark.parametrize("path", RESULTS, ids=_name)
    def test_other_code_found_the_same(self, path):
        for row in read_run(path).rows:
            found = row.details.get("verified", {})
            assert found.get("equal_matrix", True) is True
            for name in ("miou", "rmse", "abs_rel", "top1"):
                if name in found:
                    assert found[name] == pytest.approx(row.metrics[name], rel=1e-9)
            for one in (found, *(v for v in found.values() if isinstance(v, dict))):
                assert one.get("equal_predictions", 1.0) > 0.999

    @pytest.mark.parametrize("path", BESIDE_TEACHERS, ids=_name)
    def test_comparable_with_the_shipped_weights_and_their_teacher(self, path):
        run = read_run(path)
        probe = re.sub(r"-\d+$", "", path.parent.name)  # without the seed
        kept = [FOLDER / "shipped" / "small" / probe, FOLDER / "intervals" / probe]
        beside = next((read_run(folder) for folder in kept if folder.is_dir()), run)
        assert run.dataset == beside.dataset and _asked(run) == _asked(beside)
        here, there = ([x for x in of.rows if x.role == "teacher"] for of in (run, beside))
        teachers = here or there
        assert [row.name for row in teachers] == ["efficientnet-lite2"]
        if run.task == "knn" and not run.protocol["knn"]["subset"]["test"]:  # all photos
            assert teachers[0].metrics["top1"] == pytest.approx(0.90, abs=0.015)


def test_the_flat_file_is_made_from_them(tmp_path):
    out = tmp_path / "probes.csv"
    assert main(["collect", str(FOLDER), "--out", str(out)]) == 0
    assert out.read_text() == (RESULTS_FILES / "probes.csv").read_text()


def _asked(run):
    """A run's protocol but for what may differ: its name, the seed, how many images at once."""
    kept = {key: value for key, value in run.protocol.items() if key not in ("name", "seed")}
    return {**kept, "extract": {**kept["extract"], "batch": 0}}
