"""Image sets for training: find, read, cut and recolour, batch, and pack into shards."""

from veca._util.cache import cache_folder as cache_dir
from veca.data.augment import Augmentation, AugmentConfig, Views
from veca.data.draws import sample_keys
from veca.data.in_memory import InMemoryImages, cache_file
from veca.data.loader import Batch, BatchPlan, Loader
from veca.data.order import SampleOrder, hold_out
from veca.data.packing import PackReport, pack
from veca.data.sources import ImageSource, open_source
from veca.errors import BadImageError, DataError, TooManyBadError

__all__ = [
    "AugmentConfig",
    "Augmentation",
    "BadImageError",
    "Batch",
    "BatchPlan",
    "DataError",
    "ImageSource",
    "InMemoryImages",
    "Loader",
    "PackReport",
    "SampleOrder",
    "TooManyBadError",
    "Views",
    "cache_dir",
    "cache_file",
    "hold_out",
    "open_source",
    "pack",
    "sample_keys",
]
