"""What goes wrong in an engine, and what its callers see: always an error, in time, with the text so far."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.errors import (
    BackendError,
    EngineDiedError,
    InvalidValueError,
    ModelLoadError,
    ModelNotFoundError,
    StallError,
)
from paceline_engine.mode import Variant


async def read(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


def test_an_error_of_one_request_leaves_the_others(scripted: Any) -> None:
    """A request that fails in mid-stream has its text so far; its neighbour ends well."""
    backend = scripted.backend()

    async def main() -> None:
        good, failed = await asyncio.gather(
            scripted.run(backend, max_tokens=20),
            scripted.run(backend, "!fail@3", max_tokens=20),
            return_exceptions=True,
        )
        assert good[-1].finish is not None
        assert isinstance(failed, BackendError)
        assert (failed.partial_text, failed.phase) == ("0 1 2 ", "decode")

    asyncio.run(main())


@pytest.mark.parametrize(("at", "phase", "text"), [(0, "prefill", ""), (3, "decode", "0 1 2 ")])
def test_a_stall_is_an_error_in_time(scripted: Any, at: int, phase: str, text: str) -> None:
    """No chunk for the stall limit ends the stream with the phase, the text, and its blocks free."""
    backend = scripted.backend()

    async def main() -> None:
        at_start = await scripted.free_blocks(backend)
        began_s = time.monotonic()
        with pytest.raises(StallError) as caught:
            await scripted.run(backend, f"!stall@{at}", plan=scripted.plan(50, stall_limit_s=0.2))
        assert 0.2 <= time.monotonic() - began_s < 5.0
        assert (caught.value.partial_text, caught.value.phase) == (text, phase)
        await scripted.settles_at(backend, at_start)

    asyncio.run(main())


def test_the_limits_of_a_plan_hold_while_the_worker_starts(scripted: Any) -> None:
    """A call that has to wait for a slow load ends at its stall limit or hard deadline, and closing too."""
    backend = scripted.backend({"load_s": 3.0}, deadline_grace_s=0.1)

    async def main() -> None:
        with pytest.raises(StallError) as caught:
            await scripted.run(backend, plan=scripted.plan(stall_limit_s=0.1))
        assert caught.value.phase == "queue"
        plan = scripted.plan(deadline_at_s=time.monotonic() + 0.1, hard_deadline=True)
        with pytest.raises(BackendError, match="hard deadline"):
            await scripted.run(backend, plan=plan)
        with pytest.raises(StallError):
            await backend.score(await scripted.score_request(backend, "a"), scripted.plan(stall_limit_s=0.1))

    asyncio.run(main())


def test_a_slow_consumer_is_no_stall(scripted: Any) -> None:
    """Chunks that waited for their caller longer than the stall limit are still delivered."""
    backend = scripted.backend()

    async def main() -> None:
        await backend.start()
        stream = await scripted.stream(backend, plan=scripted.plan(5, stall_limit_s=0.5))
        await anext(stream)
        await asyncio.sleep(1.0)
        assert (await read(stream))[-1].finish is not None

    asyncio.run(main())


def test_a_step_that_raises_ends_everyone_in_flight(scripted: Any) -> None:
    """All callers get ``EngineDiedError`` with their own text and the cause; the next call works again."""
    backend = scripted.backend()

    async def main() -> None:
        fine = await scripted.stream(backend, max_tokens=scripted.longest)
        first = await anext(fine)
        results = await asyncio.gather(
            read(fine), scripted.run(backend, "!raise@2", max_tokens=9), return_exceptions=True
        )
        assert all(isinstance(result, EngineDiedError) for result in results)
        assert all("the script says raise" in str(result) for result in results)
        assert results[0].partial_text.startswith(first.text + "1 ")
        assert results[1].partial_text == "0 1 "
        assert results[0] is not results[1]
        assert (await scripted.run(backend))[-1].finish is not None

    asyncio.run(main())


def test_loading_errors_arrive_as_they_are(scripted: Any) -> None:
    """``ModelLoadError`` of the worker is what every concurrent ``start`` raises, each its own copy."""
    backend = scripted.backend({"load_error": "tensor 7 is cut off", "load_s": 0.05})

    async def main() -> None:
        results = await asyncio.gather(*(backend.start() for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [ModelLoadError] * 3
        assert {result.reason for result in results} == {"tensor 7 is cut off"}
        assert len({id(result) for result in results}) == 3

    asyncio.run(main())


def test_an_unknown_source_is_a_clear_error(scripted: Any) -> None:
    """A module that the worker cannot import is named in the error."""
    with pytest.raises(ModelLoadError, match="no_such_module"):
        asyncio.run(scripted.backend(source="no_such_module").start())


def test_a_step_policy_that_cannot_be_imported_is_named(scripted: Any) -> None:
    """The factory's text stands in the error, and nothing is served without it."""
    with pytest.raises(InvalidValueError, match="nowhere:policy"):
        asyncio.run(scripted.backend(step_policy="nowhere:policy").start())


def test_concurrent_starts_share_one_worker(scripted: Any) -> None:
    """Starts from several tasks load once; one that is cancelled does not end the others."""
    backend = scripted.backend({"load_s": 0.3})
    host = scripted.settings["host"]
    before = count_hosts(host)

    async def main() -> None:
        tasks = [asyncio.create_task(backend.start()) for _ in range(4)]
        await asyncio.sleep(0.1)
        assert count_hosts(host) == before + 1
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1] == results[2] == results[3]
        assert count_hosts(host) == before + 1

    asyncio.run(main())


def count_hosts(host: str) -> int:
    """Step threads here, or worker processes that are our children."""
    if host == "thread":
        return sum(thread.name == "paceline-steps" for thread in threading.enumerate())
    stats = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat")]
    return sum(int(fields[1]) == os.getpid() and fields[0] != "Z" for fields in stats)


def test_a_start_that_takes_too_long_is_given_up(process: Any) -> None:
    """Loading past ``start_timeout_s`` is an error that names the setting, and the worker is gone."""
    backend = process.backend({"load_s": 60.0}, start_timeout_s=0.3)

    async def main() -> None:
        with pytest.raises(ModelLoadError, match="start_timeout_s"):
            await backend.start()

    asyncio.run(main())
    wait_until_gone(backend.worker_pid)


def test_a_worker_that_dies_while_loading_says_its_last_words(process: Any) -> None:
    """The error has the exit status and the lines that the worker printed last."""
    backend = process.backend({"load_exit": True})
    with pytest.raises(EngineDiedError, match=r"(?s)exit status 3.*the script says exit"):
        asyncio.run(backend.start())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_worker_fails_every_caller_and_is_replaced(process: Any, end: signal.Signals) -> None:
    """Streams, scorings and snapshots end at once with the signal's name; the next call has a new worker."""
    backend = process.backend()

    async def main() -> None:
        streams = [await process.stream(backend, max_tokens=process.longest) for _ in range(5)]
        for stream in streams:
            await anext(stream)
        before = backend.worker_pid
        os.kill(before, end)
        results = await asyncio.wait_for(
            asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True), 10.0
        )
        assert all(isinstance(result, EngineDiedError) for result in results)
        assert all(end.name in str(result) for result in results)
        assert all(result.partial_text.startswith("0 ") and result.phase == "decode" for result in results)
        assert (await process.run(backend))[-1].finish is not None
        assert backend.worker_pid != before

    asyncio.run(main())


def test_a_worker_that_dies_again_and_again_is_not_restarted_for_ever(process: Any) -> None:
    """More deaths a minute than allowed make calls fail at once, with the reason and the setting."""
    backend = process.backend(max_restarts_per_minute=1)

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(EngineDiedError, match="exit status 3"):
                await process.run(backend, "!exit@1")
        for _ in range(2):
            with pytest.raises(EngineDiedError, match="max_restarts_per_minute"):
                await process.run(backend)

    asyncio.run(main())


def test_a_stuck_step_holds_up_neither_snapshots_nor_deadlines(process: Any) -> None:
    """While a step never ends, snapshots answer, and a hard deadline ends the call with its text."""
    backend = process.backend(deadline_grace_s=0.2)

    async def main() -> None:
        await backend.start()
        plan = process.plan(50, deadline_at_s=time.monotonic() + 0.3, hard_deadline=True)
        stream = await process.stream(backend, "!hang@2", plan=plan)
        assert [(await anext(stream)).text, (await anext(stream)).text] == ["0 ", "1 "]
        snapshot = await backend.snapshot(await process.prompt(backend))
        assert snapshot.running == 1
        with pytest.raises(BackendError, match="hard deadline") as caught:
            await anext(stream)
        assert caught.value.partial_text == "0 1 "
        began_s = time.monotonic()
        await backend.aclose()
        assert time.monotonic() - began_s < 5.0

    asyncio.run(main())
    wait_until_gone(backend.worker_pid)


def test_a_stopped_worker_hangs_nobody(process: Any) -> None:
    """With the worker stopped by a signal, a snapshot fails in time and closing kills it."""
    backend = process.backend(answer_timeout_s=0.3, close_timeout_s=0.3)

    async def main() -> None:
        await backend.start()
        prompt = await process.prompt(backend)
        stop(backend.worker_pid)
        with pytest.raises(BackendError, match="answer_timeout_s"):
            await backend.snapshot(prompt)
        await backend.aclose()

    asyncio.run(main())
    wait_until_gone(backend.worker_pid)


def test_what_cannot_reach_the_worker_is_refused_at_once(process: Any) -> None:
    """Objects that cannot be pickled are the caller's error, and the backend works on."""
    with pytest.raises(InvalidValueError, match="step_policy_numbers"):
        process.backend(step_policy_numbers={"lock": threading.Lock()})
    backend = process.backend()

    async def main() -> None:
        await backend.start()
        with pytest.raises(InvalidValueError, match="step_policy_numbers"):
            backend.renew_step_policy({"lock": threading.Lock()})
        with pytest.raises(InvalidValueError, match="plain data"):
            await process.run(backend, stop_token_ids=(threading.Lock(),), id="odd")
        assert (await process.run(backend, id="odd"))[-1].finish is not None

    asyncio.run(main())


def stop(pid: int) -> None:
    """Stop a process, and return when it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


def test_changing_the_variant_reaches_the_running_stream(scripted: Any) -> None:
    """The stream's timeline shows the change; ids that are unknown or over are ignored."""
    backend = scripted.backend()

    async def main() -> None:
        backend.change_variant("early", Variant.INT4)
        stream = await scripted.stream(backend, max_tokens=40, id="moved")
        await anext(stream)
        backend.change_variant("moved", Variant.INT4)
        backend.change_variant("unknown", Variant.INT4)
        finish = (await read(stream))[-1].finish
        moved = {"from": "bf16", "to": "int4", "why": "the caller"}
        assert [event.attributes for event in finish.timeline.events] == [moved]

    asyncio.run(main())


def test_a_model_that_is_not_there() -> None:
    """The real source reports a missing model by its name, from the start and from preparing."""
    backend = EmbeddedBackend(EmbeddedConfig(model="/no/such/model.gguf"))

    async def main() -> None:
        with pytest.raises(ModelNotFoundError, match="no/such/model"):
            await backend.start()
        with pytest.raises(ModelNotFoundError, match="no/such/model"):
            await backend.prepare([{"role": "user", "content": "hello"}])
        await backend.aclose()

    asyncio.run(main())


def wait_until_gone(pid: int | None) -> None:
    """Fails where the process still exists, be it as a zombie, after seconds."""
    assert pid is not None
    limit_s = time.monotonic() + 5.0
    while time.monotonic() < limit_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")
