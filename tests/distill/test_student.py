"""The backbone's own output, heads for other teachers, the teacher's patch convolution."""

from __future__ import annotations

import pytest
import torch

from conftest import SMALLEST, stirred
from veca import Veca, VecaConfig, create_model
from veca.distill import DistillError, load_heads
from veca.distill.student import (
    Student,
    save_heads,
    student_config,
    take_patch_embedding,
)
from veca.teachers import CallableTeacher, OurTeacher


def test_the_first_teacher_learns_the_backbones_own_output() -> None:
    backbone = stirred(create_model(SMALLEST, output_width=20)).eval()
    student = Student(backbone, [(20, 20)])
    images = torch.randn(2, 3, 32, 48)
    (said,) = student(images, cores=5)
    out = backbone(images, cores=5)
    assert torch.allclose(said.cls, out.cls, atol=1e-6)
    assert torch.allclose(said.patches, out.patches, atol=1e-6)
    assert not student.heads


def test_a_further_teacher_gets_a_head() -> None:
    backbone = stirred(create_model(SMALLEST)).eval()
    student = stirred(Student(backbone, [(32, 32), (12, 12), (10, 6)])).eval()
    images = torch.randn(2, 3, 32, 32)
    first, second, third = student(images)
    out = backbone(images)
    head = student.heads["1"].cls
    assert torch.allclose(first.patches, out.patches, atol=1e-6)
    assert torch.allclose(second.cls, head(out.cls), atol=1e-5)
    assert torch.allclose(second.patches, head(out.patches), atol=1e-5)
    assert third.cls.shape == (2, 10) and third.patches.shape == (2, 4, 6)


def test_heads_there_and_back(tmp_path) -> None:
    student = stirred(Student(create_model(SMALLEST), [(32, 32), (12, 12), (10, 6)]))
    save_heads(dict(student.heads.state_dict()), ["a", "b/c", "d"], tmp_path)
    heads = load_heads(tmp_path)
    assert sorted(heads) == ["b/c", "d"]
    cls, patches = torch.randn(2, 32), torch.randn(2, 4, 32)
    for name, place in (("b/c", "1"), ("d", "2")):
        for a, b in zip(heads[name](cls, patches), student.heads[place](cls, patches), strict=True):
            assert torch.equal(a, b)
    assert load_heads(tmp_path / "elsewhere") == {}


def test_output_width_follows_the_teacher() -> None:
    assert student_config("tiny", {}, (192, 192)).output_width is None
    assert student_config("tiny", {}, (1280, 1280)).output_width == 1280
    # Different widths: no single projection can give both, so both get heads.
    assert student_config("tiny", {}, (512, 768)).output_width is None
    assert sorted(Student(create_model(SMALLEST), [(10, 6)]).heads) == ["0"]


def test_a_width_that_cannot_be_the_teachers_is_refused() -> None:
    with pytest.raises(DistillError, match="output_width"):
        Student(create_model(SMALLEST), [(20, 20)])


def test_patch_convolution_of_a_teacher_of_the_same_shape() -> None:
    config = VecaConfig(
        depth=1, width=32, heads=2, num_cores=4, image_mean=(0.5,) * 3, image_std=(0.3,) * 3
    )
    teacher = OurTeacher(stirred(Veca(config)), name="t")
    backbone = create_model(SMALLEST)
    other = CallableTeacher(lambda x: x, width=3, stride=16)
    assert take_patch_embedding(backbone, [other, teacher]) == "t"
    # The same tokens from the same pixels, though the two normalise them differently.
    pixels = torch.rand(1, 3, 32, 32)

    def normalised(c: VecaConfig) -> torch.Tensor:
        mean, std = torch.tensor(c.image_mean), torch.tensor(c.image_std)
        return (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)

    ours = backbone.patch_embed(normalised(backbone.config))
    theirs = teacher.model.patch_embed(normalised(config))
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_no_patch_convolution_of_another_shape() -> None:
    teacher = OurTeacher(Veca(VecaConfig(depth=1, width=64, heads=2, num_cores=4)), name="t")
    backbone = create_model(SMALLEST)
    before = backbone.patch_embed.weight.detach().clone()
    assert take_patch_embedding(backbone, [teacher]) is None
    assert torch.equal(backbone.patch_embed.weight, before)
