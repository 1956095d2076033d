"""Budgets as people write them: ``TTFT<200ms, TPOT<30ms, E2E<2s, confidence 95%, hard, else reject``."""

from __future__ import annotations

import math
import re
from typing import Any

from paceline_engine.errors import InvalidValueError

_NAMES = {
    "ttft": "ttft_ms",
    "time to first token": "ttft_ms",
    "first token": "ttft_ms",
    "tpot": "tpot_ms",
    "itl": "tpot_ms",
    "time per output token": "tpot_ms",
    "inter token latency": "tpot_ms",
    "e2e": "e2e_ms",
    "end to end": "e2e_ms",
    "latency": "e2e_ms",
    "total": "e2e_ms",
    "stall": "stall_ms",
    "confidence": "confidence",
    "quality": "min_quality",
    "min quality": "min_quality",
}
_MS_PER_UNIT = {
    "us": 1e-3,
    "µs": 1e-3,
    "μs": 1e-3,
    "ms": 1.0,
    "s": 1e3,
    "sec": 1e3,
    "second": 1e3,
    "seconds": 1e3,
    "min": 6e4,
    "minute": 6e4,
    "minutes": 6e4,
}
_EXAMPLE = "write it as 'TTFT<200ms, TPOT<30ms, E2E<2s, confidence 90%, else degrade'"

_SEPARATOR = re.compile(r"[,;\n]|\band\b")
_BEFORE_KEYWORD = re.compile(r"\s+(?=(?:or\s+else|(?<!or\s)else|hard|soft)\b)")
_ELSE = re.compile(r"(?:or\s+)?else\s+(degrade|shorten|reject)")
_HARD = re.compile(r"(hard|soft)(?:\s+deadline)?")
_ADAPT = re.compile(r"(no )?(?:adapt|adapting)")
_VALUE = re.compile(
    r"(?P<name>[a-z][a-z0-9 _-]*?)\s*(?P<sign>[<>]=|[<>≤≥:=]|\s)\s*"
    r"(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?))"
    r"\s*(?P<unit>[a-zµμ]*|%)(?P<per>\s*(?:/|per\s)\s*tok(?:en)?)?"
)


def parse_fields(text: object) -> dict[str, Any]:
    """The fields of ``SLO`` that a text names; budgets that it does not name are None.

    Raises:
        InvalidValueError: an unknown name, a number without unit, a duplicate, or no sense at all.
    """
    if not isinstance(text, str) or not text.strip():
        raise _refused(text, limit="a text that names at least one budget", remedy=_EXAMPLE)
    found: dict[str, Any] = {}
    for raw in _SEPARATOR.split(_BEFORE_KEYWORD.sub(", ", text.strip().lower())):
        if clause := " ".join(raw.split()):
            for name, value in _clause(clause).items():
                if name in found:
                    raise _refused(
                        text,
                        limit=f"one value for each name ('{name}' is given twice)",
                        remedy="drop one of them",
                    )
                found[name] = value
    no_budgets = found.pop("no budgets", False)
    budgets = {"ttft_ms", "tpot_ms", "e2e_ms"}
    if bool(no_budgets) == bool(budgets & found.keys()):
        limit = "a text that names at least one budget, or says 'no budgets', but not both"
        raise _refused(text, limit=limit, remedy=_EXAMPLE)
    return dict.fromkeys(budgets) | found


def format_fields(
    *,
    ttft_ms: float | None,
    tpot_ms: float | None,
    e2e_ms: float | None,
    stall_ms: float | None,
    confidence: float,
    on_infeasible: str,
    hard: bool,
    min_quality: float,
    adapt: bool,
) -> str:
    """The text that ``parse_fields`` reads back to the same fields."""
    named = (("TTFT", ttft_ms), ("TPOT", tpot_ms), ("E2E", e2e_ms))
    parts = [f"{name}<{_plain(value)}ms" for name, value in named if value is not None] or ["no budgets"]
    parts.append("no stall" if stall_ms is None else f"stall<{_plain(stall_ms)}ms")
    parts.append(f"confidence {_plain(confidence)}")
    if min_quality:
        parts.append(f"quality>={_plain(min_quality)}")
    if not adapt:
        parts.append("no adapting")
    if hard:
        parts.append("hard")
    parts.append(f"else {on_infeasible}")
    return ", ".join(parts)


def _clause(clause: str) -> dict[str, Any]:
    if match := _ELSE.fullmatch(clause):
        return {"on_infeasible": match[1]}
    if match := _HARD.fullmatch(clause):
        return {"hard": match[1] == "hard"}
    if re.fullmatch(r"no budgets?", clause):
        return {"no budgets": True}
    if re.fullmatch(r"no stall(?: limit)?", clause):
        return {"stall_ms": None}
    if match := _ADAPT.fullmatch(clause):
        return {"adapt": not match[1]}
    match = _VALUE.fullmatch(clause)
    if match is None:
        raise _refused(clause, limit="made of budgets such as 'TTFT<200ms'", remedy=_EXAMPLE)
    field = _NAMES.get(re.sub(r"[ _-]+", " ", match["name"]).strip())
    if field is None:
        limit = f"made of the names {', '.join(sorted(_NAMES))}"
        raise _refused(clause, limit=limit, remedy=f"'{match['name']}' is none of them; {_EXAMPLE}")
    if match["per"] and field != "tpot_ms":
        raise _refused(clause, limit="per token only for TPOT", remedy="drop 'per token'")
    if (">" in match["sign"] or "≥" in match["sign"]) and field != "min_quality":
        raise _refused(clause, limit="an upper limit ('<') for every name but quality", remedy=_EXAMPLE)
    if ("<" in match["sign"] or "≤" in match["sign"]) and field == "min_quality":
        raise _refused(clause, limit="a lower limit ('>=') for quality", remedy="write 'quality>=0.95'")
    number = float(match["number"])
    if field == "confidence":
        return {field: _confidence(clause, number, match["unit"])}
    if field == "min_quality":
        return {field: _quality(clause, number, match["unit"])}
    return {field: _milliseconds(clause, number, match["unit"])}


def _milliseconds(clause: str, number: float, unit: str) -> float:
    if not unit and math.isfinite(number):
        remedy = f"write '{clause}ms' for milliseconds or '{clause}s' for seconds"
        raise _refused(clause, limit="a number with its unit (us, ms, s or min)", remedy=remedy)
    if unit and unit not in _MS_PER_UNIT:
        raise _refused(clause, limit="in us, ms, s or min", remedy=f"'{unit}' is not a unit of time here")
    value = number * _MS_PER_UNIT.get(unit, 1.0)
    if not (math.isfinite(value) and value > 0):
        remedy = "leave a budget out to have none"
        raise _refused(clause, limit="a finite time above 0", remedy=remedy)
    return value


def _confidence(clause: str, number: float, unit: str) -> float:
    value = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 < value < 1:
        remedy = "write 'confidence 90%' or 'confidence 0.9'"
        raise _refused(clause, limit="between 0% and 100%, both excluded", remedy=remedy)
    return value


def _quality(clause: str, number: float, unit: str) -> float:
    value = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 <= value <= 1:
        raise _refused(clause, limit="between 0 and 1", remedy="write 'quality>=0.95'")
    return value


def _plain(value: float) -> str:
    """The shortest text that ``float`` reads back to the same value."""
    return repr(float(value)).removesuffix(".0")


def _refused(text: object, *, limit: str, remedy: str) -> InvalidValueError:
    return InvalidValueError("slo", observed=text, limit=limit, remedy=remedy)
