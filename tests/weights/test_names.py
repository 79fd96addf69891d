"""Names, paths and hub ids: what each one finds, and what is said when nothing is there."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

from veca.errors import InputError, WeightsError
from veca.model import Veca
from veca.weights import (
    available,
    find,
    hub,
    load,
    names,
    read_config,
    read_provenance,
    save,
    weights_hash,
)

NAME = "veca_small_patch16"


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights in the package, in the clone, in the cache or in the working folder."""
    package = tmp_path / "clone" / "src" / "veca"
    package.mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(names, "_PACKAGE", package)
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a test must not reach for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    clone = tmp_path / "clone"
    return [clone / "src" / "veca" / "assets" / "weights", clone / "weights", tmp_path / "cache"]


def test_the_order_of_places(tiny: Veca, tmp_path: Path, places: list[Path]) -> None:
    (tmp_path / "clone" / "pyproject.toml").touch()
    assert find("small") is None
    assert available() == []
    for place in reversed(places):
        save(tiny, place / NAME, provenance={"place": str(place)})
        assert find("small") == find(NAME) == place / NAME
        assert available() == [NAME]
        assert read_provenance("small")["place"] == str(place)
    assert torch.equal(load("small").norm.bias, tiny.norm.bias)
    assert read_config(NAME) == tiny.config
    assert weights_hash("small") == weights_hash(tiny)


def test_a_clone_is_known_by_its_pyproject(tiny: Veca, tmp_path: Path) -> None:
    save(tiny, tmp_path / "clone" / "weights" / NAME)
    assert find(NAME) is None


def test_an_installed_package_finds_the_clone_it_is_used_in(
    tiny: Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "clone"
    monkeypatch.setattr(names, "_PACKAGE", tmp_path / "site-packages" / "veca")
    save(tiny, clone / "weights" / NAME)
    (clone / "pyproject.toml").touch()
    assert find("small") is None
    monkeypatch.chdir(clone)
    assert find("small") == clone / "weights" / NAME
    deep = clone / "docs" / "images"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert find("small") == clone / "weights" / NAME
    (clone / "pyproject.toml").unlink()  # some folder with weights in it
    assert find("small") is None


@pytest.mark.parametrize("name", ["small", "base", "smal"])
def test_every_place_that_was_looked_in_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "_PACKAGE", tmp_path / "site-packages" / "veca")
    with pytest.raises(WeightsError) as caught:
        load(name)
    package = tmp_path / "site-packages" / "veca" / "assets" / "weights"
    for place in (package, tmp_path / "work", tmp_path / "cache"):
        assert str(place) in str(caught.value)


def test_other_names(tiny: Veca, places: list[Path]) -> None:
    save(tiny, places[2] / "my-own.v2")
    (places[2] / "empty").mkdir()
    assert available() == ["my-own.v2"]
    assert load("my-own.v2").config == tiny.config
    with pytest.raises(WeightsError, match=r"'my-own\.v2'"):
        load("my-own.v3")


@pytest.mark.parametrize("name", ["../x", "..", ".hidden", "a/b", "", "x\0", "/etc", "x" * 5000])
def test_names_lead_nowhere_else(name: str) -> None:
    assert find(name) is None


def test_a_known_name_without_weights(tmp_path: Path) -> None:
    (tmp_path / "clone" / "pyproject.toml").touch()
    with pytest.raises(WeightsError) as caught:
        load("base")
    message = str(caught.value)
    for words in ("assets/weights", "clone/weights", "cache", "create_model"):
        assert words in message
    assert "veca import" in message


def test_an_unknown_name() -> None:
    with pytest.raises(WeightsError, match="'veca_small_patch16'"):
        load("veca_smal_patch16")
    with pytest.raises(WeightsError, match="'small'"):
        load("smal")
    with pytest.raises(WeightsError, match=r"checkpoint\.pt"):
        load("checkpoint.pt")


def test_an_existing_path_wins(tiny: Veca, places: list[Path], tmp_path: Path) -> None:
    save(tiny, places[2] / NAME)
    work = tmp_path / "work"
    (work / NAME).mkdir()
    assert names.locate(NAME) == places[2] / NAME, "a folder without weights does not count"
    save(tiny, work / NAME)
    assert names.locate(NAME) == Path(NAME)
    save(tiny, work / "owner" / "name")
    assert names.locate("owner/name") == Path("owner/name")
    save(tiny, work / "x.safetensors")
    assert load("x.safetensors").config == tiny.config


def test_a_model_knows_what_its_weights_are_called(
    tiny: Veca, places: list[Path], tmp_path: Path
) -> None:
    save(tiny, places[2] / NAME)
    assert load(NAME).name == load("small").name == load(places[2] / NAME).name == NAME
    assert load(places[2] / NAME / "model.safetensors").name == NAME
    save(tiny, tmp_path / "work" / "mine.safetensors")
    assert load("mine.safetensors").name == load(Path("mine.safetensors")).name == "mine"
    save(tiny, tmp_path / "work")
    assert load(".").name == "work"


@pytest.mark.parametrize(
    "source",
    [
        "./small",
        "/no/such",
        "/small",
        "~/no-such-thing",
        "~nobody-of-this-name/x",
        "x.safetensors",
        "a/x.safetensors",
        "a/b/c",
        "a/",
        "../a",
        "a\\b",
        "x\0y",
        "x" * 5000 + "/y/z",
        Path("owner/name"),
        Path("small"),
    ],
)
def test_missing_paths_are_not_sent_to_the_hub(source: Any) -> None:
    with pytest.raises(WeightsError, match="hub id"):
        load(source)


@pytest.mark.parametrize("source", [None, 3, "", b"", ["x"]])
def test_sources_that_name_nothing(source: Any) -> None:
    with pytest.raises(InputError, match=re.escape(repr(source))):
        load(source)


def test_wrong_kinds_of_files(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"PK")
    with pytest.raises(WeightsError, match="import_official"):
        load(tmp_path / "x.pt")
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load(tmp_path)


# ------------------------------------------------------------------------------------- the hub


class Hub:
    """Stands in for the hub's client; says what it was asked."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.trouble: Exception | None = None
        self.commit: str | None = None
        self.calls: list[dict[str, Any]] = []

    def model_info(self, name: str, **options: Any) -> SimpleNamespace:
        self.calls.append({"name": name, **options})
        if self.trouble is not None:
            raise self.trouble
        return SimpleNamespace(sha=self.commit)

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.calls.append({"name": name, **options})
        if self.folder is None:
            raise FileNotFoundError("not in the cache")
        return str(self.folder)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


@pytest.mark.parametrize(
    ("repo", "revision"),
    [("owner/name", None), ("owner/name@v1.0", "v1.0"), ("owner/name@refs/pr/1", "refs/pr/1")],
)
def test_download(fake: Hub, tiny: Veca, tmp_path: Path, repo: str, revision: Any) -> None:
    fake.folder = save(tiny, tmp_path / "snapshot")
    model = load(repo)
    assert model.config == tiny.config and model.name == repo
    asked, fetched = fake.calls
    assert asked["name"] == fetched["name"] == "owner/name"
    assert asked["revision"] == fetched["revision"] == revision
    assert 0 < asked["timeout"] <= 10
    assert 0 < fetched["etag_timeout"] <= 10
    assert fetched["allow_patterns"] == [
        "model.safetensors", "config.json", "provenance.json", "targets.safetensors",
        "heads.safetensors", "calibration.json",
    ]  # fmt: skip
    assert fetched["local_files_only"] is False


def test_a_revision_beside_the_name(fake: Hub, tiny: Veca, tmp_path: Path) -> None:
    fake.folder = save(tiny, tmp_path / "snapshot")
    assert load("owner/name", revision="v1.0").name == "owner/name@v1.0"
    assert fake.calls[-1]["revision"] == "v1.0"
    for source in ("owner/name@v2", "small", tmp_path / "snapshot"):
        with pytest.raises(WeightsError, match="revision"):
            load(source, revision="v1.0")


def test_a_pinned_commit_is_what_comes_or_nothing(fake: Hub, tiny: Veca, tmp_path: Path) -> None:
    fake.folder = save(tiny, tmp_path / "snapshot")
    pinned = "0123456789" * 4
    fake.commit = pinned
    assert load(f"owner/name@{pinned}").config == tiny.config
    fake.calls.clear()
    fake.commit = "f" * 40
    with pytest.raises(WeightsError, match="commit"):
        load("owner/name", revision=pinned)
    assert len(fake.calls) == 1, "nothing is fetched"
    assert load("owner/name@main").config == tiny.config, "a branch moves"


def test_a_folder_that_shadows_other_weights_is_said(
    tiny: Veca, places: list[Path], real_client: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tiny, places[0] / NAME)
    for name in ("small", "owner/name", "runs/first"):
        save(tiny, Path(name))
    (real_client / "models--owner--name").mkdir(parents=True)
    for name in ("small", "owner/name", "runs/first", Path("small").resolve(), NAME, "small"):
        load(name)
    first, second = (record.getMessage() for record in caplog.records)
    assert str(Path("small").resolve()) in first and str(places[0] / NAME) in first
    assert str(Path("owner/name").resolve()) in second and "hub" in second
    assert "\n" not in first + second


def test_looking_without_tensors(fake: Hub, tiny: Veca, tmp_path: Path) -> None:
    fake.folder = save(tiny, tmp_path / "snapshot", provenance={"teacher": "t"})
    (fake.folder / "model.safetensors").unlink()
    assert read_config("owner/name") == tiny.config
    assert fake.calls[-1]["allow_patterns"] == ["config.json"]
    assert read_provenance("owner/name")["teacher"] == "t"
    assert fake.calls[-1]["allow_patterns"] == ["config.json", "provenance.json"]
    (fake.folder / "provenance.json").unlink()
    assert read_provenance("owner/name") == {}


def test_named_weights_on_the_hub(
    fake: Hub, tiny: Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.folder = save(tiny, tmp_path / "snapshot")
    monkeypatch.setitem(names.NAMED, NAME, "owner/name@v1")
    model = load("small")
    assert model.config == tiny.config and model.name == NAME
    assert fake.calls[-1]["revision"] == "v1"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionError("Name or service not known\nmore"), "ConnectionError"),
        (TimeoutError("timed out"), "TimeoutError"),
        (type("GatedRepoError", (OSError,), {})("x"), "licence"),
        (type("RepositoryNotFoundError", (OSError,), {})("x"), "private"),
        (type("RevisionNotFoundError", (OSError,), {})("x"), "revision"),
        (type("OfflineModeIsEnabled", (OSError,), {})("x"), "HF_HUB_OFFLINE"),
    ],
)
def test_trouble(fake: Hub, tiny: Veca, tmp_path: Path, error: Exception, words: str) -> None:
    fake.trouble = error
    with pytest.raises(WeightsError, match=words) as caught:
        load("owner/name@v9")
    assert "\n" not in str(caught.value)
    assert fake.calls[-1]["local_files_only"] is True
    fake.folder = save(tiny, tmp_path / "snapshot")
    assert load("owner/name@v9").config == tiny.config, "what was fetched earlier still loads"


def test_the_names_of_the_clients_errors() -> None:
    """They are told apart by name; these must exist in the installed client."""
    for name in ("Gated", "RepositoryNotFound", "RevisionNotFound"):
        assert hasattr(huggingface_hub.utils, f"{name}{'Repo' if name == 'Gated' else ''}Error")
    assert hasattr(huggingface_hub.utils, "OfflineModeIsEnabled")


def test_a_repository_without_weights(fake: Hub, tmp_path: Path) -> None:
    fake.folder = tmp_path
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load("owner/name")
    fake.trouble = ConnectionError("no network")
    with pytest.raises(WeightsError, match="ConnectionError"):
        load("owner/name")


@pytest.fixture
def real_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real client with an empty cache of its own."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return cache


def test_offline_by_choice(real_client: Path, tiny: Veca, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(WeightsError, match="HF_HUB_OFFLINE"):
        load("owner/name")
    repo = real_client / "models--owner--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    save(tiny, repo / "snapshots" / ("0" * 40))
    assert load("owner/name").config == tiny.config


def test_no_network_at_all(real_client: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(socket.socket, "connect", fail)
    start = time.monotonic()
    with pytest.raises(WeightsError, match="network"):
        load("owner/name")
    assert time.monotonic() - start < 10


@pytest.fixture
def silent_server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_never_answers(
    real_client: Path, silent_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(real_client))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", silent_server)
    monkeypatch.setattr(hub, "TIMEOUT", 0.3)
    start = time.monotonic()
    with pytest.raises(WeightsError, match="network"):
        load("owner/name")
    assert time.monotonic() - start < 8
