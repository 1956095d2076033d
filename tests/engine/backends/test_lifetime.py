"""The worker's life beside its client's: kills, forks, forgotten clients, interrupts, busy threads."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

PRELUDE = """
import asyncio, os, signal, sys, threading, time, warnings
from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.errors import ClosedError
from paceline_engine.mode import Mode, Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest

def make(**script):
    return EmbeddedBackend(EmbeddedConfig(
        model="script", source="paceline_engine.backends.embedded.scripted", source_options=script))

async def stream(backend, max_tokens=5000, text="hello"):
    prompt = await backend.prepare([{"role": "user", "content": text}])
    request = GenerationRequest(id="r", prompt=prompt)
    return backend.submit(request, Plan(mode=Mode(variant=Variant.BF16), max_tokens=max_tokens))
"""


def client(tmp_path: Path, body: str, **settings: Any) -> subprocess.Popen[str]:
    """Starts a script of a user's, without a ``__main__`` guard and with every warning an error."""
    script = tmp_path / "agent.py"
    script.write_text(PRELUDE + body)
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def finish(process: subprocess.Popen[str], *, status: int = 0) -> str:
    """Its output, once it has ended well and said nothing on standard error."""
    out, err = process.communicate(timeout=30.0)
    assert err == ""
    assert process.returncode == status
    return out


def is_running(pid: int) -> bool:
    """Whether it runs; a zombie that waits for a far parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int, within_s: float) -> bool:
    limit_s = time.monotonic() + within_s
    while time.monotonic() < limit_s:
        if not is_running(pid):
            return True
        time.sleep(0.01)
    return False


KILLED = {
    "between two steps": ("make(step_s=0.02)", "hello"),
    "in a step that never ends": ("make()", "!hang@1"),
}


@pytest.mark.parametrize("moment", list(KILLED))
def test_the_worker_ends_with_a_killed_client(tmp_path: Path, moment: str) -> None:
    """After SIGKILL of the client in mid-stream the worker is gone within 2 s."""
    made, text = KILLED[moment]
    body = f"""
async def main():
    backend = {made}
    chunks = await stream(backend, text={text!r})
    await anext(chunks)
    print(backend.worker_pid, flush=True)
    await anext(chunks)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with client(tmp_path, body) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        assert is_running(worker)
        process.kill()
        assert ends(worker, 2.0)


def test_the_worker_ends_with_a_client_killed_while_it_loads(tmp_path: Path) -> None:
    """The worker of a client that is killed during a long load is gone within 2 s."""
    body = """
async def main():
    backend = make(load_s=60.0)
    await backend.start(lambda progress: print(backend.worker_pid, flush=True))
asyncio.run(main())
"""
    with client(tmp_path, body) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
        assert ends(worker, 2.0)


def test_a_forked_child_that_lives_on_does_not_keep_the_worker(tmp_path: Path) -> None:
    """The client is killed while a child that it forked sleeps: the worker ends within 2 s all the same."""
    body = """
async def main():
    backend = make(step_s=0.02)
    chunks = await stream(backend)
    await anext(chunks)
    return backend, chunks
backend, chunks = asyncio.run(main())
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(backend.worker_pid, child, flush=True)
time.sleep(60)
"""
    with client(tmp_path, body) as process:
        assert process.stdout is not None
        worker, child = map(int, process.stdout.readline().split())
        process.kill()
        try:
            assert ends(worker, 2.0)
            assert is_running(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    """In the child every call raises ``ClosedError``; the parent's stream loses not one token."""
    body = """
async def refused(call):
    try:
        await call
    except ClosedError as error:
        assert "after the fork" in str(error), error
        return True
    return False

async def in_child(backend, chunks, prompt):
    assert await refused(anext(chunks))
    assert await refused(backend.start())
    assert await refused(backend.snapshot(prompt))
    assert await refused(backend.prepare([{"role": "user", "content": "x"}]))
    plan = Plan(mode=Mode(variant=Variant.BF16), max_tokens=2)
    other = backend.submit(GenerationRequest(id="c", prompt=prompt), plan)
    assert await refused(anext(other))
    await backend.aclose()

async def main():
    backend = make(step_s=0.005)
    prompt = await backend.prepare([{"role": "user", "content": "x"}])
    chunks = await stream(backend, max_tokens=100)
    texts = [(await anext(chunks)).text]
    return backend, chunks, prompt, texts

runner = asyncio.Runner()
backend, chunks, prompt, texts = runner.run(main())
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
child = os.fork()
if child == 0:
    try:
        asyncio.set_event_loop(None)
        asyncio._set_running_loop(None)
        asyncio.run(in_child(backend, chunks, prompt))
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    sys.exit(7)

async def rest():
    async for chunk in chunks:
        texts.append(chunk.text)
    await backend.aclose()

_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
runner.run(rest())
runner.close()
assert "".join(texts) == "".join(f"{i} " for i in range(100)), texts
print("whole")
"""
    assert finish(client(tmp_path, body)) == "whole\n"


def test_a_client_never_closed_leaves_nothing(tmp_path: Path) -> None:
    """A script that ends with a stream open exits at once, silently, and its worker with it."""
    body = """
async def main():
    backend = make(step_s=0.02)
    chunks = await stream(backend)
    await anext(chunks)
    print(backend.worker_pid)
    return backend, chunks
kept = asyncio.run(main())
"""
    worker = int(finish(client(tmp_path, body)))
    assert ends(worker, 2.0)


def test_a_closed_client_leaves_nothing(tmp_path: Path) -> None:
    """Closing in good order is silent under every warning, and frees the descriptors and the threads."""
    body = """
def descriptors():
    return len(os.listdir("/proc/self/fd"))

async def main():
    before = descriptors()
    backend = make()
    async for _ in await stream(backend, max_tokens=3):
        pass
    await backend.aclose()
    await asyncio.sleep(0.05)
    assert descriptors() == before, (before, descriptors())
    print(backend.worker_pid, threading.active_count())
    try:
        os.kill(backend.worker_pid, 0)
    except ProcessLookupError:
        print("reaped")
asyncio.run(main())
"""
    process = client(tmp_path, body)
    worker, rest = finish(process).split(maxsplit=1)
    assert not is_running(int(worker))
    assert rest == "1\nreaped\n"


def test_a_dropped_backend_ends_its_worker(process: Any) -> None:
    """A backend that nobody refers to any more takes its worker along, without being closed."""
    backend = process.backend()
    asyncio.run(process.run(backend))
    worker = backend.worker_pid
    process.backends.clear()
    del backend
    gc.collect()
    assert ends(worker, 5.0)


def test_an_interrupt_is_the_clients_to_handle(tmp_path: Path) -> None:
    """Ctrl-C reaches the client's whole group; the worker serves on while the client handles it."""
    body = """
async def first(backend):
    chunks = await stream(backend, max_tokens=100000 // 2)
    await anext(chunks)
    print("running", flush=True)
    async for _ in chunks:
        pass

async def second(backend):
    texts = [chunk.text async for chunk in await stream(backend, max_tokens=3)]
    print("".join(texts), backend.worker_pid == pid)
    await backend.aclose()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
backend = make(step_s=0.002)
asyncio.run(backend.start())
pid = backend.worker_pid
os.kill(pid, signal.SIGINT)
try:
    asyncio.run(first(backend))
except KeyboardInterrupt:
    asyncio.run(second(backend))
"""
    with client(tmp_path, body.replace("100000 // 2", "10000"), start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        os.killpg(process.pid, signal.SIGINT)
        assert finish(process) == "0 1 2  True\n"


def test_what_lies_in_the_working_directory_shadows_nothing(tmp_path: Path) -> None:
    """A user's own ``pickle.py`` beside where the script is run does not reach the worker."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "pickle.py").write_text("raise RuntimeError('shadowed')")
    body = """
backend = make()
asyncio.run(backend.start())
asyncio.run(backend.aclose())
print("fine")
"""
    assert finish(client(tmp_path, body, cwd=elsewhere)) == "fine\n"


BUSY = "while True:\n    sum(range(1000))"


def intervals_ms(harness: Any, backend: Any) -> float:
    chunks = asyncio.run(harness.run(backend, max_tokens=25))
    made = [chunk.made_at_s for chunk in chunks]
    return statistics.median(after - before for before, after in itertools.pairwise(made)) * 1e3


def test_a_busy_thread_of_the_agent_does_not_stretch_steps(process: Any) -> None:
    """Steps that yield the lock 400 times take as long beside a busy loop here as beside one elsewhere."""
    backend = process.backend({"switches": 400, "step_s": 0.0})
    asyncio.run(backend.start())
    with subprocess.Popen([sys.executable, "-c", BUSY]) as elsewhere:
        beside_process_ms = intervals_ms(process, backend)
        elsewhere.kill()
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        beside_thread_ms = intervals_ms(process, backend)
    finally:
        stop.set()
        thread.join()
    # In the agent's own process such a step waits out the switch interval of 5 ms up to 400 times.
    assert beside_thread_ms < max(10 * beside_process_ms, 100.0)
