"""Distillation: from frozen teachers to an elastic student.

`config` is what can be set, `loop` is the loop, `trainer` one step of it; each other module is one
thing the method names: losses, nested budgets, optimisers, schedule, standardised targets.
"""

from veca.distill.config import DistillConfig, load_config
from veca.distill.export import export_checkpoint
from veca.distill.follow import read_metrics
from veca.distill.loop import DistillResult, distill
from veca.distill.losses import classifier_kl, distillation_loss
from veca.distill.nested import BudgetSampler
from veca.distill.normuon import NorMuon, polar_express
from veca.distill.publish import publish
from veca.distill.standardise import TargetStatistics, load_targets
from veca.distill.student import load_heads
from veca.errors import DistillError, DivergedError

__all__ = [
    "BudgetSampler",
    "DistillConfig",
    "DistillError",
    "DistillResult",
    "DivergedError",
    "NorMuon",
    "TargetStatistics",
    "classifier_kl",
    "distill",
    "distillation_loss",
    "export_checkpoint",
    "load_config",
    "load_heads",
    "load_targets",
    "polar_express",
    "publish",
    "read_metrics",
]
