"""Commands and options, up to where work would begin."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from paceline.cli.bench import NAMES
from paceline.cli.main import DEFAULT_MODEL
from paceline.client import DEFAULT_MODEL as CLIENT_MODEL

COMMANDS = ("demo", "plan", "bench", "info")


def test_help_names_every_command(run) -> None:
    """``--help``, and no arguments at all, list the commands."""
    for arguments in (("--help",), ()):
        done = run(*arguments)
        assert done.returncode == 0
        assert done.stdout.startswith("Usage: paceline ")
        assert all(f"\n  {command} " in done.stdout for command in COMMANDS)


def test_help_imports_neither_rich_nor_an_engine() -> None:
    """The help comes without what is slow to import."""
    code = (
        "import sys; from paceline.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print([n for n in ('rich', 'numpy', 'torch', 'asyncio') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(run, command: str) -> None:
    """A command's help names its options."""
    done = run(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: paceline {command} ")
    assert "--model" in done.stdout
    assert "--json" in done.stdout


def test_bench_names_its_benchmarks(run) -> None:
    """What ``paceline bench`` takes stands in its help."""
    said = run("bench", "--help").stdout
    assert all(f"'{name}'" in said for name in NAMES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing",), "No such command 'nothing'"),
        (("demo", "--fast"), "No such option: --fast"),
        (("demo", "--max-tokens", "many"), "Invalid value for '--max-tokens'"),
        (("demo", "--slo", "soon"), "slo must be"),
        (("demo", "--on-infeasible", "panic"), "on_infeasible must be"),
        (("demo", "--profile", "none"), "profile must be"),
        (("plan",), "Missing argument 'prompt'"),
        (("plan", "hi", "--slo", "TTFT<-1ms"), "must be"),
        (("bench",), "Missing argument 'name'"),
        (("bench", "everything"), "name must be one of"),
        (("info", "--json", "more"), "unexpected extra argument"),
    ],
)
def test_a_bad_option_is_one_plain_line(
    refused: Callable[..., str], arguments: tuple[str, ...], said: str
) -> None:
    """What is wrong is said in one line, with exit status 2."""
    assert said in refused(*arguments)


@pytest.mark.parametrize("command", [("demo",), ("plan", "hi"), ("bench", "overhead")])
def test_without_the_engine_extra_a_command_names_it(
    refused: Callable[..., str], command: tuple[str, ...]
) -> None:
    """Where torch is not installed, the line says what to install."""
    assert "pip install 'paceline[engine]'" in refused(*command, without_torch=True)


@pytest.mark.parametrize("command", [("demo",), ("plan", "hi")])
def test_a_model_that_is_not_there_is_one_plain_line(
    refused: Callable[..., str], command: tuple[str, ...], missing: str
) -> None:
    """The line names the path."""
    assert missing in refused(*command, "--model", missing)


def test_a_closed_pipe_is_no_error() -> None:
    """A reader that leaves early gets no traceback."""
    done = subprocess.run(
        f"{sys.executable} -m paceline.cli.main --help | true",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""


def test_the_default_model_is_the_clients() -> None:
    """The command line, which imports no client for its help, opens the same model."""
    assert DEFAULT_MODEL == CLIENT_MODEL
