"""timm's own sweep over models, run against ours where it is at hand.

It comes with timm's source archive, not with its wheel, and is no part of this repository. To run
it, unpack the archive of the version that is installed and name its `tests`:

    pip download --no-deps --no-binary timm timm==1.0.31
    TIMM_TESTS=timm-1.0.31/tests python -m pytest tests/integrations/test_timm_sweep.py
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

SWEEP = Path(os.environ.get("TIMM_TESTS", ""), "test_models.py")
if not SWEEP.is_file():
    pytest.skip("TIMM_TESTS names no folder of timm's tests", allow_module_level=True)
try:
    import timm
except Exception as error:  # a torchvision of another torch fails in more ways than ImportError
    pytest.skip(f"timm does not import here: {error}", allow_module_level=True)

import veca.integrations.timm  # noqa: E402, F401

NAMES = ["veca_tiny_patch16", "veca_small_patch16"]


EXCLUDED = {
    "torchscript": "TorchScript has no dataclasses, which the configuration is; torch.export works",
    "fx": "FX traces with stand-ins for numbers, and a budget is checked to be one",
}
"""What is left out, by a part of the test's name, and why."""


def _ours(
    filter: str | Sequence[str] = "", *_: Any, exclude_filters: Sequence[str] = (), **__: Any
) -> list[str]:
    """`timm.list_models` of our names; where timm tells families apart, we go with `vit_*`.

    (Their features are tokens, not maps.)
    """
    wanted = [pattern for pattern in ([filter] if isinstance(filter, str) else filter) if pattern]
    if "vit_*" in exclude_filters:
        return []
    fits = [n for n in NAMES if any(fnmatch.fnmatch(n, p) for p in wanted)]
    return NAMES if not wanted or "vit_*" in wanted else fits


def _swept(module: Any) -> dict[str, Any]:
    """The tests of the sweep that are run on models of ours."""
    found = {"cfg_device": module.cfg_device} if hasattr(module, "cfg_device") else {}
    for name, test in vars(module).items():
        marks = getattr(test, "pytestmark", []) if name.startswith("test_") else []
        lists = [mark.args[1] for mark in marks if mark.args and mark.args[0] == "model_name"]
        if lists and lists[0] and set(lists[0]) <= set(NAMES):
            why = [reason for part, reason in EXCLUDED.items() if part in name]
            found[name] = pytest.mark.skip(why[0])(test) if why else test
    return found


with mock.patch.object(timm, "list_models", _ours):
    spec = importlib.util.spec_from_file_location("timm_sweep", SWEEP)
    assert spec is not None and spec.loader is not None
    sweep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sweep)

globals().update(_swept(sweep))
