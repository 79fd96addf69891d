"""VECA in transformers (extra `hf`): importing this registers the classes with the Auto classes.

>>> import veca.integrations.transformers
>>> from transformers import AutoModel
>>> model = AutoModel.from_pretrained("path/to/weights")    # written by either library
>>> model(pixel_values, cores=32).pooler_output
"""

from veca._util.broken_torchvision import hide_broken_torchvision
from veca.integrations.transformers.availability import (
    require_image_processors,
    require_transformers,
)

require_transformers()
hide_broken_torchvision()
require_image_processors()

from veca.integrations.transformers.configuration import VecaConfig  # noqa: E402
from veca.integrations.transformers.modeling import (  # noqa: E402
    VecaBackbone,
    VecaForImageClassification,
    VecaModel,
    VecaModelOutput,
    VecaPreTrainedModel,
)
from veca.integrations.transformers.processing import VecaImageProcessor  # noqa: E402
from veca.integrations.transformers.registration import register  # noqa: E402

register()

__all__ = [
    "VecaBackbone",
    "VecaConfig",
    "VecaForImageClassification",
    "VecaImageProcessor",
    "VecaModel",
    "VecaModelOutput",
    "VecaPreTrainedModel",
    "register",
]
