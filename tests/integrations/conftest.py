"""Marks that transformers' and timm's own tests carry, which `--strict-markers` wants to know."""

from __future__ import annotations

THEIRS = (
    *("accelerate_tests", "base", "bitsandbytes", "cfg", "compiled", "features", "flash_attn_test"),
    *("flash_attn_3_test", "flash_attn_4_test", "flex_attention_test", "fxbackward", "fxforward"),
    *("generate", "sdpa_test", "torch_compile_test", "torchscript", "torch_export_test"),
)


def pytest_configure(config):
    for name in THEIRS:
        config.addinivalue_line("markers", f"{name}: of transformers' or timm's own tests")
