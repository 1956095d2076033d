"""Tokens to text while they come."""

from __future__ import annotations

import codecs

from paceline_engine.loading.base import Tokenizer


class Detokenizer:
    """Turns one output's tokens into text, piece by piece; the pieces join to ``Tokenizer.decode``.

    A character's first bytes wait for the rest of it. Only bytes that cannot become a character are
    replaced, by U+FFFD. Where the tokenizer drops the space that SentencePiece puts before the first word,
    so does this.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._leading_ids: list[int] | None = []
        """Tokens up to the first that has bytes; None once it has come."""

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` settles; empty while a character is incomplete."""
        data = self._tokenizer.token_bytes(token_id)
        if self._leading_ids is not None:
            self._leading_ids.append(token_id)
            if not data:
                return ""
            n_dropped = _n_spaces(data.decode(errors="replace")) - _n_spaces(
                self._tokenizer.decode(self._leading_ids)
            )
            data = data[max(0, n_dropped) :]
            self._leading_ids = None
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What an incomplete character at the end of the output becomes."""
        return self._decoder.decode(b"", final=True)


def _n_spaces(text: str) -> int:
    """Spaces that ``text`` begins with."""
    return len(text) - len(text.lstrip(" "))
