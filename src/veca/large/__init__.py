"""Pictures of any size: exact features in bounded memory, and any region of them again."""

from veca.core_memory import CoreMemory
from veca.large.collection import Collected, collect
from veca.large.job import LargeJob
from veca.large.masks import mask_of
from veca.large.picture import ArrayPicture, Picture, region
from veca.large.plan import Estimate
from veca.large.ranks import SplitVeca
from veca.large.sources import Place, Source
from veca.large.store import FeatureStore
from veca.large.sweep import CONTEXTS, LargeOutput, estimate, features
from veca.large.view import PictureLook, PictureView, open_picture, overview
from veca.large.work import Progress
from veca.large.writers import Layout, TileWriter
from veca.large.writers.arrays import ArrayWriter, NumpyWriter
from veca.large.writers.geotiff import GeoTiffWriter
from veca.large.writers.hdf5 import Hdf5Writer
from veca.large.writers.zarr_store import ZarrWriter

__all__ = [
    "CONTEXTS",
    "ArrayPicture",
    "ArrayWriter",
    "Collected",
    "CoreMemory",
    "Estimate",
    "FeatureStore",
    "GeoTiffWriter",
    "Hdf5Writer",
    "LargeJob",
    "LargeOutput",
    "Layout",
    "NumpyWriter",
    "Picture",
    "PictureLook",
    "PictureView",
    "Place",
    "Progress",
    "Source",
    "SplitVeca",
    "TileWriter",
    "ZarrWriter",
    "collect",
    "estimate",
    "features",
    "mask_of",
    "open_picture",
    "overview",
    "region",
]
