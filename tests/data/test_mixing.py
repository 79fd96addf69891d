"""Mixed views: what is drawn, who is whose partner, and that both networks see one mixture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from data.pictures import make_folder, picture
from data.test_order import plain_mix
from veca.data import (
    Augmentation,
    AugmentConfig,
    Batch,
    BatchPlan,
    DataError,
    InMemoryImages,
    Loader,
    Views,
    mixing,
    open_source,
    sample_keys,
)
from veca.data.mixing import Mixture, draw_mixture, mix

KEYS = sample_keys(0, 0, np.arange(48))
MANY = sample_keys(1, 0, np.arange(20_000))
BOTH = AugmentConfig("rrc", mixup=0.4, cutmix=0.4)


# --------------------------------------------------------------- the definition, pixel by pixel


def number(key: int, stream: int) -> float:
    """What `uniform` draws, on Python integers."""
    return (plain_mix(key + 0x9E3779B97F4A7C15 * stream) >> 11) / 2**53


def plain_pixel(
    key: int, config: AugmentConfig, mine: float, theirs: float, x: float, y: float
) -> float:
    """One pixel of a mixed view; x and y are its centre, in 0..1."""
    kind = number(key, 100)
    if kind < config.mixup:
        w = 0.5 + 0.5 * number(key, 101)
        return w * mine + (1 - w) * theirs
    if kind >= config.mixup + config.cutmix:
        return mine
    area = 0.5 * (1 - number(key, 102))
    aspect = math.exp(math.log(0.5) + number(key, 103) * (math.log(2) - math.log(0.5)))
    width, height = math.sqrt(area * aspect), math.sqrt(area / aspect)
    top, left = number(key, 104) * (1 - height), number(key, 105) * (1 - width)
    return theirs if left <= x < left + width and top <= y < top + height else mine


def plain(view: torch.Tensor, keys: np.ndarray, config: AugmentConfig) -> torch.Tensor:
    """Mixed views, by a loop over images and pixels."""
    out = view.double().clone()
    count, channels, height, width = view.shape
    for i in range(count):
        partner = i + 1 if i % 2 == 0 else i - 1
        for c in range(channels):
            for row in range(height):
                for column in range(width):
                    mine, theirs = (float(view[j, c, row, column]) for j in (i, partner))
                    centre = (column + 0.5) / width, (row + 0.5) / height
                    out[i, c, row, column] = plain_pixel(
                        int(keys[i]), config, mine, theirs, *centre
                    )
    return out


def stack(count: int, height: int = 40, width: int = 40) -> torch.Tensor:
    arrays = [np.asarray(picture(i, height, width)) for i in range(count)]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()


def off(config: AugmentConfig) -> AugmentConfig:
    return AugmentConfig.from_dict({**config.to_dict(), "mixup": 0.0, "cutmix": 0.0})


@pytest.mark.parametrize("kind", ["paper", "rrc", "none"])
def test_views_are_those_of_the_definition(kind: str) -> None:
    config = AugmentConfig(kind, mixup=0.35, cutmix=0.5)
    images, keys = stack(24), KEYS[:24]
    before = Augmentation(off(config))(images, keys, (8, 12), (11, 10))
    mixed = Augmentation(config)(images, keys, (8, 12), (11, 10))
    assert isinstance(mixed, Views) and mixed.student.dtype == torch.float32
    assert before.teacher is not None and mixed.teacher is not None
    for finished, view in ((before.student, mixed.student), (before.teacher, mixed.teacher)):
        wanted = plain(finished, keys, config)
        torch.testing.assert_close(view.double(), wanted, rtol=0, atol=2e-7)
        assert view.min() >= 0 and view.max() <= 1
    same = (before.student == mixed.student).flatten(1).all(1)
    assert 0 < same.sum() < 12  # those that drew nothing: to the bit


def test_one_size_for_both_networks_gives_one_view() -> None:
    images = stack(6)
    views = Augmentation(BOTH)(images, KEYS[:6], 16, 16)
    assert views.teacher is None
    wanted = Augmentation(BOTH)(images, KEYS[:6], 16, 24).student
    assert torch.equal(views.student, wanted)


# ------------------------------------------------------------------------------------- the draws


def test_how_often() -> None:
    for mixup, cutmix in ((0.3, 0.2), (0.5, 0.5), (1.0, 0.0), (0.0, 1.0), (0.0, 0.05)):
        drawn = draw_mixture(MANY, 100, mixup, cutmix)
        cut = drawn.shares == 1
        blended = (drawn.shares > 0) & ~cut
        assert blended.mean() == pytest.approx(mixup, abs=0.012)
        assert cut.mean() == pytest.approx(cutmix, abs=0.012)
        whole = (drawn.boxes == [0, 0, 1, 1]).all(1)
        assert whole[~cut].all() and not whole[cut].any()
        if mixup + cutmix == 1:
            assert (drawn.shares > 0).all()


def test_the_weight_is_uniform_and_the_images_own_part_the_larger() -> None:
    shares = draw_mixture(MANY, 100, 1.0, 0.0).shares
    assert shares.min() > 0 and shares.max() <= 0.5
    np.testing.assert_allclose(
        np.histogram(shares, 10, (0, 0.5))[0], len(MANY) / 10, atol=5 * math.sqrt(len(MANY) / 10)
    )


def test_rectangles_are_of_the_said_area_aspect_and_place() -> None:
    left, top, right, bottom = draw_mixture(MANY, 100, 0.0, 1.0).boxes.T
    assert left.min() >= 0 and top.min() >= 0
    assert right.max() <= 1 + 1e-12 and bottom.max() <= 1 + 1e-12
    wide, tall = right - left, bottom - top
    area, aspect = wide * tall, wide / tall
    assert 0 < area.min() < 1e-3 and 0.499 < area.max() <= 0.5 + 1e-12
    assert 0.5 - 1e-9 <= aspect.min() < 0.501 and 1.998 < aspect.max() < 2 + 1e-9
    # All uniform: the area, the aspect's logarithm, and where in the room left the box lies.
    across, down = left / (1 - wide), top / (1 - tall)
    unit = [area / 0.5, np.log2(aspect) / 2 + 0.5, across, down]
    for values in unit:
        np.testing.assert_allclose(
            np.histogram(values, 10, (0, 1 + 1e-9))[0], 2000, atol=5 * math.sqrt(2000)
        )
    assert np.abs(np.corrcoef(unit) - np.eye(4)).max() < 0.03


def test_streams_are_of_its_own() -> None:
    """Mixing shares no number with the crop, the colours or the choice of replacements."""
    taken = {*range(9), *range(16, 16 + 4 * 10), *range(1000, 1011)}
    mine = set(range(100, 100 + mixing.STREAMS))
    assert not mine & taken
    drawn = draw_mixture(KEYS, 100, 1.0, 0.0)
    from veca.data.draws import uniform

    assert np.array_equal(drawn.shares, 0.5 * (1 - uniform(KEYS, 101)))


def test_what_one_draws_does_not_depend_on_the_other_or_on_the_odds() -> None:
    whole = draw_mixture(KEYS, 100, 0.4, 0.4)
    for rows in (slice(0, 2), slice(10, 30)):
        part = draw_mixture(KEYS[rows], 100, 0.4, 0.4)
        assert np.array_equal(part.boxes, whole.boxes[rows])
        assert np.array_equal(part.shares, whole.shares[rows])
    more = draw_mixture(KEYS, 100, 0.4, 0.6)
    cut = whole.shares == 1
    assert np.array_equal(more.boxes[cut], whole.boxes[cut])
    other = draw_mixture(sample_keys(0, 1, np.arange(48)), 100, 0.4, 0.4)
    assert not np.array_equal(other.shares, whole.shares)


# ------------------------------------------------------------------------------- pixels and pairs


def test_partners_are_neighbours() -> None:
    """Images of one colour each: a view shows who is in it, and how much."""
    view = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 4, 4) / 8
    shares = np.array([0.5, 0.25, 0.0, 1.0, 1.0, 0.0])
    boxes = np.tile([0.0, 0.0, 1.0, 1.0], (6, 1))
    mixed = mix(view, Mixture(boxes, shares))
    wanted = torch.tensor([0.5, 0.75, 2.0, 2.0, 5.0, 5.0]) / 8
    assert torch.equal(mixed, wanted.view(6, 1, 1, 1).expand(6, 3, 4, 4))
    # Both of a pair take of the finished view, not of what the other has become.
    assert torch.equal(view[:, 0, 0, 0], torch.arange(6.0) / 8)


def mask(box: list[float], height: int, width: int) -> torch.Tensor:
    """Where a cut box shows the partner, [h, w]."""
    view = torch.stack([torch.zeros(3, height, width), torch.ones(3, height, width)])
    mixed = mix(view, Mixture(np.array([box, [0, 0, 1, 1]]), np.array([1.0, 0.0])))
    assert torch.equal(mixed[1], view[1])
    return mixed[0, 0]


def test_a_box_holds_the_pixels_whose_centres_it_holds() -> None:
    shown = mask([0.25, 0.0, 0.5, 1.0], 2, 4)
    assert shown.tolist() == [[0, 1, 0, 0]] * 2
    shown = mask([0.3, 0.1, 0.37, 0.9], 4, 4)  # the centre of column 1 is at 0.375
    assert shown.sum() == 0
    shown = mask([0.375, 0.4, 0.4, 0.8], 4, 4)  # a side on a centre: the left one counts
    assert shown.tolist() == [[0] * 4, [0] * 4, [0, 1, 0, 0], [0] * 4]
    assert mask([0.2, 0.4, 0.375, 0.8], 4, 4)[:, 1].sum() == 0  # and the right one does not


def test_both_sizes_agree_where_the_borders_fall_on_both_grids() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        left, right = np.sort(rng.choice(15, 2, replace=False))
        top, bottom = np.sort(rng.choice(13, 2, replace=False))
        box = [left / 14, top / 12, right / 14, bottom / 12]
        small = mask(box, 12, 14)
        assert small.sum() == (right - left) * (bottom - top)
        for times in (2, 3):
            large = mask(box, 12 * times, 14 * times)
            pooled = torch.nn.functional.avg_pool2d(large[None, None], times)[0, 0]
            assert torch.equal(pooled, small)


def test_elsewhere_the_sizes_differ_by_the_border_only() -> None:
    drawn = draw_mixture(MANY[:200], 100, 0.0, 1.0)
    for left, top, right, bottom in drawn.boxes.tolist():
        small, large = (
            mask([left, top, right, bottom], 14, 14),
            mask([left, top, right, bottom], 28, 28),
        )
        pooled = torch.nn.functional.avg_pool2d(large[None, None], 2)[0, 0]
        centres = (torch.arange(14) + 0.5) / 14
        far = [((centres - side).abs() > 0.5 / 14 + 1e-6) for side in (left, right, top, bottom)]
        inner = (far[2] & far[3])[:, None] & (far[0] & far[1])
        assert torch.equal(pooled[inner], small[inner])
        area = (right - left) * (bottom - top)
        assert abs(float(large.mean()) - area) < 2 / 28 + 1e-6


def test_both_networks_get_the_same_weight() -> None:
    """On flat images the mixture of both views is one number per channel."""
    flat = torch.randint(0, 256, (48, 3, 1, 1), dtype=torch.uint8).expand(-1, -1, 32, 32)
    views = Augmentation(AugmentConfig("none", mixup=1.0))(flat.contiguous(), KEYS, 16, 32)
    assert views.teacher is not None
    mine, theirs = views.student[:, :, 0, 0], views.teacher[:, :, 0, 0]
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)
    weight = 0.5 + 0.5 * np.array([number(int(key), 101) for key in KEYS])
    x = flat[:, :, 0, 0].double().numpy() / 255
    partner = x.reshape(24, 2, 3)[:, ::-1].reshape(48, 3)
    wanted = weight[:, None] * x + (1 - weight[:, None]) * partner
    np.testing.assert_allclose(mine.double().numpy(), wanted, atol=2e-7)


def test_no_images_at_all() -> None:
    views = Augmentation(BOTH)(torch.zeros(0, 3, 8, 8, dtype=torch.uint8), KEYS[:0], 4)
    assert views.student.shape == (0, 3, 4, 4)


# -------------------------------------------------------------------------------------------- off


@pytest.mark.parametrize("kind", ["paper", "rrc", "none"])
def test_without_mixing_nothing_of_it_runs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = stack(5)  # an odd number is no matter
    # So seldom that nobody draws it: the whole way, to the bit what it is without.
    seldom = Augmentation(AugmentConfig(kind, mixup=1e-12, cutmix=1e-12))(
        images[:4], KEYS[:4], 16, 24
    )
    for name in ("draw_mixture", "mix", "check_pairs"):
        monkeypatch.setattr(mixing, name, None)
    plain_views = Augmentation(AugmentConfig(kind))(images, KEYS[:5], 16, 24)
    assert plain_views.teacher is not None and seldom.teacher is not None
    if kind == "rrc":  # means of a batch of another size may be summed in another order
        plain_views = Augmentation(AugmentConfig(kind))(images[:4], KEYS[:4], 16, 24)
    assert torch.equal(plain_views.student[:4], seldom.student)
    assert torch.equal(plain_views.teacher[:4], seldom.teacher)


# ----------------------------------------------------------------------------------- the loader's


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", 22, 40, 40)


def loader(source: object, **options: object) -> Loader:
    settings = {"batch_size": 8, "size": 16, "workers": 0, "augment": BOTH, **options}
    return Loader(source, **settings)


def same(a: Batch, b: Batch) -> None:
    assert torch.equal(a.indices, b.indices)
    assert torch.equal(a.pixels, b.pixels)
    assert (a.teacher_pixels is None) == (b.teacher_pixels is None)
    if a.teacher_pixels is not None:
        assert torch.equal(a.teacher_pixels, b.teacher_pixels)


@pytest.mark.parametrize("kind", ["paper", "rrc", "none"])
def test_memory_and_disk_give_the_same_pixels(photos: Path, kind: str) -> None:
    source = open_source(photos)
    memory = InMemoryImages.build(source, size=40, workers=0)
    config = AugmentConfig(kind, mixup=0.4, cutmix=0.4)
    options = {"augment": config, "seed": 5, "teacher_size": 32}
    disk, quick = loader(source, **options), loader(memory, **options)
    clean = loader(source, **{**options, "augment": off(config)})
    for step in range(4):
        batch, before = disk.batch(step), clean.batch(step)
        same(batch, quick.batch(step))
        epochs = clean.batch_indices(step).epochs
        keys = sample_keys(5, epochs, batch.indices.numpy())
        drawn = draw_mixture(keys, 100, 0.4, 0.4)
        assert torch.equal(batch.pixels, mix(before.pixels, drawn))
        assert torch.equal(batch.teacher_pixels, mix(before.teacher_pixels, drawn))


def test_workers_change_nothing(photos: Path) -> None:
    def plan(step: int) -> BatchPlan:
        return BatchPlan(size=16 + 8 * (step % 2), teacher_size=32, batch_size=6 + 4 * (step % 2))

    alone = loader(photos, seed=9, plan=plan)
    helped = loader(photos, seed=9, plan=plan, workers=2)
    for step in range(4):
        same(alone.batch(step), helped.batch(step))
    helped.close()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_out_the_batch_of_one_process(photos: Path, world: int) -> None:
    options = {"seed": 1, "teacher_size": 24}
    alone = loader(photos, **options)
    ranks = [loader(photos, rank=r, world_size=world, **options) for r in range(world)]
    for step in range(4):
        whole = alone.batch(step)
        parts = [rank.batch(step) for rank in ranks]
        assert torch.equal(torch.cat([part.indices for part in parts]), whole.indices)
        for name in ("pixels", "teacher_pixels"):
            together = torch.cat([getattr(part, name) for part in parts])
            torch.testing.assert_close(together, getattr(whole, name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_is_exact(photos: Path, world: int) -> None:
    made = loader(photos, seed=6)
    made.batch(0)
    state = json.loads(json.dumps(made.state_dict()))
    after = [made.batch(step) for step in range(1, 5)]
    ranks = [loader(photos, seed=6, rank=r, world_size=world) for r in range(world)]
    for rank in ranks:
        rank.load_state_dict(state)
    for step, wanted in enumerate(after, start=1):
        parts = [rank.batch(step) for rank in ranks]
        assert torch.equal(torch.cat([p.indices for p in parts]), wanted.indices)
        pixels = torch.cat([p.pixels for p in parts])
        if world == 1:
            assert torch.equal(pixels, wanted.pixels)
        torch.testing.assert_close(pixels, wanted.pixels, rtol=0, atol=1e-6)
    # Not mixing before does not matter to what comes: the state knows nothing of it.
    fresh = loader(photos, seed=6, augment=off(BOTH))
    fresh.batch(0)
    assert fresh.state_dict() == state


def test_what_leaves_one_without_a_partner_is_refused(photos: Path) -> None:
    with pytest.raises(DataError, match=r"6 among 2 ranks.*multiple of 4"):
        loader(photos, batch_size=6, world_size=2)
    with pytest.raises(DataError, match=r"batch of 7.*multiple of 2"):
        loader(photos, batch_size=7)
    made = loader(photos, world_size=2)
    with pytest.raises(DataError, match="10 among 2 ranks"):
        made.batch(batch_size=10)
    assert made.step == 0
    planned = loader(photos, plan=lambda step: BatchPlan(batch_size=8 - step))
    planned.batch()
    with pytest.raises(DataError, match="batch of 7"):
        planned.batch()
    with pytest.raises(DataError, match="batch of 3"):
        Augmentation(BOTH)(stack(3), KEYS[:3], 16)
    for settings in ({"mixup": 0.1}, {"cutmix": 0.1}):
        with pytest.raises(DataError, match="batch of 3"):
            loader(photos, batch_size=3, augment=AugmentConfig(**settings))
    loader(photos, batch_size=3, augment=AugmentConfig()).batch()


def test_a_sweep_mixes_pairs_or_says_it_cannot(photos: Path) -> None:
    made = loader(photos, shuffle=False)
    batches = list(made.sweep())
    assert [len(batch.indices) for batch in batches] == [8, 8, 6]
    drawn = draw_mixture(sample_keys(0, 0, np.arange(22)), 100, 0.4, 0.4)
    before = torch.cat([b.pixels for b in loader(photos, shuffle=False, augment=off(BOTH)).sweep()])
    assert torch.equal(torch.cat([b.pixels for b in batches]), mix(before, drawn))
    with_gaps = [loader(photos, shuffle=False, rank=r, world_size=4) for r in range(4)]
    for step, whole in enumerate(batches):  # of the last six, the fourth rank has none
        parts = [list(rank.sweep())[step].pixels for rank in with_gaps[: 3 if step == 2 else 4]]
        torch.testing.assert_close(torch.cat(parts), whole.pixels, rtol=0, atol=1e-6)
    for rank in range(2):  # three and three
        with pytest.raises(DataError, match="6 among 2 ranks"):
            next(loader(photos, rank=rank, world_size=2).sweep())


# ----------------------------------------------------------------------------------- the settings


def test_settings_survive_json() -> None:
    config = AugmentConfig("rrc", mixup=0.5, cutmix=0.25)
    table = config.to_dict()
    assert (table["mixup"], table["cutmix"]) == (0.5, 0.25) and "mixing" not in table
    assert AugmentConfig.from_dict(json.loads(json.dumps(table))) == config
    old = {k: v for k, v in AugmentConfig("rrc").to_dict().items() if k not in ("mixup", "cutmix")}
    assert AugmentConfig.from_dict(old) == AugmentConfig("rrc")
    assert config.mixing and not AugmentConfig("rrc").mixing
    assert AugmentConfig(mixup=1).mixing and AugmentConfig(cutmix=1e-9).mixing


@pytest.mark.parametrize(
    ("settings", "noun"),
    [
        ({"mixup": -0.1}, "mixup.* -0.1"),
        ({"cutmix": 1.5}, "cutmix.* 1.5"),
        ({"mixup": "often"}, "mixup.*'often'"),
        ({"cutmix": True}, "cutmix.*True"),
        ({"mixup": float("nan")}, "mixup.*nan"),
        ({"mixup": 0.7, "cutmix": 0.5}, "mixup.*cutmix.*0.7 and 0.5"),
        ({"mixpu": 0.5}, "'mixpu'"),
    ],
)
def test_bad_settings_are_refused(settings: dict, noun: str) -> None:
    with pytest.raises(DataError, match=noun):
        AugmentConfig.from_dict(settings)


def test_odds_that_add_up_to_one_may_be_rounded() -> None:
    for tenths in range(11):
        assert AugmentConfig(mixup=tenths / 10, cutmix=1 - tenths / 10).mixing
        assert AugmentConfig(mixup=tenths * 0.1, cutmix=(10 - tenths) * 0.1).mixing
