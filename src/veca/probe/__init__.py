"""Probes: what a frozen backbone knows, at every budget.

    from veca.probe import ElasticBackbone, run_probe

    rows = ElasticBackbone(veca.load("small"), name="small").at([8, 16, 32, 64])
    run = run_probe("knn", rows, dataset="oxford-pets", data="data/pets", protocol="quick")

The way of a probe, in `run`: `datasets` reads a public layout, `extract` computes the features of
every `backbone` once and `cache` keeps them, a file of `tasks` trains and scores, `record` keeps
what came out, and `table`, `plot` and `report` show it. `protocol` holds every constant.
"""

from veca._util.moved import moved
from veca.errors import ProbeError
from veca.probe.backbone import (
    Backbone,
    DenseBackbone,
    ElasticBackbone,
    Features,
    TeacherBackbone,
    as_backbone,
)
from veca.probe.blind import BlindBackbone
from veca.probe.data import check_data, parse_options
from veca.probe.load import load_backbones, parse_budgets, parse_precisions, probe_budgets
from veca.probe.protocol import TASKS, Protocol, available_protocols, load_protocol
from veca.probe.record import (
    Row,
    Run,
    check_out,
    find_runs,
    read_run,
    repeat_command,
    run_folder,
)
from veca.probe.report import write_report
from veca.probe.run import planned_subject, run_probe
from veca.probe.table import write_tables

__all__ = [
    "TASKS",
    "Backbone",
    "BlindBackbone",
    "DenseBackbone",
    "ElasticBackbone",
    "Features",
    "ProbeError",
    "Protocol",
    "Row",
    "Run",
    "TeacherBackbone",
    "as_backbone",
    "available_protocols",
    "check_data",
    "check_out",
    "find_runs",
    "load_backbones",
    "load_protocol",
    "parse_budgets",
    "parse_options",
    "parse_precisions",
    "planned_subject",
    "probe_budgets",
    "read_run",
    "repeat_command",
    "run_folder",
    "run_probe",
    "write_report",
    "write_tables",
]

__getattr__ = moved(__name__, {"VecaBackbone": "ElasticBackbone"})
