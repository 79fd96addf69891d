"""Export: the model as a file that runs without this package, each file checked against the model.

`graph` is what is traced, `onnx_file` and `torch_file` write the two formats, `verify` compares a
file with the model, `api` puts them together, and `loaded` runs such a file from Python. `arranged`
and `int8_graph` are what ONNX runtimes do fast; `web` is a page that runs in a browser.
"""

from veca.errors import ExportError
from veca.export.api import ANY, FORMATS, Exported, export_model
from veca.export.loaded import ExportedModel, load_exported
from veca.export.precision import DTYPES, GATES, PRECISIONS
from veca.export.web import Website, export_web

__all__ = [
    "ANY",
    "DTYPES",
    "FORMATS",
    "GATES",
    "PRECISIONS",
    "ExportError",
    "Exported",
    "ExportedModel",
    "Website",
    "export_model",
    "export_web",
    "load_exported",
]
