"""The Ray engine: the same bytes as on one machine, and a worker that dies changes nothing."""

from __future__ import annotations

import contextlib
import re
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from veca.data import DataError
from veca.embed import read_embeddings
from veca.errors import InputError

ray = pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("ray.data", reason="ray is installed without its data part")
pytest.importorskip("pyarrow")

STORE = 80 * 2**20  # bytes; the least that Ray takes is 75 MiB


@contextlib.contextmanager
def one_at_a_time():
    """Two test processes with a cluster each would be too much for a machine with two CPUs."""
    fcntl = pytest.importorskip("fcntl")
    with (Path(tempfile.gettempdir()) / "veca-test-ray.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def cluster():
    """A head that does no work, and two workers with one CPU each."""
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 0,
        "object_store_memory": STORE,
        "include_dashboard": False,
        # A node that is gone is known in five seconds instead of twenty.
        "_system_config": {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 1000,
            "health_check_timeout_ms": 2000,
            "health_check_failure_threshold": 5,
        },
    }
    with one_at_a_time():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=STORE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes()
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_the_bytes_are_those_of_one_machine_though_a_worker_dies(
    cluster, embed, images, tree, tmp_path
):
    (images / "0" / "bad.png").write_bytes(b"no image")
    options = {"patches": True, "shard_rows": 2, "keep": 0.5}
    embed(images, tmp_path / "local", **options)
    out, node = tmp_path / "ray", cluster.list_all_nodes()[-1]
    killed = threading.Event()

    def kill(done: int, total: int) -> None:
        if done >= total / 4 and not killed.is_set():
            killed.set()
            cluster.remove_node(node, allow_graceful=False)

    report = embed(images, out, engine="ray", workers=2, progress=kill, **options)
    assert killed.is_set()
    assert (report.images, report.computed, report.failed, report.shards) == (30, 30, 1, 16)
    names, _ = read_embeddings(out)
    assert len(names) == len(set(names)) == 30
    assert tree(out) == tree(tmp_path / "local")
    assert embed(images, out, engine="ray", workers=None, **options).computed == 0
    cluster.add_node(num_cpus=1, object_store_memory=STORE)


class FailsOnce:
    """Where a worker finds its device: the first one that looks fails to start."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        fail = f"open({self.mark!r}, 'x') and 1 / 0"
        return eval, (f"'cpu' if __import__('os').path.exists({self.mark!r}) else {fail}",)


@pytest.mark.slow
def test_a_worker_that_fails_to_start_is_replaced(
    cluster, embed, images, tree, tmp_path, monkeypatch
):
    from veca.embed import cluster as engine

    if not hasattr(ray.data.DataContext.get_current(), "max_consecutive_actor_init_deaths"):
        pytest.skip("this version of Ray cannot replace it")
    mark, room = tmp_path / "failed", engine._room
    monkeypatch.setattr(engine, "_room", lambda *args: (FailsOnce(mark), *room(*args)[1:]))
    embed(images, tmp_path / "local")
    embed(images, tmp_path / "ray", engine="ray", workers=1)
    assert mark.exists()
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")
    assert ray.data.DataContext.get_current().max_consecutive_actor_init_deaths == 0  # as before


@pytest.mark.slow
def test_one_engine_goes_on_where_the_other_stopped(cluster, embed, images, tree, tmp_path):
    embed(images, tmp_path / "a")
    embed(images, tmp_path / "b")
    for number in (0, 3):
        (tmp_path / "b" / f"shards/part-{number:06d}.parquet").unlink()
    report = embed(images, tmp_path / "b", engine="ray", workers=None)
    assert (report.computed, report.images) == (8 + 6, 30)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


@pytest.mark.slow
def test_errors_of_workers_are_one_line(cluster, embed, images, tmp_path):
    for i in range(120):
        (images / "1" / f"bad{i:03d}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="100 images") as caught:
        embed(images, tmp_path / "out", engine="ray", workers=None, shard_rows=200)
    assert "\n" not in str(caught.value)


class Unconnected:
    """What stands for Ray before it has a cluster, and remembers which one was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, *, address: str, **settings: object) -> None:
        self.asked.append(address)

    def shutdown(self) -> None:
        self.asked.append("shut down")


def test_which_cluster_it_connects_to(monkeypatch):
    """Without an address a new one: Ray would wait for the last one here, though it is gone."""
    from veca.embed.cluster import _connect

    unconnected = Unconnected()
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        for variable, address in (("", None), ("", there), (there, None), (there, "auto")):
            monkeypatch.setenv("RAY_ADDRESS", variable)
            with contextlib.ExitStack() as stack:
                _connect(unconnected, address, stack)
    asked = ["local", there, there, "auto"]
    assert unconnected.asked == [step for name in asked for step in (name, "shut down")]


def test_a_cluster_that_is_gone(monkeypatch):
    """Ray itself waits for it, five minutes and more."""
    from veca.embed.cluster import _connect

    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = f"127.0.0.1:{server.getsockname()[1]}"
    unconnected = Unconnected()
    with (
        pytest.raises(InputError, match=re.escape(gone)),
        contextlib.ExitStack() as stack,
    ):
        _connect(unconnected, gone, stack)
    monkeypatch.setenv("RAY_ADDRESS", f"ray://{gone}")
    with (
        pytest.raises(InputError, match=re.escape(f"ray://{gone}")),
        contextlib.ExitStack() as stack,
    ):
        _connect(unconnected, None, stack)
    assert not unconnected.asked


def test_a_cluster_that_does_not_start(monkeypatch):
    """Ray raises a bare exception on a busy machine."""
    from veca.embed.cluster import _connect

    def init(**options):
        raise Exception("The current node timed out during startup.\nAnd more.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    unconnected = Unconnected()
    unconnected.init = init
    with (
        pytest.raises(InputError, match=r"this machine.*timed out during startup") as found,
        contextlib.ExitStack() as stack,
    ):
        _connect(unconnected, None, stack)
    assert "\n" not in str(found.value)


@pytest.mark.slow
def test_a_cluster_without_room(cluster, embed, images, tmp_path):
    with pytest.raises(InputError, match="cuda"):
        embed(images, tmp_path / "out", engine="ray", workers=None, device="cuda")
    with pytest.raises(InputError, match="9 CPUs"):
        embed(images, tmp_path / "out", engine="ray", workers=None, threads=9)
