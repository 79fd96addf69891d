"""Pictures of what the model sees: features as colours, cores on the photo, attention as heat."""

from veca.viz.attention import heat
from veca.viz.cores import draw_cores
from veca.viz.features import feature_pictures
from veca.viz.panel import strip

__all__ = ["draw_cores", "feature_pictures", "heat", "strip"]
