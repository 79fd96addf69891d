"""VECA in timm, for users who have it: `timm.create_model("veca_small_patch16", cores=32)`.

Importing this registers the names where timm imports (it needs a torchvision that works).
`TimmVeca` itself needs only torch and can be used without timm.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from veca._util.extras import require
from veca.checks import asked_keep, check_agreement, check_blocks, check_budget, is_auto
from veca.config import DEFAULT_SIZE, PRESETS, VecaConfig
from veca.errors import InputError, MissingExtraError, check_choice
from veca.model import LayerState, Veca
from veca.weights import load, names, read_config

__all__ = ["TimmVeca", "register"]

POOLS = ("token", "avg", "max", "")
"""The first core, the mean or the maximum of the patches, or no pooling."""
FORMATS = ("NCHW", "NLC")

_STEM = "patch_embed.weight"
_BUDGET = "veca_cores"  # on tokens of `forward_features`: how many of them are cores

default_cfgs: dict[str, Any] = {}  # filled by `register`; timm looks for it under this name


class _Walk(NamedTuple):
    last: LayerState
    """After the last block that was run."""
    kept: list[LayerState]
    budget: int


class TimmVeca(nn.Module):
    """A VECA network with the interface of timm's vision transformers.

    The plain model is `.veca`; its C active cores are timm's prefix tokens, the first of them the
    class token.

    Args:
        config: the architecture.
        num_classes: of the classifier; 0 for none.
        global_pool: what the classifier sees: "token" (the first core), "avg" or "max" of the
            patches, "" for all tokens.
        cores: the budget when a call names none; None means all. Can be set later, too.
        keep: the share of patch tokens that go on after merging when a call names none, 0.2..1;
            None means all; "auto" chooses for each image, as `Veca.forward` does. Can be set later,
            too.
        agreement: what "auto" promises.
        drop_rate: dropout before the classifier.
    """

    _model_args: dict[str, Any]  # timm's: what it takes to build the model again, besides its name

    def __init__(
        self,
        config: VecaConfig,
        *,
        num_classes: int = 1000,
        global_pool: str = "token",
        cores: int | None = None,
        keep: float | str | None = None,
        agreement: float | None = None,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_budget(cores, config.num_cores)
        asked_keep(keep)
        check_agreement(agreement, cores, keep)
        self.veca = Veca(config)
        self.cores, self.keep, self.agreement = cores, keep, agreement
        self.num_features = self.head_hidden_size = self.embed_dim = config.feature_width
        self.feature_info = [
            {"module": f"veca.blocks.{i}", "num_chs": config.width, "reduction": config.patch_size}
            for i in range(config.depth)
        ]
        self.head_drop = nn.Dropout(drop_rate)
        self.head: nn.Module = nn.Identity()
        self.global_pool = "token"
        self.reset_classifier(num_classes, global_pool)
        self.pretrained_cfg = self.default_cfg = pretrained_cfg(config)

    @property
    def in_chans(self) -> int:
        """Channels of the images."""
        return self.veca.config.in_channels

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: the budget."""
        return check_budget(self.cores, self.veca.config.num_cores)

    # -------------------------------------------------------------------------------- classifier

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh classifier for `num_classes` classes, or none for 0."""
        if global_pool is not None:
            check_choice("pooling", global_pool, POOLS)
            self.global_pool = global_pool
        self.num_classes = num_classes
        like = self.veca.patch_embed.weight
        self.head = nn.Identity()
        if num_classes > 0:
            self.head = nn.Linear(self.num_features, num_classes).to(like.device, like.dtype)
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)
        self.head.train(self.training)

    # ----------------------------------------------------------------------------------- forward

    def forward(
        self, x: Tensor, cores: int | None = None, keep: float | str | None = None
    ) -> Tensor:
        """Logits of images [B, 3, H, W]; pooled features without a classifier."""
        budget = self._budget(cores)
        return self.forward_head(self.forward_features(x, budget, keep), cores=budget)

    def forward_features(
        self, x: Tensor, cores: int | None = None, keep: float | str | None = None
    ) -> Tensor:
        """[B, C + N, D] cores, then patches row by row, after the final norm."""
        walk = self._walk(x, cores, keep)
        tokens = self._tokens(walk.last, norm=True)
        if not torch.compiler.is_compiling():
            setattr(tokens, _BUDGET, walk.budget)
        return tokens

    def forward_head(self, x: Tensor, pre_logits: bool = False, cores: int | None = None) -> Tensor:
        """From the tokens of `forward_features` to logits, or to what the classifier sees.

        Args:
            cores: how many of the tokens are cores; by default what `forward_features` noted on
                them. Tokens that were computed with since have lost the note: where it is not the
                model's own budget, it has to be said.
        """
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool:
            patches = x[:, self._budget_of(x, cores) :]
            x = patches.mean(dim=1) if self.global_pool == "avg" else patches.amax(dim=1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        cores: int | None = None,
        keep: float | str | None = None,
    ) -> Any:
        """The tokens after some blocks, and the final ones, in the shapes timm gives them.

        Args:
            indices: blocks from 0, negative ones from the end; a number n means the last n, None
                all.
            return_prefix_tokens: (patches, cores) of each instead of the patches alone.
            norm: apply the final norm and output projection to each.
            stop_early: do not run blocks after the last that is asked for.
            output_fmt: "NCHW" for maps, "NLC" for tokens.

        Returns:
            (final tokens, intermediates); the intermediates alone, or a dict, on request.
        """
        check_choice("output format", output_fmt, FORMATS)
        wanted = check_blocks(indices, len(self.veca.blocks))
        last = wanted[-1]
        early = stop_early and (intermediates_only or last == len(self.veca.blocks) - 1)
        walk = self._walk(x, cores, keep, wanted, last + 1 if early else None)
        kept = [self._tokens(layer, norm) for layer in walk.kept]
        prefix = [tokens[:, : walk.budget] for tokens in kept]
        patches = [tokens[:, walk.budget :] for tokens in kept]
        if output_fmt == "NCHW":
            grid = walk.last.grid
            patches = [p.transpose(1, 2).unflatten(2, grid).contiguous() for p in patches]
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": patches}
            if return_prefix_tokens:
                result["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                result["image_features"] = self._tokens(walk.last, norm=True)
            return result
        shown: list[Any] = patches
        if return_prefix_tokens:
            shown = list(zip(patches, prefix, strict=True))
        return shown if intermediates_only else (self._tokens(walk.last, norm=True), shown)

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop the blocks after the last of `indices`, and what only the final output needs."""
        wanted = check_blocks(indices, len(self.veca.blocks))
        last = wanted[-1]
        self.veca.blocks = self.veca.blocks[: last + 1]
        self.veca.moves = self.veca.moves[:last]
        if prune_norm:
            self.veca.norm = nn.Identity()  # type: ignore[assignment]
            self.veca.project = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return wanted

    # --------------------------------------------------------------------------------- training

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.veca.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay should leave alone."""
        moves = {f"veca.moves.{i}.alpha" for i in range(len(self.veca.moves))}
        return {"veca.bank.tokens", "veca.bank.coordinates", *moves}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that sort parameters into layers, for learning rates that differ by layer."""
        return {
            "stem": r"^veca\.(?:patch_embed|bank)",
            "blocks": [
                (r"^veca\.(?:blocks|moves)\.(\d+)", None),
                (r"^veca\.(?:norm|project)", (99999,)),
            ],
        }

    # ------------------------------------------------------------------------------------ inside

    def _budget(self, cores: int | None) -> int:
        return check_budget(self.cores if cores is None else cores, self.veca.config.num_cores)

    def _budget_of(self, tokens: Tensor, cores: int | None) -> int:
        noted = getattr(tokens, _BUDGET, None)
        budget = self._budget(noted if cores is None else cores)
        if noted not in (None, budget):
            raise InputError(
                f"these tokens were computed with {noted} cores, got cores={cores}; leave it out."
            )
        if tokens.shape[1] <= budget:
            raise InputError(
                f"{tokens.shape[1]} tokens cannot be {budget} cores and some patches; pass "
                "forward_head the cores that forward_features was called with."
            )
        return budget

    def _tokens(self, layer: LayerState, norm: bool) -> Tensor:
        """[B, C + N, D] cores and patches after a layer, through the final norm or raw."""
        if layer.periphery.token_of is None:  # as they are, without a copy
            return self.veca.project(self.veca.norm(layer.tokens)) if norm else layer.tokens
        out = self.veca.output(layer, norm)
        return torch.cat([out.cores, out.patches], dim=1)

    def _walk(
        self,
        x: Tensor,
        cores: int | None,
        keep: float | str | None,
        wanted: Sequence[int] = (),
        last: int | None = None,
    ) -> _Walk:
        budget = self._budget(cores)
        kept: list[LayerState] = []
        share = self.keep if keep is None else keep
        promise = self.agreement if is_auto(share) else None
        for layer in self.veca.walk(x, budget, last=last, keep=share, agreement=promise):
            if layer.number - 1 in wanted and not layer.merging:
                kept.append(layer)
        return _Walk(layer, kept, budget)


def pretrained_cfg(config: VecaConfig) -> dict[str, Any]:
    """What timm's data pipeline wants to know."""
    side = DEFAULT_SIZE // config.patch_size * config.patch_size
    return {
        "input_size": (config.in_channels, side, side),
        "fixed_input_size": False,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "mean": config.image_mean,
        "std": config.image_std,
        "num_classes": 0,
        "pool_size": None,
        "first_conv": "veca.patch_embed",
        "classifier": "head",
    }


def register() -> None:
    """Make timm know the presets' names. Done on import where timm imports.

    >>> timm.create_model("veca_tiny_patch16", num_classes=10, cores=16)
    >>> timm.create_model("veca_tiny_patch16", pretrained=True)     # weights that veca.load finds
    >>> timm.create_model("veca_tiny_patch16", features_only=True, out_indices=(2, 5, 8, 11))
    """
    require_timm()
    registry = importlib.import_module("timm.models")
    generate = importlib.import_module("timm.models._registry").generate_default_cfgs
    default_cfgs.update(generate({n: _registered(n, c) for n, c in PRESETS.items()}))
    module = sys.modules[__name__]
    for name in PRESETS:
        if not registry.is_model(name):
            entry = _entry_point(name)
            setattr(module, name, entry)
            registry.register_model(entry)


def _registered(name: str, config: VecaConfig) -> dict[str, Any]:
    """What timm lists: as pretrained, where there are weights of that name on this machine."""
    fields = pretrained_cfg(config)
    return {**fields, "file": name} if names.find(name) else fields


def require_timm() -> Any:
    """The timm library, or an error that says what is in its way."""
    return require("timm", "veca.integrations.timm")


def _entry_point(name: str) -> Callable[..., nn.Module]:
    """The function that timm calls for a name; it takes what timm passes to any model."""

    def build(
        *,
        source: str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | None = None,
        in_chans: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> TimmVeca:
        for ignored in ("img_size", "dynamic_img_size"):  # every size works
            options.pop(ignored, None)
        dropout = options.pop("proj_drop_rate", None)
        stored = PRESETS[name] if config is None else VecaConfig.from_dict(config)
        if source is not None:
            stored = read_config(source)
        changes = {"in_channels": in_chans, "dropout": dropout}
        changes = {k: v for k, v in changes.items() if v is not None and v != getattr(stored, k)}
        if "in_channels" in changes and source is not None and stored.in_channels != 3:
            raise InputError(
                f"the weights {os.fspath(source)!r} are for {stored.in_channels} channels, got "
                f"in_chans={in_chans}; leave pretrained out for another number."
            )
        with contextlib.nullcontext() if device is None else torch.device(device):
            model = TimmVeca(stored.replace(**changes), **options).to(dtype=dtype)
        if source is not None:
            stored_model = load(source)
            weights = stored_model.state_dict()
            if "in_channels" in changes:  # colours summed up for grey, repeated for more, as ever
                adapt = importlib.import_module("timm.models").adapt_input_conv
                weights[_STEM] = adapt(in_chans, weights[_STEM])
            model.veca.load_state_dict(weights)
            model.veca.take_origin(stored_model)
        if model.veca.config != PRESETS[name]:
            # For save_for_hf, which stores it; it comes back as `config` when that is loaded.
            model._model_args = {"config": model.veca.config.to_dict()}
        return model

    def entry(pretrained: bool = False, **options: Any) -> nn.Module:
        overlay = options.get("pretrained_cfg_overlay") or {}
        held = _held(name, options.get("pretrained_cfg"))
        source = overlay.get("file") or held.get("file") or name
        # A folder that timm wrote, which timm reads. Never otherwise: it knows neither our folders
        # nor the stored configuration.
        theirs = not overlay.get("file") and held.get("source") in ("local-dir", "hf-hub")
        if pretrained and not theirs:
            options["source"] = source
            stored = pretrained_cfg(_checked_config(name, source))
            seen = {field: stored[field] for field in ("input_size", "mean", "std")}
            options["pretrained_cfg_overlay"] = {**seen, **overlay}
        if options.get("features_only"):
            options.setdefault("out_indices", 4)
        builder = importlib.import_module("timm.models").build_model_with_cfg
        loads = pretrained and theirs
        return builder(build, name, loads, feature_cfg={"feature_cls": "getter"}, **options)

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"{name}; options as `TimmVeca`, and those timm has for every model."
    return entry


def _held(name: str, given: Any) -> dict[str, Any]:
    """The fields of a `pretrained_cfg` as timm passes it: nothing, a dict, an object or a tag."""
    if isinstance(given, str):
        raise InputError(
            f"{name} has no weights tagged {given!r}; leave the tag out for those that veca.load "
            "finds, or name a folder with pretrained_cfg_overlay={'file': ...}."
        )
    return given if isinstance(given, dict) else vars(given) if given is not None else {}


def _checked_config(name: str, source: str | os.PathLike[str]) -> VecaConfig:
    """The configuration of weights; those of another network than the name says are refused."""
    config, expected = read_config(source), PRESETS[name]
    for field in ("depth", "width", "heads", "ffn_ratio", "num_cores", "patch_size"):
        if getattr(config, field) != getattr(expected, field):
            raise InputError(
                f"the weights {os.fspath(source)!r} have {field} {getattr(config, field)}, but "
                f"{name} has {getattr(expected, field)}; create the model that fits them."
            )
    return config


with contextlib.suppress(MissingExtraError):
    register()
