"""Joint projections: one rule for all, the same each time."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from veca.errors import InputError, MissingExtraError
from veca.viz.project import Palette, Pca, joint_colours, layer_colours, project


def _plain_pca(features, components):
    """Principal components by a singular value decomposition, largest entries positive."""
    centred = (features - features.mean(0)).double()
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    chosen = directions[:components]
    signs = torch.stack([row[row.abs().argmax()].sign() for row in chosen])
    return centred @ (chosen * signs[:, None]).T


def test_pca_equals_a_plain_decomposition_over_all_parts():
    features = torch.randn(200, 8) * torch.arange(1, 9)
    parts = project([features[:50], features[50:]], 3)
    assert [len(part) for part in parts] == [50, 150]
    torch.testing.assert_close(torch.cat(parts), _plain_pca(features, 3), rtol=1e-6, atol=1e-5)


def test_colours_are_the_projection_between_its_quantiles():
    features = torch.randn(300, 6) * torch.tensor([5.0, 4, 3, 2, 1, 1])
    projected = _plain_pca(features, 3)
    low, high = projected.quantile(0.01, dim=0), projected.quantile(0.99, dim=0)
    expected = ((projected - low) / (high - low)).clamp(0, 1).float()
    torch.testing.assert_close(joint_colours([features])[0], expected, rtol=1e-4, atol=1e-4)


def test_equal_rows_get_equal_colours_in_every_part_and_later():
    shared = torch.randn(16)
    first, second = torch.randn(30, 16), torch.randn(50, 16)
    first[7], second[41] = shared, shared
    a, b = joint_colours([first, second])
    assert torch.equal(a[7], b[41])
    again = joint_colours([first, second])
    assert torch.equal(again[0], a) and torch.equal(again[1], b)
    palette = Palette.fit([first, second])
    assert torch.equal(palette(shared[None])[0], a[7])


def test_a_layer_that_groups_patches_alike_has_the_same_colours():
    last = [torch.randn(60, 8) * torch.arange(8, 0, -1), torch.randn(40, 8)]
    turn = torch.linalg.qr(torch.randn(8, 8))[0]
    first = [(part @ turn) * 0.01 + 5 for part in last]
    other = [torch.randn(60, 8), torch.randn(40, 8)]
    colours = layer_colours([other, first, last])
    expected = joint_colours(last)
    for found, wanted in zip(colours[2], expected, strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(colours[1], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)
    assert torch.cat(colours[0]).std(dim=0).min() > 0.15
    alone = joint_colours(other)
    assert (torch.cat(colours[0]) - torch.cat(expected)).square().mean() < (
        torch.cat(alone) - torch.cat(expected)
    ).square().mean()


def test_layers_without_spread_or_of_other_maps():
    flat = layer_colours([[torch.ones(10, 5)], [torch.randn(10, 5)]])
    assert (flat[0][0] == 0.5).all() and flat[1][0].std() > 0.1
    assert (layer_colours([[torch.randn(1, 5)], [torch.randn(1, 5)]])[0][0] == 0.5).all()
    with pytest.raises(InputError, match=r"\[\[4\], \[5\]\]"):
        layer_colours([[torch.randn(4, 4)], [torch.randn(5, 4)]])


def test_few_directions_and_constant_features():
    assert project([torch.randn(10, 2)], 3)[0].shape == (10, 3)
    assert (joint_colours([torch.randn(10, 2)])[0][:, 2] == 0.5).all()
    assert (joint_colours([torch.ones(10, 5)])[0] == 0.5).all()
    assert (joint_colours([torch.randn(1, 5)])[0] == 0.5).all()


def test_features_of_half_precision_are_projected_in_full():
    features = torch.randn(40, 8)
    half = features.bfloat16()
    assert torch.equal(Pca.fit([half])(half), Pca.fit([half.float()])(half.float()))


def test_wrong_input_is_told():
    with pytest.raises(InputError, match="'pcs'"):
        project([torch.randn(4, 4)], method="pcs")
    with pytest.raises(InputError, match=r"\(4, 5\)"):
        project([torch.randn(4, 4), torch.randn(4, 5)])
    with pytest.raises(InputError, match="empty"):
        project([])


def test_umap_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(MissingExtraError, match=r"\[umap\]"):
        project([torch.randn(10, 4)], method="umap")


@pytest.mark.skipif(
    importlib.util.find_spec("umap") is None,
    reason="umap-learn is not installed (extra umap)",
)
def test_umap_is_the_same_with_the_same_seed():
    features = [torch.randn(30, 8), torch.randn(20, 8) + 6]
    first = project(features, 2, method="umap", seed=3)
    second = project(features, 2, method="umap", seed=3)
    assert [part.shape for part in first] == [(30, 2), (20, 2)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # Two clouds far apart stay apart.
    gap = (first[0].mean(0) - first[1].mean(0)).norm()
    assert gap > first[0].std() * 2
    assert joint_colours(features, method="umap")[0].shape == (30, 3)
