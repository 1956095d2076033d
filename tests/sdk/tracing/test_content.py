"""Nothing of prompts and answers is exported unless asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from paceline.tracing import content
from paceline.tracing.settings import Settings, bind
from paceline_engine.errors import GenerationError, InvalidValueError

Play = Callable[..., Any]


def play_with_errors(played: Any, secrets: tuple[str, ...]) -> None:
    """A turn whose tool and call fail with errors that quote prompt, answer and stop string."""
    prompt, answer, stop = secrets
    played.run()
    played.request_id = "r2"
    turn = played.begin()
    chat = played.chat(turn)
    try:
        try:
            raise InvalidValueError("stop", observed=stop, limit=prompt, remedy=answer)
        except InvalidValueError as cause:
            raise GenerationError(f"broke off after {answer}", partial_text=answer) from cause
    except GenerationError as raised:
        error = raised
    record = played.record(id="r2", finish_reason=None, error=f"GenerationError: {error}")
    chat.end(record, output_text=answer, error=error)
    tool = turn.start_tool(
        "search",
        started_at_s=played.started_at_s + 0.5,
        attributes={"gen_ai.tool.call.arguments": {"q": prompt}, "tool.result": answer, "input": prompt},
    )
    tool.end(ended_at_s=played.started_at_s + 0.6, error=ValueError(prompt))
    played.request_id = "r3"
    only_words = played.chat(turn)
    only_words.end(played.record(id="r3", finish_reason=None, error=f"{answer} Error"))
    turn.end(played.report(record), error=error)


def test_no_fragment_is_exported_by_default(play: Play, captured: Any, secrets: tuple[str, ...]) -> None:
    """No word of prompt, answer or stop string is in the bytes, errors and tools included."""
    played = play()
    play_with_errors(played, secrets)
    sent = encode_spans(captured.spans).SerializeToString()
    assert b"gemma3-270m" in sent
    assert b"GenerationError" in sent
    for word in {word for text in secrets for word in text.split() if len(word) > 4}:
        assert word.encode() not in sent, word


def test_content_is_recorded_when_asked_for(play: Play, captured: Any, secrets: tuple[str, ...]) -> None:
    """Opted in, messages, answer, stop strings, arguments and messages of errors are there."""
    prompt, answer, stop = secrets
    bind(captured.provider, Settings(record_content=True))
    play_with_errors(play(), secrets)
    chat = next(span for span in captured.spans if span.name == "chat gemma3-270m")
    said = json.loads(chat.attributes["gen_ai.input.messages"])
    assert said == [{"role": "user", "parts": [{"type": "text", "content": prompt}]}]
    [answered] = json.loads(chat.attributes["gen_ai.output.messages"])
    assert answered["parts"] == [{"type": "text", "content": answer}]
    assert answered["finish_reason"] == "stop"
    assert chat.attributes["gen_ai.request.stop_sequences"] == (stop,)
    tools = [span for span in captured.spans if span.name == "execute_tool search"]
    assert [span.attributes.get("arguments") for span in tools] == [prompt, None]
    assert "exception.message" in encode_spans(captured.spans).SerializeToString().decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("value", "recorded"),
    [("true", True), ("SPAN_ONLY", True), ("span_and_event", True), ("event_only", False), ("", False)],
)
def test_the_environment_opts_in(
    play: Play,
    captured: Any,
    secrets: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    recorded: bool,
) -> None:
    """OpenTelemetry's own variable switches content on, where it asks for it on spans."""
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", value)
    play().run()
    assert (secrets[0].encode() in encode_spans(captured.spans).SerializeToString()) is recorded


def test_attributes_of_tools_keep_what_is_no_content(play: Play, captured: Any) -> None:
    """Numbers and labels that the caller gives a tool are recorded without opting in."""
    play().run()
    found = captured.named("execute_tool search").attributes
    assert found["hits"] == 3
    assert found["index"] == "news"
    assert "arguments" not in found


def test_recorded_content_is_cut() -> None:
    """Long histories stay within the limit, and short messages beside a long one stay whole."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x" * 1_000_000}]
    text = content.input_messages(messages, 8192)
    assert len(text) <= 8192
    system, user = json.loads(text)
    assert system["parts"][0]["content"] == "be brief"
    assert user["parts"][0]["content"].endswith("[1000000 characters]")
    assert len(content.output_messages("\n" * 100_000, None, 8192)) <= 8192


def test_tool_calls_and_results_have_the_conventions_shape() -> None:
    """An assistant's tool call and the tool's answer become the parts that the conventions name."""
    messages = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    asked, told = json.loads(content.input_messages(messages, 8192))
    assert asked["parts"] == [{"type": "tool_call", "id": "c1", "name": "add", "arguments": '{"a": 1}'}]
    assert told["parts"] == [{"type": "tool_call_response", "id": "c1", "response": "3"}]
