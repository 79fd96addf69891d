"""Read images, fit them to the patch grid, and turn them into normalised tensors.

`formats` knows which files are images, `read` decodes one, `fit` knows the patch grid, `transform`
makes what a model takes, and `find` lists files. Only Pillow, numpy and torch are used, and a
plugin for a format that Pillow lacks. Sizes are always (height, width) in pixels.
"""

from veca._util.files import open_file
from veca.images.find import find_images
from veca.images.fit import FITS, SHAPES, Size, check_size, target_size
from veca.images.formats import EXTENSIONS, check_name, extensions
from veca.images.read import MAX_PIXELS, Source, pixel_limit, read_image
from veca.images.transform import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageTransform,
    Preprocessed,
    denormalize,
    normalize,
    preprocess,
    to_tensor,
)

__all__ = [
    "EXTENSIONS",
    "FITS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "MAX_PIXELS",
    "SHAPES",
    "ImageTransform",
    "Preprocessed",
    "Size",
    "Source",
    "check_name",
    "check_size",
    "denormalize",
    "extensions",
    "find_images",
    "normalize",
    "open_file",
    "pixel_limit",
    "preprocess",
    "read_image",
    "target_size",
    "to_tensor",
]
