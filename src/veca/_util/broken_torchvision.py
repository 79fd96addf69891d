"""Keeping a broken torchvision out of the way of transformers."""

from __future__ import annotations

import importlib
import sys
import warnings


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
