"""Runs the command line as people do: a process of its own, and what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from paceline.cli.main import main; main()"


@pytest.fixture
def run() -> Run:
    """``paceline ARGUMENTS`` in a process; ``without_torch`` for an install without the engine extra."""

    def call(*arguments: str, without_torch: bool = False, **environment: str) -> Any:
        start = ("-c", WITHOUT_TORCH) if without_torch else ("-m", "paceline.cli.main")
        return subprocess.run(
            [sys.executable, *start, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
        )

    return call


@pytest.fixture
def real(run: Run) -> Callable[..., dict[str, Any]]:
    """The one JSON object that a command prints on the real model, without a calibration."""

    def call(*arguments: str) -> dict[str, Any]:
        done = run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return call


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """The one plain line that a command says where it refuses, with exit status 2."""

    def call(*arguments: str, without_torch: bool = False) -> str:
        done = run(*arguments, without_torch=without_torch)
        assert done.returncode == 2, (done.returncode, done.stderr)
        assert done.stdout == ""
        said = [line for line in done.stderr.splitlines() if line.startswith("paceline: ")]
        assert len(said) == 1
        assert done.stderr.rstrip().endswith(said[0])
        assert "Traceback" not in done.stderr
        return said[0]

    return call


@pytest.fixture
def missing(tmp_path: Path) -> str:
    """A path at which there is nothing."""
    return str(tmp_path / "none.gguf")
