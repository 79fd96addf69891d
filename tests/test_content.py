"""Shares and budgets chosen by content: values, batches, calibrations, what is refused."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import veca
from veca import calibrate as library
from veca import compile_for_inference, content, create_model
from veca.calibrate import Measurements, calibrate
from veca.cli.main import main
from veca.content import Calibration, SizeTable
from veca.distill.export import publish
from veca.embed import extract
from veca.errors import InputError, SourceError, VecaWarning, WeightsError
from veca.export import export_model
from veca.weights import weights_hash

CONFIG = veca.VecaConfig(depth=3, width=32, heads=2, num_cores=8, output_width=24)
TABLE = SizeTable(
    size=64,
    patches=16,
    photos=100,
    shares=(0.25, 0.9),
    offsets=(-1.0, -5.0),
    slopes=(1.0, 1.0),
    margins=(0.0, 0.3),
    budgets=(2, 4, 6),
    losses=(0.03, 0.015, 0.004),
)


def calibration(model, **changes):
    table = dataclasses.replace(TABLE, **changes)
    blocks = model.config.merge_blocks
    return Calibration(weights_hash(model), blocks, (0.97, 0.99), (table,), {"held_out": []})


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = create_model(CONFIG).eval()
    model.beside = {content.FILE: calibration(model).to_bytes()}
    return model


@pytest.fixture
def images():
    """Flat, in between, and noise: each needs another share."""
    torch.manual_seed(1)
    flat, noise = torch.ones(3, 128, 96), torch.randn(3, 128, 96)
    return torch.stack([noise, flat, flat + noise, noise.flip(2)])


GRID_WARNING = pytest.mark.filterwarnings("ignore:images of .* beyond the sizes")
pytestmark = GRID_WARNING


def test_each_image_gets_the_pass_of_its_own_share_whatever_the_batch(model, images):
    chosen = model.chosen(images, agreement=0.98).keep
    assert len(set(chosen)) == 3 and chosen[1] == 0.25 and chosen[0] == chosen[3]
    out = model(images, keep="auto", agreement=0.98)
    for i, keep in enumerate(chosen):
        alone = model(images[i : i + 1], keep=keep)
        for part in ("cls", "cores", "patches", "core_xy"):
            torch.testing.assert_close(out[part][i : i + 1], alone[part], rtol=1e-4, atol=1e-5)
    turned = model(images.flip(0), keep="auto", agreement=0.98)
    torch.testing.assert_close(turned.patches.flip(0), out.patches, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(images, keep="auto", agreement=0.98).patches, out.patches)


def test_a_walk_fills_the_others_up_with_padding(model, images):
    *_, last = model.walk(images, keep="auto", agreement=0.98)
    tokens = (last.periphery.multiplicity > 0).sum(dim=1)
    assert tokens[1] < tokens[2] < tokens[0] <= last.tokens.shape[1] - 8
    assert torch.equal(last.periphery.multiplicity.sum(dim=1), torch.full((4,), 48.0))
    expected = model(images, keep="auto", agreement=0.98)
    torch.testing.assert_close(model.output(last).patches, expected.patches, rtol=1e-4, atol=1e-5)


def test_everything_that_takes_keep_takes_auto(model, images):
    auto = {"keep": "auto", "agreement": 0.98}
    out, keeps = model(images, **auto), model.chosen(images, agreement=0.98).keep

    def one_by_one(call):
        parts = [call(images[i : i + 1], keep) for i, keep in enumerate(keeps)]
        return torch.cat(parts)

    cases = [
        (model.cores_only(images, first=1, **auto).cls, out.cls),
        (model.forward_features(images, **auto), torch.cat([out.cores, out.patches], dim=1)),
        (model.forward_intermediates(images, layers=[1, 3], **auto)[1].patches, out.patches),
        (model.get_intermediate_layers(images, **auto)[0], out.patches),
        (model.tokens(images, **auto).patches, one_by_one(lambda x, k: model.tokens(x, keep=k)[1])),
        (
            model.attention_maps(images, **auto),
            one_by_one(lambda x, k: model.attention_maps(x, keep=k)),
        ),
    ]
    for got, expected in cases:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    first = model.forward_intermediates(images, layers=[1], **auto)[0]
    assert first.patches.shape == out.patches.shape


def test_the_engine_chooses_as_the_model_does(model, images):
    engine = compile_for_inference(model)
    for promise in (0.95, 0.98):
        expected = model(images, "auto", "auto", promise)
        got = engine(images, "auto", "auto", promise)
        assert got.cores.shape == expected.cores.shape
        torch.testing.assert_close(got.patches, expected.patches, rtol=1e-4, atol=1e-5)
        alone = engine.cores_only(images, keep="auto", first=1, agreement=0.98)
        wanted = model(images, keep="auto", agreement=0.98).cls
        torch.testing.assert_close(alone.cls, wanted, rtol=1e-4, atol=1e-5)
    engine._compile = True  # all images with as many tokens as the one with the most
    engine.many_shapes = compile_for_inference(model).many_shapes
    padded = engine(images, keep="auto", agreement=0.97).patches
    expected = model(images, keep="auto", agreement=0.97).patches
    torch.testing.assert_close(padded, expected, rtol=1e-4, atol=1e-5)


def test_a_budget_is_the_least_of_the_table_that_keeps_the_promise(model, images):
    for promise, budget in ((0.97, 2), (0.98, 4), (0.985, 4), (0.99, 6)):
        assert model(images, cores="auto", agreement=promise).cores.shape[1] == budget
    # Both together lose no more: each keeps .99.
    assert model(images, cores="auto", keep="auto", agreement=0.98).cores.shape[1] == 6
    halves = model.chosen(images, "auto", 0.98)
    assert halves.keep == model.chosen(images, agreement=0.99).keep and halves.cores == 6
    strict = dataclasses.replace(TABLE, losses=(0.03, 0.02, 0.02))
    assert strict.least_budget(0.01) is None  # the whole bank


def test_shares_by_hand():
    bounds = np.log([[0.05, 0.02, 0.005] + [0.001] * 12, [0.001, 0.5] + [0.001] * 13])
    assert content.least_share(bounds, 0.01).tolist() == [0.35, 0.35]  # and all above it
    assert content.least_share(bounds + 9, 0.01).tolist() == [1, 1]
    expected = TABLE.expected(np.array([0.1]))[0]
    assert len(expected) == len(content.LADDER) - 1
    assert expected[0] == pytest.approx(math.log(0.1001) - 1)
    assert expected[-1] == pytest.approx(math.log(0.1001) - 5)  # .95 is taken for .9


def test_the_more_careful_of_two_sizes_holds(model):
    careful = dataclasses.replace(TABLE, size=256, patches=256, offsets=(1.0, -5.0))
    both = dataclasses.replace(calibration(model), sizes=(TABLE, careful))
    differences = torch.tensor([0.05])
    at = {side: both.shares(differences, (side, side), 0.97)[0] for side in (4, 8, 16)}
    assert at[4] < at[8] == at[16]
    with pytest.warns(VecaWarning, match="256 px"):
        both.shares(differences, (32, 32), 0.97)
    # Between two promises the larger margin.
    assert both.shares(differences, (4, 4), 0.98)[0] >= at[4]


def test_what_cannot_be_is_refused(model, images, tmp_path):
    plain = create_model(CONFIG).eval()
    for call, noun in (
        (lambda: plain(images, keep="auto"), "calibrate"),
        (lambda: plain(images, cores="auto"), "calibrate"),
        (lambda: compile_for_inference(plain)(images, keep="auto"), "calibrate"),
        (lambda: model(images, keep="auto", agreement=0.9999), "0.97 to 0.99"),
        (lambda: model(images, keep="auto", agreement=0.5), "0.97 to 0.99"),
        (lambda: model(images, "auto", "auto", 0.99), "0.94 to 0.98"),
        (lambda: model(images, keep="auto", agreement=1.5), "agreement"),
        (lambda: model(images, keep="auto", agreement=math.nan), "agreement"),
        (lambda: model(images, keep="auto", agreement="high"), "agreement"),
        (lambda: model(images, keep=0.5, agreement=0.98), "agreement"),
        (lambda: model(images, agreement=0.98), "agreement"),
        (lambda: model(images, keep="half"), "keep"),
        (lambda: model(images, cores="all"), "cores"),
        (lambda: model.remember(images, keep="auto"), "memory"),
        (lambda: veca.cost(CONFIG, 64, keep="auto"), "number"),
        (lambda: export_model(model, tmp_path, keep="auto"), "number"),
        (lambda: model.train()(images, keep="auto"), "eval"),
    ):
        with pytest.raises(InputError, match=noun):
            call()
    other = create_model(CONFIG.replace(merge_before=(2,))).eval()
    other.beside = model.beside
    with pytest.raises(InputError, match="merging"):
        other(images, keep="auto")


def test_a_calibration_goes_with_its_weights_and_with_no_others(model, tmp_path):
    folder = veca.save(model, tmp_path / "a")
    assert veca.load(folder).calibration == model.calibration
    half = veca.save(veca.load(folder), tmp_path / "b", dtype=torch.float16)
    about = json.loads((half / content.FILE).read_text())
    assert about["weights_sha256"] != weights_hash(model)
    assert veca.load(half).calibration.sizes == model.calibration.sizes
    again = veca.save(veca.load(half), tmp_path / "c")  # rounded, but the same numbers as loaded
    assert veca.load(again).calibration.sizes == model.calibration.sizes

    published = publish(folder, tmp_path / "p", code=False)
    assert veca.load(published).calibration.sizes == model.calibration.sizes

    trained = veca.load(folder)
    with torch.no_grad():
        trained.norm.weight.mul_(1.1)
    assert not (veca.save(trained, tmp_path / "d") / content.FILE).exists()
    assert not (veca.save(trained, tmp_path / "c") / content.FILE).exists()  # nor what was there
    (tmp_path / "d" / content.FILE).write_bytes((folder / content.FILE).read_bytes())
    with pytest.warns(VecaWarning, match="other weights"):
        assert content.FILE not in veca.load(tmp_path / "d").beside


@pytest.mark.parametrize(
    "damage",
    [
        {"format": "veca-calibration-9"},
        {"promises": []},
        {"promises": [0.99, 0.97]},
        {"sizes": {}},
        {"sizes": {"64": {"patches": 16}}},
        {"merge_blocks": ["1"]},
        {"promises": [10**400]},
        {"sizes": {"9" * 5000: {"patches": 16}}},
        {"sizes": {"64": 3}},
    ],
)
def test_a_damaged_calibration_is_refused(model, damage):
    fields = {**json.loads(model.beside[content.FILE]), **damage}
    with pytest.raises(WeightsError, match=content.FILE):
        content.read(json.dumps(fields).encode())


def test_features_write_down_what_was_promised_and_go_on_with_it(model, tmp_path, images):
    from PIL import Image

    for i in range(2):
        pixels = np.random.default_rng(i).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    photos, out = [tmp_path / "0.png"], tmp_path / "features"
    extract(model, photos, out, keep="auto", cores="auto", size=64)
    about = json.loads((out / "features.json").read_text())
    assert about["keep"] == "auto" and about["agreement"] == 0.99 and about["cores"] == 6
    more = extract(model, [tmp_path], out, keep="auto", cores="auto", size=64, agreement=0.98)
    assert more.reused == 1 and more.computed == 1
    with pytest.raises(InputError, match="settings"):
        extract(model, [tmp_path], out, keep="auto", cores="auto", size=64, agreement=0.97)
    with pytest.raises(InputError, match="size"):
        extract(model, photos, tmp_path / "other", cores="auto", size=None)
    with pytest.raises(InputError, match="calibrate"):
        extract(create_model(CONFIG), photos, tmp_path / "other", keep="auto")


# ------------------------------------------------------------------------------------ measuring


def test_the_fit_finds_the_line_and_keeps_promises_on_most():
    model = create_model(CONFIG)
    rng = np.random.default_rng(0)
    d = np.exp(rng.normal(-3, 0.7, 200))
    logs = np.log(d + content.LEAST_DIFFERENCE)[:, None] * 0.8 - 4 * np.array(library.SHARES) - 1
    losses = np.exp(logs + 0.1 * rng.normal(size=logs.shape))
    measured = Measurements(d, losses, rng.random((30, 5)) * [0.05, 0.04, 0.03, 0.02, 0.01])
    table = library.fitted(model, 64, measured)
    assert table.slopes == pytest.approx([0.8] * 6, abs=0.05)
    assert np.diff(table.offsets) == pytest.approx(-4 * np.diff(library.SHARES), abs=0.1)
    assert table.losses[0] == np.sort(measured.by_budget[:, 0])[-1]  # of 30 photos the highest
    for row in library.checked(model, 64, measured):
        assert row.cores_oracle_work <= row.cores_work <= 1
        assert row.kept >= 0.93 and row.oracle_work - 0.001 <= row.work <= row.fixed_work + 0.01
    where = list(library.PROMISES).index(0.99)
    row = library.checked(model, 64, measured)[where]
    assert row.saved > 0.5 * row.saved_by_oracle > 0
    nothing = measured._replace(differences=rng.permutation(d))  # says nothing of the losses
    assert library.checked(model, 64, nothing)[where].saved < row.saved_by_oracle / 3


@pytest.mark.parametrize(("photos", "kept"), [(20, 20), (44, 44), (45, 45), (77, 76), (400, 386)])
def test_so_many_must_keep_a_promise(photos, kept):
    """As in tables of one-sided bounds of quantiles, at a confidence of 90 %."""
    assert library.most_of(photos) == kept
    assert library.most_of(5000) / 5000 == pytest.approx(0.954, abs=0.001)


def test_unseen_photos_keep_promises_nine_times_in_ten():
    model, rng = create_model(CONFIG), np.random.default_rng(0)
    where = list(library.PROMISES).index(0.98)

    def drawn(photos):
        d = np.exp(rng.normal(-3, 0.5, photos))
        logs = np.log(d)[:, None] - 4 * np.array(library.SHARES) + 0.5
        losses = np.exp(logs + 0.5 * rng.normal(size=(photos, 1)))
        return Measurements(d, losses, np.zeros((1, 5)))

    unseen, held = drawn(3000), []
    for _ in range(20):
        table = library.fitted(model, 64, drawn(100))
        bounds = table.expected(unseen.differences) + table.margins[where]
        chosen = content.least_share(bounds, 0.02)
        held.append((library.loss_at(unseen.losses(), chosen) <= 0.02).mean())
    assert np.mean(np.array(held) >= 0.95) >= 0.75  # of 20; with a plain quantile about half
    assert np.mean(held) < 0.99


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for i in range(22):
        small = rng.integers(0, 256, (2 + i, 2 + i, 3), dtype=np.uint8)
        Image.fromarray(small).resize((80, 64), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
    return folder


@pytest.mark.slow
def test_calibrating_measures_what_the_model_loses(photos, tmp_path):
    torch.manual_seed(0)
    model = create_model(CONFIG).eval()
    kept, done = tmp_path / "measured.json", []
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, photos, sizes=[64], measured=kept, progress=_stop_at(5))
    found = calibrate(
        model, photos, sizes=[64], measured=kept, progress=lambda *at: done.append(at[0])
    )
    assert found.about["photos"] == {"64": 22} and len(done) == 22
    assert found.about["confidence"] == 0.9
    rows = json.loads(kept.read_text())["rows"]
    key, photo = next(library.drawn(photos))
    pixels = model.transform(64)(photo).unsqueeze(0)
    with torch.no_grad():
        full, half = model(pixels), model(pixels, keep=0.5)
        few = model(pixels, cores=4)
    row = rows[f"{key}/64"]
    assert row["keep"][library.SHARES.index(0.5)] == pytest.approx(
        library.loss(half, full), abs=1e-6
    )
    assert row["cores"][library.budgets(model).index(4)] == pytest.approx(
        library.loss(few, full), abs=1e-6
    )
    again = calibrate(model, photos, sizes=[64])
    assert again.sizes == found.sizes
    assert content.read(found.to_bytes()).sizes == found.sizes
    with pytest.raises(SourceError, match="20"):
        calibrate(model, sorted(photos.iterdir())[:19], sizes=[64])
    other = create_model(CONFIG)
    with pytest.raises(InputError, match="other weights"):
        calibrate(other, photos, sizes=[64], measured=kept)


def _stop_at(number):
    def progress(done, total, text):
        if done == number:
            raise KeyboardInterrupt

    return progress


@pytest.mark.slow
def test_the_command_writes_beside_the_weights(photos, tmp_path, capsys):
    torch.manual_seed(0)
    folder = veca.save(create_model(CONFIG), tmp_path / "mine")
    words = ["--data", str(photos), "--sizes=64", "--photos=20", "--device=cpu"]
    assert main(["calibrate", str(folder), *words]) == 0
    assert "oracle" in capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir()) == [content.FILE, *sorted(veca_files(folder))]
    out = veca.load(folder)(torch.randn(2, 3, 64, 64), keep="auto", agreement=0.97)
    assert out.patches.shape == (2, 16, 24)
    assert main(["calibrate", str(folder), *words, "--out", str(tmp_path / "copy")]) == 0
    assert veca.load(tmp_path / "copy").calibration.sizes == veca.load(folder).calibration.sizes
    assert main(["calibrate", str(folder), *words, "--sizes=32", "--photos=21"]) == 0
    both = veca.load(folder).calibration
    assert [table.size for table in both.sizes] == [32, 64]
    assert both.about["photos"] == {"32": 21, "64": 20}
    assert main(["calibrate", "tiny", *words]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["calibrate", str(folder), "--data", str(tmp_path / "none")]) == 2


def veca_files(folder):
    return {p.name for p in folder.iterdir()} - {content.FILE}


def test_shipped_weights_carry_theirs():
    model = veca.load("tiny")
    assert {table.size for table in model.calibration.sizes} >= {224, 512}
    assert model.calibration.promises[0] <= 0.97 and model.calibration.promises[-1] >= 0.99


@pytest.mark.parametrize(
    "row",
    [
        3,
        {},
        {"difference": "x", "keep": [0.1] * 6},
        {"difference": 0.1, "keep": [0.1] * 5},
        {"difference": 0.1, "keep": [10**400] * 6},
        {"difference": 0.1, "keep": [0.1] * 6, "cores": [0.1]},
        {"difference": 0.1, "keep": [0.1] * 6, "cores": 3},
    ],
)
def test_odd_measurements_are_refused(photos, tmp_path, row):
    model = create_model(CONFIG).eval()
    table = {
        "format": "veca-calibrate-1",
        "weights": veca.weights.weights_hash(model),
        "shares": list(library.SHARES),
        "rows": {"x/64": row},
    }
    kept = tmp_path / "measured.json"
    kept.write_text(json.dumps(table))
    with pytest.raises(InputError, match=r"measured\.json: rows\.x/64"):
        calibrate(model, photos, sizes=[64], measured=kept)
