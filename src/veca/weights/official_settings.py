"""The authors' settings: which `VecaConfig` a checkpoint of theirs is, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from veca.config import PRESETS, VecaConfig, preset
from veca.errors import ConfigError, InputError, WeightsError, shown
from veca.weights import tensors as ts
from veca.weights.official_layout import chunk_size, default_chunk, expected

_FAMILIES = ("small", "splus", "base", "large")
_FAMILY_FIELDS = ("num_cores", "width", "heads", "depth", "ffn_ratio", "dropout")

# Their settings that say which function the weights compute -> our fields. The rest is training.
_FIELDS = {
    "num_query_tokens": "num_cores",
    "hidden_dim": "width",
    "num_heads": "heads",
    "num_layers": "depth",
    "mlp_ratio": "ffn_ratio",
    "dropout": "dropout",
    "patch_size": "patch_size",
    "in_channels": "in_channels",
    "distill_output_dim": "output_width",
    "rope_shift_coords": "rope_shift",
    "rope_jitter_coords": "rope_jitter",
    "rope_rescale_coords": "rope_rescale",
    "rope_p_zero_freqs": "rope_zero_fraction",
}
# Constants of their code: a model that has others cannot be written for it.
_FIXED = ("rope_base", "norm_eps", "image_mean", "image_std")


def find_config(
    state: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    where: str = "the checkpoint",
) -> VecaConfig:
    """The configuration of an authors' model: their settings, and the tensors where those lack.

    Their own loader lets `model_family` win over the single settings; so do we, unless only the
    single settings fit the tensors. Settings that no tensors fit are refused.
    """
    overrides = dict(overrides or {})
    _refuse_settings(settings, where)
    inferred = _infer(state, where)
    single = _translate(settings, where)
    family = _family(settings)
    stated = [{**single, **family}]
    if family and all(name in single for name in _FAMILY_FIELDS):
        stated.append(single)
    if "heads" not in {*single, *family, *overrides} and inferred["width"] % 64:
        raise WeightsError(
            f"{where}: the number of heads is not recorded and cannot be told from width "
            f"{inferred['width']}; pass config_overrides={{'heads': ...}}."
        )

    chunk, found = chunk_size(state), ts.shapes(state)
    rejected: list[list[str]] = []
    for fields in stated:
        config = _make({**inferred, **fields, **overrides}, where)
        if max(config.depth, config.num_cores // chunk) > len(state):
            continue  # far from these tensors; not worth building
        problems = ts.differences(found, expected(config, chunk))
        if not problems:
            return config
        rejected.append(problems)

    problems = rejected[-1] if rejected else []
    any_heads = {**inferred, "heads": 1}  # they do not show in the shapes
    incoherent = ts.differences(found, expected(_make(any_heads, where), chunk))
    if not incoherent:
        told = [_disagreement({**stated[-1], **overrides}, inferred), *problems]
        raise WeightsError(
            f"{where}: its settings and its tensors disagree; {'; '.join(told)}. Pass "
            "config_overrides with the right values."
        )
    raise WeightsError(
        f"{where}: the tensors are not a VECA model's; {'; '.join(problems or incoherent)}."
    )


def their_config(config: VecaConfig, *, chunk: int | None = None) -> dict[str, Any]:
    """The settings their code needs to build this model; refused if it cannot."""
    default = VecaConfig()
    for name in _FIXED:
        if getattr(config, name) != getattr(default, name):
            raise WeightsError(
                f"the authors' layout has no place for {name} {getattr(config, name)!r}; their "
                f"code always uses {getattr(default, name)!r}."
            )
    chunk = default_chunk(config.num_cores) if chunk is None else chunk
    if config.num_cores % chunk:
        raise InputError(f"the bank of {config.num_cores} cores does not divide by chunk {chunk}.")
    steps = range(chunk, config.num_cores + 1, chunk)
    return {
        "model_family": _family_of(config),
        **{theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
        "rope_zero_freqs_from": "low",
        "patch_embed_use_ln": False,
        "init_patch_from_dinov3": False,
        "nested_chunk_size": chunk,
        "nested_budgets": tuple(steps),
        "nested_budget_weights": tuple(1.0 + i // 2 for i in range(len(steps))),
    }


def _refuse_settings(settings: Mapping[str, Any], where: str) -> None:
    norm = settings.get("patch_embed_use_ln")
    if isinstance(norm, Tensor) or norm:  # several numbers are neither true nor false
        raise WeightsError(
            f"{where}: patch_embed_use_ln is set; a norm after the patch embedding is not part of "
            "the published model and has no place in ours."
        )
    side = settings.get("rope_zero_freqs_from", "low")
    if side != "low":
        raise WeightsError(
            f"{where}: rope_zero_freqs_from is {shown(side)}; only 'low', as published, has a "
            "place in our model."
        )


def _translate(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Those of their settings that we have a field for, under our names."""
    ours = {}
    for theirs, name in _FIELDS.items():
        if theirs not in settings:
            continue
        value = settings[theirs]
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            raise WeightsError(
                f"{where}: its setting {theirs} is {type(value).__name__}, not a number."
            )
        ours[name] = value
    if "output_width" in ours and not ours["output_width"]:
        ours["output_width"] = None
    return ours


def _family(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `model_family` sets in their loader."""
    name = settings.get("model_family")
    name = name.lower() if isinstance(name, str) else ""
    if name not in _FAMILIES:
        return {}
    config = preset(name)
    return {field: getattr(config, field) for field in _FAMILY_FIELDS}


def _family_of(config: VecaConfig) -> str:
    """Their family of this size; "custom", which their code refuses to build, if there is none."""
    size = (config.depth, config.width, config.heads, config.hidden_width, config.num_cores)
    for name in _FAMILIES:
        p = PRESETS[f"veca_{name}_patch16"]
        if size == (p.depth, p.width, p.heads, p.hidden_width, p.num_cores):
            return name
    return "custom"


def _make(fields: dict[str, Any], where: str) -> VecaConfig:
    # They write the width itself where there is no projection; we write nothing.
    if fields["output_width"] == fields["width"]:
        fields["output_width"] = None
    try:
        return VecaConfig.from_dict(fields)
    except ConfigError as error:
        ours = str(error).partition(" ")[0]
        theirs = next((name for name, field in _FIELDS.items() if field == ours), "")
        setting = f"its setting {theirs}: " if theirs else ""
        raise WeightsError(f"{where}: {setting}{error}") from error


def _infer(state: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """All that the shapes tell. The most frequent value counts, so that one bad tensor is seen."""

    def most_common(values: Iterable[int], what: str) -> int:
        counted = Counter(values).most_common(1)
        if not counted:
            raise WeightsError(
                f"{where}: the tensors are not a VECA model's in the authors' layout; missing: "
                f"{what}. It holds {ts.listed(state) or 'none'}."
            )
        return counted[0][0]

    def sizes(axis: int, ndim: int, start: str, end: str) -> list[int]:
        return [
            tensor.shape[axis]
            for name, tensor in state.items()
            if name.startswith(start) and name.endswith(end) and tensor.ndim == ndim
        ]

    width = most_common(sizes(0, 1, "blocks.", "norm_attn.weight"), "blocks.0.norm_attn.weight")
    hidden = most_common(sizes(1, 2, "blocks.", ".fc2.weight"), "blocks.0.fc2.weight")
    kernel = "patch_embed.proj.weight"
    outputs = sizes(0, 2, "output_proj.weight", "")
    chunks = {name for name in state if name.startswith("query_token_chunks.")}
    most_common(sizes(1, 3, "query_token_chunks.", ""), "query_token_chunks.0")
    return {
        "width": width,
        "depth": len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        "heads": max(1, width // 64),  # holds for all four families; shapes do not tell
        "ffn_ratio": _ratio(width, hidden),
        "num_cores": len(chunks) * chunk_size(state),
        "in_channels": most_common(sizes(1, 4, kernel, ""), kernel),
        "patch_size": most_common(sizes(2, 4, kernel, ""), kernel),
        "output_width": outputs[0] if outputs else None,
    }


def _ratio(width: int, hidden: int) -> float:
    """A ratio that gives this hidden width: a published one, the plain quotient, or just above."""
    published = (config.ffn_ratio for config in PRESETS.values())
    for ratio in (*published, hidden / max(width, 1)):
        if int(width * ratio) == hidden:
            return ratio
    return (hidden + 0.5) / max(width, 1)


def _disagreement(stated: Mapping[str, Any], inferred: Mapping[str, Any]) -> str:
    width = stated.get("width", inferred["width"])
    told = []
    for theirs, name in _FIELDS.items():
        if name not in stated or name not in inferred or name == "heads":
            continue
        said, seen = stated[name], inferred[name]
        if name == "ffn_ratio":
            said, seen = int(width * said), int(inferred["width"] * seen)
            theirs = f"{theirs} {stated[name]:g} (hidden width)"
        if name == "output_width":
            said, seen = said or width, seen or inferred["width"]
        if said != seen:
            told.append(f"{theirs} says {said}, the tensors {seen}")
    return ts.listed(told)
