"""JSON schemas: what is refused would not be enforced, and what is taken is."""

import json
import time
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from vllm.engine.json_schemas import check_schema
from vllm.errors import GrammarError

xgrammar = pytest.importorskip("xgrammar")
from xgrammar.testing import _is_grammar_accept_string as matches  # noqa: E402

STR, INT, A = {"type": "string"}, {"type": "integer"}, {"a": {"type": "integer"}}

# (schema, an answer that does not match it), by what the message has to name.
REFUSED = {
    "dependentSchemas": (
        {"type": "object", "properties": A, "dependentSchemas": {"a": {"required": ["b"]}}},
        {"a": 1},
    ),
    "dependencies": (
        {"type": "object", "properties": A | {"b": INT}, "dependencies": {"a": ["b"]}},
        {"a": 1},
    ),
    "$dynamicRef": ({"$dynamicRef": "#p", "$defs": {"P": INT | {"$dynamicAnchor": "p"}}}, "a"),
    "$recursiveRef": ({"$recursiveRef": "#"}, {"a": 1}),
    "multipleOf is enforced for integers alone": (INT | {"multipleOf": 5, "minimum": 3}, 7),
    "not": (STR | {"not": {"const": "a"}}, "a"),
    "if": ({"type": "object", "properties": A, "if": {}, "then": {"required": ["a"]}}, {}),
    "contains": ({"type": "array", "items": INT, "contains": {"const": 2}}, [1]),
    "uniqueItems": ({"type": "array", "items": INT, "uniqueItems": True}, [1, 1]),
    "dependentRequired": (
        {"type": "object", "properties": A | {"b": INT}, "dependentRequired": {"a": ["b"]}},
        {"a": 1},
    ),
    "allOf of 2": ({"allOf": [INT, {"type": "integer", "minimum": 3}]}, 2),
    "allOf beside type": (INT | {"allOf": [{"type": ["integer", "string"]}]}, "a"),
    "allOf beside properties": (
        {"properties": A, "required": ["a"], "allOf": [{"type": "object"}]}, {},
    ),
    "'http://x/y'": ({"$ref": "http://x/y"}, 1.5),
    "'#p'": ({"$ref": "#p", "$defs": {"P": INT | {"$anchor": "p"}}}, "a"),
    "$ref beside minimum": ({"$ref": "#/$defs/P", "minimum": 3, "$defs": {"P": INT}}, 2),
    "enum beside type": (STR | {"enum": [1, "a"]}, 1),
    "enum beside pattern, type": (STR | {"enum": ["a", "b"], "pattern": "^a$"}, "b"),
    "const beside type": (INT | {"const": "a"}, "a"),
    "anyOf beside properties": (
        {"properties": A, "anyOf": [{"type": "object"}, {"type": "object"}]}, {"a": "x"},
    ),
    "propertyNames beside properties": (
        {"type": "object", "properties": A, "propertyNames": {"pattern": "^b+$"}}, {"a": 1},
    ),
    "format needs a type": ({"format": "date"}, "x"),
    "patternProperties needs a type": ({"patternProperties": {"^a$": INT}}, {"a": "x"}),
    "anyOf beside type": (INT | {"anyOf": [{"type": "string"}]}, "a"),
    "minimum needs a type": ({"minimum": 3}, 2),
    "minLength needs a type": ({"minLength": 3}, "a"),
    "minItems needs a type": ({"minItems": 2}, [1]),
    "required needs a type": ({"required": ["a"]}, 1),
    "pattern beside minLength": (STR | {"pattern": "^a+$", "minLength": 2}, "a"),
    "pattern beside format": (STR | {"pattern": "^2", "format": "date"}, "1020-01-01"),
    "multipleOf": ({"type": "number", "multipleOf": 0.5}, 0.3),
    "required names 'z'": (
        {"type": "object", "properties": A, "required": ["z"], "additionalProperties": True},
        {"a": 1},
    ),
}  # fmt: skip
# (schema, an answer that does not match it, one that does)
OBJECT = {"$defs": {"P": {"type": "object", "properties": A, "required": ["a"]}}}
TAKEN = [
    ({"type": "number", "enum": [1, 2.5]}, 3, 1),
    (INT | {"pattern": "^a$", "format": "date"}, "a", 1),
    (INT | {"enum": [3.0, 4]}, 5, 4),
    ({"additionalProperties": INT}, {"a": "x"}, {"a": 1}),
    (OBJECT | {"type": "object", "$ref": "#/$defs/P"}, {}, {"a": 1}),
    (OBJECT | {"type": "object", "anyOf": [{"$ref": "#/$defs/P"}]}, {}, {"a": 1}),
    (STR | {"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}, "c", "a"),
    (STR | {"format": "password", "minLength": 3}, "a", "abc"),
    ({"type": ["string", "null"], "anyOf": [{"const": "a"}, {"type": "null"}]}, "b", "a"),
    ({"type": "object", "properties": A, "required": [], "dependentRequired": {}}, {"a": "x"}, {}),
    (INT, "a", 1),
    ({"type": ["integer", "null"], "minimum": 3}, 2, None),
    ({"enum": [1, "a", None]}, 2, "a"),
    (STR | {"enum": ["a", "b"]}, "c", "a"),
    (INT | {"const": 3}, 4, 3),
    ({"type": "object", "properties": A, "required": ["a"]}, {}, {"a": 1}),
    ({"properties": A, "required": ["a"]}, {"a": "x"}, {"a": 1}),
    (
        {"type": "object", "additionalProperties": INT, "minProperties": 2},
        {"b": 1},
        {"b": 1, "c": 1},
    ),
    ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, {"b": 1}, {"a": 1}),
    ({"type": "array", "prefixItems": [INT], "items": STR, "minItems": 2}, [1], [1, "a"]),
    (STR | {"pattern": "^a+$"}, "b", "aa"),
    (STR | {"minLength": 2, "maxLength": 3}, "a", "ab"),
    (STR | {"format": "date"}, "x", "2026-11-23"),
    (INT | {"multipleOf": 5}, 3, 5),
    ({"anyOf": [INT, STR], "description": "one of two"}, None, "a"),
    ({"type": "object", "oneOf": [{"properties": A, "required": ["a"]}]}, {}, {"a": 1}),
    ({"allOf": [{"$ref": "#/$defs/P"}], "default": 3, "$defs": {"P": INT}}, "a", 1),
    ({"$ref": "#/$defs/P", "title": "t", "$defs": {"P": INT, "unused": {"not": {}}}}, "a", 1),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}}, {"a": 1}, {"a": {"a": {}}}),
    ({"type": "array", "items": INT, "uniqueItems": False}, ["a"], [1, 1]),
]


def accepts(schema, value) -> bool:
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    return matches(grammar, json.dumps(value))


@pytest.mark.parametrize("words", REFUSED)
def test_what_xgrammar_would_leave_out_is_refused_with_its_place(words):
    schema, wrong = REFUSED[words]
    with pytest.raises(GrammarError) as error:
        check_schema(json.dumps({"type": "array", "items": schema | {"$defs": {}}}))
    assert words in str(error.value) and "at #/items" in str(error.value)
    assert accepts(schema, wrong), "xgrammar enforces it by now: take it"


@pytest.mark.parametrize(("schema", "wrong", "right"), TAKEN)
def test_what_is_taken_is_enforced(schema, wrong, right):
    check_schema(json.dumps(schema))
    assert accepts(schema, right) and not accepts(schema, wrong)


def test_schemas_that_pydantic_writes_are_taken():
    class Item(BaseModel):
        name: str = Field(min_length=1, description="what it is called")
        kind: Literal["a", "b"] = "a"
        price: float | None = Field(None, ge=0)

    class Order(BaseModel):
        """Of several items."""

        items: list[Item] = Field(max_length=3)
        first: Item
        notes: dict[str, str] = {}
        pair: tuple[int, str]

    schema = json.dumps(Order.model_json_schema())
    check_schema(schema)


@pytest.mark.parametrize("text", ["3", "[]", "{", "true", '{"type": 3}',
                                  '{"allOf": 3}', '{"$ref": 3}', '{"enum": 3}', '{"anyOf": {}}',
                                  '{"properties": []}', '{"$ref": "#/a/b"}'])  # fmt: skip
def test_what_is_no_schema_is_left_to_the_compiler(text):
    check_schema(text)


def test_a_deep_schema_is_no_matter():
    text = '{"items":' * 900 + '{"type":"string"}' + "}" * 900
    check_schema(text)


def test_schemas_that_name_one_another_are_looked_at_once():
    check_schema(json.dumps({"$ref": "#/$defs/a", "$defs": {
        "a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
    }}))  # fmt: skip


def test_references_that_go_round_and_long_names_cost_little():
    """Each schema is looked at once, however many name it, and places are written out for a fault
    alone."""
    names = [f"n{i}" for i in range(2000)]
    defs = {name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in names[i : i + 20]]}
            for i, name in enumerate(names)}  # fmt: skip
    begin = time.process_time()
    check_schema(json.dumps({"$ref": "#/$defs/n0", "$defs": defs}))
    with pytest.raises(GrammarError, match="anyOf beside type"):
        check_schema(json.dumps(STR | {"anyOf": [{"$ref": "#/$defs/n0"}], "$defs": defs}))
    long = {"properties": {"x" * 60_000: {"properties": {str(i): {} for i in range(12_000)}}}}
    check_schema(json.dumps(long))
    assert time.process_time() - begin < 2


FAULTY = {"type": "array", "items": {}, "uniqueItems": True}


@pytest.mark.parametrize(
    ("place", "schema"),
    [
        ("items", {"items": FAULTY}),
        ("additionalProperties", {"additionalProperties": FAULTY}),
        ("unevaluatedItems", {"unevaluatedItems": FAULTY}),
        ("unevaluatedProperties", {"unevaluatedProperties": FAULTY}),
        ("prefixItems/1", {"prefixItems": [STR, FAULTY]}),
        ("allOf/0", {"allOf": [FAULTY]}),
        ("anyOf/1", {"anyOf": [STR, FAULTY]}),
        ("oneOf/1", {"oneOf": [STR, FAULTY]}),
        ("properties/a", {"properties": {"a": FAULTY}}),
        ("patternProperties/^a$", {"type": "object", "patternProperties": {"^a$": FAULTY}}),
        ("$defs/P", {"$ref": "#/$defs/P", "$defs": {"P": FAULTY}}),
    ],
)
def test_every_schema_within_one_is_looked_at(place, schema):
    with pytest.raises(GrammarError) as error:
        check_schema(json.dumps(schema))
    assert f"at #/{place} for" in str(error.value) and "uniqueItems" in str(error.value)


@pytest.mark.parametrize("pattern", ['^"a"$', r"^a\\b$", '^[a-z"]+$', r"^a\nb$", r"^\x22$"])
def test_patterns_of_characters_that_json_escapes_are_refused(pattern: str) -> None:
    """xgrammar writes them as they are, which is no JSON."""
    schema = json.dumps({"type": "object", "properties": {"a": STR | {"pattern": pattern}}})
    with pytest.raises(GrammarError, match="pattern with a quote"):
        check_schema(schema)


@pytest.mark.parametrize("pattern", ["^.+$", r'^[^"\\]+$', r"^\S+$", r"^[!-~]+$", r"^\D+$"])
def test_patterns_of_other_characters_give_json(pattern: str) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": STR | {"pattern": pattern}}})
    check_schema(schema)
    grammar = xgrammar.Grammar.from_json_schema(schema)
    for text in ('a"b', "a\\b", "a\nb"):
        assert not matches(grammar, f'{{"a": "{text}"}}')
