"""`veca tune`: what is measured, what is chosen, what is kept, and who takes the point."""

from __future__ import annotations

import csv
import inspect
import json
import warnings

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from torch.nn import functional as F

import veca
from veca import tune as library
from veca.cli import main as commands
from veca.cli.common import takes_point
from veca.cli.main import main
from veca.errors import ConfigError, InputError, SourceError, VecaWarning
from veca.points import OperatingPoint, machine_name, read_point
from veca.tune import Candidate, Measured, Tuning, Wish, tune

CONFIG = veca.VecaConfig(depth=2, width=32, heads=2, num_cores=8)
QUICK = {"sizes": (32, 64), "cores": (2, 8), "keep": (1.0, 0.5), "precisions": ("fp32",)}
WORDS = ["--sizes=32,64", "--cores=2,8", "--keep=1,0.5", "--precisions=fp32", "--device=cpu"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights") / "mine"
    veca.save(veca.create_model(CONFIG), folder)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name, shape in (("a", (80, 96)), ("b", (72, 64)), ("c", (48, 48))):
        pixels = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


def test_every_point_is_measured_on_every_photo(weights, photos, tmp_path) -> None:
    model = veca.load(weights)
    told = []
    found = tune(
        model,
        photos,
        tmp_path,
        **{**QUICK, "precisions": ("float32", "int8")},
        count=3,
        progress=lambda done, total, text: told.append((done, total)),
    )
    assert len(found.points) == 16 and found.conditions["photos"] == 3
    assert told == [(i, 48) for i in range(48)]
    assert found.conditions["enlarged"] == 1  # c, of 48 pixels
    full = next(p for p in found.points if p.candidate == found.reference)
    assert found.reference == Candidate(64, 8, 1.0, "fp32")
    assert full.cls == pytest.approx(1) and full.patches == pytest.approx(1)
    assert all(p.ms > 0 and p.images_per_s == pytest.approx(1000 / p.ms) for p in found.points)
    half = next(p for p in found.points if p.candidate == (64, 8, 1.0, "int8"))
    assert 0.99 < half.agreement < 1
    assert model.dtype == torch.float32


def test_agreement_is_that_of_features_enlarged_to_the_largest_grid(
    weights, photos, tmp_path
) -> None:
    model = veca.load(weights)
    found = tune(model, photos / "a.png", tmp_path, **QUICK, count=1)
    with torch.inference_mode():
        small, large = (model(model.preprocess(photos / "a.png", size=n).pixels) for n in (32, 64))
    grid = tuple(large.grid)
    enlarged = F.interpolate(small.feature_map(), grid, mode="bilinear", align_corners=False)
    cosines = F.cosine_similarity(enlarged, large.feature_map(), dim=1)
    point = next(p for p in found.points if p.candidate == Candidate(32, 8, 1.0, "fp32"))
    assert point.patches == pytest.approx(cosines.mean().item(), abs=1e-5)
    assert point.cls == pytest.approx(F.cosine_similarity(small.cls, large.cls).item(), abs=1e-5)


def test_a_second_run_goes_on(weights, photos, tmp_path, monkeypatch) -> None:
    first = tune(veca.load(weights), photos, tmp_path, **QUICK, count=2)
    runs = []
    real = library._Runs.round
    monkeypatch.setattr(
        library._Runs,
        "round",
        lambda self, images, missing, tell: (
            runs.append(len(missing)) or real(self, images, missing, tell)
        ),
    )
    same = tune(veca.load(weights), photos, tmp_path, **QUICK, count=2)
    assert same == first and not runs
    more = tune(veca.load(weights), photos, tmp_path, **{**QUICK, "cores": (2, 4, 8)}, count=3)
    assert sorted(runs) == [4, 4, 12]  # the new budget on two photos, all on the third
    assert more.conditions["photos"] == 3
    # A photo that has changed is another photo.
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in photos.glob("*.png"):
        Image.open(path).rotate(90).save(changed / path.name)
    runs.clear()
    tune(veca.load(weights), changed, tmp_path, **QUICK, count=1)
    assert runs == [8]


def test_measurements_of_something_else_are_refused(weights, photos, tmp_path) -> None:
    tune(veca.load(weights), photos, tmp_path, **QUICK, count=1)
    torch.manual_seed(1)
    other = veca.create_model(CONFIG)
    with pytest.raises(InputError, match="weights"):
        tune(other, photos, tmp_path, **QUICK, count=1)
    with pytest.raises(InputError, match="batch_size"):
        tune(veca.load(weights), photos, tmp_path, **QUICK, count=1, batch_size=2)
    tune(other, photos, tmp_path, **QUICK, count=1, overwrite=True)
    (tmp_path / library.MEASUREMENTS).write_text("[]")
    with pytest.raises(InputError, match="JSON"):
        tune(other, photos, tmp_path, **QUICK, count=1)


@pytest.mark.parametrize(
    "rounds",
    [
        {"photo": 3},
        {"photo": {"32/4/1": {"ms": 1, "cls": 1, "patches": 1}}},
        {"photo": {"32/4/1.0/fp32": 3}},
        {"photo": {"32/4/1.0/fp32": {"ms": "x", "cls": 1, "patches": 1}}},
        {"photo": {"32/4/1.0/fp32": {"ms": 0, "cls": 1, "patches": 1}}},
        {"photo": {"32/4/1.0/fp32": {"ms": 10**400, "cls": 1, "patches": 1}}},
        {"photo": {"32/4/1.0/fp32": {"ms": 1, "patches": 1}}},
        {"photo": {"a/b/c/d": {"ms": 1, "cls": 1, "patches": None}}},
    ],
)
def test_odd_measurements_are_refused(weights, photos, tmp_path, rounds) -> None:
    tune(veca.load(weights), photos, tmp_path, **QUICK, count=1)
    path = tmp_path / library.MEASUREMENTS
    table = json.loads(path.read_text())
    key = next(iter(table["rounds"]))
    path.write_text(json.dumps({**table, "rounds": {key: rounds["photo"]}}))
    with pytest.raises(InputError, match=rf"measurements.json: rounds\.{key[:12]}"):
        tune(veca.load(weights), photos, tmp_path, **QUICK, count=1)


def test_what_a_killed_run_left_goes(weights, photos, tmp_path) -> None:
    left = tmp_path / ".measurements.json.999999999-0123abcd.tmp"
    left.touch()
    tune(veca.load(weights), photos, tmp_path, **QUICK, count=1)
    assert not left.exists()


def test_time_ends_between_two_photos(weights, photos, tmp_path) -> None:
    found = tune(veca.load(weights), photos, tmp_path, **QUICK, count=3, limit=0)
    assert found.conditions["photos"] == 1


def test_cls_alone_is_measured_alone(weights, photos, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(veca.Veca, "forward", None)
    found = tune(veca.load(weights), photos, tmp_path, **QUICK, what=("cls",), count=1)
    assert all(p.patches is None and p.agreement == p.cls for p in found.points)


def test_unreadable_photos_are_passed_over(weights, photos, tmp_path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(SourceError, match="photos"):
        tune(veca.load(weights), tmp_path / "bad.png", tmp_path / "out", **QUICK)
    both = [tmp_path / "bad.png", photos / "a.png"]
    found = tune(veca.load(weights), both, tmp_path / "out", **QUICK)
    assert found.conditions["photos"] == 1


@pytest.mark.parametrize(
    ("changes", "noun"),
    [
        ({"keep": (0.1,)}, "keep"),
        ({"cores": (9,)}, "cores"),
        ({"precisions": ("int4",)}, "precision"),
        ({"sizes": ()}, "sizes"),
        ({"what": ("words",)}, "feature"),
    ],
)
def test_candidates_that_cannot_be(weights, photos, tmp_path, changes, noun: str) -> None:
    with pytest.raises(InputError, match=noun):
        tune(veca.load(weights), photos, tmp_path, **{**QUICK, **changes})


# ------------------------------------------------------------------------------------ choosing


def made(*points: tuple[int, float, float]) -> Tuning:
    """A tuning of points (size, ms, agreement)."""
    measured = [
        Measured(Candidate(size, 8, 1.0, "fp32"), ms, 1000 / ms, 1.0, level)
        for size, ms, level in points
    ]
    conditions = {"batch_size": 1, "photos": 1, "threads": 1, "enlarged": 0, "what": "cls"}
    reference = Candidate(64, 8, 1.0, "fp32")
    return Tuning("w", "s", "m", reference, tuple(measured), conditions)


TABLE = made((16, 10, 0.9), (32, 20, 0.95), (48, 30, 0.94), (64, 40, 1.0))


def test_the_front_has_what_nothing_beats() -> None:
    assert [p.ms for p in TABLE.pareto()] == [10, 20, 40]


@pytest.mark.parametrize(
    ("wish", "size"),
    [
        (Wish(latency_ms=35), 32),  # the best that is fast enough, not the fastest
        (Wish(throughput=100), 16),
        (Wish(agreement=0.93), 32),  # the fastest that is good enough
        (Wish(latency_ms=45, agreement=0.94), 64),
    ],
)
def test_a_wish_chooses(wish: Wish, size: int) -> None:
    assert TABLE.choose(wish).size == size


@pytest.mark.parametrize(
    ("wish", "nearest"),
    [
        (Wish(latency_ms=5), "16 px"),
        (Wish(throughput=200), "16 px"),
        (Wish(latency_ms=18, agreement=0.95), "32 px"),
    ],
)
def test_an_impossible_wish_names_the_nearest(wish: Wish, nearest: str) -> None:
    with pytest.raises(InputError, match=f"nearest is {nearest}"):
        TABLE.choose(wish)


@pytest.mark.parametrize("fields", [{"latency_ms": 0}, {"throughput": -1}, {"agreement": 1.5}])
def test_wishes_that_cannot_be(fields) -> None:
    with pytest.raises(InputError, match=next(iter(fields))):
        Wish(**fields)
    with pytest.raises(InputError, match="latency"):
        TABLE.choose(Wish())


# ---------------------------------------------------------------------------------- the command


def run(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def tuned(weights, photos, tmp_path_factory):
    """What the command leaves."""
    pytest.importorskip("matplotlib", reason="the plot needs the extra viz")
    out = tmp_path_factory.mktemp("tuned")
    common = [photos, "--weights", weights, *WORDS, "--photos", 2, "--out", out]
    assert run("tune", *common, "--latency", "60s") == 0
    return out


def test_what_the_command_leaves(tuned, weights) -> None:
    point = read_point(tuned / "point.json")
    assert (point.size, point.cores, point.keep, point.precision) == (64, 8, 1.0, "fp32")
    assert point.weights_sha256 == veca.weights.weights_hash(weights)
    assert point.machine == machine_name() and point.measured["photos"] == 2
    assert (tuned / "tune.png").stat().st_size > 1000
    assert {p.name for p in tuned.iterdir()} == {"measurements.json", "point.json", "tune.png"}


def test_the_plot_is_the_same_each_time(tuned, weights, photos, tmp_path) -> None:
    found = tune(
        veca.load(weights), photos, tuned, **QUICK, count=2,
        sha256=veca.weights.weights_hash(weights),
    )  # fmt: skip
    for name in ("a.png", "b.png"):
        library.plot(tmp_path / name, found, read_point(tuned / "point.json"))
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_command_prints_the_front(tuned, weights, photos, capsys) -> None:
    common = [photos, "--weights", weights, *WORDS, "--photos", 2, "--out", tuned]
    assert run("tune", *common) == 0
    said = capsys.readouterr().out
    assert "fp32" in said and "1.0000" in said and "measurements.json" in said


@pytest.mark.parametrize(
    ("words", "noun"),
    [
        (["--latency", "soon"], "--latency"),
        (["--throughput", "x/s"], "--throughput"),
        (["--agreement", "2"], "agreement"),
        (["--latency", "0.000001ms"], "nearest"),
        (["--keep", "half"], "--keep"),
    ],
)
def test_bad_words_are_one_line(tuned, weights, photos, capsys, words, noun: str) -> None:
    common = [photos, "--weights", weights, *WORDS, "--photos", 2, "--out", tuned]
    assert run("tune", *common, *words) != 0
    said = capsys.readouterr().err
    assert noun in said and "Traceback" not in said


def test_no_photos(tmp_path, weights, capsys) -> None:
    assert run("tune", tmp_path, "--weights", weights, "--out", tmp_path / "out") != 0
    assert "no image" in capsys.readouterr().err


# ------------------------------------------------------------------------------ taking the point


@pytest.fixture
def small(weights, tmp_path):
    point = OperatingPoint(
        weights="mine",
        weights_sha256=veca.weights.weights_hash(weights),
        machine=machine_name(),
        size=32,
        cores=2,
        keep=0.5,
        precision="bfloat16",
    )
    point.save(tmp_path / "point.json")
    return tmp_path / "point.json"


def test_there_and_back(small) -> None:
    point = read_point(small)
    assert point.keep == 0.5 and point.agreement is None and read_point(point) is point
    auto = OperatingPoint(**{**vars(point), "keep": "auto", "cores": "auto", "agreement": 0.98})
    auto.save(small)
    assert read_point(small) == auto


@pytest.mark.parametrize(
    ("change", "noun"),
    [
        ({"size": -1}, "size"),
        ({"size": "big"}, "size"),
        ({"cores": "many"}, "cores"),
        ({"keep": 2}, "keep"),
        ({"keep": True}, "keep"),
        ({"precision": "int4"}, "precision"),
        ({"agreement": "much"}, "agreement"),
        ({"weights": None}, "weights"),
        ({"format": "other"}, "format"),
    ],
)
def test_points_that_cannot_be(small, change, noun: str) -> None:
    table = {**json.loads(small.read_text()), **change}
    small.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=noun):
        read_point(small)


def test_a_loaded_model_works_at_its_point(small, weights) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = veca.load(weights, point=small)
    assert model.dtype == torch.bfloat16 and model.point == read_point(small)
    photo = np.zeros((40, 80, 3), dtype=np.uint8)
    pixels = model.preprocess(photo).pixels
    assert pixels.shape[-2:] == (32, 64)
    assert model.preprocess(photo, size=64).pixels.shape[-2:] == (64, 128)
    with torch.inference_mode():
        pixels = torch.randn(1, 3, 64, 64, dtype=torch.bfloat16)
        out = model(pixels)
        assert torch.equal(out.patches, model(pixels, 2, 0.5).patches)
        assert torch.equal(model.cores_only(pixels).cores, model.cores_only(pixels, 2, 0.5).cores)
        # A call that says one of the two says it all.
        assert model(pixels, cores=8).cores.shape[1] == 8
        assert torch.equal(model(pixels, keep=1).patches, model(pixels, 8, 1.0).patches)
    assert veca.load(weights, point=small, dtype=torch.float32).dtype == torch.float32
    assert veca.load(weights).point is None


@pytest.mark.slow
def test_a_point_in_int8_is_taken(small, weights, photos, tmp_path) -> None:
    OperatingPoint(**{**vars(read_point(small)), "precision": "int8"}).save(small)
    assert veca.load(weights, point=small).precision == "int8"
    common = ["--device", "cpu", "--point", small, "--weights", weights]
    assert run("features", photos, *common, "--out", tmp_path / "f") == 0
    assert json.loads((tmp_path / "f" / "features.json").read_text())["precision"] == "int8"
    words = ["--point", small, "--device", "cpu", "--repeats", 1, "--seconds", 0, "--no-dense"]
    assert run("bench", weights, *words, "--out", tmp_path / "b") == 0
    (row,) = csv.DictReader((tmp_path / "b" / "bench.csv").open())
    assert (row["precision"], row["size"], row["cores"], row["keep"]) == ("int8", "32", "2", "0.5")
    pytest.importorskip("pyarrow", reason="embed needs it")
    assert run("embed", photos, *common, "--workers", 0, "--out", tmp_path / "e") == 0
    stored = json.loads((tmp_path / "e" / "embed.json").read_text())["settings"]
    assert stored["precision"] == "int8"


def test_a_point_of_others_warns_and_names_both(small, weights, tmp_path) -> None:
    torch.manual_seed(1)
    veca.save(veca.create_model(CONFIG), tmp_path / "theirs")
    with pytest.warns(VecaWarning, match="mine.*theirs"):
        veca.load(tmp_path / "theirs", point=small)
    elsewhere = OperatingPoint(**{**vars(read_point(small)), "machine": "Abacus"})
    with pytest.warns(VecaWarning, match="Abacus") as said:
        veca.load(weights, point=elsewhere)
    assert machine_name() in str(said[0].message)


def test_features_and_embed_take_it(small, weights, photos, tmp_path) -> None:
    pytest.importorskip("pyarrow", reason="embed needs it")
    common = ["--device", "cpu", "--point", small]
    assert run("features", photos, *common, "--weights", weights, "--out", tmp_path / "f") == 0
    about = json.loads((tmp_path / "f" / "features.json").read_text())
    assert (about["cores"], about["size"], about["keep"]) == (2, 32, 0.5)
    # What is typed comes first.
    typed = ["--weights", weights, "--cores", 8, "--keep", 1, "--out", tmp_path / "e"]
    assert run("embed", photos, *common, *typed, "--workers", 0) == 0
    stored = json.loads((tmp_path / "e" / "embed.json").read_text())["settings"]
    assert (stored["cores"], stored["size"], "keep" in stored) == (8, 32, False)


TYPED = {
    "features": ["x", "--out", "o", "--weights"],
    "embed": ["x", "--out", "o", "--weights"],
    "probe": ["knn", "--data", "d", "--dataset", "folder", "--weights"],
    "export": ["--out", "o"],
    "bench": [],
}
"""Words of each command before the weights."""


@pytest.mark.parametrize("command", commands._POINTS, ids=lambda command: command.__name__)
def test_what_a_point_stands_for(small, weights, command) -> None:
    """What each command is called with; the commands themselves are tested elsewhere."""
    options, seen = commands._POINTS[command], {}

    def called(**given) -> None:
        seen.update(given)

    called.__signature__ = inspect.signature(command, eval_str=True)
    app = typer.Typer()
    app.command()(takes_point(called, options))
    words = [*TYPED[command.__name__], str(weights), "--point", str(small)]
    app(words, standalone_mode=False)
    assert str(seen[options["cores"][0]]) == "2" and float(seen[options["keep"][0]]) == 0.5
    if "size" in options:
        assert seen[options["size"][0]] == "32"
    if "precision" in options:
        assert "bfloat16" in str(seen[options["precision"][0]])
    app([*words, "--cores", "8"], standalone_mode=False)
    assert str(seen["cores"]) == "8"
