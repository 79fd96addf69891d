"""What transformers' AutoImageProcessor reads beside weights: plain data, written without it."""

from __future__ import annotations

from typing import Any

from veca.config import DEFAULT_SIZE, VecaConfig

FILE = "preprocessor_config.json"
TYPE = "VecaImageProcessor"


def processor_settings(config: VecaConfig) -> dict[str, Any]:
    """The settings of `veca.integrations.transformers.VecaImageProcessor` for a model."""
    return {
        "image_processor_type": TYPE,
        "do_resize": True,
        "size": {"height": DEFAULT_SIZE, "width": DEFAULT_SIZE},
        "fit": "resize",
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": list(config.image_mean),
        "image_std": list(config.image_std),
        "patch_size": config.patch_size,
    }
