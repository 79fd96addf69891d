"""Pictures of what the model sees, and the numbers behind them.

>>> view = viz.View(model, "photo.jpg", size=512)
>>> viz.draw_features([view], cores=(8, 64)).save("features.png")
>>> viz.report([view], "report")                      # all the figures of a photo as a page

A `View` is a photo as a model sees it; it gives tensors (`run`, `features`, `attention`). The
`draw_*` functions give a `Figure`, which holds pictures and the `arrays` they were drawn from and
is saved as PNG, SVG or HTML.
"""

from veca._util.moved import moved
from veca.viz.attention import draw_attention, draw_single_cores
from veca.viz.catalogue import FIGURES, Options, draw, save
from veca.viz.colour import heat
from veca.viz.cores import draw_paths, draw_states, path_lengths
from veca.viz.features import draw_features, draw_sizes, feature_pictures
from veca.viz.figure import FORMATS, Figure, Panel
from veca.viz.merged import draw_merged, merged_picture
from veca.viz.numbers import Numbers, Verdict, draw_numbers, measure, verdicts
from veca.viz.project import Palette, Pca, joint_colours, layer_colours, project
from veca.viz.report import report
from veca.viz.similarity import (
    agreement_map,
    cls_map,
    cosine_map,
    draw_agreement,
    draw_similarity,
    point_map,
)
from veca.viz.view import MergeStep, PhotoFeatures, View, default_layers, fitting_budgets

__all__ = [
    "FIGURES",
    "FORMATS",
    "Figure",
    "MergeStep",
    "Numbers",
    "Options",
    "Palette",
    "Panel",
    "Pca",
    "PhotoFeatures",
    "Verdict",
    "View",
    "agreement_map",
    "cls_map",
    "cosine_map",
    "default_layers",
    "draw",
    "draw_agreement",
    "draw_attention",
    "draw_features",
    "draw_merged",
    "draw_numbers",
    "draw_paths",
    "draw_similarity",
    "draw_single_cores",
    "draw_sizes",
    "draw_states",
    "feature_pictures",
    "fitting_budgets",
    "heat",
    "joint_colours",
    "layer_colours",
    "measure",
    "merged_picture",
    "path_lengths",
    "point_map",
    "project",
    "report",
    "save",
    "verdicts",
]

# What they were called in 0.1.
__getattr__ = moved(__name__, {"Run": "PhotoFeatures", "default_budgets": "fitting_budgets"})
