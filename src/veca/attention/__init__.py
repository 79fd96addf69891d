"""Core attention: cores see every token, patches see the cores. Usable in any model."""

from veca.attention.dispatch import BACKENDS, Choice, core_attention, default_backend

__all__ = ["BACKENDS", "Choice", "core_attention", "default_backend"]
