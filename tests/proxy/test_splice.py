"""Splicing top-level fields into a JSON body."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specproxy.proxy.splice import splice

scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
objects = st.dictionaries(st.text(max_size=6) | st.sampled_from(["model", "n", "x"]), values, max_size=5)
fields = st.dictionaries(
    st.sampled_from(["x", "n", "spec.n_max", "é"]),
    st.text(max_size=5) | st.integers(0, 9) | st.booleans(),
    max_size=3,
)
layouts = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])


def encode(value: Any, layout: dict[str, Any]) -> bytes:
    return json.dumps(value, **layout).encode("utf-8", "surrogatepass")


def valid(body: bytes) -> bool:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return True


@given(objects, st.none() | st.text(max_size=8), fields, layouts)
def test_it_means_what_a_parser_would_make_of_it(
    value: dict[str, Any], model: str | None, new: dict[str, Any], layout: dict[str, Any]
) -> None:
    """The spliced bytes parse to the object with the model replaced and the missing fields added."""
    body = encode(value, layout)
    if not valid(body):  # a lone surrogate is no UTF-8
        return
    expected = new | orjson.loads(body)
    if model is not None and isinstance(expected.get("model"), str) and "model" in value:
        expected["model"] = model
    assert orjson.loads(splice(body, model=model, fields=tuple(new.items()))) == expected


@given(objects, objects | scalars, st.booleans(), st.integers(0, 9), layouts)
def test_a_field_of_a_field_is_added_once(
    value: dict[str, Any], options: Any, present: bool, n: int, layout: dict[str, Any]
) -> None:
    """The object is made where it is missing or null; what the client has set stays."""
    if present:
        value["options"] = options
    body = encode(value, layout)
    if not valid(body):
        return
    expected = orjson.loads(body)
    if expected.get("options") is None:
        expected["options"] = {}
    if isinstance(expected["options"], dict):
        expected["options"] = {"x": n} | expected["options"]
    assert orjson.loads(splice(body, fields=(("/options/x", n),))) == expected


def test_fields_of_both_kinds_go_in_together() -> None:
    body = b'{ "model": "a", "options": {"k": 1} }'
    spliced = splice(body, model="b", fields=(("top", 2), ("/options/x", 3)))
    assert spliced == b'{"top":2, "model": "b", "options": {"x":3,"k": 1} }'


@given(objects, st.text(max_size=8), layouts)
def test_no_other_byte_is_touched(value: dict[str, Any], model: str, layout: dict[str, Any]) -> None:
    """Splicing the old value back gives the old bytes."""
    value["model"] = "here"
    body = encode(value, layout)
    if valid(body):
        assert splice(splice(body, model=model), model="here") == body


@given(objects, layouts)
def test_nothing_to_do_does_nothing(value: dict[str, Any], layout: dict[str, Any]) -> None:
    """Without a model or fields the very same bytes come back."""
    body = encode(value, layout)
    assert splice(body) is body


@pytest.mark.parametrize(
    ("body", "spliced"),
    [
        (b'{"model":"a"}', b'{"k":1,"model":"b"}'),
        (b' {\n "model" : "a" }\n', b' {"k":1,\n "model" : "b" }\n'),
        (b"{}", b'{"k":1}'),
        (b"{ }", b'{"k":1 }'),
        (b'{"k":2}', b'{"k":2}'),
        (b'{"model":null}', b'{"k":1,"model":null}'),
        (b'{"a":{"model":"a","k":3}}', b'{"k":1,"a":{"model":"a","k":3}}'),
        (b'{"a":["model","a"]}', b'{"k":1,"a":["model","a"]}'),
        (b'{"a":"\\"model\\":\\"a\\"","model":"a"}', b'{"k":1,"a":"\\"model\\":\\"a\\"","model":"b"}'),
        (b'{"mod\\u0065l":"a"}', b'{"k":1,"mod\\u0065l":"b"}'),
        (b'{"model":"a","model":"c"}', b'{"k":1,"model":"b","model":"b"}'),
        (b'{"x":1.50,"y":[1, 2],"model":"a"}', b'{"k":1,"x":1.50,"y":[1, 2],"model":"b"}'),
    ],
)
def test_examples(body: bytes, spliced: bytes) -> None:
    """Spaces, escapes, nesting, repeats and other types of value."""
    assert splice(body, model="b", fields=(("k", 1),)) == spliced


def test_a_long_prompt_is_fast() -> None:
    """A walk looks at strings and brackets only: megabytes of text are a single step each."""
    body = orjson.dumps({"messages": [{"role": "user", "content": 'x"\\{' * 500_000}], "model": "a"})
    assert splice(body, model="b").endswith(b'"model":"b"}')
