"""Making the Auto classes and pipelines of transformers know model type "veca"."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
)

from veca._util.files import from_json
from veca.integrations.transformers.configuration import VecaConfig
from veca.integrations.transformers.modeling import (
    VecaBackbone,
    VecaForImageClassification,
    VecaModel,
)
from veca.integrations.transformers.processing import VecaImageProcessor


def register() -> None:
    """Register the classes with transformers. Done on import; doing it again changes nothing."""
    AutoConfig.register(VecaConfig.model_type, VecaConfig, exist_ok=True)
    AutoModel.register(VecaConfig, VecaModel, exist_ok=True)
    AutoBackbone.register(VecaConfig, VecaBackbone, exist_ok=True)
    AutoModelForImageClassification.register(VecaConfig, VecaForImageClassification, exist_ok=True)
    if "image_processor_classes" in inspect.signature(AutoImageProcessor.register).parameters:
        # One class for both kinds, so that asking for either finds it without a warning.
        both = {"pil": VecaImageProcessor, "torchvision": VecaImageProcessor}
        AutoImageProcessor.register(VecaConfig, image_processor_classes=both, exist_ok=True)
    else:
        AutoImageProcessor.register(
            VecaConfig, slow_image_processor_class=VecaImageProcessor, exist_ok=True
        )
    _let_backbones_load_from_folders()


def _let_backbones_load_from_folders() -> None:
    """Let AutoBackbone read a folder of ours.

    Recent versions of transformers ask the hub whether a repository of that name exists before
    they look at the disk, and take a folder for the name of a timm model. Other folders and names
    go their usual way.
    """
    if "from_pretrained" in vars(AutoBackbone):
        return  # done before
    backbones = AutoBackbone.__mro__[1]

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(name, kwargs.get("subfolder") or ""):
            kwargs.pop("use_timm_backbone", None)
            return super(backbones, cls).from_pretrained(name, *args, **kwargs)
        return super(AutoBackbone, cls).from_pretrained(name, *args, **kwargs)

    from_pretrained.__doc__ = backbones.from_pretrained.__doc__
    AutoBackbone.from_pretrained = classmethod(from_pretrained)


def _is_ours(name: Any, subfolder: str) -> bool:
    try:
        text = (Path(name) / subfolder / "config.json").read_text(encoding="utf-8")
        return bool(from_json(text).get("model_type") == VecaConfig.model_type)
    except (OSError, TypeError, ValueError, AttributeError):
        return False
