"""Any function or module of the user's as a teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from veca.teachers.base import UNKNOWN_LICENCE, Grid, Teacher, TeacherError
from veca.weights.tensors import content_hash


class CallableTeacher(Teacher):
    """Wraps `fn`, which takes normalised images [B, 3, H, W] at a multiple of `stride`.

    It may return a pair (cls [B, D], patches [B, h * w, D'] or [B, D', h, w]); a mapping or an
    object with `cls` and `patches`; or the patches alone, whose mean is then the global feature.

    Args:
        fn: a function or an `nn.Module`; a module is frozen, put in eval mode, and moves and
            changes dtype with the teacher.
        width: of the global feature, D.
        stride: pixels per cell of its grid.
        dense_width: of the dense features, D', where it differs from D.
        sizes: the (height, width) in pixels that `fn` can take, if not every multiple of `stride`.
        image_mean, image_std: its normalisation; by default `fn` gets plain pixels in 0..1.
    """

    def __init__(
        self,
        fn: Callable[[Tensor], Any],
        *,
        width: int,
        stride: int,
        name: str = "custom",
        licence: str = UNKNOWN_LICENCE,
        dense_width: int | None = None,
        sizes: Iterable[Grid] | None = None,
        image_mean: Sequence[float] = (0.0, 0.0, 0.0),
        image_std: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        if not callable(fn):
            raise TeacherError(f"CallableTeacher wraps a function, got {type(fn).__name__}.")
        super().__init__(
            name=name,
            width=width,
            stride=stride,
            licence=licence,
            dense_width=dense_width,
            sizes=sizes,
            image_mean=image_mean,
            image_std=image_std,
        )
        self.fn = fn
        self.freeze()

    def _extract(self, images: Tensor) -> tuple[Tensor, Tensor]:
        output = self.fn(images)
        if isinstance(output, Tensor):
            cls, patches = None, output
        elif isinstance(output, Mapping) and {"cls", "patches"} <= set(output):
            cls, patches = output["cls"], output["patches"]
        elif hasattr(output, "cls") and hasattr(output, "patches"):
            cls, patches = output.cls, output.patches
        elif isinstance(output, (tuple, list)) and len(output) == 2:
            cls, patches = output
        else:
            cls = patches = None
        if not isinstance(patches, Tensor) or not isinstance(cls, (Tensor, type(None))):
            raise TeacherError(
                f"the function of teacher {self.name} must return (cls, patches), a mapping or an "
                f"object with both, or the patches alone; got {type(output).__name__}."
            )
        if patches.ndim == 4:
            patches = patches.flatten(2).transpose(1, 2)
        return (patches.float().mean(dim=1) if cls is None else cls), patches

    def _compilable(self) -> list[nn.Module]:
        return [self.fn] if isinstance(self.fn, nn.Module) else []

    def _weights_sha256(self) -> str | None:
        return content_hash(self.fn.state_dict()) if isinstance(self.fn, nn.Module) else None
