"""What every benchmark shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import bench
from paceline.cli.bench import modes, overhead
from paceline.cli.bench.base import BenchOptions, BenchReport, Goal, graphics_cards, machine, summary
from paceline.cli.bench.trajectories import load_turns, spread
from paceline_engine.errors import InvalidValueError


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


def test_the_table_says_what_belongs_to_a_figure_in_100_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bandwidth beside the machine's, drafts accepted, divergence and agreement stand in the figure's row."""
    monkeypatch.setenv("COLUMNS", "100")
    read = {"unit": "bytes per token", "value": 268e6, "gb_per_s": 8.25, "machine_gb_per_s": 16.0}
    drafts = summary([1.0, 2.0], "ms") | {"drafted": 200, "acceptance": 0.815}
    quality = {"unit": "times bf16's perplexity", "value": 1.02, "kl_nats": 0.0311, "top1_agreement": 0.92}
    results = {"int8_weights_read": read, "bf16+int4x4_tpot_stream": drafts, "int4_quality": quality}
    bench._print_table(BenchReport(name="modes", runs=2, results=results))
    text = capsys.readouterr().out
    assert all(len(line) <= 100 for line in text.splitlines())
    plain = " ".join(text.replace("│", " ").split())
    for said in ("8.2 of 16.0 GB/s", "of 200 drafts accepted", "KL 0.0311", "top-1 92.0%"):
        assert said in plain


@pytest.mark.parametrize(
    "line", ['{"messages": 3}', '{"messages": ["hi"]}', '{"messages": [{"content": "x"}]}', "[1]", "{"]
)
def test_data_of_another_form_names_the_line(tmp_path: Path, line: str) -> None:
    """Whatever is wrong in it, the error says where, and what a line should be."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"messages": [{"role": "user"}, {"role": "assistant"}]}\n' + line)
    with pytest.raises(InvalidValueError, match=r"'messages'.*line 2"):
        load_turns(path)


def test_an_assistant_s_first_word_is_no_turn(tmp_path: Path) -> None:
    """Before it there is nothing that a model could have seen."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"messages": [{"role": "assistant"}, {"role": "user"}, {"role": "assistant"}]}')
    assert [len(turn.messages) for turn in load_turns(path)] == [2]


def test_modes_reads_its_data_before_anything_else(tmp_path: Path) -> None:
    """A file that cannot be used is told at once: no model is loaded for it."""
    options = BenchOptions(model="no such model", data=tmp_path / "absent", quick=True)
    with pytest.raises(InvalidValueError, match="data must be"):
        modes.measure(options)


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
