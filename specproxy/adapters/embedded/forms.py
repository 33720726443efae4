"""What a request demands of the form of the answer: a grammar of its own, a JSON schema, or any JSON object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specproxy.adapters.embedded.body import FieldError, Fields
from specproxy.adapters.embedded.grammar.gbnf import Grammar
from specproxy.adapters.embedded.grammar.schema import SchemaError, SchemaWriter

__all__ = ["FREE", "Form", "answer_form", "form_grammar", "schema_rule"]


@dataclass(frozen=True, slots=True)
class Form:
    """`gbnf` is the client's own grammar for the whole reply; `schema` is for the answer without its reasoning.

    `field` is where the schema came from, for messages. At most one of the two is given.
    """

    gbnf: str | None = None
    schema: Any = None
    field: str = ""

    @property
    def free(self) -> bool:
        """Whether nothing is demanded."""
        return self.gbnf is None and self.schema is None


FREE = Form()


def answer_form(body: Fields) -> Form:
    """The form that `response_format`, or llama-server's `json_schema` and `grammar`, demand.

    Raises:
        FieldError: they are malformed or contradict each other.
    """
    forms = [form for form in (_response_format(body), _schema(body), _grammar(body)) if not form.free]
    if len(forms) > 1:
        raise body.wrong(forms[1].field or "grammar", f"cannot be used together with '{forms[0].field}'")
    return forms[0] if forms else FREE


def _response_format(body: Fields) -> Form:
    given = body.object("response_format")
    kind = given.choice("type", ("text", "json_object", "json_schema")) if given else None
    if given is None or kind in (None, "text"):
        return FREE
    if kind == "json_object":
        schema = given.get("schema")
        return Form(schema={"type": "object"} if schema is None else schema, field="response_format")
    inner = given.object("json_schema")
    schema = inner.get("schema") if inner else given.get("schema")
    if schema is None:
        raise given.wrong("json_schema.schema", "is required for type json_schema")
    return Form(schema=schema, field="response_format.json_schema.schema")


def _schema(body: Fields) -> Form:
    schema = body.get("json_schema")
    return FREE if schema is None else Form(schema=schema, field="json_schema")


def _grammar(body: Fields) -> Form:
    text = body.text("grammar")
    return Form(gbnf=text, field="grammar") if text else FREE


def form_grammar(body: Fields) -> str | None:
    """The grammar of a plain completion: the client's own, or its schema's. Raises as `answer_form` does."""
    form = answer_form(body)
    if form.schema is None:
        return form.gbnf
    grammar = Grammar()
    return grammar.text(schema_rule(grammar, form.schema, form.field))


def schema_rule(grammar: Grammar, schema: Any, field: str) -> str:
    """Write a schema's rules into a grammar; gives the expression for it.

    Raises:
        FieldError: the schema is malformed or not supported; names `field`.
    """
    try:
        return grammar.rule("answer", SchemaWriter(grammar, schema).root())
    except SchemaError as error:
        raise FieldError(field, f"'{field}': {error}") from None
