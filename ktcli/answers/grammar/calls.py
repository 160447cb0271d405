"""Grammars of tool calls, made from the same table of styles that reads them: names of tools, and arguments by
schema.

Where a style writes values without quotation marks, a text is free but for `enum` and `const`; all other values are
JSON of their schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ktcli.answers.calls.reader import NAME_PATTERN
from ktcli.answers.calls.styles import Arguments, CallStyle
from ktcli.answers.calls.values import Tools
from ktcli.answers.grammar.joined import listed_in
from ktcli.answers.grammar.lark import GrammarWriter, optional_line
from ktcli.answers.grammar.meaning import followed
from ktcli.answers.grammar.schema import checked_schema
from ktcli.errors import UsageError
from ktcli.records import dataclass

_LINE = optional_line()
_MOST_WAYS = 16  # to choose the arguments of one call from


@dataclass(frozen=True, slots=True)
class WantedCalls:
    """The tool calls that an answer must consist of.

    Attributes:
        tools: those that may be called, in the order of their names.
        several: whether there may be more than one call.
        field: what errors call it.
        free: whether a text may stand before them, behind them, or in their place.
    """

    tools: Tools
    several: bool
    field: str
    free: bool = False

    def schema(self, tool: str) -> dict[str, Any]:
        """Returns the JSON schema of a tool's arguments, checked and rewritten for the grammar compiler; raises
        UsageError if the schema is invalid or beyond a limit.
        """
        where = f"{self.field}: the parameters of {tool[:60]}"
        return checked_schema({"type": "object", **self.tools.parameters[tool]}, where)


def write_calls(writer: GrammarWriter, style: CallStyle, wanted: WantedCalls) -> str:
    """Adds the rules of the tool calls that an answer may or must consist of to a grammar; returns the expression, in
    Lark's notation, that matches them.

    Raises:
        UsageError: this model cannot write a tool's name, or the schema of its arguments cannot be used.
    """
    made = _CallWriter(writer, style, wanted)
    rests = [made.rest(at, name) for at, name in enumerate(wanted.tools.parameters)]
    rest, begin = writer.rule("rest", " | ".join(rests)), writer.text(style.begin)
    opening, closing = style.section
    if style.arguments is Arguments.OBJECT and not style.end and not style.bare:
        more = f' (", " {rest})*' if wanted.several else ""
        rest = writer.rule("list", f'" "? "[" {rest}{more} "]"')
    elif opening:
        more = f" ({_LINE} {begin} {rest})*" if wanted.several else ""
        whole = f"{_LINE} {begin} {rest}{more} {_LINE} {writer.text(closing)}"
        rest = writer.rule("section", whole)
    if wanted.free:
        return _with_text(writer, style, rest, several=wanted.several)
    if opening or style.bare or not style.end:
        first = "" if style.bare else writer.text(opening) or begin
        again = wanted.several and not opening and style.arguments is Arguments.JSON
        return f"{first} {rest}" + (f" ({begin} {rest})*" if again else "")
    return f"{begin} {rest}" + (f" ({_LINE} {begin} {rest})*" if wanted.several else "")


def _with_text(writer: GrammarWriter, style: CallStyle, rest: str, *, several: bool) -> str:
    """Calls in a text, which holds none of the marks that open them."""
    opening = style.section[0]
    lead = writer.until(opening or style.begin, "lead", style.begin if opening else "")
    tail = writer.without((opening, style.begin), "TAIL")
    return f"({lead} {rest})* {tail}?" if several else f"({lead} {rest} | {tail})?"


class _CallWriter:
    """Writes the rules of calls in one style."""

    def __init__(self, writer: GrammarWriter, style: CallStyle, wanted: WantedCalls) -> None:
        self._writer, self._style, self._wanted = writer, style, wanted

    def rest(self, at: int, name: str) -> str:
        """Adds the rule of a call of one tool, number `at`, behind the mark that begins it; returns its name."""
        schema = self._wanted.schema(name)
        style, text = self._style, self._writer.text
        if style.arguments is Arguments.OBJECT:
            return self._writer.rule(f"rest_{at}", self._object(at, name, schema))
        if not NAME_PATTERN.fullmatch(name):
            raise UsageError(
                f"{self._wanted.field}: the tool {name[:60]!r} has a name that this model cannot write"
            )
        index = '":" /[0-9]{1,3}/' if style.indexed else ""
        head = f"{text(style.prefix + name)} {index} {text(style.name_end)}"
        if style.arguments is Arguments.JSON:
            opened, closed = map(text, style.fence)
            body = f"{opened} {self._writer.schema(schema, f'args_{at}')} {closed}"
        else:
            body = f"{_LINE} {self._pairs(at, name, schema)}"
        return self._writer.rule(f"rest_{at}", f"{head} {body} {text(style.end)}")

    def _object(self, at: int, name: str, schema: dict[str, Any]) -> str:
        of_name, key = self._style.keys
        head = self._writer.text(f'{{"{of_name}": {json.dumps(name)}, "{key}": ')
        inner = f'{head} {self._writer.schema(schema, f"args_{at}")} "}}"'
        if self._style.bare or not self._style.end:
            return inner
        return f"{_LINE} {inner} {_LINE} {self._writer.text(self._style.end)}"

    # --- arguments in pairs ------------------------------------------------------------------

    def _pairs(self, at: int, name: str, schema: dict[str, Any]) -> str:
        ways = [*_objects(schema, schema)][:_MOST_WAYS]
        if len(ways) < 2:
            return self._way(str(at), name, ways[0] if ways else schema)
        said = (self._way(f"{at}_{way}", name, each) for way, each in enumerate(ways))
        return f"({' | '.join(each or chr(34) * 2 for each in said)})"

    def _way(self, at: str, name: str, schema: dict[str, Any]) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return ""
        required = schema.get("required")
        needed = set(required) if isinstance(required, list) else set()
        if unknown := sorted(map(str, needed - set(properties))):
            raise UsageError(
                f"{self._wanted.field}: the tool {name[:60]} requires {unknown[0][:60]}, which is "
                f"not one of its properties"
            )
        rules = []
        for number, (key, value) in enumerate(properties.items()):
            if value is False:
                continue
            rule = self._pair(f"{at}_{number}", name, key, schema)
            rules.append(f"({rule} {_LINE}){'' if key in needed else '?'}")
        return " ".join(rules)

    def _pair(self, number: str, tool: str, key: str, schema: dict[str, Any]) -> str:
        style, writer = self._style, self._writer
        is_text = self._wanted.tools.is_text(tool, key)
        said = f' string="{"true" if is_text else "false"}"' if style.typed else ""
        head = writer.text(style.key[0] + key + style.key[1] + said)
        # Line ends between a key and its value are no part of either mark.
        opened = f"{_LINE} {writer.text(style.value[0])}" if style.value[0] and not said else ""
        opened = opened or writer.text(style.value[0])
        return writer.rule(
            f"pair_{number}", f"{head} {opened} {self._value(number, key, schema, is_text)}"
        )

    def _value(self, number: str, key: str, schema: dict[str, Any], is_text: bool) -> str:
        writer, mark, value = self._writer, self._style.value_end(key), schema["properties"][key]
        if not is_text:
            shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            own = {**value, **shared} if isinstance(value, Mapping) else {}
            json_ = writer.schema(own, f"value_{number}")
            return f"{_LINE} {json_} {_LINE} {writer.text(mark)}"
        if listed := _listed(value):
            texts = " | ".join(writer.text(text) or '""' for text in listed)
            return f"{_LINE} ({texts}) {_LINE} {writer.text(mark)}"
        return writer.until(mark, f"text_{number}")


def _objects(schema: Any, root: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the objects of which a checked schema is a choice, with the definitions that they refer to."""
    schema = followed(schema, root)
    if isinstance(choice := schema.get("anyOf"), list) and "properties" not in schema:
        for each in choice:
            yield from _objects(each, root)
    else:
        yield {**schema, **{name: root[name] for name in ("$defs", "definitions") if name in root}}


def _listed(schema: Any) -> list[str]:
    """Returns the texts that a schema lists; none: it lists nothing, or something else."""
    if not isinstance(schema, Mapping):
        return []
    values = listed_in(schema)
    known = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return list(values) if known and isinstance(values, list) else []
