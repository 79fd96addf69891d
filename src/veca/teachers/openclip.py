"""CLIP towers in the layout of OpenCLIP's repositories (LAION's OpenCLIP, Apple's DFN-CLIP).

The image tower is the same network as CLIP's in `transformers`, under other names; the weights
are renamed and run there, so OpenCLIP itself is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from veca.teachers.base import TeacherError
from veca.teachers.folder import OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS, ModelFolder
from veca.teachers.huggingface import CLIP_MEAN, CLIP_STD, ClipTeacher, find_class, load_pretrained
from veca.weights import pickled
from veca.weights.tensors import read_file

_HEAD_WIDTH = 64
_PREFIX = "visual."
_NAMES = {
    "class_embedding": "embeddings.class_embedding",
    "positional_embedding": "embeddings.position_embedding.weight",
    "conv1.weight": "embeddings.patch_embedding.weight",
    "ln_pre": "pre_layrnorm",
    "ln_post": "post_layernorm",
}
_BLOCK_NAMES = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def load_open_clip(
    folder: ModelFolder, *, name: str, source: str, feature: str = "cls", licence: str | None = None
) -> ClipTeacher:
    """The image tower in a folder with `open_clip_config.json` and its weights."""
    config = folder.read_json(OPEN_CLIP_CONFIG)
    if config is None:
        raise TeacherError(f"{folder.label} holds no {OPEN_CLIP_CONFIG}.")
    settings = _settings(config, folder.label)
    files = folder.weights(OPEN_CLIP_WEIGHTS)
    state = _visual(_read(files[0]), folder.label)
    model = load_pretrained(
        ClipTeacher.class_for(feature),
        folder,
        state=rename(state),
        config=find_class("CLIPVisionConfig")(**settings),
    )
    preprocess = config.get("preprocess_cfg") or {}
    return ClipTeacher(
        model,
        name=name,
        source=source,
        feature=feature,
        licence=licence or folder.licence(),
        normalisation=(preprocess.get("mean", CLIP_MEAN), preprocess.get("std", CLIP_STD)),
        files=files,
        revision=folder.revision,
    )


def _settings(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The fields of `transformers`'s CLIPVisionConfig."""
    model = config.get("model_cfg") or {}
    vision = model.get("vision_cfg") or {}
    if not {"width", "layers", "patch_size"} <= set(vision) or "timm_model_name" in vision:
        raise TeacherError(
            f"{label}: the image tower in {OPEN_CLIP_CONFIG} is not a plain ViT; load it through "
            "timm, or wrap it in a CallableTeacher."
        )
    known = {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"}
    # Fields that change what the tower computes; those of the text tower and of training do not.
    other = {"attentional_pool", "no_ln_pre", "pool_type", "final_ln_after_pool", "ls_init_value"}
    changed = sorted(k for k in other - known if vision.get(k) not in (None, False, "tok"))
    if changed:
        raise TeacherError(
            f"{label}: the image tower sets {', '.join(changed)}, which CLIP's has not; wrap it in "
            "a CallableTeacher."
        )
    width = int(vision["width"])
    return {
        "hidden_size": width,
        "intermediate_size": int(width * vision.get("mlp_ratio", 4.0)),
        "num_hidden_layers": int(vision["layers"]),
        "num_attention_heads": width // int(vision.get("head_width", _HEAD_WIDTH)),
        "image_size": int(vision.get("image_size", 224)),
        "patch_size": int(vision["patch_size"]),
        "projection_dim": int(model["embed_dim"]),
        "hidden_act": "quick_gelu" if model.get("quick_gelu") else "gelu",
        "layer_norm_eps": 1e-5,
    }


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_file(path, TeacherError)[0]
    content = pickled.read(path, "weights", TeacherError)
    state = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(state, Mapping):
        raise TeacherError(f"{path} holds a {type(state).__name__}, not a dict of tensors.")
    tensors = {str(name): x for name, x in state.items() if isinstance(x, Tensor)}
    pickled.check_sizes(tensors, path, TeacherError)
    return tensors


def _visual(state: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """The image tower's tensors, float32, without their prefix."""
    tower = {
        key.removeprefix("module.").removeprefix(_PREFIX): tensor.float()
        for key, tensor in state.items()
        if key.removeprefix("module.").startswith(_PREFIX)
    }
    if "conv1.weight" not in tower or "positional_embedding" not in tower:
        raise TeacherError(
            f"{label}: the weights hold no CLIP image tower ({_PREFIX}conv1.weight)."
        )
    return tower


def rename(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """OpenCLIP's names (without "visual.") to those of `transformers`'s CLIP files."""
    renamed = {}
    for key, tensor in state.items():
        block = re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+)", key)
        if block:
            start = f"vision_model.encoder.layers.{block[1]}."
            packed = re.fullmatch(r"attn\.in_proj_(weight|bias)", block[2])
            if packed:
                for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                    renamed[f"{start}self_attn.{part}_proj.{packed[1]}"] = piece.clone()
                continue
            stem, _, kind = block[2].rpartition(".")
            renamed[f"{start}{_BLOCK_NAMES.get(stem, stem)}.{kind}"] = tensor
        elif key == "proj":
            renamed["visual_projection.weight"] = tensor.T.contiguous()
        else:
            stem, _, kind = key.rpartition(".")
            name = _NAMES.get(key) or f"{_NAMES.get(stem, stem)}.{kind}"
            renamed[f"vision_model.{name}"] = tensor
    return renamed
