"""transformers' own common tests, run against our classes where they are at hand.

They come with transformers' source archive, not with its wheel, and are no part of this
repository. To run them, unpack the archive of the version that is installed and name its `tests`:

    pip download --no-deps --no-binary transformers transformers==5.22.2
    TRANSFORMERS_TESTS=transformers-5.22.2/tests python -m pytest tests/integrations

What they check of us without that archive is in `test_transformers.py`.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
import types
import unittest
import unittest.mock
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

FOLDER = os.environ.get("TRANSFORMERS_TESTS", "")
if not FOLDER:
    pytest.skip(
        "TRANSFORMERS_TESTS names no folder of transformers' tests", allow_module_level=True
    )
transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
pytest.importorskip("parameterized", reason="transformers' tests need it")

import veca.integrations.transformers as hf  # noqa: E402

_PACKAGE = "tests_of_transformers"
_ABSENT = {
    "exporters.test_export": "ExportTesterMixin",
    "generation.test_utils": "GenerationTesterMixin",
}
"""Base classes that the archive leaves out: of exporters and of text generation."""


def _theirs(name: str) -> Any:
    """A module of transformers' tests."""
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [str(Path(FOLDER).resolve())]
    sys.modules.setdefault(_PACKAGE, package)
    for module, mixin in _ABSENT.items():
        full = f"{_PACKAGE}.{module}"
        if not Path(FOLDER, *module.split(".")).with_suffix(".py").is_file():
            stand_in = types.ModuleType(full)
            setattr(stand_in, mixin, type(mixin, (), {}))
            sys.modules.setdefault(
                full.rpartition(".")[0], types.ModuleType(full.rpartition(".")[0])
            )
            sys.modules.setdefault(full, stand_in)
    return importlib.import_module(f"{_PACKAGE}.{name}")


common = _theirs("test_modeling_common")
backbones = _theirs("test_backbone_common")


class Shapes:
    """What their mixins ask of a `model_tester`."""

    is_training = True
    batch_size, image_size, patch_size, num_channels = 3, 32, 16, 3
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 2
    num_cores = 8
    seq_length = num_cores + (image_size // patch_size) ** 2

    def __init__(self, parent: unittest.TestCase, **changes: Any) -> None:
        self.parent, self.changes = parent, changes

    def get_config(self) -> Any:
        return hf.VecaConfig(
            depth=self.num_hidden_layers,
            width=self.hidden_size,
            heads=self.num_attention_heads,
            num_cores=self.num_cores,
            patch_size=self.patch_size,
            rope_shift=None,
            rope_rescale=None,
            **self.changes,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        shape = (self.batch_size, self.num_channels, self.image_size, self.image_size)
        return self.get_config(), {"pixel_values": torch.rand(shape)}


NAMES = {
    "MODEL_MAPPING_NAMES": "VecaModel",
    "MODEL_FOR_BACKBONE_MAPPING_NAMES": "VecaBackbone",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "VecaForImageClassification",
}
"""Lists that transformers' own models are in, by which the tests know what a class returns."""


class _Common:
    test_resize_embeddings = False  # no words, so no table of them
    changes: ClassVar[dict[str, Any]] = {}

    def setUp(self) -> None:
        for table, name in NAMES.items():
            patch = unittest.mock.patch.dict(getattr(common, table), {"veca": name})
            patch.start()
            self.addCleanup(patch.stop)
        # It sets every field with "_std" in its name to nearly 0, and takes ours of images for one.
        patch = unittest.mock.patch.object(common, "_config_zero_init", copy.deepcopy)
        patch.start()
        self.addCleanup(patch.stop)
        self.model_tester = Shapes(self, **self.changes)

    def test_attention_outputs(self) -> None:
        self.skipTest("patches attend to cores alone, so maps are [cores, patches] and not square")

    def test_model_get_set_embeddings(self) -> None:
        config, _ = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:  # as above, but with the layer that images have
            model = model_class(config)
            assert isinstance(model.get_input_embeddings(), torch.nn.Conv2d)
            layer = torch.nn.Conv2d(3, 32, 16, 16)
            model.set_input_embeddings(layer)
            assert model.get_input_embeddings() is layer
            assert model.get_output_embeddings() is None

    def test_retain_grad_hidden_states_attentions(self) -> None:
        self.has_attentions = False  # maps are computed beside the pass, which never has them
        super().test_retain_grad_hidden_states_attentions()


class ModelTest(_Common, common.ModelTesterMixin, unittest.TestCase):
    all_model_classes = (hf.VecaModel, hf.VecaForImageClassification)


class BackboneTest(
    _Common, backbones.BackboneTesterMixin, common.ModelTesterMixin, unittest.TestCase
):
    all_model_classes = (hf.VecaBackbone,)
    config_class = hf.VecaConfig
    changes: ClassVar[dict[str, Any]] = {"out_features": ["stage1", "stage2"]}

    def test_retain_grad_hidden_states_attentions(self) -> None:
        self.skipTest("it flattens the first output, which is a tuple of maps in a backbone")
