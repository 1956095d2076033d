"""Whether a prompt and what is to follow it can fit at all."""

from __future__ import annotations

from paceline_engine.errors import PromptTooLongError


def check_fits(
    *, n_prompt: int, n_more: int, more: str, context_tokens: int, capacity_tokens: int | None
) -> None:
    """Refuse what can never run, however long it waits.

    Args:
        more: what ``n_more`` counts, as the caller calls it.
        capacity_tokens: what the KV cache holds; None where that is not known. The last token's KV is never
            needed, so one token more fits.

    Raises:
        PromptTooLongError: naming the limit that is passed.
    """
    limit, what = context_tokens, "the model's context"
    if capacity_tokens is not None and capacity_tokens + 1 < context_tokens:
        limit, what = capacity_tokens + 1, "the KV cache"
    if n_prompt + n_more <= limit:
        return
    lower = f", lower {more}" if more == "max_tokens" and n_more > 1 else ""
    raise_it = ", or raise kv_tokens" if limit < context_tokens else ""
    raise PromptTooLongError(
        "prompt",
        observed=f"{n_prompt} tokens and {n_more} for {more}",
        limit=f"at most {limit} tokens together with {more} ({what})",
        remedy=f"shorten the prompt{lower}{raise_it}",
    )
