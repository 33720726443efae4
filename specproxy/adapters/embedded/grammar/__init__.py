"""Grammars (GBNF) from JSON Schema."""
