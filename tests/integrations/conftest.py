"""Marks that transformers' and timm's own tests carry, which `--strict-markers` wants to know."""

from __future__ import annotations

THEIRS = (
    *("accelerate_tests", "backward", "base", "bitsandbytes", "cfg", "cfg_nonstd", "features"),
    *("flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "flex_attention_test"),
    *("fxbackward", "fxforward"),
    *("forward", "timeout", "torch_compile_test", "torchscript"),
)


def pytest_configure(config):
    for name in THEIRS:
        config.addinivalue_line("markers", f"{name}: of transformers' or timm's own tests")
