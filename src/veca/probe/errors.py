"""The errors of probes, where 0.1 had them; they are defined in `veca.errors`."""

from veca.errors import ProbeError

__all__ = ["ProbeError"]
