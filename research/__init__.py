"""The laboratory: how the shipped weights came to be. It imports `veca` and `benchmarks`; nothing
imports it, and it may be deleted."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
"""What only the diary shows; what a page of docs/ shows is in benchmarks/results."""
