"""Two processes that share a picture, against one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import SMALLEST, stirred
from large.worker import REGIONS, SIZE, loss_of, region, whole_picture
from veca import create_model, large, save
from veca.attention import partial_attention
from veca.errors import LargeError

WORKER = Path(__file__).with_name("worker.py")


def start_two(folder: Path, *words: str) -> list[tuple[int, str]]:
    """Two ranks, to their end: exit status and messages."""
    command = [sys.executable, str(WORKER), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), *words], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    return [(rank.wait(), rank.communicate()[1]) for rank in ranks]


def succeed(folder: Path, *words: str) -> None:
    ended = start_two(folder, *words)
    assert [status for status, _ in ended] == [0, 0], ended


@pytest.fixture
def model():
    return stirred(create_model(SMALLEST)).eval()


@pytest.mark.slow
def test_outputs_and_gradients_are_those_of_one_process(model, tmp_path):
    save(model, tmp_path / "weights.safetensors")
    succeed(tmp_path, "split")
    found = [torch.load(tmp_path / f"split-{rank}.pt") for rank in range(2)]
    model, images = model.double(), whole_picture().requires_grad_()
    wanted = model(images, 5)
    loss_of(wanted.patches, wanted.cores, 1.0).backward()

    def near(a, b):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)

    for rank, parts in enumerate(found):
        (top, left), (height, width) = REGIONS[rank]
        there = wanted.feature_map()[
            :, :, top // 16 : (top + height) // 16, left // 16 : (left + width) // 16
        ]
        # DDP takes the mean over the ranks, which the sum of their losses is twice.
        for name, factor in (("plain", 1.0), ("ddp", 2.0)):
            part = parts[name]
            near(part["patches"], there.flatten(2).transpose(1, 2))
            near(part["cores"], wanted.cores)
            near(part["core_xy"], wanted.core_xy)
            near(part["images"], region(images.grad, rank))
            for key, parameter in model.named_parameters():
                grad = parameter.grad
                torch.testing.assert_close(
                    part[f"grad.{key}"] * factor, grad, atol=1e-5 * grad.abs().max(), rtol=1e-5
                )
        assert "make up" in parts["refused"]
        # 3 layers, 2 pictures, 2 heads of 16, 5 cores: a peak, a sum and 16 numbers, float64.
        assert parts["exchanged"] == 3 * 2 * 2 * 5 * (1 + 1 + 16) * 8
    assert torch.equal(found[0]["training"]["cores"], found[1]["training"]["cores"])


@pytest.mark.slow
def test_two_ranks_share_the_tiles_and_go_on_after_a_kill(model, tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (150, 212, 3), dtype=np.uint8)
    np.save(tmp_path / "picture.npy", picture)
    save(model, tmp_path / "weights.safetensors")
    one = large.features(model, picture, tile=3)
    for number, dies in enumerate([("1=13",), ("0=3",), ()]):  # 20 tiles: 10 a rank and layer
        ended = start_two(tmp_path, "sweep", *dies)
        assert [bool(status) for status, _ in ended] == 2 * [bool(dies)], (number, ended)
    found = np.load(tmp_path / "features.npy")
    assert np.abs(found - one.features).max() < 1e-4 * np.abs(one.features).mean()
    cores = [np.load(tmp_path / f"cores-{rank}.npy") for rank in range(2)]
    assert np.array_equal(*cores)
    assert np.abs(cores[0] - one.memory.cores.numpy()).max() < 1e-4
    # Rank 0 was killed after 3 tiles of the last layer, and had those before behind it.
    told = json.loads((tmp_path / "told-0.json").read_text())
    assert told == [[done, 30] for done in range(21, 31)]
    assert len(json.loads((tmp_path / "told-1.json").read_text())) <= 10
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("meet")}
    assert not {name for name in left if name.startswith(".")}
    # To the byte what two ranks give that nobody stops.
    bytes_found = (tmp_path / "features.npy").read_bytes()
    (tmp_path / "features.npy").unlink()
    succeed(tmp_path, "sweep", "0=99")
    assert (tmp_path / "features.npy").read_bytes() == bytes_found


def test_one_process_needs_no_group(model):
    split, images = large.SplitVeca(model), whole_picture().float()
    out, wanted = split(images, (0, 0), SIZE, cores=5), model(images, 5)
    torch.testing.assert_close(out.patches, wanted.patches, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.cores, wanted.cores, atol=1e-5, rtol=0)
    for at, size in (((0, 16), SIZE), ((0, 0), (96, 176)), ((0, 0), (96.0, 160))):
        with pytest.raises(LargeError, match="make up"):
            split(images, at, size)


def test_parts_of_attention_join_in_any_order():
    q, k, v = (torch.randn(2, 3, count, 8, dtype=torch.float64) for count in (5, 20, 20))
    q[:, :, 0] *= 50  # a row whose peak matters
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    parts = [
        partial_attention(q, k[:, :, part], v[:, :, part])
        for part in (slice(0, 0), slice(0, 1), slice(1, 13), slice(13, 20))
    ]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        joined = parts[order[0]]
        for number in order[1:]:
            joined = joined.join(parts[number])
        torch.testing.assert_close(joined.result(), whole)
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def by_parts(q, k, v):
        a, b = (partial_attention(q, k[:, :, p], v[:, :, p]) for p in (slice(9), slice(9, 20)))
        return a.join(b).result()

    grads = torch.autograd.grad(by_parts(q, k, v).square().sum(), (q, k, v))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    wanted = torch.autograd.grad(whole.square().sum(), (q, k, v))
    for grad, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, right)
