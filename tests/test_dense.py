import torch

from conftest import SMALLEST, stirred
from veca import DenseVit, Veca


def test_dense_outputs_and_full_attention():
    """One layer is enough for every patch to see every other: the opposite of VECA."""
    model = stirred(DenseVit(SMALLEST.replace(depth=1))).eval()
    images = torch.randn(1, 3, 32, 48, requires_grad=True)
    out = model(images)
    assert out.cls.shape == (1, 32) and out.patches.shape == (1, 6, 32) and out.grid == (2, 3)
    assert out.feature_map().shape == (1, 32, 2, 3)
    grad = torch.autograd.grad(out.patches[0, 0].sum(), images)[0]
    assert (grad[0, :, 16:, 32:] != 0).any()


def test_extra_tokens_do_not_rotate():
    model = DenseVit(SMALLEST)
    cos, sin = model._rotation((2, 3), torch.device("cpu"))
    assert (cos[0, :5] == 1).all() and (sin[0, :5] == 0).all() and (sin[0, 5:] != 0).any()


def test_tokens_are_what_the_projection_takes():
    for model in (
        DenseVit(SMALLEST.replace(output_width=48)),
        Veca(SMALLEST.replace(output_width=48)),
    ):
        model = stirred(model).eval()
        images = torch.randn(2, 3, 32, 48)
        out, before = model(images), model.tokens(images)
        assert before.cls.shape == (2, 32) and before.grid == out.grid
        torch.testing.assert_close(model.project(before.cls), out.cls)
        torch.testing.assert_close(model.project(before.patches), out.patches)
