"""The flags of SGLang's command line as data: recorded ones of the tested version, and a parser made from any.

profiles/engines/sglang-kt.json       written by `python -m benchmarks.peers.sglang_flags`; facts, no code

A command line is checked against the engine that is to take it, whose flags are read from its own source; nothing is
run. A flag that is gone or renamed, that reads another kind of value, or that does not take this value any more is
refused with its name; so is a flag that the engine has come to require.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NoReturn

import msgspec

from ktcli.errors import KtError, UsageError
from ktcli.records import dataclass
from ktcli.resources import data_path
from ktcli.server.sglang.line import EngineOption, ServerLine

# What a value is read as; `OTHER` is a function of the engine's own, which takes any text here.
SWITCH, TEXT, WHOLE, NUMBER, JSON, OTHER = "switch", "text", "int", "float", "json", "other"
Value = str | int | float | bool | None | list[Any] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineFlag:
    """One flag of the engine's command line.

    Attributes:
        names: all its spellings, such as "--model-path" and "--model".
        kind: what a value is read as; SWITCH: it takes none.
        nargs: "+", "*" or "?" where it takes other than one value; else empty.
        choices: the values that it takes; None: any, or they are not written in the source.
        default: its value where it is not given; None: none, or it is not written in the source.
    """

    names: tuple[str, ...]
    kind: str
    nargs: str = ""
    choices: tuple[str | int, ...] | None = None
    default: Value = None
    required: bool = False


@dataclass(frozen=True, slots=True)
class FlagTable:
    """The flags of one version of the engine.

    Attributes:
        version: the engine's; empty: not known.
        architectures: the classes of models that it has, as a config.json names them.
    """

    version: str
    flags: tuple[EngineFlag, ...]
    architectures: tuple[str, ...] = ()

    def by_name(self) -> dict[str, EngineFlag]:
        """Returns the flags of the engine's command line by each of their spellings, such as `--model-path`."""
        return {name: flag for flag in self.flags for name in flag.names}


@cache
def recorded() -> FlagTable:
    """Returns the flags of SGLang's command line in the version that kt was tested with."""
    data = data_path("profiles", "engines", "sglang-kt.json").read_bytes()
    return msgspec.json.decode(data, type=FlagTable)


def parser_of(flags: Iterable[EngineFlag]) -> argparse.ArgumentParser:
    """Returns an argument parser for a command line with exactly these flags, without abbreviations."""
    parser = _Parser(prog="sglang.launch_server", add_help=False, allow_abbrev=False)
    for flag in flags:
        more: dict[str, Any] = {"required": flag.required} if flag.required else {}
        if flag.kind == SWITCH:
            parser.add_argument(*flag.names, action="store_true", **more)
            continue
        if flag.nargs:
            more["nargs"] = flag.nargs
        parser.add_argument(*flag.names, type=_READERS[flag.kind], choices=flag.choices, **more)
    return parser


_READERS: dict[str, Callable[[str], Any]] = {
    TEXT: str,
    WHOLE: int,
    NUMBER: float,
    JSON: json.loads,
    OTHER: str,
}


class _Parser(argparse.ArgumentParser):
    """A parser that raises where argparse ends the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def require_parsed(words: Sequence[str], table: FlagTable) -> None:
    """Raises an error unless a parser of these flags accepts the arguments of a command line.

    Raises:
        UsageError: the parser rejects them, with argparse's message.
    """
    parser_of(table.flags).parse_args(list(words))


class OtherFlags(KtError):
    """Raised when the installed engine does not accept kt's command line."""


def require_accepted(line: ServerLine, found: FlagTable, tested: FlagTable) -> None:
    """Raises an error unless an engine accepts a command line, with the same meaning as in the tested version.

    Args:
        found, tested: the flags of the engine that is to run, and of the version that kt was tested with.
    Raises:
        OtherFlags: the engine does not accept it; the error names the flag.
    """
    have, known = found.by_name(), tested.by_name()
    for option in line.options:
        if why := _why_not(option, have.get(option.flag), known[option.flag]):
            raise _refused(f"{option.flag} {why}")
    given = {option.flag for option in line.options}
    for flag in found.flags:
        if flag.required and given.isdisjoint(flag.names):
            raise _refused(f"{flag.names[0]} is required")
    try:
        require_parsed(line.words(), found)
    except UsageError as error:
        raise _refused(str(error)) from error


def _why_not(option: EngineOption, found: EngineFlag | None, tested: EngineFlag) -> str:
    """Returns in which way a flag is not what it was; empty: it is."""
    if found is None:
        return "is gone or renamed"
    if found.kind != tested.kind:
        return f"takes {_words(found)} now, not {_words(tested)}"
    if found.nargs != tested.nargs:
        return "takes another number of values now"
    if found.choices is not None:
        strange = [each for each in option.values if each not in map(str, found.choices)]
        if strange:
            return (
                f"does not take {strange[0]!r} any more, only {', '.join(map(str, found.choices))}"
            )
    return ""


def _words(flag: EngineFlag) -> str:
    return "no value" if flag.kind == SWITCH else f"a value of type {flag.kind}"


def _refused(what: str) -> OtherFlags:
    return OtherFlags(
        f"the installed sglang-kt has other flags than this kt was tested with: {what}",
        hint="install the tested version: kt engine rm sglang-kt, then kt engine install sglang-kt",
    )
