"""The authors' side of the tests: their checkpoint layout with random numbers, and the published
forward pass written straight on those tensors, without any of the package's code."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, layer_norm, linear, silu, softmax

# The four families with fewer layers and heads; head width 64 and the FFN ratios are theirs.
FAMILIES: dict[str, dict[str, Any]] = {
    "small": {"hidden_dim": 128, "num_heads": 2, "num_layers": 3, "mlp_ratio": 2.66667},
    "splus": {"hidden_dim": 128, "num_heads": 2, "num_layers": 3, "mlp_ratio": 4.0},
    "base": {"hidden_dim": 192, "num_heads": 3, "num_layers": 3, "mlp_ratio": 2.66667},
    "large": {"hidden_dim": 256, "num_heads": 4, "num_layers": 5, "mlp_ratio": 2.66667},
}


def settings(family: str = "small", **changes: Any) -> dict[str, Any]:
    """A checkpoint's `config`: what describes the model, and some of what does not."""
    return {
        **FAMILIES[family],
        "num_query_tokens": 16,
        "nested_chunk_size": 8,
        "nested_budgets": (8, 16),
        "patch_size": 16,
        "in_channels": 3,
        "dropout": 0.0,
        "patch_embed_use_ln": False,
        "rope_shift_coords": 0.08,
        "rope_jitter_coords": None,
        "rope_rescale_coords": 2.0,
        "rope_p_zero_freqs": 0.125,
        "rope_zero_freqs_from": "low",
        "distill_output_dim": None,
        "teacher_id": "someone/teacher",
        "lr": 8e-5,
        "resize_short_by_res": {256: 288},
        **changes,
    }


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, as their files have it."""
    width, hidden = c["hidden_dim"], int(c["hidden_dim"] * c["mlp_ratio"])
    chunk = c.get("nested_chunk_size") or c["matryoshka_chunk_size"]
    out: dict[str, tuple[int, ...]] = {"pos_alpha": (c["num_layers"] - 1,)}

    def pair(name: str, *shape: int) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = shape, shape[:1]

    pair("patch_embed.proj", width, c["in_channels"], c["patch_size"], c["patch_size"])
    for name, last in (("query_token_chunks", width), ("qcoord_chunks", 2)):
        for i in range(c["num_query_tokens"] // chunk):
            out[f"{name}.{i}"] = (1, chunk, last)
    for layer in range(c["num_layers"] - 1):
        pair(f"pos_linears.{layer}", 2, width)
    for layer in range(c["num_layers"]):
        pair(f"blocks.{layer}.norm_attn", width)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            pair(f"blocks.{layer}.attn.{part}", width, width)
        pair(f"blocks.{layer}.norm_ffn", width)
        pair(f"blocks.{layer}.fc1", 2 * hidden, width)
        pair(f"blocks.{layer}.fc2", width, hidden)
    pair("final_norm", width)
    if (c["distill_output_dim"] or width) != width:
        pair("output_proj", c["distill_output_dim"], width)
    return out


def state(c: dict[str, Any], scale: float = 0.05) -> dict[str, Tensor]:
    """Random weights in their layout."""
    tensors = {name: torch.randn(shape) * scale for name, shape in shapes(c).items()}
    for name in tensors:
        if "norm" in name and name.endswith("weight"):
            tensors[name] += 1
    tensors["pos_alpha"] += 0.3
    return tensors


def forward(s: dict[str, Tensor], c: dict[str, Any], images: Tensor, budget: int) -> Any:
    """The published network: (first core, patches) of the images, at a budget."""
    batch, width = len(images), c["hidden_dim"]
    x = conv2d(images, s["patch_embed.proj.weight"], s["patch_embed.proj.bias"], c["patch_size"])
    rows, columns = x.shape[2:]
    patches = x.reshape(batch, width, rows * columns).permute(0, 2, 1)
    tokens = torch.cat([v for k, v in s.items() if k.startswith("query_token_chunks")], dim=1)
    raw = torch.cat([v for k, v in s.items() if k.startswith("qcoord_chunks")], dim=1)[:, :budget]
    x = torch.cat([tokens[:, :budget].expand(batch, -1, -1), patches], dim=1)

    ys = torch.tensor([(i + 0.5) / rows * 2 - 1 for i in range(rows)])
    xs = torch.tensor([(i + 0.5) / columns * 2 - 1 for i in range(columns)])
    grid = torch.stack([xs.repeat(rows), ys.repeat_interleave(columns)], dim=-1)

    # Which tokens see which: cores everything, patches the cores.
    total = budget + rows * columns
    seen = torch.zeros(total, total, dtype=torch.bool)
    seen[:budget] = True
    seen[:, :budget] = True

    for layer in range(c["num_layers"]):
        if layer > 0:
            name = f"pos_linears.{layer - 1}"
            step = linear(x[:, :budget], s[f"{name}.weight"], s[f"{name}.bias"])
            raw = raw + s["pos_alpha"][layer - 1] * step
        places = torch.cat([raw.tanh().expand(batch, -1, -1), grid.expand(batch, -1, -1)], dim=1)
        x = _block(s, c, f"blocks.{layer}", x, _angles(places, c), seen)

    x = layer_norm(x, (width,), s["final_norm.weight"], s["final_norm.bias"], 1e-5)
    if "output_proj.weight" in s:
        x = linear(x, s["output_proj.weight"], s["output_proj.bias"])
    return x[:, 0], x[:, budget:]


def _block(
    s: dict[str, Tensor], c: dict[str, Any], name: str, x: Tensor, angles: Tensor, seen: Tensor
) -> Tensor:
    width, heads = c["hidden_dim"], c["num_heads"]

    def apply(part: str, value: Tensor) -> Tensor:
        weight, bias = s[f"{name}.{part}.weight"], s[f"{name}.{part}.bias"]
        if "norm" in part:
            return layer_norm(value, (width,), weight, bias, 1e-5)
        return linear(value, weight, bias)

    y = apply("norm_attn", x)
    mixed = []
    q, k, v = (apply(f"attn.{part}", y) for part in ("q_proj", "k_proj", "v_proj"))
    for head in range(heads):
        cut = slice(head * width // heads, (head + 1) * width // heads)
        query, key = _turn(q[..., cut], angles), _turn(k[..., cut], angles)
        scores = query @ key.mT / math.sqrt(width // heads)
        mixed.append(softmax(scores.masked_fill(~seen, -math.inf), dim=-1) @ v[..., cut])
    x = x + apply("attn.out_proj", torch.cat(mixed, dim=-1))
    u, gate = apply("fc1", apply("norm_ffn", x)).chunk(2, dim=-1)
    return x + apply("fc2", silu(u) * gate)


def _angles(places: Tensor, c: dict[str, Any]) -> Tensor:
    """[B, T, 2] coordinates -> [B, T, d/2]: x in the first half of the pairs, y in the second."""
    count = c["hidden_dim"] // c["num_heads"] // 4
    periods = [100.0 ** (2 * j / (2 * count)) for j in range(count)]
    still = round(c["rope_p_zero_freqs"] * count)
    speed = torch.tensor([2 * math.pi / p for p in periods])
    speed[count - still :] = 0
    return torch.cat([places[..., :1] * speed, places[..., 1:] * speed], dim=-1)


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate adjacent pairs of channels, as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)
