"""A Jinja environment for untrusted templates.

Jinja's own sandbox hides Python's internals; it does not stop a template that loops for ever, or
doubles a string forty times. So here attributes, methods, filters, tests and statements are allowed
by tables, and before a template is compiled its syntax tree is rewritten so that everything that
could grow (loops, `~`, list displays, slices, printed text) goes through the `Meter` of the render,
as operators, calls and filters do anyway. In the main thread a timer signal bounds what is left.
The dialect is that of transformers: trimmed blocks, loop controls, `{% generation %}`,
`raise_exception`, `strftime_now`, `tojson` without escapes.

minijinja 3.1, tried with every template of the tests, renders 930 of 1,056 alike, and refuses the 30 of
`{% generation %}`; of expressions it lacks `%` of texts, a macro's `kwargs`, `rsplit` and unary `+`. Its fuel counts
instructions: of the tests' attacks three went on for more than 20 s, and one took 940 MiB before the fuel was out.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from types import BuiltinMethodType
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace, missing
from jinja2.visitor import NodeTransformer

from ktcli.text.meter import FILTERS_PAID, ITEMS, MAX_SECONDS, OPERATORS, Meter, call_method, concat

MAX_TEMPLATE_CHARS = 256 * 1024  # the longest published ones have about 30,000
MAX_TOKENS = 25_000  # of Jinja, spaces included; the longest published ones have about 8,000
MAX_DEPTH = 100  # of the syntax tree; published templates stay below 40

_STATEMENTS = (
    nodes.Assign, nodes.AssignBlock, nodes.Break, nodes.CallBlock, nodes.Continue,
    nodes.FilterBlock, nodes.For, nodes.If, nodes.Macro, nodes.Output, nodes.Scope, nodes.With,
)  # fmt: skip

_STR = frozenset(
    "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier "
    "islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix "
    "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip "
    "swapcase title upper".split()
)
_LOOP = frozenset(
    "changed cycle depth depth0 first index index0 last length nextitem previtem revindex "
    "revindex0".split()
)
_ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR),
    (Mapping, frozenset({"get", "items", "keys", "values"})),
    (list, frozenset({"count", "index"})),
    (tuple, frozenset({"count", "index"})),
    (LoopContext, _LOOP),
)

# Filters as jinja2 has them, by what must be known of the value before they run: nothing; that it
# can be written out; that it can be walked.
_INSTANT = "abs count d default first float last length".split()
_WRITING = "capitalize lower title trim upper".split()
_WALKING = ("dictsort items map reject rejectattr reverse select selectattr sort unique").split()
_TESTS = (
    "boolean defined divisibleby eq equalto even false float ge greaterthan gt in integer iterable "
    "le lessthan lower lt mapping ne none number odd sameas sequence string true undefined upper "
    "== != < <= > >="
).split()


# The functions that templates may call.
GLOBALS = frozenset({"dict", "namespace", "raise_exception", "range", "strftime_now"})


class TemplateTimeout(BaseException):
    """Raised when a template takes too long. It is no Exception: nothing on the way may swallow it."""


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the trained parts of a text; in a chat it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """Returns the syntax tree of the tag's body, up to `endgeneration`, as a scope between two nodes that print
        the marks of a trained part.
        """
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        cast(Sandbox, self.environment).has_answer_tags = True
        return nodes.Scope([_mark(0, line), *body, _mark(1, line)]).set_lineno(line)


def _mark(which: int, line: int) -> nodes.Output:
    """Returns what prints a mark of an answer, see `Sandbox.answer_marks`."""
    number = nodes.Const(which, lineno=line)
    return nodes.Output([_through("answer_mark", number)], lineno=line)


class _Rewrite(NodeTransformer):
    """Rewrites a template so that everything that can grow goes through methods of the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise SecurityError("it uses a recursive loop")
        self.generic_visit(node)
        node.iter = _through("rounds", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("glue", *node.nodes)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _through("own", node)

    visit_Tuple = visit_Dict = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("own", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # printed by `finalize`, so it is paid


def _through(method: str, *args: nodes.Node) -> nodes.Call:
    target = nodes.EnvironmentAttribute(method)
    return nodes.Call(target, list(args), [], None, None, lineno=args[0].lineno)


def _check(tree: nodes.Template) -> None:
    """Refuses statements outside the table, and trees too deep to walk by recursion."""
    todo: list[tuple[nodes.Node, int]] = [(tree, 0)]
    while todo:
        node, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise SecurityError("it is nested too deeply")
        if isinstance(node, nodes.Stmt) and not isinstance(node, _STATEMENTS):
            raise SecurityError(f"it uses {type(node).__name__.lower()}, which is not allowed")
        todo.extend((child, depth + 1) for child in node.iter_child_nodes())


class _PlainNamespace(Namespace):
    """A namespace without names that mean something to Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"it stores the attribute {name!r}")
        super().__setitem__(name, value)


_PlainNamespace.__name__ = "namespace"  # as Python's own errors call it


class _BriefUndefined(Undefined):
    """A missing value, named in few words: the value used as its name may be endless when written out."""

    @property
    def _undefined_message(self) -> str:
        name, holder = self._undefined_name, self._undefined_obj
        if isinstance(name, (str, int)) and (
            holder is missing or type(holder).__module__ == "builtins"
        ):
            return str(super()._undefined_message)
        return f"a {_kind(holder)} has no {_kind(name) if not isinstance(name, str) else name!r}"


_KINDS: tuple[tuple[type, str], ...] = (
    (Undefined, "missing value"),
    (Namespace, "namespace"),
    (LoopContext, "loop"),
    (Mapping, "dict"),
)


def _kind(value: Any) -> str:
    """Returns the kind of a value, in the words of templates."""
    own = type(value).__name__.lstrip("_").lower()
    return next((word for kind, word in _KINDS if isinstance(value, kind)), own)


def _strftime(now: datetime, pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise SecurityError(f"it formats the date with a {_kind(pattern)}")
    text = pattern
    # A C library takes a width in a field: %999999999d.
    if len(text) > 100 or re.search(r"%[^a-zA-Z%]*\d", text):
        raise SecurityError("it formats the date in a way that is not allowed")
    return now.strftime(text)


def _range(*args: int) -> range:
    values = range(*args)
    if len(values) > ITEMS:
        raise SecurityError(f"it asks for a range of {len(values)} numbers")
    return values


_Filter = Callable[..., Any]


def _lazily(run: _Filter, call: _Filter) -> _Filter:
    """Returns a filter that takes the context, so that jinja2 does not evaluate it while compiling."""
    return pass_context(partial(run, call))


class Sandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment; it carries the meter of the render, so it serves one render at a time."""

    intercepted_binops = frozenset(OPERATORS)
    meter: Meter
    has_answer_tags = False  # whether the template has {% generation %}
    answer_marks = ("", "")  # what is printed at the beginning and the end of what that holds
    now: datetime | None = None  # as a template is told; None: it is told the time

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationTag],
            optimized=False,  # nothing is computed while compiling, when no meter runs
            undefined=_BriefUndefined,
            finalize=pass_context(lambda _context, value: self.meter.text_of(value)),
            cache_size=0,
        )
        self.meter = Meter.for_input(0, 0)
        self.globals = {
            "dict": dict,
            "namespace": _PlainNamespace,
            "raise_exception": self._raise_exception,
            "range": _range,
            "strftime_now": lambda pattern: _strftime(self.now or datetime.now(), pattern),
        }
        self.filters = {
            **{name: _lazily(self._instant, FILTERS[name]) for name in _INSTANT},
            **{name: _lazily(self._writing, FILTERS[name]) for name in _WRITING},
            **{name: _lazily(self._walking, FILTERS[name]) for name in _WALKING},
            **{name: _lazily(self._paid, call) for name, call in FILTERS_PAID.items()},
        }
        self.tests = {name: TESTS[name] for name in _TESTS}

    def _instant(self, call: _Filter, context: Context, /, *args: Any, **more: Any) -> Any:
        self.meter.step()
        return call(*self._first(call, context), *args, **more)

    def _writing(
        self, call: _Filter, _context: Context, value: Any, /, *args: Any, **more: Any
    ) -> Any:
        return self.meter.own(call(self.meter.text_of(value), *args, **more))

    def _walking(
        self, call: _Filter, context: Context, value: Any, /, *args: Any, **more: Any
    ) -> Any:
        if isinstance(value, str):
            self.meter.step(len(value))
        elif isinstance(value, Iterable) and not isinstance(
            value, (list, tuple, Mapping, Undefined)
        ):
            value = list(self.meter.each(value))
        self.meter.weigh(value)  # what cannot be walked at all (none) is the filter's affair
        return self.meter.own(call(*self._first(call, context), value, *args, **more))

    def _first(self, call: _Filter, context: Context) -> tuple[Any, ...]:
        """Returns the arguments that jinja2 would pass to `call` before the value."""
        wants = getattr(getattr(call, "jinja_pass_arg", None), "name", None)
        given = {"context": context, "eval_context": context.eval_ctx, "environment": self}
        return (given[wants],) if wants else ()

    def _paid(self, call: _Filter, _context: Context, /, *args: Any, **more: Any) -> Any:
        self.meter.step()
        return call(self.meter, *args, **more)

    def _raise_exception(self, message: Any) -> None:
        raise TemplateError(self.meter.text_of(message)[:300])

    # The methods that the rewritten tree calls.

    def rounds(self, values: Any) -> list[Any]:
        """Returns the values of a template's loop as a list; a step for each is charged before the first round."""
        return list(self.meter.each(values))

    def glue(self, *parts: Any) -> str:
        """Returns one text of all parts, as Jinja's `a ~ b`; its cost counts on the meter."""
        return concat(self.meter, *parts)

    def answer_mark(self, which: int) -> str:
        """Returns the text that is printed at the beginning (0) or the end (1) of a trained part; empty unless
        `answer_marks` is set.
        """
        return self.answer_marks[which]

    def own(self, value: Any) -> Any:
        """Returns a template's list display or slice unchanged, after its size was charged to the meter."""
        return self.meter.own(value)

    # The methods that compiled templates call.

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Returns the result of a binary operator; its cost counts on the meter."""
        return OPERATORS[operator](self.meter, left, right)

    # The underscores are jinja2's: a template may pass keywords called `self` and `context`.
    def call(__self, __context: Context, __obj: Any, *args: Any, **more: Any) -> Any:
        """Returns the result of calling an object, or a string's method, from a template; both are charged to the
        meter.
        """
        __self.meter.step()
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            for scope in ("_loop_vars", "_block_vars"):  # for those who want the context
                more.pop(scope, None)
            return call_method(__self.meter, __obj.__self__, __obj.__name__, args, more)
        return __self.meter.own(__context.call(__obj, *args, **more))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Returns whether a template may read an attribute: it is a namespace's own, or in the table of attributes that
        are allowed for types.
        """
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES)

    def wrap_str_format(self, value: Any) -> None:
        """Returns None, so that jinja2 does not wrap `str.format`, which templates may not call anyway."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Raises SecurityError for an attribute that a template may not read."""
        raise SecurityError(f"it reads the attribute {attribute[:60]!r} of a {_kind(obj)}")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        for count, _ in enumerate(self.lexer.tokeniter(source, name, filename)):
            if count > MAX_TOKENS:
                raise SecurityError("it is too long")
        return super()._parse(source, name, filename)

    def _generate(self, source: nodes.Template, *args: Any, **more: Any) -> str:
        _check(source)
        return super()._generate(_Rewrite().visit(source), *args, **more)


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Opens a context that raises `TemplateTimeout` after `MAX_SECONDS`, where signals are available: in the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    running = True

    def fire(*_: Any) -> None:
        if running:
            raise TemplateTimeout

    before = signal.signal(signal.SIGALRM, fire)
    # It goes on firing, in case the first one lands where an exception is swallowed.
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS, 0.1)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
