"""A run as it is kept: rows, protocol, data, backbones, machine and versions, in plain JSON."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veca._util.files import atomic_write_json, read_json
from veca.errors import ProbeError
from veca.probe.intervals import Interval
from veca.probe.metrics import HIGHER_IS_BETTER, PRIMARY
from veca.weights.names import public_name

FORMAT, FORMAT_VERSION = "veca-probe", 1
RESULTS = "results.json"


@dataclass(frozen=True)
class Row:
    """One backbone at one budget and size. None where there is nothing to say."""

    name: str
    role: str
    """"student", "teacher" or "baseline"."""
    cores: int | None
    size: int
    """Side (classification) or short side of what is seen, in pixels; 0: the images' own."""
    input: tuple[int, int]
    """(height, width) of one forward pass, before the backbone's own resizing."""
    grid: tuple[int, int]
    """Feature grid of it."""
    metrics: dict[str, float]
    """In 0..1, or metres."""
    retention_teacher: float | None
    """Share of the teacher's score that is kept; of errors, the teacher's over this one's."""
    retention_full: float | None
    """The same against the full budget."""
    interactions: int | None
    """Query-key pairs in one layer's attention."""
    flops: int | None
    ms: float | None
    """Median of one image, measured."""
    spread_ms: float | None
    details: dict[str, Any] = field(default_factory=dict)
    interval: Interval | None = None
    """(low, high), 95 %, of the first score; None where it is not known, as in older records."""
    interval_teacher: Interval | None = None
    """The same of what is kept of the teacher's score."""
    interval_full: Interval | None = None
    """The same of what is kept of the full budget's."""
    keep: float | str | None = None
    """The share of patch tokens that went on, or "auto"; None and 1: all."""
    agreement: float | None = None
    """What "auto" promised."""
    precision: str | None = None
    """What it computed in, where a run has several; None: what the protocol says."""

    @property
    def label(self) -> str:
        return label_of(self.name, self.cores, self.keep, self.agreement, self.precision)

    @property
    def merges(self) -> bool:
        return self.keep not in (None, 1)

    @property
    def share(self) -> float | None:
        """`keep` where it is a number; all of them are 1."""
        if isinstance(self.keep, str):
            return None
        return 1.0 if self.keep is None else self.keep


@dataclass(frozen=True)
class Run:
    """What a probe measured, and with what."""

    task: str
    dataset: dict[str, Any]
    """Names, splits, numbers of images and fingerprints; no paths."""
    protocol: dict[str, Any]
    """Every constant that was used."""
    backbones: dict[str, dict[str, Any]]
    """By name: what each is, and the hash of its weights."""
    rows: list[Row]
    notes: list[str]
    """What a reader of the scores should know."""
    seconds: dict[str, float]
    """Spent on "features" and in all ("total")."""
    cache: dict[str, int]
    """Images decoded, and parts of the feature cache computed, reused and found damaged."""
    machine: dict[str, Any]
    """Where, when and with which versions."""
    command: str = ""
    """What repeats it."""
    resampling: dict[str, Any] = field(default_factory=dict)
    """How the intervals were drawn; see `Resampling.describe`. Empty where there are none."""

    @property
    def metric(self) -> str:
        """The name of the score that comes first: top1, miou or rmse."""
        return PRIMARY[self.task]

    @property
    def higher_is_better(self) -> bool:
        return HIGHER_IS_BETTER[self.metric]

    def score(self, row: Row) -> float:
        """The first score of a row."""
        return row.metrics[self.metric]

    @property
    def title(self) -> str:
        return f"{self.task} on {self.dataset['name']}, protocol {self.protocol['name']}"

    def to_dict(self) -> dict[str, Any]:
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "metric": self.metric}
        return {**head, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, table: Any, where: str = "the record") -> Run:
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise ProbeError(f"{where} is no result of `veca probe`.")
        if table.get("format_version") != FORMAT_VERSION:
            raise ProbeError(
                f"{where} has format version {table.get('format_version')!r}, this code reads "
                f"{FORMAT_VERSION}; run the probe again."
            )
        try:
            fields = _fields(cls, table)
            fields["rows"] = [_row(row) for row in table["rows"]]
            run = cls(**fields)
            for row in run.rows:
                run.score(row)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ProbeError(f"{where} is not complete ({error}); run the probe again.") from error
        return run

    def subject(self) -> dict[str, Any]:
        """What is measured: two runs with the same subject may replace each other."""
        rows = [(row.label, row.size) for row in self.rows]
        return subject(self.task, self.dataset["name"], self.protocol, rows)


def _fields(kind: type, table: dict[str, Any]) -> dict[str, Any]:
    """What a dataclass is made of; records of before may lack what has a default."""
    without = (dataclasses.MISSING, dataclasses.MISSING)
    return {
        each.name: table[each.name]
        for each in dataclasses.fields(kind)
        if (each.default, each.default_factory) == without or each.name in table
    }


def _row(table: dict[str, Any]) -> Row:
    pairs = ("input", "grid", "interval", "interval_teacher", "interval_full")
    fields = _fields(Row, table)
    fields.update({k: tuple(fields[k]) for k in pairs if fields.get(k) is not None})
    return Row(**fields)


def label_of(
    name: str,
    cores: int | None,
    keep: float | str | None,
    agreement: float | None = None,
    precision: str | None = None,
) -> str:
    """How a row is called: its name, and what of its dials says something."""
    parts = [name] if cores is None else [name, f"C={cores}"]
    if keep not in (None, 1):
        parts.append(f"K={keep}" if agreement is None else f"K={keep} {agreement}")
    if precision is not None:
        parts.append(precision)
    return " ".join(parts)


def subject(
    task: str, dataset: str, protocol: dict[str, Any], rows: Iterable[tuple[str, int]]
) -> dict[str, Any]:
    """See `Run.subject`; from what is known before a run. `rows`: (label, size)."""
    constants = scoring_constants(protocol)
    listed = sorted([label, size] for label, size in rows)
    return {"task": task, "dataset": dataset, "protocol": constants, "rows": listed}


def scoring_constants(protocol: dict[str, Any]) -> dict[str, Any]:
    """A protocol without what no score depends on: the timing, and the batch of the extraction."""
    constants = {k: v for k, v in protocol.items() if k != "timing"}
    constants["extract"] = {k: v for k, v in protocol.get("extract", {}).items() if k != "batch"}
    return constants


def write_run(run: Run, folder: str | Path) -> Path:
    path = Path(folder) / RESULTS
    atomic_write_json(path, run.to_dict())
    return path


def read_run(path: str | Path) -> Run:
    """A `results.json`, or the one in a folder."""
    file = Path(path)
    file = file / RESULTS if file.is_dir() else file
    return Run.from_dict(read_json(file, ProbeError), str(file))


def find_runs(folder: str | Path) -> list[tuple[Path, Run]]:
    """Every run in a folder and below, with its path, in the order of the paths."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ProbeError(f"there is no folder {root}.")
    files = sorted(root.rglob(RESULTS))
    if not files:
        raise ProbeError(f"{root}: no {RESULTS} in it or below; `veca probe` writes them.")
    return [(file, read_run(file)) for file in files]


def check_out(folder: str | Path, planned: dict[str, Any], overwrite: bool = False) -> None:
    """Refuse to replace the results of another measurement, before anything is computed.

    Args:
        planned: the `subject` of what is about to be measured.
    """
    file = Path(folder) / RESULTS
    if overwrite or not file.exists():
        return
    try:
        same = read_run(file).subject() == planned
    except ProbeError:
        same = False
    if not same:
        raise ProbeError(
            f"{file} holds another run; choose another --out, or replace it with --overwrite."
        )


def run_folder(
    task: str, dataset: str, out: str | Path | None = None, *, several: bool = False
) -> Path:
    """Where a run is kept: `out`, or one folder in it for each of several tasks.

    By default runs/probe/TASK-DATASET.
    """
    if out is not None and not several:
        return Path(out)
    return Path(out or "runs/probe") / f"{task}-{dataset}"


def repeat_command(task: str, options: Mapping[str, Any]) -> str:
    """The `veca probe` that repeats a run; paths are shortened to their last part, to be published.

    Args:
        options: values by the name of the option: text, a path, a list of such, True for one
            without a value, None for one that is not given.
    """
    words = ["veca", "probe", task]
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one is True:
                words.append(f"--{name}")
            elif one is not None:
                text = Path(one).name if isinstance(one, Path) else public_name(str(one))
                words += [f"--{name}", text]
    return shlex.join(words)
