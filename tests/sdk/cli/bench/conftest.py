"""Conversations to replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Three conversations of two assistant turns each, which begin with the same instructions."""
    path = tmp_path / "conversations.jsonl"
    lines = [
        {
            "messages": [
                {"role": "system", "content": "Answer travellers. " * 3},
                {"role": "user", "content": f"{name}: where is my train, where is my train?"},
                {"role": "assistant", "content": f"It leaves from platform {at}."},
                {"role": "user", "content": f"And when, and when, and when? {name} " * 2},
                {"role": "assistant", "content": f"At {at} past nine."},
            ]
        }
        for at, name in enumerate(("Ada", "Bo", "Cy"))
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path
