"""Conversations in the form that chat templates expect, checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from paceline_engine.errors import InvalidValueError

ROLES = ("system", "user", "assistant", "tool")
_SAME_ROLES = {"developer": "system"}


def normalized(messages: object) -> list[dict[str, Any]]:
    """The messages as templates expect them.

    Contents become one text each (``None`` an empty one), tool calls have their arguments as an object, and
    a developer speaks as the system.

    Raises:
        InvalidValueError: no messages, an unknown role, or a part that is no text.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise _invalid("messages", messages, "a list of messages", "put the message into a list")
    found = [_message(message, index) for index, message in enumerate(messages)]
    if not found:
        raise _invalid("messages", [], "at least one message", "give the conversation so far")
    return found


def normalized_tools(tools: object) -> list[dict[str, Any]] | None:
    """The tools as OpenAI's ``{"type": "function", "function": …}``; None where there are none.

    Raises:
        InvalidValueError: a tool is no object.
    """
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable):
        raise _invalid("tools", tools, "a list of tools", "put the tool into a list")
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise _invalid(f"tools[{index}]", tool, "an object", "give name, description and parameters")
        found.append(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)})
    return found or None


def _message(message: object, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise _invalid(where, message, "an object with role and content", "give a dict")
    role = message.get("role")
    if isinstance(role, str):
        role = _SAME_ROLES.get(role, role)
    if role not in ROLES:
        raise _invalid(
            f"{where}.role",
            role,
            f"one of {', '.join(ROLES)}",
            "name who speaks by one of these",
        )
    made: dict[str, Any] = {str(key): value for key, value in message.items()}
    made["role"] = role
    made["content"] = _content(message.get("content"), f"{where}.content")
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, (list, tuple)):
            raise _invalid(f"{where}.tool_calls", calls, "a list of tool calls", "put the call into a list")
        made["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
        if not calls:
            del made["tool_calls"]
    return made


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _invalid(where, content, "a text, None or a list of text parts", "turn it into text")
    texts: list[str] = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _invalid(
                f"{where}[{number}]",
                part,
                'of the form {"type": "text", "text": …}',
                "leave out images and other parts: the model reads text alone",
            )
        texts.append(text)
    return "".join(texts)


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _invalid(where, call, "an object with a function", "use the form of OpenAI's chat API")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise _invalid(f"{where}.function.name", name, "the name of a tool", "name the tool called")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        # templates print an object; text that is none is shown as the model wrote it
        arguments = parsed if isinstance(parsed, dict) else arguments
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, (str, Mapping)):
        raise _invalid(
            f"{where}.function.arguments", arguments, "a JSON object", "give an object or its JSON"
        )
    return {
        **{str(key): value for key, value in call.items()},
        "type": "function",
        "function": {**function, "arguments": arguments},
    }


def _invalid(field: str, observed: Any, limit: str, remedy: str) -> InvalidValueError:
    return InvalidValueError(field, observed=observed, limit=limit, remedy=remedy)
