"""Structured answers: JSON of a schema, other grammars and tool calls, as masks over the next token."""
