"""The machine that numbers come from."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from veca.version import __version__


@dataclass(frozen=True)
class Machine:
    """Where the numbers come from."""

    cpu: str
    cpu_count: int
    gpu: str
    os: str
    python: str
    torch: str
    veca: str
    date: str


def machine(device: torch.device | str = "cpu") -> Machine:
    """This machine, as the CSV records it."""
    on_gpu = torch.device(device).type == "cuda"
    return Machine(
        cpu=_cpu_name(),
        cpu_count=os.cpu_count() or 0,
        gpu=torch.cuda.get_device_name(device) if on_gpu else "",
        os=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        veca=__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
