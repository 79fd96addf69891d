"""Pictures of any size: exact features in bounded memory, and any region of them again."""

from veca.core_memory import CoreMemory
from veca.large.picture import ArrayPicture, Picture, region
from veca.large.plan import Estimate
from veca.large.ranks import SplitVeca
from veca.large.sweep import LargeOutput, Progress, estimate, features
from veca.large.writers import ArrayWriter, NumpyWriter, TileWriter

__all__ = [
    "ArrayPicture",
    "ArrayWriter",
    "CoreMemory",
    "Estimate",
    "LargeOutput",
    "NumpyWriter",
    "Picture",
    "Progress",
    "SplitVeca",
    "TileWriter",
    "estimate",
    "features",
    "region",
]
