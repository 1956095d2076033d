"""The client's life: start, loops and threads, close; and its face without async."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import paceline
from paceline.errors import BackendError, ClosedError, InvalidValueError, ModelNotFoundError
from paceline.testing import ManualClock, Reply, ScriptedBackend
from paceline_engine.backends.base import Progress


def scripted(script="a b c", **options):
    clock = ManualClock()
    return ScriptedBackend(script, clock=clock, **options), clock


async def _one_turn(client):
    async with client.turn() as turn:
        return (await turn.generate("hi", max_tokens=8)).text


def test_one_client_in_two_loops_and_a_thread():
    """A client that was never entered starts with its first turn and serves every loop."""
    backend, clock = scripted()
    client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False)
    texts = [asyncio.run(_one_turn(client)), asyncio.run(_one_turn(client))]
    thread = threading.Thread(target=lambda: texts.append(asyncio.run(_one_turn(client))))
    thread.start()
    thread.join()
    asyncio.run(client.aclose())
    asyncio.run(client.aclose())
    assert texts == ["a b c"] * 3
    assert backend.closed


def test_turns_that_start_the_client_together_start_it_once():
    """Several first turns wait for one start."""
    backend, clock = scripted()
    starts = []
    start = backend.start

    async def slow_start(on_progress=None):
        starts.append(1)
        await asyncio.sleep(0.01)
        return await start(on_progress)

    backend.start = slow_start

    async def main():
        client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False)
        return await asyncio.gather(*(_one_turn(client) for _ in range(3)))

    assert asyncio.run(main()) == ["a b c"] * 3
    assert starts == [1]


def test_a_failed_start_may_be_tried_again():
    """An error at the start reaches the caller, and the next turn starts anew."""
    backend, clock = scripted()
    start = backend.start
    failures = [ModelNotFoundError("x", reason="not there", remedy="install it")]

    async def failing(on_progress=None):
        if failures:
            raise failures.pop()
        return await start(on_progress)

    backend.start = failing

    async def main():
        client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False)
        with pytest.raises(ModelNotFoundError):
            await _one_turn(client)
        return await _one_turn(client)

    assert asyncio.run(main()) == "a b c"


def test_a_cancelled_start_leaves_the_others_to_start():
    """The turn that started the client is cancelled; the one that waited takes over."""
    backend, clock = scripted()
    start = backend.start

    async def slow(on_progress=None):
        await asyncio.sleep(0.05)
        return await start(on_progress)

    backend.start = slow

    async def main():
        client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False)
        first, second = (asyncio.create_task(_one_turn(client)) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        return await second

    assert asyncio.run(main()) == "a b c"


def test_warm_runs_outside_of_any_turn():
    """Warming generates one token and leaves no record in a turn."""
    backend, clock = scripted()

    async def main():
        async with paceline.AsyncClient(backend=backend, clock=clock, tracing=False) as client:
            async with client.turn() as turn:
                usage = await client.warm([{"role": "system", "content": "policy " * 50}])
            return usage, turn.report

    usage, report = asyncio.run(main())
    assert usage.prompt_tokens > 50
    assert report.generations == ()
    assert backend.received[0].plan.max_tokens == 1


def test_of_several_backends_the_broken_one_is_left_out():
    """A backend whose snapshot fails is no candidate while another answers."""
    clock = ManualClock()
    good = ScriptedBackend("good", name="good", clock=clock)
    bad = ScriptedBackend("bad", name="bad", clock=clock)

    async def broken(*_, **__):
        raise BackendError("gone")

    bad.snapshot = broken

    async def main():
        async with paceline.AsyncClient(backend=[bad, good], clock=clock, tracing=False) as client:
            return await _one_turn(client)

    assert asyncio.run(main()) == "good"


@pytest.mark.parametrize(
    "options",
    [
        {"profile": "fast"},
        {"slo": 200},
        {"backend": []},
        {"backend": [ScriptedBackend("a"), ScriptedBackend("a")]},
        {"backend": ScriptedBackend("a"), "device": "cuda"},
        {"backend": ScriptedBackend("a"), "host": "thread"},
        {"backend": "embedded"},
        {"backend": 5},
        {"model": ""},
        {"model": None},
        {"model": b"model.gguf"},
        {"clock": 5},
        {"on_progress": "bar"},
        {"policy": object()},
        {"tracing": "no"},
    ],
)
def test_wrong_client_options_are_refused(options):
    """What makes no sense is refused where the client is made."""
    with pytest.raises(InvalidValueError):
        paceline.AsyncClient(**options)


def test_a_model_may_be_a_path(tmp_path):
    """A path is as good as its text."""
    assert repr(paceline.AsyncClient(tmp_path)) == repr(paceline.AsyncClient(str(tmp_path)))


def test_a_display_that_fails_does_not_fail_the_start(caplog):
    """The first error of ``on_progress`` is logged, and the client starts without it."""
    backend, clock = scripted()
    start, calls = backend.start, []

    async def reporting(on_progress=None):
        for done in (0.0, 1.0):
            on_progress(Progress(stage="load", done=done))
        return await start(on_progress)

    def broken(progress):
        calls.append(progress)
        raise ZeroDivisionError

    backend.start = reporting

    async def main():
        client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False, on_progress=broken)
        return await _one_turn(client)

    assert asyncio.run(main()) == "a b c"
    assert len(calls) == 1
    assert "on_progress" in caplog.text


@pytest.mark.parametrize("pin_s", [0, -1, float("nan"), "60", True])
def test_a_pin_needs_a_time(pin_s):
    """What is no number of seconds above 0 is refused by name."""
    backend, clock = scripted()
    client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False)
    with pytest.raises(InvalidValueError, match="pin_s"):
        asyncio.run(client.warm("hi", pin_s=pin_s))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_to_make_its_own():
    """A client that was carried over a fork gives ClosedError, not another process's tokens."""
    backend, clock = scripted()
    client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False)
    client._pid = -1
    with pytest.raises(ClosedError, match="parent process"):
        client.turn()


def test_sync_streams_generates_chooses_and_reports():
    """The face without async does the same."""
    clock = ManualClock()
    backend = ScriptedBackend(["a b c", "d e", "x"], clock=clock)
    with paceline.Client(backend=backend, clock=clock, tracing=False) as client:
        with client.turn("bot") as turn:
            assert "".join(chunk.text for chunk in turn.stream("hi", max_tokens=8)) == "a b c"
            assert turn.generate("hi", max_tokens=8).text == "d e"
            with turn.tool("lookup"):
                clock.advance(0.1)
            assert turn.choose("hi", options=["x", "y"]) == "x"
            assert turn.plan("hi", max_tokens=4).feasible
        assert len(turn.report.generations) == 3
        assert "bot" in str(turn.report)
    with pytest.raises(ClosedError):
        client.turn()
    client.close()


def test_sync_break_and_close_cancel():
    """Leaving a sync stream early frees the backend when the turn closes at the latest."""
    clock = ManualClock()
    backend = ScriptedBackend("a b c", clock=clock)
    with paceline.Client(backend=backend, clock=clock, tracing=False) as client:
        with client.turn() as turn:
            for _ in turn.stream("hi", max_tokens=8):
                break
            stream = turn.stream("hi", max_tokens=8)
            next(stream)
            stream.close()
            with pytest.raises(ClosedError):
                next(stream)
        assert [record.finish_reason for record in turn.report.generations] == ["cancelled"] * 2
    assert backend.running == set()


def test_sync_works_inside_a_running_loop_and_from_threads():
    """The client's loop is its own: a running loop and a pool of threads may call it."""
    backend, clock = scripted()

    def one(_=None):
        with client.turn() as turn:
            return turn.generate("hi", max_tokens=8).text

    async def inside():
        return one()

    with paceline.Client(backend=backend, clock=clock, tracing=False) as client:
        assert asyncio.run(inside()) == "a b c"
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(one, range(8))) == ["a b c"] * 8


def test_current_turn_follows_nesting_tools_tasks_and_copied_contexts():
    """The innermost open turn, restored on the way out; a plain thread has none."""
    backend, clock = scripted()

    async def main():
        assert paceline.current_turn() is None
        client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False)
        async with client, client.turn("outer") as outer:
            async with client.turn("inner") as inner:
                assert paceline.current_turn() is inner
                async with inner.tool("x"):
                    assert paceline.current_turn() is inner
                assert await asyncio.to_thread(paceline.current_turn) is inner
                late = contextvars.copy_context()
                with ThreadPoolExecutor(1) as pool:
                    assert pool.submit(paceline.current_turn).result() is None
                    assert pool.submit(late.run, paceline.current_turn).result() is inner

                async def child():
                    return paceline.current_turn()

                assert await asyncio.create_task(child()) is inner
            assert paceline.current_turn() is outer
            assert late.run(paceline.current_turn) is outer
        assert paceline.current_turn() is None
        assert late.run(paceline.current_turn) is None

    asyncio.run(main())


def test_current_turn_in_sync_code_and_closing_in_another_context():
    """A sync turn is current in its thread; one closed elsewhere does no harm."""
    backend, clock = scripted()
    with paceline.Client(backend=backend, clock=clock, tracing=False) as client:
        with client.turn() as turn:
            assert paceline.current_turn() is turn
        assert paceline.current_turn() is None
        other = client.turn()
        contextvars.copy_context().run(other.__enter__)
        other.close()
        assert paceline.current_turn() is None


def test_an_error_in_a_sync_stream_keeps_its_text():
    """Errors cross from the loop's thread with their fields."""
    clock = ManualClock()
    backend = ScriptedBackend(Reply("a b c", error_after=2), clock=clock)
    with paceline.Client(backend=backend, clock=clock, tracing=False) as client, client.turn() as turn:
        with pytest.raises(BackendError) as caught:
            turn.generate("hi", max_tokens=8)
        assert caught.value.partial_text == "a b"


def test_importing_is_light():
    """`import paceline` and its client load neither torch nor an OpenTelemetry SDK."""
    code = (
        "import sys, paceline; light = set(sys.modules); paceline.AsyncClient, paceline.Client, paceline.SLO;"
        "bad = {'torch', 'transformers', 'opentelemetry.sdk', 'tokenizers'} & set(sys.modules);"
        "heavy = {'asyncio', 'numpy', 'rich'} & light;"
        "assert not bad, bad; assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_client_that_is_never_closed_lets_the_process_end():
    """No stray thread or error at exit."""
    code = (
        "import paceline\n"
        "from paceline.testing import ScriptedBackend\n"
        "client = paceline.Client(backend=ScriptedBackend('a b', prefill_ms=1, tpot_ms=1))\n"
        "turn = client.turn().__enter__()\n"
        "print(turn.generate('hi', max_tokens=4).text)\n"
        "next(turn.stream('hi', max_tokens=4))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "a b\n"
    assert done.stderr == ""


def test_closing_tells_whoever_waits_in_another_thread():
    """A call that waits while the client is closed ends with ClosedError, and its thread goes on."""
    backend, clock = scripted()
    entered = threading.Event()

    async def never(*_, **__):
        entered.set()
        await asyncio.Event().wait()

    client = paceline.Client(backend=backend, clock=clock, tracing=False)
    client.start()
    backend.prepare = never
    turn = contextvars.copy_context().run(client.turn().__enter__)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(turn.generate, "hi")
        assert entered.wait(10)
        client.close()
        with pytest.raises(ClosedError, match="closed while this ran"):
            waiting.result(10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_never_waits_for_its_parents_loop():
    """In the child every sync call raises ClosedError, and leaving the blocks of the parent does nothing."""
    code = (
        "import os, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "import paceline\n"
        "from paceline.testing import ScriptedBackend\n"
        "backend = ScriptedBackend('a b', prefill_ms=1, tpot_ms=1)\n"
        "with paceline.Client(backend=backend) as client, client.turn() as turn:\n"
        "    with turn.stream('hi', max_tokens=4) as stream:\n"
        "        next(stream)\n"
        "        if not (child := os.fork()):\n"
        "            for call in (client.turn, client.start, lambda: turn.generate('hi'),\n"
        "                         lambda: next(stream), lambda: client.warm('hi')):\n"
        "                try:\n"
        "                    call()\n"
        "                    os._exit(2)\n"
        "                except paceline.errors.ClosedError as error:\n"
        "                    assert 'after the fork' in str(error), error\n"
        "    if child:\n"
        "        print(turn.generate('hi', max_tokens=4).text)\n"
        "if not child:\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("a b\n7\n", "")


class Faulty:
    """A policy whose learning and saving fail."""

    def __init__(self, policy):
        self._policy = policy

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def observe(self, *_):
        raise ZeroDivisionError

    def save(self):
        raise ZeroDivisionError


def test_a_policy_that_fails_to_learn_costs_no_answer(caplog):
    """The answer arrives, the fault is logged, and the backends are closed whatever saving does."""
    backend, clock = scripted()

    async def main():
        client = paceline.AsyncClient(backend=backend, clock=clock, tracing=False)
        await client.start()
        client._ready.policy = Faulty(client._ready.policy)
        text = await _one_turn(client)
        with pytest.raises(ZeroDivisionError):
            await client.aclose()
        return text

    assert asyncio.run(main()) == "a b c"
    assert "could not learn" in caplog.text
    assert backend.closed


def test_a_session_reaches_the_backend_and_is_ended_by_name():
    """The option goes with the request, and ``end_session`` to each backend that remembers."""

    class Remembers(ScriptedBackend):
        def __init__(self):
            super().__init__("one two")
            self.seen, self.ended = [], []

        def submit(self, request, plan):
            self.seen.append((request.session, request.salt))
            return super().submit(request, plan)

        def end_session(self, session, *, salt=""):
            self.ended.append((session, salt))

    backend = Remembers()
    with paceline.Client(backend=backend, tracing=False) as client, client.turn() as turn:
        turn.generate("hi", max_tokens=2, session="s", salt="t")
        turn.generate("hi", max_tokens=2)
        with pytest.raises(InvalidValueError, match="session must be a text"):
            turn.generate("hi", max_tokens=2, session=3)
        client.end_session("s", salt="t")
    assert backend.seen == [("s", "t"), ("", "")]
    assert backend.ended == [("s", "t")]
    with pytest.raises(ClosedError):
        client.end_session("s")
