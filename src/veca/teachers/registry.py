"""Teachers with a short name: the paper's baselines and their relatives.

Every entry states what it loads and what is expected of it; a checkpoint that turns out
otherwise is refused. Preprocessing comes with the checkpoint itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class KnownTeacher:
    """What a short name stands for."""

    name: str
    family: str
    """The name that tables use."""
    spec: str
    """What `load_teacher` is given instead."""
    width: int
    """Of the global feature."""
    stride: int
    """Patch size in pixels."""
    prefix: int
    """CLS and register tokens, split off before the patches."""
    licence: str
    feature: str = "CLS token after the last norm"
    gated: bool = False
    """Whether the hub asks for the licence to be accepted first."""
    remote_code: bool = False
    """Whether it runs only with code from its own repository (`allow_remote_code=True`)."""

    @property
    def hub_id(self) -> str | None:
        """The repository on the Hugging Face hub, if it comes from there."""
        scheme, _, rest = self.spec.partition(":")
        return rest if scheme in ("transformers", "open_clip") else None


def _entries() -> list[KnownTeacher]:
    entries = []

    def add(*fields: Any, **more: Any) -> None:
        entries.append(KnownTeacher(*fields, **more))

    dinov3 = {"licence": "dinov3-license", "gated": True}
    widths = {"vits16": 384, "vits16plus": 384, "vitb16": 768, "vitl16": 1024, "vith16plus": 1280}
    for size, width in {**widths, "vit7b16": 4096}.items():
        repo = f"transformers:facebook/dinov3-{size}-pretrain-lvd1689m"
        add(f"dinov3-{size}", "DINOv3", repo, width, 16, 5, **dinov3)
    for size, width in {"vitl16": 1024, "vit7b16": 4096}.items():
        repo = f"transformers:facebook/dinov3-{size}-pretrain-sat493m"
        add(f"dinov3-{size}-sat", "DINOv3", repo, width, 16, 5, **dinov3)
    feature = "mean of the last feature map after the last norm"
    for size, width in {"tiny": 768, "small": 768, "base": 1024, "large": 1536}.items():
        repo = f"transformers:facebook/dinov3-convnext-{size}-pretrain-lvd1689m"
        add(f"dinov3-convnext-{size}", "DINOv3", repo, width, 32, 1, **dinov3, feature=feature)

    for short, size, width in (
        ("vits14", "small", 384),
        ("vitb14", "base", 768),
        ("vitl14", "large", 1024),
        ("vitg14", "giant", 1536),
    ):
        repo = f"transformers:facebook/dinov2-{size}"
        add(f"dinov2-{short}", "DINOv2", repo, width, 14, 1, "Apache-2.0")
        repo = f"transformers:facebook/dinov2-with-registers-{size}"
        add(f"dinov2-reg-{short}", "DINOv2-reg", repo, width, 14, 5, "Apache-2.0")

    clip = "CLS token after the last norm, before the projection"
    for family, short, spec, width, stride, licence in (
        ("CLIP", "vitb32", "transformers:openai/clip-vit-base-patch32", 768, 32, "MIT"),
        ("CLIP", "vitb16", "transformers:openai/clip-vit-base-patch16", 768, 16, "MIT"),
        ("CLIP", "vitl14", "transformers:openai/clip-vit-large-patch14", 1024, 14, "MIT"),
        ("OpenCLIP", "vitb16", "open_clip:laion/CLIP-ViT-B-16-laion2B-s34B-b88K", 768, 16, "MIT"),
        ("OpenCLIP", "vitl14", "open_clip:laion/CLIP-ViT-L-14-laion2B-s32B-b82K", 1024, 14, "MIT"),
        ("OpenCLIP", "vith14", "open_clip:laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 1280, 14, "MIT"),
        ("DFN-CLIP", "vitb16", "open_clip:apple/DFN2B-CLIP-ViT-B-16", 768, 16, "apple-amlr"),
        ("DFN-CLIP", "vitl14", "open_clip:apple/DFN2B-CLIP-ViT-L-14", 1024, 14, "apple-amlr"),
        ("DFN-CLIP", "vith14", "open_clip:apple/DFN5B-CLIP-ViT-H-14", 1280, 14, "apple-amlr"),
    ):
        name = f"{family.lower()}-{short}"
        add(name, family, spec, width, stride, 1, licence, feature=clip)

    head = "output of the attention-pooling head"
    # At 512 pixels, where dense tasks are probed, the 512 checkpoint's positions fit as they are.
    for short, repo, width, stride in (
        ("base-16", "siglip2-base-patch16-512", 768, 16),
        ("base-16-224", "siglip2-base-patch16-224", 768, 16),
        ("base-16-256", "siglip2-base-patch16-256", 768, 16),
        ("base-16-384", "siglip2-base-patch16-384", 768, 16),
        ("base-16-naflex", "siglip2-base-patch16-naflex", 768, 16),
        ("large-16", "siglip2-large-patch16-512", 1024, 16),
        ("so400m-14", "siglip2-so400m-patch14-384", 1152, 14),
        ("so400m-16", "siglip2-so400m-patch16-512", 1152, 16),
    ):
        spec = f"transformers:google/{repo}"
        add(f"siglip2-{short}", "SigLIP 2", spec, width, stride, 0, "Apache-2.0", feature=head)

    feature = "three summary tokens side by side"
    licence = "nvidia-source-code-license (non-commercial)"
    for size, width in {"B": 768, "L": 1024, "H": 1280}.items():
        name, spec = f"radio-v2.5-{size.lower()}", f"transformers:nvidia/RADIO-{size}"
        more = {"feature": feature, "remote_code": True}
        add(name, "AM-RADIOv2.5", spec, 3 * width, 16, 0, licence, **more)

    feature = "mean of the last feature map"
    for index in range(5):
        name = f"efficientnet-lite{index}"
        add(name, "EfficientNet-Lite", name, 1280, 32, 0, "Apache-2.0", feature=feature)
    return entries


KNOWN: dict[str, KnownTeacher] = {entry.name: entry for entry in _entries()}

PAPER_BASELINES = (
    "clip-vitb16",
    "openclip-vitb16",
    "dfn-clip-vitb16",
    "siglip2-base-16",
    "radio-v2.5-b",
    "dinov2-vitb14",
    "dinov2-reg-vitb14",
    "dinov3-vitb16",
)
"""The eight that the paper compares with, at its base size."""


def list_teachers() -> list[str]:
    """The short names that `load_teacher` knows; `KNOWN[name]` says what each is."""
    return sorted(KNOWN)
