"""What each precision costs in quality, measured by the backend on texts that ship here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from uuid import uuid4

from paceline.policy import Served
from paceline_engine.backends.base import Comparing
from paceline_engine.errors import PromptTooLongError
from paceline_engine.fidelity import Fidelity, FidelityRequest
from paceline_engine.mode import Variant
from paceline_policies.modes import offered_variants
from paceline_policies.quality import Quality, quality

MAX_TEXTS = 8
MOST_CHARACTERS = 640
"""Of each text, some 160 tokens."""
COMPARED = 0.4
"""Of each text; what comes before is its context. A compared token needs the output matrix, which can make it
several times as dear as one of the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldText:
    """A text on which variants are compared: its tokens, and the first that is compared."""

    token_ids: tuple[int, ...]
    first_compared: int = 1


async def measure_quality(
    served: Served, texts: Sequence[HeldText], *, on_share: Callable[[float], object]
) -> dict[Variant, Quality]:
    """Each variant beside the best one; nothing for a backend that cannot compare them.

    Args:
        on_share: told of the share of the texts that is done.
    """
    variants = offered_variants(served.info)
    if not isinstance(served.backend, Comparing):
        return {variants[0]: Quality(value=1.0)} if len(variants) == 1 else {}
    found: dict[Variant, list[Fidelity]] = {variant: [] for variant in variants}
    for done, text in enumerate(texts):
        request = FidelityRequest(
            id=uuid4().hex,
            token_ids=text.token_ids,
            first_compared=text.first_compared,
            reference=variants[0],
        )
        try:
            compared = await served.backend.compare(request)
        except PromptTooLongError:  # a cache too small to hold one text for every variant
            return {}
        for variant, fidelity in compared.items():
            if variant in found:
                found[variant].append(fidelity)
        on_share((done + 1) / len(texts))
    return {variant: quality(reference=found[variants[0]], variant=found[variant]) for variant in variants}


async def held_texts(served: Served, *, quick: bool = False) -> list[HeldText]:
    """The agent dialogues that ship here, as the model would read them; short where its context is small."""
    text = files("paceline").joinpath("data/quality.txt").read_text(encoding="utf-8")
    found: list[HeldText] = []
    for dialogue in text.split("\n\n\n")[: 2 if quick else MAX_TEXTS]:
        prompt = await served.backend.prepare(
            [{"role": "user", "content": dialogue.strip()[:MOST_CHARACTERS]}]
        )
        token_ids = prompt.token_ids[: served.info.context_tokens]
        found.append(
            HeldText(token_ids=token_ids, first_compared=max(1, round(len(token_ids) * (1 - COMPARED))))
        )
    return found
