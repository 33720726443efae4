"""JSON Schema → GBNF: everything that the grammar writes fits the schema, by an independent validator."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from specproxy.adapters.embedded.grammar.numeric import Bounds, number
from specproxy.adapters.embedded.grammar.schema import SchemaError, schema_to_gbnf
from tests.support.gbnf_sampler import Sampler

S: dict[str, Any] = {"type": "string"}
N: dict[str, Any] = {"type": "integer"}

SCHEMAS: dict[str, Any] = {
    "anything": {},
    "true": True,
    "object": {"type": "object"},
    "array": {"type": "array"},
    "string": S,
    "integer": N,
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "types": {"type": ["string", "null", "integer"]},
    "nullable": {"anyOf": [S, {"type": "null"}]},
    "required and optional": {"properties": {"a": N, "b": S, "c": N, "d": S}, "required": ["b", "d"]},
    "all optional": {"properties": {"a": N, "b": N, "c": N}},
    "closed": {"properties": {"a": N}, "additionalProperties": False},
    "open": {"properties": {"a": N}, "additionalProperties": S},
    "map": {"type": "object", "additionalProperties": {"type": "array", "items": N}},
    "required but not declared": {"type": "object", "properties": {"a": N}, "required": ["z"]},
    "awkward names": {
        "properties": {'q"uo\\te': N, "ümläut": N, "tab\t": S, "": S}, "required": ['q"uo\\te', ""],
    },
    "counted members": {"type": "object", "minProperties": 2, "maxProperties": 3, "additionalProperties": N},
    "counted declared": {"properties": {"a": N, "b": N, "c": N}, "minProperties": 2, "maxProperties": 2},
    "patterned names": {
        "type": "object", "patternProperties": {"^i_": N, "_s": S}, "additionalProperties": False,
        "properties": {"i_x": {"minimum": 5}},
    },
    "names": {"type": "object", "propertyNames": {"pattern": "^[a-c]{2}$"}, "additionalProperties": N},
    "list": {"type": "array", "items": N, "minItems": 1, "maxItems": 3},
    "long list": {"type": "array", "items": {"const": 0}, "minItems": 130, "maxItems": 200},
    "tuple": {"type": "array", "prefixItems": [S, N], "items": False, "minItems": 1},
    "old tuple": {"type": "array", "prefixItems": [S], "items": {"type": "null"}, "minItems": 3, "maxItems": 4},
    "unique": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
    "enum": {"enum": ["a", 1, None, True, 2.5, [1, {"x": "y"}], {"k": []}]},
    "enum narrowed": {
        "enum": ["a", "bcd", 1, 7, None], "type": ["string", "integer"], "maxLength": 2, "minimum": 3,
    },
    "const": {"const": {"a": [1, "zwei"]}},
    "any of": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string", "maxLength": 2}]},
    "one of": {"oneOf": [{"properties": {"k": {"const": "a"}}, "required": ["k"], "type": "object"}, N]},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": N}, "required": ["a"]},
            {"properties": {"b": S, "a": {"maximum": 4}}, "required": ["b"]},
        ]
    },
    "all of closed": {
        "allOf": [
            {"properties": {"a": N, "b": N}, "additionalProperties": False},
            {"properties": {"b": {"minimum": 1}}},
        ],
        "type": "object",
    },
    "branches with a base": {
        "type": "object", "properties": {"a": N, "b": S}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "dependent": {"properties": {"a": N, "b": N}, "dependentRequired": {"a": ["b"]}},
    "dependent schema": {
        "type": "object", "properties": {"a": N, "b": True},
        "dependentSchemas": {"a": {"properties": {"b": S}}},
    },
    "not a type": {"not": {"type": ["object", "array"]}},
    "not required": {"type": "object", "properties": {"a": N, "b": N}, "not": {"required": ["a"]}},
    "unevaluated": {
        "allOf": [{"properties": {"a": N}}], "properties": {"b": S}, "unevaluatedProperties": False,
    },
    "defs": {
        "$ref": "#/$defs/x~1y", "$defs": {"x/y": {"type": "array", "items": {"$ref": "#/$defs/z"}}, "z": N},
    },
    "anchor": {"$ref": "#node", "$defs": {"n": {"$anchor": "node", "type": "integer", "maximum": 3}}},
    "ref with siblings": {"$ref": "#/$defs/n", "maximum": 9, "$defs": {"n": {"type": "integer", "minimum": 3}}},
    "tree": {
        "type": "object", "required": ["v"], "additionalProperties": False,
        "properties": {"v": N, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
    },
    "linked list": {
        "$defs": {
            "node": {
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["next"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "long": {"type": "string", "minLength": 200, "maxLength": 3000},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3,5}(x|y)?$"},
    "loose pattern": {"type": "string", "pattern": "ab+c"},
    "pattern and length": {"type": "string", "pattern": "^[a-z ]+$", "minLength": 3, "maxLength": 6},
    "two patterns": {"allOf": [{"pattern": "^a"}, {"pattern": "z$"}], "type": "string"},
    "quotes in a pattern": {"type": "string", "pattern": '^"[^a]\\\\$'},
    "date-time": {"type": "string", "format": "date-time"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "email": {"type": "string", "format": "email"},
    "unknown format": {"type": "string", "format": "colour"},
    "at least": {"type": "integer", "minimum": 12},
    "between": {"type": "integer", "minimum": -15, "maximum": 1234},
    "negative": {"type": "integer", "exclusiveMaximum": -7},
    "huge": {"type": "integer", "minimum": 10**20},
    "decimal between": {"type": "number", "minimum": 0.25, "exclusiveMaximum": 1.5},
    "decimal negative": {"type": "number", "exclusiveMinimum": -2.75, "maximum": -0.5},
    "above zero": {"type": "number", "exclusiveMinimum": 0},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 10},
    "half": {"type": "number", "multipleOf": 0.5, "minimum": -3, "maximum": 3},
    "annotations": {"type": "integer", "title": "t", "default": "x", "x-mine": {"if": 1}, "readOnly": True},
}  # fmt: skip
REAL = Path(__file__).parents[4] / "benchmarks" / "data" / "schemas.json"
SCHEMAS |= {each["name"]: each["schema"] for each in json.loads(REAL.read_text())}


class RepeatedName(Exception):
    """An undeclared name was written twice: the one thing that a grammar cannot prevent."""


def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise RepeatedName
    return dict(pairs)


def check(schema: Any, seed: int, count: int) -> None:
    """Draw texts and validate them."""
    validator = Draft202012Validator(schema, format_checker=FormatChecker())
    sampler, random = Sampler(schema_to_gbnf(schema)), Random(seed)
    for _ in range(count):
        try:
            value = json.loads(sampler.sample(random), object_pairs_hook=members)
        except RepeatedName:
            continue
        validator.validate(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_of_the_grammar_fits_the_schema(name: str) -> None:
    check(SCHEMAS[name], seed=1, count=40)


def leaves() -> st.SearchStrategy[Any]:
    low, high = st.integers(-200, 200), st.integers(0, 300)
    return st.one_of(
        st.sampled_from([S, N, {"type": "boolean"}, {"type": "null"}, {"type": "number"}, {}]),
        st.builds(lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b}, low, high),
        st.builds(lambda a, b: {"type": "number", "minimum": a / 8, "maximum": (a + b) / 8}, low, high),
        st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, st.integers(0, 5), high),
        st.builds(lambda v: {"enum": v}, st.lists(st.text(max_size=3) | low, min_size=1, max_size=3)),
    )  # fmt: skip


def nests(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "c", 'd"', "é"])
    properties = st.dictionaries(names, inner, max_size=4)
    return st.one_of(
        st.builds(
            lambda p, r, more: {"type": "object", "properties": p, "required": sorted(r & p.keys()), **more},
            properties, st.sets(names),
            st.sampled_from([{}, {"additionalProperties": False}, {"additionalProperties": N}]),
        ),
        st.builds(lambda i, a, b: {"type": "array", "items": i, "minItems": a, "maxItems": a + b}, inner,
                  st.integers(0, 2), st.integers(0, 2)),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    )  # fmt: skip


@settings(max_examples=60)
@given(schema=st.recursive(leaves(), nests, max_leaves=8), seed=st.integers(0, 2**32))
def test_random_schemas_too(schema: Any, seed: int) -> None:
    check(schema, seed, count=8)


@settings(max_examples=100)
@given(
    a=st.decimals(-1000, 1000, places=3),
    b=st.decimals(0, 1000, places=3),
    value=st.decimals(-2000, 2000, places=4),
)
def test_a_number_is_legal_exactly_if_it_is_within_bounds(a: Any, b: Any, value: Any) -> None:
    language = number(Bounds(a, True, a + b, False), integer=False)
    text = format(value.normalize() if value else Decimal(0), "f")
    assert language.accepts(text) == (a < value <= a + b)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"if": {}, "then": {}}, "'if' at #"),
        ({"properties": {"a": {"contains": N}}}, "'contains' at #/a"),
        ({"type": "array", "uniqueItems": True, "items": S}, "'uniqueItems'"),
        ({"not": {"const": 1}}, "'not'"),
        ({"type": "strin"}, "'type'"),
        ({"type": "integer", "minimum": "3"}, "'minimum'"),
        ({"required": "a"}, "'required'"),
        ({"enum": []}, "'enum'"),
        ({"$ref": "https://example.com/x"}, "'$ref'"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"),
        ({"$ref": "#"}, "without end"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "(a)\\1"}, "back references"),
        ({"type": "string", "pattern": "["}, "ends too early"),
        ({"type": "string", "pattern": "(a{900}){900}"}, "too complex"),
        ({"type": "string", "pattern": "^[ab]+$", "maxLength": 90_000}, "'maxLength'"),
        (False, "nothing can fit"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "nothing can fit"),
        ({"allOf": [S, N]}, "nothing can fit"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "nothing can fit"),
        (3, "not a schema"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(SchemaError) as caught:
        schema_to_gbnf(schema)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("keyword", ["maxItems", "maxProperties"])
def test_counts_beyond_all_texts_are_taken(keyword: str) -> None:
    """JSON has numbers of any size, and ours have 64 bits."""
    kind = "array" if keyword == "maxItems" else "object"
    assert schema_to_gbnf({"type": kind, "items": S, "additionalProperties": S, keyword: 1e40})


def test_members_come_in_their_order_and_only_declared_ones() -> None:
    sampler = Sampler(schema_to_gbnf({"properties": {"z": N, "a": N, "m": N}, "required": ["m"]}))
    orders = {tuple(json.loads(sampler.sample(Random(seed)))) for seed in range(60)}
    assert orders == {("m",), ("z", "m"), ("a", "m"), ("z", "a", "m")}


def test_undeclared_names_never_repeat_declared_ones() -> None:
    sampler = Sampler(schema_to_gbnf({"properties": {"a": N}, "additionalProperties": S}))
    for seed in range(80):
        pairs = json.loads(sampler.sample(Random(seed)), object_pairs_hook=list)
        assert [value for name, value in pairs if name == "a"] in ([], [pairs[0][1]] if pairs else [])
