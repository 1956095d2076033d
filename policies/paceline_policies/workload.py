"""The work that a request would bring to an engine: closed forms over its chunks, no loops over tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline_policies.step_model import StepLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The sequences that decode in the same passes."""

    sequences: float = 0.0
    context_tokens: float = 0.0
    """Sum of their context lengths."""

    def capped(self, most: int) -> Beside:
        """At most ``most`` of them, of the same mean context."""
        if self.sequences <= most:
            return self
        share = most / self.sequences
        return Beside(sequences=float(most), context_tokens=self.context_tokens * share)


def prefill_load(tokens: float, *, start: int, chunk_tokens: int, beside: Beside) -> StepLoad:
    """Prefill of ``tokens`` after ``start`` cached ones, in chunks, each beside the decoding sequences.

    Token j attends to j + 1 entries, so n tokens after s attend to n·s + n(n+1)/2, however they are cut.
    """
    full, rest = divmod(tokens, chunk_tokens)
    sizes = tuple((count, size) for count, size in ((full, chunk_tokens), (1, rest)) if count and size)
    passes = full + (1 if rest else 0)
    return StepLoad(
        passes=passes,
        prefill_passes=passes,
        prefill_sizes=sizes,
        decode_tokens=passes * beside.sequences,
        attended_pairs=tokens * start + tokens * (tokens + 1) / 2 + passes * beside.context_tokens,
    )


def option_load(tokens: float, *, context_tokens: int, chunk_tokens: int, beside: Beside) -> StepLoad:
    """Scoring of options after their prompt: ``tokens`` of all options but the last of each.

    The prompt's own pass scores every first token, so options of one token cost nothing more. Each other
    token needs a row of logits, which prefill does not compute and a decode token's cost includes.
    """
    load = prefill_load(tokens, start=context_tokens, chunk_tokens=chunk_tokens, beside=beside)
    return replace(load, decode_tokens=load.decode_tokens + tokens)


def decode_load(*, context_tokens: float, sequences: float, tokens_each: float, beside: Beside) -> StepLoad:
    """One decode pass of ``sequences`` sequences, each running ``tokens_each`` tokens (more than 1 verifies).

    ``context_tokens`` is the context of each of them.
    """
    own = sequences * context_tokens
    return StepLoad(
        passes=1.0,
        decode_tokens=sequences * tokens_each + beside.sequences,
        decode_context=own + beside.context_tokens,
        attended_pairs=own * tokens_each + beside.context_tokens,
    )
