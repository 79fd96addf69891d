"""What happens when a visitor touches the page: settings in, changes of components out.

A handler is given what the page holds, the visitor's own `Look` among it, and returns changes by
the component's name: properties such as {"value": ..., "label": ...}, or, for what the page keeps
for the visitor ("look" and "point"), the thing itself. Components that are not named stay as they
are. Nothing is shared between visitors but the loaded models, behind their lock.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple, TypeAlias

from veca.app import content
from veca.app.content import Limits, Look, Photo
from veca.app.model_cache import LoadedModel, ModelCache
from veca.errors import VecaError
from veca.quickstart import bundled_photos
from veca.viz.default_weights import FRESH
from veca.viz.similarity import Point

Changes: TypeAlias = "dict[str, Any]"


class Controls(NamedTuple):
    """The sliders and the radio button, in the order the page sends them."""

    cores: int
    layer: int
    core: int
    kind: str


def errors_as_messages(handler: Callable[..., Changes]) -> Callable[..., Changes]:
    """A handler whose errors become a message on the page."""

    @functools.wraps(handler)
    def guarded(*values: Any) -> Changes:
        try:
            return handler(*values)
        except VecaError as error:
            return error_message(error)

    return guarded


def error_message(error: VecaError) -> Changes:
    """An error as a message."""
    return {"message": {"value": message_box(str(error), "error")}}


class Handlers:
    """The handlers of a page.

    Args:
        folder: a temporary folder for the files that visitors download.
    """

    def __init__(self, models: ModelCache, limits: Limits, folder: str) -> None:
        self.models = models
        self.limits = limits
        self.folder = folder

    @errors_as_messages
    def start(self, weights: str, size: int, *choice: Any) -> Changes:
        """A new visitor: the first bundled photo."""
        return self._see(bundled(0), weights, size, None, Controls(*choice))

    @errors_as_messages
    def pick(self, index: int, weights: str, size: int, *choice: Any) -> Changes:
        """A bundled photo was chosen."""
        return self._see(bundled(index), weights, size, None, Controls(*choice))

    def upload(self, path: str | None, weights: str, size: int, *choice: Any) -> Changes:
        """A file was dropped."""
        empty = {"upload": {"value": None}}  # ready for the next file, whatever became of this one
        if path is None:
            return {}
        try:
            photo = content.open_photo(path, self.limits)
            return {**self._see(photo, weights, size, None, Controls(*choice)), **empty}
        except VecaError as error:
            return {**error_message(error), **empty}

    @errors_as_messages
    def relook(
        self, look: Look | None, point: Point | None, weights: str, size: int, *choice: Any
    ) -> Changes:
        """Other weights or another size: the same photo again."""
        photo = bundled(0) if look is None else look.photo
        return self._see(photo, weights, size, point, Controls(*choice))

    @errors_as_messages
    def budget(self, look: Look | None, point: Point | None, *choice: Any) -> Changes:
        """The budget was moved."""
        if look is None:
            return {}
        with self.models.use(look.weights) as entry:
            return self._draw(look, entry, point, Controls(*choice))

    @errors_as_messages
    def attention(self, look: Look | None, *choice: Any) -> Changes:
        """Another core, layer or kind of attention."""
        if look is None:
            return {}
        with self.models.use(look.weights):
            return _attention(look, Controls(*choice))

    @errors_as_messages
    def click(self, pixel: tuple[int, int], look: Look | None, cores: int) -> Changes:
        """A spot of the photo was clicked."""
        if look is None:
            return {}
        point = content.point_at(pixel, look.view.shown.size)
        with self.models.use(look.weights):
            return {
                "point": point,
                "photo": {"value": content.photo_picture(look, point)},
                **_similarity(look, cores, point),
            }

    @errors_as_messages
    def download(self, look: Look | None, cores: int) -> Changes:
        """The features were asked for."""
        if look is None:
            return {}
        with self.models.use(look.weights):
            # A folder of its own: visitors may share a photo's name.
            place = tempfile.mkdtemp(dir=self.folder)
            return {"file": {"value": str(content.features_file(look, cores, place))}}

    def _see(
        self, photo: Photo, weights: str, size: int, point: Point | None, controls: Controls
    ) -> Changes:
        """A photo with weights at a size: all of the page."""
        with self.models.use(weights) as entry:
            look = content.look(entry, photo, int(size), self.limits)
            c = entry.model.config
            fitting = Controls(
                min(controls.cores, c.num_cores),
                min(controls.layer, c.depth),
                min(controls.core, c.num_cores),
                controls.kind,
            )
            drawn = self._draw(look, entry, point, fitting)
        return {
            "look": look,
            "point": point,
            "cores": {"maximum": c.num_cores, "value": fitting.cores},
            "layer": {"maximum": c.depth, "value": fitting.layer},
            "core": {"maximum": c.num_cores, "value": fitting.core},
            **drawn,
        }

    def _draw(
        self, look: Look, entry: LoadedModel, point: Point | None, controls: Controls
    ) -> Changes:
        """All pictures and the numbers at a budget."""
        budget = content.budget_of(look, controls.cores)
        cores = f"{budget} core{'s' * (budget != 1)}"
        paths, length = content.paths_picture(look, budget)
        features = content.features_picture(look, budget)
        changes: Changes = {
            "message": {"value": message_box(FRESH, "note") if look.fresh else ""},
            "photo": {"value": content.photo_picture(look, point)},
            "features": {"value": features, "label": f"dense features, {cores}"},
            "paths": {"value": paths, "label": f"paths of {cores}: mean {length:.2g} patches"},
            **_similarity(look, budget, point),
            **_attention(look, controls),
        }
        times = content.measure_times(look, entry, budget)
        changes["numbers"] = {"value": content.costs_table(look, budget, times)}
        look.view.forget(keep={budget, entry.model.config.num_cores})
        return changes


def bundled(index: int) -> Photo:
    """One of the photos that come with the package."""
    return content.open_photo(bundled_photos()[index])


def message_box(text: str, kind: str) -> str:
    """A message as HTML; `kind` is "error" or "note"."""
    return f'<div class="{kind}" role="status">{escape(text)}</div>'


def _similarity(look: Look, cores: int, point: Point | None) -> Changes:
    what = "the whole image (CLS)" if point is None else "the marked patch"
    picture = content.similarity_picture(look, cores, point)
    return {"similarity": {"value": picture, "label": f"cosine with {what}"}}


def _attention(look: Look, controls: Controls) -> Changes:
    budget = content.budget_of(look, controls.cores)
    core, layer = min(controls.core, budget), min(controls.layer, look.view.model.config.depth)
    picture = content.attention_picture(look, budget, layer, core, controls.kind)
    label = f"attention of core {core} of {budget}, layer {layer}"
    return {"attention": {"value": picture, "label": label}}
