"""What may hold words of a prompt or an answer, and how it is kept out or recorded.

Without the opt-in nothing of this reaches a span: no messages, stop strings, options or tool arguments, and
of an exception its type and where it was raised, but neither its message (which may quote the prompt) nor
the source lines of its traceback (which may hold a prompt as a literal).
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from paceline.tracing import names
from paceline_engine.request import Message

_CONTENT_KEYS = frozenset(
    {
        "args",
        "arguments",
        "body",
        "completion",
        "content",
        "input",
        "kwargs",
        "message",
        "messages",
        "output",
        "payload",
        "prompt",
        "query",
        "response",
        "result",
        "system_instructions",
        "text",
    }
)
_LABEL_LIMIT = 256
_MAX_FRAMES = 64


def record_error(
    span: Span, error: BaseException, *, at_ns: int, record_content: bool, content_limit: int
) -> None:
    """Mark the span as failed with ``error``."""
    kind = type_name(error)
    event: dict[str, AttributeValue] = {names.EXCEPTION_TYPE: kind}
    description = kind
    if record_content:
        message = shorten(str(error), content_limit)
        event["exception.message"] = message
        text = "".join(traceback.format_exception(error))
        event[names.EXCEPTION_STACKTRACE] = shorten(text, content_limit)
        description = f"{kind}: {message}"
    else:
        event[names.EXCEPTION_STACKTRACE] = _frames(error)
    span.add_event(names.EXCEPTION_EVENT, event, timestamp=at_ns)
    span.set_attribute(names.ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR, description))


def type_name(error: BaseException) -> str:
    """The exception's class as the conventions want it: with its module, except for built-in ones."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def tool_attributes(
    attributes: Mapping[str, Any], *, record_content: bool, content_limit: int
) -> dict[str, AttributeValue]:
    """The caller's attributes of a tool call, without its arguments and results unless opted in."""
    kept: dict[str, AttributeValue] = {}
    for key, value in attributes.items():
        holds_content = str(key).rpartition(".")[2].lower() in _CONTENT_KEYS
        if holds_content and not record_content:
            continue
        if isinstance(value, bool | int | float):
            kept[key] = value
        elif isinstance(value, str):
            kept[key] = shorten(value, content_limit)
        elif record_content and value is not None:
            kept[key] = shorten(json.dumps(value, default=repr, ensure_ascii=False), content_limit)
    return kept


def event_attributes(attributes: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """The scalars of an engine's event; labels are cut short, anything else is left out."""
    return {
        key: label(value) if isinstance(value, str) else value
        for key, value in attributes.items()
        if isinstance(value, bool | int | float | str)
    }


def input_messages(messages: Sequence[Message], limit: int) -> str:
    """``gen_ai.input.messages`` as JSON; each text is cut so that the whole stays within ``limit``."""
    share = max(16, limit // (2 * max(1, len(messages))))
    return shorten(_dump([_message(message, share) for message in messages]), limit)


def output_messages(text: str, finish_reason: str | None, limit: int) -> str:
    """``gen_ai.output.messages`` as JSON."""
    message = {
        "role": "assistant",
        "parts": [{"type": "text", "content": shorten(text, limit // 2)}],
        "finish_reason": finish_reason or "error",
    }
    return shorten(_dump([message]), limit)


def label(text: str) -> str:
    """A name, cut where somebody took a whole text for one."""
    return shorten(text, _LABEL_LIMIT)


def shorten(text: str, limit: int) -> str:
    """The text, or its start with a mark that says how much is missing."""
    if len(text) <= limit:
        return str(text)
    mark = f"... [{len(text)} characters]"
    return text[: max(0, limit - len(mark))] + mark


def _message(message: Message, limit: int) -> dict[str, Any]:
    """One chat message in the shape of the conventions."""
    role = str(message.get("role", "user"))
    content = message.get("content")
    parts: list[dict[str, Any]] = []
    if role == "tool":
        parts.append(
            {
                "type": "tool_call_response",
                "id": message.get("tool_call_id"),
                "response": shorten(_text(content), limit),
            }
        )
    elif content is not None:
        parts.append({"type": "text", "content": shorten(_text(content), limit)})
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        parts.append(
            {
                "type": "tool_call",
                "id": call.get("id"),
                "name": function.get("name"),
                "arguments": shorten(_text(function.get("arguments")), limit),
            }
        )
    return {"role": role, "parts": parts}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else _dump(content)


def _dump(value: Any) -> str:
    return json.dumps(value, default=repr, ensure_ascii=False)


def _frames(error: BaseException) -> str:
    """Where the error and its causes were raised: files, lines and functions, no source and no messages."""
    lines: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(lines) < _MAX_FRAMES:
        seen.add(id(current))
        for frame, line in traceback.walk_tb(current.__traceback__):
            code = frame.f_code
            lines.append(f'File "{code.co_filename}", line {line}, in {code.co_name}')
        lines.append(type_name(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n".join(lines[:_MAX_FRAMES])
