import json

import pytest

from veca import PRESETS, VecaConfig, create_model
from veca.config import preset
from veca.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "depth", "width", "heads", "hidden"),
    [
        ("tiny", 12, 192, 3, 512),
        ("small", 12, 384, 6, 1024),
        ("splus", 12, 384, 6, 1536),
        ("base", 12, 768, 12, 2048),
        ("large", 24, 1024, 16, 2730),
    ],
)
def test_presets_are_the_papers(name, depth, width, heads, hidden):
    config = preset(name)
    assert config == PRESETS[f"veca_{name}_patch16"]
    assert (config.depth, config.width, config.heads, config.hidden_width) == (
        depth,
        width,
        heads,
        hidden,
    )
    assert (config.num_cores, config.patch_size) == (64, 16)
    assert config.head_width == 64


def test_round_trip_through_json():
    config = VecaConfig(output_width=77, rope_jitter=1.5, image_mean=(0.1, 0.2, 0.3))
    assert VecaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"depth": 0}, "depth"),
        ({"depth": 2.0}, "depth"),
        ({"width": True}, "width"),
        ({"width": 100, "heads": 3}, r"\bheads\b"),
        ({"width": 18, "heads": 3}, "head width"),
        ({"num_cores": -1}, "num_cores"),
        ({"ffn_ratio": float("nan")}, "ffn_ratio"),
        ({"ffn_ratio": 0.001, "width": 32, "heads": 2}, "hidden"),
        ({"rope_zero_fraction": 1.5}, "rope_zero_fraction"),
        ({"rope_rescale": 0.5}, "rope_rescale"),
        ({"dropout": 1.0}, "dropout"),
        ({"output_width": 0}, "output_width"),
        ({"image_mean": (0.5, 0.5)}, "image_mean"),
        ({"image_std": (0.5, 0.0, 0.5)}, "image_std"),
    ],
)
def test_impossible_configurations_are_refused(fields, culprit):
    with pytest.raises(ConfigError, match=culprit):
        VecaConfig(**fields)


def test_unknown_field_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'num_core'.*'num_cores'"):
        VecaConfig.from_dict({"num_core": 3})


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="mean 'veca_small_patch16'"):
        create_model("veca_smal_patch16")
    with pytest.raises(ConfigError, match="string"):
        create_model(3)
