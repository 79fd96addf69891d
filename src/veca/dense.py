"""The yardstick: the same network with full attention, a dense ViT in the manner of DINOv3.

Same blocks, widths and rotation as `Veca`; one CLS and four register tokens instead of cores,
nothing moves, and everybody sees everybody. Full attention is core attention in which every
token is a core, so the blocks are shared and the comparison is fair by construction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from veca import rope
from veca.checks import check_blocks, check_finite, check_images
from veca.config import EXTRA_TOKENS, VecaConfig
from veca.feature_model import FeatureModel
from veca.model import Block, initialize
from veca.outputs import LayerTokens, as_dino, one_line, part
from veca.rope import Rotation


class DenseOutput(NamedTuple):
    cls: Tensor
    """[B, D'] the global embedding."""
    patches: Tensor
    """[B, N, D'] dense features."""
    grid: tuple[int, int]

    def feature_map(self) -> Tensor:
        """[B, D', h, w] the dense features as an image."""
        return self.patches.transpose(1, 2).unflatten(2, self.grid)

    def keys(self) -> tuple[str, ...]:
        """Names that `out[name]` takes, which gives what `out.name` does; `dict(out)` has them."""
        return ("cls", "patches", "grid", "feature_map")

    def __getitem__(self, key: Any) -> Any:
        return part(self, key) if isinstance(key, str) else tuple.__getitem__(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self.keys() if isinstance(key, str) else tuple.__contains__(self, key)

    def __repr__(self) -> str:
        return one_line(self, ("cls", "patches"))


class DenseVit(FeatureModel, nn.Module):
    """A dense vision transformer of the size that `config` gives a `Veca`."""

    _has_cores = False

    def __init__(self, config: VecaConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        self.patch_embed = nn.Conv2d(c.in_channels, c.width, c.patch_size, stride=c.patch_size)
        self.extra = nn.Parameter(torch.empty(EXTRA_TOKENS, c.width))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width, eps=c.norm_eps)
        same = c.feature_width == c.width
        self.project: nn.Module = nn.Identity() if same else nn.Linear(c.width, c.feature_width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialize(self)
        nn.init.normal_(self.extra, std=self.config.width**-0.5)

    @property
    def device(self) -> torch.device:
        return self.patch_embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embed.weight.dtype

    def forward(self, images: Tensor) -> DenseOutput:
        """Features of `images` [B, 3, H, W] (float, normalised), H and W on the patch grid."""
        x, grid = self._encode(images)
        x = self.project(x)
        return DenseOutput(x[:, 0], x[:, EXTRA_TOKENS:], grid)

    def tokens(self, images: Tensor) -> DenseOutput:
        """The same before the projection: as wide as the network."""
        x, grid = self._encode(images)
        return DenseOutput(x[:, 0], x[:, EXTRA_TOKENS:], grid)

    def forward_features(self, images: Tensor) -> Tensor:
        """[B, 5 + N, D'] all tokens: CLS, four registers, then the patches."""
        features: Tensor = self.project(self._encode(images)[0])
        return features

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_class_token: bool = False,
        return_extra_tokens: bool = False,
        norm: bool = True,
        *,
        projection: bool = True,
    ) -> tuple[Any, ...]:
        """Patch features after some blocks, as `Veca.get_intermediate_layers`.

        Args:
            return_extra_tokens: the registers, [B, 4, D'].
        """
        blocks = check_blocks(n, self.config.depth)
        layers = []
        for number, tokens, grid in self._walk(x, blocks[-1] + 1):
            if number - 1 in blocks:
                tokens = self.norm(tokens) if norm else tokens
                tokens = self.project(tokens) if norm and projection else tokens
                prefix, patches = tokens[:, :EXTRA_TOKENS], tokens[:, EXTRA_TOKENS:]
                layers.append(LayerTokens(prefix, patches, grid))
        return as_dino(
            layers,
            reshape=reshape,
            class_token=return_class_token,
            extra_tokens=return_extra_tokens,
        )

    def _encode(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """All tokens after the last norm, and the grid of the patches."""
        for _, tokens, grid in self._walk(images, self.config.depth):
            last = tokens, grid
        return self.norm(last[0]), last[1]

    def _walk(self, images: Tensor, last: int) -> Iterator[tuple[int, Tensor, tuple[int, int]]]:
        """All tokens after each block up to the `last`, counted from 1, and the patches' grid."""
        c = self.config
        grid = check_images(images, c.in_channels, c.patch_size)
        if not self.training:
            check_finite(images)
        patches = self.patch_embed(images.to(self.patch_embed.weight.dtype))
        patches = patches.flatten(2).transpose(1, 2)
        extra = self.extra.expand(patches.shape[0], -1, -1).to(patches.dtype)
        x = torch.cat([extra, patches], dim=1)

        rotation = self._rotation(grid, x.device)
        for number, block in enumerate(self.blocks[:last], start=1):
            x = block(x, x.shape[1], rotation, None)
            yield number, x, grid

    def _rotation(self, grid: tuple[int, int], device: torch.device) -> Rotation:
        """Patches turn with their coordinates; the extra tokens stand outside the image."""
        c = self.config
        xy = rope.grid_coordinates(*grid, device)
        if self.training:
            xy = rope.augment_coordinates(xy, c.rope_shift, c.rope_jitter, c.rope_rescale)
        periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction, device)
        cos, sin = rope.rotation(xy.unsqueeze(0), periods)
        still = cos.new_zeros(1, EXTRA_TOKENS, cos.shape[-1])
        return Rotation(torch.cat([still + 1, cos], dim=1), torch.cat([still, sin], dim=1))
