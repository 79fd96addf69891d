"""The benchmark measures what it says, in turns, and its report adds up. No times are asserted."""

from __future__ import annotations

import csv
import dataclasses
import math
import sys
import time

import pytest
import torch

import veca.bench
from veca import Veca, VecaConfig
from veca.bench import (
    BenchPlan,
    BenchRow,
    Contender,
    bench,
    by_contender,
    machine,
    plot,
    precisions,
    race,
    scaling_exponent,
    scaling_sizes,
    take_turns,
    write_csv,
)
from veca.errors import ConfigError, InputError, MissingExtraError

SMALL = VecaConfig(depth=1, width=32, heads=2, num_cores=4)
QUICK = BenchPlan(sizes=(32, 64), repeats=2, seconds=0.0, threads=1)


def row(size: int = 256, ms: float = 1.0, **changes: object) -> BenchRow:
    fields = {
        "network": "n", "model": "veca", "cores": 8, "size": size, "batch": 1, "device": "cpu",
        "dtype": "float32", "threads": 1, "mode": "eager", "repeats": 3, "ms": ms,
        "spread_ms": 0.1, "fastest_ms": ms, "images_per_s": 1e3 / ms, "peak_mib": size / 8,
        "speedup": 2.0,
    }  # fmt: skip
    return BenchRow(**{**fields, **changes})


class TestTurns:
    def test_contenders_take_turns(self):
        order: list[str] = []
        calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
        times = take_turns(calls, dataclasses.replace(QUICK, repeats=3), warm_up=True)
        assert order == list("abc" * 4)  # a round to warm up, then three
        assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3, "c": 3}

    def test_rounds_go_on_for_the_seconds_asked_for(self):
        plan = dataclasses.replace(QUICK, repeats=1, seconds=0.05)
        times = take_turns({"a": lambda: time.sleep(0.005)}, plan)
        assert len(times["a"]) > 1

    def test_the_limit_stops_rounds_but_not_the_first(self):
        plan = dataclasses.replace(QUICK, repeats=10, limit=0.0)
        assert len(take_turns({"a": lambda: None}, plan)["a"]) == 1

    def test_milliseconds(self):
        times = take_turns({"a": lambda: time.sleep(0.02)}, QUICK)
        assert min(times["a"]) >= 20


class TestRace:
    def test_one_row_a_contender_and_size(self):
        seen = []
        contenders = [Contender("dense", lambda x: x), Contender("veca", torch.neg, 8)]
        plan = dataclasses.replace(QUICK, batch=2)
        rows = race(contenders, plan, network="n", yardstick="dense", on_rows=seen.append)
        assert [(r.label, r.size) for r in rows] == [
            ("dense", 32), ("veca, 8 cores", 32), ("dense", 64), ("veca, 8 cores", 64),
        ]  # fmt: skip
        assert [r for batch in seen for r in batch] == rows
        for base, ours in (rows[:2], rows[2:]):
            assert base.speedup == 1
            assert ours.speedup == pytest.approx(base.ms / ours.ms)
        for r in rows:
            assert (r.network, r.batch, r.threads, r.repeats, r.error) == ("n", 2, 1, 2, "")
            assert r.images_per_s == pytest.approx(2e3 / r.ms)
            assert 0 < r.fastest_ms <= r.ms
            assert r.spread_ms >= 0
        # -x is one new tensor of the size of the images; x alone is none.
        assert [r.peak_mib * 2**20 for r in rows] == [0, 2 * 3 * 32**2 * 4, 0, 2 * 3 * 64**2 * 4]

    def test_images_are_what_was_asked_for(self):
        seen = []

        def run(images: torch.Tensor) -> torch.Tensor:
            seen.append((tuple(images.shape), images.dtype, torch.is_inference_mode_enabled()))
            return images

        plan = dataclasses.replace(QUICK, sizes=(48,), batch=3, dtype="bfloat16")
        race([Contender("a", run)], plan, channels=5)
        assert set(seen) == {((3, 5, 48, 48), torch.bfloat16, True)}

    def test_out_of_memory_is_a_row_and_the_others_go_on(self):
        def greedy(images: torch.Tensor) -> torch.Tensor:
            return torch.empty(2**60) if images.shape[-1] == 64 else images

        rows = race([Contender("greedy", greedy), Contender("modest", lambda x: x)], QUICK)
        assert [(r.label, r.size, r.error) for r in rows] == [
            ("greedy", 32, ""), ("modest", 32, ""),
            ("greedy", 64, "out of memory"), ("modest", 64, ""),
        ]  # fmt: skip
        assert math.isnan(rows[2].ms)
        assert rows[2].repeats == 0
        assert rows[3].ms > 0

    def test_output_that_is_not_finite_is_not_timed(self):
        bad = Contender("bad", lambda x: {"deep": (1, [x / 0])})
        rows = race([bad, Contender("good", lambda x: x)], QUICK)
        assert [r.error for r in rows] == ["output is not finite", ""] * 2
        assert rows[0].repeats == 0

    def test_nothing_is_not_timed_as_something_fast(self):
        rows = race([Contender("nothing", lambda x: [x[:0], x])], QUICK)
        assert [r.error for r in rows] == ["output is empty"] * 2

    def test_other_errors_are_not_hidden(self):
        def broken(images: torch.Tensor) -> None:
            raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match="a bug"):
            race([Contender("broken", broken)], QUICK)

    @pytest.mark.parametrize("fails", [False, True])
    def test_the_number_of_threads_is_put_back(self, fails):
        before = torch.get_num_threads()
        seen = []

        def run(images: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            if fails:
                raise KeyError
            return images

        plan = dataclasses.replace(QUICK, threads=before + 1)
        if fails:
            with pytest.raises(KeyError):
                race([Contender("a", run)], plan)
        else:
            assert race([Contender("a", run)], plan)[0].threads == before + 1
        assert set(seen) == {before + 1}
        assert torch.get_num_threads() == before

    def test_names_have_to_differ_and_the_yardstick_has_to_run(self):
        one = Contender("a", lambda x: x, 8)
        with pytest.raises(InputError, match="names"):
            race([one, one], QUICK)
        with pytest.raises(InputError, match="yardstick"):
            race([one], QUICK, yardstick="dense")


class TestBench:
    def test_budgets_beside_dense(self):
        rows = bench(SMALL, QUICK, cores=[2, 4])
        assert list(by_contender(rows)) == ["dense", "veca, 2 cores", "veca, 4 cores"]
        assert all(r.ms > 0 and r.peak_mib > 0 and not r.error for r in rows)
        for group in by_contender(rows).values():
            assert [r.size for r in group] == [32, 64]
            assert group[0].peak_mib < group[1].peak_mib

    def test_without_dense_there_is_no_speed_up(self):
        rows = bench(SMALL, dataclasses.replace(QUICK, sizes=(32,)), dense=False)
        assert [r.cores for r in rows] == [4]  # the default, 8 and all, in a bank of four
        assert math.isnan(rows[0].speedup)

    def test_the_model_and_the_random_state_are_left_alone(self):
        model = Veca(SMALL).train()
        before = torch.get_rng_state()
        plan = dataclasses.replace(QUICK, sizes=(32,), dtype="bfloat16")
        assert bench(model, plan, name="mine")[0].network == "mine"
        bench(SMALL, plan)
        assert model.training
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert torch.equal(torch.get_rng_state(), before)

    def test_each_precision_beside_dense_in_the_same(self):
        plan = dataclasses.replace(QUICK, sizes=(32,), precisions=("fp32", "bf16", "int8"))
        rows = bench(SMALL, plan, cores=[4])
        assert [r.label for r in rows] == [
            "dense", "veca, 4 cores", "dense, bf16", "veca, 4 cores, bf16", "dense, int8",
            "veca, 4 cores, int8",
        ]  # fmt: skip
        assert not any(r.error for r in rows) and precisions(rows) == "fp32, bf16, int8"
        for dense, ours in zip(rows[::2], rows[1::2], strict=True):
            assert dense.speedup == 1
            assert ours.speedup == pytest.approx(dense.ms / ours.ms)

    def test_presets_go_by_short_and_full_name(self):
        plan = dataclasses.replace(QUICK, sizes=(16,), repeats=1)
        assert bench("tiny", plan, dense=False)[0].network == "veca_tiny_patch16"

    @pytest.mark.parametrize(
        ("change", "error", "noun"),
        [
            ({"model": "tinny"}, ConfigError, "'tinny'"),
            ({"cores": [5]}, InputError, "cores"),
            ({"plan": BenchPlan(sizes=(32, 40))}, InputError, r"\[40\]"),
        ],
    )
    def test_bad_input_is_refused_before_anything_runs(self, change, error, noun):
        with pytest.raises(error, match=noun):
            bench(**{"model": SMALL, "plan": QUICK, **change})

    @pytest.mark.parametrize(
        "change",
        [{"sizes": ()}, {"sizes": (0,)}, {"batch": 0}, {"repeats": 0}, {"threads": 0},
         {"dtype": "int8"}, {"precisions": ("int4",)}, {"graph": True}],
    )  # fmt: skip
    def test_bad_plans_are_refused(self, change):
        with pytest.raises(InputError, match=next(iter(change)).removesuffix("s")):
            dataclasses.replace(QUICK, **change)


class TestReport:
    def test_exponent_of_a_power_law(self):
        rows = [row(size, 3 * (size / 16) ** (2 * 1.7)) for size in (256, 512, 2048)]
        assert scaling_exponent(rows) == pytest.approx(1.7)
        assert scaling_exponent(rows, of="peak_mib") == pytest.approx(0.5)

    def test_exponent_is_the_least_squares_slope_over_the_sizes_asked_for(self):
        rows = [row(256, 99.0), row(512, 1.0), row(1024, 4.0), row(2048, 64.0)]
        # log4(time) = 0, 1, 3 at log4(N) = 0, 1, 2: the slope is (3 - 0) / 2.
        assert scaling_exponent(rows, [512, 1024, 2048]) == pytest.approx(1.5)

    def test_exponent_of_what_is_there(self):
        rows = [row(256, 1.0), row(512, math.nan, error="out of memory"), row(1024, 16.0)]
        assert scaling_exponent(rows) == pytest.approx(1.0)
        assert math.isnan(scaling_exponent(rows[:2]))
        with pytest.raises(InputError, match="dense"):
            scaling_exponent([row(256), row(512, model="dense", cores=None)])

    def test_growth_is_told_from_512_px(self):
        assert scaling_sizes([row(s) for s in (1024, 256, 512)]) == [512, 1024]
        assert scaling_sizes([row(s) for s in (256, 512)]) == [256, 512]

    def test_csv_has_the_machine_in_columns_and_nothing_for_nan(self, tmp_path):
        rows = [row(256, 1.5), row(512, math.nan, cores=None, error="out of memory")]
        where = machine()
        write_csv(tmp_path / "b.csv", rows, where)
        with (tmp_path / "b.csv").open() as file:
            first, second = csv.DictReader(file)
        assert (first["size"], first["ms"], first["cores"]) == ("256", "1.5", "8")
        assert (second["ms"], second["cores"], second["error"]) == ("", "", "out of memory")
        assert first["torch"] == torch.__version__
        assert first["cpu"] == where.cpu != ""
        assert second["date"] == where.date

    def test_plot_is_a_png(self, tmp_path):
        pytest.importorskip("matplotlib", reason="the plot needs the extra viz")
        rows = [row(s, s, model=m) for s in (256, 512) for m in ("dense", "veca")]
        rows.append(row(1024, math.nan, peak_mib=math.nan, error="out of memory"))
        plot(tmp_path / "b.png", rows, machine())
        content = (tmp_path / "b.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000

    def test_without_matplotlib_the_message_names_the_extra(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(MissingExtraError, match=r"\[viz\]"):
            plot(tmp_path / "b.png", [row()], machine())
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("old", "new"), [("Plan", BenchPlan), ("Row", BenchRow)])
def test_names_of_0_1_still_work_and_say_the_new_ones(old, new):
    with pytest.warns(DeprecationWarning, match=new.__name__):
        assert getattr(veca.bench, old) is new
    with pytest.raises(AttributeError, match="nothing"):
        veca.bench.nothing  # noqa: B018


@pytest.mark.slow
def test_engines_stand_beside_the_dense_network_in_the_same(tmp_path, monkeypatch):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    monkeypatch.setenv("VECA_CACHE", str(tmp_path))
    monkeypatch.setattr(veca.bench.runtimes.importlib.util, "find_spec", lambda name: None)
    plan = dataclasses.replace(
        QUICK, sizes=(32,), precisions=("fp32", "bf16"), engines=("torch", "onnxruntime")
    )
    rows = bench(SMALL, plan, cores=[3])
    assert [r.label for r in rows if r.engine == "onnxruntime"] == [
        "dense, onnxruntime",
        "veca, 3 cores, onnxruntime",
    ]
    dense, veca_ = rows[-2:]
    assert veca_.speedup == pytest.approx(dense.ms / veca_.ms) and not veca_.error
    assert len(rows) == 6


@pytest.mark.slow
def test_openvino_is_a_guest(tmp_path, monkeypatch):
    pytest.importorskip("openvino", reason="OpenVINO is not installed; nothing of ours brings it")
    monkeypatch.setenv("VECA_CACHE", str(tmp_path))
    plan = dataclasses.replace(QUICK, sizes=(32,), engines=("onnxruntime",))
    rows = bench(SMALL, plan, cores=[3])
    assert [r.engine for r in rows] == ["onnxruntime"] * 2 + ["openvino"] * 2
    assert not any(r.error for r in rows)


def test_engines_that_cannot_run_are_refused(monkeypatch):
    with pytest.raises(InputError, match="onnxruntime"):
        BenchPlan(engines=("onxruntime",))
    with pytest.raises(InputError, match="CPU"):
        BenchPlan(engines=("onnxruntime",), device="cuda")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingExtraError, match="openvino"):
        BenchPlan(engines=("openvino",))
