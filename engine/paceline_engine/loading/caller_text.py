"""Text of the caller's inside a chat template, kept apart from the template's own.

A template joins its control tokens (``<|im_start|>``) and the caller's text into one string, and after that
nobody can tell which ``<|im_start|>`` was whose. So before rendering, each character that occurs in the name
of a control token is replaced in the caller's text by a private-use character that occurs nowhere else. No
control token can hold a character of the caller's then, however pieces are cut and joined: neither a whole
name, nor one that the template begins (Qwen 3 Coder writes a tool's keys as ``<key>``). So each one found in
the rendered text is the template's alone. Afterwards the characters are put back.

The template must not notice: it trims, splits and tests the text (Qwen 3 looks for ``</think>``). One
character stands for one, and ``CallerText`` answers every method of ``str`` as the original text would.
Should an operation lose the type, the text stays safe and only such a test may fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, SupportsIndex

from paceline_engine.errors import InvalidValueError

_PRIVATE_USE = range(0x10_0000, 0x10_FFFE)
MAX_DEPTH = 64
"""Of nested lists and objects in a message or tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disguise:
    """Which characters are replaced by which, and back."""

    hide: Mapping[int, int]
    show: Mapping[int, int]
    starts: frozenset[str]
    """The characters with which control tokens begin."""

    @classmethod
    def of(cls, characters: Sequence[str], *, starts: frozenset[str], texts: Iterable[str]) -> Disguise:
        """Replacements for the ``characters`` of control tokens' names, that occur in none of ``texts``.

        Raises:
            InvalidValueError: the texts leave too few private-use characters over.
        """
        used = {character for text in texts for character in text if ord(character) >= _PRIVATE_USE.start}
        free = list(islice((code for code in _PRIVATE_USE if chr(code) not in used), len(characters)))
        if len(free) < len(characters):
            raise InvalidValueError(
                "messages",
                observed=f"{len(used)} different private-use characters",
                limit=f"texts with at most {len(_PRIVATE_USE) - len(characters)} of U+100000 to U+10FFFD",
                remedy="leave some of them out",
            )
        hide = {ord(character): code for character, code in zip(characters, free, strict=True)}
        return cls(hide=hide, show={code: character for character, code in hide.items()}, starts=starts)

    def shown(self, text: str) -> str:
        return str.translate(text, self.show)

    def hidden(self, text: str) -> CallerText:
        return CallerText(str.translate(self.shown(text), self.hide), self)

    def wrap(self, value: Any, depth: int = 0, *, field: str = "messages") -> Any:
        """The value with every text in it hidden."""
        if isinstance(value, str):
            return self.hidden(value)
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if depth < MAX_DEPTH:
            if isinstance(value, Mapping) and not any(isinstance(key, (tuple, list)) for key in value):
                return {
                    self.wrap(key, field=field): self.wrap(item, depth + 1, field=field)
                    for key, item in value.items()
                }
            if isinstance(value, (list, tuple)):
                return [self.wrap(item, depth + 1, field=field) for item in value]
        raise InvalidValueError(
            field,
            observed=value,
            limit=f"made of texts, numbers, lists and objects, nested {MAX_DEPTH} deep at most",
            remedy="turn other objects into text or JSON first",
        )

    def unwrap(self, value: Any) -> Any:
        """The value with every text in it shown."""
        if isinstance(value, str):
            return self.shown(value)
        if isinstance(value, Mapping):
            return {self.unwrap(key): self.unwrap(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.unwrap(item) for item in value]
        return value

    def join(self, parts: Iterable[str]) -> str:
        """Joined parts; still the caller's where none of the others could begin a control token."""
        found = list(parts)
        text = str.join("", found)
        if any(isinstance(part, CallerText) for part in found) and all(map(self._is_harmless, found)):
            return CallerText(text, self)
        return text

    def _is_harmless(self, text: str) -> bool:
        return isinstance(text, CallerText) or self.starts.isdisjoint(text)


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a value that ``Disguise.wrap`` does not refuse; a value may hold itself."""
    pending = [(value, 0)]
    while pending:
        one, depth = pending.pop()
        if isinstance(one, str):
            yield one
        elif depth > MAX_DEPTH + 1:
            continue
        elif isinstance(one, Mapping):
            pending.extend((inner, depth + 1) for part in one.items() for inner in part)
        elif isinstance(one, (list, tuple)):
            pending.extend((inner, depth + 1) for inner in one)


def _as_shown(name: str) -> Callable[..., Any]:
    """A method of ``str`` that works on the original text and hides what it returns."""
    method = getattr(str, name)

    def call(self: CallerText, *args: Any, **kwargs: Any) -> Any:
        disguise = self._disguise
        arguments = [_shown_argument(disguise, argument) for argument in args]
        result = method(disguise.shown(self), *arguments, **kwargs)
        if isinstance(result, (str, list, tuple)):
            return _hidden_result(disguise, result)
        return result

    call.__name__ = name
    return call


def _shown_argument(disguise: Disguise, argument: Any) -> Any:
    if isinstance(argument, str):
        return disguise.shown(argument)
    if isinstance(argument, tuple):
        return tuple(_shown_argument(disguise, one) for one in argument)
    return argument


def _hidden_result(disguise: Disguise, result: Any) -> Any:
    if isinstance(result, str):
        return disguise.hidden(result)
    if isinstance(result, tuple):
        return tuple(disguise.hidden(one) for one in result)
    return [disguise.hidden(one) for one in result]


class CallerText(str):
    """Hidden text that answers as the original would."""

    _disguise: Disguise

    def __new__(cls, text: str, disguise: Disguise) -> CallerText:
        made = super().__new__(cls, text)
        made._disguise = disguise
        return made

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(self._disguise.shown(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return NotImplemented
        return self._disguise.shown(self) == self._disguise.shown(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __iter__(self) -> Iterator[str]:
        return iter([CallerText(character, self._disguise) for character in str.__iter__(self)])

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return CallerText(str.__getitem__(self, key), self._disguise)

    def __add__(self, other: str) -> str:
        return self._disguise.join([self, other])

    def __radd__(self, other: str) -> str:
        return self._disguise.join([other, self])

    for _name in (
        "__contains__", "capitalize", "casefold", "count", "endswith", "find", "index", "lower", "lstrip",
        "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit",
        "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "isalnum",
        "isalpha", "isascii", "isdigit", "isidentifier", "islower", "isprintable", "isspace", "istitle",
        "isupper",
    ):  # fmt: skip
        locals()[_name] = _as_shown(_name)
    del _name
