"""Teachers from timm, for users who have it (it needs a torchvision that works)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from veca._util.extras import require
from veca.images import IMAGENET_MEAN, IMAGENET_STD
from veca.teachers.base import UNKNOWN_LICENCE, Grid, Teacher, TeacherError, weight_and_bias
from veca.weights.tensors import content_hash


class TimmTeacher(Teacher):
    """A timm model without its classifier.

    The global feature is the CLS token after the last norm where there is one, else what the
    model's own pooling gives. Dense features are the patch tokens after the last norm (before it
    in a ViT that pools by averaging: timm norms after the pooling there), or a CNN's last map.
    """

    def __init__(self, model: nn.Module, *, name: str, licence: str = UNKNOWN_LICENCE) -> None:
        settings = _settings(model)
        width = int(getattr(model, "num_features", 0)) or int(model.embed_dim)  # type: ignore[arg-type]
        super().__init__(
            name=name,
            width=_positive_or(getattr(model, "head_hidden_size", None), width),
            dense_width=width,
            stride=_stride(model, name),
            licence=licence,
            image_mean=settings.get("mean", IMAGENET_MEAN),
            image_std=settings.get("std", IMAGENET_STD),
            sizes=_sizes(model, settings),
        )
        self.model = model
        self._prefix = int(getattr(model, "num_prefix_tokens", 0))
        registers = int(getattr(model, "num_reg_tokens", 0))
        self._has_cls = self._prefix - registers > 0
        if self._has_cls:
            self.width = width
        self._hash = content_hash(model.state_dict())
        self.freeze()

    def _extract(self, images: Tensor) -> tuple[Tensor, Tensor]:
        model: Any = self.model
        output = model.forward_features(images)
        if output.ndim == 4:
            last = getattr(model, "output_fmt", "NCHW") == "NHWC"
            patches = output.flatten(1, 2) if last else output.flatten(2).transpose(1, 2)
        else:
            patches = output[:, self._prefix :]
        cls = output[:, 0] if self._has_cls else model.forward_head(output, pre_logits=True)
        if cls.ndim != 2:  # it took "token" for a kind of pooling that it does not have
            cls = patches.mean(dim=1)
        return cls, patches

    def _patch_convolution(self) -> tuple[Tensor, Tensor] | None:
        convolution = getattr(getattr(self.model, "patch_embed", None), "proj", None)
        square = (self.stride, self.stride)
        if not isinstance(convolution, nn.Conv2d) or convolution.kernel_size != square:
            return None
        return weight_and_bias(convolution)

    def _compilable(self) -> list[nn.Module]:
        blocks = getattr(self.model, "blocks", None)
        if isinstance(blocks, (nn.ModuleList, nn.Sequential)):
            return list(blocks)
        # Its forward is never called, only parts of it; these are its parts.
        return list(self.model.children())

    def _weights_sha256(self) -> str | None:
        return self._hash


def load_timm(name: str, *, pretrained: bool = True) -> TimmTeacher:
    """A timm model by its name, such as "vit_small_patch14_dinov2.lvd142m"."""
    timm = require("timm", "this teacher")
    # DINOv3 and others default to average pooling, which leaves out the last norm; with "token"
    # it is applied. A model without a CLS token refuses that and keeps its own pooling.
    attempts: list[dict[str, Any]] = [
        {"global_pool": "token", "dynamic_img_size": True},
        {"global_pool": "token"},
        {"dynamic_img_size": True},
        {},
    ]
    for index, options in enumerate(attempts):
        try:
            model = timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
            break
        except (TypeError, AssertionError, ValueError) as error:
            if index == len(attempts) - 1:
                raise _cannot(name, error) from error
        except Exception as error:  # unknown names and downloads have errors of their own
            raise _cannot(name, error) from error
    licence = str(_settings(model).get("license") or UNKNOWN_LICENCE)
    return TimmTeacher(model, name=f"timm:{name}", licence=licence)


def _cannot(name: str, error: Exception) -> TeacherError:
    reason = (str(error).splitlines() or [""])[0].strip()
    return TeacherError(
        f"timm cannot make {name!r} with its weights ({type(error).__name__}: {reason}); "
        "timm.list_models(pretrained=True) has the names, and the weights need the network or a "
        "cache."
    )


def _settings(model: nn.Module) -> dict[str, Any]:
    settings = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    return settings if isinstance(settings, dict) else dict(vars(settings))


def _stride(model: nn.Module, name: str) -> int:
    info = getattr(model, "feature_info", None)
    if info:
        return int(info[-1]["reduction"])
    size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if size is None:
        raise TeacherError(
            f"timm's {name} does not say its stride; wrap it in a CallableTeacher, which takes one."
        )
    return int(size[0] if isinstance(size, (tuple, list)) else size)


def _sizes(model: nn.Module, settings: dict[str, Any]) -> list[Grid] | None:
    """The one size a transformer with fixed positions takes; None for models that take any."""
    embeds = [m for m in model.modules() if hasattr(m, "strict_img_size")]
    embed = embeds[0] if embeds else getattr(model, "patch_embed", None)
    if embed is None or getattr(model, "dynamic_img_size", False):
        return None
    if not getattr(embed, "strict_img_size", True):
        return None
    size = getattr(embed, "img_size", None) or (settings.get("input_size") or (0, 0, 0))[1:]
    return [(int(size[0]), int(size[1]))] if size and size[0] else None


def _positive_or(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and value > 0 else otherwise
