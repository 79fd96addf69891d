"""What happens when a visitor touches the page: the visit and the controls in, changes out.

A handler is given what the page remembers of the visitor and the values of all controls. It returns
changes by the component's name: properties such as {"value": ..., "label": ...}, or, under "visit",
what to remember from now on. Components that are not named stay as they are. Nothing is shared
between visitors but the loaded models, behind their lock.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from veca._util.memory import give_back
from veca.app import content
from veca.app.content import Limits, Look, Photo, Times
from veca.app.model_cache import LoadedModel, ModelCache
from veca.app.uploads import Uploads
from veca.app.visitors import Looks, Visit
from veca.errors import InputError, VecaError
from veca.quickstart import bundled_photos
from veca.viz.default_weights import FRESH

Changes: TypeAlias = "dict[str, Any]"


class Controls(NamedTuple):
    """What a visitor can set, in the order the page sends it; the page has a component for each."""

    weights: str
    size: int
    cores: int
    layer: int
    core: int
    kind: str
    keep: float = 1.0


def errors_as_messages(handler: Callable[..., Changes]) -> Callable[..., Changes]:
    """A handler whose errors become a message on the page."""

    @functools.wraps(handler)
    def guarded(*values: Any) -> Changes:
        try:
            return handler(*values)
        except VecaError as error:
            return {"message": {"value": message_box(str(error), "error")}}

    return guarded


def of_a_visit(handler: Callable[..., Changes]) -> Callable[..., Changes]:
    """A handler that needs a visit; without one, the visitor is told what to do."""

    @functools.wraps(handler)
    def guarded(self: Handlers, visit: Visit | None, *values: Any) -> Changes:
        if visit is None:
            raise InputError(
                "Your photo is no longer here, as others came in the meantime. Drop it again, or "
                "pick one."
            )
        return handler(self, visit, *values)

    return errors_as_messages(guarded)


class Handlers:
    """The handlers of a page.

    Args:
        uploads: where visitors' files wait.
        folder: a temporary folder for the files that visitors download.
    """

    def __init__(self, models: ModelCache, limits: Limits, uploads: Uploads, folder: Path) -> None:
        self.models = models
        self.limits = limits
        self.uploads = uploads
        self.folder = folder
        self.looks = Looks(limits)
        self._decoding = threading.Lock()

    @errors_as_messages
    def start(self, visit: Visit | None, controls: Controls) -> Changes:
        """A new visitor: the first bundled photo."""
        return self._see(bundled(0), controls)

    @errors_as_messages
    def pick(self, visit: Visit | None, controls: Controls, index: int) -> Changes:
        """A bundled photo was chosen."""
        return self._see(bundled(index), controls)

    def upload(
        self, visit: Visit | None, controls: Controls, file: dict[str, Any] | None
    ) -> Changes:
        """A file was dropped, and waits in `uploads` at file["path"]."""
        if file is None:
            return {}
        # Ready for the next file, whatever becomes of this one.
        return {**self._see_upload(controls, file["path"]), "upload": {"value": None}}

    @errors_as_messages
    def _see_upload(self, controls: Controls, path: str) -> Changes:
        # One at a time: decoding takes up to 20 bytes a pixel for a moment.
        with self._decoding, self.uploads.take(path) as (place, name):
            photo = content.open_photo(place, self.limits, name)
        return self._see(photo, controls)

    @errors_as_messages
    def relook(self, visit: Visit | None, controls: Controls) -> Changes:
        """Other weights or another size: the same photo again."""
        return self._see(visit.photo if visit else bundled(0), controls, visit)

    @of_a_visit
    def redraw(self, visit: Visit, controls: Controls) -> Changes:
        """The budget was moved."""
        with self.models.use(visit.weights) as entry:
            return self._draw(visit, entry, controls)

    @of_a_visit
    def attention(self, visit: Visit, controls: Controls) -> Changes:
        """Another core, layer or kind of attention."""
        with self.models.use(visit.weights) as entry:
            return _attention(self._look(visit, entry, controls), controls)

    @of_a_visit
    def click(self, visit: Visit, controls: Controls, pixel: tuple[int, int]) -> Changes:
        """A spot of the photo was clicked."""
        with self.models.use(visit.weights) as entry:
            look = self._look(visit, entry, controls)
            visit = dataclasses.replace(visit, point=content.point_at(pixel, look.view.shown.size))
            return {
                "visit": visit,
                "photo": {"value": content.photo_picture(look, visit.point)},
                **_similarity(look, visit, controls),
            }

    @of_a_visit
    def time_dense(self, visit: Visit, controls: Controls) -> Changes:
        """The dense ViT is to be timed, however long it takes."""
        with self.models.use(visit.weights) as entry:
            look = self._look(visit, entry, controls)
            look.view.run(content.budget_of(look, controls.cores))  # a warm-up, if need be
            return _numbers(look, controls, content.time_dense(look, entry, controls.cores))

    @of_a_visit
    def download(self, visit: Visit, controls: Controls) -> Changes:
        """The features were asked for."""
        with self.models.use(visit.weights) as entry:
            # A folder of its own: visitors may share a photo's name.
            place = tempfile.mkdtemp(dir=self.folder)
            file = content.features_file(self._look(visit, entry, controls), controls.cores, place)
            return {"file": {"value": str(file)}}

    def _look(self, visit: Visit, entry: LoadedModel, controls: Controls) -> Look:
        return content.merging(self.looks.at(visit, entry), controls.keep)

    def _see(self, photo: Photo, controls: Controls, before: Visit | None = None) -> Changes:
        """A photo with weights at a size: all of the page. The point stays that of `before`."""
        point = before.point if before else None
        with self.models.use(controls.weights) as entry:
            c = entry.model.config
            visit = Visit(photo, controls.weights, int(controls.size), point)
            fitting = controls._replace(
                cores=min(controls.cores, c.num_cores),
                layer=min(controls.layer, c.depth),
                core=min(controls.core, c.num_cores),
            )
            drawn = self._draw(visit, entry, fitting)
        return {
            "visit": visit,
            "cores": {"maximum": c.num_cores, "value": fitting.cores},
            "layer": {"maximum": c.depth, "value": fitting.layer},
            "core": {"maximum": c.num_cores, "value": fitting.core},
            **drawn,
        }

    def _draw(self, visit: Visit, entry: LoadedModel, controls: Controls) -> Changes:
        """All pictures and the numbers at a budget."""
        look = self._look(visit, entry, controls)
        budget = content.budget_of(look, controls.cores)
        cores = f"{budget} core{'s' * (budget != 1)}"
        paths, length = content.paths_picture(look, budget)
        features = content.features_picture(look, budget)
        merged, tokens, patches = content.merged_picture(look, budget)
        changes: Changes = {
            "message": {"value": message_box(FRESH, "note") if look.fresh else ""},
            "photo": {"value": content.photo_picture(look, visit.point)},
            "features": {"value": features, "label": f"dense features, {cores}"},
            "merged": {"value": merged, "label": f"{tokens} of {patches} patch tokens go on"},
            "paths": {"value": paths, "label": f"paths of {cores}: mean {length:.2g} patches"},
            **_similarity(look, visit, controls),
            **_attention(look, controls),
            **_numbers(look, controls, content.measure_times(look, entry, budget)),
        }
        look.view.forget(keep={budget, entry.model.config.num_cores})
        give_back()  # what decoding and drawing took
        return changes


def bundled(index: int) -> Photo:
    """One of the photos that come with the package, the same one for all visitors."""
    if not isinstance(index, int) or not 0 <= index < len(bundled_photos()):
        raise InputError(f"There are {len(bundled_photos())} photos to pick from, got {index!r}.")
    return _bundled(index)


@functools.cache
def _bundled(index: int) -> Photo:
    return content.open_photo(bundled_photos()[index])


def message_box(text: str, kind: str) -> str:
    """A message as HTML; `kind` is "error" or "note"."""
    return f'<div class="{kind}" role="status">{escape(text)}</div>'


def _similarity(look: Look, visit: Visit, controls: Controls) -> Changes:
    what = "the whole image (CLS)" if visit.point is None else "the marked patch"
    picture, (low, high) = content.similarity_picture(look, controls.cores, visit.point)
    label = f"cosine with {what}: {low:.2f} to {high:.2f}"
    return {"similarity": {"value": picture, "label": label}}


def _attention(look: Look, controls: Controls) -> Changes:
    budget = content.budget_of(look, controls.cores)
    core, layer = min(controls.core, budget), min(controls.layer, look.view.model.config.depth)
    picture = content.attention_picture(look, budget, layer, core, controls.kind)
    label = f"attention of core {core} of {budget}, layer {layer}"
    return {"attention": {"value": picture, "label": label}}


def _numbers(look: Look, controls: Controls, times: Times) -> Changes:
    """The table; where the dense ViT is slow, a button that times it."""
    seconds = max(1, round(times.expected / 1000))
    return {
        "numbers": {"value": content.costs_table(look, controls.cores, times)},
        "dense": {
            "visible": times.dense is None,
            "value": f"time the dense ViT too (about {seconds} s)",
        },
    }
