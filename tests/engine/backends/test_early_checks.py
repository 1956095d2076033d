"""What is wrong with a model is told before a worker is started for it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.backends.embedded import session as session_module
from paceline_engine.errors import (
    InvalidValueError,
    MissingExtraError,
    ModelNotFoundError,
    PacelineError,
    UnsupportedModelError,
)
from paceline_engine.loading import check


class NoTransport:
    """Fails the test where a worker is started."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pytest.fail("a worker was started")


def start(model: str) -> PacelineError:
    async def main() -> None:
        await EmbeddedBackend(EmbeddedConfig(model=model)).start()

    with pytest.raises(PacelineError) as caught:
        asyncio.run(main())
    return caught.value


def test_a_wrong_path_starts_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No such path, a folder without a model and a file of another kind are refused at once."""
    monkeypatch.setattr(session_module, "ProcessTransport", NoTransport)
    pytest.importorskip("torch", reason="without torch that is what is told")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "empty").mkdir()
    assert isinstance(start(str(tmp_path / "absent.gguf")), ModelNotFoundError)
    assert isinstance(start(str(tmp_path / "empty")), ModelNotFoundError)
    assert isinstance(start(str(tmp_path / "notes.txt")), UnsupportedModelError)


@pytest.mark.parametrize(("model", "extra"), [("someone/model", "hub"), ("gemma3-270m", "demo")])
def test_a_part_that_is_not_installed_starts_no_worker(
    monkeypatch: pytest.MonkeyPatch, model: str, extra: str
) -> None:
    """A name that needs an absent package names the extra before anything is fetched or started."""
    # Not by attribute: the package's own ``resolve`` is the function.
    monkeypatch.setattr(sys.modules[check.__module__], "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as caught:
        check(model)
    assert caught.value.extra == extra


@pytest.mark.parametrize("settings", [{"device": "gpu"}, {"device": "cuda:x"}, {"variants": ("int3",)}])
def test_settings_that_do_not_exist_are_refused_when_given(settings: dict[str, Any]) -> None:
    """A device or variant of another name never reaches a worker."""
    with pytest.raises(InvalidValueError) as caught:
        EmbeddedConfig(model="m", **settings)
    assert caught.value.field == next(iter(settings))
