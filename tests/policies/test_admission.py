from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from paceline_policies.admission import Pending, admit, is_expired, order_key, slack_s

work = st.builds(
    Pending,
    arrival=st.integers(0, 1000),
    needs_s=st.floats(0, 10),
    deadline_at_s=st.none() | st.floats(-10, 30),
)


def test_least_slack_goes_first() -> None:
    """A later deadline comes first where its work takes so long that less time is left to wait."""
    short = Pending(arrival=1, needs_s=0.1, deadline_at_s=2.0)
    long = Pending(arrival=2, needs_s=2.5, deadline_at_s=3.0)
    endless = Pending(arrival=0, needs_s=9.0)
    live, expired = admit([endless, short, long], now_s=0.0)
    assert live == (long, short, endless)
    assert expired == ()
    assert slack_s(endless, now_s=0.0) == math.inf


def test_expired_work_never_runs() -> None:
    """Work whose deadline has passed is refused, however urgent its negative slack looks."""
    late = Pending(arrival=0, needs_s=0.1, deadline_at_s=5.0)
    live, expired = admit([late], now_s=5.0)
    assert (live, expired) == ((), (late,))
    assert not is_expired(late, now_s=4.999)


@given(st.lists(work, max_size=12), st.floats(0, 20))
def test_admission_is_a_partition_in_order(found: list[Pending], now_s: float) -> None:
    """Every piece of work is either run in order of slack or refused, never both or neither."""
    live, expired = admit(found, now_s=now_s)
    assert len(live) + len(expired) == len(found)
    assert not any(is_expired(each, now_s=now_s) for each in live)
    assert all(is_expired(each, now_s=now_s) for each in expired)
    keys = [order_key(each, now_s=now_s) for each in live]
    assert keys == sorted(keys)
