"""Defines what a row of the table of operations is.

A row is a frozen dataclass: its fields are what the operation reads, each with its kind, and the facts of the
operation. Everything else follows from the row: a backend's typed method, the record of a recorded program,
the C struct that is packed by field name, the keywords of a device's kernel, the checks of widths and roles, and a
line of `kt show --program`. CONTRIBUTING.md says how to add one. Recorder, passes, backends, listing and tests go by
the layout of a row (`layout_of`), and so know no operation by name.

Annotations are values here and in the table, not texts as elsewhere: every start reads the kinds from them.
"""

import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Annotated, Any, ClassVar, NamedTuple

from ktcli.ops.tensors import Role, Tensor
from ktcli.records import dataclass


class FieldKind(Enum):
    """The kind of value that a field of a row holds. A field without a kind is a fact, which C is told by the same
    name."""

    ROWS = "rows"  # a value of a backend: rows of activations
    ROUTING = "routing"  # a value of a backend: the result of `route`
    CHOICE = "choice"  # True: the result of the last `choose`
    MATRIX = "matrix"  # a dense matrix
    STACK = "stack"  # matrices of routed experts
    VECTOR = "vector"  # f32
    IDS = "ids"  # a vector of integers
    MASK = "mask"  # a byte for each expert, which may change between steps
    TABLE = "table"  # rows of bf16; C has a second field NAME_f32 for rows of f32, and one of both is set
    PAGES = "pages"  # number of the layer in whose pages the operation has a part
    STATE = "state"  # number of the layer in whose state the operation has a part
    FIRST = "first"  # element with which that part of the state begins
    IMPLIED = "implied"  # a fact that C sees in the widths of views or in offsets


Rows = Annotated[Any, FieldKind.ROWS]
Routed = Annotated[Any, FieldKind.ROUTING]
LastChoice = Annotated[Any, FieldKind.CHOICE]
Matrix = Annotated[Tensor, FieldKind.MATRIX]
ExpertStack = Annotated[Tensor, FieldKind.STACK]
Vector = Annotated[Tensor, FieldKind.VECTOR]
Ids = Annotated[Tensor, FieldKind.IDS]
Mask = Annotated[Tensor, FieldKind.MASK]
Table = Annotated[Tensor, FieldKind.TABLE]
PagesOf = Annotated[int, FieldKind.PAGES]
StateOf = Annotated[int, FieldKind.STATE]
PagesAndStateOf = Annotated[int, FieldKind.PAGES, FieldKind.STATE]
StateFirst = Annotated[int, FieldKind.FIRST]
Implied = Annotated[int, FieldKind.IMPLIED]

# Tensors that a field may name, by its kind.
WEIGHTS: Mapping[FieldKind, frozenset[Role]] = {
    FieldKind.MATRIX: frozenset({Role.DENSE, Role.KEPT}),
    FieldKind.STACK: frozenset({Role.EXPERTS}),
    FieldKind.VECTOR: frozenset({Role.VECTOR}),
    FieldKind.IDS: frozenset({Role.VECTOR}),
    FieldKind.MASK: frozenset({Role.VECTOR}),
    FieldKind.TABLE: frozenset({Role.TABLE}),
}

Widths = dict[str, int | tuple[int, int, int]]


class Cached(NamedTuple):
    """The numbers of elements that an operation caches for each position, in the layer's pages.

    Attributes:
        before: elements of other operations, which come first.
        parts: its own elements, in each part; a page has a part for all its positions, then the next part.
        behind: elements of other operations, which come last.
        heads: the heads of each part, which have a scale each where the cache is fp8; (): it cannot be.
    """

    before: int
    parts: tuple[int, ...]
    behind: int
    heads: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Operation:
    """A call of an operation, with its values, tensors and facts.

    Class attributes, which a row sets where they are not as here:
        name: the operation's name everywhere: the backend's method, kt_program_<name> and kt_<name>, kernels, dumps.
        outs: names of the views that it writes into new buffers.
        gives: the kinds of its results that are not rows: a routing, a choice.
        overwrites: names of the operands that do not keep their values.
        reads_step: whether its result depends on the positions of its rows, not on their values alone.
        selects: whether its result has the rows that are outputs of the step.
        derived: names of properties that C is told beside the fields.
    """

    name: ClassVar[str] = ""
    outs: ClassVar[tuple[str, ...]] = ("out",)
    gives: ClassVar[tuple[FieldKind, ...]] = ()
    overwrites: ClassVar[tuple[str, ...]] = ()
    reads_step: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    derived: ClassVar[tuple[str, ...]] = ()

    @property
    def in_place(self) -> bool:
        """Whether the operation writes its result over its first operand."""
        return False

    @property
    def cached(self) -> Cached:
        """What the operation caches for each position in its layer's pages: `parts` and `heads` have an entry, the
        number of elements and of heads, for each part; `before` and `behind` are the elements of other operations. All
        are 0 or () if it has no field of kind PAGES.
        """
        return Cached(0, (), 0)

    def widths(self) -> Widths:
        """Returns the sizes that follow from the operation's facts and other sizes, by field name: the columns of
        operands and of results ("out"), the elements of vectors, and (count, n, k) of matrices.
        """
        return {}


Kinds = frozenset[FieldKind]
Getter = Callable[[Operation], Any]

_OF_LAYER = frozenset({FieldKind.PAGES, FieldKind.STATE, FieldKind.FIRST})


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The fields of a row of the table of operations, grouped by kind.

    Attributes:
        operands: the fields that are rows of activations, in order.
        weights: the fields that are tensors, and the kind of each.
        routing, choice, pages, state, first: the name of the field of that kind; "" if there is none.
        given: the fields that a kernel is given under their own names, and the kind of each; None: a fact.
        told: the facts that C is told, by their names in C.
        facts: all facts, whether C is told or not.
        defaults: the default values of facts.
    """

    operands: tuple[str, ...]
    weights: Mapping[str, FieldKind]
    routing: str
    choice: str
    pages: str
    state: str
    first: str
    given: tuple[tuple[str, FieldKind | None], ...]
    told: Mapping[str, Getter]
    facts: Mapping[str, Getter]
    defaults: Mapping[str, Any]

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the operation's fields that hold the number of a routing (a router's result) or of a choice
        (chosen positions); empty: there are none.
        """
        return tuple(name for name in (self.routing, self.choice) if name)


_LAYOUTS: dict[str, RowLayout] = {}


def layout_of(row: type[Operation]) -> RowLayout:
    """Returns the fields of an operation class by kind: the names of operands and of special fields such as pages, the
    kinds of weights, and getters of facts (constants)."""
    if row.name not in _LAYOUTS:
        _LAYOUTS[row.name] = _read_layout(row)
    return _LAYOUTS[row.name]


def _read_layout(row: type[Operation]) -> RowLayout:
    hints = typing.get_type_hints(row, include_extras=True)
    kinds = {field.name: _kinds(hints[field.name]) for field in fields(row)}
    facts: dict[str, Getter] = {}
    told: dict[str, Getter] = {}
    defaults: dict[str, Any] = {}
    for field in fields(row):
        if kinds[field.name] <= {FieldKind.IMPLIED}:
            for name, path, implied, default in _flat(field, hints[field.name]):
                facts[name], defaults[name] = attrgetter(path), default
                told |= {} if implied else {name: facts[name]}

    def named(kind: FieldKind) -> str:
        return next((name for name, of in kinds.items() if kind in of), "")

    return RowLayout(
        operands=tuple(name for name, of in kinds.items() if FieldKind.ROWS in of),
        weights={name: kind for name, of in kinds.items() for kind in of if kind in WEIGHTS},
        routing=named(FieldKind.ROUTING),
        choice=named(FieldKind.CHOICE),
        pages=named(FieldKind.PAGES),
        state=named(FieldKind.STATE),
        first=named(FieldKind.FIRST),
        given=tuple((n, next(iter(of), None)) for n, of in kinds.items() if not of & _OF_LAYER),
        told=told | {name: attrgetter(name) for name in row.derived},
        facts=facts,
        defaults=defaults,
    )


def _kinds(hint: Any) -> Kinds:
    """Returns the kinds in an annotation, whether it may be None or not."""
    inner = next((each for each in typing.get_args(hint) if hasattr(each, "__metadata__")), hint)
    found = (each for each in getattr(inner, "__metadata__", ()))
    return frozenset(each for each in found if isinstance(each, FieldKind))


def _flat(field: Any, hint: Any) -> list[tuple[str, str, Kinds, Any]]:
    """Returns (name, path, kinds, default) of a fact, or of each field of a dataclass of facts."""
    if not (isinstance(hint, type) and is_dataclass(hint)):
        return [(field.name, field.name, _kinds(hint), field.default)]
    inner = typing.get_type_hints(hint, include_extras=True)
    return [
        (of.name, f"{field.name}.{of.name}", _kinds(inner[of.name]), of.default)
        for of in fields(hint)
    ]
