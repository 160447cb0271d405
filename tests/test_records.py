"""Data classes of `ktcli.records` keep the laws of `dataclasses`, which is asked the same questions."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import KW_ONLY, field
from typing import Any, ClassVar

import pytest

from ktcli import records

OPTIONS = [
    {},
    {"frozen": True},
    {"slots": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "slots": True, "eq": False},
    {"slots": True, "weakref_slot": True},
]


def made(decorate: Callable[..., Any], **options: bool) -> type:
    """Returns a class with every kind of field, made by one of the two."""

    @decorate(**options)
    class Base:
        """A base."""

        first: int
        names: list[str] = field(default_factory=list, compare=False)
        limit: ClassVar[int] = 3

    @decorate(**options)
    class Made(Base):
        """A class."""

        word: str = "w"
        hidden: float = field(default=0.5, repr=False)
        own: dict[str, int] = field(default_factory=dict, init=False, hash=False)
        ten: int = field(default=10, init=False)
        _: KW_ONLY
        flag: bool
        size: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            if self.first < 0:
                raise ValueError("negative")

    return Made


def answer(ask: Callable[[type], Any], cls: type) -> Any:
    """What a question gives, or the error that it ends with."""
    try:
        return ask(cls)
    except (TypeError, ValueError, AttributeError) as error:
        return type(error), str(error)


def changed(cls: type, change: Callable[[Any], Any]) -> Any:
    made = cls(1, flag=True)
    change(made)
    return repr(made)


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "repr": lambda cls: repr(cls(1, ["a"], "b", flag=True)),
    "values": lambda cls: dataclasses.asdict(cls(1, flag=False, size=(2,))),
    "a default for each": lambda cls: cls(1, flag=True).names is cls(1, flag=True).names,
    "a missing value": lambda cls: cls(),
    "a missing name": lambda cls: cls(1),
    "too many": lambda cls: cls(1, [], "w", 0.1, {}, flag=True),
    "an unknown name": lambda cls: cls(1, flag=True, colour=2),
    "post init": lambda cls: cls(-1, flag=True),
    "equal": lambda cls: cls(1, ["a"], flag=True) == cls(1, ["b"], flag=True),
    "unequal": lambda cls: cls(1, flag=True) == cls(1, flag=False),
    "another class": lambda cls: cls(1, flag=True) == 1,
    "one hash": lambda cls: hash(cls(1, flag=True)) == hash(cls(1, ["a"], flag=True)),
    "replace": lambda cls: repr(dataclasses.replace(cls(1, flag=True), word="x")),
    "copy": lambda cls: repr(copy.copy(cls(1, ["a"], flag=True))),
    "deepcopy": lambda cls: repr(copy.deepcopy(cls(1, ["a"], flag=True))),
    "assign": lambda cls: changed(cls, lambda made: setattr(made, "first", 2)),
    "delete": lambda cls: changed(cls, lambda made: delattr(made, "first")),
    "match": lambda cls: cls.__match_args__,
    "slots": lambda cls: getattr(cls, "__slots__", None),
    "fields": lambda cls: [(f.name, f.type, f.kw_only) for f in dataclasses.fields(cls)],
    "in itself": lambda cls: repr((one := cls(1, flag=True)).names.append(one) or one),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_classes_answer_as_those_of_dataclasses(options: dict[str, bool], question: str) -> None:
    ask = QUESTIONS[question]
    ours, theirs = made(records.dataclass, **options), made(dataclasses.dataclass, **options)
    said = answer(ask, theirs)
    for _ in range(records._FEW + 1):  # then the constructor is a compiled one
        assert answer(ask, ours) == said


@pytest.mark.parametrize("slots", [False, True])
def test_nothing_can_be_added_to_what_is_frozen(slots: bool) -> None:
    """`dataclasses` of Python 3.11 fails here in its own code where there are slots."""
    cls = made(records.dataclass, frozen=True, slots=slots)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'colour'"):
        cls(1, flag=True).colour = 2


@records.dataclass(frozen=True, slots=True)
class Pair:
    """A class that pickle finds."""

    one: int
    two: str = "2"


def test_objects_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Pair(1))) == Pair(1)


def test_what_a_class_has_of_its_own_stays() -> None:
    @records.dataclass(frozen=True)
    class Own:
        """A class with methods that are made otherwise."""

        one: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

    class Under(Own):
        """Has an attribute that is no field."""

        def __init__(self) -> None:
            super().__init__(1)
            self.colour = "red"

    assert repr(Own(1)) == "own" and Own(1) == Own(2)
    assert hash(Own(1)) == hash(Own(1)) != hash(Own(2))
    assert (Under().one, Under().colour) == (1, "red")


def test_a_class_costs_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled before a few objects were made, and then one constructor for all."""
    ran = list[str]()
    compiled = records._compiled
    monkeypatch.setattr(records, "_compiled", lambda *a: ran.append(a[0].__name__) or compiled(*a))
    cls = made(records.dataclass, frozen=True, slots=True)
    few = [cls(each, flag=True) for each in range(records._FEW)]
    assert ran == []
    assert [cls(each, flag=True) for each in range(records._FEW)] == few
    assert ran == ["Made"]
