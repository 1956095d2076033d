"""Tokenizers from a GGUF file or from a folder with ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline_engine.errors import MissingExtraError, ModelLoadError, ModelNotFoundError
from paceline_engine.loading.config_spec import token_ids
from paceline_engine.loading.gguf_header import FETCH_AGAIN, GgufHeader, read_header
from paceline_engine.loading.gguf_spec import bos_token_id, end_token_ids
from paceline_engine.loading.gguf_vocabulary import core_from_gguf
from paceline_engine.loading.safetensors_dir import read_json
from paceline_engine.loading.tokenizer import SpecialTokens, TextTokenizer

if TYPE_CHECKING:
    import tokenizers

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_gguf(path: Path) -> TextTokenizer:
    """The tokenizer that a GGUF carries.

    Raises:
        ModelLoadError: the file or its vocabulary is damaged.
        UnsupportedModelError: a kind of tokenizer that is not supported.
    """
    header = read_header(path)
    core = core_from_gguf(header)
    bos = bos_token_id(header)
    special = {
        token.content: token_id
        for token_id, token in core.get_added_tokens_decoder().items()
        if token.special
    }
    ends = end_token_ids(header, special.get)
    size = core.get_vocab_size(with_added_tokens=True)
    if any(not 0 <= token_id < size for token_id in (*ends, *(() if bos is None else (bos,)))):
        raise ModelLoadError(
            str(path), reason=f"a special token lies beyond the {size} pieces", remedy=FETCH_AGAIN
        )
    return TextTokenizer(
        core,
        model=str(path),
        special=SpecialTokens(bos=bos, ends=ends, names=_gguf_names(header, core, bos)),
        chat_template=header.get("tokenizer.chat_template", str, "") or None,
    )


def _gguf_names(header: GgufHeader, core: tokenizers.Tokenizer, bos: int | None) -> dict[str, str]:
    ids = {
        "eos_token": header.get("tokenizer.ggml.eos_token_id", int, -1),
        "unk_token": header.get("tokenizer.ggml.unknown_token_id", int, -1),
        "pad_token": header.get("tokenizer.ggml.padding_token_id", int, -1),
        "bos_token": -1 if bos is None else bos,
    }
    named = {name: core.id_to_token(token_id) for name, token_id in ids.items() if 0 <= token_id < 1 << 32}
    return {"bos_token": "", "eos_token": ""} | {name: piece for name, piece in named.items() if piece}


def tokenizer_from_folder(path: Path) -> TextTokenizer:
    """The tokenizer of a safetensors folder.

    Raises:
        ModelNotFoundError: no ``tokenizer.json`` in the folder.
        ModelLoadError: a file is damaged.
        UnsupportedModelError: a kind of tokenizer that is not supported.
    """
    core = _core(path / "tokenizer.json")
    config = read_json(path / "tokenizer_config.json", {})
    names = _folder_names(path, config)
    template = _chat_template(path, config)
    bos = _bos(core, config, names, template)
    if bos is None:
        names["bos_token"] = ""
    model_config = read_json(path / "config.json", {})
    text_config = model_config.get("text_config")
    eos = core.token_to_id(names["eos_token"]) if names["eos_token"] else None
    ends = token_ids(
        read_json(path / "generation_config.json", {}).get("eos_token_id"),
        model_config.get("eos_token_id"),
        text_config.get("eos_token_id") if isinstance(text_config, dict) else None,
        eos,
    )
    return TextTokenizer(
        core,
        model=str(path),
        special=SpecialTokens(bos=bos, ends=ends, names=names),
        chat_template=template,
    )


def _core(path: Path) -> tokenizers.Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("engine", needed_for="tokenizing") from error

    if not path.is_file():
        raise ModelNotFoundError(
            str(path.parent),
            reason="has no tokenizer.json",
            remedy="save the tokenizer with transformers' save_pretrained, which writes one",
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(str(path), reason=f"cannot be read ({error})", remedy=FETCH_AGAIN) from error


def _folder_names(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    given = read_json(path / "special_tokens_map.json", {}) | dict(config)
    names = {"bos_token": "", "eos_token": ""}
    for name in _NAMES:
        value = given.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            names[name] = value
    return names


def _bos(
    core: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str], template: str | None
) -> int | None:
    """BOS where the tokenizer puts it before a text by itself, or the configuration or template says so."""
    token = names["bos_token"]
    bos = core.token_to_id(token) if token else None
    first = next(iter(core.encode("a", add_special_tokens=True).ids), None)
    plain = next(iter(core.encode("a", add_special_tokens=False).ids), None)
    if bos is None:
        return None
    if first != plain:
        return bos if first == bos else None
    writes = template is not None and ("bos_token" in template or token in template)
    adds = config.get("add_bos_token")
    if isinstance(adds, bool):
        return bos if adds or writes else None
    return bos if writes or template is None else None


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(str(file), reason=f"cannot be read ({error})", remedy=FETCH_AGAIN) from error
    given = read_json(path / "chat_template.json", {}).get("chat_template") or config.get("chat_template")
    if isinstance(given, list):
        named = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
        given = named.get("default") or next(iter(named.values()), None)
    return given if isinstance(given, str) and given else None
