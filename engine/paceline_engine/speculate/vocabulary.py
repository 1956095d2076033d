"""The tokens that a drafter's output matrix keeps for every stream."""

from __future__ import annotations

from collections.abc import Iterable

from paceline_engine.loading.base import Tokenizer

_FIRST_IDS = 32_768
"""A BPE numbers its merges by frequency: the first ids of a large vocabulary are most of a text's tokens."""


def common_ids(tokenizer: Tokenizer, vocab_size: int, *, also: Iterable[int] = ()) -> tuple[int, ...]:
    """Ids of tokens that are frequent in any text, ascending; all of a vocabulary that is small.

    The first ids, and the tokens of single bytes, which SentencePiece numbers last.
    """
    if vocab_size <= 2 * _FIRST_IDS:
        return tuple(range(vocab_size))
    letters = [token for token in range(_FIRST_IDS, vocab_size) if len(tokenizer.token_bytes(token)) == 1]
    return tuple(sorted({*range(_FIRST_IDS), *letters, *also}))
