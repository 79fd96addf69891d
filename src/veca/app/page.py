"""The page: gradio components, and which handler each of them calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from veca._util.extras import require
from veca.app.handlers import Changes, Handlers
from veca.config import DEFAULT_SIZE
from veca.quickstart import bundled_photos

SIZES = (128, 1024, 64)  # of the slider: from, to, step
DEFAULT_CORES = 32
_KINDS = [("norm-based (as published)", "norm"), ("softmax", "softmax")]
_THUMBNAIL = 192
# What gradio keeps for each visitor apart.
_STATES = ("look", "point")

CSS = """
#message .error { background: #fde8e8; border-left: 4px solid #c0392b; color: #611; }
#message .note { background: #fff4d6; border-left: 4px solid #e0a800; color: #432; }
#message .error, #message .note { padding: .6rem 1rem; }
#numbers table { border-collapse: collapse; border: 0; width: 100%;
                 font-variant-numeric: tabular-nums; }
#numbers th, #numbers td { padding: .3rem .4rem; text-align: right; border: 0;
                           white-space: nowrap; }
#numbers tr { border: 0; border-bottom: 1px solid #8884; }
#numbers th:first-child, #numbers td:first-child { text-align: left; }
#numbers p { font-size: .85rem; opacity: .75; margin: .4rem .6rem; }
#photo img { cursor: crosshair; }
/* Labels stand above the pictures, not on them. */
.picture .image-container { padding-top: 2.2rem; }
#gallery .grid-container { grid-template-columns: repeat(5, minmax(0, 1fr)) !important;
                           padding-top: 2rem; }
.out-of-sight { position: absolute !important; left: -9999px; }
"""
# The visible button asks for a file; when it is there, this starts its download.
_CLICK_FILE = """() => {
  const place = document.getElementById('file');
  (place.querySelector('a, button') || place).click();
}"""


def build_page(handlers: Handlers) -> Any:
    """The page as gradio Blocks; `serve` launches it."""
    gr = require("gradio", "the demo")
    # Files older than an hour are removed every ten minutes.
    with gr.Blocks(
        title="VECA", analytics_enabled=False, delete_cache=(600, 3600), fill_width=True
    ) as page:
        parts = _lay_out(gr, handlers)
        _connect(gr, page, parts, handlers)
    return page


def _lay_out(gr: Any, handlers: Handlers) -> dict[str, Any]:
    """The components by name, in the order in which they stand on the page."""
    with handlers.models.use(handlers.models.default) as entry:
        most, depth = entry.model.config.num_cores, entry.model.config.depth
    parts: dict[str, Any] = {name: gr.State(None) for name in _STATES}

    def add(name: str, component: Any) -> None:
        parts[name] = component

    def picture(name: str, label: str) -> None:
        image = gr.Image(
            label=label,
            format="png",
            type="pil",
            interactive=False,
            buttons=["fullscreen"],
            elem_id=name,
            elem_classes="picture",
        )
        add(name, image)

    gr.Markdown(
        "# VECA: move the budget, see what changes\n"
        "Every patch of the photo lives through the whole network, but patches talk only through "
        "a few *cores*. How many is yours to choose."
    )
    add("message", gr.HTML(elem_id="message"))
    with gr.Row():
        with gr.Column(scale=2, min_width=400):
            start = min(DEFAULT_CORES, most)
            add("cores", gr.Slider(1, most, start, step=1, label="budget", elem_id="cores"))
            low, high, step = SIZES
            label = "size (short side in pixels)"
            add("size", gr.Slider(low, high, DEFAULT_SIZE, step=step, label=label, elem_id="size"))
            add("numbers", gr.HTML(elem_id="numbers"))
            limit = handlers.limits.file_bytes // 2**20
            upload = gr.File(
                label=f"drop a photo (up to {limit} MiB)",
                file_types=["image"],
                type="filepath",
                height=140,
                elem_id="upload",
            )
            add("upload", upload)
            gallery = gr.Gallery(
                value=[_thumbnail(path) for path in bundled_photos()],
                label="or pick one",
                columns=len(bundled_photos()),
                height=130,
                allow_preview=False,
                object_fit="cover",
                buttons=[],
                interactive=False,
                elem_id="gallery",
            )
            add("gallery", gallery)
            names, default = handlers.models.names, handlers.models.default
            add("weights", gr.Dropdown(names, value=default, label="weights", elem_id="weights"))
            add("download", gr.Button("download the features (.npz)", elem_id="download"))
            hidden = gr.DownloadButton("file", elem_id="file", elem_classes="out-of-sight")
            add("file", hidden)
        with gr.Column(scale=5):
            with gr.Row():
                picture("photo", "photo: click a spot")
                picture("features", "dense features")
            with gr.Row():
                picture("similarity", "cosine")
                picture("paths", "paths of the cores")
            with gr.Row():
                picture("attention", "attention")
                with gr.Column(min_width=160):
                    add("layer", gr.Slider(1, depth, depth, step=1, label="layer", elem_id="layer"))
                    add("core", gr.Slider(1, most, 1, step=1, label="core", elem_id="core"))
                    add("kind", gr.Radio(_KINDS, value="norm", label="attention", elem_id="kind"))
    return parts


def _connect(gr: Any, page: Any, parts: dict[str, Any], handlers: Handlers) -> None:
    choice = ["cores", "layer", "core", "kind"]
    drawn = ["photo", "features", "similarity", "paths", "attention", "numbers"]
    everything = ["message", *_STATES, "cores", "layer", "core", *drawn]

    def on(
        event: Callable[..., Any],
        handler: Callable[..., Changes],
        inputs: list[str],
        outputs: list[str],
        *,
        clicked: bool = False,
        last: bool = False,
    ) -> Any:
        """Call a handler with the values of `inputs`; it may change `outputs`.

        `clicked` gives it first where the click was. A slider sends many values on its way: with
        `last` the one being worked on and the last are enough.
        """

        def run(*values: Any) -> dict[Any, Any]:
            changes = handler(*values)
            return {
                parts[name]: change if name in _STATES else gr.update(**change)
                for name, change in changes.items()
            }

        def run_with_event(event_data: Any, *values: Any) -> dict[Any, Any]:
            return run(event_data.index, *values)

        # gradio finds the parameter for what was clicked by its annotation.
        run_with_event.__annotations__["event_data"] = gr.SelectData
        return event(
            run_with_event if clicked else run,
            [parts[name] for name in inputs],
            [parts[name] for name in outputs],
            api_visibility="private",
            show_progress="minimal",
            trigger_mode="always_last" if last else None,
        )

    on(page.load, handlers.start, ["weights", "size", *choice], everything)
    inputs = ["upload", "weights", "size", *choice]
    on(parts["upload"].upload, handlers.upload, inputs, ["upload", *everything])
    on(
        parts["gallery"].select,
        handlers.pick,
        ["weights", "size", *choice],
        everything,
        clicked=True,
    )
    for name in ("weights", "size"):
        inputs = [*_STATES, "weights", "size", *choice]
        on(parts[name].change, handlers.relook, inputs, everything, last=True)
    on(parts["cores"].change, handlers.budget, [*_STATES, *choice], ["message", *drawn], last=True)
    for name in ("layer", "core", "kind"):
        inputs = ["look", *choice]
        on(parts[name].change, handlers.attention, inputs, ["message", "attention"], last=True)
    outputs = ["message", "point", "photo", "similarity"]
    on(parts["photo"].select, handlers.click, ["look", "cores"], outputs, clicked=True)
    ask = on(parts["download"].click, handlers.download, ["look", "cores"], ["message", "file"])
    ask.success(None, js=_CLICK_FILE)


def _thumbnail(path: Path) -> Image.Image:
    with Image.open(path) as image:
        small = image.convert("RGB")
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return small
