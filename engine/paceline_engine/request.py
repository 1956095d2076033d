"""What is to be generated or scored, apart from how (that is the plan)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from paceline_engine.errors import InvalidValueError
from paceline_engine.grammar.base import Grammar
from paceline_engine.numeric import is_finite, is_whole

MAX_CHOICES = 128
"""Of one request. Each is a sequence of its own, with a place in every step."""

Message = Mapping[str, Any]
"""One chat message: ``role``, ``content``, and for tools ``tool_calls``, ``tool_call_id``, ``name``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A rendered and tokenized conversation, as a backend prepared it."""

    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    """Empty where the backend tokenizes on its own side (a remote server)."""
    n_tokens: int
    """Exact where ``token_ids`` is filled, else the backend's estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. The default is greedy."""

    temperature: float = 0.0
    """0 (or next to it) is greedy."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this; 0 keeps the most likely one."""
    top_k: int = 0
    """Most tokens kept; 0 is off, more than the vocabulary keeps all."""
    min_p: float = 0.0
    """Drop tokens below this share of the most likely token's probability."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logit of each token in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    """Added to the logits of these token ids."""
    seed: int | None = None
    """The same seed gives the same draws, whatever else shares the batch."""
    min_tokens: int = 0
    """No end token or stop string ends the output before this many tokens; the end of a grammar does."""
    logprobs: int | None = None
    """Report this many most likely tokens for each position (0: only the one drawn)."""

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, limit: str, remedy: str) -> None:
            if not ok:
                raise InvalidValueError(name, observed=getattr(self, name), limit=limit, remedy=remedy)

        finite = is_finite
        check("temperature", finite(self.temperature) and self.temperature >= 0, "0 or more", "0 is greedy")
        check("top_p", finite(self.top_p) and 0 <= self.top_p <= 1, "between 0 and 1", "1 turns it off")
        check(
            "top_k", is_whole(self.top_k) and self.top_k >= 0, "a whole number, 0 or more", "0 turns it off"
        )
        check("min_p", finite(self.min_p) and 0 <= self.min_p <= 1, "between 0 and 1", "0 turns it off")
        check(
            "repetition_penalty",
            finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "above 0",
            "1 turns it off",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            check(name, finite(getattr(self, name)), "a finite number", "0 turns it off")
        biases = cast("object", self.logit_bias)
        check(
            "logit_bias",
            isinstance(biases, Mapping)
            and all(map(finite, cast("Mapping[object, object]", biases).values())),
            "a mapping of token ids to finite numbers",
            "use a large finite bias, such as -100, to forbid a token",
        )
        for name in ("top_k", "min_tokens"):
            value = getattr(self, name)
            check(name, is_whole(value) and value >= 0, "a whole number, 0 or more", "0 turns it off")
        check("seed", self.seed is None or is_whole(self.seed), "None or a whole number", "use None for none")
        check(
            "logprobs",
            self.logprobs is None or (is_whole(self.logprobs) and 0 <= self.logprobs <= 20),
            "None or 0 to 20",
            "use None for none",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One model call."""

    id: str
    """Unique among the requests in flight on a backend."""
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    """Texts that end the output; neither they nor what follows is sent."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Do not end at the model's end tokens (calibration and benchmarks)."""
    grammar: Grammar | None = None
    """What every choice keeps to. End tokens come only where it is complete; where nothing can follow, the
    output ends without one. It is brought to a valid end within the token cap and a hard deadline."""
    n: int = 1
    """Choices to generate for the one prompt."""
    salt: str = ""
    """Requests share cached prefixes only with requests of the same salt (one per tenant)."""
    adapter: str | None = None
    """The name of a LoRA adapter that the backend serves; None for the model itself."""
    session: str = ""
    """Where n-gram drafts may come from beside the prompt: earlier requests of the same session and salt.
    Empty: from nowhere else, and nothing is kept."""

    def __post_init__(self) -> None:
        if not (is_whole(self.n) and 1 <= self.n <= MAX_CHOICES):
            raise InvalidValueError(
                "n", observed=self.n, limit=f"1 to {MAX_CHOICES}", remedy="use 1 for one choice"
            )
        if not _are_texts(self.stop):
            raise InvalidValueError(
                "stop",
                observed=self.stop,
                limit="made of non-empty texts",
                remedy="pass a tuple of texts, none of them empty",
            )
        stop_ids = cast("object", self.stop_token_ids)
        if isinstance(stop_ids, (str, bytes)) or not isinstance(stop_ids, Collection):
            raise InvalidValueError(
                "stop_token_ids",
                observed=stop_ids,
                limit="a collection of token ids",
                remedy="pass a tuple of token ids, and texts as stop",
            )
        _check_names(salt=self.salt, session=self.session, adapter=self.adapter)
        if self.ignore_eos and self.grammar is not None:
            raise InvalidValueError(
                "ignore_eos",
                observed=True,
                limit="False for an output that keeps to a grammar",
                remedy="leave one of the two out: a grammar says where the output ends",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Score each option as a continuation of the prompt, in one prefill, without decoding."""

    id: str
    prompt: Prompt
    options: tuple[str, ...]
    salt: str = ""
    adapter: str | None = None
    option_token_ids: tuple[tuple[int, ...], ...] = ()
    """Of each option, where its client has encoded them; else whoever runs the request does."""

    def __post_init__(self) -> None:
        _check_names(salt=self.salt, adapter=self.adapter)
        if not self.options or not _are_texts(self.options):
            raise InvalidValueError(
                "options",
                observed=self.options,
                limit="at least one non-empty text",
                remedy="give the texts to choose from",
            )
        if self.option_token_ids and len(self.option_token_ids) != len(self.options):
            raise InvalidValueError(
                "option_token_ids",
                observed=len(self.option_token_ids),
                limit=f"one for each of the {len(self.options)} options",
                remedy="leave it out to have the options encoded",
            )


def _are_texts(value: object) -> bool:
    """Whether it is a sequence of non-empty texts, and no text itself."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(text, str) and bool(text) for text in cast("Sequence[object]", value))


def _check_names(**names: object) -> None:
    """What keys shared state must be a text: 1, 1.0 and True would be one key, and a list none at all."""
    for field_name, name in names.items():
        if not isinstance(name, str) and not (field_name == "adapter" and name is None):
            raise InvalidValueError(
                field_name, observed=name, limit="a text", remedy="pass a text, or leave it out for none"
            )
