"""A hub on this machine, and the smallest vision models of `transformers`."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
COMMIT = "c" * 40


class FakeHub:
    """Serves folders as model repositories, the way the Hugging Face hub does."""

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def answer(self, with_body: bool) -> None:
                path = self.path.partition("?")[0]
                hub.requests.append(path)
                code, headers, body = hub.reply(path)
                self.send_response(code)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reply(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo = "/".join(parts[:2])
        folder = self.repositories.get(repo)
        if folder is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        files = {p.name: p.read_bytes() for p in sorted(folder.iterdir())}
        if path.startswith("/api/models"):
            if "revision" in parts and parts[-1] not in ("main", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            listing: object = {"id": repo, "sha": COMMIT}
            listing["siblings"] = [{"rfilename": name} for name in files]
            if "tree" in parts:
                listing = [
                    {"type": "file", "path": name, "size": len(data), "oid": f"{hash(data):x}"}
                    for name, data in files.items()
                ]
            return 200, {"Content-Type": "application/json"}, json.dumps(listing).encode()
        if repo in self.gated:
            return 401, {"X-Error-Code": "GatedRepo"}, b"{}"
        data = files.get(parts[-1])
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{hash(data):x}"', "X-Repo-Commit": COMMIT}, data

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fetched(self) -> set[str]:
        """The names of the files that were asked for."""
        return {path.rsplit("/", 1)[1] for path in self.requests if "/resolve/" in path}


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    hub = FakeHub()
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield hub
    hub.close()


@pytest.fixture
def save(tmp_path: Path) -> Callable[[nn.Module], Path]:
    """Stir a model's weights, write it as a user would have it, and return the folder."""

    def write(model: nn.Module, name: str = "model") -> Path:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.eval().save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def dinov3(save: Callable[[nn.Module], Path]) -> tuple[nn.Module, Path]:
    transformers = pytest.importorskip("transformers")
    config = transformers.DINOv3ViTConfig(num_register_tokens=4, patch_size=16, **SMALL)
    model = transformers.DINOv3ViTModel(config)
    return model, save(model)
