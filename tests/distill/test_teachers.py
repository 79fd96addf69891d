"""What a student is to learn from its teachers, and in which passes they say it."""

from __future__ import annotations

import torch
from torch import nn

from distill.small import settings
from veca.distill.parallel import World
from veca.distill.teachers import open_teachers
from veca.teachers import CallableTeacher


def test_the_global_feature_at_a_size_of_its_own() -> None:
    """The targets are those of two passes of the teacher, one for each feature."""
    asked = []

    def brightest(images):
        asked.append(tuple(images.shape[-2:]))
        return nn.functional.max_pool2d(images, 16)

    teacher = CallableTeacher(brightest, width=3, stride=16, name="colours")
    table = {"name": "colours", "global_size": 48}
    config = settings(teachers=[table], data={"hold_out": 6})
    teachers = open_teachers(config, World(), [teacher])
    pixels = torch.rand(4, 3, 64, 64)
    (target,) = teachers.targets(pixels, (2, 2))
    assert teachers.image_size((2, 2)) == (48, 48)  # the larger of both
    assert teachers.image_size((4, 4)) == (64, 64)
    assert torch.equal(target.patches, teacher.features(pixels, (2, 2)).patches)
    assert torch.equal(target.cls, teacher.features(pixels, (3, 3)).cls)
    assert not torch.equal(target.cls, teacher.features(pixels, (2, 2)).cls)
    asked.clear()
    teachers.targets(pixels, (3, 3))
    assert asked == [(48, 48)]  # one pass serves both where the sizes agree
    asked.clear()
    (parts,) = open_teachers(
        settings(teachers=[{**table, "micro_batch": 1}], data={"hold_out": 6}), World(), [teacher]
    ).targets(pixels, (2, 2))
    assert torch.allclose(parts.cls, target.cls) and torch.allclose(parts.patches, target.patches)
    assert asked == [(32, 32)] * 4 + [(48, 48)] * 4


def test_a_pass_of_the_same_pixels_serves_both_and_larger_ones_are_split() -> None:
    seen = []

    def brightest(images):
        seen.append((len(images), images.shape[-1]))
        return nn.functional.max_pool2d(images, 16)

    fixed = CallableTeacher(brightest, width=3, stride=16, name="colours", sizes=[(48, 48)])
    table = {"name": "colours", "global_size": 48}
    config = settings(teachers=[table], data={"hold_out": 6})
    pixels = torch.rand(4, 3, 48, 48)
    open_teachers(config, World(), [fixed]).targets(pixels, (1, 1))
    assert seen == [(4, 48)]  # a grid of 1 x 1 is seen at 48 pixels as well
    free = CallableTeacher(brightest, width=3, stride=16, name="colours")
    config = settings(
        teachers=[{**table, "global_size": 64, "micro_batch": 4}], data={"hold_out": 6}
    )
    teachers = open_teachers(config, World(), [free])
    teachers.smallest_cells = 4
    seen.clear()
    teachers.targets(pixels, (2, 2))
    assert seen == [(4, 32), *[(1, 64)] * 4]
