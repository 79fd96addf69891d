"""onnxruntime-web, which runs the exported page's network."""

from __future__ import annotations

from veca._util.npm import NpmPackage
from veca.errors import ExportError

WASM = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
WEBGPU = (
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)
"""The files of its folder `dist` that a page needs on a CPU, and on a GPU."""

RUNTIME = NpmPackage(
    "onnxruntime-web",
    "1.30.0",
    "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
    tuple(f"dist/{name}" for name in (*WASM, *WEBGPU)),
    option="--ort",
    error=ExportError,
)
