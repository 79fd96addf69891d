"""Every benchmark by its name: the module that runs it, what it needs, what it tells.

A module has `add_arguments(parser)` and `run(options)`; nothing is imported before it is asked for.
To add one, write such a module and give it a line here.
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType
from typing import NamedTuple


class Benchmark(NamedTuple):
    summary: str
    gpu: bool = False
    """Whether it needs a CUDA device."""


SPEED = {
    "attention": Benchmark("core attention: one pass, two SDPA calls, dense flash, cuDNN", True),
    "model": Benchmark("whole networks: the inference engine beside a dense DINOv3-B", True),
    "train": Benchmark("a training step: the fast path beside eager SDPA", True),
    "distill": Benchmark("distillation, images/s with the teacher in the loop", True),
    "recorded": Benchmark("distillation steps as CUDA graphs, beside launched ones", True),
    "tune_attention": Benchmark("the best launch of each attention kernel on this GPU", True),
    "kernels": Benchmark("registers, spills and shared memory of every kernel, on any machine"),
    "cpu": Benchmark("time and memory against resolution, beside dense attention"),
    "elastic": Benchmark("merging patches beside fewer cores and smaller images"),
    "auto": Benchmark("shares and budgets chosen by content, beside fixed ones and an oracle"),
    "embed": Benchmark("veca embed beside the bare model and the bare decoder"),
    "cls_only": Benchmark("veca embed without patches, beside the whole last block"),
    "export_matrix": Benchmark("how far exported files are from the model; hours"),
    "export_speed": Benchmark("exported files beside their model"),
    "export_precision": Benchmark("exported files by precision, beside plain dynamic int8"),
    "large": Benchmark("pictures of any size: exactness, speed, memory, contexts, kills"),
    "probe_sweep": Benchmark("how long the quick probes take, then again from the cache"),
}
SCORES = {
    "probes": Benchmark("every probe of the README in one go, for any weights"),
    "finetune": Benchmark("the fine-tuning example on a part of Pets, beside frozen features"),
    "collect": Benchmark("records of probes as one flat file, results/probes.csv"),
    "tables": Benchmark("the tables of README and docs, from the results files"),
    "plot": Benchmark("the plots of README and docs, from the results files"),
}
BENCHMARKS = {**SPEED, **SCORES}


def listing() -> str:
    """Names, what they need, and a line about each."""
    width = max(map(len, BENCHMARKS))
    lines = []
    for title, group in (("speed and scale", SPEED), ("scores and pages", SCORES)):
        lines.append(f"{title}:")
        lines += [
            f"  {name:<{width}}  {'GPU' if one.gpu else '   '}  {one.summary}"
            for name, one in group.items()
        ]
    return "\n".join(lines)


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def run(name: str, words: list[str]) -> int:
    """Run one benchmark with its command line; the exit status."""
    module = module_of(name)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    arguments = parser.parse_args(words)
    if BENCHMARKS[name].gpu:
        import torch

        if not torch.cuda.is_available():
            parser.error("it needs a CUDA GPU, and torch sees none here")
    return int(module.run(arguments) or 0)
