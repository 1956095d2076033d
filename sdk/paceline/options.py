"""The keyword arguments of ``stream`` and ``generate``, checked before anything runs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypedDict, cast

from paceline_engine.errors import InvalidValueError, UnknownOptionError
from paceline_engine.grammar.base import Grammar
from paceline_engine.numeric import is_number, is_whole, plain_number
from paceline_engine.request import MAX_CHOICES, Message, SamplingParams
from paceline_policies.slo import SLO


class GenerateOptions(TypedDict, total=False):
    """Every option of a generation beside ``max_tokens``, ``tools`` and ``slo``.

    The default is greedy: the likeliest token each time.
    """

    temperature: float
    """0 is greedy, the default; higher draws less likely tokens more often."""
    top_p: float
    """Draw from the fewest tokens whose probabilities reach this sum; 1, the default, is off."""
    top_k: int
    """Draw from this many likeliest tokens; 0, the default, is off."""
    min_p: float
    """Drop tokens below this share of the likeliest token's probability; 0, the default, is off."""
    repetition_penalty: float
    """Makes tokens of the prompt and the answer less likely above 1, the default."""
    presence_penalty: float
    """Subtracted once from the logit of each token in the answer; 0, the default, is off."""
    frequency_penalty: float
    """Subtracted for each time that a token is in the answer; 0, the default, is off."""
    logit_bias: Mapping[int, float]
    """Added to the logits of these token ids."""
    seed: int | None
    """The same seed draws the same tokens."""
    min_tokens: int
    """Nothing ends the answer before this many tokens."""
    logprobs: int | None
    """Report this many likeliest tokens for each place, 20 at most; 0 reports the drawn one alone."""
    stop: str | Sequence[str]
    """Texts that end the answer; they are not part of it."""
    stop_token_ids: Sequence[int]
    """Token ids that end the answer, beside the model's own."""
    n: int
    """How many choices to generate for the one prompt."""
    ignore_eos: bool
    """Go on past the model's end tokens, up to ``max_tokens``."""
    salt: str
    """Prefixes are shared only between requests of the same salt: one for each tenant."""
    session: str
    """Names the conversation, or the row of them, that the call belongs to. Text of its earlier calls is
    drafted where it comes again, also when the prompt no longer holds it; the answer is the same as without.
    A session is one of its salt's, and is forgotten with ``client.end_session``, or after half an hour."""
    adapter: str | None
    """The name of an adapter that the backend serves."""
    json_schema: Mapping[str, Any] | str | type[Any] | None
    """A JSON schema, its text, or a pydantic model's class; ``Answer.parsed`` holds the answer's value."""
    regex: str | None
    """A regular expression that the whole answer has to match."""
    one_of: Sequence[str] | None
    """The answer is one of these texts."""
    mix_cache: bool
    """Let the prefix cache serve what lower variants computed; by default quality is not mixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checked options of one generation."""

    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    ignore_eos: bool = False
    salt: str = ""
    session: str = ""
    adapter: str | None = None
    grammar: Grammar | None = None
    parse: Callable[[str], Any] | None = None
    """From the text of a choice to the value that its JSON schema describes."""
    mix_cache: bool = False
    """Let the prefix cache serve what lower variants computed; by default quality is not mixed."""


_GRAMMARS = ("json_schema", "regex", "one_of")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_INTEGERS = ("top_k", "min_tokens", "n")
_OPTIONAL_INTEGERS = ("seed", "logprobs")
_EACH: Mapping[str, str] = MappingProxyType({"salt": "tenant", "session": "session"})
_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


def parse_options(given: Mapping[str, Any]) -> Options:
    """Check names, types and ranges.

    Raises:
        UnknownOptionError: a name that is none of ``GenerateOptions``, with the closest ones.
        InvalidValueError: a value of the wrong type or out of range.
    """
    values = dict(given)
    for name in values:
        if name not in GenerateOptions.__annotations__:
            raise _unknown(name)
    values = {name: _plain(value) for name, value in values.items()}
    for name, value in values.items():
        _check_type(name, value)
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    if "stop" in values:
        stop = values["stop"]
        values["stop"] = (stop,) if isinstance(stop, str) else _texts("stop", stop)
        if not all(values["stop"]):
            raise InvalidValueError(
                "stop", observed=stop, limit="made of non-empty texts", remedy="drop the empty text"
            )
    if "stop_token_ids" in values:
        values["stop_token_ids"] = _token_ids(values["stop_token_ids"])
    if not 1 <= values.get("n", 1) <= MAX_CHOICES:
        raise InvalidValueError(
            "n", observed=values["n"], limit=f"1 to {MAX_CHOICES}", remedy="use 1 for one choice"
        )
    for name in _GRAMMARS:
        if values.get(name) is None:
            values.pop(name, None)
    grammars = {name: values.pop(name) for name in _GRAMMARS if name in values}
    if grammars:
        values["grammar"], values["parse"] = _grammar(grammars, ignore_eos=values.get("ignore_eos", False))
    sampling = {name: values.pop(name) for name in list(values) if name in _SAMPLING}
    return Options(sampling=SamplingParams(**sampling), **values)


def _grammar(given: Mapping[str, Any], *, ignore_eos: bool) -> tuple[Grammar, Callable[[str], Any] | None]:
    """The one grammar given, and how its answers are read."""
    (name, value), *others = given.items()
    if others or ignore_eos:
        raise InvalidValueError(
            name,
            observed=value,
            limit=f"given without {others[0][0] if others else 'ignore_eos'}",
            remedy="use one of them",
        )
    if name == "one_of":
        return Grammar.one_of(_texts(name, value)), None
    if name == "regex":
        if not isinstance(value, str):
            raise InvalidValueError(name, observed=value, limit="a text", remedy="pass the pattern's text")
        return Grammar.regex(value), None
    if isinstance(value, type) and callable(getattr(value, "model_json_schema", None)):
        model = cast("Any", value)
        return Grammar.json_schema(model.model_json_schema()), model.model_validate_json
    return Grammar.json_schema(cast("Mapping[str, Any]", value)), json.loads


def check_max_tokens(max_tokens: object) -> int | None:
    """The cap as given, or None where the budgets are to set it."""
    max_tokens = plain_number(max_tokens)
    if max_tokens is None:
        return None
    if not is_whole(max_tokens) or cast("int", max_tokens) < 1:
        raise InvalidValueError(
            "max_tokens",
            observed=max_tokens,
            limit="an integer of at least 1, or None",
            remedy="None lets the budgets set it; turn.choose() scores options and generates nothing",
        )
    return cast("int", max_tokens)


def check_messages(messages: object) -> tuple[Message, ...]:
    """A conversation as messages; a bare text is one user message.

    Raises:
        InvalidValueError: nothing in it, or something that is no message.
    """
    if isinstance(messages, str):
        if not messages:
            raise _no_messages(messages)
        return ({"role": "user", "content": messages},)
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise InvalidValueError(
            "messages",
            observed=messages,
            limit="a text or a list of messages",
            remedy="pass [{'role': 'user', 'content': '...'}]",
        )
    found = cast("Sequence[object]", messages)
    if not found:
        raise _no_messages(found)
    for place, message in enumerate(found):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidValueError(
                f"messages[{place}]",
                observed=message,
                limit="a mapping with a 'role'",
                remedy="pass {'role': 'user', 'content': '...'}",
            )
    return tuple(cast("Sequence[Message]", found))


def check_options(options: object) -> tuple[str, ...]:
    """The options of ``choose``: at least one non-empty text, each once."""
    texts = _texts("options", options)
    if not texts or not all(texts) or len(set(texts)) != len(texts):
        raise InvalidValueError(
            "options",
            observed=options,
            limit="at least one text, none empty and none twice",
            remedy="give the texts to choose from, such as ['yes', 'no']",
        )
    return texts


def check_slo(slo: object) -> SLO | None:
    if slo is not None and not isinstance(slo, SLO):
        text = isinstance(slo, str)
        remedy = f"use paceline.SLO.parse({slo!r})" if text else "use paceline.SLO(...)"
        raise InvalidValueError("slo", observed=slo, limit="an SLO or None", remedy=remedy)
    return slo


def check_name(name: object) -> None:
    """A name of a turn or a tool."""
    if not isinstance(name, str) or not name:
        raise InvalidValueError("name", observed=name, limit="a non-empty text", remedy="pass a name")


def _no_messages(observed: object) -> InvalidValueError:
    return InvalidValueError(
        "messages", observed=observed, limit="non-empty", remedy="pass at least one message"
    )


def _unknown(name: str) -> UnknownOptionError:
    known = sorted([*GenerateOptions.__annotations__, "max_tokens", "slo", "tools"])
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    remedy = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known are {', '.join(known)}"
    return UnknownOptionError("option", observed=name, limit="one that a generation knows", remedy=remedy)


def _check_type(name: str, value: object) -> None:
    def require(ok: bool, limit: str, remedy: str) -> None:
        if not ok:
            raise InvalidValueError(name, observed=value, limit=limit, remedy=remedy)

    if name in _NUMBERS:
        require(is_number(value), "a number", "leave it out for none")
    elif name in _INTEGERS:
        require(is_whole(value), "an integer", "leave it out for the default")
    elif name in _OPTIONAL_INTEGERS:
        require(value is None or is_whole(value), "an integer or None", "use None for none")
    elif name == "ignore_eos":
        require(isinstance(value, bool), "True or False", "False ends at the model's end tokens")
    elif name == "mix_cache":
        require(isinstance(value, bool), "True or False", "False serves no cache of a lower variant")
    elif name in ("salt", "session"):
        require(isinstance(value, str), "a text", f"use one text for each {_EACH[name]}")
    elif name == "adapter":
        require(value is None or isinstance(value, str), "a name or None", "use None for the base model")


def _plain(value: Any) -> Any:
    """A text or number without a class of the caller's, which only the caller's process may know."""
    return _text(value) if isinstance(value, str) else plain_number(value)


def _text(value: str) -> str:
    return value if type(value) is str else str.__str__(value)


def _texts(name: str, value: object) -> tuple[str, ...]:
    items = cast("Sequence[object]", value)
    if (
        isinstance(value, (str, bytes, Mapping))
        or not isinstance(value, Sequence)
        or not all(isinstance(item, str) for item in items)
    ):
        raise InvalidValueError(
            name, observed=value, limit="a list of texts", remedy="put the texts into a list"
        )
    return tuple(map(_text, cast("Sequence[str]", value)))


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, (str, bytes)) and isinstance(value, Sequence):
        items = tuple(map(plain_number, cast("Sequence[object]", value)))
        if all(map(is_whole, items)):
            return cast("tuple[int, ...]", items)
    raise InvalidValueError(
        "stop_token_ids", observed=value, limit="a list of token ids", remedy="use stop for texts"
    )


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidValueError(
            "logit_bias", observed=value, limit="a mapping of token ids to numbers", remedy="pass {id: bias}"
        )
    given = cast("Mapping[object, object]", value)
    found = {plain_number(token_id): plain_number(bias) for token_id, bias in given.items()}
    for token_id, bias in found.items():
        if not is_whole(token_id) or not is_number(bias):
            raise InvalidValueError(
                "logit_bias",
                observed={token_id: bias},
                limit="a mapping of token ids to numbers",
                remedy="token ids are integers, biases are numbers",
            )
    return cast("dict[int, float]", found)
