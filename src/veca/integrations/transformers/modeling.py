"""The model under transformers: the plain `Veca` inside, its outputs under the usual names.

Every class holds the plain model as `.veca`, so the numbers are the plain model's, and files have
the plain model's names for the tensors.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BackboneOutput, ImageClassifierOutput
from transformers.utils import ModelOutput

from veca.checks import asked_keep, check_budget, is_auto
from veca.integrations.transformers import folder as folders
from veca.integrations.transformers.configuration import VecaConfig
from veca.model import Block, CoreBank, CoreMove, LayerState, Veca, spread_points
from veca.outputs import VecaOutput
from veca.weights import store
from veca.weights.card import model_card

try:  # where it is in recent versions, and where it was in the first of version 5
    from transformers.backbone_utils import BackboneMixin
except ImportError:
    from transformers.utils.backbone_utils import BackboneMixin

_PREFIX = "veca."


@dataclass
class VecaModelOutput(ModelOutput):  # type: ignore[misc]
    """What `VecaModel` returns: the parts of `veca.VecaOutput` under the usual names."""

    last_hidden_state: Tensor | None = None
    """[B, C + N, D] the C cores, then the N patches row by row, after the final norm."""
    pooler_output: Tensor | None = None
    """[B, D] the first core: the global embedding."""
    hidden_states: tuple[Tensor, ...] | None = None
    """With output_hidden_states: L + 1 of [B, C + N, width], before the first block and after each,
    without the final norm."""
    attentions: tuple[Tensor, ...] | None = None
    """With output_attentions: L of [B, heads, C, N], how much each core takes from each patch."""
    core_xy: Tensor | None = None
    """[B, C, 2] where each core ended, (x, y) in [-1, 1]."""
    feature_map: Tensor | None = None
    """[B, D, h, w] the patches as an image: a view of `last_hidden_state`."""

    @property
    def cores(self) -> Tensor:
        """[B, C, D] every active core."""
        return self._tokens()[:, : cast(Tensor, self.core_xy).shape[1]]

    @property
    def patches(self) -> Tensor:
        """[B, N, D] dense features, row by row."""
        return self._tokens()[:, cast(Tensor, self.core_xy).shape[1] :]

    def _tokens(self) -> Tensor:
        return cast(Tensor, self.last_hidden_state)


class VecaBlock(GradientCheckpointingLayer, Block):  # type: ignore[misc]
    """A block as transformers recognises it: it sets `gradient_checkpointing` on each of them.

    `Veca.walk` does what the flag says, so a call is a plain call.
    """

    __call__ = nn.Module.__call__


def _known_to_transformers(model: Veca) -> Veca:
    for block in model.blocks:
        block.__class__ = VecaBlock
    return model


class _Run(NamedTuple):
    out: VecaOutput
    layers: dict[int, LayerState]
    """By stage: 0 before the first block, n after block n."""
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


class VecaPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What the classes share: the plain model, how it starts, and folders `veca.load` reads."""

    config_class = VecaConfig
    base_model_prefix = "veca"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["VecaBlock"]  # noqa: RUF012
    _input_embed_layer = "patch_embed"
    # The attention is veca's own, whichever of these is asked for; see `Veca.backend`.
    _supports_sdpa = True

    _is_plain = True
    """Whether the tensors are those of the plain model and no others."""

    def __init__(self, config: VecaConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        check_budget(config.cores, config.num_cores)  # from_pretrained sets them unchecked
        asked_keep(config.keep)
        self.veca = _known_to_transformers(Veca(config.to_veca()))
        self.provenance: dict[str, Any] = {}

    def get_input_embeddings(self) -> nn.Module:
        return self.veca.patch_embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.veca.patch_embed = cast(nn.Conv2d, value)

    def _init_weights(self, module: nn.Module) -> None:
        """As `veca.model.initialize`, with functions that leave loaded tensors alone."""
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, CoreBank):
            init.normal_(module.tokens, std=module.tokens.shape[1] ** -0.5)
            init.copy_(module.coordinates, spread_points(len(module.coordinates)).atanh())
        elif isinstance(module, CoreMove):
            init.constant_(module.alpha, module.initial_step)

    def _run(
        self,
        pixel_values: Tensor,
        cores: int | None,
        keep: float | str | None,
        hidden_states: bool | None,
        attentions: bool | None,
        shown: Sequence[int] | None = None,
    ) -> _Run:
        """Through the plain model, keeping what is asked for; None is as the configuration says.

        Args:
            shown: stages to keep in any case; the output is then that of the last. None: run it
                all.
        """
        config = self.config
        cores = config.cores if cores is None else cores
        keep = config.keep if keep is None else keep
        promise = config.agreement if is_auto(keep) else None
        hidden_states = config.output_hidden_states if hidden_states is None else hidden_states
        attentions = config.output_attentions if attentions is None else attentions
        if shown is None and not hidden_states and not attentions:
            out = self.veca(pixel_values, cores=cores, keep=keep, agreement=promise)
            return _Run(out, {}, None, None)
        last = config.depth if shown is None else max(shown)
        kept = range(last + 1) if hidden_states else shown or ()
        layers: dict[int, LayerState] = {}
        maps: list[Tensor] = []
        before: LayerState | None = None
        walk = self.veca.walk(pixel_values, cores, last=max(1, last), keep=keep, agreement=promise)
        for layer in walk:
            if layer.number in kept and not layer.merging:
                layers[layer.number] = layer
            if attentions and before is not None and not layer.merging:
                weights = self.veca.core_to_patch(before, layer)
                maps.append(layer.on_grid(weights).flatten(-2))
            before = layer
        return _Run(
            self.veca.output(layer),
            layers,
            tuple(layers[n].spread() for n in sorted(layers)) if hidden_states else None,
            tuple(maps) if attentions else None,
        )

    def _returned(self, result: ModelOutput, return_dict: bool | None) -> Any:
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return result if return_dict else result.to_tuple()

    # ------------------------------------------------------------------------------- saving

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = found[0] if isinstance(found, tuple) else found
        model.provenance = folders.read_provenance(pretrained_model_name_or_path, kwargs)
        model.veca.beside = folders.read_beside(pretrained_model_name_or_path, kwargs)
        return found

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a folder that `from_pretrained` and, for a bare model, `veca.load` read.

        Besides the usual files it gets a model card (README.md) and a preprocessor_config.json,
        unless they are there, and the provenance.
        """
        hub = {k: kwargs.pop(k) for k in folders.HUB_OPTIONS if k in kwargs}
        target = Path(save_directory)
        state = dict(self.state_dict() if state_dict is None else state_dict)
        whole = set(state) == set(self.state_dict())
        simple = folders.is_simple(self, state, variant, kwargs)
        plain = {n.removeprefix(_PREFIX): t for n, t in state.items()}
        if is_main_process:
            folders.carry_code(self, target)
        if self._is_plain and whole and simple and folders.fits_one_file(state, max_shard_size):
            if is_main_process:
                self.config.dtype = str(self.dtype).removeprefix("torch.")
                self.config.architectures = [type(self).__name__.removeprefix("FSDP")]
                folders.write_plain(target, plain, self.config, self.provenance, self.veca.beside)
        else:
            with folders.replacing(target) if is_main_process else nullcontext():
                super().save_pretrained(
                    save_directory,
                    is_main_process=is_main_process,
                    state_dict=state_dict,
                    max_shard_size=max_shard_size,
                    variant=variant,
                    **kwargs,
                )
            if is_main_process and self._is_plain and whole and simple:
                folders.write_provenance(target, plain, self.provenance)
        if is_main_process:
            provenance = store.read_provenance(target) if self._is_plain and whole else {}
            card = model_card(
                self.config.to_veca(),
                provenance or self.provenance,
                name=hub.get("repo_id") or target.name,
            )
            folders.complete(target, self.config, card)
            if push_to_hub:
                folders.upload(target, **{"repo_id": target.name, **hub})

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Upload the model, its configuration and a model card written from its provenance.

        A card that the repository has already is kept. Takes the options of transformers' own.
        """
        sharding = {k: kwargs.pop(k) for k in ("max_shard_size", "variant") if kwargs.get(k)}
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder)
            self.save_pretrained(target, repo_id=repo_id, **sharding)
            return folders.upload(target, repo_id, **kwargs)


class VecaModel(VecaPreTrainedModel):
    """The bare model: cores and patches in `last_hidden_state`, the global embedding pooled.

    >>> out = VecaModel.from_pretrained(folder)(pixel_values, cores=32)
    >>> out.pooler_output, out.patches, out.feature_map
    """

    def __init__(self, config: VecaConfig) -> None:
        super().__init__(config)
        self.post_init()

    @classmethod
    def from_veca(cls, model: Veca, *, provenance: Mapping[str, Any] | None = None) -> Any:
        """Around a plain model, which it shares the weights with."""
        with torch.device("meta"):  # weights that are about to be replaced
            new = cls(VecaConfig.from_veca(model.config))
        new.veca = _known_to_transformers(model)
        new.provenance = dict(model.provenance if provenance is None else provenance)
        return new.train(model.training)

    def forward(
        self,
        pixel_values: Tensor,
        cores: int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        keep: float | str | None = None,
    ) -> VecaModelOutput | tuple[Any, ...]:
        """Features of `pixel_values` [B, 3, H, W] (normalised, sides on the patch grid).

        Args:
            cores: the budget, 1..num_cores; by default the configuration's, else all.
            keep: the share of patch tokens that go on after merging, 0.2..1; by default the
                configuration's, else all; or "auto". Outputs cover the whole grid all the same.
        """
        run = self._run(pixel_values, cores, keep, output_hidden_states, output_attentions)
        out = run.out
        result = VecaModelOutput(
            last_hidden_state=torch.cat([out.cores, out.patches], dim=1),
            pooler_output=out.cls,
            hidden_states=run.hidden_states,
            attentions=run.attentions,
            core_xy=out.core_xy,
            feature_map=out.feature_map(),
        )
        return self._returned(result, return_dict)


class VecaBackbone(BackboneMixin, VecaPreTrainedModel):  # type: ignore[misc]
    """Feature maps of chosen stages, for the detectors and segmenters that take a backbone.

    >>> maps = VecaBackbone.from_pretrained(folder, out_indices=[3, 6, 9, 12])(images).feature_maps
    """

    def __init__(self, config: VecaConfig) -> None:
        super().__init__(config)
        if hasattr(self, "_init_backbone"):  # the first of version 5 do not do it themselves
            self._init_backbone(config)
        architecture = config.to_veca()
        width = architecture.feature_width if config.apply_layernorm else architecture.width
        self.num_features = [width] * (config.depth + 1)
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        cores: int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        keep: float | str | None = None,
    ) -> BackboneOutput | tuple[Any, ...]:
        """Feature maps of `pixel_values` [B, 3, H, W], one for each of `out_features`, in order.

        Blocks after the last of them are not run.
        """
        shown = [self.stage_names.index(name) for name in self.out_features]
        run = self._run(pixel_values, cores, keep, output_hidden_states, output_attentions, shown)
        maps = []
        for stage in shown:
            out = self.veca.output(run.layers[stage], self.config.apply_layernorm)
            whole = self.config.reshape_hidden_states
            joined = None if whole else torch.cat([out.cores, out.patches], dim=1)
            maps.append(out.feature_map().contiguous() if joined is None else joined)
        result = BackboneOutput(
            feature_maps=tuple(maps),
            hidden_states=run.hidden_states,
            attentions=run.attentions,
        )
        return self._returned(result, return_dict)


class VecaForImageClassification(VecaPreTrainedModel):
    """The bare model with a linear layer of `config.num_labels` on its global embedding."""

    _is_plain = False

    def __init__(self, config: VecaConfig) -> None:
        super().__init__(config)
        self.classifier: nn.Module = nn.Identity()
        if config.num_labels:
            self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @property
    def base_model(self) -> VecaModel:
        """The bare model, which shares the weights."""
        bare: VecaModel = VecaModel.from_veca(self.veca, provenance=self.provenance)
        for dial in ("cores", "keep", "agreement"):
            setattr(bare.config, dial, getattr(self.config, dial))
        return bare

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        cores: int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        keep: float | str | None = None,
    ) -> ImageClassifierOutput | tuple[Any, ...]:
        """Logits [B, num_labels]; with `labels` the loss, too.

        `labels` are classes [B], or for `problem_type` "multi_label_classification" and
        "regression" values [B, num_labels].
        """
        run = self._run(pixel_values, cores, keep, output_hidden_states, output_attentions)
        logits = self.classifier(run.out.cls)
        result = ImageClassifierOutput(
            loss=None if labels is None else _loss(logits, labels, self.config),
            logits=logits,
            hidden_states=run.hidden_states,
            attentions=run.attentions,
        )
        return self._returned(result, return_dict)


def _loss(logits: Tensor, labels: Tensor, config: VecaConfig) -> Tensor:
    kind = config.problem_type
    if kind == "regression" or (kind is None and logits.shape[1] == 1):
        return F.mse_loss(logits.float(), labels.float().view_as(logits))
    if kind == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float())
    return F.cross_entropy(logits.float(), labels)
