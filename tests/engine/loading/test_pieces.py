"""The table of tokens' bytes that stands in for a whole tokenizer in the worker."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from paceline_engine.errors import InvalidValueError
from paceline_engine.loading import open_tokenizer
from paceline_engine.loading.base import Tokenizer
from paceline_engine.loading.cache import cache_dir
from paceline_engine.loading.pieces import PieceTokenizer, piece_tokenizer


@pytest.fixture(params=["gemma3", "qwen3"])
def whole(request: pytest.FixtureRequest, tiny_model) -> Tokenizer:  # type: ignore[no-untyped-def]
    return open_tokenizer(str(tiny_model(request.param).safetensors))


def _never() -> NoReturn:
    raise AssertionError("the whole tokenizer was opened")


def test_the_table_gives_what_the_tokenizer_gives(whole: Tokenizer, tmp_path: Path) -> None:
    """Written and read back, every token's bytes, the ends of outputs and the counts are the same."""
    PieceTokenizer.of(whole).write(tmp_path / "table.npz")
    table = PieceTokenizer.read(tmp_path / "table.npz", open_whole=_never)
    ids = range(whole.vocab_size + 3)
    assert [table.token_bytes(token_id) for token_id in ids] == [whole.token_bytes(i) for i in ids]
    assert table.decode(ids) == whole.decode(ids)
    for n_bytes in (0, 1, 3):
        same = tuple(i for i in range(whole.vocab_size) if len(whole.token_bytes(i)) == n_bytes)
        assert table.ids_of_length(n_bytes) == same
    assert (table.vocab_size, table.bos_token_id, table.eos_token_ids, table.has_chat_template) == (
        whole.vocab_size,
        whole.bos_token_id,
        whole.eos_token_ids,
        whole.has_chat_template,
    )
    with pytest.raises(InvalidValueError):
        table.token_bytes(-1)


def test_text_is_encoded_by_the_whole_tokenizer_opened_once(whole: Tokenizer, tmp_path: Path) -> None:
    """Encoding and rendering give its ids; it is opened by the first of them and kept."""
    PieceTokenizer.of(whole).write(tmp_path / "table.npz")
    opened: list[Tokenizer] = []

    def open_whole() -> Tokenizer:
        opened.append(whole)
        return whole

    table = PieceTokenizer.read(tmp_path / "table.npz", open_whole=open_whole)
    assert not opened
    messages = [{"role": "user", "content": "what is the time"}]
    assert table.encode("the agent reads", add_bos=True) == whole.encode("the agent reads", add_bos=True)
    assert table.render_chat(messages) == whole.render_chat(messages)
    assert len(opened) == 1


@pytest.mark.parametrize("damage", ["cut", "emptied", "other", "bent"])
def test_a_damaged_table_is_made_again(whole: Tokenizer, damage: str) -> None:
    """What cannot be read, or does not fit together, is replaced by a table of the tokenizer."""
    digest = f"{damage}-{whole.vocab_size}"
    piece_tokenizer(digest, lambda: whole)
    [path] = (cache_dir() / "tokenizers").glob(f"{digest}-pieces-*")
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(
        {
            "cut": data[:middle],
            "emptied": b"",
            "other": b"no table at all",
            "bent": data[:middle]
            + bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
            + data[middle + 64 :],
        }[damage]
    )
    table = piece_tokenizer(digest, lambda: whole)
    ids = range(whole.vocab_size)
    assert [table.token_bytes(token_id) for token_id in ids] == [whole.token_bytes(i) for i in ids]
    assert piece_tokenizer(digest, _never).decode(ids) == whole.decode(ids)
