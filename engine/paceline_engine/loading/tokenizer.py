"""The Tokenizer over the ``tokenizers`` library.

Three kinds of tokens are told apart:

- *control* tokens (special, such as ``<bos>``) stand for no text,
- *markers* are added tokens that the chat template writes and that do stand for text (``<tool_call>``),
- all others.

What a caller writes never becomes a control token or a marker; see ``caller_text`` for how.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline_engine.errors import InvalidValueError, UnsupportedModelError
from paceline_engine.loading.base import LONG_TEXT_CHARACTERS
from paceline_engine.loading.caller_text import Disguise, texts_of
from paceline_engine.loading.chat import normalized, normalized_tools
from paceline_engine.loading.template import PLAIN_TEMPLATE, ChatTemplate

if TYPE_CHECKING:
    import tokenizers

_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTROL_LIKE = re.compile(r"<\|.*\|>|<(start|end)_of_\w+>")
"""Added tokens of this form are kept from callers even where a file does not call them special."""


class Pieces(StrEnum):
    """How a token's name spells its bytes."""

    BYTE_LEVEL = "byte_level"
    """One character a byte, by GPT-2's table."""
    SENTENCEPIECE = "sentencepiece"
    """Text with ``▁`` for the space, and ``<0xF0>`` for a lone byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What a model's files say about its control tokens."""

    bos: int | None = None
    """The token that starts every sequence; None where the model has none."""
    ends: tuple[int, ...] = ()
    names: Mapping[str, str]
    """``bos_token``, ``eos_token`` and so on, as a template may write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Added:
    token_id: int
    eats_left: bool
    eats_right: bool


class TextTokenizer:
    """A tokenizer with its chat template. Methods are safe from several threads."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        model: str,
        special: SpecialTokens,
        chat_template: str | None,
    ) -> None:
        self._core = core
        self._special = special
        self._has_template = chat_template is not None
        self._template = ChatTemplate(PLAIN_TEMPLATE if chat_template is None else chat_template)
        self._added: Mapping[int, Any] = core.get_added_tokens_decoder()
        self._control_ids = frozenset(
            {token_id for token_id, token in self._added.items() if token.special}
            | {token_id for token_id in (special.bos,) if token_id is not None}
        )
        self._markup = _markup(self._added, self._control_ids, self._template.source)
        self._pieces = _pieces_of(core, model)
        self._known_bytes: dict[int, bytes] = {}
        # from here on, names of these tokens in a text are plain text to the library
        core.add_special_tokens([self._added[one.token_id] for one in self._markup.values()])
        core.encode_special_tokens = True
        core.no_truncation()
        core.no_padding()

    @property
    def vocab_size(self) -> int:
        return int(self._core.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int | None:
        return self._special.bos

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._special.ends

    @property
    def has_chat_template(self) -> bool:
        return self._has_template

    def encode(self, text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        """User text to ids. Text that spells a control token is encoded as plain text."""
        ids = tuple(self._encode_plain(text, first=True))
        bos = self._special.bos
        return (bos, *ids) if add_bos and bos is not None else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text: the tokens' bytes joined, control tokens left out, U+FFFD for invalid UTF-8.

        Nothing is stripped: where a tokenizer puts a space before every text, that space is there.
        """
        return b"".join(self.token_bytes(token_id) for token_id in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; none for control tokens and for ids without a token."""
        found = self._known_bytes.get(token_id)
        if found is None:
            found = self._known_bytes[token_id] = self._bytes_of(token_id)
        return found

    def render_chat(
        self, messages: Iterable[object], *, tools: Iterable[object] | None = None
    ) -> tuple[int, ...]:
        """The conversation's ids, ready for the answer.

        They begin with exactly one BOS where the model has one, whether or not the template writes it.

        Raises:
            InvalidValueError: no messages, an unknown role, or a conversation the template refuses.
        """
        text, disguise = self._rendered(normalized(messages), normalized_tools(tools))
        ids = [token_id for segment in self._segments(text) for token_id in self._encode(segment, disguise)]
        bos = self._special.bos
        if bos is None:
            return tuple(ids)
        start = next((place for place, token_id in enumerate(ids) if token_id != bos), len(ids))
        return (bos, *ids[start:])

    def _rendered(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[str, Disguise]:
        texts = [*texts_of(messages), *texts_of(tools), self._template.source]
        disguise = Disguise.of(self._markup_characters, starts=self._markup_starts, texts=texts)
        roles = [message["role"] for message in messages]
        wrapped = [
            {**disguise.wrap(message), "role": role} for message, role in zip(messages, roles, strict=True)
        ]
        rendered = self._template.render(
            wrapped,
            disguise.wrap(tools, field="tools"),
            self._special.names,
            disguise,
            max_characters=1_000_000 + 16 * sum(map(len, texts)),
        )
        return rendered, disguise

    def _segments(self, text: str) -> Iterator[_Segment]:
        """Cut a rendered text at its control tokens and markers, the longest name first."""
        start = 0
        for match in self._starts.finditer(text):
            place = match.start()
            if place < start:
                continue
            for length in self._lengths:
                added = self._markup.get(text[place : place + length])
                if added is None:
                    continue
                before = text[start:place]
                yield _Segment(text=before.rstrip() if added.eats_left else before, first=start == 0)
                yield _Segment(token_id=added.token_id)
                start = place + length
                if added.eats_right:
                    start += len(text) - start - len(text[start:].lstrip())
                break
        yield _Segment(text=text[start:], first=start == 0)

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        first = "".join(map(re.escape, self._markup_starts))
        return re.compile(f"[{first}]" if first else r"(?!)")

    @cached_property
    def _markup_starts(self) -> frozenset[str]:
        return frozenset(name[0] for name in self._markup)

    @cached_property
    def _markup_characters(self) -> tuple[str, ...]:
        """Of all names; a model may have thousands, so that they are not gone through for each prompt."""
        return tuple(sorted({character for name in self._markup for character in name}))

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(sorted({len(name) for name in self._markup}, reverse=True))

    def _encode(self, segment: _Segment, disguise: Disguise) -> Iterable[int]:
        if segment.token_id is not None:
            return (segment.token_id,)
        return self._encode_plain(disguise.shown(segment.text), first=segment.first)

    def _encode_plain(self, text: str, *, first: bool) -> Iterable[int]:
        """Ids of a text, none of them a control token or marker."""
        if not text:
            return ()
        if _SURROGATE.search(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        core = self._core if first or self._inner is None else self._inner
        if len(text) < LONG_TEXT_CHARACTERS:
            ids: list[int] = core.encode(text, add_special_tokens=False).ids
        else:
            # The library keeps the interpreter lock in ``encode``, and gives it back in ``encode_batch``.
            ids = core.encode_batch([text], add_special_tokens=False)[0].ids
        if self._forbidden.isdisjoint(ids):
            return ids
        return self._encode_apart(text, first=first)

    def _encode_apart(self, text: str, *, first: bool) -> list[int]:
        """For models whose own pieces spell control tokens: cut each such name after a character."""
        for name, added in self._markup.items():
            if added.token_id in self._forbidden and len(name) > 1 and (place := text.find(name)) >= 0:
                cut = place + 1
                return [
                    *self._encode_plain(text[:cut], first=first),
                    *self._encode_plain(text[cut:], first=False),
                ]
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return [token_id for token_id in ids if token_id not in self._forbidden]

    @cached_property
    def _forbidden(self) -> frozenset[int]:
        """Ids that no text of a caller's becomes; the one for unknown text may stand for it."""
        unknown = self._special.names.get("unk_token")
        return frozenset(
            added.token_id for name, added in self._markup.items() if name not in (unknown, "<unk>")
        )

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer | None:
        """For segments inside a text, where only the first one gets a space put before it."""
        state = _state(self._core.pre_tokenizer)
        if state.get("type") != "Metaspace" or state.get("prepend_scheme") != "first":
            return None
        import tokenizers

        described = json.loads(self._core.to_str())
        described["pre_tokenizer"]["prepend_scheme"] = "never"
        inner = tokenizers.Tokenizer.from_str(json.dumps(described))
        inner.add_special_tokens([self._added[one.token_id] for one in self._markup.values()])
        inner.encode_special_tokens = True
        return inner

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id < 0:
            raise InvalidValueError("token_id", observed=token_id, limit="0 or more", remedy="check the ids")
        if token_id in self._control_ids or token_id >= 1 << 32:
            return b""
        piece: str | None = self._core.id_to_token(token_id)
        if piece is None:
            return b""
        if self._pieces is Pieces.BYTE_LEVEL:
            if token_id in self._added:
                return piece.encode()
            return b"".join(_BYTE_OF.get(character, character.encode()) for character in piece)
        if (match := _BYTE_PIECE.fullmatch(piece)) and token_id not in self._added:
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """A part of a rendered text: plain text, or one control token."""

    text: str = ""
    token_id: int | None = None
    first: bool = False
    """Nothing stands before it."""


def _markup(added: Mapping[int, Any], control_ids: frozenset[int], template: str) -> dict[str, _Added]:
    """The control tokens and markers by name."""
    found: dict[str, _Added] = {}
    for token_id, token in added.items():
        name: str = token.content
        is_marker = len(name) > 2 and not name[0].isalnum() and not name[0].isspace() and name in template
        if name and (token_id in control_ids or is_marker or _CONTROL_LIKE.fullmatch(name)):
            found[name] = _Added(token_id=token_id, eats_left=token.lstrip, eats_right=token.rstrip)
    return found


def _pieces_of(core: tokenizers.Tokenizer, model: str) -> Pieces:
    state = json.dumps(_state(core.decoder), ensure_ascii=False)
    if '"ByteLevel"' in state:
        return Pieces.BYTE_LEVEL
    if "▁" in state:
        return Pieces.SENTENCEPIECE
    raise UnsupportedModelError(
        model,
        reason=f"its tokenizer's decoder {state[:80]} is not supported",
        remedy="use a model with a byte-level or SentencePiece tokenizer",
    )


def _state(component: Any) -> dict[str, Any]:
    """A component of the library as its JSON describes it."""
    if component is None:
        return {}
    described: dict[str, Any] = json.loads(component.__getstate__())
    return described


def _gpt2_bytes() -> Mapping[str, bytes]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): bytes([value]) for value in printable}
    others = [value for value in range(256) if value not in set(printable)]
    return table | {chr(0x100 + place): bytes([value]) for place, value in enumerate(others)}


_BYTE_OF = _gpt2_bytes()
