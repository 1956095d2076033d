from __future__ import annotations

from paceline_policies.ranking import LatencyRecord, rank


def called(name: str, *, ttft_s: float, tpot_s: float, tokens: int, n: int = 5) -> LatencyRecord:
    record = LatencyRecord(name=name)
    for i in range(n):
        record.started(f"{name}{i}", now_s=float(i))
        record.ended(f"{name}{i}", now_s=i + ttft_s + tpot_s * tokens, ttft_s=ttft_s, tpot_s=tpot_s)
    return record


def test_long_answers_do_not_count_as_slow() -> None:
    """10 ms per token over 500 tokens ranks before 50 ms per token over 10 tokens."""
    a = called("a", ttft_s=0.1, tpot_s=0.010, tokens=500)
    b = called("b", ttft_s=0.1, tpot_s=0.050, tokens=10)
    assert rank([b, a], now_s=10.0) == ("a", "b")


def test_hanging_backend_loses_traffic_while_its_calls_are_pending() -> None:
    """A backend that never finishes falls behind as its calls age, sampled before or not."""
    a = called("a", ttft_s=0.5, tpot_s=0.02, tokens=100)
    fresh, known = LatencyRecord(name="fresh"), called("known", ttft_s=0.1, tpot_s=0.01, tokens=9)
    assert rank([a, known], now_s=5.0)[0] == "known"
    for record in (fresh, known):
        record.started("hangs", now_s=5.0)
    assert rank([a, fresh, known], now_s=20.0)[0] == "a"


def test_unsampled_backend_is_probed_once_at_a_time() -> None:
    """A backend without a sample comes first, but not again while its first call is under way."""
    a, c = called("a", ttft_s=0.1, tpot_s=0.01, tokens=9), LatencyRecord(name="c")
    assert rank([a, c], now_s=5.0)[0] == "c"
    c.started("probe", now_s=5.0)
    assert rank([a, c], now_s=5.0)[0] == "a"
    c.ended("probe", now_s=5.1, ttft_s=0.01, tpot_s=0.001)
    assert rank([a, c], now_s=5.2)[0] == "c"


def test_load_is_spread_over_equals() -> None:
    """Calls in flight count against a backend, so that equals share."""
    records = [called(name, ttft_s=0.1, tpot_s=0.01, tokens=9) for name in ("a", "b")]
    records[0].started("x", now_s=5.0)
    assert rank(records, now_s=5.0) == ("b", "a")
    unsampled = [LatencyRecord(name=name) for name in ("a", "b")]
    unsampled[0].started("x", now_s=5.0)
    assert rank(unsampled, now_s=5.0) == ("b", "a")


def test_failed_and_withdrawn_calls() -> None:
    """A call that ended without a token counts as its age; one that its caller withdrew does not count."""
    record = called("a", ttft_s=0.1, tpot_s=0.01, tokens=9)
    before = record.cost_s(now_s=4.0)
    record.started("gone", now_s=4.0)
    record.withdrawn("gone")
    assert record.cost_s(now_s=4.0) == before
    record.started("failed", now_s=4.0)
    record.ended("failed", now_s=14.0)
    assert record.cost_s(now_s=14.0) > before + 1.0


def test_banned_backend_is_tried_again() -> None:
    """A slow backend that nobody calls is judged less harshly as time passes."""
    slow = called("slow", ttft_s=1.0, tpot_s=0.1, tokens=9)
    fast = called("fast", ttft_s=0.2, tpot_s=0.02, tokens=9)
    assert rank([slow, fast], now_s=6.0)[0] == "fast"
    fast.started("now", now_s=600.0)
    fast.ended("now", now_s=600.2, ttft_s=0.2, tpot_s=0.02)
    assert rank([slow, fast], now_s=600.3)[0] == "slow"
