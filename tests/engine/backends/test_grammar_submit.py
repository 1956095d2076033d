"""A request with a grammar on its way through the step loop's host."""

from __future__ import annotations

import threading
from typing import Any

from paceline_engine.backends.embedded.loop import EngineLoop
from paceline_engine.backends.embedded.messages import Abort, Submit, TakeSnapshot
from paceline_engine.grammar.base import Grammar
from paceline_engine.mode import Mode, Variant
from paceline_engine.plan import Plan
from paceline_engine.request import GenerationRequest, Prompt


class SlowCompiler:
    """An engine whose submissions take until they are let go."""

    has_work = False

    def __init__(self) -> None:
        self.go, self.done = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def submit(self, request: GenerationRequest, plan: Plan, *, submitted_at_s: float) -> None:
        assert self.go.wait(20)
        self.calls.append(f"submit {request.id}")

    def abort(self, request_id: str) -> None:
        self.calls.append(f"abort {request_id}")
        self.done.set()

    def snapshot(self, token_ids: tuple[int, ...], *, salt: str = "", adapter: str | None = None) -> Any:
        self.calls.append("snapshot")
        return None


def test_other_commands_do_not_wait_for_a_grammar() -> None:
    """While a grammar is compiled snapshots are answered, and an abort takes effect when it has entered."""
    engine = SlowCompiler()
    loop = EngineLoop(engine, emit=lambda event: None)  # type: ignore[arg-type]
    request = GenerationRequest(
        id="a", prompt=Prompt(messages=(), token_ids=(1,), n_tokens=1), grammar=Grammar.regex("a")
    )
    plan = Plan(mode=Mode(variant=Variant.BF16), max_tokens=4)
    loop.handle(Submit(request=request, plan=plan, submitted_at_s=0.0))
    loop.handle(TakeSnapshot(call_id="s", token_ids=(), salt="", adapter=None))
    loop.handle(Abort(request_id="a"))
    assert engine.calls == ["snapshot"]
    engine.go.set()
    assert engine.done.wait(20)
    assert engine.calls == ["snapshot", "submit a", "abort a"]
