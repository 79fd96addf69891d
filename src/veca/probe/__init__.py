"""Probes: what a frozen backbone knows, at every budget.

    from veca.probe import VecaBackbone, run_probe

    rows = VecaBackbone(veca.load("small"), name="small").at([8, 16, 32, 64])
    run = run_probe("knn", rows, dataset="oxford-pets", data="data/pets", protocol="quick")

`protocol` holds the constants of a measurement, `datasets` reads public layouts, `backbone` is what
is probed, `extract` computes features once and `cache` keeps them, `tasks` train and score, and
`record`, `table`, `plot` and `report` show what came out.
"""

from veca.errors import ProbeError
from veca.probe.backbone import (
    Backbone,
    DenseBackbone,
    Features,
    TeacherBackbone,
    VecaBackbone,
    as_backbone,
)
from veca.probe.blind import BlindBackbone
from veca.probe.protocol import TASKS, Protocol, available_protocols, load_protocol
from veca.probe.record import Row, Run, find_runs, read_run
from veca.probe.report import write_report
from veca.probe.run import planned_subject, run_probe
from veca.probe.table import write_tables

__all__ = [
    "TASKS",
    "Backbone",
    "BlindBackbone",
    "DenseBackbone",
    "Features",
    "ProbeError",
    "Protocol",
    "Row",
    "Run",
    "TeacherBackbone",
    "VecaBackbone",
    "as_backbone",
    "available_protocols",
    "find_runs",
    "load_protocol",
    "planned_subject",
    "read_run",
    "run_probe",
    "write_report",
    "write_tables",
]
