"""The tokens that a drafter's output matrix keeps for every stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from paceline_engine.loading.base import Tokenizer

_FIRST_IDS = 32_768
"""A BPE numbers its merges by frequency: the first ids of a large vocabulary are most of a text's tokens."""


@runtime_checkable
class _Table(Protocol):
    """A tokenizer that knows the lengths of all its tokens at once."""

    def ids_of_length(self, n_bytes: int) -> tuple[int, ...]: ...


def common_ids(tokenizer: Tokenizer, vocab_size: int, *, also: Iterable[int] = ()) -> tuple[int, ...]:
    """Ids of tokens that are frequent in any text, ascending; all of a vocabulary that is small.

    The first ids, and the tokens of single bytes, which SentencePiece numbers last.
    """
    if vocab_size <= 2 * _FIRST_IDS:
        return tuple(range(vocab_size))
    letters: Iterable[int]
    if isinstance(tokenizer, _Table):
        # Asked one by one, a quarter of a million tokens take a third of a second of every start.
        letters = (token for token in tokenizer.ids_of_length(1) if token < vocab_size)
    else:
        letters = (token for token in range(_FIRST_IDS, vocab_size) if len(tokenizer.token_bytes(token)) == 1)
    return tuple(sorted({*range(_FIRST_IDS), *letters, *also}))
