"""A long prompt is tokenized beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from paceline_engine.backends.embedded import EmbeddedBackend, EmbeddedConfig
from paceline_engine.loading import open_tokenizer
from paceline_engine.loading.base import LONG_TEXT_CHARACTERS

SCRIPTED = "paceline_engine.backends.embedded.scripted"


class WaitsForTheLoop:
    """A tokenizer that is done only when the event loop has turned meanwhile."""

    def __init__(self) -> None:
        self.turned = threading.Event()

    def render_chat(self, messages: Any, *, tools: Any = None) -> tuple[int, ...]:
        assert self.turned.wait(20), "the event loop stood still"
        return (1, 2, 3)


def test_the_event_loop_turns_while_a_long_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else waits in the loop runs before the prompt of a long conversation is ready."""
    tokenizer = WaitsForTheLoop()

    async def opened(self: EmbeddedBackend) -> WaitsForTheLoop:
        return tokenizer

    monkeypatch.setattr(EmbeddedBackend, "_opened_tokenizer", opened)
    backend = EmbeddedBackend(EmbeddedConfig(model="toy", source=SCRIPTED))
    message = {"role": "user", "content": [{"type": "text", "text": "a" * LONG_TEXT_CHARACTERS}]}

    async def main() -> tuple[int, ...]:
        preparing = asyncio.create_task(backend.prepare([message]))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(tokenizer.turned.set)
        return (await preparing).token_ids

    assert asyncio.run(main()) == (1, 2, 3)


def test_other_threads_run_while_a_long_text_is_encoded(tiny_model: Any) -> None:
    """The interpreter lock is given back, and the ids are those of the text in one piece."""
    import tokenizers

    tiny = tiny_model("gemma3")
    tokenizer = open_tokenizer(str(tiny.safetensors))
    text = "the weather in Oslo " * 20_000
    done = threading.Event()
    encoded: list[tuple[int, ...]] = []

    def encode() -> None:
        encoded.append(tokenizer.encode(text))
        done.set()

    thread = threading.Thread(target=encode)
    turns = 0
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 3
    reference = tokenizers.Tokenizer.from_file(str(tiny.safetensors / "tokenizer.json"))
    assert encoded == [tuple(reference.encode(text, add_special_tokens=False).ids)]
