"""The photos that come with the package."""

from __future__ import annotations

from pathlib import Path


def bundled_photos() -> list[Path]:
    """The photos that come with the package; their credits lie beside them."""
    return sorted((Path(__file__).parents[1] / "assets" / "photos").glob("*.jpg"))
