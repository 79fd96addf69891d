"""A process that the tests start and kill: python worker.py OUT SETTINGS(JSON) [KILLED_IN_SAVE]."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from veca._util import tensor_file as stored
from veca.distill import DistillConfig, distill, loop
from veca.distill.parallel import launch


def kill_in_save(step: int) -> None:
    """Die by SIGKILL when the first file of a checkpoint is half written."""
    real = stored.save_file

    def save_file(tensors, path: Path, **more) -> None:
        real(tensors, path, **more)
        if f"step-{step:08d}" in str(path):
            path.write_bytes(path.read_bytes()[:100])
            os.kill(os.getpid(), signal.SIGKILL)

    stored.save_file = save_file


def lose_worker(step: int) -> None:
    """Have the last rank die by SIGKILL at a step, the first time the job is started."""
    real = loop.training_step

    def one_step(group, planned, batch):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and planned.number == step and group.world.rank == group.world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(group, planned, batch)

    loop.training_step = one_step


def leave_at_once() -> None:
    """Exchange tensors and leave, with a group that outlives its end and Python's lock held."""
    sys.setswitchinterval(5.0)
    with launch("ddp", "cpu") as world:
        sys.kept = torch.distributed.group.WORLD
        for _ in range(20):
            world.sum(torch.ones(4))


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "leave_at_once":
        leave_at_once()
        return
    out, table = Path(sys.argv[1]), json.loads(sys.argv[2])
    for option in sys.argv[3:]:
        name, _, step = option.partition("=")
        {"kill_in_save": kill_in_save, "lose_worker": lose_worker}[name](int(step))
    parallel = table.pop("parallels", None)
    if parallel is None:
        distill(DistillConfig.from_dict(table), out, resume=True)
        return
    # Several kinds in one start, which saves starting torch for each.
    torch.distributed.init_process_group("gloo")
    for kind in parallel:
        config, stopped = DistillConfig.from_dict({**table, "parallel": kind}), "time"
        while stopped == "time":
            stopped = distill(config, out / kind, resume=True).stopped
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
