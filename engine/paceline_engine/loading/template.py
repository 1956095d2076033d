"""Chat templates: Jinja in a sandbox, with the helpers that models' templates expect.

The helpers are those of transformers' ``apply_chat_template``: ``raise_exception``, ``strftime_now``,
``tojson`` without HTML escaping, loop controls, ``{% generation %}``. A template is part of a downloaded
file, so it runs in Jinja's immutable sandbox, and what it loops over, calls and writes is bounded.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from paceline_engine.errors import InvalidValueError
from paceline_engine.loading.caller_text import Disguise

MAX_LOOP_ITEMS = 1_000_000
MAX_CALLS = 200_000
MAX_NUMBER = 1_000_000
"""Largest number that a template may hand to a function, such as a width."""

PLAIN_TEMPLATE = r"""
{%- set labels = {'system': 'System', 'user': 'User', 'assistant': 'Assistant', 'tool': 'Tool'} -%}
{%- if tools -%}
    {{- 'Tools, as JSON schemas:\n' -}}
    {%- for tool in tools -%}
        {{- (tool.function if tool.function is defined else tool) | tojson -}}{{- '\n' -}}
    {%- endfor -%}
    {{- '\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- labels[message.role] -}}
    {%- if message.role == 'tool' and message.name -%}{{- ' (' -}}{{- message.name -}}{{- ')' -}}{%- endif -%}
    {{- ':' -}}
    {%- if message.content -%}{{- ' ' -}}{{- message.content -}}{%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {{- '\nTool call: ' -}}{{- call.function.name -}}{{- ' ' -}}
        {%- set given = call.function.arguments -%}
        {{- given if given is string else given | tojson -}}
    {%- endfor -%}
    {{- '\n\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""
"""For models without a template: ``System: …``, ``User: …`` and so on with an empty line between, then
``Assistant:``. Tools are listed first, tool calls follow the text of the message that made them."""


@dataclass(slots=True, kw_only=True)
class _Budget:
    """What one rendering may still do."""

    characters: int
    loop_items: int = MAX_LOOP_ITEMS
    calls: int = MAX_CALLS


class ChatTemplate:
    """One template, compiled when first used. Rendering is safe from several threads."""

    def __init__(self, source: str, *, now: Callable[[], datetime] = datetime.now) -> None:
        self.source = source
        self._environment = _Environment(now)
        self._compiled: jinja2.Template | None = None
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, str],
        disguise: Disguise,
        *,
        max_characters: int,
    ) -> str:
        """The conversation, ready for the answer; texts of the caller's come out as they came in, hidden.

        Raises:
            InvalidValueError: the template refuses the conversation, fails, or does not come to an end.
        """
        with self._lock:
            self._environment.begin(_Budget(characters=max_characters), disguise)
            try:
                if self._compiled is None:
                    self._compiled = self._environment.from_string(self.source)
                return str(
                    self._compiled.render(
                        {**variables, "messages": messages, "tools": tools, "add_generation_prompt": True}
                    )
                )
            except InvalidValueError:
                raise
            except Exception as error:
                raise InvalidValueError(
                    "messages",
                    observed=f"{type(error).__name__}: {error}",
                    limit="a conversation that the model's chat template accepts",
                    remedy="change the roles, their order or the tools as the template asks",
                ) from error


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do", _Generation],
        )
        self._budget = _Budget(characters=0)
        self._disguise = Disguise(hide={}, show={}, starts=frozenset())
        self.globals.pop("lipsum", None)
        helpers: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime(now)}
        self.globals.update(helpers)
        self.filters["tojson"] = self._to_json
        self.filters["counted_"] = self._counted
        for name in ("center", "indent", "wordwrap"):
            self.filters[name] = _with_small_numbers(self.filters[name])

    def begin(self, budget: _Budget, disguise: Disguise) -> None:
        self._budget, self._disguise = budget, disguise

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Compile, with each loop's items counted first."""
        for loop in source.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "counted_", [], [], None, None, lineno=loop.lineno)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._budget.calls -= 1
        if self._budget.calls < 0:
            _refuse(f"calls more than {MAX_CALLS} functions")
        _check_numbers(args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_numbers((left, right), {}, limit=64)
        elif operator == "%" and isinstance(left, str):
            if any(int(width) > MAX_NUMBER for width in re.findall(r"\d+", left)) or "*" in left:
                _refuse("formats to an absurd width")
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, (str, list, tuple)) and isinstance(times, int):
                    self._spend(len(text) * times)
        return super().call_binop(context, operator, left, right)

    def concat(self, parts: Iterable[str], /) -> str:
        """Jinja's hook for joining what was written."""
        found: list[str] = []
        for part in parts:
            self._spend(len(part))
            found.append(part)
        return self._disguise.join(found)

    def _spend(self, n_characters: int) -> None:
        self._budget.characters -= max(0, n_characters)
        if self._budget.characters < 0:
            _refuse("writes far more text than the conversation holds")

    def _counted(self, items: Any) -> Any:
        found = items if hasattr(items, "__len__") else list(items)
        self._budget.loop_items -= len(found)
        if self._budget.loop_items < 0:
            _refuse(f"loops over more than {MAX_LOOP_ITEMS} items")
        return found

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        _check_numbers((indent,), {})
        return self._disguise.hidden(
            json.dumps(
                self._disguise.unwrap(value),
                ensure_ascii=ensure_ascii,
                indent=indent,
                separators=separators,
                sort_keys=sort_keys,
            )
        )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime(now: Callable[[], datetime]) -> Callable[[str], str]:
    return lambda form: now().strftime(str(form))


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(f"the template {reason}")


def _check_numbers(args: Iterable[Any], kwargs: Mapping[str, Any], *, limit: int = MAX_NUMBER) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (int, float)) and abs(value) > limit:
            _refuse(f"uses a number above {limit}")


def _with_small_numbers(filter_: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        return filter_(*args, **kwargs)

    for name in ("jinja_pass_arg",):
        if hasattr(filter_, name):
            setattr(bounded, name, getattr(filter_, name))
    return bounded
