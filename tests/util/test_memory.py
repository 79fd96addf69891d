"""Peak of live tensor memory, and what counts as running out of it."""

from __future__ import annotations

import os
import platform
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import veca
from conftest import SMALLEST
from veca._util import memory
from veca._util.memory import (
    available_memory,
    forward_bytes,
    give_back,
    is_out_of_memory,
    peak_tensor_memory,
    too_large,
)
from veca.config import PRESETS
from veca.embed import embed, extract
from veca.embed.pipeline import ModelRunner
from veca.errors import ImageError, InputError, VecaWarning
from veca.images.transform import check_memory


def test_peak_counts_what_is_alive_at_once():
    def call() -> torch.Tensor:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        return torch.cat([second, torch.empty(100)])

    result, peak = peak_tensor_memory(call, "cpu")
    assert result.shape == (600,)
    assert peak == 4 * (1000 + 500)  # first and second; later 500 + 100 + 600 are fewer


def test_what_was_alive_before_does_not_count():
    weights = torch.ones(10_000)
    _, peak = peak_tensor_memory(lambda: weights[:10].neg(), "cpu")
    assert peak == 4 * 10


def test_errors_pass_through_and_the_environment_stays():
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError):
        peak_tensor_memory(lambda: 1 / 0, "cpu")
    assert dict(os.environ) == before


def test_out_of_memory_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not agree"))


# ------------------------------------------------------------------- what an image needs, and has


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_the_estimate_of_a_pass_is_near_what_it_takes(name):
    model = veca.create_model(name, depth=1).eval()
    compute = ModelRunner(model, cores=64, what=("cls", "patches"), dtype="float16")
    pixels = torch.zeros(1, 320, 480, 3, dtype=torch.uint8)
    _, peak = peak_tensor_memory(lambda: compute(pixels), "cpu")
    waiting = 4 * 2 * 3 * 320 * 480  # those read ahead, which are not in the measurement
    estimate = forward_bytes(model.config, 320, 480) - waiting
    assert peak * 0.9 < estimate < peak * 1.25


def test_free_memory_is_a_number_of_bytes_here():
    free = available_memory("cpu")
    assert free is None or 2**20 < free < 2**50


@pytest.fixture
def little(monkeypatch):
    """A machine with 10 MB of free memory, where even small work is looked at."""
    monkeypatch.setattr(memory, "available_memory", lambda device="cpu": 10**7)
    monkeypatch.setattr(memory, "_WORTH_A_LOOK", 0)


def test_what_does_not_fit_is_said_with_both_numbers(little):
    assert too_large(9 * 10**6) is None
    assert too_large(2 * 10**7) == "about 20 MB of memory, and 10 MB are free"
    assert too_large(6 * 10**6, share=0.5) is not None


def test_an_image_that_does_not_fit_is_refused_before_it_is_enlarged(little):
    model = veca.create_model(SMALLEST).eval()
    photo = np.zeros((20, 3000, 3), np.uint8)
    with pytest.raises(ImageError, match=r"20 x 3000.*512 x 76800.*10 MB are free.*smaller"):
        model.preprocess(photo)
    assert model.preprocess(photo, size=(64, 96)).grid == (4, 6)
    with pytest.warns(VecaWarning, match="10 MB"):
        model.preprocess(np.zeros((32, 32, 3), np.uint8), size=384)


def test_a_strip_that_becomes_a_giant_is_a_warning_however_much_memory_there_is(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device="cpu": 10**13)
    config = PRESETS["veca_tiny_patch16"]
    with pytest.warns(VecaWarning, match=r"20 x 3000.*512 x 76800.*GB"):
        check_memory(config, (20, 3000), (512, 76800))
    check_memory(config, (8000, 8000), (8000, 8000))  # a large image of its own size
    check_memory(config, (60, 80), (512, 688))


def test_a_run_names_what_does_not_fit_and_does_the_rest(little, tmp_path):
    model = veca.create_model(SMALLEST).eval()
    for name, size in (("strip", (3000, 20)), ("photo", (48, 32))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    summary = extract(model, tmp_path, tmp_path / "out", size=64, batch_size=1, what=["cls"])
    assert summary.computed == 1
    ((name, reason),) = summary.failed
    assert name.endswith("strip.png") and "10 MB are free" in reason
    with pytest.raises(InputError, match="10000 x 10000"):
        extract(model, tmp_path, tmp_path / "large", size=10_000)
    assert not (tmp_path / "large").exists()


def test_batches_that_do_not_fit_are_a_warning_about_the_images_there_are(little, tmp_path):
    model = veca.create_model(SMALLEST).eval()
    for number in range(48):
        Image.new("RGB", (48, 32)).save(tmp_path / f"{number}.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error", VecaWarning)
        extract(model, tmp_path / "0.png", tmp_path / "one", size=64, batch_size=99)
    with pytest.warns(VecaWarning, match=r"^48 images .*--batch-size"):
        extract(model, tmp_path, tmp_path / "all", size=64, batch_size=99)


def test_embed_refuses_and_lists_the_same(little, tmp_path):
    pytest.importorskip("pyarrow")
    weights = veca.save(veca.create_model(SMALLEST), tmp_path / "weights")
    for name, size in (("strip", (3000, 20)), ("photo", (48, 32))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    options = {"weights": weights, "workers": 0, "threads": 1, "batch_size": 1}
    sources = [tmp_path / "strip.png", tmp_path / "photo.png"]
    report = embed(sources, tmp_path / "out", size=64, **options)
    assert (report.images, report.failed) == (1, 1)
    assert "10 MB are free" in report.failures_file.read_text()
    with pytest.raises(InputError, match="10000 x 10000"):
        embed(sources, tmp_path / "large", size=10_000, **options)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc is asked to give memory back"
)
def test_freed_memory_is_given_back():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [b"x" * 60_000 * (i > 0) + b"y" for i in range(2000)]
    blocks = blocks[-1:]  # what is freed lies below what is kept
    before = resident()
    give_back()
    assert before - resident() > 50e6 and len(blocks) == 1
