"""What an output may be told to keep to. Needs neither torch nor a grammar library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from paceline_engine.errors import InvalidValueError
from paceline_engine.grammar.finite import find_fault

MAX_SCHEMA_CHARACTERS = 200_000
MAX_SCHEMA_DEPTH = 96
"""Nested objects and arrays of the schema's own text."""
MAX_REGEX_CHARACTERS = 10_000
MAX_TEXTS = 2_000
MAX_TEXTS_CHARACTERS = 200_000


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    ONE_OF = "one_of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The form that every choice of a request keeps to. Make one with the class methods."""

    kind: GrammarKind
    text: str
    """The JSON schema, the regular expression, or the texts as a JSON array."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that is valid against ``schema``, written without spaces between its parts.

        Args:
            schema: a JSON schema, as an object or as its text.

        Raises:
            InvalidValueError: no JSON, too long, nested too deeply, or nothing finite can match it: a
                required property that needs itself again, an empty ``enum``, a minimum above its maximum.
        """
        if isinstance(schema, str):
            _check_length("json_schema", schema, MAX_SCHEMA_CHARACTERS, "split the answer into several calls")
        try:
            loaded = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(loaded, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _no_schema(schema, f"mend this: {type(error).__name__}: {error}") from error
        if not isinstance(loaded, Mapping):
            raise _no_schema(schema, "a schema is an object, such as {'type': 'object', 'properties': {}}")
        _check_length("json_schema", text, MAX_SCHEMA_CHARACTERS, "split the answer into several calls")
        if (depth := _depth_of(loaded)) > MAX_SCHEMA_DEPTH:
            raise InvalidValueError(
                "json_schema",
                observed=f"{depth} levels",
                limit=f"nested at most {MAX_SCHEMA_DEPTH} levels deep",
                remedy="move inner schemas to $defs and point to them with $ref",
            )
        if (fault := find_fault(loaded)) is not None:
            raise InvalidValueError(
                "json_schema",
                observed=loaded,
                limit="matched by some finite text",
                remedy=f"at {fault.place} {fault.reason}: {fault.remedy}",
            )
        return cls(kind=GrammarKind.JSON_SCHEMA, text=text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that the regular expression matches from its beginning to its end.

        Raises:
            InvalidValueError: it is empty or too long. What its syntax lacks is found when it is compiled.
        """
        if not pattern:
            raise InvalidValueError(
                "regex", observed=pattern, limit="a non-empty pattern", remedy="leave it out for any text"
            )
        _check_length("regex", pattern, MAX_REGEX_CHARACTERS, "write a shorter pattern")
        return cls(kind=GrammarKind.REGEX, text=pattern)

    @classmethod
    def one_of(cls, texts: Sequence[str]) -> Grammar:
        """One of ``texts``.

        Raises:
            InvalidValueError: none, an empty one, one twice, or too many.
        """
        if not texts or len(texts) > MAX_TEXTS or not all(texts) or len(set(texts)) != len(texts):
            raise InvalidValueError(
                "one_of",
                observed=texts,
                limit=f"1 to {MAX_TEXTS} texts, none empty and none twice",
                remedy="give the texts to choose from, such as ['yes', 'no']",
            )
        _check_length("one_of", "".join(texts), MAX_TEXTS_CHARACTERS, "give fewer or shorter texts")
        return cls(kind=GrammarKind.ONE_OF, text=json.dumps(list(texts), ensure_ascii=False))


def _no_schema(schema: object, remedy: str) -> InvalidValueError:
    return InvalidValueError("json_schema", observed=schema, limit="a JSON schema", remedy=remedy)


def _check_length(field: str, text: str, most: int, remedy: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidValueError(
            field, observed=text, limit="made of whole characters", remedy="leave out the lone surrogates"
        )
    if len(text) > most:
        raise InvalidValueError(
            field, observed=f"{len(text)} characters", limit=f"at most {most} characters", remedy=remedy
        )


def _depth_of(value: object) -> int:
    """Levels of nested objects and arrays, counted without recursion."""
    depth = 0
    level: list[object] = [value]
    while level := [
        child
        for item in level
        if isinstance(item, Mapping | list)
        for child in (item.values() if isinstance(item, Mapping) else item)
    ]:
        depth += 1
    return depth
