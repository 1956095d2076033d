"""The parts of the embedded backend by themselves: settings, frames, inboxes, the loop, core counts."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from paceline_engine import errors
from paceline_engine.backends.embedded import EmbeddedConfig
from paceline_engine.backends.embedded.cores import usable_cores
from paceline_engine.backends.embedded.inbox import Inbox
from paceline_engine.backends.embedded.loop import EngineLoop, load_policy
from paceline_engine.backends.embedded.messages import (
    Abort,
    ChangeVariant,
    Close,
    Connection,
    Event,
    RenewPolicy,
    SnapshotTaken,
    TakeSnapshot,
    portable,
)
from paceline_engine.backends.embedded.scripted import ByteTokenizer, Script, ScriptedEngine
from paceline_engine.backends.embedded.session import Call
from paceline_engine.backends.embedded.stream import EmbeddedStream
from paceline_engine.chunk import Chunk
from paceline_engine.mode import Mode, Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Prompt
from paceline_engine.schedule.base import StepState

EXAMPLES = [
    errors.PacelineError("root"),
    errors.InvalidValueError("n", observed=object(), limit=(1, 2), remedy="r"),
    errors.PromptTooLongError("prompt", observed=9, limit=8, remedy="r"),
    errors.UnknownOptionError("model", observed="x", limit="known", remedy="r"),
    errors.MissingExtraError("engine", needed_for="this"),
    errors.ModelError("m", reason="a", remedy="b"),
    errors.ModelNotFoundError("m", reason="a", remedy="b"),
    errors.ModelLoadError("m", reason="a", remedy="b", tensor="t"),
    errors.UnsupportedModelError("m", reason="a", remedy="b"),
    errors.InfeasibleError("no", decision={"a": 1}),
    errors.GenerationError("g", partial_text="p", phase="decode"),
    errors.StallError("g", partial_text="p", phase="prefill"),
    errors.EngineDiedError("g", partial_text="p"),
    errors.BackendError("g"),
    errors.DeadlineExpiredError(late_ms=3.0),
    errors.ClosedError("closed"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_crosses_with_its_fields(error: errors.PacelineError) -> None:
    """An error arrives as its own type with the same message and fields."""
    copy = pickle.loads(pickle.dumps(portable(error)))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__.keys() == error.__dict__.keys()
    plain = {name: value for name, value in error.__dict__.items() if name not in ("observed", "limit")}
    assert plain.items() <= copy.__dict__.items()


def test_the_examples_are_the_whole_tree() -> None:
    """No type of error is left out above."""

    def below(kind: type) -> set[type]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    ours = {kind for kind in below(errors.PacelineError) if kind.__module__ == errors.__name__}
    assert {type(error) for error in EXAMPLES} == ours


def test_foreign_and_unpicklable_errors_become_backend_errors() -> None:
    """What a client could not read is told in words."""
    assert type(portable(KeyError("x"))) is errors.BackendError
    stubborn = errors.ClosedError("why")
    stubborn.lock = threading.Lock()  # type: ignore[attr-defined]
    assert type(portable(stubborn)) is errors.BackendError
    assert "why" in str(portable(stubborn))


def test_frames_survive_every_cut() -> None:
    """Two frames arrive whole when the bytes come one at a time, and a frame cut short is the end."""
    ours, theirs = socket.socketpair()
    relay_in, relay_out = socket.socketpair()
    sender, receiver = Connection(ours), Connection(relay_out)
    sender.send(Abort(request_id="a"))
    sender.send("x" * 300)
    data = theirs.recv(1 << 16)

    def trickle() -> None:
        for byte in data + data[:7]:
            relay_in.send(bytes((byte,)))
        relay_in.close()

    thread = threading.Thread(target=trickle)
    thread.start()
    assert receiver.receive() == Abort(request_id="a")
    assert receiver.receive() == "x" * 300
    assert receiver.receive() is None
    thread.join()
    for end in (sender, receiver):
        end.close()
    theirs.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"model": ""},
        {"name": ""},
        {"variants": ()},
        {"variants": ("int9",)},
        {"variants": ("int8", "int8")},
        {"variants": 8},
        {"kv_tokens": 0},
        {"kv_tokens": 64, "n_blocks": 4},
        {"n_blocks": True},
        {"block_size": -1},
        {"n_threads": 0},
        {"n_threads": 10**6},
        {"kv_tokens": 10**30},
        {"n_threads": 1.5},
        {"max_sequences": 0},
        {"max_prefill_tokens_per_step": 0},
        {"max_restarts_per_minute": -1},
        {"step_policy": "module.factory"},
        {"step_policy": ":factory"},
        {"host": "fiber"},
        {"start_timeout_s": 0},
        {"close_timeout_s": float("nan")},
        {"answer_timeout_s": float("inf")},
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(settings: dict[str, Any]) -> None:
    """Each bad setting is an ``InvalidValueError`` that names it."""
    with pytest.raises(errors.InvalidValueError) as caught:
        EmbeddedConfig(**{"model": "m"} | settings)
    assert caught.value.field in settings


def test_settings_have_sensible_defaults() -> None:
    """Blocks cover 16,384 tokens, less where all sequences together could not fill them."""
    config = EmbeddedConfig(model="m", variants=("int8", "int4"))  # type: ignore[arg-type]
    assert config.variants == (Variant.INT8, Variant.INT4)
    assert config.threads >= 1
    assert config.blocks(context_tokens=32_768) * config.block_size == 16_384
    assert config.blocks(context_tokens=64) * config.block_size == 64 * config.max_sequences
    assert EmbeddedConfig(model="m", kv_tokens=17).blocks(context_tokens=4096) == 2
    assert EmbeddedConfig(model="m", n_blocks=5).blocks(context_tokens=4096) == 5
    assert EmbeddedConfig(model="m", n_threads=3).threads == 3


def test_cores_are_counted_within_the_containers_quota(tmp_path: Path) -> None:
    """Hyper-threads of one core count once, and a CPU quota caps the count."""
    cpus = os.sched_getaffinity(0)

    def siblings(of_cpu: Callable[[int], str]) -> None:
        for cpu in cpus:
            path = tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(of_cpu(cpu) + "\n")

    siblings(lambda cpu: "0-4095")
    assert usable_cores(sysfs=tmp_path) == 1
    siblings(str)
    assert usable_cores(sysfs=tmp_path) == len(cpus)
    quota = tmp_path / "fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    quota.write_text("max 100000\n")
    assert usable_cores(sysfs=tmp_path) == len(cpus)
    quota.write_text("50000 100000\n")
    assert usable_cores(sysfs=tmp_path) == 1
    assert usable_cores(sysfs=tmp_path / "none") == len(cpus)


def test_an_inbox_passes_everything_in_order() -> None:
    """Items put by a thread as fast as it can arrive in order, with none lost."""
    inbox: Inbox[int] = Inbox()

    def put() -> None:
        for number in range(5000):
            inbox.put(number)

    async def main() -> list[int]:
        thread = threading.Thread(target=put)
        thread.start()
        seen: list[int] = []
        while len(seen) < 5000:
            assert await inbox.wait(time.monotonic() + 10.0)
            seen.append(inbox.items.popleft())
        thread.join()
        return seen

    assert asyncio.run(main()) == list(range(5000))


def test_an_inbox_wait_ends_in_time() -> None:
    """Without an item the wait says so, not before its time."""
    inbox: Inbox[int] = Inbox()
    began_s = time.monotonic()
    assert asyncio.run(inbox.wait(began_s + 0.05)) is False
    assert time.monotonic() - began_s >= 0.05


POLICY = """
from paceline_engine.schedule.base import StepDecision

class Policy:
    def __init__(self, numbers):
        self.share = numbers["share"]

    def decide_step(self, state):
        return StepDecision(prefill_order=(), prefill_tokens=self.share)
"""
STATE = StepState(now_s=0.0, decoding=(), prefilling=(), free_blocks=1, block_size=16, max_prefill_tokens=64)


def loop_of(events: list[Event], **settings: Any) -> EngineLoop:
    engine = ScriptedEngine(Script(step_s=0.0), n_blocks=8, block_size=16)
    return EngineLoop(engine, emit=events.append, **settings)


def test_a_policy_is_renewed_and_a_refused_renewal_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """New numbers make the policy anew; numbers that the factory refuses leave the one before."""
    (tmp_path / "a_policy_of_the_users.py").write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    policy = load_policy("a_policy_of_the_users:Policy", MappingProxyType({"share": 5}))
    assert policy is not None
    assert policy.decide_step(STATE).prefill_tokens == 5
    loop = loop_of([], policy=policy)
    loop.handle(RenewPolicy(numbers={"share": 7}))
    assert policy.decide_step(STATE).prefill_tokens == 7
    loop.handle(RenewPolicy(numbers={}))
    assert policy.decide_step(STATE).prefill_tokens == 7


def test_what_is_due_when_idle_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rest without work it is called, once, and the loop serves on."""
    monkeypatch.setattr("paceline_engine.backends.embedded.loop._IDLE_S", 0.01)
    done = threading.Semaphore(0)
    events: list[Event] = []
    loop = loop_of(events, when_idle=done.release)
    thread = threading.Thread(target=loop.run)
    thread.start()
    assert done.acquire(timeout=10.0)
    loop.handle(TakeSnapshot(call_id="c", token_ids=(1, 2), salt="", adapter=None))
    assert not done.acquire(timeout=0.2)
    loop.handle(Close())
    thread.join(10.0)
    assert not thread.is_alive()
    assert [type(event) for event in events] == [SnapshotTaken]


def test_a_loop_answers_and_ends_while_idle() -> None:
    """Without work the loop sleeps; snapshots are answered, odd commands harm nothing, closing ends it."""
    events: list[Event] = []
    loop = loop_of(events)
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.handle(Abort(request_id="unknown"))
    loop.handle(ChangeVariant(request_id="unknown", variant=Variant.INT4))
    loop.handle(RenewPolicy(numbers={}))
    loop.handle(TakeSnapshot(call_id="c", token_ids=(1, 2), salt="", adapter=None))
    loop.handle(Close())
    thread.join(10.0)
    assert not thread.is_alive()
    (event,) = events
    assert isinstance(event, SnapshotTaken)
    assert event.call_id == "c"


def test_the_byte_tokenizer_gives_back_what_it_was_given() -> None:
    """Encoding and decoding are inverse, also of text beyond ASCII."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.render_chat([{"role": "user", "content": "né 🙂"}])
    assert tokenizer.decode(ids) == "né 🙂"
    assert b"".join(map(tokenizer.token_bytes, ids)) == "né 🙂".encode()


def test_a_reader_that_never_waits_lets_its_loop_run() -> None:
    """Chunks that are all there already hold up neither other tasks nor a cancellation of the reader."""

    async def main() -> None:
        call = Call(id="r#0", request_id="r", unfinished=1)
        for _ in range(50):
            call.inbox.put(Chunk(text="x", made_at_s=0.0, token_ids=(1,)))
        left: list[Call] = []
        session: Any = SimpleNamespace(abandon=left.append)

        async def open_call(_: float) -> Any:
            return session, call

        prompt = Prompt(messages=(), token_ids=(1,), n_tokens=1)
        plan = Plan(mode=Mode(variant=Variant.BF16), max_tokens=50)
        stream = EmbeddedStream(
            GenerationRequest(id="r", prompt=prompt), plan, open_call=open_call, grace_s=1.0
        )
        n_read = 0
        began = asyncio.Event()

        async def reader() -> None:
            nonlocal n_read
            async for _ in stream:
                n_read += 1
                began.set()

        task = asyncio.create_task(reader())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 1 <= n_read < 5
        assert left == [call]

    asyncio.run(main())
