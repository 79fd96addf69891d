"""What transformers' Auto classes read beside weights: plain data, written without it."""

from __future__ import annotations

from typing import Any

from veca.config import DEFAULT_SIZE, VecaConfig

FILE = "preprocessor_config.json"
TYPE = "VecaImageProcessor"
CODE_FILE = "modeling_veca.py"
"""Where transformers finds our classes, if their code lies beside the weights."""
AUTO_CLASSES = {
    "AutoConfig": "VecaConfig",
    "AutoModel": "VecaModel",
    "AutoBackbone": "VecaBackbone",
    "AutoModelForImageClassification": "VecaForImageClassification",
}
"""transformers' Auto classes, and ours that they find by config.json."""
_NOTE = (
    "The code of these weights: run it with trust_remote_code=True, or use the package, which "
    "needs no trust: install veca with its extra hf and import veca.integrations.transformers"
)


def processor_settings(config: VecaConfig, *, code: bool = False) -> dict[str, Any]:
    """The settings of `veca.integrations.transformers.VecaImageProcessor` for a model.

    Args:
        code: the class lies beside the weights, in `CODE_FILE`.
    """
    return {
        **({"auto_map": {"AutoImageProcessor": _in_code(TYPE)}} if code else {}),
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


def auto_map() -> dict[str, str]:
    """The field of config.json that leads transformers to the code beside the weights.

    Its error without trust_remote_code=True names no package, but sends the reader to the files.
    """
    return {**{auto: _in_code(name) for auto, name in AUTO_CLASSES.items()}, "note": _NOTE}


def _in_code(name: str) -> str:
    return f"{CODE_FILE.removesuffix('.py')}.{name}"
