"""Every example runs: on a scripted backend, and two of them on the real model from the command line."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import paceline
import paceline.tracing
from paceline.testing import Reply, ScriptedBackend
from paceline_engine.mode import Variant

EXAMPLES = Path(__file__).parents[2] / "examples"

WITHOUT_CALIBRATION = """
import runpy, sys
from paceline import client, sync
for kind in (client.AsyncClient, sync.Client):
    kind.__init__.__kwdefaults__["profile"] = "assume"
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""A calibration takes a minute; a guess is enough to see an example run."""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play(name: str, script: object, **options: object) -> ScriptedBackend:
    """Run an example's ``run`` on a client of its kind."""
    module = load(name)
    backend = ScriptedBackend(script, **options)

    async def on_async_client() -> None:
        async with paceline.AsyncClient(backend=backend) as client:
            await module.run(client)

    if inspect.iscoroutinefunction(module.run):
        asyncio.run(on_async_client())
    else:
        with paceline.Client(backend=backend) as client:
            module.run(client)
    return backend


def test_every_example_is_listed_and_tested():
    """The table of the folder's README names each script, and each has a test here."""
    listed = set(re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.stem for path in EXAMPLES.glob("*.py")}
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{name}"' in source for name in listed)


def test_agent_loop_calls_the_tool_that_was_chosen(capsys):
    """The loop warms the policy, calls the chosen tool and answers from what it found."""
    script = ["", "track", "Your parcel is due on Friday."]
    backend = play("agent_loop", script, prefill_ms=2, tpot_ms=0.2)
    shown = capsys.readouterr().out
    assert shown.startswith("Your parcel is due on Friday.")
    assert "tool track" in shown
    assert "Parcel A7 is in Oslo" in str(backend.received[-1].request.prompt.messages)


def test_hard_deadline_keeps_the_text_so_far(capsys):
    """A story that would take a minute is cut off at the deadline, with its beginning shown."""
    play("hard_deadline", Reply("once upon a time " * 100), prefill_ms=2, tpot_ms=150)
    shown = capsys.readouterr().out
    assert shown.startswith("once upon")
    assert re.search(r"cut off after \d+ ms: \d+ characters, finish reason 'budget'", shown)


def test_classify_labels_each_inquiry(capsys):
    """Each inquiry gets the label that the model finds likeliest, without one token decoded."""
    backend = play("classify", ["billing", "delivery", "technical"], prefill_ms=2)
    labels = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert labels == ["billing", "delivery", "technical"]
    assert all(hasattr(received.request, "options") for received in backend.received)


def test_threads_ask_at_once(capsys):
    """Three threads share the client, and each gets a report of its own."""
    backend = play("threads", Reply("a b c"), prefill_ms=2, tpot_ms=0.2)
    lines = capsys.readouterr().out.splitlines()
    things = [line.split("?")[0] for line in lines]
    assert things == ["What is a parcel", "What is a customs form", "What is a tracking number"]
    assert len(backend.received) == 3


def test_ask_first_is_refused_and_then_shortened(capsys):
    """What cannot fit is refused before it runs, with a remedy; the same asked as shorten runs."""
    speeds = {Variant.BF16: 1.0, Variant.INT4: 0.5}
    backend = play("ask_first", Reply("word " * 300), prefill_ms=20, tpot_ms=20, speeds=speeds)
    shown = capsys.readouterr().out
    assert "feasible: False" in shown
    assert re.search(r"refused; would fit: (raise e2e_ms from 1500|lower max_tokens from 200) to \d+", shown)
    [received] = backend.received
    assert 1 < received.plan.max_tokens < 200
    assert f"shorten: {received.plan.max_tokens} tokens" in shown


def test_tracing_sends_both_turns(capsys, collector):
    """The collector gets a turn that met its budgets and one that did not."""
    with paceline.tracing.configure(endpoint=collector.endpoint, service_name="parcels"):
        play("tracing", Reply("a b c"), prefill_ms=20, tpot_ms=0.2)
    shown = capsys.readouterr().out.splitlines()
    assert ["missed" in line for line in shown] == [False, True]
    sent = b"".join(collector.bodies)
    for line in shown:
        assert bytes.fromhex(line.split()[1].rstrip(":")) in sent


def test_the_example_test_passes():
    """The tests of "test_my_agent" pass as they stand."""
    module = load("test_my_agent")
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) >= 3
    for test in tests:
        test()


@pytest.mark.real
@pytest.mark.parametrize("name", ["classify", "hard_deadline"])
def test_an_example_runs_on_the_default_model(name, model_cache):
    """From the command line, on the real model."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CALIBRATION, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PACELINE_CACHE": str(model_cache)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20
