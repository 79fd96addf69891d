"""Views: where they lie, what they look like, and that only the key decides."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from data.pictures import picture
from veca.data import Augmentation, AugmentConfig, DataError, sample_keys
from veca.data.trivial_augment import OPS, draw_operations


def stack(count: int, height: int = 60, width: int = 80) -> torch.Tensor:
    arrays = [np.asarray(picture(i, height, width)) for i in range(count)]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()


def image_of(tensor: torch.Tensor) -> Image.Image:
    return Image.fromarray(tensor.permute(1, 2, 0).numpy())


KEYS = sample_keys(0, 0, np.arange(24))


def test_none_is_resize_and_central_crop() -> None:
    images = stack(2)
    views = Augmentation(AugmentConfig("none"))(images, KEYS[:2], 32)
    assert views.teacher is None and views.student.dtype == torch.float32
    for image, view in zip(images, views.student, strict=True):
        # The short side, 60, becomes 36 = 9/8 of 32, the long one 48.
        resized = image_of(image).resize((48, 36), Image.Resampling.BICUBIC)
        wanted = np.asarray(resized.crop((8, 2, 40, 34)))
        assert np.array_equal((view * 255).round().byte().permute(1, 2, 0).numpy(), wanted)


def test_the_papers_crop_is_a_window_of_the_resized_image() -> None:
    images = stack(24)
    augmentation = Augmentation(AugmentConfig("paper", trivial=False))
    views = (augmentation(images, KEYS, 32).student * 255).round().byte()
    found, mirrored = set(), 0
    for image, view in zip(images, views, strict=True):
        resized = np.asarray(image_of(image).resize((48, 36), Image.Resampling.BICUBIC))
        seen = view.permute(1, 2, 0).numpy()
        places = [
            (top, left, flip)
            for top in range(5)
            for left in range(17)
            for flip in (False, True)
            if np.array_equal(
                seen[:, ::-1] if flip else seen, resized[top : top + 32, left : left + 32]
            )
        ]
        assert len(places) == 1
        found.add(places[0][:2])
        mirrored += places[0][2]
    assert len({top for top, _ in found}) == 5 and len({left for _, left in found}) > 8
    assert 5 < mirrored < 19


def test_paper_applies_the_drawn_operation_to_the_crop() -> None:
    images = stack(24, 36, 36)
    plain = Augmentation(AugmentConfig("paper", trivial=False))(images, KEYS, 32).student
    full = Augmentation(AugmentConfig("paper"))(images, KEYS, 32).student
    ops = draw_operations(KEYS, (3, 4, 5)).ops
    changed = (plain != full).flatten(1).any(1).numpy()
    assert not changed[ops == OPS.index("Identity")].any()
    assert changed[ops == OPS.index("Equalize")].all()
    assert changed.mean() > 0.7


def boxes_in_pixels(config: AugmentConfig, height: int, width: int, size: tuple[int, int]):
    keys = sample_keys(3, 0, np.arange(2000))
    crops = Augmentation(config).crops(keys, np.full(2000, height), np.full(2000, width), size)
    return crops.boxes * [width, height, width, height], crops.flips


@pytest.mark.parametrize("size", [(32, 32), (32, 64)])
def test_rrc_boxes_keep_to_area_and_aspect(size: tuple[int, int]) -> None:
    boxes, flips = boxes_in_pixels(AugmentConfig("rrc"), 300, 400, size)
    left, top, right, bottom = boxes.T
    assert left.min() >= 0 and top.min() >= 0
    assert right.max() <= 400 + 1e-9 and bottom.max() <= 300 + 1e-9
    share = (right - left) * (bottom - top) / (300 * 400)
    assert 0.35 <= share.min() < 0.37 and 0.85 < share.max() <= 1
    aspect = (right - left) / (bottom - top) * size[0] / size[1]
    assert 0.749 < aspect.min() < 0.78 and 1.28 < aspect.max() < 1.334
    assert abs(flips.mean() - 0.5) < 0.05


def test_rrc_falls_back_to_the_largest_central_box() -> None:
    boxes, _ = boxes_in_pixels(AugmentConfig("rrc", area=(1.0, 1.0)), 100, 400, (32, 32))
    # A box of the full area never fits with an aspect of at most 4/3.
    np.testing.assert_allclose(boxes, [[400 / 3, 0, 800 / 3, 100]] * 2000, atol=0.1)


def test_colour_jitter_is_brightness_contrast_saturation_in_turn() -> None:
    from veca.data.draws import uniform

    images = stack(6, 40, 40).clamp(60, 190)  # away from black and white: nothing is clipped
    config = AugmentConfig(
        "rrc", area=(1.0, 1.0), aspect=(1.0, 1.0), flip=0,
        brightness=0.2, contrast=0.3, saturation=0.3,
    )  # fmt: skip
    seen = Augmentation(config)(images, KEYS[:6], 40).student
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64).view(1, 3, 1, 1)
    for i, image in enumerate(images):
        bright, contrast, vivid = (
            1 + strength * (2 * float(uniform(KEYS[i : i + 1], stream)[0]) - 1)
            for strength, stream in ((0.2, 6), (0.3, 7), (0.3, 8))
        )
        x = image.double()[None] / 255 * bright
        mean = (x * weights).sum(1).mean()
        x = mean + contrast * (x - mean)
        luma = (x * weights).sum(1, keepdim=True)
        x = (luma + vivid * (x - luma)).clamp(0, 1)
        torch.testing.assert_close(seen[i].double(), x[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["paper", "rrc", "none"])
def test_only_the_key_decides(kind: str) -> None:
    images, augmentation = stack(24, 40, 48), Augmentation(AugmentConfig(kind))
    together = augmentation(images, KEYS, (16, 32), (24, 48))
    for rows in (slice(0, 12), slice(12, 24), slice(7, 8)):
        part = augmentation(images[rows], KEYS[rows], (16, 32), (24, 48))
        torch.testing.assert_close(part.student, together.student[rows], rtol=0, atol=1e-6)
        torch.testing.assert_close(part.teacher, together.teacher[rows], rtol=0, atol=1e-6)
    again = augmentation(images, torch.from_numpy(KEYS.view(np.int64)), (16, 32), (24, 48))
    assert torch.equal(again.student, together.student)
    if kind != "none":
        other = augmentation(images, sample_keys(0, 1, np.arange(24)), (16, 32))
        assert not torch.equal(other.student, together.student)


@pytest.mark.parametrize("kind", ["rrc", "none", "paper"])
def test_the_teacher_sees_the_same_view_at_its_own_size(kind: str) -> None:
    # Smooth images: shrinking the teacher's view must give nearly the student's.
    images = torch.stack(
        [
            torch.from_numpy(np.array(picture(i, 6, 6).resize((96, 96), 3))).permute(2, 0, 1)
            for i in range(24)
        ]
    )
    config = AugmentConfig(kind, trivial=False)
    views = Augmentation(config)(images, KEYS, 24, 48)
    assert views.teacher is not None and views.teacher.shape == (24, 3, 48, 48)
    shrunk = torch.nn.functional.avg_pool2d(views.teacher, 2)
    assert (shrunk - views.student).abs().max() < 0.06
    assert (shrunk - views.student.flip(-1)).abs().max() > 0.1
    same = Augmentation(config)(images, KEYS, 24, (24, 24))
    assert same.teacher is None and torch.equal(same.student, views.student)


def test_floats_are_taken_as_8_bit_images() -> None:
    images = stack(4)
    augmentation = Augmentation()
    wanted = augmentation(images, KEYS[:4], 32).student
    assert torch.equal(augmentation(images.float() / 255, KEYS[:4], 32).student, wanted)


def test_views_are_whole_levels_in_the_unit_range() -> None:
    view = Augmentation()(stack(8), KEYS[:8], 32).student
    assert torch.equal((view * 255).round() / 255, view)
    assert view.min() >= 0 and view.max() <= 1


def test_settings_survive_json() -> None:
    config = AugmentConfig("rrc", area=(0.2, 0.9), saturation=0.1)
    assert AugmentConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("settings", "noun"),
    [
        ({"kind": "papper"}, "'papper'"),
        ({"kin": "rrc"}, "'kin'"),
        ({"resize": 0.9}, "resize"),
        ({"flip": 2}, "flip"),
        ({"area": [0.5, 0.2]}, r"area.*\(0\.5, 0\.2\)"),
        ({"area": 0.5}, r"area.* 0\.5"),
        ({"aspect": [0, 1]}, "aspect"),
        ({"contrast": float("nan")}, "contrast"),
        ({"trivial": 1}, "trivial"),
    ],
)
def test_bad_settings_are_refused(settings: dict, noun: str) -> None:
    with pytest.raises(DataError, match=noun):
        AugmentConfig.from_dict(settings)


@pytest.mark.parametrize(
    ("images", "keys", "size", "noun"),
    [
        (torch.zeros(2, 1, 8, 8), [1, 2], 8, r"\[2, 1, 8, 8\]"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), [1, 2], 8, "int64"),
        (torch.zeros(2, 3, 8, 8), [1], 8, r"keys.*\[1\]"),
        (torch.zeros(2, 3, 8, 8), [0.5, 1.0], 8, "keys.*float64"),
        (torch.zeros(2, 3, 8, 8), [1, 2], (8, 0), r"\(8, 0\)"),
        (torch.zeros(2, 3, 8, 8), [1, 2], (8, 8, 8), r"\(8, 8, 8\)"),
    ],
)
def test_bad_input_is_refused(images, keys, size, noun) -> None:
    with pytest.raises(DataError, match=noun):
        Augmentation()(images, keys, size)


def test_random_boxes_keep_within_the_area_asked_for() -> None:
    augment = Augmentation(AugmentConfig(kind="rrc", area=(0.2, 0.5), aspect=(1.0, 1.0)))
    keys, sides = sample_keys(0, 0, np.arange(500)), np.full(500, 100)
    left, top, right, bottom = augment.crops(keys, sides, sides, (32, 32)).boxes.T
    shares = (right - left) * (bottom - top)
    assert 0.2 - 1e-9 <= shares.min() < 0.21 and 0.49 < shares.max() <= 0.5 + 1e-9
