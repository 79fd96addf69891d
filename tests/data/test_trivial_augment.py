"""Every operation of TrivialAugmentWide against Pillow, pixel by pixel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from data.pictures import picture
from veca.data import sample_keys
from veca.data.trivial_augment import BINS, OPS, DrawnOperations, apply_operations, draw_operations

ENHANCERS = {
    "Brightness": ImageEnhance.Brightness,
    "Color": ImageEnhance.Color,
    "Contrast": ImageEnhance.Contrast,
    "Sharpness": ImageEnhance.Sharpness,
}
SIGNED = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", *ENHANCERS}


def by_pillow(image: Image.Image, op: str, value: float) -> Image.Image:
    affine = {
        "ShearX": (1, value, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, value, 1, 0),
        "TranslateX": (1, 0, value, 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, value),
    }
    if op in affine:
        return image.transform(image.size, Image.Transform.AFFINE, affine[op])
    if op == "Rotate":
        return image.rotate(value)
    if op in ENHANCERS:
        return ENHANCERS[op](image).enhance(1 + value)
    if op == "Posterize":
        return ImageOps.posterize(image, int(value))
    if op == "Solarize":
        return ImageOps.solarize(image, value)
    if op == "AutoContrast":
        return ImageOps.autocontrast(image)
    if op == "Equalize":
        return ImageOps.equalize(image)
    return image


def stack(images: list[Image.Image]) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)


def published_strength(op: str, bin: int) -> float:
    """The wide ranges, 31 bins each."""
    share = bin / (BINS - 1)
    if op in ("ShearX", "ShearY") or op in ENHANCERS:
        return 0.99 * share
    if op in ("TranslateX", "TranslateY"):
        return float(int(32 * share + 1e-9))
    if op == "Rotate":
        return 135 * share
    if op == "Posterize":
        return 8 - round(bin / 5)
    if op == "Solarize":
        return 255 * (1 - share)
    return 0.0


@pytest.mark.parametrize("op", OPS)
def test_every_bin_gives_pillows_pixels(op: str) -> None:
    images = [picture(i, 45, 61) for i in range(2)]
    images.append(Image.new("RGB", (61, 45), (9, 200, 77)))  # nothing to stretch or to equalise
    dim = picture(3, 45, 61).point(lambda level: 60 + level // 3)
    images.append(dim)
    cases = [
        (image, sign * published_strength(op, bin))
        for image in images
        for bin in range(0, BINS, 3)
        for sign in ((1, -1) if op in SIGNED else (1,))
    ]
    drawn = DrawnOperations(
        np.full(len(cases), OPS.index(op)), np.array([value for _, value in cases])
    )
    (seen,) = apply_operations(stack([image for image, _ in cases]), drawn)
    wanted = stack([by_pillow(image, op, value) for image, value in cases])
    assert torch.equal(seen, wanted)


def test_draws_follow_the_published_table() -> None:
    keys = sample_keys(0, 0, np.arange(40_000))
    drawn = draw_operations(keys, (3, 4, 5))
    assert np.abs(np.bincount(drawn.ops, minlength=14) - 40_000 / 14).max() < 250
    for place, op in enumerate(OPS):
        values = drawn.values[drawn.ops == place]
        allowed = {published_strength(op, bin) for bin in range(BINS)}
        assert all(min(abs(abs(v) - a) for a in allowed) < 1e-9 for v in np.unique(values))
        negative = (values < 0).mean()
        assert abs(negative - 0.48) < 0.03 if op in SIGNED else negative == 0


def test_a_mixed_batch_is_each_image_on_its_own() -> None:
    images = stack([picture(i, 32, 40) for i in range(60)])
    drawn = draw_operations(sample_keys(1, 0, np.arange(60)), (3, 4, 5))
    assert len(set(drawn.ops.tolist())) == 14
    before = images.clone()
    (together,) = apply_operations(images, drawn)
    assert torch.equal(images, before)
    for i in range(60):
        (alone,) = apply_operations(
            images[i : i + 1], DrawnOperations(drawn.ops[i : i + 1], drawn.values[i : i + 1])
        )
        assert torch.equal(together[i], alone[0])


@pytest.mark.parametrize("op", ["ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"])
def test_moves_shift_the_teachers_view_alike(op: str) -> None:
    coarse = picture(5, 6, 6)
    small = stack([coarse.resize((32, 32), Image.Resampling.BICUBIC)])
    value = {"Rotate": 40.0, "ShearX": 0.5, "ShearY": -0.5}.get(op, 6.0)

    def difference(size: tuple[int, int], factor: float) -> float:
        """Between the student's moved view and the teacher's, moved by `factor` times as much."""
        large = stack([coarse.resize((size[1], size[0]), Image.Resampling.BICUBIC)])
        drawn = DrawnOperations(np.array([OPS.index(op)]), np.array([value]))
        wrong = DrawnOperations(drawn.ops, drawn.values * factor)
        (moved,), (_, enlarged) = (
            apply_operations(small, drawn),
            apply_operations(small, wrong, large),
        )
        shrunk = torch.nn.functional.interpolate(enlarged.float(), (32, 32), mode="area")
        return float((shrunk - moved).abs().mean())

    for size in ((64, 64), (48, 96)):  # also a teacher's view of another aspect
        assert difference(size, 1.0) < 6 < 12 < difference(size, 0.5)


@pytest.mark.parametrize("op", ["Contrast", "AutoContrast", "Equalize"])
def test_colours_are_measured_on_the_students_view(op: str) -> None:
    student = stack([picture(5, 16, 16)])
    teacher = stack([picture(6, 24, 24)])
    drawn = DrawnOperations(np.array([OPS.index(op)]), np.array([0.5 if op == "Contrast" else 0.0]))
    seen, other = apply_operations(student, drawn, teacher)
    mapping = [
        dict(zip(student[0, c].flatten().tolist(), seen[0, c].flatten().tolist(), strict=True))
        for c in range(3)
    ]
    for c in range(3):
        pairs = zip(teacher[0, c].flatten().tolist(), other[0, c].flatten().tolist(), strict=True)
        known = [(mapping[c][level], new) for level, new in pairs if level in mapping[c]]
        assert len(known) > 50 and all(wanted == new for wanted, new in known)
