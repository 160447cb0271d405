"""Data classes with the laws of `dataclasses`, made in a sixth of its time.

A start of kt makes three hundred classes. `dataclasses` compiles up to eight functions for each, which takes 0.4 ms
of a processor, and most of them are never called: a quarter of the time until a chat's first word. Here a constructor
is compiled when a class turns out to have many objects, and the other methods are plain functions that classes share.
Fields, defaults and slots are those of `dataclasses`, so its `fields`, `replace` and `asdict` work with these classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

_FEW = 8  # objects of a class: to make one without a compiled constructor takes 3 us longer, to compile that 45

if TYPE_CHECKING:  # checkers of types know what that one does
    from dataclasses import dataclass
else:

    def dataclass(
        cls: type | None = None,
        /,
        *,
        frozen: bool = False,
        slots: bool = False,
        eq: bool = True,
        weakref_slot: bool = False,
    ) -> Any:
        """Returns the class with slots, constructor and comparison from its fields, as `dataclasses.dataclass` does."""

        def make(plain: type) -> type:
            made = dataclasses.dataclass(
                init=False, repr=False, eq=False, slots=slots, weakref_slot=weakref_slot
            )(plain)
            methods = {"__init__": _constructor(made, frozen), "__repr__": _repr}
            if eq:
                methods |= _comparison(made, frozen)
            if frozen:
                methods |= _frozen(made)
                if slots:
                    methods |= {"__getstate__": _state, "__setstate__": _set_state}
            for name, method in methods.items():
                # A class that has its own equality has None for its hash without having written that.
                if vars(made).get(name) is None:
                    setattr(made, name, method)
            return made

        return make if cls is None else make(cls)


def _constructor(cls: type, frozen: bool) -> Callable[..., None]:
    """Returns a constructor that puts the compiled one in its place when it was called a few times."""
    assign = object.__setattr__ if frozen else setattr
    left = _FEW

    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0 and (values := _given(cls, args, kwargs)) is not None:
            for name, value in values.items():
                assign(self, name, value)
            if hasattr(self, "__post_init__"):
                self.__post_init__()
        else:
            init = _compiled(cls, frozen)
            cls.__init__ = init  # type: ignore[misc]
            init(self, *args, **kwargs)

    return __init__


def _given(cls: type, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the values of an object's fields; None: these are not the arguments that its constructor takes."""
    rows = fields(cls)
    ordered = [each.name for each in rows if each.init and not each.kw_only]
    given = dict(zip(ordered, args, strict=False))
    if len(args) > len(ordered) or given.keys() & kwargs.keys():
        return None
    given |= kwargs
    values = {}
    for each in rows:
        if each.init and each.name in given:
            values[each.name] = given.pop(each.name)
        elif each.default is not MISSING:
            values[each.name] = each.default
        elif each.default_factory is not MISSING:
            values[each.name] = each.default_factory()
        elif each.init:
            return None
    return None if given else values


def _compiled(cls: type, frozen: bool) -> Callable[..., None]:
    """Returns the constructor of a class, compiled: parameters in the order of its fields, those by name alone last."""
    known: dict[str, Any] = {"__set__": object.__setattr__, "__made__": object()}
    parameters: dict[bool, list[str]] = {False: [], True: []}  # by whether only a name gives them
    lines = []
    for each in fields(cls):
        name, value = each.name, each.name
        default = f"__{name}_default__"
        if each.default is not MISSING:
            known[default] = each.default
        elif each.default_factory is not MISSING:
            known[default] = each.default_factory
        elif not each.init:
            continue
        made = each.default_factory is not MISSING
        if each.init:
            given = "__made__" if made else default
            parameters[bool(each.kw_only)].append(f"{name}={given}" if default in known else name)
            value = f"{default}() if {name} is __made__ else {name}" if made else name
        else:
            value = f"{default}()" if made else default
        lines.append(f"__set__(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    by_name = ["*", *parameters[True]] if parameters[True] else []
    taken = ", ".join(["self", *parameters[False], *by_name])
    exec(f"def __init__({taken}):\n " + "\n ".join(lines or ["pass"]), known)
    init: Callable[..., None] = known["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _comparison(cls: type, frozen: bool) -> dict[str, Any]:
    """Returns equality and hash by the values of fields; what can change has no hash."""
    rows = fields(cls)
    compared = _values([each.name for each in rows if each.compare])
    hashed = _values(
        [each.name for each in rows if (each.compare if each.hash is None else each.hash)]
    )

    def __eq__(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return compared(self) == compared(other)

    def __hash__(self: Any) -> int:
        return hash(hashed(self))

    return {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}


def _values(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function of an object that returns the values of these attributes."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _frozen(cls: type[Any]) -> dict[str, Any]:
    """Returns what refuses to change an object of a class."""
    names = frozenset(each.name for each in fields(cls))

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in fields(self)]


def _set_state(self: Any, state: Sequence[Any]) -> None:
    for each, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)
