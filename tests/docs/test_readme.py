"""The documents hold: their code runs, and what they name is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

import paceline
from paceline.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("examples/*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
COMMAND = re.compile(r"`(paceline(?: [^`\n]+)?)`|^(paceline .+)$", re.MULTILINE)
MAKE = re.compile(r"`make ([a-z]+)|^make ([a-z]+)$", re.MULTILINE)


def blocks() -> list[object]:
    found = []
    for page, name in zip(PAGES, NAMES, strict=True):
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            found.append(pytest.param(match[1], line, name, id=f"{name}:{line}"))
    return found


@pytest.mark.parametrize(("code", "line", "name"), blocks())
def test_every_python_block_runs(code, line, name, scripted, collector, monkeypatch, capsys):
    """A reader who pastes a block of a page gets no error."""
    code = re.sub(r"http://localhost:43\d\d", collector.endpoint, code)
    exec(compile("\n" * (line - 1) + code, name, "exec"), {"__name__": "__main__"})
    assert paceline.current_turn() is None
    if "configure(" in code:
        assert any(b"paceline.prefill" in body for body in collector.bodies)


@pytest.mark.real
def test_the_first_block_runs_on_the_default_model(monkeypatch, capsys, model_cache):
    """The first code of the README streams an answer of the real model and prints its report."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = BLOCK.search(text)[1]  # type: ignore[index]
    assert "paceline.AsyncClient()" in code
    # A guess instead of a calibration, which takes a minute and says nothing more here.
    code = code.replace("paceline.AsyncClient()", 'paceline.AsyncClient(profile="assume")')
    monkeypatch.setenv("PACELINE_CACHE", str(model_cache))
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    shown = capsys.readouterr().out
    assert "turn 'support'" in shown
    assert "generation 1 (chat)" in shown
    assert re.search(r"[1-9]\d* out, ended: (length|stop)", shown)


@pytest.mark.parametrize("name", NAMES)
def test_every_link_to_a_file_leads_somewhere(name):
    """A relative link of a page points to a file of the repository."""
    page = ROOT / name
    targets = [each for each in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in each]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_every_command_and_option_exists(name):
    """``paceline`` knows each command of a page, with the options that the page gives it."""
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group) or hasattr(command, "commands")
    for match in COMMAND.finditer((ROOT / name).read_text(encoding="utf-8")):
        words = shlex.split((match[1] or match[2]).partition("#")[0])[1:]
        if not words or not re.fullmatch(r"[a-z-]+", words[0]):
            continue
        known = command.commands  # type: ignore[attr-defined]
        assert words[0] in known, match[0]
        options = {text for parameter in known[words[0]].params for text in parameter.opts} | {"--help"}
        unknown = [word for word in words[1:] if word.startswith("--") and word not in options]
        assert not unknown, match[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_make_target_exists(name):
    """``make`` knows each target that a page tells to run."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {one or other for one, other in MAKE.findall((ROOT / name).read_text(encoding="utf-8"))}
    assert named <= targets


def test_every_public_name_of_the_readme_exists():
    """``paceline.X`` and the parameters of an SLO that the README names are there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    # ``paceline.slo.met`` and its like are attributes of traces.
    for name in set(re.findall(r"\bpaceline\.([A-Za-z_]\w*)(?!\.(?:met|blame))\b", text)):
        assert name in paceline.__all__, name


def test_every_extra_of_the_readme_exists():
    """The table of extras lists those of the package, and no others."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("| extra |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(project["optional-dependencies"])


def test_the_demo_output_of_the_readme_is_one_of_the_demo():
    """The excerpt has the parts that a report prints today, in their order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.split("<!-- demo -->")[1].split("```")[1]
    parts = [
        "customer: ",
        "agent calls: ",
        "tool: ",
        "agent: ",
        "turn 'airline_agent': ",
        "  ttft ",
        "  tpot ",
    ]
    parts += ["  e2e ", "1 prefill", "tool ", "2 prefill", "2 decode", "generation 1 (choose)", "decision: "]
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)
    assert max(map(len, shown.splitlines())) <= 100 + 40  # the headline carries a trace id


def test_the_readme_and_the_changelog_are_for_this_version():
    """The newest section of the changelog below Unreleased is the package's version."""
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    sections = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert sections[1] == version
