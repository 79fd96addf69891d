"""The authors' names for the tensors, and ours: one mapping, both ways, bit for bit.

Theirs keep the core bank in chunks and the step sizes of the moving cores as one vector; all
other tensors are the same under another name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from veca.config import VecaConfig
from veca.errors import InputError, WeightsError
from veca.model import Veca
from veca.weights import tensors as ts

CHUNK = 8
"""Cores in one chunk of the bank in all published checkpoints."""

_IN_BLOCK = {
    "norm_attn": "norm_attn",
    "attn.q_proj": "attn.q",
    "attn.k_proj": "attn.k",
    "attn.v_proj": "attn.v",
    "attn.out_proj": "attn.out",
    "norm_ffn": "norm_ffn",
    "fc1": "ffn.up",
    "fc2": "ffn.down",
}


def to_ours(
    state: Mapping[str, Tensor], config: VecaConfig, *, where: str = ""
) -> dict[str, Tensor]:
    """Tensors in the authors' naming -> in ours. Missing, extra and misshapen ones are refused."""
    chunk = chunk_size(state)
    problems = ts.differences(ts.shapes(state), expected(config, chunk))
    if problems:
        lead = f"{where}: the" if where else "the"
        raise WeightsError(f"{lead} tensors are not a VECA model's; {'; '.join(problems)}.")
    ours = {name: state[theirs] for theirs, name in _renames(config).items()}
    count = math.ceil(config.num_cores / chunk)
    for name, chunks in (("tokens", "query_token_chunks"), ("coordinates", "qcoord_chunks")):
        ours[f"bank.{name}"] = torch.cat([state[f"{chunks}.{i}"][0] for i in range(count)])
    for layer, alpha in enumerate(state["pos_alpha"]):
        ours[f"moves.{layer}.alpha"] = alpha
    return ours


def from_ours(model: Veca, *, chunk: int | None = None) -> dict[str, Tensor]:
    """A model's tensors under the authors' names, in the order of their own files."""
    config, state = model.config, model.state_dict()
    size = default_chunk(config.num_cores) if chunk is None else chunk
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(f"chunk must be a whole number of at least 1, got {chunk!r}.")
    alphas = [state[f"moves.{layer}.alpha"] for layer in range(config.depth - 1)]
    bank = {
        f"{name}.{i}": part.unsqueeze(0).clone()
        for name, rows in (("query_token_chunks", "tokens"), ("qcoord_chunks", "coordinates"))
        for i, part in enumerate(state[f"bank.{rows}"].split(size))
    }
    renamed = {theirs: state[ours] for theirs, ours in _renames(config).items()}
    patch = {name: renamed.pop(name) for name in list(renamed) if name.startswith("patch_embed.")}
    empty = state["bank.tokens"].new_empty(0)
    return {"pos_alpha": torch.stack(alphas) if alphas else empty, **patch, **bank, **renamed}


def _renames(config: VecaConfig) -> dict[str, str]:
    """Their name -> ours, for the tensors that are the same."""
    modules = {"patch_embed.proj": "patch_embed"}
    for layer in range(config.depth - 1):
        modules[f"pos_linears.{layer}"] = f"moves.{layer}.head"
    for layer in range(config.depth):
        for theirs, ours in _IN_BLOCK.items():
            modules[f"blocks.{layer}.{theirs}"] = f"blocks.{layer}.{ours}"
    modules["final_norm"] = "norm"
    if config.feature_width != config.width:
        modules["output_proj"] = "project"
    return {f"{a}.{part}": f"{b}.{part}" for a, b in modules.items() for part in ("weight", "bias")}


def expected(config: VecaConfig, chunk: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that a checkpoint of this model has, under the authors' names."""
    return ts.shapes(from_ours(ts.blank(config), chunk=chunk))


def default_chunk(num_cores: int) -> int:
    """8 as published; less if the bank does not divide into chunks of 8."""
    return math.gcd(num_cores, CHUNK)


def chunk_size(state: Mapping[str, Tensor]) -> int:
    """Cores in one chunk of the bank, as the tensors have it."""
    sizes = [
        tensor.shape[1]
        for name, tensor in state.items()
        if name.startswith("query_token_chunks.") and tensor.ndim == 3 and tensor.shape[1]
    ]
    return Counter(sizes).most_common(1)[0][0] if sizes else CHUNK
