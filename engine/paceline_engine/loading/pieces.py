"""What a step loop needs of a tokenizer: the bytes of each token, and which tokens end an output.

A whole tokenizer of 262,144 pieces takes seconds to open and holds the interpreter lock for it. The bytes of
its pieces are 2 MB, so they are kept in the cache folder under the checkpoint's digest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from paceline_engine.errors import InvalidValueError
from paceline_engine.loading.base import Tokenizer
from paceline_engine.loading.cache import cache_dir, write_atomically

_FORMAT = "1"
"""Part of the file's name; raised when what stands in it changes."""
_LOG = logging.getLogger(__name__)


class PieceTokenizer:
    """A ``Tokenizer`` that decodes from a table, and opens the whole one when a text is to be encoded.

    Args:
        data: the bytes of all tokens, one after the other.
        ends: int64 [vocab_size]: where the bytes of each token end in ``data``.
        bos: the token that starts every sequence; None where the model has none.
        open_whole: gives the tokenizer that the table was made of.
    """

    def __init__(
        self,
        data: bytes,
        ends: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        *,
        bos: int | None,
        eos: tuple[int, ...],
        has_chat_template: bool,
        open_whole: Callable[[], Tokenizer],
    ) -> None:
        self._data = data
        self._ends = ends
        self._bos = bos
        self._eos = eos
        self._has_chat_template = has_chat_template
        self._open_whole = open_whole
        self._whole: Tokenizer | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, whole: Tokenizer) -> PieceTokenizer:
        """The table of a tokenizer that is open."""
        pieces = [whole.token_bytes(token_id) for token_id in range(whole.vocab_size)]
        return cls(
            b"".join(pieces),
            np.cumsum([len(piece) for piece in pieces], dtype=np.int64),
            bos=whole.bos_token_id,
            eos=whole.eos_token_ids,
            has_chat_template=whole.has_chat_template,
            open_whole=lambda: whole,
        )

    @classmethod
    def read(cls, path: Path, *, open_whole: Callable[[], Tokenizer]) -> PieceTokenizer:
        """A table that ``write`` made.

        Raises:
            OSError, ValueError, KeyError, zipfile.BadZipFile: it is absent or damaged.
        """
        # Opened here, since numpy leaves a file open that it cannot read.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            data, ends = file["data"].tobytes(), file["ends"].astype(np.int64)
            bos, eos, template = int(file["bos"]), file["eos"].tolist(), bool(file["has_chat_template"])
        if ends.ndim != 1 or not len(ends) or ends[-1] != len(data) or np.any(np.diff(ends, prepend=0) < 0):
            raise ValueError("the table's parts do not fit one another")
        return cls(
            data,
            ends,
            bos=None if bos < 0 else bos,
            eos=tuple(eos),
            has_chat_template=template,
            open_whole=open_whole,
        )

    def write(self, path: Path) -> None:
        """Keep the table. Raises OSError where the disk cannot be written."""

        def save(temporary: Path) -> None:
            with temporary.open("wb") as file:
                np.savez(
                    file,
                    data=np.frombuffer(self._data, dtype=np.uint8),
                    ends=self._ends,
                    bos=-1 if self._bos is None else self._bos,
                    eos=np.array(self._eos, dtype=np.int64),
                    has_chat_template=self._has_chat_template,
                )

        write_atomically(path, save)

    @property
    def vocab_size(self) -> int:
        return len(self._ends)

    @property
    def bos_token_id(self) -> int | None:
        return self._bos

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos

    @property
    def has_chat_template(self) -> bool:
        return self._has_chat_template

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; none for control tokens and for ids without a token."""
        if token_id < 0:
            raise InvalidValueError("token_id", observed=token_id, limit="0 or more", remedy="check the ids")
        if token_id >= len(self._ends):
            return b""
        start = int(self._ends[token_id - 1]) if token_id else 0
        return self._data[start : int(self._ends[token_id])]

    def all_bytes(self) -> list[bytes]:
        """``token_bytes`` of every token, in a third of the time."""
        ends: list[int] = self._ends.tolist()
        return [self._data[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def ids_of_length(self, n_bytes: int) -> tuple[int, ...]:
        """The tokens that stand for so many bytes, ascending."""
        return tuple(np.flatnonzero(np.diff(self._ends, prepend=0) == n_bytes).tolist())

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text, control tokens left out; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.token_bytes(token_id) for token_id in ids).decode("utf-8", "replace")

    def encode(self, text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        """As the whole tokenizer, which the first call opens."""
        return self._opened().encode(text, add_bos=add_bos)

    def render_chat(
        self, messages: Iterable[object], *, tools: Iterable[object] | None = None
    ) -> tuple[int, ...]:
        """As the whole tokenizer, which the first call opens."""
        return self._opened().render_chat(messages, tools=tools)

    def _opened(self) -> Tokenizer:
        with self._lock:
            if self._whole is None:
                self._whole = self._open_whole()
            return self._whole


def piece_tokenizer(digest: str, open_whole: Callable[[], Tokenizer]) -> PieceTokenizer:
    """The table of a checkpoint's tokenizer: from the cache, or made and kept.

    Args:
        digest: of the checkpoint, tokenizer included.
        open_whole: opens its tokenizer.

    Raises:
        ModelError, MissingExtraError: as ``open_whole``, where nothing is cached.
    """
    path = cache_dir() / "tokenizers" / f"{digest[:32]}-pieces-v{_FORMAT}.npz"
    try:
        return PieceTokenizer.read(path, open_whole=open_whole)
    except FileNotFoundError:
        pass
    except Exception as error:  # zipfile, zlib and numpy raise many kinds for a damaged file
        _LOG.warning("making %s again, since it cannot be used: %s", path, error)
    table = PieceTokenizer.of(open_whole())
    try:
        table.write(path)
    except OSError as error:
        _LOG.warning("the tokens' bytes are not kept in %s: %s", path.parent, error)
    return table
