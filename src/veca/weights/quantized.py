"""Weights in int8: rounded, checked against the float32 model on photos, and stored."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from veca._util.files import atomic_write_json, place_for
from veca.checks import check_budget, check_model
from veca.errors import GateError, InputError
from veca.images import Source
from veca.model import Veca
from veca.precision import at_precision
from veca.quantization import (
    GATE,
    Agreement,
    Rounding,
    equalised,
    linear_layers,
    mean_agreement,
    photo_batches,
)
from veca.weights import store
from veca.weights.models import load

REPORT = "quantization.json"
_LAYER_PHOTOS = 4
_NAMED = 4


@dataclass(frozen=True)
class QuantizationReport:
    """What rounding did to the features."""

    rounding: Rounding
    photos: int
    gate: Agreement
    budgets: dict[int, Agreement]
    """Agreement with the float32 model, by budget."""
    layers: dict[str, Agreement] = field(default_factory=dict)
    """With nothing but this layer rounded."""

    @property
    def passes(self) -> bool:
        return all(found.passes(self.gate) for found in self.budgets.values())

    def losing(self) -> list[str]:
        """Layers, those first that cost the most agreement."""

        def lost(name: str) -> float:
            found = self.layers[name]
            return 2 - found.cls - found.patches

        return sorted(self.layers, key=lost, reverse=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "rounding": self.rounding.to_dict(),
            "photos": self.photos,
            "gate": self.gate._asdict(),
            "budgets": {str(cores): found._asdict() for cores, found in self.budgets.items()},
            "layers": {name: found._asdict() for name, found in self.layers.items()},
        }


def quantize(
    weights: str | os.PathLike[str] | Veca,
    out: str | os.PathLike[str],
    photos: Sequence[Source] | None = None,
    *,
    leave: Sequence[str] = Rounding().leave,
    cores: Sequence[int] | None = None,
    gate: Agreement = GATE,
    size: int | None = None,
    layers: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> QuantizationReport:
    """Write weights in int8 for `veca.load`, if they agree with what they were made from.

    Args:
        photos: for calibration and for the comparison; by default the bundled ones.
        leave: names or patterns of linear layers that stay in float32.
        cores: budgets to compare at; by default an eighth, a quarter, a half and all of the bank.
        gate: the least agreement at each of them.
        size: short side of the photos, by default 224.
        layers: also round each layer alone, to see which ones lose; done anyway below the gate.
        progress: called with (steps done, steps in all, what is being done).

    Raises:
        GateError: the gate is not reached; nothing is written.
    """
    place = place_for(out)
    model = weights if isinstance(weights, torch.nn.Module) else load(weights)
    check_model(model, "quantize")
    if model.quantization is not None or model.precision != "fp32":
        raise InputError(f"{model.name or 'these weights'}: they are quantised already.")
    bank = model.config.num_cores
    budgets = sorted({-(-bank // part) for part in (8, 4, 2, 1)}) if cores is None else cores
    budgets = [check_budget(budget, bank) for budget in budgets]
    rounding = Rounding(tuple(leave))
    names = rounding.layers(model)
    if not names:
        raise InputError("every layer is to be left as it is; there is nothing to round.")
    total, done = 2 + len(budgets) + len(names), 0

    def tell(what: str) -> None:
        nonlocal done
        if progress:
            progress(done, total, what)
        done += 1

    tell("equalising")
    plain = equalised(model, photos, size=size)
    images = list(photo_batches(plain, photos, size))
    fast = at_precision(plain, "int8", rounding=rounding)
    found = {}
    for budget in budgets:
        tell(f"{budget} cores")

        def run(x: torch.Tensor, budget: int = budget) -> Any:
            return fast(x, cores=budget)

        def wanted(x: torch.Tensor, budget: int = budget) -> Any:
            return model(x, cores=budget)

        found[budget] = mean_agreement(run, wanted, images)
    report = QuantizationReport(rounding, len(images), gate, found)
    if layers or not report.passes:
        few = images[:: -(-len(images) // _LAYER_PHOTOS)]
        for name in names:
            tell(name)
            report.layers[name] = _alone(plain, name, few)
    if not report.passes:
        raise GateError(_below(report))
    tell("writing")
    brief = {name: part for name, part in report.to_dict().items() if name != "layers"}
    provenance = {**model.provenance, "quantized": brief}
    store.save_rounded(plain, rounding, place, provenance=provenance)
    if place.is_dir():
        atomic_write_json(place / REPORT, report.to_dict())
    return report


def _alone(model: Veca, name: str, images: Sequence[torch.Tensor]) -> Agreement:
    rest = tuple(other for other in linear_layers(model) if other != name)
    return mean_agreement(at_precision(model, "int8", rounding=Rounding(rest)), model, images)


def _below(report: QuantizationReport) -> str:
    worst, found = min(
        report.budgets.items(),
        key=lambda item: min(item[1].cls - report.gate.cls, item[1].patches - report.gate.patches),
    )
    names = ",".join([*report.rounding.leave, *report.losing()[:_NAMED]])
    return (
        f"in int8 the weights agree {found.cls:.4f} (CLS) and {found.patches:.4f} (patches) with "
        f"float32 at {worst} cores, and the gate is {report.gate.cls:g} and "
        f"{report.gate.patches:g}; leave more layers as they are (--leave {names}), or lower the "
        "gate. Nothing was written."
    )


def report_table(report: QuantizationReport) -> list[tuple[str, str, str]]:
    """Rows of text: what, CLS, patches. Budgets first, then the layers that lose the most."""
    rows = [(f"{c} cores", found) for c, found in report.budgets.items()]
    rows += [(f"{name} alone", report.layers[name]) for name in report.losing()[:8]]
    return [(name, f"{found.cls:.5f}", f"{found.patches:.5f}") for name, found in rows]
