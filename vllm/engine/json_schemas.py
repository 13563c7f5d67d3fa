"""Refuses JSON schemas with keywords that xgrammar silently ignores: outputs would not match.

Found by trying each keyword with xgrammar 0.2.8 (tests/engine/test_json_schemas.py does so again).
Keywords that say nothing about values (title, default, unknown formats) are no matter. `oneOf`
counts as `anyOf` where its branches overlap.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.errors import GrammarError

# Keywords, and the value with which each asks for nothing.
_NEVER: dict[str, Any] = {
    "not": None, "if": None, "contains": None, "uniqueItems": False, "dependentRequired": {},
    "dependentSchemas": {}, "dependencies": {}, "$dynamicRef": None, "$recursiveRef": None,
}  # fmt: skip
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_FORMATS = frozenset({
    "date", "date-time", "time", "duration", "email", "uuid", "uri", "uri-reference",
    "uri-template", "ipv4", "ipv6", "hostname", "json-pointer", "relative-json-pointer",
})  # fmt: skip
# Keywords that hold for values of some types alone, and keywords that imply the type.
_TYPED: tuple[tuple[frozenset[str], frozenset[str], frozenset[str]], ...] = (
    (frozenset({*_OF_NUMBERS, "multipleOf"}), frozenset({"integer", "number"}), frozenset()),
    (frozenset({"pattern", "format", "minLength", "maxLength"}), frozenset({"string"}),
     frozenset()),
    (frozenset({"minItems", "maxItems"}), frozenset({"array"}),
     frozenset({"items", "prefixItems", "unevaluatedItems"})),
    (frozenset({"required", "minProperties", "maxProperties", "propertyNames",
                "patternProperties"}), frozenset({"object"}),
     frozenset({"properties", "additionalProperties", "unevaluatedProperties"})),
)  # fmt: skip
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")
_ASSERTIONS = frozenset({
    *_COMBINING, *(name for names, _, implying in _TYPED for name in names | implying), "type",
})  # fmt: skip
_SCHEMAS = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
_LISTS_OF_SCHEMAS = ("prefixItems", "allOf", "anyOf", "oneOf")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties")
_EXCLUSION = re.compile(r"\[\^(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPED = re.compile(r'["\x00-\x1f]|\\[\\nrtfv0c]')
_CODE = re.compile(r"\\(?:x|u\{?)([0-9a-fA-F]{2,6})")
_MAX_DEPTH = 32  # of references that name what they refer to

# Names from the root on, as (those before, the last).
_Place = tuple[Any, str]


def check_schema(text: str) -> None:
    """GrammarError for the first thing that would not be enforced, with its place and what to do.
    What is no schema at all is left to the compiler."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):  # how deep a schema may be is the compiler's to say
        return
    waiting: list[tuple[_Place, Any]] = [((None, "#"), root)]
    seen: set[int] = set()
    while waiting:
        place, schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        for fault in _faults(schema, root):
            raise GrammarError(f"the JSON schema asks at {_text_of(place)} for what no answer is "
                               f"held to: {fault}")  # fmt: skip
        if isinstance(target := schema.get("$ref"), str):
            waiting.append(((None, target), _at(root, target)))
        waiting += _within(place, schema)


def _text_of(place: _Place) -> str:
    names = []
    while place is not None:
        place, name = place
        names.append(name)
    return "/".join(reversed(names))


def _within(place: _Place, schema: Mapping[str, Any]) -> Iterator[tuple[_Place, Any]]:
    for name in _SCHEMAS:
        if name in schema:
            yield (place, name), schema[name]
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(found := schema.get(name), list):
            yield from (((place, f"{name}/{i}"), inner) for i, inner in enumerate(found))
    for name in _MAPS_OF_SCHEMAS:
        if isinstance(found := schema.get(name), dict):
            outer = (place, name)
            yield from (((outer, key), inner) for key, inner in found.items())


def _at(root: Any, pointer: str) -> Any:
    """The schema that `#/a/b` names; None where there is none, which the compiler tells."""
    for key in pointer.removeprefix("#").split("/")[1:]:
        root = root.get(key) if isinstance(root, dict) else None
    return root


def _faults(schema: Mapping[str, Any], root: Any) -> Iterator[str]:
    for name, nothing in _NEVER.items():
        if name in schema and (nothing is None or schema[name] != nothing):
            yield f"{name} cannot be enforced; leave it out"
    yield from _faults_of_combining(schema, root)
    types = _types(schema)
    asked = schema.keys() - ({"format"} if schema.get("format") not in _FORMATS else set())
    for names, wanted, implying in _TYPED:
        is_known = types or implying & asked or any(name in schema for name in _COMBINING)
        if (given := sorted(names & asked)) and not is_known:
            yield f'{given[0]} needs a type ("{sorted(wanted)[0]}") beside it'
    groups: list[str] = [name for name in ("pattern", "format") if name in asked]
    groups += [name for name in ("minLength", "maxLength") if name in asked][:1]
    if len(groups) > 1 and (not types or "string" in types):
        yield f"{' beside '.join(groups)} cannot be enforced; leave one of them out"
    if isinstance(pattern := schema.get("pattern"), str) and _needs_escapes(pattern):
        yield (
            "pattern with a quote, a backslash or a control character cannot be enforced: JSON "
            "escapes them; leave them out"
        )
    if "multipleOf" in schema and ("number" in types or {*_OF_NUMBERS} & schema.keys()):
        yield "multipleOf is enforced for integers alone, and without limits beside it"
    known = _names(schema.get("properties"))
    if lacking := [name for name in _names(schema.get("required")) if name not in known]:
        yield f"required names {lacking[0]!r}, which is not among properties; add it there"
    if known and "propertyNames" in schema:
        yield "propertyNames beside properties cannot be enforced; leave one of them out"


def _needs_escapes(pattern: str) -> bool:
    """Whether it names characters that JSON has to escape; xgrammar writes them as they are.
    Classes that only exclude characters never give such."""
    named = _EXCLUSION.sub("", pattern)
    codes = [int(match[1], 16) for match in _CODE.finditer(named)]
    return bool(_ESCAPED.search(named)) or any(code < 0x20 or code in b'"\\' for code in codes)


def _faults_of_combining(schema: Mapping[str, Any], root: Any) -> Iterator[str]:
    ref, parts = schema.get("$ref"), schema.get("allOf")
    if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
        yield f"$ref {ref!r}: only places of this schema can be named, as #/$defs/name"
    if isinstance(parts, list) and len(parts) > 1:
        yield f"allOf of {len(parts)} schemas cannot be enforced; merge them into one"
    for name in _COMBINING:
        beside = sorted(_ASSERTIONS & schema.keys() - {name})
        if name not in schema or not beside:
            continue
        # A type that all of its values have anyway says nothing more.
        possible = _possible_types({name: schema[name]}, root, set())
        allowed = _types(schema) | ({"integer"} if "number" in _types(schema) else set())
        if beside != ["type"] or not possible <= allowed:
            yield f"{name} beside {', '.join(beside)} cannot be enforced; merge or leave out one"


def _possible_types(schema: Any, root: Any, seen: set[int], depth: int = 0) -> set[str]:
    """Of its values; `any`, a type that no schema has, where any may come. seen: schemas whose
    types are counted already."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return {"any"}
    if id(schema) in seen:
        return set()
    seen.add(id(schema))
    if types := _types(schema):
        return types
    if "const" in schema:
        return {_type_of(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        return {*map(_type_of, values)}
    if isinstance(target := schema.get("$ref"), str):
        return _possible_types(_at(root, target), root, seen, depth + 1)
    for name in ("allOf", "anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list):
            every = [_possible_types(part, root, seen, depth + 1) for part in parts]
            return {kind for kinds in every for kind in kinds}
    return {kind for _, wanted, implying in _TYPED if implying & schema.keys()
            for kind in wanted} or {"any"}  # fmt: skip


def _types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type")
    return {given} if isinstance(given, str) else {*_names(given)}


def _names(value: Any) -> list[str]:
    names = value if isinstance(value, list | dict) else ()
    return [name for name in names if isinstance(name, str)]


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    kinds = {str: "string", dict: "object", list: "array", int: "integer", type(None): "null"}
    return kinds[type(value)]
