"""The page: gradio components, and which handler each of them calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from veca._util.extras import require
from veca.app.guard import client_of
from veca.app.handlers import Changes, Controls, Handlers
from veca.app.visitors import Visitors
from veca.config import DEFAULT_SIZE
from veca.merging import LEAST_KEEP
from veca.quickstart import bundled_photos

DEFAULT_CORES = 32
_KINDS = [("norm-based (as published)", "norm"), ("softmax", "softmax")]
_THUMBNAIL = 192
_CLEAN_SECONDS, _FILE_SECONDS = 60, 600  # how often old files are removed, and what is old


class Dial(NamedTuple):
    """A slider; it has the name of a field of `Controls`."""

    name: str
    label: str
    low: float
    high: float
    start: float
    step: float
    handler: str
    """The name of the method of `Handlers` that moving it calls."""


# Each picture and what stands above it until the first photo is there.
PICTURES = {
    "photo": "photo: click a spot",
    "features": "dense features",
    "merged": "what was merged",
    "similarity": "cosine",
    "paths": "paths of the cores",
    "attention": "attention",
}
# What a handler changes: these components show that work is going on.
CHANGED = {
    "redraw": ["message", *PICTURES, "numbers", "dense"],
    "attention": ["message", "attention"],
    "click": ["message", "photo", "similarity"],
    "time_dense": ["message", "numbers", "dense"],
    "download": ["message", "file"],
}
# A new photo, size or weights: of other weights the sliders have other ends.
CHANGED["relook"] = CHANGED["pick"] = [*CHANGED["redraw"], "cores", "layer", "core"]
CHANGED["start"] = CHANGED["relook"]
CHANGED["upload"] = [*CHANGED["relook"], "upload"]

CSS = """
#message .error { background: #fde8e8; border-left: 4px solid #c0392b; color: #611; }
#message .note { background: #fff4d6; border-left: 4px solid #e0a800; color: #432; }
.dark #message .error { background: #4a1d1d; color: #fbdada; }
.dark #message .note { background: #4a3a10; color: #fbeec5; }
#message .error, #message .note { padding: .6rem 1rem; }
#message:not(:has(.error, .note)) { display: none; }
/* What is moved stays in view while the pictures scroll by. */
.gradio-container, .gradio-container main, .gradio-container .wrap { overflow: visible !important; }
#dials { position: sticky; top: 0; z-index: 30; background: var(--body-background-fill);
         padding: .4rem 0; box-shadow: 0 6px 8px -8px #0006; }
#numbers .scroll { overflow-x: auto; }
#numbers table { border-collapse: collapse; border: 0; width: 100%; margin: 0;
                 font-variant-numeric: tabular-nums; }
#numbers th, #numbers td { padding: .3rem .4rem; text-align: right; border: 0;
                           white-space: nowrap; }
#numbers th { white-space: normal; }
#numbers tr { border: 0; border-bottom: 1px solid #8884; }
#numbers th:first-child, #numbers td:first-child { text-align: left; }
#numbers p { font-size: .85rem; opacity: .75; margin: .4rem .6rem; }
#photo img { cursor: crosshair; }
/* Labels stand above the pictures, not on them. */
.picture .image-container { padding-top: 2.2rem; }
#gallery .grid-container { grid-template-columns: repeat(5, minmax(0, 1fr)) !important;
                           padding-top: 2rem; }
.out-of-sight { position: absolute !important; left: -9999px; }
@media (max-width: 640px) {
  #numbers { font-size: .8rem; }
  .gradio-container main { padding: .75rem !important; }
  #dials .block { padding: .3rem .4rem !important; min-width: 0 !important; }
  #dials .head { flex-wrap: nowrap; margin-bottom: .2rem; }
  #dials .head span { font-size: .75rem; line-height: 1.1; white-space: normal; }
  #dials input[type=number] { width: 3.4rem; min-width: 0; padding: .1rem; }
  #dials input[type=range] { min-width: 0; width: 100%; }
  #dials .reset-button, #dials .min_value, #dials .max_value { display: none; }
  #numbers th, #numbers td { padding: .3rem .25rem; }
}
"""
# The visible button asks for a file; when it is there, this starts its download.
_CLICK_FILE = """() => {
  const place = document.getElementById('file');
  (place.querySelector('a, button') || place).click();
}"""


def build_page(handlers: Handlers, visitors: Visitors) -> Any:
    """The page as gradio Blocks; `serve` runs it."""
    gr = require("gradio", "the demo")
    with gr.Blocks(
        title="VECA",
        analytics_enabled=False,
        delete_cache=(_CLEAN_SECONDS, _FILE_SECONDS),
        fill_width=True,
    ) as page:
        parts = _lay_out(gr, handlers)
        _connect(gr, page, parts, handlers, visitors)
    return page


def _dials(handlers: Handlers) -> dict[str, Dial]:
    with handlers.models.use(handlers.models.default) as entry:
        most, depth = entry.model.config.num_cores, entry.model.config.depth
    largest = handlers.limits.size
    dials = (
        Dial("cores", "budget (cores)", 1, most, min(DEFAULT_CORES, most), 1, "redraw"),
        Dial("keep", "tokens kept", LEAST_KEEP, 1, 1, 0.05, "redraw"),
        Dial("size", "size (px)", 128, largest, DEFAULT_SIZE, 64, "relook"),
        Dial("layer", "layer", 1, depth, depth, 1, "attention"),
        Dial("core", "core", 1, most, 1, 1, "attention"),
    )
    return {dial.name: dial for dial in dials}


# The dials of the whole page; the others stand beside the attention.
_ALWAYS_IN_VIEW = ("cores", "keep", "size")


def _lay_out(gr: Any, handlers: Handlers) -> dict[str, Any]:
    """The components by name, in the order in which they stand on the page."""
    parts: dict[str, Any] = {}
    dials = _dials(handlers)

    def slide(dial: Dial) -> None:
        parts[dial.name] = gr.Slider(
            dial.low, dial.high, dial.start, step=dial.step, label=dial.label, elem_id=dial.name
        )

    def picture(name: str) -> None:
        parts[name] = gr.Image(
            label=PICTURES[name],
            format="png",
            type="pil",
            interactive=False,
            buttons=["fullscreen"],
            elem_id=name,
            elem_classes="picture",
        )

    gr.Markdown(
        "# VECA: move the budget, see what changes\n"
        "Every patch of the photo lives through the whole network, but patches talk only through "
        "a few *cores*. How many is yours to choose, and how many patches go on as tokens of their "
        "own: where neighbours are alike, they can share one."
    )
    with gr.Row(elem_id="dials"):
        for name in _ALWAYS_IN_VIEW:
            slide(dials.pop(name))
    parts["message"] = gr.HTML(elem_id="message")
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            limit = handlers.limits.file_bytes // 2**20
            parts["upload"] = gr.File(
                label=f"drop a photo (up to {limit} MiB)",
                file_types=["image"],
                height=170,
                elem_id="upload",
            )
            parts["gallery"] = gr.Gallery(
                value=[_thumbnail(path) for path in bundled_photos()],
                label="or pick one",
                columns=len(bundled_photos()),
                height=160,
                allow_preview=False,
                object_fit="cover",
                buttons=[],
                interactive=False,
                elem_id="gallery",
            )
            parts["numbers"] = gr.HTML(elem_id="numbers")
            parts["dense"] = gr.Button(visible=False, elem_id="dense", size="sm")
            names, default = handlers.models.names, handlers.models.default
            parts["weights"] = gr.Dropdown(names, value=default, label="weights", elem_id="weights")
            parts["download"] = gr.Button("download the features (.npz)", elem_id="download")
            parts["file"] = gr.DownloadButton("file", elem_id="file", elem_classes="out-of-sight")
        with gr.Column(scale=5):
            with gr.Row():
                picture("photo")
                picture("features")
            with gr.Row():
                picture("merged")
                picture("similarity")
            with gr.Row():
                picture("paths")
                picture("attention")
            with gr.Row():
                for dial in dials.values():
                    slide(dial)
                parts["kind"] = gr.Radio(_KINDS, value="norm", label="attention", elem_id="kind")
    return parts


def _connect(
    gr: Any, page: Any, parts: dict[str, Any], handlers: Handlers, visitors: Visitors
) -> None:
    def on(event: Callable[..., Any], name: str, *more: str, clicked: bool = False) -> Any:
        """Call the handler `name` with the visit, all controls, and the values of `more`.

        `clicked` adds where the click was.
        """
        handler: Callable[..., Changes] = getattr(handlers, name)

        def run(request: Any, *values: Any) -> dict[Any, Any]:
            session = request.session_hash
            controls = Controls(*values[: len(Controls._fields)])
            changes = handler(visitors.get(session), controls, *values[len(controls) :])
            if "visit" in changes:
                visitors.keep(session, client_of(request.client.host), changes.pop("visit"))
            return {parts[part]: gr.update(**change) for part, change in changes.items()}

        def run_clicked(request: Any, event_data: Any, *values: Any) -> dict[Any, Any]:
            return run(request, *values, event_data.index)

        # gradio finds these parameters by their annotations.
        for function in (run, run_clicked):
            function.__annotations__["request"] = gr.Request
        run_clicked.__annotations__["event_data"] = gr.SelectData
        return event(
            run_clicked if clicked else run,
            [parts[part] for part in (*Controls._fields, *more)],
            [parts[part] for part in CHANGED[name]],
            api_visibility="private",
            # gradio would judge a file by its name, and leave an empty one behind.
            preprocess=name != "upload",
            show_progress="minimal",
            queue=False,  # the guard has visitors take turns
            # A slider sends many values on its way: the one being worked on and the last will do.
            trigger_mode="always_last",
        )

    on(page.load, "start")
    on(parts["upload"].upload, "upload", "upload")
    on(parts["gallery"].select, "pick", clicked=True)
    on(parts["weights"].change, "relook")
    for dial in _dials(handlers).values():
        on(parts[dial.name].change, dial.handler)
    on(parts["kind"].change, "attention")
    on(parts["photo"].select, "click", clicked=True)
    on(parts["dense"].click, "time_dense")
    on(parts["download"].click, "download").success(None, js=_CLICK_FILE)


def _thumbnail(path: Path) -> Image.Image:
    with Image.open(path) as image:
        small = image.convert("RGB")
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return small
