"""Backbones give the features of the network they wrap, on the right grid."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from probe import sets
from veca import DenseVit, VecaConfig
from veca.cost import cost
from veca.images import normalize
from veca.probe import Backbone, ElasticBackbone, ProbeError, TeacherBackbone, as_backbone
from veca.probe.backbone import check_unique, guarded_features, own_grid
from veca.teachers import CallableTeacher, load_teacher
from veca.weights.names import public_name

PIXELS = torch.rand(2, 3, 48, 64, generator=torch.Generator().manual_seed(0))


class Cells(nn.Module):
    """The mean colour of each cell: features whose value and place are known."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(stride)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images):
        return self.pool(images) * self.scale


def teacher(stride: int, **options):
    return CallableTeacher(Cells(stride), width=3, stride=stride, name=f"cells{stride}", **options)


class TestVeca:
    def test_features_are_the_models(self):
        backbone = sets.backbone(cores=4)
        out = backbone.features(PIXELS, (3, 4))
        c = backbone.model.config
        with torch.no_grad():
            expected = backbone.model(normalize(PIXELS, c.image_mean, c.image_std), cores=4)
        torch.testing.assert_close(out.cls, expected.cls)
        torch.testing.assert_close(out.patches, expected.patches)
        assert out.grid == (3, 4) and out.cls.dtype == torch.float32

    def test_budgets_share_the_model_and_differ(self):
        rows = sets.backbone().at([1, 8])
        assert rows[0].model is rows[1].model and [row.cores for row in rows] == [1, 8]
        assert rows[0].label == "veca C=1"
        a, b = (row.features(PIXELS, (3, 4)).cls for row in rows)
        assert not torch.allclose(a, b)

    def test_pixels_off_the_grid_are_resized(self):
        out = sets.backbone().features(PIXELS[:, :, :45, :60], (3, 4))
        assert out.grid == (3, 4) and out.patches.shape == (2, 12, 32)

    def test_identity_follows_weights_config_and_budget(self):
        base = sets.backbone(4)
        same = [base, ElasticBackbone(sets.model(), 4, name="other")]
        assert same[0].identity() == same[1].identity()
        others = [sets.backbone(8), sets.backbone(4, seed=1)]
        with torch.no_grad():
            others.append(sets.backbone(4))
            others[-1].model.norm.bias += 1e-6
        shifted = sets.model(config=sets.CONFIG.replace(image_mean=(0.5, 0.5, 0.5)))
        others.append(ElasticBackbone(shifted, 4))
        for other in others:
            assert other.identity() != base.identity()

    def test_compute_is_the_costs(self):
        found = sets.backbone(4).compute((48, 64), 16)
        expected = cost(sets.CONFIG, (48, 64), 4).veca
        assert (found.interactions, found.flops) == (expected.interactions, expected.flops)


class TestProjection:
    """Features after the output projection, as the model gives them, or before it."""

    WIDE = sets.CONFIG.replace(output_width=48)

    @pytest.mark.parametrize("cores", [2, 8])
    def test_veca(self, cores):
        model = sets.model(config=self.WIDE)
        after = ElasticBackbone(model, cores)
        before = after.under(dataclasses.replace(sets.protocol().extract, projection=False))
        a, b = after.features(PIXELS, (3, 4)), before.features(PIXELS, (3, 4))
        assert a.patches.shape == (2, 12, 48) and b.patches.shape == (2, 12, 32)
        torch.testing.assert_close(model.project(b.patches.clone()), a.patches)
        torch.testing.assert_close(model.project(b.cls.clone()), a.cls)
        assert b.grid == a.grid == (3, 4) and before.label == after.label
        assert not model.norm._forward_hooks

    def test_dense(self):
        torch.manual_seed(0)
        model = DenseVit(self.WIDE).eval()
        after = as_backbone(model)
        before = after.under(dataclasses.replace(sets.protocol().extract, projection=False))
        a, b = after.features(PIXELS, (3, 4)), before.features(PIXELS, (3, 4))
        torch.testing.assert_close(model.project(b.patches.clone()), a.patches)
        torch.testing.assert_close(model.project(b.cls.clone()), a.cls)

    def test_they_are_told_apart(self):
        model = sets.model(config=self.WIDE)
        after, before = ElasticBackbone(model), ElasticBackbone(model, projection=False)
        assert after.identity() != before.identity()
        assert before.describe()["features"] == "before the output projection"
        assert ElasticBackbone(model, projection=False).at([2])[0].projection is False


class TestGrids:
    def test_patch_14_runs_at_518_where_16_runs_at_512(self):
        fourteen = TeacherBackbone(teacher(14))
        grid = fourteen.grid_for((512, 512), 16)
        assert grid == (37, 37) and fourteen.teacher.input_size(grid) == (518, 518)
        assert sets.backbone().grid_for((512, 512), 16) == (32, 32)

    def test_a_coarse_network_is_shown_the_image_enlarged(self):
        coarse = TeacherBackbone(teacher(32))
        grid = coarse.grid_for((192, 256), 16)
        assert grid == (12, 16) and coarse.teacher.input_size(grid) == (384, 512)

    def test_a_finer_network_keeps_its_own_grid(self):
        assert TeacherBackbone(teacher(8)).grid_for((64, 96), 16) == (8, 12)

    def test_fixed_sizes(self):
        fixed = TeacherBackbone(teacher(16, sizes=[(224, 224)]))
        assert fixed.grid_for((512, 688), 16) == (14, 14)

    def test_rounding(self):
        assert own_grid((40, 7), 16, 16) == (3, 1)
        assert own_grid((39, 24), 16, 16) == (2, 2)
        assert own_grid((64, 64), 32, 16) == (4, 4)


class TestTeacher:
    def test_dense_features_lie_where_they_belong(self):
        pixels = torch.zeros(1, 3, 32, 64)
        pixels[:, 0, 16:, 48:] = 1  # the last cell of 2 x 4 is red
        backbone = TeacherBackbone(teacher(32))
        out = backbone.features(pixels, backbone.grid_for((32, 64), 16))
        red = out.patches[0, :, 0].unflatten(0, out.grid)
        assert out.grid == (2, 4)
        assert red[1, 3] > 0.9 and red.flatten()[:-1].max() < 0.2

    def test_a_cpu_takes_a_few_images_at_a_time(self, monkeypatch):
        backbone, seen = TeacherBackbone(teacher(16)), []
        features = backbone.teacher.features
        monkeypatch.setattr(
            backbone.teacher, "features", lambda x, g: (seen.append(len(x)), features(x, g))[1]
        )
        pixels = torch.rand(5, 3, 32, 48)
        whole = backbone.features(pixels, (2, 3))
        monkeypatch.setattr("veca.probe.backbone.CPU_PIXELS", 2 * 32 * 48)
        parts = backbone.features(pixels, (2, 3))
        assert seen == [5, 2, 2, 1] and parts.grid == whole.grid
        assert torch.equal(parts.cls, whole.cls) and torch.equal(parts.patches, whole.patches)

    def test_a_callable_is_never_cached(self):
        assert TeacherBackbone(teacher(16)).identity() is None

    def test_identity_of_a_real_teacher(self):
        first, second = (TeacherBackbone(load_teacher(sets.model(seed))) for seed in (0, 1))
        assert first.identity() == TeacherBackbone(load_teacher(sets.model(0))).identity()
        assert first.identity() != second.identity()

    def test_flops_are_counted_attention_included(self):
        dense = DenseVit(sets.CONFIG).eval()
        ours = as_backbone(dense).compute((64, 64), 16)
        theirs = TeacherBackbone(load_teacher(dense)).compute((64, 64), 16)
        assert theirs.interactions == ours.interactions == 16**2
        assert theirs.flops == ours.flops
        cnn = TeacherBackbone(teacher(16)).compute((64, 64), 16)
        assert cnn.interactions is None


class TestAnything:
    def test_from_each_network(self):
        dense = as_backbone(DenseVit(sets.CONFIG))
        assert dense.features(PIXELS, (3, 4)).patches.shape == (2, 12, 32)
        assert dense.role == "baseline" and dense.identity() is not None
        assert as_backbone(teacher(16)).role == "teacher"
        assert as_backbone(sets.model(), cores=2).label == "veca C=2"
        assert as_backbone(dense) is dense

    def test_what_is_none(self):
        with pytest.raises(ProbeError, match="Linear"):
            as_backbone(nn.Linear(2, 2))
        with pytest.raises(ProbeError, match="cores"):
            as_backbone(DenseVit(sets.CONFIG), cores=8)

    def test_nan_features_are_refused(self):
        backbone = sets.backbone()
        with torch.no_grad():
            backbone.model.norm.bias[0] = torch.nan
        with pytest.raises(ProbeError, match="NaN"):
            guarded_features(backbone, PIXELS, (3, 4))

    def test_out_of_memory_names_the_way_out(self, monkeypatch):
        backbone = sets.backbone()

        def fail(*_):
            raise torch.OutOfMemoryError("full")

        monkeypatch.setattr(backbone, "features", fail)
        with pytest.raises(ProbeError, match="--batch-size"):
            guarded_features(backbone, PIXELS, (3, 4))

    def test_two_of_one_name(self):
        with pytest.raises(ProbeError, match="'veca C=8'"):
            check_unique([sets.backbone(), sets.backbone(seed=1)])

    def test_names_to_publish(self):
        assert public_name("small=/home/me/runs/small") == "small=small"
        assert public_name("small=runs/small") == "small=runs/small"
        assert public_name("knn.k=[5,10]") == "knn.k=[5,10]"
        assert public_name("/home/me/x/dino") == "dino"
        assert public_name("veca:/home/me/small") == "veca:small"
        assert public_name("facebook/dinov2-base") == "facebook/dinov2-base"
        assert public_name("dinov3-vitb16") == "dinov3-vitb16"


def test_patch_size_8_config():
    config = VecaConfig(depth=2, width=32, heads=2, num_cores=8, patch_size=8)
    backbone = ElasticBackbone(sets.model(config=config))
    assert isinstance(backbone, Backbone)
    assert backbone.features(PIXELS, backbone.grid_for((48, 64), 16)).grid == (6, 8)
