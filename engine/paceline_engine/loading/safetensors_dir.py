"""A folder of ``config.json`` and safetensors files as a Checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline_engine.errors import ModelLoadError, ModelNotFoundError
from paceline_engine.loading.config_spec import spec_from_config
from paceline_engine.loading.digest import DigestPart, files_digest
from paceline_engine.loading.layout import check_tensors
from paceline_engine.loading.safetensors_header import (
    FETCH_AGAIN,
    SafetensorsEntry,
    read_header,
)
from paceline_engine.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

_DIGESTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
_OTHER_PARTS = (
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
)  # fmt: skip


class SafetensorsCheckpoint:
    """A safetensors folder, opened and checked; its tensors are read one at a time.

    Raises:
        ModelNotFoundError: no ``config.json`` or no weights in the folder.
        ModelLoadError: a file is missing, damaged or does not fit its own table.
        UnsupportedModelError: an architecture, option or tensor type that is not supported.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self._path = path
        self._digest: str | None = None
        self._name = name or path.resolve().name
        self._spec = spec_from_config(
            str(path), read_json(path / "config.json"), read_json(path / "generation_config.json", {})
        )
        self._headers = tuple(read_header(path / shard) for shard in _shards(path))
        self._entries = self._checked_entries()

    @property
    def name(self) -> str:
        return self._name

    @property
    def path(self) -> Path:
        return self._path

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def digest(self) -> str:
        """See ``paceline_engine.loading.digest`` for what it covers."""
        if self._digest is None:
            texts = [self._path / name for name in _DIGESTED if (self._path / name).is_file()]
            parts = [DigestPart(path=path, head_bytes=path.stat().st_size) for path in texts]
            for header in self._headers:
                starts = tuple(entry.start for entry in header.tensors.values())
                parts.append(DigestPart(path=header.path, head_bytes=header.n_bytes, tensor_starts=starts))
            self._digest = files_digest(parts)
        return self._digest

    def tensor_names(self) -> Iterable[str]:
        return tuple(self._entries)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in the file's own type, Gemma's norms in fp32; [out, in] for matrices."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelLoadError(
                str(self._path),
                tensor=name,
                reason="is not in the checkpoint",
                remedy="ask for one of tensor_names()",
            )
        tensor = read_tensor(entry)
        if self._spec.family == "gemma3" and name.endswith("norm.weight"):
            # Gemma's RMSNorm multiplies by 1 + w, in fp32
            tensor = tensor.float() + 1
        return tensor

    def _checked_entries(self) -> Mapping[str, SafetensorsEntry]:
        entries: dict[str, SafetensorsEntry] = {}
        for header in self._headers:
            for name, entry in header.tensors.items():
                known = text_name(name)
                if known is None or (known == "lm_head.weight" and self._spec.tied_embeddings):
                    continue
                if known in entries:
                    raise ModelLoadError(
                        str(header.path), tensor=name, reason="stands in two files", remedy=FETCH_AGAIN
                    )
                entries[known] = entry
        self._check_index()
        check_tensors(str(self._path), self._spec, {name: entry.shape for name, entry in entries.items()})
        return entries

    def _check_index(self) -> None:
        by_file = {header.path.name: header for header in self._headers}
        for name, shard in _index(self._path).items():
            if name not in by_file[shard].tensors:
                raise ModelLoadError(
                    str(self._path), tensor=name, reason=f"is not in {shard}", remedy=FETCH_AGAIN
                )


def read_tensor(entry: SafetensorsEntry) -> torch.Tensor:
    """The tensor in the file's own type.

    Raises:
        ModelLoadError: the file cannot be read any more, or changed on disk.
    """
    import torch

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return torch.from_numpy(_read(entry)).view(kinds[entry.type_name]).reshape(entry.shape)


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object; the default where there is no such file.

    Raises:
        ModelNotFoundError: there is no such file, and no default.
        ModelLoadError: it is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if default is not None:
            return default
        raise ModelNotFoundError(
            str(path.parent),
            reason=f"has no {path.name}",
            remedy="give a folder with config.json and *.safetensors, or a .gguf file",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(str(path), reason=f"cannot be read ({error})", remedy=FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise ModelLoadError(str(path), reason="is no JSON object", remedy=FETCH_AGAIN)
    return value


def _index(path: Path) -> dict[str, str]:
    """Tensor to shard, as the index names them; empty where there is one file."""
    if (path / "model.safetensors").is_file():
        return {}
    weight_map = read_json(path / "model.safetensors.index.json", {}).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelLoadError(
            str(path), reason="the index's 'weight_map' does not name files", remedy=FETCH_AGAIN
        )
    return weight_map


def _shards(path: Path) -> list[str]:
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    weight_map = _index(path)
    if not weight_map:
        raise ModelNotFoundError(
            str(path),
            reason="has neither model.safetensors nor model.safetensors.index.json",
            remedy="give a folder with the model's weights as safetensors",
        )
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        first = next(name for name, place in weight_map.items() if place == shard)
        if Path(shard).name != shard:
            raise ModelLoadError(
                str(path),
                tensor=first,
                reason=f"is placed in {shard!r}, outside the folder",
                remedy=FETCH_AGAIN,
            )
        if not (path / shard).is_file():
            raise ModelLoadError(
                str(path), tensor=first, reason=f"its shard {shard} is missing", remedy=f"fetch {shard}"
            )
    return shards


def text_name(name: str) -> str | None:
    """The name in a text-only checkpoint; None for the parts that read images."""
    if name.startswith(_OTHER_PARTS) or name.endswith("rotary_emb.inv_freq"):
        return None
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


def _read(entry: SafetensorsEntry) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        raw = np.fromfile(entry.path, np.uint8, count=entry.n_bytes, offset=entry.start)
    except OSError as error:
        raise ModelLoadError(
            str(entry.path), tensor=entry.name, reason=f"cannot be read ({error})", remedy=FETCH_AGAIN
        ) from error
    if raw.size != entry.n_bytes:
        raise ModelLoadError(
            str(entry.path),
            tensor=entry.name,
            reason=f"only {raw.size} of {entry.n_bytes} bytes are left: the file changed on disk",
            remedy=FETCH_AGAIN,
        )
    return raw
