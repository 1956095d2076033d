"""Facts about the machine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import paceline
from paceline.cli import info
from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.mode import Variant


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
    assert list(facts["variants"]) == ["bf16", "fp8", "int8", "int4"]
    sizes = [row["bytes_per_token"] for row in facts["variants"].values()]
    assert sizes == sorted(sizes, reverse=True)
    assert all(row["use"] and row["converted"] is False for row in facts["variants"].values())
    assert facts["cache"]["folder"] == str(tmp_path)
    assert facts["cache"]["profiles"] == "1 file, 0.0 kB"


def test_info_shows_the_quality_that_was_measured_here(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from the saved profile of these weights; a precision that was not measured has none."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))

    async def calibrate() -> None:
        config = EmbeddedConfig(model=str(tiny_folder), variants=(Variant.BF16, Variant.INT4), host="thread")
        async with paceline.AsyncClient(backend=EmbeddedBackend(config), profile="quick"):
            pass

    asyncio.run(calibrate())
    rows = info.facts_of(str(tiny_folder))["variants"]
    assert rows["bf16"]["quality"]["perplexity_ratio"] == 1.0
    assert rows["int4"]["quality"]["kl_nats"] > 0
    assert rows["int4"]["decode_ms"] > 0
    assert rows["int4"]["converted"] is True
    assert "quality" not in rows["int8"]


def test_info_works_without_the_engine_extra(run) -> None:
    """Then it says what to install."""
    done = run("info", without_torch=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'paceline[engine]'" in done.stdout
    assert "[" not in next(line for line in done.stdout.splitlines() if "instruction_sets" in line)


def test_info_tells_of_a_model_that_is_not_there(run, missing: str) -> None:
    """The other facts are shown all the same."""
    facts = json.loads(run("info", "--json", "--model", missing).stdout)
    assert missing in facts["engine"]["path"]
    assert facts["machine"]["cores"] >= 1
