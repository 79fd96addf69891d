"""The one folder in which this package keeps what it may need again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(part: str = "") -> Path:
    """$VECA_CACHE, or ~/.cache/veca; `part` names a folder in it."""
    chosen = os.environ.get("VECA_CACHE")
    folder = Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "veca"
    return folder / part if part else folder
