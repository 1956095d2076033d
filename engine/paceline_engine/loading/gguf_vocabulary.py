"""A ``tokenizer.json`` from the vocabulary that a GGUF carries.

A vocabulary of 262,144 pieces takes seconds to turn into one, so the result is kept in the cache folder
under a digest of the metadata.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline_engine.errors import MissingExtraError, ModelLoadError, UnsupportedModelError
from paceline_engine.loading.cache import cache_dir, write_atomically
from paceline_engine.loading.gguf_header import FETCH_AGAIN, GgufHeader

if TYPE_CHECKING:
    import tokenizers

_FORMAT = "1"
"""Part of the cache's key; raised when what is built from the same metadata changes."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}{_REST}"
_PATTERNS: Mapping[str, str | None] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": None,
}
"""Names of pre-tokenizers to the pattern of the words they cut; None is the library's own (GPT-2's)."""
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")
"""A word that is a piece is taken as it is, whatever the merges say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    header: GgufHeader
    pieces: Sequence[str]
    kinds: Sequence[int]

    def damaged(self, reason: str) -> ModelLoadError:
        return ModelLoadError(str(self.header.path), reason=f"the vocabulary {reason}", remedy=FETCH_AGAIN)


def core_from_gguf(header: GgufHeader) -> tokenizers.Tokenizer:
    """The library's tokenizer, from the cache or built and cached.

    Raises:
        ModelLoadError: the vocabulary is damaged.
        UnsupportedModelError: a kind of tokenizer that is not supported.
        MissingExtraError: ``tokenizers`` is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("engine", needed_for="tokenizing") from error

    path = cache_dir() / "tokenizers" / f"{_key(header)}.json"
    # a file that cannot be read or parsed is made again; the library raises plain Exception
    with contextlib.suppress(Exception):
        if path.is_file():
            return tokenizers.Tokenizer.from_file(str(path))
    described = json.dumps(describe(header), ensure_ascii=False)
    try:
        core = tokenizers.Tokenizer.from_str(described)
    except Exception as error:
        raise ModelLoadError(
            str(header.path), reason=f"the vocabulary is not consistent ({error})", remedy=FETCH_AGAIN
        ) from error
    with contextlib.suppress(OSError):
        write_atomically(path, lambda temporary: temporary.write_text(described, encoding="utf-8"))
    return core


def describe(header: GgufHeader) -> dict[str, Any]:
    """The content of a ``tokenizer.json``."""
    model = header.get("tokenizer.ggml.model", str)
    if model not in ("llama", "gpt2"):
        raise UnsupportedModelError(
            str(header.path),
            reason=f"tokenizer '{model}' is not supported",
            remedy="use a model with a 'llama' (SentencePiece BPE) or 'gpt2' (byte-level BPE) tokenizer",
        )
    vocabulary = _read(header)
    described = _sentencepiece(vocabulary) if model == "llama" else _byte_level(vocabulary)
    added = [
        {
            "id": index,
            "content": piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and piece
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
        **described,
    }


def _read(header: GgufHeader) -> _Vocabulary:
    pieces = header.strings("tokenizer.ggml.tokens")
    kinds = header.metadata.get("tokenizer.ggml.token_type", (_NORMAL,) * len(pieces))
    vocabulary = _Vocabulary(header=header, pieces=pieces, kinds=kinds)
    if not isinstance(kinds, tuple) or len(kinds) != len(pieces):
        raise vocabulary.damaged(f"has {len(pieces)} pieces and another number of types")
    if len(set(pieces)) != len(pieces):
        raise vocabulary.damaged("has a piece that stands twice")
    return vocabulary


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """SentencePiece's BPE as merges, the way Gemma's and Llama 2's own ``tokenizer.json`` does it."""
    header = vocabulary.header
    vocab = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    unknown = header.get("tokenizer.ggml.unknown_token_id", int, 0)
    if not 0 <= unknown < len(vocab):
        raise vocabulary.damaged(f"names {unknown} as the token for unknown text")
    prefix = header.get("tokenizer.ggml.add_space_prefix", bool, True)
    space: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, space]} if prefix else space,
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.pieces[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": _BYTE in vocabulary.kinds,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges_by_score(vocabulary, vocab),
        },
    }


def _merges_by_score(vocabulary: _Vocabulary, vocab: Mapping[str, int]) -> list[str]:
    """Every way to put a piece together from two, the piece of the highest score first."""
    scores: tuple[float, ...] = vocabulary.header.get("tokenizer.ggml.scores", tuple)
    if len(scores) != len(vocabulary.pieces):
        raise vocabulary.damaged(f"has {len(vocabulary.pieces)} pieces and {len(scores)} scores")
    normal = {
        piece
        for piece, kind in zip(vocabulary.pieces, vocabulary.kinds, strict=True)
        if kind == _NORMAL and " " not in piece
    }
    long = [piece for piece in vocabulary.pieces if piece in normal and len(piece) > 1]
    # a stable sort: of equal scores, the piece of the lower id goes first
    long.sort(key=lambda piece: float(scores[vocab[piece]]), reverse=True)
    merges: list[str] = []
    for piece in long:
        halves = [
            (piece[:cut], piece[cut:])
            for cut in range(1, len(piece))
            if piece[:cut] in normal and piece[cut:] in normal
        ]
        halves.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges.extend(f"{left} {right}" for left, right in halves)
    return merges


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    header = vocabulary.header
    pre = header.get("tokenizer.ggml.pre", str, "default")
    if pre not in _PATTERNS:
        raise UnsupportedModelError(
            str(header.path),
            reason=f"pre-tokenizer '{pre}' is not supported",
            remedy=f"use a model with one of {', '.join(_PATTERNS)}",
        )
    pattern = _PATTERNS[pre]
    words: list[dict[str, Any]] = (
        []
        if pattern is None
        else [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
    )
    bytes_ = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": pattern is None,
    }  # fmt: skip
    whole_words = pre in _WHOLE_WORDS_FIRST
    return {
        "normalizer": {"type": "NFC"} if "qwen" in pre else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, bytes_]},
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole_words,
            "vocab": _byte_level_vocab(vocabulary, without_added=whole_words),
            "merges": header.strings("tokenizer.ggml.merges"),
        },
    }


def _byte_level_vocab(vocabulary: _Vocabulary, *, without_added: bool) -> dict[str, int]:
    """Piece to id. Where whole words come first, a control token must not be such a word."""
    kinds = vocabulary.kinds
    n_plain = next(
        (index for index, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)), len(kinds)
    )
    tail_is_added = all(kind in (_CONTROL, _USER_DEFINED) for kind in kinds[n_plain:])
    count = n_plain if without_added and tail_is_added else len(kinds)
    return {piece: index for index, piece in enumerate(vocabulary.pieces[:count])}


def _key(header: GgufHeader) -> str:
    digest = hashlib.sha256(_FORMAT.encode())
    with Path(header.path).open("rb") as file:
        digest.update(file.read(header.metadata_bytes))
    return digest.hexdigest()
