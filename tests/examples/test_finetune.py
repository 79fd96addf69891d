"""The fine-tuning example takes plain folders, puts the frozen rows first, and learns."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch.nn import functional as F

import veca

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "finetune.py"
COLOURS = [(200, 60, 60), (60, 200, 60), (60, 60, 200), (200, 200, 60), (60, 200, 200)]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("finetune_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Class folders, and images with masks: a square on grey; its colour is the class."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (root / "scenes" / kind).mkdir(parents=True)
    for number, colour in enumerate(COLOURS):
        (root / "classes" / f"c{number}").mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(90, 150, (48, 64, 3)).astype(np.uint8)
            mask = np.zeros((48, 64), dtype=np.uint8)
            y, x = rng.integers(0, 20), rng.integers(0, 30)
            mask[y : y + 28, x : x + 32] = 1
            pixels[mask == 1] = colour
            image = Image.fromarray(pixels)
            image.save(root / "classes" / f"c{number}" / f"{i}.jpg")
            image.save(root / "scenes" / "images" / f"{number}-{i}.jpg")
            Image.fromarray(mask).save(root / "scenes" / "masks" / f"{number}-{i}.png")
    return root / "classes", root / "scenes"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights") / "little"
    veca.save(veca.create_model("tiny", depth=2, width=32, heads=2), folder)
    return str(folder)


def _options(data: Path, weights: str, out: Path, **more: object) -> list[str]:
    options = {"weights": weights, "out": out, "size": 48, "batch": 8, "cores": "8,64"}
    options |= {"steps": 30, "head-steps": 60, "lr": 3e-3, "head-lr": 1e-2, **more}
    return [str(data), *(str(w) for name, value in options.items() for w in (f"--{name}", value))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "columns", "above"),
    [
        (0, ["frozen, 10-NN", "frozen, linear", "fine-tuned"], 0.6),  # 0.2 by chance
        (1, ["frozen, linear", "fine-tuned"], 0.5),  # 0.36 for background alone
    ],
)
def test_it_learns_and_the_frozen_rows_stand_beside_it(
    example, folders, weights, tmp_path, kind, columns, above
):
    data = folders[kind]
    results = example.main(_options(data, weights, tmp_path / "out", steps=60, test=data))
    assert list(results["scores"]) == columns
    for cores, score in results["scores"]["fine-tuned"].items():
        assert score > max(above, results["scores"]["frozen, linear"][cores])
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    assert str(tmp_path) not in (tmp_path / "out" / "results.json").read_text()
    head, _, *rows = (tmp_path / "out" / "results.md").read_text().splitlines()
    assert all(name in head for name in columns)
    assert [row.split("|")[1].strip() for row in rows] == ["8", "64"]


def test_saved_backbone_and_head_give_the_same_score(example, folders, weights, tmp_path):
    data = folders[0]
    args = _options(data, weights, tmp_path / "out", steps=2, test=data)
    results = example.main(args)
    backbone = veca.load(tmp_path / "out" / "backbone")
    task = example.task_of(data)
    with safe_open(tmp_path / "out" / "head.safetensors", "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert json.loads(file.metadata()["classes"]) == task.classes
    features, targets = example.features_of(task, backbone, task.samples(data), 48, [8])
    head = task.head(backbone.num_features)
    head.load_state_dict(state)
    score = example.evaluate(task, head, features, targets)["8"]
    assert score == pytest.approx(results["scores"]["fine-tuned"]["8"])


@pytest.mark.parametrize("nested", [True, False])
def test_each_step_draws_a_budget_unless_asked_otherwise(
    example, folders, weights, tmp_path, monkeypatch, nested
):
    budgets = []
    forward = veca.Veca.forward

    def spy(self, images, cores=None, keep=None):
        if self.training:
            budgets.append(cores)
        return forward(self, images, cores, keep)

    monkeypatch.setattr(veca.Veca, "forward", spy)
    args = _options(folders[0], weights, tmp_path / "out", steps=12, batch=1, size=32)
    example.main(args if nested else [*args, "--no-nested"])
    assert len(budgets) == 12
    assert len(set(budgets)) > 3 if nested else set(budgets) == {None}


@pytest.mark.slow
def test_it_runs_alone_outside_the_clone(folders, weights, tmp_path):
    copy = shutil.copy(EXAMPLE, tmp_path / "mine.py")
    args = _options(folders[0], weights, tmp_path / "out", steps=0, **{"head-steps": 1})
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name={!r})"
    words = [sys.executable, "-c", code.format("__main__"), str(copy), *args]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fine-tuned" not in done.stdout and "frozen, linear" in done.stdout
    assert not (tmp_path / "out" / "backbone").exists()


def test_views_of_image_and_mask_agree(example, tmp_path):
    mask = np.zeros((40, 60), dtype=np.uint8)
    mask[10:30, 5:25] = 1
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    Image.fromarray(mask * 255).save(tmp_path / "images" / "a.png")
    Image.fromarray(mask).save(tmp_path / "masks" / "a.png")
    task = example.task_of(tmp_path)
    model = veca.create_model("tiny", depth=1, width=32, heads=2)
    for seed in range(5):
        pixels, target = example.batch_of(
            task, model, task.samples(tmp_path), 48, random.Random(seed)
        )
        assert ((pixels[:, 0] > 0) == (target == 1)).float().mean() > 0.97


def test_segmenter_predicts_cells_where_their_pixels_are(example, folders):
    task = example.task_of(folders[1])
    head = task.head(32)
    features = torch.randn(2, 32, 2, 3)
    with torch.no_grad():
        logits = head(features)
        conv = head[0]
        alone = F.linear(features[0, :, 1, 2], conv.weight[:, :, 0, 0], conv.bias)
    assert logits.shape == (2, 2, 8, 12)
    torch.testing.assert_close(logits[0, :, 4:8, 8:12], alone.view(2, 4, 4))


def test_held_out_images_are_not_trained_on(example, folders):
    samples = example.task_of(folders[0]).samples(folders[0])
    train, test = example.split(samples, 0.2, 0)
    assert len(train) == 25 and len(test) == 5
    assert not set(train) & set(test)
    assert {label for _, label in test} == set(range(5))


def test_bad_input_is_one_line(example, folders, weights, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for data, wrong, error, noun in (
        (folders[0], {"weights": "nowhere/at-all"}, veca.errors.WeightsError, "nowhere/at-all"),
        (folders[0], {"size": 100}, veca.VecaError, "--size"),
        (tmp_path / "empty", {}, veca.VecaError, "empty"),
        (tmp_path / "missing", {}, veca.VecaError, "missing"),
    ):
        with pytest.raises(error, match=noun) as caught:
            found = {"weights": weights, "steps": 1, **wrong}
            example.main(_options(data, found.pop("weights"), tmp_path / "out", **found))
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(sys, "argv", ["finetune.py", str(tmp_path / "missing")])
    with pytest.raises(SystemExit, match=r"finetune\.py: "):
        example.run(example.main)
