"""A rank that the tests start: python worker.py FOLDER RANK WHAT, with the picture in FOLDER."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from veca import large, load
from veca.errors import LargeError
from veca.images import normalize

SIZE = (96, 160)  # the picture that is split; 6 x 10 patches
REGIONS = [((0, 0), (96, 48)), ((0, 48), (96, 112))]


def whole_picture() -> torch.Tensor:
    pixels = torch.from_numpy(np.random.default_rng(1).random((2, 3, *SIZE)))
    return normalize(pixels).double()


def region(images: torch.Tensor, rank: int) -> torch.Tensor:
    (top, left), (height, width) = REGIONS[rank]
    return images[:, :, top : top + height, left : left + width]


def loss_of(patches: torch.Tensor, cores: torch.Tensor, share: float) -> torch.Tensor:
    return patches.square().sum() + share * (cores**3).sum()


def split(folder: Path, rank: int) -> None:
    """The differentiable split: outputs and gradients of this rank."""
    model = load(str(folder / "weights.safetensors")).double()
    images = region(whole_picture(), rank).clone().requires_grad_()
    module = large.SplitVeca(model, dist.group.WORLD)
    found = {}
    for wrapped, name in ((module, "plain"), (DistributedDataParallel(module), "ddp")):
        model.zero_grad()
        images.grad = None
        out = wrapped(images, REGIONS[rank][0], SIZE, cores=5)
        found.setdefault("exchanged", module.ranks.exchanged)
        loss_of(out.patches, out.cores, 0.5).backward()
        grads = {key: p.grad for key, p in model.named_parameters()}
        if name == "plain":
            for grad in grads.values():
                dist.all_reduce(grad)
        found[name] = {
            **{f"grad.{key}": grad.clone() for key, grad in grads.items()},
            "images": images.grad.clone(),
            "patches": out.patches.detach(),
            "cores": out.cores.detach(),
            "core_xy": out.core_xy.detach(),
        }
    model.train()  # one draw of coordinates for all
    model.set_grad_checkpointing()
    out = module(images, REGIONS[rank][0], SIZE)
    loss_of(out.patches, out.cores, 0.5).backward()
    found["training"] = {"cores": out.cores.detach()}
    model.eval()
    try:
        module(images, REGIONS[0][0], SIZE)  # on both: not the whole picture
    except LargeError as error:
        found["refused"] = str(error)
    torch.save(found, folder / f"split-{rank}.pt")


def sweep(folder: Path, rank: int, *options: str) -> None:
    """The pass over tiles; dies after so many of them, where that is asked for."""
    dies = {int(r): int(n) for r, n in (option.split("=") for option in options)}.get(rank)
    told = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        if len(told) == dies:
            os.kill(os.getpid(), signal.SIGKILL)

    model = load(str(folder / "weights.safetensors"))
    picture = np.load(folder / "picture.npy", mmap_mode="r")
    out = large.features(
        model, picture, folder / "features.npy", tile=3, spill="disk", progress=progress,
        group=dist.group.WORLD,
    )  # fmt: skip
    np.save(folder / f"cores-{rank}.npy", out.memory.cores.numpy())
    (folder / f"told-{rank}.json").write_text(json.dumps(told))


def main() -> None:
    torch.set_num_threads(1)
    folder, rank, what, *options = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet-{what}-{'-'.join(options)}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    (split if what == "split" else sweep)(folder, rank, *options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
