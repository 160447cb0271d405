"""Limits what a template may use: operations that could create something large are charged first.

A render gets one `Meter`. *Steps* are loop rounds, calls and items of lists; *characters* are those
of every string that comes into being. Both are finite, and no single value may be large, so memory
and time stay bounded whatever a template does. A sum that cannot be paid raises before anything is
made.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import Undefined

from ktcli.records import dataclass

MAX_SECONDS = 3.0
MAX_NESTING = 50  # of values
MAX_INT_BITS = 256
STEPS = 200_000
ITEMS = 50_000  # of one list, with everything inside it
STRING = 4 << 20  # characters of one string, or of one list when written out
TEXT = 16 << 20  # characters made in one render
PER_ITEM = 24  # characters charged for a number, a bracket, a comma

_TOO_MUCH = "it repeats or nests values too often"
_PRINTABLE = (str, int, float, type(None), list, tuple, dict, Undefined)


@dataclass(slots=True)
class Meter:
    """The remaining budget of one render, in steps and characters."""

    steps: int
    items: int
    string: int
    text: int
    deadline: float

    @classmethod
    def for_input(cls, items: int, chars: int) -> Meter:
        """Returns the budget of steps, characters and time (3 s) for rendering a conversation of this size."""
        return cls(
            steps=STEPS + 200 * items,
            items=ITEMS + 4 * items,
            string=STRING + 4 * chars,
            text=TEXT + 50 * chars,
            deadline=time.monotonic() + MAX_SECONDS,
        )

    def step(self, count: int = 1) -> None:
        """Charges `count` loop rounds, calls or items; raises SecurityError when the budget or the time is spent."""
        self.steps -= count
        if self.steps < 0 or time.monotonic() > self.deadline:
            raise SecurityError("it runs too long")

    def make(self, chars: int) -> None:
        """Charges a string of `chars` characters; raises SecurityError when it is too long or the budget is spent."""
        self.text -= chars
        if chars > self.string or self.text < 0:
            raise SecurityError("it produces too much text")

    def weigh(self, value: Any, *, to_print: bool = False) -> int:
        """Returns the estimated number of characters of `value` when written out; charges a step for every item in it,
        again wherever an item is repeated.

        Args:
            to_print: whether an item that is not printable text, number or list raises SecurityError.
        Raises:
            SecurityError: the value is too large or nested too deeply.
        """
        items = chars = depth = 0
        level = [value]
        while level:
            inside: list[Any] = []
            for part in level:
                if type(part) is str:  # most are
                    chars += len(part)
                    continue
                if to_print and not isinstance(part, _PRINTABLE):
                    raise SecurityError("it prints something that is not text")
                chars += len(part) if isinstance(part, str) else PER_ITEM
                if isinstance(part, (dict, Mapping)):
                    inside += part.keys()
                    inside += part.values()
                elif isinstance(part, (list, tuple)):
                    inside += part
                if items + len(inside) > self.items:
                    raise SecurityError(_TOO_MUCH)
            if chars > self.string or depth > MAX_NESTING:
                raise SecurityError(_TOO_MUCH)
            items, level, depth = items + len(inside), inside, depth + 1
        if items:
            self.step(items)
        return chars

    def text_of(self, value: Any) -> str:
        """Returns `str(value)`, after its estimated length was charged."""
        self.make(self.weigh(value, to_print=True))
        return str(value)

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yields `values` unchanged, and charges a step for each."""
        for value in values:
            self.step()
            yield value

    def own(self, value: Any) -> Any:
        """Returns an operation's result after charging its size to the meter; an iterator becomes a list."""
        if isinstance(value, Iterator):
            value = list(self.each(value))
        chars = self.weigh(value)
        if isinstance(value, str):
            self.make(chars)
        return value


# --- operators -----------------------------------------------------------------------------------


def add(meter: Meter, left: Any, right: Any) -> Any:
    """Returns left + right, whose size is charged to the meter."""
    if isinstance(left, str) and isinstance(right, str):
        meter.make(len(left) + len(right))
        return left + right
    return meter.own(left + right)


def multiply(meter: Meter, left: Any, right: Any) -> Any:
    """Returns left * right; the size of a repeated text or list is charged to the meter first."""
    for body, count in ((left, right), (right, left)):
        if isinstance(body, (str, list, tuple)):
            times = max(int(count), 0)
            meter.make(meter.weigh(body) * times)
            if not isinstance(body, str) and len(body) * times > meter.items:
                raise SecurityError("it repeats values too much")
    return _modest(left * right)


def power(meter: Meter, base: Any, exponent: Any) -> Any:
    """Returns base ** exponent; raises SecurityError if the number would be too large."""
    if isinstance(base, int) and isinstance(exponent, int):
        size = max(base.bit_length(), 1) * abs(exponent)
        if size > MAX_INT_BITS:
            raise SecurityError("it computes too large a number")
    return base**exponent


def modulo(meter: Meter, left: Any, right: Any) -> Any:
    """Returns left % right: the remainder of numbers, or the text `left` with its `%` fields filled in; raises
    SecurityError for unusual fields, such as those of more than 99 characters.
    """
    if not isinstance(left, str):
        return left % right
    if "%" in re.sub(_FIELD, "", left):
        raise SecurityError("it uses a format that is not allowed")
    fields = len(re.findall(_FIELD, left))
    meter.make(len(left) + fields * (100 + meter.weigh(right, to_print=True)))
    return left % right


_FIELD = r"%(?:\(\w{1,50}\))?[-+ 0#]{0,2}\d{0,2}(?:\.\d{1,2})?[sdifeEgGxX%]"


def _modest(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise SecurityError("it computes too large a number")
    return value


OPERATORS: dict[str, Callable[[Meter, Any, Any], Any]] = {
    "+": add,
    "*": multiply,
    "**": power,
    "%": modulo,
}


def concat(meter: Meter, *parts: Any) -> str:
    """Returns one text of all parts, as Jinja's `a ~ b ~ c`; its length is charged to the meter."""
    texts = [meter.text_of(part) for part in parts]
    meter.make(sum(map(len, texts)))
    return "".join(texts)


# --- methods of strings --------------------------------------------------------------------------


def call_method(meter: Meter, text: str, name: str, args: tuple[Any, ...], more: Any) -> Any:
    """Returns the result of calling the method `name` of a string with these arguments; the largest size that it could
    have is charged to the meter first.
    """
    if name == "replace" and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        meter.make(len(text) + text.count(old) * len(new))
    elif name == "join" and args:
        items = list(meter.each(args[0]))
        meter.make(meter.weigh(items) + len(items) * len(text))
        args = (items,)
    elif name in ("split", "rsplit", "splitlines"):
        # A separator makes the pieces countable; without one they are at most half the length.
        separator = args[0] if args else more.get("sep")
        known = isinstance(separator, str) and separator
        pieces = text.count(separator) if known else len(text) // 2
        if pieces > meter.items:
            raise SecurityError("it splits text into too many pieces")
        meter.make(len(text))
    else:
        meter.make(3 * len(text))  # no change of case makes a character longer than that
    return getattr(text, name)(*args, **more)


# --- filters -------------------------------------------------------------------------------------


def tojson(
    meter: Meter,
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns a value as JSON text, as the filter `tojson` of transformers: with neither HTML nor (by default) ASCII
    escapes.
    """
    width = len(indent) if isinstance(indent, str) else int(indent or 0)
    if width > 16 or any(len(part) > 16 for part in separators or ()):
        raise SecurityError("it indents JSON too far")
    # An escape makes six characters of one; PER_ITEM covers an item's indent at usual depths.
    meter.make(meter.weigh(x) * (6 if width <= 4 else 6 * width))
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def join(meter: Meter, value: Any, d: Any = "") -> str:
    """Returns the values as one text with `d` between them, as Jinja's filter `join`, charged to the meter."""
    texts = [meter.text_of(item) for item in meter.each(value)]
    return str(call_method(meter, meter.text_of(d), "join", (texts,), {}))


def replace(meter: Meter, s: Any, old: Any, new: Any, count: int = -1) -> str:
    """Returns the text with `old` replaced by `new`, as Jinja's filter `replace`, charged to the meter."""
    args = (meter.text_of(old), meter.text_of(new), count)
    return str(call_method(meter, meter.text_of(s), "replace", args, {}))


def indent(
    meter: Meter, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    """Returns the text with its lines indented, as Jinja's filter `indent`, charged to the meter."""
    text = meter.text_of(s)
    step = len(width) if isinstance(width, str) else max(width, 0)
    if step > 100:
        raise SecurityError("it indents text too far")
    meter.make(len(text) + (len(text.splitlines()) + 1) * step)
    return str(FILTERS["indent"](text, width, first, blank))


def form(meter: Meter, value: Any, *args: Any, **more: Any) -> str:
    """Returns the text `value` with its `%` fields filled in, as Jinja's filter `format`, charged to the meter."""
    return str(modulo(meter, meter.text_of(value), more or args))


def string(meter: Meter, value: Any) -> str:
    """Returns the value as text, for Jinja's filters `string` and `safe`: nothing is escaped here."""
    return meter.text_of(value)


def escape(meter: Meter, value: Any) -> str:
    """Returns the value as text with HTML's characters escaped, as Jinja's filter `escape`, charged to the meter."""
    text = meter.text_of(value)
    meter.make(5 * len(text))
    return str(FILTERS["escape"](text))


def listed(meter: Meter, value: Any) -> list[Any]:
    """Returns the items of a value as a list, as Jinja's filter `list`, each charged to the meter."""
    return list(meter.each(value))


def whole(meter: Meter, value: Any, default: Any = 0, base: int = 10) -> Any:
    """Returns the value as an integer, else `default`, as Jinja's filter `int`; raises SecurityError for a text of more
    than 256 characters.
    """
    if isinstance(value, str) and len(value) > MAX_INT_BITS:
        raise SecurityError("it reads too large a number")
    return FILTERS["int"](value, default, base)


def rounded(meter: Meter, value: Any, precision: int = 0, method: str = "common") -> Any:
    """Returns the number rounded to `precision` digits, as Jinja's filter `round`; raises SecurityError if `precision`
    is more than 20 or less than -20.
    """
    if abs(precision) > 20:
        raise SecurityError("it rounds to too many digits")
    return FILTERS["round"](value, precision, method)


FILTERS_PAID: dict[str, Callable[..., Any]] = {
    "e": escape,
    "escape": escape,
    "format": form,
    "indent": indent,
    "int": whole,
    "join": join,
    "list": listed,
    "replace": replace,
    "round": rounded,
    "safe": string,
    "string": string,
    "tojson": tojson,
}
