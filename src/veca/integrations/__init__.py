"""VECA under other libraries' interfaces: `integrations.transformers` and `integrations.timm`.

Each is imported on request only, and needs its library.
"""
