"""The fine-tuning examples learn, at every budget, and leave a table behind."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch.nn import functional as F

import veca

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BUDGETS = ["8", "16", "24", "32", "40", "48", "56", "64"]
# 37 corners of a grid of 4 x 4 x 4 colours.
COLOURS = [(20 + 70 * (i // 16), 20 + 70 * (i // 4 % 4), 20 + 70 * (i % 4)) for i in range(37)]


@pytest.fixture
def example(monkeypatch):
    """Imports an example as `python examples/NAME.py` would."""

    def load(name: str):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def pets(tmp_path_factory) -> Path:
    """Oxford-IIIT Pet in small: a square on grey; its colour is the breed, its place the mask."""
    root = tmp_path_factory.mktemp("pets")
    rng = np.random.default_rng(0)
    (root / "images").mkdir()
    (root / "annotations" / "trimaps").mkdir(parents=True)
    for split, count in (("trainval", 4), ("test", 2)):
        lines = []
        for number, colour in enumerate(COLOURS, start=1):
            for i in range(count):
                name = f"breed{number}_{split}{i}"
                pixels = rng.integers(90, 150, (48, 64, 3)).astype(np.uint8)
                trimap = np.full((48, 64), 2, dtype=np.uint8)
                y, x = rng.integers(0, 20), rng.integers(0, 30)
                trimap[y : y + 28, x : x + 32] = 3
                trimap[y + 2 : y + 26, x + 2 : x + 30] = 1
                pixels[trimap == 1] = colour
                Image.fromarray(pixels).save(root / "images" / f"{name}.jpg")
                Image.fromarray(trimap).save(root / "annotations" / "trimaps" / f"{name}.png")
                lines.append(f"{name} {number} 1 {number}")
        (root / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights") / "little"
    veca.save(veca.create_model("tiny", depth=2, width=32, heads=2), folder)
    return str(folder)


def _options(pets: Path, weights: str, out: Path) -> list[str]:
    return [
        "--data", str(pets), "--weights", weights, "--out", str(out), "--size", "48", "--batch",
        "12", "--lr", "3e-3", "--head-lr", "1e-2", "--threads", "1",
    ]  # fmt: skip


def _check_files(out: Path, results: dict, metric: str) -> None:
    assert list(results["scores"]) == BUDGETS
    assert json.loads((out / "results.json").read_text()) == results
    rows = [line.split("|")[1:3] for line in (out / "results.md").read_text().splitlines()]
    assert [part.strip() for part in rows[0]] == ["cores", metric]
    assert {c.strip(): v.strip() for c, v in rows[2:]} == {
        cores: f"{score:.3f}" for cores, score in results["scores"].items()
    }
    assert str(out.parent) not in (out / "results.json").read_text()
    assert len(results["weights_sha256"]) == 64


def test_classification_learns_at_every_budget(example, pets, weights, tmp_path):
    module = example("finetune_classification")
    args = _options(pets, weights, tmp_path / "out")
    results = module.main([*args, "--steps", "100"])
    _check_files(tmp_path / "out", results, "top-1")
    assert results["nested"] is True
    assert min(results["scores"].values()) > 0.15  # 0.03 by chance
    assert results["images"] == {"train": 148, "test": 74}


def test_segmentation_learns_at_every_budget(example, pets, weights, tmp_path):
    module = example("finetune_segmentation")
    args = _options(pets, weights, tmp_path / "out")
    results = module.main([*args, "--steps", "60", "--limit", "30", "--test-limit", "9"])
    _check_files(tmp_path / "out", results, "mIoU")
    assert min(results["scores"].values()) > 0.35  # 0.23 for background alone
    assert results["images"] == {"train": 30, "test": 9}


def test_saved_backbone_and_head_give_the_same_logits(example, pets, weights, tmp_path):
    module = example("finetune_classification")
    args = _options(pets, weights, tmp_path / "out")
    module.main([*args, "--steps", "2", "--no-nested"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["nested"] is False
    backbone = veca.load(tmp_path / "out" / "backbone")
    with safe_open(tmp_path / "out" / "head.safetensors", "pt") as file:
        head = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["backbone_sha256"] == veca.weights.weights_hash(backbone)
    data = module.open_dataset("oxford-pets", pets, "test", task="classification")
    model = module.Classifier(backbone, 37)
    model.head.load_state_dict(head)
    score = module.top1(model.eval(), data, range(len(data)), 48, 8)
    assert score == pytest.approx(results["scores"]["8"])


@pytest.mark.parametrize(("option", "seen"), [([], {8, 32, 64}), (["--no-nested"], {None})])
def test_nested_dropout_is_on_unless_asked_otherwise(
    example, pets, weights, tmp_path, monkeypatch, option, seen
):
    module = example("finetune_classification")
    budgets = []
    forward = veca.Veca.forward

    def spy(self, images, cores=None):
        if self.training:
            budgets.append(cores)
        return forward(self, images, cores)

    monkeypatch.setattr(veca.Veca, "forward", spy)
    args = _options(pets, weights, tmp_path / "out")
    module.main([*args, "--steps", "25", "--batch", "2", "--test-limit", "1", *option])
    assert seen <= set(budgets)
    assert len(budgets) == 25
    if option:
        assert set(budgets) == seen


def test_views_of_image_and_mask_agree(example):
    import random

    module = example("finetune_segmentation")
    mask = np.zeros((40, 60), dtype=np.uint8)
    mask[10:30, 5:25] = 1
    image = Image.fromarray(np.repeat(mask[..., None] * 255, 3, axis=2))
    for seed in range(5):
        seen, labels = module.training_view(image, mask, 48, random.Random(seed))
        bright = torch.from_numpy(np.array(seen))[..., 0] > 127
        assert (bright == (labels == 1)).float().mean() > 0.97


def test_segmenter_predicts_cells_where_their_pixels_are(example):
    module = example("finetune_segmentation")
    backbone = veca.create_model("tiny", depth=1, width=32, heads=2).eval()
    model = module.Segmenter(backbone, 3)
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        logits = model(images, cores=8)
        patch = backbone(images, cores=8).patches[0, 1 * 3 + 2]  # row 1, column 2
        alone = F.linear(patch, model.head.weight[:, :, 0, 0], model.head.bias).view(3, 4, 4)
    assert logits.shape == (2, 3, 8, 12)
    torch.testing.assert_close(logits[0, :, 4:8, 8:12], alone)


def test_bad_input_is_one_line(example, pets, tmp_path, monkeypatch):
    module = example("finetune_classification")
    for wrong, error, noun in (
        (["--weights", "nowhere/at-all"], veca.errors.WeightsError, "nowhere/at-all"),
        (["--size", "100"], veca.VecaError, "--size"),
        (["--data", str(tmp_path)], veca.errors.DatasetError, "'oxford-pets'"),
    ):
        args = _options(pets, "fresh:tiny", tmp_path / "out")
        with pytest.raises(error, match=noun) as caught:
            module.main([*args, "--steps", "1", *wrong])
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(sys, "argv", ["finetune_classification.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"finetune_classification\.py: "):
        module.run(module.main)
