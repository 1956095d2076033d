"""The map of docs/architecture.md names every module, and none that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("sdk/paceline", "policies/paceline_policies", "engine/paceline_engine")


def mapped() -> set[str]:
    """The paths that the map names."""
    found: set[str] = set()
    folder = ""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## The map")[1]
    for line in text.splitlines():
        if line.startswith("### "):
            folder = line.removeprefix("### ").strip()
        elif match := re.match(r"\| `([\w.]+\.py)` \| \S", line):
            found.add(f"{folder}/{match[1]}")
    return found


def modules() -> set[str]:
    """The paths of all modules; ``__init__.py`` only gathers names."""
    paths = (path for source in SOURCES for path in (ROOT / source).rglob("*.py"))
    return {str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"}


def line_for(name: str) -> str:
    """The line to add, from the module's own docstring."""
    docstring = ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8"))) or "?"
    first = " ".join(docstring.split("\n\n")[0].split()).replace("``", "`").rstrip(".:")
    folder, _, file = name.rpartition("/")
    return f"under ### {folder}:  | `{file}` | {first} |"


def test_every_module_is_mapped():
    """Each module has a line; for one that has none, the message is the line to add."""
    missing = sorted(modules() - mapped())
    assert not missing, "docs/architecture.md lacks:\n" + "\n".join(map(line_for, missing))


def test_the_map_names_nothing_that_is_gone():
    """No line of the map is of a module that does not exist."""
    gone = sorted(mapped() - modules())
    assert not gone, f"docs/architecture.md still names {', '.join(gone)}"


def test_the_files_of_a_turn_s_way_exist():
    """Each file that the drawing of a turn and the hints name is a module of the sources."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## The map")[0]
    known = modules() | {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/*.py")}
    known |= {str(path.relative_to(ROOT)) for path in ROOT.glob("sdk/**/__init__.py")}
    for name in re.findall(r"[\w/]+\.py\b", text):
        tail = name.removeprefix("policies/") if not name.startswith("policies/paceline") else name
        assert any(each == name or each.endswith("/" + tail) for each in known), name
