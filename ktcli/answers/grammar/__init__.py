"""Structured answers: JSON of a schema, other grammars and calls of tools, as masks over the next token."""
