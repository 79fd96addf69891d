"""Teachers from `transformers`: by hub id or from a folder that `save_pretrained` wrote.

One class for each token layout. What counts as "the" feature is decided here, once:

- global feature: the CLS token after the last norm; for SigLIP, which has none, the output of its
  attention-pooling head; for RADIO, its summary tokens side by side.
- dense features: the patch tokens after the last norm. CLIP norms only the CLS token itself; its
  patch tokens get the same norm here, so that both live in one space.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from veca._util.broken_torchvision import hide_broken_torchvision
from veca._util.extras import find_installation, require
from veca.errors import check_choice
from veca.images import IMAGENET_MEAN, IMAGENET_STD
from veca.teachers.base import UNKNOWN_LICENCE, Teacher, TeacherError, weight_and_bias
from veca.teachers.folder import (
    CONFIG,
    OPEN_CLIP_CONFIG,
    TRANSFORMERS_WEIGHTS,
    ModelFolder,
    hash_files,
)

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)

FEATURES = ("cls", "mean", "projected")
"""The global feature: the model's own, the mean of its dense features, or CLIP's joint space."""


class TransformersTeacher(Teacher):
    """A model of `transformers`, its prefix tokens split off."""

    architecture: ClassVar[str]
    """The class in `transformers`."""
    mean: ClassVar[tuple[float, float, float]] = IMAGENET_MEAN
    std: ClassVar[tuple[float, float, float]] = IMAGENET_STD
    """Used when the folder does not state its own."""
    projects: ClassVar[bool] = False
    """Whether it has a "projected" feature."""

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        feature: str = "cls",
        licence: str = UNKNOWN_LICENCE,
        normalisation: tuple[Any, Any] | None = None,
        files: list[Path] | None = None,
        revision: str | None = None,
        source: str | None = None,
    ) -> None:
        check_choice("global feature", feature, FEATURES, TeacherError)
        mean, std = normalisation or (self.mean, self.std)
        if feature == "projected" and not self.projects:
            raise TeacherError(
                "feature='projected' is CLIP's joint space of images and texts, which a "
                f"{self.architecture} has not; use 'cls' or 'mean'."
            )
        width, dense_width = self._widths(model, feature)
        super().__init__(
            name=name,
            width=dense_width if feature == "mean" else width,
            dense_width=dense_width,
            stride=self._stride(model),
            licence=licence,
            image_mean=mean,
            image_std=std,
            source=source,
        )
        self.feature = feature
        self.model = model
        self.revision = revision
        self._files = files or []
        self._hash: str | None = None
        self.freeze()

    # ------------------------------------------------------------- what differs between families

    def _tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The global feature and the patch tokens."""
        states = self.model(images).last_hidden_state
        return states[:, 0], states[:, self._prefix :]

    @property
    def _prefix(self) -> int:
        """CLS and register tokens before the first patch."""
        return 1 + int(getattr(self._config(self.model), "num_register_tokens", 0) or 0)

    @classmethod
    def _widths(cls, model: nn.Module, feature: str) -> tuple[int, int]:
        """Of the global feature and of the dense ones."""
        width = int(cls._config(model).hidden_size)
        return width, width

    @classmethod
    def _stride(cls, model: nn.Module) -> int:
        size = cls._config(model).patch_size
        return int(size[0] if isinstance(size, (tuple, list)) else size)

    @classmethod
    def load_model(cls, folder: ModelFolder, feature: str) -> nn.Module:
        return load_pretrained(cls.architecture, folder)

    # ------------------------------------------------------------------------------ the same

    @property
    def _tower(self) -> Any:
        # With a projection, and in older versions without one too, the tower lies inside.
        return getattr(self.model, "vision_model", self.model)

    @staticmethod
    def _config(model: nn.Module) -> Any:
        return model.config

    def _extract(self, images: Tensor) -> tuple[Tensor, Tensor]:
        cls, patches = self._tokens(images)
        if self.feature == "mean":
            cls = patches.float().mean(dim=1)
        return cls, patches

    def _patch_convolution(self) -> tuple[Tensor, Tensor] | None:
        for module in self.model.modules():
            if isinstance(module, nn.Conv2d) and module.in_channels == 3:
                if module.kernel_size != (self.stride,) * 2 or module.stride != (self.stride,) * 2:
                    return None
                return weight_and_bias(module)
        return None

    def _compilable(self) -> list[nn.Module]:
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        return max((list(blocks) for blocks in lists), key=len, default=[])

    def _weights_sha256(self) -> str | None:
        if self._hash is None and self._files:
            with contextlib.suppress(OSError):  # the cache may have been cleaned meanwhile
                self._hash = hash_files(self._files)
        return self._hash

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "architecture": self.architecture,
            "feature": self.feature,
            "revision": self.revision,
        }


class Dinov3Teacher(TransformersTeacher):
    """[CLS, registers, patches]; rotary positions, so any grid as it is."""

    architecture = "DINOv3ViTModel"


class Dinov3ConvNextTeacher(TransformersTeacher):
    """[mean of the map, map], both after one norm; stride 32."""

    architecture = "DINOv3ConvNextModel"

    @classmethod
    def _widths(cls, model: nn.Module, feature: str) -> tuple[int, int]:
        width = int(cls._config(model).hidden_sizes[-1])
        return width, width

    @classmethod
    def _stride(cls, model: nn.Module) -> int:
        return 32

    def _compilable(self) -> list[nn.Module]:
        return [self.model]


class Dinov2Teacher(TransformersTeacher):
    """[CLS, patches]; learned positions, which the model interpolates to any grid."""

    architecture = "Dinov2Model"


class Dinov2RegistersTeacher(TransformersTeacher):
    """[CLS, registers, patches]."""

    architecture = "Dinov2WithRegistersModel"


class VitTeacher(TransformersTeacher):
    """A plain ViT: [CLS, patches]."""

    architecture = "ViTModel"
    mean = HALF
    std = HALF

    @classmethod
    def load_model(cls, folder: ModelFolder, feature: str) -> nn.Module:
        return load_pretrained(cls.architecture, folder, add_pooling_layer=False)

    def _tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        states = self.model(images, interpolate_pos_encoding=True).last_hidden_state
        return states[:, 0], states[:, 1:]


class ClipTeacher(TransformersTeacher):
    """CLIP's image tower: [CLS, patches], both through `post_layernorm`.

    That is the feature CLIP's authors probe; "projected" is the one they compare with texts.
    """

    architecture = "CLIPVisionModel"
    mean = CLIP_MEAN
    std = CLIP_STD
    projects = True

    @classmethod
    def load_model(cls, folder: ModelFolder, feature: str) -> nn.Module:
        return load_pretrained(cls.class_for(feature), folder)

    @classmethod
    def class_for(cls, feature: str) -> str:
        return "CLIPVisionModelWithProjection" if feature == "projected" else cls.architecture

    @classmethod
    def _widths(cls, model: nn.Module, feature: str) -> tuple[int, int]:
        config = cls._config(model)
        width = config.projection_dim if feature == "projected" else config.hidden_size
        return int(width), int(config.hidden_size)

    def _tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(images, interpolate_pos_encoding=True)
        tokens = self._tower.post_layernorm(output.last_hidden_state)
        cls = output.image_embeds if self.feature == "projected" else tokens[:, 0]
        return cls, tokens[:, 1:]


class SiglipTeacher(TransformersTeacher):
    """SigLIP and SigLIP 2 of one image size: patches only; the global feature is the head's."""

    architecture = "SiglipVisionModel"
    mean = HALF
    std = HALF

    def _tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(images, interpolate_pos_encoding=True)
        return self._pooled(output), output.last_hidden_state

    @staticmethod
    def _pooled(output: Any) -> Tensor:
        pooled = output.pooler_output  # None if the tower was saved without its head
        return output.last_hidden_state.mean(dim=1) if pooled is None else pooled


class SiglipNaflexTeacher(SiglipTeacher):
    """SigLIP 2 NaFlex, which takes patches instead of images, of any grid."""

    architecture = "Siglip2VisionModel"

    def _tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        p = self.stride
        batch, _, height, width = images.shape
        # [B, 3, h, p, w, p] -> [B, h, w, p, p, 3]: a patch is laid out pixel by pixel.
        patches = images.unflatten(2, (-1, p)).unflatten(4, (-1, p)).permute(0, 2, 4, 3, 5, 1)
        patches = patches.flatten(3).flatten(1, 2)
        shapes = torch.tensor([[height // p, width // p]] * batch, device=images.device)
        mask = torch.ones(patches.shape[:2], dtype=torch.long, device=images.device)
        output = self.model(patches, pixel_attention_mask=mask, spatial_shapes=shapes)
        return self._pooled(output), output.last_hidden_state

    def _patch_convolution(self) -> tuple[Tensor, Tensor] | None:
        linear = self._tower.embeddings.patch_embedding
        weight = linear.weight.unflatten(1, (self.stride, self.stride, 3)).permute(0, 3, 1, 2)
        return weight, linear.bias


class RadioTeacher(TransformersTeacher):
    """RADIO: [summary tokens, registers, patches]; the global feature is wider than the dense."""

    architecture = "RadioModel"
    mean = CLIP_MEAN
    std = CLIP_STD

    def __init__(self, model: nn.Module, **options: Any) -> None:
        # The model would normalise by itself; taken out, so that it is done once and reported.
        config = self._config(model)
        cast(Any, model).make_preprocessor_external()
        options["normalisation"] = (config.norm_mean, config.norm_std)
        super().__init__(model, **options)

    @classmethod
    def _widths(cls, model: nn.Module, feature: str) -> tuple[int, int]:
        config = cls._config(model)
        return int(config.hidden_size) * len(config.summary_idxs), int(config.hidden_size)

    def _tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(images)
        return output.summary, output.features

    def _patch_convolution(self) -> tuple[Tensor, Tensor] | None:
        weight = cast(Any, self.model).embeddings.patch_projection.weight
        weight = weight.unflatten(1, (3, self.stride, self.stride))
        return weight, weight.new_zeros(len(weight))


class RemoteRadioTeacher(TransformersTeacher):
    """RADIO run by the code in its own repository, for a user who allowed that.

    Takes what such models give: a pair (summary [B, S], features [B, N, D]).
    """

    architecture = "RADIOModel"
    mean = CLIP_MEAN
    std = CLIP_STD

    def __init__(self, model: nn.Module, **options: Any) -> None:
        conditioner = None
        if hasattr(model, "make_preprocessor_external"):
            conditioner = cast(Any, model).make_preprocessor_external()
        # Without that the model normalises by itself and wants plain pixels.
        options["normalisation"] = ((0.0,) * 3, (1.0,) * 3)
        if conditioner is not None:
            names = ("norm_mean", "norm_std")
            options["normalisation"] = tuple(
                getattr(conditioner, name).detach().flatten().tolist() for name in names
            )
        super().__init__(model, **options)

    @classmethod
    def _widths(cls, model: nn.Module, feature: str) -> tuple[int, int]:
        # No field of the config states them, so it is tried out.
        size = 4 * cls._stride(model)
        with torch.no_grad():
            summary, features = cls._pair(model.eval()(torch.zeros(1, 3, size, size)))
        return summary.shape[-1], features.shape[-1]

    @staticmethod
    def _pair(output: Any) -> tuple[Tensor, Tensor]:
        try:
            summary, features = output
            if summary.ndim == 2 and features.ndim == 3:
                return summary, features
        except (TypeError, ValueError, AttributeError):
            pass
        raise TeacherError(
            "the repository's own code does not give a pair (summary [B, S], features [B, N, D]) "
            "as RADIO does; wrap it in a CallableTeacher instead."
        )

    def _tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self._pair(self.model(images))

    def _patch_convolution(self) -> tuple[Tensor, Tensor] | None:
        return None


FAMILIES: dict[str, type[TransformersTeacher]] = {
    "dinov3_vit": Dinov3Teacher,
    "dinov3_convnext": Dinov3ConvNextTeacher,
    "dinov2": Dinov2Teacher,
    "dinov2_with_registers": Dinov2RegistersTeacher,
    "vit": VitTeacher,
    "clip": ClipTeacher,
    "clip_vision_model": ClipTeacher,
    "siglip": SiglipTeacher,
    "siglip_vision_model": SiglipTeacher,
    "siglip2": SiglipNaflexTeacher,
    "siglip2_vision_model": SiglipNaflexTeacher,
    "radio": RadioTeacher,
}
"""`model_type` in config.json -> teacher."""


def load_transformers(
    folder: ModelFolder,
    *,
    name: str,
    source: str,
    feature: str = "cls",
    licence: str | None = None,
    allow_remote_code: bool = False,
) -> TransformersTeacher:
    """The teacher in a folder of `transformers`'s layout."""
    config = folder.read_json(CONFIG)
    if config is None:
        hint = "; open it as open_clip:..." if folder.has(OPEN_CLIP_CONFIG) else ""
        raise TeacherError(
            f"{folder.label} holds no {CONFIG}, so it is not a model of transformers{hint}."
        )
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None and "AutoModel" in (config.get("auto_map") or {}):
        return _load_remote(
            folder,
            config,
            allow=allow_remote_code,
            name=name,
            source=source,
            feature=feature,
            licence=licence or folder.licence(),
        )
    if family is None:
        raise TeacherError(
            f"{folder.label} is a model of type {kind!r}, which is not among the supported ones: "
            f"{', '.join(FAMILIES)}; wrap it in a CallableTeacher."
        )
    check_choice("global feature", feature, FEATURES, TeacherError)
    require_transformers()
    files = folder.weights(TRANSFORMERS_WEIGHTS)
    model = family.load_model(folder, feature)
    return family(
        model,
        name=name,
        source=source,
        feature=feature,
        licence=licence or folder.licence(),
        normalisation=folder.normalisation(),
        files=files,
        revision=folder.revision,
    )


def _load_remote(
    folder: ModelFolder, config: dict[str, Any], *, allow: bool, **options: Any
) -> TransformersTeacher:
    if not allow:
        raise TeacherError(
            f"{folder.label} comes with Python code of its own (auto_map in its {CONFIG}), which "
            "is never run unasked; if you have read it and trust it, pass allow_remote_code=True."
        )
    transformers = require_transformers()
    files = folder.weights(TRANSFORMERS_WEIGHTS)
    folder.fetch_code()
    with quiet_transformers():
        try:
            model = transformers.AutoModel.from_pretrained(
                str(folder.path), trust_remote_code=True, local_files_only=True
            )
        except Exception as error:
            raise TeacherError(
                f"{folder.label}: its own code failed ({type(error).__name__}: {_first(error)}); "
                "see what it needs (RADIO needs timm and einops)."
            ) from error
    return RemoteRadioTeacher(model.float(), files=files, revision=folder.revision, **options)


def load_pretrained(
    architecture: str,
    folder: ModelFolder,
    *,
    state: dict[str, Tensor] | None = None,
    **options: Any,
) -> nn.Module:
    """A model of `transformers` with every weight from the folder (or from `state`), float32.

    Weights that are not there would be drawn at random: that is refused.
    """
    model_class = find_class(architecture)
    with quiet_transformers():
        try:
            model, info = model_class.from_pretrained(
                str(folder.path) if state is None else None,
                state_dict=state,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
        except Exception as error:
            raise TeacherError(
                f"{folder.label} cannot be loaded as a {architecture} ({type(error).__name__}: "
                f"{_first(error)}); check that config and weights belong together."
            ) from error
    missing = sorted(str(name) for name in info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise TeacherError(
            f"{folder.label} lacks weights of a {architecture}: {missing[0]}{more}; config and "
            "weights do not belong together."
        )
    return cast(nn.Module, model)


def find_class(architecture: str) -> Any:
    transformers = require_transformers()
    try:
        return getattr(transformers, architecture)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise TeacherError(
            f"this transformers ({transformers.__version__}) gives no {architecture} "
            f"({_first(error)}); "
            f"upgrade it with: {find_installation().installer} --upgrade transformers"
        ) from error


def require_transformers() -> Any:
    """The package, or an error that names the extra."""
    library = require("transformers", "this teacher")
    hide_broken_torchvision()
    return library


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no reports of unused weights (a CLIP file holds a text tower too)."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].strip()
