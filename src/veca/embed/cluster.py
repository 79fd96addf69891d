"""A cluster: Ray Data hands shards to model workers, and to others when a worker dies.

A task is a whole shard, and the worker that has it writes the file. A shard's bytes do not depend
on who writes it, and it appears in one step, so a task that is run twice changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from veca import errors
from veca._util.extras import require
from veca._util.threads import batches_at_once
from veca.data.sources import ImageSource
from veca.embed.pca import Reduction
from veca.embed.pipeline import read_ahead
from veca.embed.plan import Plan
from veca.embed.settings import Settings
from veca.embed.shards import compute_for, embed_shards
from veca.embed.writers.parquet import Shard, ShardRecord, shard_path
from veca.errors import DataError, InputError, VecaError
from veca.images.read import MAX_PIXELS_VARIABLE
from veca.model import Veca, create_model
from veca.precision import in_precision

_GPU_CPUS = 4  # of a worker with a GPU: threads that decode
_STARTS_THAT_MAY_FAIL = 5  # of workers in a row, before Ray gives up
_ANSWER_SECONDS = 10.0  # for a cluster to take a connection


def run(
    shards: Sequence[Shard],
    plan: Plan,
    source: ImageSource,
    model: Veca,
    settings: Settings,
    folder: Path,
    reduction: Reduction | None,
    *,
    workers: int | None,
    threads: int | None,
    device: str,
    address: str | None,
    strict: bool,
    on_images: Callable[[int], None],
) -> Iterator[ShardRecord]:
    """Work through `shards` on a cluster; yields each when it is on the disk, in any order."""
    given = {
        "state": {name: tensor.cpu() for name, tensor in model.state_dict().items()},
        "beside": dict(model.beside),
        "settings": settings.to_dict(),
        "reduction": None if reduction is None else reduction.tensors,
        "plan": plan,
        "source": source,
        "folder": str(folder.absolute()),
        "strict": strict,
    }
    rows = spread(
        _Worker,
        given,
        [shard._asdict() for shard in shards],
        purpose="veca embed --engine ray",
        workers=workers,
        threads=threads,
        device=device,
        address=address,
    )
    for row in rows:
        on_images(row["images"])
        failures = [(str(name), str(reason)) for name, reason in json.loads(row["failures"])]
        number = int(row["number"])
        yield ShardRecord(shard_path(folder, number), number, int(row["rows"]), failures)


def spread(
    worker: type,
    given: Mapping[str, Any],
    tasks: Sequence[dict[str, Any]],
    *,
    purpose: str,
    workers: int | None = None,
    threads: int | None = None,
    device: str = "auto",
    address: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Work through tasks on a cluster; yields what a worker made of each, in any order.

    Args:
        worker: a class. One is made in each process of a reference to what is `given`, to which
            "device" and "cpus" are added, and is called with a task at a time. It returns a
            dict; where its "error" is not "", that is a JSON list of an error's class and text.
        purpose: what the library is needed for.
    """
    ray = require("ray", purpose)
    data = require("ray.data", purpose)
    with ExitStack() as stack:
        _connect(ray, address, stack)
        _quiet(data, stack)
        _patient(data, stack)
        place, cpus, room = _room(ray, device, threads)
        work = ray.put({**given, "device": place, "cpus": cpus})
        # One task a block.
        blocks = data.from_items(list(tasks), override_num_blocks=len(tasks))
        results = blocks.map(
            worker,
            fn_constructor_args=(work,),
            compute=data.ActorPoolStrategy(size=min(len(tasks), workers or room)),
            num_cpus=cpus,
            **({"num_gpus": 1} if place == "cuda" else {}),
            **_environment(),
        )
        try:
            for row in results.iter_rows():
                if row["error"]:
                    raise _error(*json.loads(row["error"]))
                yield row
        except ray.exceptions.RayError as error:
            reason = ([line for line in str(error).splitlines() if line.strip()] or ["?"])[-1]
            raise DataError(
                f"Ray gave up ({reason.strip()}); what is done stays, run it again to go on."
            ) from error


class _Worker:
    """Holds the model; each call makes one shard."""

    def __init__(self, work: Any) -> None:
        import ray

        given = ray.get(work)
        self._settings = Settings.from_dict(given["settings"])
        self._plan: Plan = given["plan"]
        self._source: ImageSource = given["source"]
        self._folder = Path(given["folder"])
        self._cpus: int = given["cpus"]
        self._strict: bool = given["strict"]
        device = torch.device(given["device"])
        model = create_model(self._settings.model_config)
        model.load_state_dict(given["state"])
        model.beside = given["beside"]  # with what "auto" goes by
        self._at_once = batches_at_once(device, self._cpus)
        tensors = given["reduction"]
        self._compute = compute_for(
            in_precision(model.eval().to(device), self._settings.precision),
            self._settings,
            None if tensors is None else Reduction(tensors),
        )

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        shard = Shard(**{name: int(row[name]) for name in Shard._fields})
        done = {"number": shard.number, "rows": 0, "failures": "[]", "error": ""}
        try:
            (record,) = embed_shards(
                [shard],
                self._plan,
                self._source,
                self._compute,
                self._settings,
                self._folder,
                # Threads: a Ray worker should not fork.
                decode_ahead=partial(read_ahead, workers=self._cpus, ahead=4 * self._cpus),
                at_once=self._at_once,
                strict=self._strict,
            )
            done |= {"rows": record.rows, "failures": json.dumps(record.failures)}
        except VecaError as error:  # as a row: Ray would bury it under tracebacks and try again
            done["error"] = json.dumps([type(error).__name__, str(error)])
        return {**done, "images": shard.stop - shard.start}


def _connect(ray: Any, address: str | None, stack: ExitStack) -> None:
    """Use the cluster this process is connected to, or connect to one until the end."""
    if ray.is_initialized():
        return
    # "local", since without an address Ray looks for the last cluster that ran on this machine,
    # and waits for minutes if that was killed.
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    here = {"include_dashboard": False} if address == "local" else {}
    try:
        _answers(address)
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False, **here)
    except Exception as error:  # Ray raises a bare one where it did not start in time
        where = "this machine" if here else address
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"no Ray cluster at {where} ({reason}); start one with `ray start --head`, or leave "
            "out the address."
        ) from error
    stack.callback(ray.shutdown)


def _answers(address: str) -> None:
    """OSError where nothing listens at host:port: Ray itself would wait for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()


def _set(data: Any, stack: ExitStack, name: str, value: object) -> None:
    """A setting of Ray Data until the end; one that this version does not know is left out."""
    context = data.DataContext.get_current()
    if hasattr(context, name):
        stack.callback(setattr, context, name, getattr(context, name))
        setattr(context, name, value)


def _patient(data: Any, stack: ExitStack) -> None:
    """A worker that fails to start is replaced, as one that dies at work is."""
    _set(data, stack, "max_consecutive_actor_init_deaths", _STARTS_THAT_MAY_FAIL)


def _quiet(data: Any, stack: ExitStack) -> None:
    """One progress bar is enough, and it is ours."""
    _set(data, stack, "enable_progress_bars", False)
    log = logging.getLogger("ray.data")
    stack.callback(log.setLevel, log.level)
    log.setLevel(logging.ERROR)


def _room(ray: Any, device: str, threads: int | None) -> tuple[str, int, int]:
    """What each worker gets (device, CPUs), and how many workers the cluster has room for."""
    there = ray.cluster_resources()
    gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 0))
    kind = ("cuda" if gpus else "cpu") if device == "auto" else torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise InputError(f"with ray the device is cpu, cuda or auto; got {device!r}.")
    if kind == "cuda":
        share = threads or max(1, min(_GPU_CPUS, cpus // max(1, gpus)))
        room = min(gpus, cpus // share)
    else:
        share = threads or 1
        room = cpus // share
    if room < 1:
        raise InputError(
            f"the Ray cluster has {cpus} CPUs and {gpus} GPUs, and no room for a worker on {kind} "
            f"with {share} CPUs; add machines, or ask for less (--threads, --device)."
        )
    return kind, share, room


def _environment() -> dict[str, Any]:
    """What workers need of this process: its limit of pixels, and where the package is when it is
    run from its source and not installed."""
    found = {name: os.environ[name] for name in (MAX_PIXELS_VARIABLE,) if name in os.environ}
    here = Path(__file__).resolve().parents[2]
    if here not in (Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")):
        paths = [str(here), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return {"runtime_env": {"env_vars": found}} if found else {}


def _error(kind: str, text: str) -> VecaError:
    """The error a worker met."""
    known = getattr(errors, kind, DataError)
    return known(text) if issubclass(known, VecaError) else DataError(text)
