"""A busy Python loop beside the work that is measured: in this process, or in another."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

LOOP = """
import os
parent = os.getppid()
print(flush=True)
n = 0
while os.getppid() == parent:
    for _ in range(1_000_000):
        n += 1
"""
"""Ends with its parent, should that be killed."""


@contextmanager
def busy_thread() -> Generator[None]:
    """Count in a thread of this process, as an agent's own Python work does."""
    ended = False

    def count() -> None:
        n = 0
        while not ended:
            n += 1

    thread = threading.Thread(target=count, name="busy-agent", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended = True
        thread.join()


@contextmanager
def busy_process() -> Generator[subprocess.Popen[bytes]]:
    """The same loop in a process of its own; it runs when this returns."""
    process = subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()
