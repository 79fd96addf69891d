"""What an exported file computes in, and how near to the float32 model it has to be."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from veca.errors import InputError, check_choice
from veca.quantization import GATE, Agreement

PRECISIONS = ("fp32", "fp16", "bf16", "int8")
"""float32, half precision, bfloat16, and whole numbers of 8 bit in the linear layers."""
NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
"""What stands for a precision in the names of files."""
DTYPES = {"float32": torch.float32, "float16": torch.float16}
"""What 0.1 called a precision."""


GATES = {"fp16": Agreement(0.9995, 0.9995), "bf16": Agreement(0.9995, 0.999), "int8": GATE}
"""The least agreement with the float32 model on photos, by precision. That of patches holds for the
other cores, too. A file in float32 has to be equal to rounding."""


def check_precisions(precision: str | Sequence[str], dtype: str | None = None) -> list[str]:
    """The precisions asked for, each once; or that of `dtype`, by which 0.1 called it."""
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
        precision = next(short for short, name in NAMES.items() if name == dtype)
        warnings.warn(
            f"dtype={dtype!r} is called precision={precision!r} now", DeprecationWarning, 3
        )
    asked = [precision] if isinstance(precision, str) else list(precision)
    if not asked:
        raise InputError("precision is empty; give one or several of " + ", ".join(PRECISIONS))
    for one in asked:
        check_choice("precision", one, PRECISIONS)
    return list(dict.fromkeys(asked))


def check_gate(
    gate: Agreement | tuple[float, float] | float | None, precision: str
) -> Agreement | None:
    """The gate for a precision: as given (one number for both), or its own; None for float32."""
    if precision == "fp32":
        if gate is not None:
            raise InputError("a file in fp32 has to equal the model; a gate is for the others.")
        return None
    if gate is None:
        return GATES[precision]
    values = (gate, gate) if isinstance(gate, (int, float)) else tuple(gate)
    numbers = [value for value in values if isinstance(value, (int, float))]
    if len(values) != 2 or len(numbers) != 2 or not all(0 <= number <= 1 for number in numbers):
        raise InputError(
            f"a gate is the least agreement of CLS and of patches, from 0 to 1; got {gate!r}."
        )
    return Agreement(*map(float, numbers))
