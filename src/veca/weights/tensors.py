"""Dicts of tensors: are they the model's, are they sane, which bytes are they; in and out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from veca._util import files
from veca.config import VecaConfig
from veca.errors import InputError, OutputError, WeightsError
from veca.model import Veca

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

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


def check_dtype(dtype: torch.dtype | None) -> None:
    """Refuse a dtype that weights cannot have; None is fine."""
    if dtype is not None and dtype not in FLOATS:
        names = ", ".join(str(known).removeprefix("torch.") for known in FLOATS)
        raise InputError(f"dtype must be one of {names} (of torch) or None, got {dtype!r}.")


def content_hash(state: Mapping[str, Tensor]) -> str:
    """sha256 over the names, dtypes, shapes and bytes of the tensors, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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


def write_file(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as a safetensors file, all or nothing."""
    with files.temporary_beside(path) as temporary:
        write(tensors, temporary, path, metadata)
        files.commit(temporary, path)


def write(
    tensors: Mapping[str, Tensor],
    temporary: Path,
    target: Path,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a file that is about to become `target`, and keep the file's permissions."""
    mode = temporary.stat().st_mode
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, temporary, metadata=dict(metadata) if metadata else None)
    except SafetensorError as error:
        raise OutputError(
            f"cannot write {target} ({error}); free some space or choose another place."
        ) from error
    temporary.chmod(mode)  # safetensors makes files that only their owner can read
