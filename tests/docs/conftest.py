"""What a reader of the documents has at hand: the repository, and a model that answers without one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import paceline.client
from paceline.testing import Reply, ScriptedBackend

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root() -> Path:
    """The top folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for all that runs the real model: its weights are converted once, which is slow."""
    return tmp_path_factory.mktemp("model-cache")


def reply(request: object) -> Reply:
    """A choice takes the first option, a schema is that of the README, anything else gets one sentence."""
    if options := getattr(request, "options", None):
        return Reply(options[0])
    if getattr(request, "grammar", None) is not None:
        return Reply('{"code":"A7","late":true}')
    return Reply("Your parcel A7 is on its way and due on Friday.")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedBackend]:
    """Clients that name no backend get a scripted one, which is quick; gives those that were made."""
    made: list[ScriptedBackend] = []

    def backend(model: str, options: object) -> ScriptedBackend:
        made.append(ScriptedBackend(reply, prefill_ms=2, tpot_ms=0.2))
        return made[-1]

    monkeypatch.setattr(paceline.client, "_embedded", backend)
    return made


class Collector:
    """Takes spans over OTLP/HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector on a port of its own."""
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()
