"""Read images, fit them to the patch grid, and turn them into normalised tensors.

`read` decodes one image, `fit` knows the patch grid, `transform` makes the batch that a model
takes, and `find` lists files. Only Pillow, numpy and torch are used. Sizes are always
(height, width) in pixels.
"""

from veca._util.files import open_file
from veca.images.find import EXTENSIONS, find_images
from veca.images.fit import FITS, Size, check_size, target_size
from veca.images.read import MAX_PIXELS, Source, read_image
from veca.images.transform import (
    IMAGENET_MEAN,
    IMAGENET_STD,
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
    "Preprocessed",
    "Size",
    "Source",
    "check_size",
    "denormalize",
    "find_images",
    "normalize",
    "open_file",
    "preprocess",
    "read_image",
    "target_size",
    "to_tensor",
]
