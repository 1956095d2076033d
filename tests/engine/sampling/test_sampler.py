from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from paceline_engine.errors import InvalidValueError
from paceline_engine.request import SamplingParams
from paceline_engine.sampling.constraint import Constraint, ConstraintFault
from paceline_engine.sampling.draw import RandomStream
from paceline_engine.sampling.rules import DrawRule
from paceline_engine.sampling.sampler import Drawn, Row, Undrawable, draw_tokens, score_tokens


def rule(
    prompt: Sequence[int] = (), end_ids: Sequence[int] = (), seed: int = 1, **params: object
) -> DrawRule:
    return DrawRule(
        SamplingParams(**params),  # type: ignore[arg-type]
        stream=RandomStream(seed=seed),
        prompt_ids=prompt,
        end_ids=end_ids,
    )


def draw(logits: torch.Tensor, by: DrawRule, output: Sequence[int] = ()) -> int:
    (result,) = draw_tokens(logits[None], [Row(at=0, rule=by, output_ids=output)])
    assert isinstance(result, Drawn)
    return result.token_id


def shares(logits: Sequence[float], n: int = 2500, **params: object) -> dict[int, float]:
    """How often each token is drawn at temperature 1 with these parameters."""
    row = torch.tensor(logits)[None]
    by = rule(**{"temperature": 1.0, **params})
    counts: Counter[int] = Counter()
    for position in range(n):
        (result,) = draw_tokens(row, [Row(at=0, rule=by, output_ids=range(position))])
        assert isinstance(result, Drawn)
        counts[result.token_id] += 1
    return {token: count / n for token, count in counts.items()}


PROBABILITIES = [0.5, 0.3, 0.15, 0.05]
LOGITS = [math.log(p) for p in PROBABILITIES]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 2.0}, [p**0.5 for p in PROBABILITIES]),
        ({"top_k": 2}, [0.5, 0.3]),
        ({"top_k": 0}, PROBABILITIES),
        ({"top_k": 99}, PROBABILITIES),
        ({"top_p": 0.6}, [0.5, 0.3]),
        ({"top_p": 0.81}, [0.5, 0.3, 0.15]),
        ({"top_p": 1e-9}, [1.0]),
        ({"min_p": 0.2}, [0.5, 0.3, 0.15]),
        ({"min_p": 1.0}, [1.0]),
        ({"top_k": 3, "top_p": 0.6}, [0.5, 0.3]),
        ({"top_k": 3, "top_p": 0.8, "min_p": 0.7}, [0.5]),
    ],
)
def test_distribution(params: dict[str, object], expected: list[float]) -> None:
    """Drawn shares follow the filtered and rescaled distribution; dropped tokens are never drawn."""
    found = shares(LOGITS, **params)
    total = sum(expected)
    assert set(found) <= set(range(len(expected)))
    for token, weight in enumerate(expected):
        assert found.get(token, 0.0) == pytest.approx(weight / total, abs=0.04)


def test_the_filter_is_on_the_temperature_scaled_distribution() -> None:
    """Top-p counts probabilities after the temperature."""
    assert set(shares(LOGITS, temperature=0.2, top_p=0.8)) == {0}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 1e-300},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 2e-5, "top_p": 0.5, "min_p": 0.1},
    ],
)
def test_limits_are_argmax(params: dict[str, object]) -> None:
    """At the edge of every parameter the most likely token is drawn, whatever the logits' size."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 1e4, 1e-4):
        logits = torch.randn(100, generator=generator) * scale
        # Above the greedy temperature a tie is a matter of chance, so the best stands clear.
        logits[17] = logits.max() + scale
        assert draw(logits, rule(seed=3, **params)) == 17


@pytest.mark.parametrize("name", ["top_k", "min_tokens", "logprobs", "seed"])
@pytest.mark.parametrize("value", [1.5, 1.0, True, "1"])
def test_counts_are_whole_numbers(name: str, value: object) -> None:
    """A fraction is refused where it is given: in a draw it would fail all that share the pass."""
    with pytest.raises(InvalidValueError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_top_p_looks_past_the_first_thousand() -> None:
    """Where the first look does not reach top-p, all of the vocabulary is considered, and cut where due."""
    logits = torch.linspace(0.01, 0.0, 5000)
    by = rule(temperature=1.0, top_p=0.5)
    drawn = [draw(logits, by, range(position)) for position in range(100)]
    assert any(token > 1024 for token in drawn)
    assert all(token < 2500 for token in drawn)


def test_a_masked_vocabulary() -> None:
    """Tokens at minus infinity are never drawn, at any temperature or filter."""
    logits = torch.full((50,), -torch.inf)
    logits[[3, 7]] = torch.tensor([1.0, 1.5])
    hot = [{"temperature": 1e300, **also} for also in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1})]
    for params in ({}, {"top_p": 0.999}, {"top_k": 10}, {"temperature": 1e6}, {"min_p": 1e-9}, *hot):
        by = rule(**{"temperature": 1.0, **params})
        assert {draw(logits, by, range(position)) for position in range(200)} == {3, 7}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_fail_their_row_alone(value: float, temperature: float) -> None:
    """A row that is no number gives a reason; its neighbours are drawn."""
    logits = torch.tensor([[0.0, 1.0], [0.0, value], [-torch.inf, -torch.inf], [2.0, 1.0]])
    by = rule(temperature=temperature, top_k=1)
    results = draw_tokens(logits, [Row(at=at, rule=by, output_ids=()) for at in range(4)])
    assert [type(result) for result in results] == [Drawn, Undrawable, Undrawable, Drawn]


def test_everything_masked_by_the_rule() -> None:
    """When the minimum length forbids the only tokens there are, that is a reason and no token."""
    by = rule(end_ids=(0, 1), min_tokens=1)
    (result,) = draw_tokens(torch.zeros(1, 2), [Row(at=0, rule=by, output_ids=())])
    assert isinstance(result, Undrawable)


@pytest.mark.parametrize("value", [3e38, -3e38])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_huge_parameters_never_make_nan(value: float, temperature: float) -> None:
    """Extreme biases and penalties still give a token."""
    by = rule(
        prompt=[0, 1],
        temperature=temperature,
        logit_bias={0: value, 1: -value, 2: value},
        presence_penalty=value,
        frequency_penalty=-value,
        repetition_penalty=abs(value),
    )
    assert draw(torch.tensor([1.0, -1.0, 0.5, 0.0]), by, [0, 2, 2]) in range(4)


def test_penalties() -> None:
    """Repetition counts prompt and output once, presence once an output token, frequency each time."""
    logits = torch.tensor([2.0, -2.0, 3.0, 1.0])
    changed = logits.clone()
    rule(prompt=[0, 1], repetition_penalty=2.0).apply(changed, [2, 2])
    assert changed.tolist() == [1.0, -4.0, 1.5, 1.0]
    changed = logits.clone()
    rule(prompt=[0, 1], presence_penalty=0.5, frequency_penalty=0.25).apply(changed, [2, 2, 3])
    assert changed.tolist() == [2.0, -2.0, 2.0, 0.25]
    changed = logits.clone()
    rule(logit_bias={3: 5.0, 0: -1.0}).apply(changed, [])
    assert changed.tolist() == [1.0, -2.0, 3.0, 6.0]


def test_min_tokens_hides_end_tokens() -> None:
    """End tokens cannot be drawn before min_tokens, however large their bias, and can from then on."""
    by = rule(end_ids=(1, 2), min_tokens=4, logit_bias={1: 100.0, 2: 100.0})
    logits = torch.tensor([0.0, 5.0, 5.0, 1.0])
    assert [draw(logits, by, [3] * n) for n in range(6)] == [3, 3, 3, 3, 1, 1]


def test_logits_are_left_alone() -> None:
    """Drawing changes nothing in the runner's tensor."""
    logits = torch.randn(3, 20)
    before = logits.clone()
    by = rule(temperature=1.0, logit_bias={1: 3.0}, end_ids=(2,), min_tokens=3, logprobs=2)
    draw_tokens(logits, [Row(at=at, rule=by, output_ids=[1]) for at in range(3)])
    assert torch.equal(logits, before)


class OnlyNext:
    """Allows two tokens at each position, and turns the first of them down."""

    def mask(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        keep = len(output_ids) + 2
        logits[:keep] = -torch.inf
        logits[keep + 2 :] = -torch.inf

    def admits(self, output_ids: Sequence[int], token_id: int) -> bool:
        return token_id != len(output_ids) + 2

    def way_out(self, output_ids: Sequence[int]) -> int | None:
        return 7


class AdmitsNothing(OnlyNext):
    def admits(self, output_ids: Sequence[int], token_id: int) -> bool:
        return False


class Faulty(OnlyNext):
    def mask(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        raise ConstraintFault("too heavy")


def constrained(constraint: Constraint, temperature: float) -> DrawRule:
    params = SamplingParams(temperature=temperature)
    return DrawRule(params, stream=RandomStream(seed=1), constraint=constraint)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_masks_one_sequence(temperature: float) -> None:
    """A constraint sees the output so far, changes its own row alone, and what it turns down is redrawn."""
    results = draw_tokens(
        torch.zeros(1, 9),
        [
            Row(at=0, rule=constrained(OnlyNext(), temperature), output_ids=[5]),
            Row(at=0, rule=rule(), output_ids=[5]),
            Row(at=0, rule=constrained(AdmitsNothing(), temperature), output_ids=[5]),
        ],
    )
    assert [result.token_id for result in results if isinstance(result, Drawn)] == [4, 0, 7]


def test_a_constraint_that_fails_fails_its_own_row() -> None:
    """A constraint that cannot say what comes next leaves its row without a token, and the others alone."""
    rows = [Row(at=0, rule=by, output_ids=[]) for by in (constrained(Faulty(), 1.0), rule())]
    failed, healthy = draw_tokens(torch.zeros(1, 9), rows)
    assert failed == Undrawable(reason="too heavy")
    assert healthy == Drawn(token_id=0)


def test_draws_depend_on_seed_choice_and_position_alone() -> None:
    """The same row gives the same token beside any others; another seed or choice gives another stream."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 300, generator=generator)
    by = rule(temperature=1.0, seed=42)
    alone = [draw(logits[2], by, range(position)) for position in range(20)]
    others = [rule(temperature=1.0, seed=seed) for seed in range(5)]
    others[2] = by
    beside: list[int] = []
    for position in range(20):
        rows = [Row(at=at, rule=others[at], output_ids=range(position)) for at in range(5)]
        result = draw_tokens(logits, rows)[2]
        assert isinstance(result, Drawn)
        beside.append(result.token_id)
    assert alone == beside
    uniform = {
        RandomStream(seed=seed, index=index).uniform(position)
        for seed in (-1, 0, 2**70)
        for index in (0, 1)
        for position in (0, 1)
    }
    assert len(uniform) == 12
    assert RandomStream.for_request(None, 0) != RandomStream.for_request(None, 0)


def test_uniform_numbers_are_uniform() -> None:
    """The stream's mean, spread and range are those of [0, 1)."""
    values = torch.tensor([RandomStream(seed=9).uniform(i) for i in range(20_000)])
    assert values.min() >= 0
    assert values.max() < 1
    assert float(values.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(values.var()) == pytest.approx(1 / 12, abs=0.003)


def test_logprobs_are_the_models_own() -> None:
    """Reported log probabilities ignore bias and temperature; 0 reports only the drawn token."""
    logits = torch.tensor([1.0, 2.0, 3.0])
    expected = logits.log_softmax(0)
    row = Row(at=0, rule=rule(logit_bias={0: 50.0}, logprobs=2), output_ids=())
    (result,) = draw_tokens(logits[None], [row])
    assert isinstance(result, Drawn)
    assert result.token_id == 0
    assert result.logprob == pytest.approx(float(expected[0]))
    assert [token for token, _ in result.top] == [2, 1]
    assert [value for _, value in result.top] == pytest.approx(expected[[2, 1]].tolist())
    (bare,) = draw_tokens(logits[None], [Row(at=0, rule=rule(logprobs=0), output_ids=())])
    assert isinstance(bare, Drawn)
    assert bare.top == ()
    assert bare.logprob == pytest.approx(float(expected[2]))


def test_scores() -> None:
    """Scored rows give the log-softmax of the given tokens, in any order and with repeats."""
    logits = torch.randn(70, 30)
    rows, ids = [69, 0, 0, 33], [1, 2, 3, 29]
    assert score_tokens(logits, rows, ids) == pytest.approx(
        logits.log_softmax(-1)[rows, ids].tolist(), abs=1e-5
    )
    assert score_tokens(logits, [], []) == []


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {1: 10**25}},
        {"presence_penalty": 10**25},
        {"frequency_penalty": -(10**25)},
        {"repetition_penalty": 10**25},
        {"temperature": 10**25},
    ],
)
def test_whole_numbers_beyond_64_bits_draw_as_floats(params: dict[str, object]) -> None:
    """An ``int`` that torch cannot hold counts like the float of its size."""
    drawn = draw(torch.tensor([1.0, 2.0, 3.0]), rule(**params), output=[0])
    assert drawn in range(3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "x"), ("top_p", None), ("min_p", True), ("logit_bias", [1]), ("logit_bias", {1: None})],
)
def test_what_is_no_number_is_refused(name: str, value: object) -> None:
    """A parameter of another type is named in the error."""
    with pytest.raises(InvalidValueError, match=name):
        rule(**{name: value})  # type: ignore[arg-type]  # pyright: ignore
