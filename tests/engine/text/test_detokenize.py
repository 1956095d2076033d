from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from paceline_engine.text.detokenize import Detokenizer


class BytesTokenizer:
    """Token ids index a table of bytes; an empty entry is a control token."""

    bos_token_id = None
    eos_token_ids = ()
    has_chat_template = False

    def __init__(self, table: list[bytes], *, drops_first_space: bool = False) -> None:
        self.table = table
        self.vocab_size = len(table)
        self.drops_first_space = drops_first_space

    def token_bytes(self, token_id: int) -> bytes:
        return self.table[token_id]

    def decode(self, ids: Iterable[int]) -> str:
        text = b"".join(self.table[token_id] for token_id in ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.drops_first_space else text

    def encode(self, text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        raise NotImplementedError

    def render_chat(self, messages: Iterable[object], *, tools: object = None) -> tuple[int, ...]:
        raise NotImplementedError


def pieces(table: list[bytes], *, drops_first_space: bool = False) -> list[str]:
    """What each token of the table settles, in order, and at the end the flush."""
    tokenizer = BytesTokenizer(table, drops_first_space=drops_first_space)
    detokenizer = Detokenizer(tokenizer)
    found = [detokenizer.push(token_id) for token_id in range(len(table))] + [detokenizer.flush()]
    assert "".join(found) == tokenizer.decode(range(len(table)))
    return found


EMOJI = [bytes([byte]) for byte in "🎉".encode()]


def test_an_emoji_as_four_byte_tokens() -> None:
    """Nothing comes before the last byte, then the whole character."""
    assert pieces([b"a", *EMOJI, b"b"]) == ["a", "", "", "", "🎉", "b", ""]


def test_a_space_inside_an_emoji() -> None:
    """Bytes that cannot become a character are replaced when that is known, and the space stays."""
    assert pieces([*EMOJI[:2], b" ", b"x"]) == ["", "", "\ufffd ", "x", ""]


@pytest.mark.parametrize("bad", [b"\xff", b"\x80", b"\xc0"])
def test_only_invalid_bytes_are_replaced(bad: bytes) -> None:
    """One invalid byte becomes one replacement character; its neighbours stay."""
    assert "".join(pieces([b"a", bad, *EMOJI, b"b"])) == "a\ufffd🎉b"


def test_an_incomplete_tail_is_flushed() -> None:
    """A character cut short by the end of the output is replaced in the flush."""
    assert pieces([b"a", *EMOJI[:3]]) == ["a", "", "", "", "\ufffd"]


def test_a_genuine_replacement_character() -> None:
    """U+FFFD that the model itself writes passes like any other character."""
    assert "".join(pieces(["\ufffd".encode()[:2], "\ufffd".encode()[2:], b"x"])) == "\ufffdx"


@pytest.mark.parametrize("drops", [True, False])
def test_the_first_space(drops: bool) -> None:
    """The space before the first word goes or stays as the tokenizer's own decoding has it."""
    assert pieces([b"", b" a", b" b"], drops_first_space=drops) == [
        "",
        "a" if drops else " a",
        " b",
        "",
    ]
    assert pieces([b" ", b" a"], drops_first_space=drops)[0] == ("" if drops else " ")


def test_random_bytes_join_to_the_batch_decode() -> None:
    """For any bytes cut into any tokens, the pieces join to what decoding all at once gives."""
    rng = random.Random(0)
    for _ in range(300):
        data = b"".join(
            rng.choice([b"\xf0", b"\x9f", b"\x8e", b" ", b"a", "é".encode(), "🎉".encode()]) for _ in range(9)
        )
        cuts = sorted(rng.sample(range(len(data)), 5))
        table = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        pieces(table, drops_first_space=rng.random() < 0.5)
