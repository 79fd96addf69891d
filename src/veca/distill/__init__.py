"""Distillation: from frozen teachers to an elastic student.

`config` is what can be set, `loop` is a run, `step` one training step from top to bottom. Each
other module is one thing these two name: teachers, student, losses, schedule, optimisers, ...
"""

from veca.distill.config import DistillConfig, load_config
from veca.distill.export import export_checkpoint, publish
from veca.distill.logger import read_metrics
from veca.distill.loop import DistillResult, distill
from veca.distill.losses import classifier_kl, distillation_loss
from veca.distill.normuon import NorMuon, polar_express
from veca.distill.recipe import Recipe, list_recipes
from veca.distill.schedule import BudgetSampler, KeepSampler
from veca.distill.standardise import TargetStatistics, load_targets
from veca.distill.student import load_heads
from veca.errors import DistillError, DivergedError

__all__ = [
    "BudgetSampler",
    "DistillConfig",
    "DistillError",
    "DistillResult",
    "DivergedError",
    "KeepSampler",
    "NorMuon",
    "Recipe",
    "TargetStatistics",
    "classifier_kl",
    "distill",
    "distillation_loss",
    "export_checkpoint",
    "list_recipes",
    "load_config",
    "load_heads",
    "load_targets",
    "polar_express",
    "publish",
    "read_metrics",
]
