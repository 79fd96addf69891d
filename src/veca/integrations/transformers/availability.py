"""Whether transformers can be used here."""

from __future__ import annotations

import importlib
from typing import Any

from veca._util.extras import missing, require

_PURPOSE = "veca.integrations.transformers"


def require_transformers() -> Any:
    """The transformers library, version 5 or newer."""
    library = require("transformers", _PURPOSE)
    version = str(getattr(library, "__version__", "0"))
    if not version.partition(".")[0].isdigit() or int(version.partition(".")[0]) < 5:
        fault = f"must be version 5 or newer, found {version}"
        raise missing("transformers", _PURPOSE, fault=fault)
    return library


def require_image_processors() -> None:
    """Refuse a transformers that reads images with torchvision alone, where there is none.

    Versions 5.4 to 5.17 put an object in place of AutoImageProcessor that fails at every use.
    """
    library = importlib.import_module("transformers")
    try:
        _ = library.AutoImageProcessor.register
    except ImportError as error:
        fault = f"reads no images without torchvision in version {library.__version__}"
        advice = "install transformers 5.18 or newer: pip install --upgrade 'transformers>=5.18'"
        raise missing("transformers", _PURPOSE, fault=fault, advice=advice) from error
