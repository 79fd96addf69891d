"""A run so small that it takes a second or two: two layers, eight cores, 32 pixels."""

from __future__ import annotations

from typing import Any

from veca.distill import DistillConfig, distill, read_metrics

TABLE: dict[str, Any] = {
    "device": "cpu",
    "student": {
        "preset": "tiny",
        "config": {"depth": 2, "width": 32, "heads": 2, "num_cores": 8},
    },
    "teachers": [{"name": "filters", "standardise": True, "standardise_images": 16}],
    "data": {
        "source": "photos:24",
        "memory_size": 48,
        "augment": {"kind": "rrc", "brightness": 0.2, "contrast": 0.2, "saturation": 0.2},
    },
    "optimizer": {"lr": 2e-3, "lr_min": 1e-4},
    "schedule": {"steps": 6, "warmup": 2, "batch": 4, "size": 32},
    "checkpoint": {"every": 0},
    "follow": {"every": 3, "tensorboard": False},
}

DENSE: dict[str, Any] = {**TABLE["student"], "dense": True}
"""A dense ViT of the student's size."""


def settings(**changes: Any) -> DistillConfig:
    """The small run with some settings changed: settings(schedule={"steps": 9}, ema=0.9)."""
    return DistillConfig.from_dict(_merged(TABLE, changes))


def _merged(table: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(table)
    for name, value in changes.items():
        inside = merged.get(name)
        both = isinstance(value, dict) and isinstance(inside, dict) and name != "config"
        merged[name] = _merged(inside, value) if both else value
    return merged


def run(out: Any, *, resume: bool = False, **changes: Any) -> list[dict[str, Any]]:
    """Distil and return the records of its steps."""
    distill(settings(**changes), out, resume=resume)
    return read_metrics(out)


def curve(records: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Step, loss and gradient of each record: what must repeat exactly."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records]
