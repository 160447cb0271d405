"""A command line of SGLang as data: its options, each with where it comes from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ktcli.assembly.child import option_words
from ktcli.records import dataclass

HIDDEN = "***"
MODULE = "sglang.launch_server"


@dataclass(frozen=True, slots=True)
class EngineOption:
    """An option of the command line.

    Attributes:
        values: (): it is a switch.
        why: where its value comes from, a few words; empty: it needs no reason.
        secret: whether its value is hidden where the line is shown.
    """

    flag: str
    values: tuple[str, ...] = field(default=(), repr=False)  # some are keys
    why: str = ""
    secret: bool = False


@dataclass(frozen=True, slots=True)
class ServerLine:
    """The command line of a server, and its environment.

    Attributes:
        variables: of the environment.
        notes: what the user should know, a sentence each.
    """

    options: tuple[EngineOption, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def words(self, *, hidden: bool = False) -> list[str]:
        """Returns the arguments of the command line after `python -m sglang.launch_server`.

        Args:
            hidden: whether keys are replaced by asterisks.
        """
        found = list[str]()
        for each in self.options:
            values = (HIDDEN,) if hidden and each.secret else each.values
            found += option_words(each.flag, *values)
        return found

    def value(self, flag: str) -> str | None:
        """Returns the first value of a flag in the command line, empty for a switch; None: the flag is not there."""
        found = next((each for each in self.options if each.flag == flag), None)
        return None if found is None else (found.values or ("",))[0]

    def text(self) -> str:
        """Returns the environment and the command line as one line for a shell, keys hidden."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.variables.items()]
        words = [each if each == HIDDEN else shlex.quote(each) for each in self.words(hidden=True)]
        return " ".join([*variables, "python", "-m", MODULE, *words])

    def document(self) -> dict[str, Any]:
        """Returns the command line as an object for --json: `command` (a list of words), `environment` (by name),
        `options` (each with `flag`, `values` and `why`) and `notes`; keys are hidden."""
        return {
            "command": ["python", "-m", MODULE, *self.words(hidden=True)],
            "environment": dict(self.variables),
            "options": [
                {
                    "flag": each.flag,
                    "values": [HIDDEN] if each.secret else [*each.values],
                    "why": each.why or None,
                }
                for each in self.options
            ],
            "notes": [*self.notes],
        }


class LineWriter:
    """Collects the options of a command line, in order."""

    def __init__(self) -> None:
        self.options = list[EngineOption]()
        self.notes = list[str]()

    def add(self, flag: str, *values: object, why: str = "", secret: bool = False) -> None:
        """Adds an option with its values to the command line; `why` says where they come from, and a secret one is
        hidden."""
        self.options.append(EngineOption(flag, tuple(map(str, values)), why, secret))

    def add_if(self, given: bool, flag: str, *values: object, why: str = "") -> None:
        """Adds an option with its values to the command line if `given`."""
        if given:
            self.add(flag, *values, why=why)

    def line(self, variables: Mapping[str, str]) -> ServerLine:
        """Returns the command line of all options and notes that were added, with these environment variables."""
        return ServerLine(tuple(self.options), variables, tuple(self.notes))
