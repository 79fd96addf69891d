"""int8 by definition: rounding per channel and per token, equalisation, and which layers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from veca import VecaConfig, create_model
from veca.errors import ConfigError, InputError
from veca.model import Veca
from veca.quantization import (
    Agreement,
    Rounding,
    agreement,
    emulated,
    equalised,
    linear_layers,
    mean_agreement,
    quantized_linear_reference,
    quantized_rows,
    quantized_weight,
)


def small() -> Veca:
    torch.manual_seed(0)
    return create_model(
        VecaConfig(depth=2, width=32, heads=2, num_cores=4, output_width=48, patch_size=8)
    ).eval()


def test_a_weight_has_one_scale_a_channel_and_is_half_a_step_off_at_most() -> None:
    weight = torch.randn(5, 7) * torch.tensor([1e-3, 1, 10, 100, 0]).unsqueeze(1)
    whole, scale = quantized_weight(weight)
    assert whole.dtype == torch.int8 and scale.shape == (5,)
    assert whole[:4].abs().amax(dim=1).tolist() == [127] * 4
    assert ((whole * scale.unsqueeze(1) - weight).abs() <= scale.unsqueeze(1) / 2 * 1.001).all()
    again, same = quantized_weight(whole * scale.unsqueeze(1))
    assert torch.equal(again, whole) and torch.allclose(same, scale)


def test_a_token_is_rounded_by_its_own_largest_number() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [1000.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
    whole, scale = quantized_rows(x)
    assert whole[0].tolist() == [64, -127, 32]  # half to even
    assert whole[2].tolist() == [0, 0, 0] and torch.isfinite(scale).all()
    assert torch.equal(quantized_rows(x[:1])[0], whole[:1])  # whatever is beside it


def test_the_reference_is_the_linear_layer_up_to_rounding() -> None:
    x, weight, bias = torch.randn(11, 64), torch.randn(9, 64), torch.randn(9)
    found = quantized_linear_reference(x, *quantized_weight(weight), bias)
    wanted = F.linear(x, weight, bias)
    assert (found - wanted).norm() / wanted.norm() < 0.02
    wide = quantized_linear_reference(
        torch.ones(1, 4096), *quantized_weight(torch.ones(1, 4096)), None
    )
    torch.testing.assert_close(wide, torch.tensor([[4096.0]]))


def test_equalising_changes_nothing_but_what_is_rounded() -> None:
    model, images = small(), torch.randn(2, 3, 32, 40)
    ours = equalised(model, size=32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images).patches, model(images).patches, rtol=0, atol=1e-4)
    name = "blocks.0.ffn.down"
    assert not torch.equal(linear_layers(ours)[name].weight, linear_layers(model)[name].weight)
    for alpha in (-0.1, 1.5, "half", True):
        with pytest.raises(InputError, match="alpha"):
            equalised(model, alpha=alpha)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="photos"):
        equalised(model, [])


def test_emulation_rounds_the_layers_of_a_rounding_and_no_others() -> None:
    model, images = small(), torch.randn(1, 3, 32, 32)
    every = Rounding(leave=("*",))
    assert every.layers(model) == []
    with torch.no_grad():
        assert torch.equal(emulated(model, every)(images).patches, model(images).patches)
        assert not torch.equal(emulated(model)(images).patches, model(images).patches)
    assert "project" not in Rounding().layers(model)
    assert len(Rounding(()).layers(model)) == 2 * 6 + 1
    with pytest.raises(InputError, match="block7"):
        Rounding(("block7.*",)).layers(model)
    with pytest.raises(ConfigError, match="leave"):
        Rounding("project")  # type: ignore[arg-type]
    assert Rounding.from_dict(Rounding().to_dict()) == Rounding()


def test_agreement_is_the_mean_cosine_of_cls_and_patches() -> None:
    model, images = small(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        out = model(images)
    assert agreement(out, out) == pytest.approx((1, 1))
    assert agreement(out._replace(patches=-out.patches), out).patches == pytest.approx(-1)
    assert mean_agreement(model, model, [images, images]) == pytest.approx((1, 1))
    with pytest.raises(InputError, match="photos"):
        mean_agreement(model, model, [])
    assert Agreement(0.999, 0.99).passes(Agreement(0.999, 0.99))
    assert not Agreement(0.999, 0.98).passes(Agreement(0.999, 0.99))
