"""Reads tool calls from an answer's text as it arrives, in any style of the table.

However the text is cut, the events are the same in the end. A text that begins like a call and is none stays a text:
nothing that a model says is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from ktcli.answers.calls.objects import JsonValue, calls_in, python_calls
from ktcli.answers.calls.styles import Arguments, CallStyle
from ktcli.answers.calls.values import PairValue, Tools
from ktcli.answers.events import CallArguments, CallBegins, CallEnds, CallEvent
from ktcli.answers.stream import overlap

Read = str | CallEvent  # a text for the reader, or something of a call
NAME_CHARS = 256  # of a tool
# The usual beginning of an object that is a call, up to its arguments.
_HEAD = r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
NAME_PATTERN = re.compile(r"[^\s<>{}\"]+")
_FENCE_BEGUN = re.compile(r"`{0,2}|```(?:j|js|jso|json)?\s*")
_FENCE = re.compile(r"\s*```(?:json)?\s*(?=[\[{])")  # before a call that is an object
_PYTHON = re.compile(r"\s*\[\s*([A-Za-z_]|$)")  # a list of Python's calls begins, or may
_INDEX = re.compile(r":\d+$")  # Kimi's calls are functions.NAME:INDEX


class CallReader:
    """The reader of the tool calls in one answer.

    Args:
        tools: the tools that may be called; their schemas say what values are.
    """

    def __init__(self, style: CallStyle, tools: Tools) -> None:
        self._style, self._tools = style, tools
        self._text = ""  # what was not looked at yet
        self._raw = ""  # of the call, as long as it may turn out to be none
        self._blank = ""  # at the end of a text, which a call may follow
        self._begun = False  # whether the answer has a letter
        self._in_section = False
        self._behind_call = False  # whether nothing was said since a call
        self._state: Callable[[], bool] = self._outside
        self._out: list[Read] = []
        self.calls = 0
        self._tool = self._key = ""
        self._json = JsonValue()
        self._empty = True  # whether the arguments have no pair yet
        self._value: PairValue | None = None

    def feed(self, text: str) -> list[Read]:
        """Reads a piece of the answer; returns what it completes, in order: texts (str) outside tool calls, and
        `CallBegins`, `CallArguments` and `CallEnds` events.
        """
        self._text += text
        while self._text and self._state():
            pass
        found, self._out = self._out, []
        return found

    def finish(self) -> list[Read]:
        """Ends the answer; returns the texts (str) and call events that were held back. A tool call that is cut off
        ends there.
        """
        rest, self._text = self._text, ""
        if self._state == self._outside:
            self._say(rest)
        elif self._raw:
            self._say(self._raw + rest)
        elif self._state in (self._before_json, self._in_json, *self._of_pairs):
            self._close()
        found, self._out = self._out, []
        return found

    def whole_calls_in(self, text: str) -> list[Read]:
        """Returns the events of the complete tool calls in a text, without the text around them; sets `calls` to their
        number.
        """
        reader = CallReader(self._style, self._tools)
        found = reader.feed(text)
        whole = {each.number for each in found if isinstance(each, CallEnds)}
        self.calls = len(whole)
        return [each for each in found if not isinstance(each, str) and each.number in whole]

    # --- between calls ------------------------------------------------------------------------

    def _outside(self) -> bool:
        style = self._style
        may_be_bare = style.bare and (not self._begun or self._behind_call)
        if may_be_bare and (object_ := _object_in(self._blank + self._text)):
            self._blank, self._text = object_
            return self._open(self._object)
        marks, sections = [style.begin], style.sections
        if self._in_section or self._behind_call:  # models close sections that they never opened
            marks += [closing for _, closing in sections]
        if not self._in_section:
            marks += [opening for opening, _ in sections]
        if style.bare:
            marks.append(style.end)
        before, mark = self._upto(*marks)
        if not self._in_section:
            self._say(before)
        if not mark:
            return False
        if style.bare and mark == style.end:  # an object may follow
            self._behind_call = True
            return True
        if mark == style.begin:
            self._raw = mark
            kind = self._object if style.arguments is Arguments.OBJECT else self._name
            return self._open(kind)
        if not self._in_section and mark in [closing for _, closing in sections]:
            if not self._behind_call:  # something was said meanwhile
                self._say(mark)
            return True
        self._in_section = not self._in_section
        return True

    def _open(self, state: Callable[[], bool]) -> bool:
        self._state, self._json = state, JsonValue()
        return True

    def _say(self, text: str) -> None:
        """Says a text; blanks at its end only if more text follows."""
        whole = self._blank + text
        said = whole.rstrip()
        self._blank = whole[len(said) :]
        if said:
            self._begun, self._behind_call = True, False
            self._out.append(said)

    # --- a call ------------------------------------------------------------------------------

    def _name(self) -> bool:
        """Reads the name behind the mark; returns whether there was one to go on with."""
        style = self._style
        ends = [mark for mark in (style.name_end, style.key[0], style.end) if mark]
        found = _first(self._text, ends)
        if found is None and len(self._text) < NAME_CHARS + max(map(len, ends)):
            return False
        at, mark = found or (NAME_CHARS + 1, "")
        said = self._text[:at].strip()
        if at > NAME_CHARS or not NAME_PATTERN.fullmatch(said):
            return self._no_call(min(at, NAME_CHARS))
        self._text = self._text[at + (len(mark) if mark == style.name_end else 0) :]
        name = _INDEX.sub("", said.removeprefix(style.prefix)) if style.prefix else said
        name, _, given = name.partition("[CALL_ID]")
        self._begin(name, said if style.prefix else given)
        is_json = style.arguments is Arguments.JSON
        return self._open(self._before_json if is_json else self._in_pairs)

    def _no_call(self, chars: int) -> bool:
        """Takes what began like a call, and the next characters, as text."""
        is_pair = self._style.bare and self._style.end  # marks of whatever, as Llama 4's
        raw = self._raw.removeprefix(self._style.begin) if is_pair else self._raw
        if said := self._blank + raw + self._text[:chars]:
            self._out.append(said)
        self._text = self._text[chars:]
        self._raw = self._blank = ""
        self._begun, self._state, self._behind_call = True, self._outside, False
        return True

    def _begin(self, name: str, given: str = "") -> None:
        self._raw = self._blank = ""
        self._begun = self._behind_call = True
        self._tool, self._empty = name, True
        self._out.append(CallBegins(self.calls, name, given))

    def _before_json(self) -> bool:
        """Looks for the object of the arguments, perhaps in a fence; a call without one has none."""
        _, mark = self._upto("{", self._style.end)
        if mark == "{":
            self._text = mark + self._text
            self._state = self._in_json
            return True
        return self._close() if mark else False

    def _in_json(self) -> bool:
        if self._json.ended:
            _, mark = self._upto(self._style.end)
            return self._close() if mark else False
        n = self._json.take(self._text)
        self._out.append(CallArguments(self.calls, self._text[:n]))
        self._empty, self._text = False, self._text[n:]
        return self._json.ended and (bool(self._style.end) or self._close())

    def _close(self) -> bool:
        """Ends the call."""
        if self._state == self._in_value and self._value is not None:
            self._out.append(CallArguments(self.calls, self._value.finish()))
        if self._style.arguments is Arguments.PAIRS or self._empty:
            self._out.append(CallArguments(self.calls, "{}" if self._empty else "}"))
        self._out.append(CallEnds(self.calls))
        self.calls += 1
        self._state = self._outside
        return True

    @property
    def _of_pairs(self) -> tuple[Callable[[], bool], ...]:
        return self._in_pairs, self._in_key, self._in_value

    # --- arguments in pairs ------------------------------------------------------------------

    def _in_pairs(self) -> bool:
        """Between two pairs: a key comes, or the end."""
        style = self._style
        _, mark = self._upto(style.key[0], style.end)
        if mark == style.end:
            return self._close()
        if mark:
            self._state = self._in_key
        return bool(mark)

    def _in_key(self) -> bool:
        style = self._style
        found = _first(self._text, [style.key[1]])
        if found is None:
            return False
        behind = self._text[found[0] + len(style.key[1]) :]
        opened = _first(behind, [style.value[0]]) if style.value[0] else (0, "")
        if opened is None:
            return False
        self._key = self._text[: found[0]].strip()
        said = behind[: opened[0]]  # V3.2: whether it is a text
        self._text = behind[opened[0] + len(style.value[0]) :]
        texts = 'string="true"' in said or (
            'string="false"' not in said and self._tools.is_text(self._tool, self._key)
        )
        schema = self._tools.parameters.get(self._tool, {})
        streams = "true" in said or (texts and self._key in schema.get("properties", {}))
        self._value = PairValue(self._tools, self._tool, self._key, said, streams=streams)
        lead = "{" if self._empty else ", "
        self._out.append(CallArguments(self.calls, f"{lead}{json.dumps(self._key)}: "))
        self._empty, self._state = False, self._in_value
        return True

    def _in_value(self) -> bool:
        assert self._value is not None
        before, mark = self._upto(self._style.value_end(self._key))
        if piece := self._value.feed(before):
            self._out.append(CallArguments(self.calls, piece))
        if mark:
            if piece := self._value.finish():
                self._out.append(CallArguments(self.calls, piece))
            self._state = self._in_pairs
        return bool(mark)

    # --- name and arguments in one object ----------------------------------------------------

    def _object(self) -> bool:
        """Reads a call that is an object. Arguments behind the name go out as they come; in any other order, when it is
        whole."""
        style = self._style
        body = self._raw.removeprefix(style.begin) + self._text
        has_end = bool(style.end) and not style.bare
        if has_end and (head := re.match(_HEAD, body)) and (name := _text_of(head[1])):
            self._begin(name)
            self._text = body[head.end() :]
            return self._open(self._in_json)
        if self._raw == style.begin and (fence := _FENCE.match(self._text)):
            self._text = self._text[fence.end() :]
        if has_end and self._raw == style.begin and (python := _PYTHON.match(self._text)):
            return bool(python[1]) and self._python()
        stripped = self._text.lstrip()
        if self._raw == style.begin and style.end and _FENCE_BEGUN.fullmatch(stripped):
            return False  # it may be the beginning of a fence
        if not self._json._depth and stripped and stripped[0] not in "{[,":
            return self._no_call(0)
        n = self._json.take(self._text)
        self._raw, self._text = self._raw + self._text[:n], self._text[n:]
        if not self._json.ended:
            return False
        return self._take(calls_in(self._raw.removeprefix(style.begin)))

    def _python(self) -> bool:
        """Reads a list of Python's calls, whose brackets may stand in texts of either quotation marks, up to the
        mark."""
        at = self._text.find(self._style.end)
        if at < 0:
            return False
        calls = python_calls(self._text[:at])
        self._text = self._text[at if calls else 0 :]
        return self._take(calls)

    def _take(self, found: list[tuple[str, str]] | None) -> bool:
        """Gives out calls that are whole; without any, what began like some is a text."""
        if found is None:
            return self._no_call(0)
        for name, arguments in found:
            self._begin(name)
            self._out += [CallArguments(self.calls, arguments), CallEnds(self.calls)]
            self.calls += 1
        is_open = self._style.end and not self._style.bare
        self._state = self._after_object if is_open else self._outside
        return True

    def _after_object(self) -> bool:
        _, mark = self._upto(self._style.end)
        if mark:
            self._state = self._outside
        return bool(mark)

    # --- marks -------------------------------------------------------------------------------

    def _upto(self, *marks: str) -> tuple[str, str]:
        """Takes the text before the first of some marks, and the mark; without one all but what may begin one."""
        found = _first(self._text, [mark for mark in marks if mark])
        at = len(self._text) - _kept(self._text, marks) if found is None else found[0]
        mark = "" if found is None else found[1]
        rest = self._text[at:]
        if mark and any(rest != each and each.startswith(rest) for each in marks):
            mark = ""  # it may be the beginning of a longer one
        before, self._text = self._text[:at], self._text[at + len(mark) :]
        return before, mark


def _first(text: str, marks: list[str]) -> tuple[int, str] | None:
    """Returns the place of the first of some marks, the longest of those that begin there; either kind of quotation
    marks will do."""
    places = [(text.find(spelt), -len(mark), mark) for mark in marks for spelt in _spellings(mark)]
    found = min((each for each in places if each[0] >= 0), default=None)
    return None if found is None else (found[0], found[2])


def _object_in(text: str) -> tuple[str, str] | None:
    """Returns the blanks before an object, and the text from it on; None: the text begins with something else."""
    found = text.lstrip()
    return (text[: len(text) - len(found)], found) if found[:1] in ("{", "[") else None


def _kept(text: str, marks: tuple[str, ...] | list[str]) -> int:
    """Returns the letters at the end of a text that may begin a mark."""
    spelt = (each for mark in marks if mark for each in _spellings(mark))
    return max((overlap(text, each) for each in spelt), default=0)


def _spellings(mark: str) -> tuple[str, ...]:
    """Returns a mark with the quotation marks of its style, and with the others."""
    return (mark, mark.replace('"', "'")) if '"' in mark else (mark,)


def _text_of(literal: str) -> str:
    """Returns the text that a literal of JSON means; empty: none."""
    try:
        return str(json.loads(literal))
    except ValueError:
        return ""
