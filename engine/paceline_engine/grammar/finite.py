"""Whether some finite text can match a JSON schema, and the place to blame where none can.

Which parts can be matched by a finite value is the least fixed point of what each part needs: a required
property needs its schema, ``minItems: 1`` needs that of the items, ``anyOf`` needs one of its branches. A
part that is not in it would be written on and on. Only what is certain is refused: keywords that are not
known here count as matched, and conditions of several keywords together are left to the grammar library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_BRANCHES = ("anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why nothing finite matches."""

    place: str
    """A JSON pointer into the schema, such as ``#/properties/child``."""
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class _Part:
    """A subschema and its place."""

    schema: Any
    place: str

    def at(self, *keys: str | int) -> str:
        return "/".join((self.place, *(str(key).replace("~", "~0").replace("/", "~1") for key in keys)))

    def child(self, *keys: str | int) -> _Part:
        found = self.schema
        for key in keys:
            found = found[key]
        return _Part(found, self.at(*keys))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """What has to be matched by something finite for a part to be so: one of ``parts``, or nothing can."""

    parts: tuple[_Part, ...] = ()
    fault: Fault | None = None


def find_fault(schema: Mapping[str, Any]) -> Fault | None:
    """The first place that makes the schema one that nothing finite matches; None where something may."""
    return _Schema(schema).fault()


def without_endless(schema: Mapping[str, Any]) -> Any:
    """The schema with ``false`` for optional parts that nothing finite matches: no output may begin one."""
    return _Schema(schema).pruned()


class _Schema:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = _Part(root, "#")
        self._parts: dict[str, _Part] = {}
        self._collect()
        self._finite: set[str] = set()
        """Places of the parts that something finite matches."""
        again = True
        while again:
            again = False
            # Found last, asked first: what others need mostly stands before them.
            for place, part in reversed(self._parts.items()):
                if place not in self._finite and self._is_finite(part):
                    self._finite.add(place)
                    again = True

    def fault(self) -> Fault | None:
        part, way = self._root, list[str]()
        while part.place not in self._finite:
            if part.place in way:
                return _endless(way[way.index(part.place) :])
            way.append(part.place)
            need = next(need for need in self._needs(part) if not self._is_met(need))
            if need.fault is not None:
                return need.fault
            part = need.parts[0]
        return None

    def pruned(self) -> Any:
        return self._pruned(self._root)

    def _pruned(self, part: _Part) -> Any:
        if not isinstance(part.schema, Mapping):
            return part.schema
        found = dict(part.schema)
        for child in [*_children(part), *_definitions(part)]:
            keys = child.place.removeprefix(part.place + "/").split("/")
            optional = keys[0] not in ("allOf", *_DEFINITIONS)
            endless = optional and child.place in self._parts and child.place not in self._finite
            value = False if endless else self._pruned(child)
            if len(keys) == 1:
                found[keys[0]] = value
                continue
            held = found[keys[0]]
            if isinstance(held, list):
                at = int(keys[1])
                found[keys[0]] = [*held[:at], value, *held[at + 1 :]]
            else:
                found[keys[0]] = held | {_unescaped(keys[1]): value}
        return found

    def _collect(self) -> None:
        open_parts = [self._root]
        while open_parts:
            part = open_parts.pop()
            if part.place in self._parts:
                continue
            self._parts[part.place] = part
            open_parts += _children(part)
            if (target := self._target(part)) is not None:
                open_parts.append(target)

    def _target(self, part: _Part) -> _Part | None:
        """What a ``$ref`` points to; None where there is none, or none inside of this schema."""
        ref = part.schema.get("$ref") if isinstance(part.schema, Mapping) else None
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            return None
        found: Any = self._root.schema
        keys = [_unescaped(unquote(key)) for key in ref.split("/")[1:]]
        for key in keys:
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                return None
        return _Part(found, self._root.at(*keys))

    def _is_finite(self, part: _Part) -> bool:
        return all(map(self._is_met, self._needs(part)))

    def _is_met(self, need: _Need) -> bool:
        return need.fault is None and any(each.place in self._finite for each in need.parts)

    def _needs(self, part: _Part) -> Iterator[_Need]:
        together = self._together(part)
        if together is None:
            yield _Need(fault=_endless([part.place]))
            return
        for each in together:
            if each.schema is False:
                yield _never(
                    each.place, "it is false, which nothing matches", "leave it out, or say what it is"
                )
        schemas = [each for each in together if isinstance(each.schema, Mapping)]
        for each in schemas:
            for word in _BRANCHES:
                if isinstance(branches := each.schema.get(word), list):
                    if not branches:
                        yield _never(each.at(word), f"{word} is empty", "give at least one branch")
                    else:
                        yield _Need(parts=tuple(each.child(word, i) for i in range(len(branches))))
        yield from _needs_of_types(schemas)

    def _together(self, part: _Part) -> list[_Part] | None:
        """The schemas that hold for one value: it, its ``allOf`` and its ``$ref``; None for a circle."""
        found: dict[str, _Part] = {}
        open_parts: list[tuple[_Part, tuple[str, ...]]] = [(part, ())]
        while open_parts:
            one, above = open_parts.pop(0)
            if one.place in above:
                return None
            if one.place in found:
                continue
            found[one.place] = one
            more = _listed(one, "allOf")
            if (target := self._target(one)) is not None:
                more.append(target)
            open_parts += [(each, (*above, one.place)) for each in more]
        return list(found.values())


def _children(part: _Part) -> list[_Part]:
    """The subschemas that its keywords hold, apart from definitions."""
    schema = part.schema
    if not isinstance(schema, Mapping):
        return []
    found = [part.child(word) for word in ("items", "additionalProperties") if _is_schema(schema.get(word))]
    for word in ("properties", "patternProperties"):
        if isinstance(named := schema.get(word), Mapping):
            found += [part.child(word, name) for name in named]
    for word in ("prefixItems", "allOf", *_BRANCHES):
        found += _listed(part, word)
    return found


def _definitions(part: _Part) -> list[_Part]:
    schema = part.schema
    held = [word for word in _DEFINITIONS if isinstance(schema.get(word), Mapping)]
    return [part.child(word, name) for word in held for name in schema[word]]


def _needs_of_types(schemas: list[_Part]) -> Iterator[_Need]:
    fixed = [each for each in schemas if "const" in each.schema or isinstance(each.schema.get("enum"), list)]
    types = _types(schemas)
    if fixed:
        values = [fixed[0].schema["const"]] if "const" in fixed[0].schema else fixed[0].schema["enum"]
        if not values:
            yield _never(fixed[0].at("enum"), "enum is empty", "give at least one value")
        elif types is not None and not any(_is_of(value, types) for value in values):
            wanted = " or ".join(sorted(types)) or "nothing"
            yield _never(
                fixed[0].place, f"none of its values is of the type {wanted}", "mend the type or the values"
            )
        return
    if types is None:
        return  # anything may be something that has no parts
    if not types:
        yield _never(schemas[0].place, "no type is left", "name types that go together")
        return
    needs = [list(_needs_of(name, schemas)) for name in _TYPES if name in types]
    if all(needs):
        # Of several types each fails for a reason of its own: the first one's is told.
        yield from needs[0] if len(needs) == 1 else [_any_of(needs)]


def _any_of(wanted: list[list[_Need]]) -> _Need:
    """One need for several types, of which each has its own; certain only where all are faults."""
    faults = [next((need for need in needs if need.fault is not None), None) for needs in wanted]
    if all(fault is not None for fault in faults):
        return faults[0] or _Need()
    return _Need(parts=tuple(part for needs in wanted for need in needs for part in need.parts))


def _needs_of(name: str, schemas: list[_Part]) -> Iterator[_Need]:
    match name:
        case "object":
            yield from _needs_of_object(schemas)
        case "array":
            yield from _needs_of_array(schemas)
        case "string":
            yield from _range(schemas, "minLength", "maxLength")
        case "integer" | "number":
            yield from _range(schemas, "minimum", "maximum")
            yield from _exclusive(schemas, whole=name == "integer")
        case _:
            return


def _needs_of_object(schemas: list[_Part]) -> Iterator[_Need]:
    yield from _range(schemas, "minProperties", "maxProperties")
    for owner in schemas:
        required = owner.schema.get("required")
        for name in required if isinstance(required, list) else ():
            for each in schemas:
                named = each.schema.get("properties")
                patterns = each.schema.get("patternProperties")
                if isinstance(named, Mapping) and name in named:
                    yield _Need(parts=(each.child("properties", name),))
                elif isinstance(patterns, Mapping) and patterns:
                    matching = [pattern for pattern in patterns if _may_match(pattern, name)]
                    if matching == [] and each.schema.get("additionalProperties") is False:
                        yield _forbidden(each, name)
                elif each.schema.get("additionalProperties") is False:
                    yield _forbidden(each, name)
                elif _is_schema(each.schema.get("additionalProperties")):
                    yield _Need(parts=(each.child("additionalProperties"),))


def _forbidden(part: _Part, name: str) -> _Need:
    return _never(
        part.at("required"),
        f"it requires {name!r}, which additionalProperties: false forbids",
        f"describe {name!r} in properties, or take it out of required",
    )


def _needs_of_array(schemas: list[_Part]) -> Iterator[_Need]:
    yield from _range(schemas, "minItems", "maxItems")
    least = int(max((_number(each, "minItems") or 0 for each in schemas), default=0))
    for each in schemas:
        prefix = _listed(each, "prefixItems")
        for part in prefix[:least]:
            yield _Need(parts=(part,))
        if least > len(prefix) and _is_schema(each.schema.get("items")):
            yield _Need(parts=(each.child("items"),))


def _range(schemas: list[_Part], low_word: str, high_word: str) -> Iterator[_Need]:
    low, high = _bound(schemas, low_word, max), _bound(schemas, high_word, min)
    if low is not None and high is not None and low[0] > high[0]:
        yield _never(
            low[1].at(low_word),
            f"{low_word} {low[0]:g} is above {high_word} {high[0]:g}",
            f"lower {low_word} or raise {high_word}",
        )


def _exclusive(schemas: list[_Part], *, whole: bool) -> Iterator[_Need]:
    above, below = _bound(schemas, "exclusiveMinimum", max), _bound(schemas, "exclusiveMaximum", min)
    least, most = _bound(schemas, "minimum", max), _bound(schemas, "maximum", min)
    for low, high in ((above, below), (above, most), (least, below)):
        if low is not None and high is not None and low[0] >= high[0]:
            yield _never(
                low[1].place, f"no number lies above {low[0]:g} and below {high[0]:g}", "widen the bounds"
            )
            return
    lows = [math.ceil(low[0]) for low in (least,) if low] + [
        math.floor(low[0]) + 1 for low in (above,) if low
    ]
    highs = [math.floor(high[0]) for high in (most,) if high]
    highs += [math.ceil(high[0]) - 1 for high in (below,) if high]
    if whole and lows and highs and max(lows) > min(highs):
        part = (least or above or (0.0, schemas[0]))[1]
        yield _never(part.place, "no whole number lies between its bounds", "widen the bounds")


def _bound(schemas: list[_Part], word: str, choose: Any) -> tuple[float, _Part] | None:
    found = [(value, each) for each in schemas if (value := _number(each, word)) is not None]
    best = choose((value for value, _ in found), default=None)
    return next((pair for pair in found if pair[0] == best), None)


def _number(part: _Part, word: str) -> float | None:
    value = part.schema.get(word)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _types(schemas: list[_Part]) -> frozenset[str] | None:
    """The types that all allow; None where none of them names one."""
    found: frozenset[str] | None = None
    for each in schemas:
        named = each.schema.get("type")
        names = [named] if isinstance(named, str) else named
        if isinstance(names, list) and all(name in _TYPES for name in names):
            allowed = frozenset(names) | ({"integer"} if "number" in names else frozenset())
            found = allowed if found is None else found & allowed
    return found


def _is_of(value: Any, types: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and value == int(value))
    kinds = {str: "string", type(None): "null", list: "array", dict: "object"}
    return kinds.get(type(value), "") in types


def _may_match(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def _listed(part: _Part, word: str) -> list[_Part]:
    values = part.schema.get(word) if isinstance(part.schema, Mapping) else None
    return [part.child(word, i) for i in range(len(values))] if isinstance(values, list) else []


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _never(place: str, reason: str, remedy: str) -> _Need:
    return _Need(fault=Fault(place=place, reason=reason, remedy=remedy))


def _endless(way: list[str]) -> Fault:
    return Fault(
        place=way[0],
        reason=f"it needs itself again without end ({' > '.join([*way, way[0]])})",
        remedy="let it end: take a property on that way out of required, allow null beside it, or let a list "
        "on it be empty",
    )


def _unescaped(key: str) -> str:
    return key.replace("~1", "/").replace("~0", "~")
