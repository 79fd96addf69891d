"""Dicts of tensors: are they the model's, are they sane. Their files are `_util.tensor_file`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from veca._util.tensor_file import FLOATS as FLOATS
from veca._util.tensor_file import SEAL as SEAL
from veca._util.tensor_file import check_dtype as check_dtype
from veca._util.tensor_file import content_hash as content_hash
from veca._util.tensor_file import opened as opened
from veca._util.tensor_file import read_file as read_file
from veca._util.tensor_file import seal as seal
from veca._util.tensor_file import write as write
from veca._util.tensor_file import write_file as write_file
from veca.config import VecaConfig
from veca.errors import WeightsError
from veca.model import Veca

Shapes = Mapping[str, tuple[int, ...]]


class _Unset(Veca):
    """A model whose weights are about to be replaced, so that drawing them would be waste."""

    def reset_parameters(self) -> None:
        pass


def blank(config: VecaConfig, backend: str = "auto", where: str = "the configuration") -> Veca:
    """The model without memory for its weights (on torch's meta device), to put others in."""
    try:
        with torch.device("meta"):
            model: Veca = _Unset(config, backend=backend)
    except RuntimeError as error:
        raise WeightsError(f"{where} describes a model too large to exist: {error}.") from error
    model.__class__ = Veca
    return model


def fill(
    config: VecaConfig,
    state: Mapping[str, Tensor],
    *,
    backend: str = "auto",
) -> Veca:
    """The model with exactly these tensors as its weights, in eval mode."""
    model = blank(config, backend)
    model.load_state_dict(dict(state), assign=True)
    return model.eval()


def shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def listed(names: Iterable[str], limit: int = 5) -> str:
    """'a, b, c, d, e and 7 more'."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def differences(found: Shapes, expected: Shapes) -> list[str]:
    """What keeps `found` from being `expected`: missing, extra and wrongly shaped tensors."""
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    wrong = [
        f"{name} has shape {list(shape)} instead of {list(expected[name])}"
        for name, shape in found.items()
        if name in expected and shape != tuple(expected[name])
    ]
    problems = [f"missing: {listed(missing)}"] if missing else []
    problems += [f"extra: {listed(extra)}"] if extra else []
    problems += [f"wrong shape: {listed(wrong)}"] if wrong else []
    return problems


def require_floating(dtypes: Mapping[str, object], where: str) -> None:
    """Refuse tensors that are not ordinary floating-point numbers."""
    wrong = [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]
    if wrong:
        raise WeightsError(
            f"{where}: weights are float16, bfloat16, float32 or float64, but {listed(wrong)}."
        )


def require_finite(state: Mapping[str, Tensor], where: str, advice: str) -> None:
    """Refuse NaN and infinite numbers, naming the tensors that hold them."""
    bad = [name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise WeightsError(f"{where}: NaN or infinite numbers in {listed(bad)}; {advice}")


def are_stored_as(state: Mapping[str, Tensor], content: str) -> bool:
    """Whether tensors are, number for number, those with a content hash.

    They may have been stored in another dtype: float16 weights that were loaded as float32 are
    the same weights.
    """
    if content_hash(state) == content:
        return True
    for dtype in FLOATS:
        stored = {name: tensor.to(dtype) for name, tensor in state.items()}
        exact = all(torch.equal(stored[name].to(t.dtype), t) for name, t in state.items())
        if exact and content_hash(stored) == content:
            return True
    return False
