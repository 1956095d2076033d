"""Opening models: from a name, path or hub id to a Checkpoint and a Tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline_engine.loading.base import Checkpoint, Tokenizer
from paceline_engine.loading.resolve import DEMO_NAME, check, resolve

if TYPE_CHECKING:
    from paceline_engine.backends.base import OnProgress

__all__ = ["Checkpoint", "Tokenizer", "check", "open_checkpoint", "open_tokenizer", "resolve"]


def open_checkpoint(model: str, on_progress: OnProgress | None = None) -> Checkpoint:
    """Open and check a model; its tensors are read when asked for.

    Raises:
        ModelError: it cannot be found, read or run.
        MissingExtraError: its name needs a part that is not installed.
    """
    from paceline_engine.loading.gguf_file import GgufCheckpoint
    from paceline_engine.loading.safetensors_dir import SafetensorsCheckpoint

    path = resolve(model, on_progress)
    # a path is known by its last part; a name or hub id stays as it was given
    name = model if model == DEMO_NAME or not Path(model).expanduser().exists() else None
    if path.is_dir():
        return SafetensorsCheckpoint(path, name=name)
    return GgufCheckpoint(path, name=name)


def open_tokenizer(model: str, on_progress: OnProgress | None = None) -> Tokenizer:
    """Open a model's tokenizer and chat template, without torch.

    Raises:
        ModelError: it cannot be found or read, or is of a kind that is not supported.
        MissingExtraError: a part that it needs is not installed.
    """
    from paceline_engine.loading.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

    path = resolve(model, on_progress)
    return tokenizer_from_folder(path) if path.is_dir() else tokenizer_from_gguf(path)
