"""A turn as a person finds it in a real Jaeger."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline.tracing
from paceline_policies.slo import SLO

Play = Callable[..., Any]

PORTS = ("OTLP_GRPC", "OTLP_HTTP", "QUERY", "QUERY_GRPC", "HEALTH")


class Jaeger:
    """A running Jaeger with ports of its own."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._ports = ports

    def otlp(self, protocol: str) -> str:
        return f"http://127.0.0.1:{self._ports['OTLP_GRPC' if protocol == 'grpc' else 'OTLP_HTTP']}"

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ports['HEALTH']}/status", timeout=2) as got:
                return bool(got.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def search(self, service: str, **tags: str) -> list[Any]:
        """Traces with these tags; spans are searchable a moment after they came."""
        query = urllib.parse.urlencode(
            {"service": service, "tags": json.dumps(tags), "lookback": "1h", "limit": 20}
        )
        return self.get(f"/api/traces?{query}")

    def get(self, path: str) -> list[Any]:
        url = f"http://127.0.0.1:{self._ports['QUERY']}{path}"
        deadline = time.monotonic() + 20
        while True:
            with urllib.request.urlopen(url, timeout=5) as got:
                found: list[Any] = json.load(got)["data"]
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)


@pytest.fixture(scope="module")
def jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jaeger]:
    """The program that PACELINE_JAEGER names, or ``jaeger`` on PATH."""
    program = os.environ.get("PACELINE_JAEGER") or shutil.which("jaeger")
    if not program or not Path(program).exists():
        pytest.skip("no Jaeger: put `jaeger` on PATH, or its path into PACELINE_JAEGER")
    ports = {name: free_port() for name in PORTS}
    environ = os.environ | {f"JAEGER_{name}_PORT": str(port) for name, port in ports.items()}
    log_path = tmp_path_factory.mktemp("jaeger") / "log"
    with log_path.open("wb") as log:
        process = subprocess.Popen([program], env=environ, stdout=log, stderr=subprocess.STDOUT)
    try:
        running = Jaeger(ports)
        deadline = time.monotonic() + 60
        while not running.ready():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"Jaeger did not start:\n{log_path.read_text()[-2000:]}")
            time.sleep(0.1)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def tags(span: Any) -> dict[str, Any]:
    return {tag["key"]: tag["value"] for tag in span["tags"]}


def children(trace: Any, parent: str) -> list[str]:
    [parent_id] = [span["spanID"] for span in trace["spans"] if span["operationName"] == parent]
    return sorted(
        span["operationName"]
        for span in trace["spans"]
        if any(reference["spanID"] == parent_id for reference in span["references"])
    )


@pytest.mark.usefixtures("fresh_globals")
def test_a_missed_budget_is_found_with_the_phase_to_blame(play: Play, jaeger: Jaeger, protocol: str) -> None:
    """Searching paceline.slo.met=false finds the turn, the budget, the phase and where its time went."""
    service = f"agent-{protocol.partition('/')[0]}"
    with paceline.tracing.configure(jaeger.otlp(protocol), protocol=protocol, service_name=service):
        turn = play(provider=None, name="late").run()
        kept = play(provider=None, name="in time", slo=SLO(ttft_ms=None, tpot_ms=None, e2e_ms=None))
        span = kept.begin()
        span.end(replace(kept.report(), verdicts=()))
    found = jaeger.search(service, **{"paceline.slo.met": "false", "paceline.slo.blame": "prefill"})
    assert [trace["traceID"] for trace in found] == [turn.trace_id]
    [trace] = jaeger.get(f"/api/traces/{turn.trace_id}")
    assert children(trace, "invoke_agent late") == ["chat gemma3-270m", "execute_tool search"]
    assert children(trace, "chat gemma3-270m") == [
        "paceline.decide",
        "paceline.decode",
        "paceline.prefill",
        "paceline.queue",
    ]
    spans = {span["operationName"]: span for span in trace["spans"]}
    root = tags(spans["invoke_agent late"])
    assert root["paceline.slo.missed"] == "ttft,tpot,e2e"
    assert root["paceline.slo.blame"] == "prefill"
    assert root["paceline.slo.ttft.measured_ms"] == 311
    assert spans["paceline.prefill"]["duration"] == pytest.approx(250_000, abs=10)
    [log] = spans["chat gemma3-270m"]["logs"]
    assert log["timestamp"] - spans["chat gemma3-270m"]["startTime"] == pytest.approx(200_000, abs=10)
    assert {"paceline.slo.deadline", "ttft"} <= {field["value"] for field in log["fields"]}
