"""One choice's output: which tokens count, which text is sent, and when it has ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline_engine.chunk import FinishReason, TokenLogprob
from paceline_engine.loading.base import Tokenizer
from paceline_engine.sampling.sampler import Drawn
from paceline_engine.text.detokenize import Detokenizer
from paceline_engine.text.stops import StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    reason: FinishReason
    stop_text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What newly drawn tokens add to the output."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    ending: Ending | None = None


class Form(Protocol):
    """What an output must look like."""

    def complete(self, output_ids: Sequence[int]) -> bool:
        """Whether nothing can follow."""
        ...

    def cut_short(self, n_output: int) -> FinishReason | None:
        """The limit that decided some of the first ``n_output`` tokens; None where all were free."""
        ...


class Output:
    """Takes the drawn tokens of one choice, one or several at a time, with the same result."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        end_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        form: Form | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._end_ids = frozenset(end_ids)
        self._min_tokens = min_tokens
        self._form = form
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stop)
        self._sent: list[str] = []
        self.token_ids: list[int] = []
        """All that count as completion tokens: the end token does, what follows it does not."""
        self.ending: Ending | None = None

    @property
    def text(self) -> str:
        """All text sent so far."""
        return "".join(self._sent)

    def accept(self, drawn: Sequence[Drawn]) -> Piece:
        """Take the next tokens, up to the one that ends the output; those after it are dropped."""
        texts: list[str] = []
        taken: list[Drawn] = []
        for token in drawn:
            if self.ending is not None:
                break
            taken.append(token)
            texts.append(self._accept_one(token.token_id))
        text = "".join(texts)
        self._sent.append(text)
        logprobs = tuple(self._logprob(token, token.logprob) for token in taken if token.logprob is not None)
        return Piece(
            text=text,
            token_ids=tuple(token.token_id for token in taken),
            logprobs=logprobs or None,
            ending=self.ending,
        )

    def end(self, reason: FinishReason) -> Piece:
        """End the output from outside, sending what was held back."""
        text = self._flush(reason)
        self._sent.append(text)
        return Piece(text=text, ending=self.ending)

    def _accept_one(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        count = len(self.token_ids)
        if token_id in self._end_ids and count > self._min_tokens:
            return self._flush(self._own_end())
        text = self._detokenizer.push(token_id)
        if count >= self._min_tokens:  # before, a stop string is text like any other
            text = self._match(text)
        if self.ending is None and self._form is not None and self._form.complete(self.token_ids):
            text += self._flush(self._own_end())
        if self.ending is None and count >= self._max_tokens:
            text += self._flush(FinishReason.LENGTH)
        return text

    def _own_end(self) -> FinishReason:
        """Why an output that came to its end did so: a limit may have brought it there."""
        cause = None if self._form is None else self._form.cut_short(len(self.token_ids))
        return FinishReason.STOP if cause is None else cause

    def _match(self, text: str) -> str:
        settled = self._stops.push(text)
        if settled.stop is not None:
            self.ending = Ending(reason=FinishReason.STOP, stop_text=settled.stop)
        return settled.text

    def _flush(self, reason: FinishReason) -> str:
        text = self._match(self._detokenizer.flush())
        if self.ending is None:
            self.ending = Ending(reason=reason)
            text += self._stops.flush()
        return text

    def _logprob(self, token: Drawn, logprob: float) -> TokenLogprob:
        return TokenLogprob(
            token_id=token.token_id,
            text=self._text_of(token.token_id),
            logprob=logprob,
            top=tuple((token_id, self._text_of(token_id), value) for token_id, value in token.top),
        )

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
