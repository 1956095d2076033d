"""Drawing by chance with drafts: the distribution is the one without, measured over many unseeded draws."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline_engine.mode import Drafter, Speculation, Variant
from paceline_engine.model.base import Logits
from paceline_engine.request import SamplingParams

MakeBench = Callable[..., Any]

SPECULATIONS = {
    "none": None,
    "self": Speculation(drafter=Drafter.SELF, max_draft_tokens=2, draft_variant=Variant.INT4),
    "ngram": Speculation(drafter=Drafter.NGRAM, max_draft_tokens=3),
}
VOCAB, N_LIVE = 64, 6
N_DRAWS, N_STREAMS = 20_000, 200
SAMPLING = SamplingParams(temperature=0.7, top_p=0.9)
UNLIKELY_SIGMAS = 6.0


def markov_logits(seed: int) -> torch.Tensor:
    """[vocab, vocab]: what follows each token; all but the first few tokens never come."""
    logits = torch.full((VOCAB, VOCAB), -torch.inf)
    logits[:, :N_LIVE] = 1.2 * torch.randn(VOCAB, N_LIVE, generator=torch.Generator().manual_seed(seed))
    return logits


TARGET, BAD_DRAFT = markov_logits(1), markov_logits(2)


def expected(logits: torch.Tensor) -> dict[int, dict[int, float]]:
    """The probabilities after each token, by temperature and top-p as they are defined."""
    found: dict[int, dict[int, float]] = {}
    for token in range(N_LIVE):
        weights = sorted(
            ((math.exp(float(logits[token, i]) / SAMPLING.temperature), i) for i in range(N_LIVE)),
            reverse=True,
        )
        total = sum(weight for weight, _ in weights)
        kept, before = [], 0.0
        for weight, i in weights:
            if before < SAMPLING.top_p * total:
                kept.append((weight, i))
            before += weight
        found[token] = {i: weight / sum(w for w, _ in kept) for weight, i in kept}
    return found


def sigmas_off(pairs: Counter[tuple[int, int]], model: dict[int, dict[int, float]]) -> float:
    """Pearson's chi-square of the transitions, in standard deviations (Wilson and Hilferty, 1931)."""
    chi2, freedom = 0.0, 0
    for token, follow in model.items():
        n = sum(count for (before, _), count in pairs.items() if before == token)
        freedom += len(follow) - 1
        chi2 += sum((pairs[token, i] - n * p) ** 2 / (n * p) for i, p in follow.items())
        if any(pairs[token, i] and i not in follow for i in range(VOCAB)):
            return math.inf
    spread = 2 / (9 * freedom)
    return float(((chi2 / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


@pytest.fixture
def make_markov(make_bench: MakeBench) -> MakeBench:
    """A bench whose tokens follow the last one alone, and whose int4 drafts follow another model."""

    def make() -> Any:
        bench = make_bench(n_blocks=1200, adapt_drafts=False, max_sequences=8)

        def forward(slices: Sequence[Any], variant: Variant, **options: Any) -> torch.Tensor:
            model = BAD_DRAFT if variant is Variant.INT4 else TARGET
            last = [
                token_id
                for part in slices
                for i, token_id in enumerate(part.token_ids)
                if part.logits is Logits.ALL or (part.logits is Logits.LAST and i == len(part.token_ids) - 1)
            ]
            return model[last]

        bench.runner.forward = forward
        return bench

    return make


@pytest.mark.parametrize("drafter", list(SPECULATIONS))
def test_the_distribution_is_the_targets(make_markov: MakeBench, drafter: str) -> None:
    """20,000 unseeded draws with temperature and top-p follow the target's probabilities, though most drafts
    are wrong; the draft's own probabilities are ruled out."""
    bench = make_markov()
    for i in range(N_STREAMS):
        plan = bench.plan(N_DRAWS // N_STREAMS, speculation=SPECULATIONS[drafter])
        bench.submit(str(i), [i % N_LIVE], plan, sampling=SAMPLING)
    out = bench.run(most=50_000)
    pairs: Counter[tuple[int, int]] = Counter()
    n_drafted = n_accepted = 0
    for i in range(N_STREAMS):
        ids = [i % N_LIVE, *out.ids(str(i))]
        pairs.update(itertools.pairwise(ids))
        timeline = out.finish(str(i)).timeline
        n_drafted += timeline.drafted_tokens
        n_accepted += timeline.accepted_tokens
    assert pairs.total() == N_DRAWS
    assert abs(sigmas_off(pairs, expected(TARGET))) < UNLIKELY_SIGMAS
    assert sigmas_off(pairs, expected(BAD_DRAFT)) > 10 * UNLIKELY_SIGMAS
    if drafter != "none":
        assert 0.05 < n_accepted / n_drafted < 0.8


@pytest.mark.parametrize("drafter", ["self", "ngram"])
def test_one_seed_gives_one_output(make_markov: MakeBench, drafter: str) -> None:
    """With a seed the very tokens are those without drafts; greedy ones under a penalty are, too."""
    rules = [SamplingParams(temperature=0.7, top_p=0.9, seed=seed) for seed in range(12)]
    rules.append(SamplingParams(repetition_penalty=1.5))
    rules.append(SamplingParams(frequency_penalty=0.1, presence_penalty=0.5))
    found = []
    for kind in ("none", drafter):
        bench = make_markov()
        for i, sampling in enumerate(rules):
            bench.submit(
                str(i), [i % N_LIVE], bench.plan(60, speculation=SPECULATIONS[kind]), sampling=sampling
            )
        out = bench.run()
        found.append([out.ids(str(i)) for i in range(len(rules))])
        assert (sum(out.finish(str(i)).timeline.drafted_tokens for i in range(len(rules))) > 0) == (
            kind != "none"
        )
    assert found[0] == found[1]
