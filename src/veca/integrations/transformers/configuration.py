"""The configuration as transformers wants it: the fields of `veca.VecaConfig`, and its dials."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from veca._util.extras import upgrade_advice
from veca.checks import asked_keep, check_agreement, check_budget
from veca.config import VecaConfig as Architecture
from veca.errors import ConfigError
from veca.weights.store import FORMAT_VERSION

try:  # where it is in recent versions, and where it was in the first of version 5
    from transformers.backbone_utils import BackboneConfigMixin
except ImportError:
    from transformers.utils.backbone_utils import BackboneConfigMixin

_FIELDS = tuple(field.name for field in dataclasses.fields(Architecture))
_BACKBONE_DEFAULTS = {"apply_layernorm": True, "reshape_hidden_states": True}


class VecaConfig(BackboneConfigMixin, PreTrainedConfig):  # type: ignore[misc]
    """The architecture, the default budget, and which layers a backbone shows.

    Takes every field of `veca.VecaConfig` under its own name (`depth`, `width`, `heads`, ...).

    Args:
        cores: the budget when a call names none, 1..num_cores; None means all.
        keep: the share of patch tokens that go on after merging when a call names none, 0.2..1;
            None means all; "auto" chooses for each image, as `veca.Veca.forward` does.
        agreement: what "auto" promises.
        out_features: stages a backbone returns: "stem" (before the first block), "stage1" (after
            it) to "stageL". Default: the last.
        out_indices: the same as numbers, 0 for the stem.
        apply_layernorm: a backbone's maps go through the final norm and output projection, so
            that the last one equals the model's dense features.
        reshape_hidden_states: a backbone's maps are [B, D, h, w]; otherwise all tokens, cores
            first, [B, C + N, D].
    """

    model_type = "veca"
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "num_channels": "in_channels",
    }

    def __init__(
        self,
        *,
        cores: int | None = None,
        keep: float | str | None = None,
        agreement: float | None = None,
        out_features: list[str] | None = None,
        out_indices: list[int] | None = None,
        apply_layernorm: bool = True,
        reshape_hidden_states: bool = True,
        **kwargs: Any,
    ) -> None:
        given = {name: kwargs.pop(name) for name in _FIELDS if name in kwargs}
        for name, own in self.attribute_map.items():
            if name in kwargs:
                given.setdefault(own, kwargs.pop(name))
        version = kwargs.pop("format_version", FORMAT_VERSION)
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise ConfigError(
                f"this config.json has format version {version!r}, but this veca reads up to "
                f"{FORMAT_VERSION}; {upgrade_advice()}."
            )
        architecture = Architecture.from_dict(given)
        fields = architecture.to_dict()
        for name in _FIELDS:  # None stands for what was left out
            setattr(self, name, fields.get(name))
        check_budget(cores, architecture.num_cores)
        asked_keep(keep)
        check_agreement(agreement, cores, keep)
        self.cores, self.keep, self.agreement = cores, keep, agreement
        self.apply_layernorm = apply_layernorm
        self.reshape_hidden_states = reshape_hidden_states
        self.stage_names = ["stem", *(f"stage{n}" for n in range(1, architecture.depth + 1))]
        kwargs.pop("stage_names", None)
        super().__init__(**kwargs)
        # One by one, each through its setter, which fills in the other.
        self.out_features = out_features
        if out_indices is not None:
            wanted = [int(index) % (architecture.depth + 1) for index in out_indices]
            if out_features is not None and wanted != list(self._out_indices):
                raise ConfigError(
                    f"out_features {out_features} and out_indices {list(out_indices)} are not the "
                    "same stages; give one of them."
                )
            self.out_indices = list(out_indices)

    @property
    def hidden_size(self) -> int:
        """Width of `last_hidden_state` and of everything else that comes out."""
        return self.feature_width

    @property
    def feature_width(self) -> int:
        """The same, as the plain model's configuration calls it."""
        return self.to_veca().feature_width

    def to_veca(self) -> Architecture:
        """The configuration of the plain model."""
        return Architecture.from_dict({name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def from_veca(cls, config: Architecture, **kwargs: Any) -> VecaConfig:
        """From the configuration of a plain model; `kwargs` as for the class."""
        return cls(**config.to_dict(), **kwargs)

    def to_dict(self) -> dict[str, Any]:
        return self._tidy(super().to_dict())

    def to_diff_dict(self) -> dict[str, Any]:
        return self._tidy(super().to_diff_dict())

    def _tidy(self, fields: dict[str, Any]) -> dict[str, Any]:
        """All that makes the architecture, so that `veca.load` reads it; nothing that is a default.

        `veca.load` ignores what transformers adds; the less of it, the easier to read.
        """
        own = self.to_veca().to_dict()
        fields = {name: fields[name] for name in fields if name in own or name not in _FIELDS}
        fields = {**fields, **own, "format_version": FORMAT_VERSION}
        fields.pop("stage_names", None)
        if fields.get("out_indices") == [self.depth]:
            fields.pop("out_features", None)
            fields.pop("out_indices", None)
        for name in ("cores", "keep", "agreement"):
            if fields.get(name) is None:
                fields.pop(name, None)
        for name, default in _BACKBONE_DEFAULTS.items():
            if fields.get(name) == default:
                fields.pop(name, None)
        return fields
