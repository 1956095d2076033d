"""What is refused before anything of it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

from paceline_engine.errors import (
    DeadlineExpiredError,
    InvalidValueError,
    PromptTooLongError,
    UnknownOptionError,
)
from paceline_engine.fidelity import FidelityRequest
from paceline_engine.grammar.compiler import Compiled
from paceline_engine.limits import check_fits
from paceline_engine.mode import Variant
from paceline_engine.model.base import ModelRunner
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, ScoreRequest


def check_generation(request: GenerationRequest, plan: Plan, runner: ModelRunner) -> None:
    """Refuse a generation that this model cannot run as asked.

    Raises:
        InvalidValueError: naming the field.
    """
    _check_common(request, plan, runner)
    _check_ids("logit_bias", request.sampling.logit_bias, runner.spec.vocab_size)
    _check_ids("stop_token_ids", request.stop_token_ids, runner.spec.vocab_size)
    _check_fits(runner, n_prompt=len(request.prompt.token_ids), n_more=plan.max_tokens, more="max_tokens")


def check_score(
    request: ScoreRequest, plan: Plan, options: Sequence[Sequence[int]], runner: ModelRunner
) -> None:
    """Refuse a scoring that this model cannot run as asked; ``options`` are the tokenized options."""
    _check_common(request, plan, runner)
    for text, ids in zip(request.options, options, strict=True):
        if not ids:
            raise InvalidValueError(
                "options", observed=text, limit="texts of at least one token", remedy="drop this option"
            )
        _check_ids("options", ids, runner.spec.vocab_size)
    longest = max(map(len, options))
    _check_fits(runner, n_prompt=len(request.prompt.token_ids), n_more=longest, more="the longest option")


def check_fidelity(request: FidelityRequest, runner: ModelRunner, *, blocks_needed: int) -> None:
    """Refuse a comparison that this model cannot run as asked."""
    check_variant(request.reference, runner.variants)
    _check_ids("token_ids", request.token_ids, runner.spec.vocab_size)
    _check_fits(runner, n_prompt=len(request.token_ids), n_more=0, more="nothing")
    if blocks_needed > runner.n_blocks:
        raise PromptTooLongError(
            "token_ids",
            observed=f"{len(request.token_ids)} tokens, each run as {len(runner.variants)} variants",
            limit=f"{runner.n_blocks} KV blocks of {runner.block_size} tokens for all variants together",
            remedy="compare a shorter text, or raise kv_tokens",
        )


def check_grammar_fits(compiled: Compiled, plan: Plan) -> None:
    """Refuse a token cap in which no output of the grammar was found to fit."""
    shortest = compiled.shortest
    if shortest is not None and len(shortest) > plan.max_tokens:
        raise InvalidValueError(
            "max_tokens",
            observed=plan.max_tokens,
            limit=f"at least {len(shortest)}, the tokens of the shortest {compiled.grammar.kind} output",
            remedy="raise max_tokens, or the budgets where they set it, or ask for less in the grammar",
        )


def check_variant(variant: Variant, variants: Iterable[Variant]) -> None:
    if variant not in (loaded := tuple(variants)):
        raise UnknownOptionError(
            "variant",
            observed=str(variant),
            limit=f"one of {', '.join(loaded)}",
            remedy="choose a variant that is loaded, or load this one",
        )


def deadline_error(plan: Plan, now_s: float) -> DeadlineExpiredError | None:
    """The error of work whose deadline has passed: however urgent it looks, it is not run."""
    if plan.deadline_at_s is None or plan.deadline_at_s > now_s:
        return None
    return DeadlineExpiredError(late_ms=(now_s - plan.deadline_at_s) * 1e3)


def _check_common(request: GenerationRequest | ScoreRequest, plan: Plan, runner: ModelRunner) -> None:
    for variant in (plan.mode.variant, *plan.fallback_variants):
        check_variant(variant, runner.variants)
    speculation = plan.mode.speculation
    if speculation is not None and speculation.draft_variant is not None:
        check_variant(speculation.draft_variant, runner.variants)
    if not request.prompt.token_ids:
        raise InvalidValueError(
            "prompt",
            observed=request.prompt.token_ids,
            limit="at least one token",
            remedy="begin an empty prompt with the model's start token",
        )
    _check_ids("prompt", request.prompt.token_ids, runner.spec.vocab_size)


def _check_fits(runner: ModelRunner, *, n_prompt: int, n_more: int, more: str) -> None:
    check_fits(
        n_prompt=n_prompt,
        n_more=n_more,
        more=more,
        context_tokens=runner.spec.context_tokens,
        capacity_tokens=runner.n_blocks * runner.block_size,
    )


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not _is_id(token_id) or not 0 <= token_id < vocab_size:
            raise InvalidValueError(
                field,
                observed=token_id,
                limit=f"made of token ids from 0 to {vocab_size - 1}",
                remedy="use ids of this model's tokenizer",
            )


def _is_id(value: object) -> bool:
    """Whether it is a whole number of any type: 1.5 would be cut to another token's id."""
    return type(value) is int or (not isinstance(value, bool) and isinstance(value, Integral))
