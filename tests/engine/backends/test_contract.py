"""What every backend keeps, whatever runs behind it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

from paceline_engine.backends.base import Pinning, Progress
from paceline_engine.chunk import FinishReason
from paceline_engine.errors import (
    ClosedError,
    DeadlineExpiredError,
    InvalidValueError,
    PromptTooLongError,
)
from paceline_engine.request import SamplingParams


def test_start_tells_what_is_served_and_returns_at_once_later(harness: Any) -> None:
    """Starting gives the model's facts with progress; starting again loads nothing."""
    backend = harness.backend()
    seen: list[Progress] = []

    async def main() -> None:
        info = await backend.start(seen.append)
        assert info.variants[0] == harness.variant or harness.variant in info.variants
        assert info.context_tokens > 0
        pid = backend.worker_pid
        assert await backend.start() == info
        assert backend.worker_pid == pid
        assert backend.start_s is not None

    asyncio.run(main())
    assert seen
    assert all(0.0 <= progress.done <= 1.0 for progress in seen)


@pytest.mark.parametrize("n", [1, 3])
def test_each_choice_ends_with_exactly_one_finish(harness: Any, n: int) -> None:
    """Every choice has one finish chunk, its last, and its usage counts the tokens that were sent."""
    backend = harness.any_backend()
    chunks = asyncio.run(harness.run(backend, max_tokens=6, n=n))
    for index in range(n):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert [chunk.finish is not None for chunk in mine] == [False] * (len(mine) - 1) + [True]
        finish = mine[-1].finish
        assert finish.reason is FinishReason.LENGTH
        assert finish.usage.completion_tokens == 6 == sum(len(chunk.token_ids) for chunk in mine)
        assert finish.timeline.n_tokens == 6


def test_times_never_go_back(harness: Any) -> None:
    """Submitted, started, made, delivered and finished stand in that order on one clock."""
    backend = harness.any_backend()

    async def main() -> list[Any]:
        await backend.start()
        return await harness.run(backend, max_tokens=10)

    before_s = time.monotonic()
    chunks = asyncio.run(main())
    made = [chunk.made_at_s for chunk in chunks]
    assert made == sorted(made)
    assert all(chunk.delivered_at_s >= chunk.made_at_s for chunk in chunks)
    timeline = chunks[-1].finish.timeline
    assert before_s <= timeline.submitted_at_s <= timeline.started_at_s <= timeline.tokens[0].made_at_s
    assert timeline.tokens[-1].made_at_s <= timeline.finished_at_s <= time.monotonic()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("way", ["aclose", "break", "cancel", "drop", "timeout", "before the first token"])
def test_every_way_of_leaving_frees_the_blocks(harness: Any, way: str, n: int) -> None:
    """However a caller leaves, nothing runs afterwards and all blocks are free."""
    backend = harness.any_backend()

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        at_start = await harness.free_blocks(backend)
        stream = await harness.stream(backend, max_tokens=harness.longest, n=n)
        if way == "break":
            async for _ in stream:
                break
        elif way != "before the first token":
            await anext(stream)
        if way in ("cancel", "before the first token"):
            task = asyncio.create_task(read(stream))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif way == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(stream), 0.02)
        elif way == "aclose":
            await stream.aclose()
            await stream.aclose()
        else:
            del stream
            gc.collect()
        await harness.settles_at(backend, at_start)

    asyncio.run(main())


def test_a_scoring_that_is_cancelled_frees_its_blocks(harness: Any) -> None:
    """Cancelling the task of a scoring leaves nothing behind, and the next scoring answers."""
    backend = harness.any_backend()

    async def main() -> None:
        at_start = await harness.free_blocks(backend)
        request = await harness.score_request(backend, "cold", "warm today")
        task = asyncio.create_task(backend.score(request, harness.plan()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await harness.settles_at(backend, at_start)
        result = await backend.score(request, harness.plan())
        assert [score.text for score in result.scores] == ["cold", "warm today"]
        assert all(score.logprob < 0 for score in result.scores)
        await harness.settles_at(backend, at_start)

    asyncio.run(main())


def test_a_request_that_is_refused_leaves_the_others(harness: Any) -> None:
    """A token id outside the vocabulary fails its own request; the one beside it ends well."""
    backend = harness.any_backend()

    async def main() -> None:
        info = await backend.start()
        bad = SamplingParams(logit_bias={info.vocab_size + 1: 5.0})
        good, refused = await asyncio.gather(
            harness.run(backend, max_tokens=12),
            harness.run(backend, sampling=bad),
            return_exceptions=True,
        )
        assert isinstance(refused, InvalidValueError)
        assert good[-1].finish.usage.completion_tokens == 12

    asyncio.run(main())


def test_a_prompt_that_can_never_fit_is_refused_at_once(harness: Any) -> None:
    """More than the whole cache is an error, not a wait; a small request then runs."""
    backend = harness.backend(n_blocks=8)

    async def main() -> None:
        with pytest.raises(PromptTooLongError):
            await harness.run(backend, "the weather in Oslo " * 40)
        assert len(await harness.run(backend, "the", max_tokens=4)) > 0

    asyncio.run(main())


def test_work_whose_deadline_has_passed_is_not_sent(harness: Any) -> None:
    """An expired deadline is an error that says by how much."""
    backend = harness.backend()

    async def main() -> None:
        plan = harness.plan(deadline_at_s=time.monotonic() - 0.5)
        with pytest.raises(DeadlineExpiredError) as caught:
            await harness.run(backend, plan=plan)
        assert caught.value.late_ms >= 500.0
        with pytest.raises(DeadlineExpiredError):
            await backend.score(await harness.score_request(backend, "a"), plan)
        # The backend was not even started for it.
        assert backend.worker_pid is None

    asyncio.run(main())


def test_a_hard_deadline_ends_the_generation_with_what_there_is(harness: Any) -> None:
    """At a hard deadline the stream ends with finish reason ``budget``."""
    backend = harness.any_backend()

    async def main() -> None:
        await harness.run(backend)
        plan = harness.plan(harness.longest, deadline_at_s=time.monotonic() + 0.5, hard_deadline=True)
        for chunks in await asyncio.gather(*(harness.run(backend, plan=plan) for _ in range(8))):
            assert chunks[-1].finish.reason is FinishReason.BUDGET
            assert 0 < chunks[-1].finish.usage.completion_tokens < harness.longest

    asyncio.run(main())


def test_two_event_loops_one_after_the_other(harness: Any) -> None:
    """A backend serves a second ``asyncio.run``, and one in another thread, with the same worker."""
    backend = harness.any_backend()
    first = asyncio.run(harness.run(backend))
    pid = backend.worker_pid
    second = asyncio.run(harness.run(backend))
    third: list[Any] = []
    thread = threading.Thread(target=lambda: third.extend(asyncio.run(harness.run(backend))))
    thread.start()
    thread.join(30.0)
    texts = ["".join(chunk.text for chunk in chunks) for chunks in (first, second, third)]
    assert texts[0] == texts[1] == texts[2]
    assert backend.worker_pid == pid


def test_a_loop_closed_with_a_stream_open_harms_nobody(harness: Any) -> None:
    """A stream whose event loop is closed is aborted when dropped, and other loops go on."""
    backend = harness.any_backend()
    at_start = asyncio.run(harness.free_blocks(backend))
    kept: list[Any] = []

    async def leave_open() -> None:
        stream = await harness.stream(backend, max_tokens=harness.longest)
        await anext(stream)
        kept.append(stream)

    asyncio.run(leave_open())
    assert len(asyncio.run(harness.run(backend))) > 0
    kept.clear()
    asyncio.run(harness.settles_at(backend, at_start))


def test_many_threads_use_one_backend(harness: Any) -> None:
    """Eight threads with loops of their own start it together and each get their whole stream."""
    backend = harness.any_backend()
    counts: list[int] = []

    def work() -> None:
        chunks = asyncio.run(harness.run(backend, max_tokens=10))
        counts.append(sum(len(chunk.token_ids) for chunk in chunks))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert counts == [10] * 8


def test_a_hundred_requests_at_once(harness: Any) -> None:
    """A hundred concurrent requests all end, and their blocks come back."""
    backend = harness.any_backend()

    async def main() -> None:
        at_start = await harness.free_blocks(backend)
        results = await asyncio.gather(*(harness.run(backend, max_tokens=5) for _ in range(100)))
        assert all(chunks[-1].finish.usage.completion_tokens == 5 for chunks in results)
        await harness.settles_at(backend, at_start)

    asyncio.run(main())


def test_cancelling_in_a_loop_then_one_more(harness: Any) -> None:
    """After fifty cancelled requests of the same id the next one of it is whole and its own."""
    backend = harness.any_backend()

    async def main() -> None:
        at_start = await harness.free_blocks(backend)
        for _ in range(50):
            stream = await harness.stream(backend, max_tokens=harness.longest, id="same")
            await anext(stream)
            await stream.aclose()
        chunks = await harness.run(backend, max_tokens=7, id="same")
        assert sum(len(chunk.token_ids) for chunk in chunks) == 7
        assert [chunk.finish is not None for chunk in chunks].count(True) == 1
        await harness.settles_at(backend, at_start)

    asyncio.run(main())


def test_an_id_in_flight_is_not_taken_twice(harness: Any) -> None:
    """A second request of an id in flight is refused, and the first goes on."""
    backend = harness.any_backend()

    async def main() -> None:
        first = await harness.stream(backend, max_tokens=30, id="twin")
        await anext(first)
        with pytest.raises(InvalidValueError, match="id"):
            await harness.run(backend, id="twin")
        assert [chunk async for chunk in first][-1].finish.usage.completion_tokens == 30

    asyncio.run(main())


def test_no_messages_are_refused(harness: Any) -> None:
    """An empty conversation is an error of the caller's."""
    with pytest.raises(InvalidValueError):
        asyncio.run(harness.backend().prepare([]))


def test_a_pin_lasts_until_it_is_ended(harness: Any) -> None:
    """A prompt that ran can be pinned and unpinned by anyone, again and for unknown pins without harm."""
    backend = harness.any_backend()
    text = "a prompt of several blocks, so that some of it is cached in full: " * 4

    async def main() -> None:
        prompt = await harness.prompt(backend, text)

        async def pinned(wanted: bool) -> None:
            limit_s = time.monotonic() + 5.0
            while bool((await backend.snapshot(prompt)).pinned_blocks) is not wanted:
                assert time.monotonic() < limit_s, f"pinned is not {wanted} after 5 s"
                await asyncio.sleep(0.005)

        await backend.start()
        at_start = await harness.free_blocks(backend)
        assert isinstance(backend, Pinning)
        await harness.run(backend, text, max_tokens=2)
        backend.pin("tool", prompt, hold_s=60.0)
        backend.pin("tool", prompt, hold_s=60.0)
        await pinned(True)
        backend.unpin("tool")
        backend.unpin("tool")
        backend.unpin("never made")
        await pinned(False)
        backend.pin("short", prompt, hold_s=0.001)
        await pinned(False)
        with pytest.raises(InvalidValueError, match="hold_s"):
            backend.pin("never", prompt, hold_s=float("inf"))
        await harness.settles_at(backend, at_start)

    asyncio.run(main())


def test_closing_ends_what_runs_and_refuses_what_comes(harness: Any) -> None:
    """Closing fails waiting streams with ``ClosedError``; it may be repeated; later calls are refused."""
    backend = harness.backend()

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        await backend.start()
        task = asyncio.create_task(read(await harness.stream(backend, max_tokens=harness.longest)))
        await asyncio.sleep(0.02)
        await backend.aclose()
        with pytest.raises(ClosedError):
            await task
        await backend.aclose()
        with pytest.raises(ClosedError):
            await backend.start()
        with pytest.raises(ClosedError):
            await harness.run(backend)

    asyncio.run(main())


def test_closing_what_was_never_started(harness: Any) -> None:
    """A backend that served nothing closes without starting anything."""
    backend = harness.backend()
    asyncio.run(backend.aclose())
    assert backend.worker_pid is None
