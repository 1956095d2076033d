"""Facts about the machine."""

from __future__ import annotations

import json
from pathlib import Path


def test_info_tells_what_decides_the_speed(run, tmp_path: Path) -> None:
    """One object with the machine, the versions, the engine and what is kept."""
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "one.json").write_text("{}")
    facts = json.loads(run("info", "--json", PACELINE_CACHE=str(tmp_path)).stdout)
    assert facts["machine"]["cores"] >= 1
    assert facts["machine"]["memory_gb_per_s"] > 0
    assert "torch" in facts["versions"]
    assert facts["engine"]["kernels"]
    assert facts["engine"]["path"].endswith(".gguf")
    assert facts["cache"]["folder"] == str(tmp_path)
    assert facts["cache"]["profiles"] == "1 file, 0.0 MB"


def test_info_works_without_the_engine_extra(run) -> None:
    """Then it says what to install."""
    done = run("info", without_torch=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'paceline[engine]'" in done.stdout


def test_info_tells_of_a_model_that_is_not_there(run, missing: str) -> None:
    """The other facts are shown all the same."""
    facts = json.loads(run("info", "--json", "--model", missing).stdout)
    assert missing in facts["engine"]["path"]
    assert facts["machine"]["cores"] >= 1
