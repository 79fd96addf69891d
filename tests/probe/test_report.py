"""Tables, plots and the page that joins runs."""

from __future__ import annotations

import base64
import csv
import io
import re
import sys

import pytest
from PIL import Image
from rich.console import Console

from veca.errors import MissingExtraError
from veca.probe import ProbeError, load_protocol, write_report, write_tables
from veca.probe.plot import best_text, captions, curves, draw, limits, make_figure, plot
from veca.probe.record import Row, Run, write_run
from veca.probe.report import group_runs
from veca.probe.table import cells, csv_text, dials, header, markdown, ordered, rich_table

MACHINE = {
    "cpu": "Some CPU", "cpu_count": 2, "gpu": "", "os": "Linux", "python": "3.11", "torch": "2.13",
    "veca": "0.1", "date": "2026-01-02T03:04:05+00:00", "threads": 2,
}  # fmt: skip


def row(name="small", role="student", cores=8, metrics=None, **changes) -> Row:
    fields = {
        "size": 224, "input": (224, 224), "grid": (14, 14), "retention_teacher": 0.9,
        "retention_full": 0.95, "interactions": 3200, "flops": 4_560_000_000, "ms": 7.25,
        "spread_ms": 0.5, "details": {"features": "cls"},
    }  # fmt: skip
    return Row(
        name=name,
        role=role,
        cores=cores,
        metrics=metrics or {"top1": 0.81},
        **{**fields, **changes},
    )


def run(
    task="knn", rows=None, dataset="oxford-pets", protocol="quick", protocol_table=None, **changes
) -> Run:
    rows = rows or [
        row(cores=64, metrics={"top1": 0.85}, interactions=25000, ms=9.0),
        row(cores=8),
        row("teacher", "teacher", None, {"top1": 0.9}, retention_full=None, interactions=None),
    ]
    fields = {
        "dataset": {"name": dataset, "classes": 37},
        "protocol": protocol_table or load_protocol(protocol).only(task),
        "backbones": {"small": {}},
        "notes": ["only 3 images"],
        "seconds": {"features": 10.0, "total": 12.0},
        "cache": {"decoded": 5, "computed": 1, "reused": 0, "damaged": 0},
        "machine": MACHINE,
        "command": "veca probe knn --data pets --dataset oxford-pets --weights small",
    }
    return Run(task=task, rows=rows, **{**fields, **changes})


def known_run() -> Run:
    """With intervals."""
    rows = [
        row(cores=64, metrics={"top1": 0.84}, interactions=25000, ms=9.0, interval=(0.82, 0.86),
            retention_full=1.0, interval_full=(1.0, 1.0)),
        row(cores=8, metrics={"top1": 0.8}, interval=(0.78, 0.82), retention_full=0.98,
            interval_full=(0.97, 0.99)),
        row("teacher", "teacher", None, {"top1": 0.9}, retention_full=None, interactions=None,
            interval=(0.87, 0.93)),
    ]  # fmt: skip
    return run(rows=rows)


def depth_run() -> Run:
    metrics = {"rmse": 0.41234, "abs_rel": 0.111, "delta1": 0.9}
    return run("depth", [row(metrics=metrics, size=0, input=(240, 320))], dataset="nyuv2")


class TestTable:
    def test_order_the_teacher_first_then_budgets(self):
        assert [r.label for r in ordered(run().rows)] == ["teacher", "small C=8", "small C=64"]

    def test_cells(self):
        found = dict(zip(header(run()), cells(run(), run().rows[1]), strict=True))
        assert found == {
            "backbone": "small", "cores": "8", "px": "224", "top-1 %": "81.00",
            "95 %": "", "of teacher": "90.0 %", "of full": "95.0 %", "interactions": "3,200",
            "GFLOPs": "4.56", "ms": "7.2",
        }  # fmt: skip

    def test_depth_in_metres_and_own_size(self):
        made = depth_run()
        found = dict(zip(header(made), cells(made, made.rows[0]), strict=True))
        assert found["RMSE m"] == "0.4123" and found["delta1 %"] == "90.00"
        assert found["px"] == "240x320"

    def test_nothing_to_say_is_empty(self):
        bare = row(retention_teacher=None, interactions=None, flops=None, ms=None, cores=None)
        found = dict(zip(header(run()), cells(run(), bare), strict=True))
        assert found["of teacher"] == found["interactions"] == found["ms"] == found["cores"] == ""

    def test_terminal(self):
        out = Console(file=io.StringIO(), width=160)
        out.print(rich_table(run()))
        text = out.file.getvalue()
        assert "knn on oxford-pets, protocol quick" in text and "81.00" in text

    def test_nothing_is_lost_on_80_columns(self):
        for made in (run(), depth_run()):
            out = Console(file=io.StringIO(), width=80)
            out.print(rich_table(made))
            text = out.file.getvalue()
            assert "small" in text and "…" not in text
            assert all(part in text for part in ("7.2", "90.0 %", "3,200"))

    def test_shares_of_tokens_have_a_column_where_something_merges(self):
        made = run(rows=[row(cores=64, keep=share) for share in (1.0, 0.35, "auto")])
        assert [r.keep for r in ordered(made.rows)] == ["auto", 0.35, 1.0]
        shown = [dict(zip(header(made), cells(made, r), strict=True)) for r in made.rows]
        assert [found["keep"].strip() for found in shown] == ["1", "0.35", "auto"]
        assert "keep" not in header(run(rows=[row(keep=1.0)]))
        out = Console(file=io.StringIO(), width=80)
        out.print(rich_table(made))
        assert "0.35" in out.file.getvalue() and "…" not in out.file.getvalue()
        assert [r["keep"] for r in csv.DictReader(io.StringIO(csv_text(made)))] == [
            "auto", "0.35", "1",
        ]  # fmt: skip
        assert made.rows[1].label == "small C=64 K=0.35"
        assert made.subject() != run(rows=[row(cores=64)] * 3).subject()
        assert Run.from_dict(made.to_dict()) == made

    def test_precisions_have_a_column_where_a_run_has_several(self):
        made = run(rows=[row(cores=c, precision=p) for p in ("fp32", "int8") for c in (64, 8)])
        at = header(made).index("precision")
        assert [cells(made, r)[at] for r in ordered(made.rows)] == ["fp32", "int8"] * 2
        assert "precision" not in header(run())
        both = dials(run(), made)
        assert header(run(), both) == header(made, both)
        assert cells(run(), run().rows[0], both)[at] == ""
        found = csv.DictReader(io.StringIO(csv_text(made)))
        assert [r["precision"] for r in found] == ["fp32", "int8"] * 2
        assert set(curves(made.rows)) == {"small fp32", "small int8"}
        assert "in fp32" in markdown(made)
        assert Run.from_dict(made.to_dict()) == made

    def test_markdown(self):
        text = markdown(run())
        lines = text.splitlines()
        assert lines[0] == "# knn on oxford-pets, protocol quick"
        table = [line for line in lines if line.startswith("|")]
        assert len(table) == 5 and {line.count("|") for line in table} == {11}
        assert "veca probe knn --data pets" in text and "- only 3 images" in text
        assert "torch 2.13" in text and "the first core (CLS)" in text

    def test_csv(self):
        rows = list(csv.DictReader(io.StringIO(csv_text(run()))))
        assert [r["cores"] for r in rows] == ["", "8", "64"]
        assert float(rows[1]["top1"]) == 0.81 and rows[0]["interactions"] == ""
        assert rows[1]["torch"] == "2.13" and rows[1]["protocol"] == "quick"

    def test_files(self, tmp_path):
        written = write_tables(run(), tmp_path / "out")
        assert sorted(p.name for p in written) == ["results.csv", "results.json", "results.md"]
        assert all(p.exists() for p in written)

    def test_verification_in_words(self):
        found = {"with": "scikit-learn 1.9", "k10": {"equal_predictions": 1.0, "top1": 0.81}}
        made = run(rows=[row(details={"features": "cls", "verified": found})])
        assert "small C=8 against scikit-learn 1.9: k10: equal predictions 1" in markdown(made)

    def test_the_best(self):
        assert best_text(run()) == "best: teacher, top-1 % 90.00"
        assert best_text(depth_run()) == "best: small C=8, RMSE m 0.4123"


class TestPlot:
    def test_a_png(self, tmp_path):
        pytest.importorskip("matplotlib", reason="the plot needs the extra viz")
        for name, made in (("a", run()), ("b", depth_run())):
            path = plot(tmp_path / f"{name}.png", [made])
            assert path.read_bytes().startswith(b"\x89PNG")

    def test_without_any_cost(self, tmp_path):
        pytest.importorskip("matplotlib", reason="the plot needs the extra viz")
        made = run(rows=[row(interactions=None, ms=None)])
        assert plot(tmp_path / "c.png", [made]).exists()

    def test_no_empty_panels(self, tmp_path):
        pytest.importorskip("matplotlib", reason="the plot needs the extra viz")
        made = [run(), run(rows=[row(cores=c, ms=None) for c in (8, 64)])]
        both, one = (Image.open(plot(tmp_path / "d.png", [x])).width for x in made)
        assert both == 2 * one

    def test_intervals_are_drawn_and_seen_whole(self):
        pytest.importorskip("matplotlib", reason="the plot needs the extra viz")
        made = known_run()
        score, time, kept = make_figure([made]).axes
        for axis in (score, time):
            low, high = axis.get_ylim()
            assert low < 78 and high > 93
            (band,) = (c for c in axis.collections if c.get_paths())
            heights = band.get_paths()[0].vertices[:, 1]
            assert (heights.min(), heights.max()) == pytest.approx((78, 86))
        assert kept.get_ylim()[0] < 97 and kept.get_ylim()[1] > 100
        bars = [line.get_ydata() for line in kept.lines if len(line.get_ydata()) == 2]
        assert any(tuple(ends) == pytest.approx((97, 99)) for ends in bars)
        assert draw([made]) == draw([made])
        assert any("95 %" in one for one in captions([made]))

    def test_a_difference_within_noise_looks_small(self):
        """80.0 and 80.4, known to ±2: the axis shows it as at most a twentieth of its height."""
        low, high = limits([80.0, 80.4], [(78, 82), (78.4, 82.4)], percent=True)
        assert low < 78 and high > 82.4 and (80.4 - 80.0) / (high - low) < 0.05

    @pytest.mark.parametrize(("values", "percent"), [([80.0, 80.4], True), ([0.5, 0.505], False)])
    def test_without_intervals_the_axis_does_not_zoom_in(self, values, percent):
        low, high = limits(values, [None, None], percent=percent)
        assert low < values[0] and values[1] < high
        assert (values[1] - values[0]) / (high - low) <= 0.1

    def test_an_axis_of_scores_does_not_go_below_zero(self):
        assert limits([0.3, 2.7], [None, None], percent=True)[0] == 0
        low, high = limits([99.0, 100.0], [(95.0, 100.0), None], percent=True, most=100.0)
        assert 100 < high < 101 and low < 95
        assert limits([0.0], [(0.0, 0.0)], percent=False)[1] > 0

    def test_old_records_are_drawn_and_said_to_have_no_intervals(self):
        pytest.importorskip("matplotlib", reason="the plot needs the extra viz")
        old = run().to_dict()
        for one in old["rows"]:
            for name in ("interval", "interval_teacher", "interval_full"):
                del one[name]
        del old["resampling"]
        read = Run.from_dict(old)
        assert len(make_figure([read]).axes) == 2
        assert "no intervals" in captions([read])[0]
        assert any("without intervals" in one for one in captions([read, known_run()]))

    def test_curves(self):
        rows = [row(cores=c, size=s) for s in (224, 448) for c in (64, 8)]
        found = curves(rows)
        assert list(found) == ["small, 224 px", "small, 448 px"]
        assert [r.cores for r in found["small, 224 px"]] == [8, 64]

    def test_curves_of_shares(self):
        pytest.importorskip("matplotlib", reason="the plot needs the extra viz")
        shares = [row(cores=64, keep=k, interactions=i) for k, i in ((1.0, 900), (0.5, 600))]
        assert [r.keep for r in curves(shares)["small"]] == [0.5, 1.0]
        texts = {one.get_text() for one in make_figure([run(rows=shares)]).axes[0].texts}
        assert texts == {"K=0.5", "K=1.0"}
        assert list(curves([*shares, row(cores=8)])) == ["small", "small K=0.5"]

    def test_without_matplotlib(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(MissingExtraError, match=r"\[viz\]"):
            plot(tmp_path / "d.png", [run()])


class TestReport:
    def test_what_compares_is_grouped(self):
        groups = group_runs([run(), run(rows=[row("other")]), run(protocol="knn-dino")])
        assert [len(group.runs) for group in groups] == [1, 2]
        assert [name.label for _, name in groups[1].rows][:2] == ["teacher", "other C=8"]

    def test_other_constants_under_one_name_are_kept_apart(self):
        differs = load_protocol("quick").with_settings(["knn.temperature=0.1"]).only("knn")
        apart = run(protocol_table={**differs, "name": "quick"})
        titles = [group.title for group in group_runs([run(), apart])]
        assert len(titles) == 2 and all(re.search(r" \[[0-9a-f]{6}\]$", t) for t in titles)

    def test_the_page(self, tmp_path):
        pytest.importorskip("matplotlib", reason="the plots need the extra viz")
        write_run(run(), tmp_path / "runs/a")
        write_run(run(rows=[row("other <b>", metrics={"top1": 0.5})]), tmp_path / "runs/deep/b")
        write_run(depth_run(), tmp_path / "runs/c")
        report = write_report(tmp_path / "runs")
        text = report.page.read_text()
        assert report.page == tmp_path / "runs/report.html" and len(report.groups) == 2
        assert "other &lt;b&gt;" in text and "<b>" not in text
        summary = text.split("</table>")[0]
        assert "90.00 (teacher)" in summary and "85.00 (small C=64)" in summary
        assert "81.00 (small C=8)" in summary  # the best network at its smallest budget
        assert "veca probe knn" in text and "0.4123" in text
        pictures = re.findall(r'<img src="data:image/png;base64,([^"]+)"', text)
        assert len(pictures) == text.count("<img") == 4  # over interactions and over time, twice
        assert "hold no intervals" in text
        assert all(base64.b64decode(one).startswith(b"\x89PNG") for one in pictures)
        assert [p.name for p in (tmp_path / "runs").iterdir() if p.is_file()] == ["report.html"]

    def test_the_teacher_of_another_run_is_measured_against(self):
        alone = run(rows=[row("other", metrics={"top1": 0.45}, retention_teacher=None)])
        (group,) = group_runs([run(), alone])
        kept = {r.label: r.retention_teacher for _, r in group.rows}
        assert kept["other C=8"] == pytest.approx(0.45 / 0.9) and kept["small C=8"] == 0.9
        another = row("second", "teacher", None, {"top1": 0.7}, retention_full=None)
        (group,) = group_runs([run(), alone, run(rows=[another])])
        assert {r.label: r.retention_teacher for _, r in group.rows}["other C=8"] is None

    def test_the_batch_of_the_extraction_separates_nothing(self):
        larger = run(protocol_table=load_protocol("quick").with_batch(128).only("knn"))
        assert len(group_runs([run(), larger])) == 1
        assert larger.subject() == run().subject()

    def test_elsewhere(self, tmp_path):
        write_run(run(), tmp_path / "runs")
        report = write_report(tmp_path / "runs", tmp_path / "page" / "all.html")
        assert report.page == tmp_path / "page" / "all.html" and report.page.exists()

    def test_without_matplotlib_the_page_says_so(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        write_run(run(), tmp_path / "runs")
        report = write_report(tmp_path / "runs")
        assert "No plots" in report.page.read_text() and report.missing_plots

    def test_nothing_to_report(self, tmp_path):
        with pytest.raises(ProbeError, match=r"no results\.json"):
            write_report(tmp_path)
        with pytest.raises(ProbeError, match="nowhere"):
            write_report(tmp_path / "nowhere")
        (tmp_path / "results.json").write_text("{}")
        with pytest.raises(ProbeError, match=r"/results\.json"):
            write_report(tmp_path)
