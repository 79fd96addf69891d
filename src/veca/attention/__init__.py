"""Core attention: cores see every token, patches see the cores. Usable in any model."""

from veca.attention.dispatch import (
    BACKENDS,
    Choice,
    core_attention,
    default_backend,
    unchecked_attention,
)
from veca.attention.partial import PartialAttention, partial_attention
from veca.attention.sdpa import patch_rows

__all__ = [
    "BACKENDS",
    "Choice",
    "PartialAttention",
    "core_attention",
    "default_backend",
    "partial_attention",
    "patch_rows",
    "unchecked_attention",
]
