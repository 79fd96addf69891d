"""The one place the version is written; read by packaging without importing torch."""

__version__ = "0.2.0"
"""The version of this package."""
