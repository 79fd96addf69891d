"""Whether transformers can be used here, and keeping a broken torchvision out of its way."""

from __future__ import annotations

import importlib
import sys
import warnings
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


def hide_broken_torchvision() -> None:
    """Tell transformers that torchvision is absent if it is there but cannot be imported.

    It looks only whether torchvision is installed, and one that belongs to another torch would
    then break every import that has to do with images. Nothing here needs torchvision.
    """
    utils = importlib.import_module("transformers.utils")
    if not utils.is_torchvision_available():
        return
    try:
        importlib.import_module("torchvision.transforms.v2.functional")
        return
    except Exception as error:  # its library fails to load in more ways than ImportError
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    warnings.warn(
        f"torchvision is installed but cannot be imported ({reason}); transformers is told that it "
        "is absent. Install the torchvision that belongs to this torch, or remove it.",
        stacklevel=4,
    )

    def absent() -> bool:
        return False

    old = {
        name: getattr(utils.import_utils, name, None)
        for name in ("is_torchvision_available", "is_torchvision_v2_available")
    }
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "transformers" and module is not None:
            for name, function in old.items():
                if function is not None and vars(module).get(name) is function:
                    setattr(module, name, absent)
    table = getattr(utils.import_utils, "BACKENDS_MAPPING", {})
    if "torchvision" in table:
        table["torchvision"] = (absent, table["torchvision"][1])
