"""What every benchmark shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import bench
from paceline.cli.bench import overhead
from paceline.cli.bench.base import BenchReport, Goal, graphics_cards, machine, summary
from paceline.cli.bench.trajectories import load_turns, spread


def report(*, met: bool) -> BenchReport:
    goal = Goal(name="delay", value=1.0 if met else 3.0, goal=2.0, better="lower")
    return BenchReport(
        name="overhead", runs=3, results={"delay": summary([1.0, 3.0, 2.0], "ms")}, goals=(goal,)
    )


@pytest.mark.parametrize(("met", "check", "status"), [(True, True, 0), (False, True, 1), (False, False, 0)])
def test_check_fails_where_a_goal_is_missed(
    met: bool, check: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 1 only with ``--check``; standard output is the object alone."""
    monkeypatch.setattr(overhead, "measure", lambda options: report(met=met))
    found = bench.run("overhead", model="m", data=None, quick=False, check=check, as_json=True)
    printed = capsys.readouterr()
    assert found == status
    said = json.loads(printed.out)
    assert {"name", "machine", "versions", "runs", "results", "goals"} <= set(said)
    assert said["results"]["delay"] == {"unit": "ms", "minimum": 1.0, "median": 2.0, "maximum": 3.0, "n": 3}
    assert said["goals"][0]["met"] is met
    assert ("goal missed: delay is 3" in printed.err) is not met


@pytest.mark.parametrize(("status", "cards"), [(0, ["NVIDIA H200", "NVIDIA L4"]), (9, [])])
def test_graphics_cards_are_named_where_their_driver_tells_them(
    status: int, cards: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One a line of the driver's tool; none where it fails or is not there."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho NVIDIA H200\necho NVIDIA L4\nexit {status}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert graphics_cards() == cards
    assert machine().get("graphics_cards", []) == cards
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert graphics_cards() == []


def test_the_table_shows_figures_of_one_value_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A figure without runs stands where the medians of the others do."""
    results = {"delay": summary([1.0, 3.0, 2.0], "ms"), "bytes": {"unit": "bytes per token", "value": 1234}}
    bench._print_table(BenchReport(name="modes", runs=3, results=results))
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "bytes" in line]
    assert "1234" in row


def test_a_goal_is_met_on_its_own_side() -> None:
    """Lower and higher goals hold at their limit."""
    assert Goal(name="a", value=2.0, goal=2.0, better="lower").met
    assert Goal(name="a", value=2.0, goal=2.0, better="higher").met
    assert not Goal(name="a", value=2.1, goal=2.0, better="lower").met
    assert not Goal(name="a", value=1.9, goal=2.0, better="higher").met


def test_the_excerpt_that_ships_has_turns_to_replay() -> None:
    """Each turn is what the model saw before an assistant message."""
    turns = load_turns(None)
    assert len(turns) > 20
    assert all(turn.messages and turn.messages[-1]["role"] in ("user", "tool") for turn in turns)
    assert [each.conversation for each in spread(turns, 4)] == sorted(
        each.conversation for each in spread(turns, 4)
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "a readable file"),
        (b"\xff\xfe", "a readable file"),
        (b"not json\n", "line 1"),
        (b'{"messages": []}\n[]\n', "line 2"),
        (b'{"messages": [{"role": "user", "content": "hi"}]}\n', "assistant messages"),
    ],
)
def test_data_that_cannot_be_read_is_one_plain_line(
    refused, tmp_path: Path, content: bytes | None, said: str
) -> None:
    """The line says what is wrong with the file, before anything is loaded."""
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    line = refused("bench", "overhead", "--data", str(path))
    assert said in line
    assert "data must be" in line
