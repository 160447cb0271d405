"""The distribution of weights and threads over NUMA nodes: the value of `--numa` and of KT_NUMA.

    auto         a team per node that has cores and memory we may use (the default)
    off          one team over all cores; its memory lies where the system puts it
    N            N teams (1..16): more than nodes split a node, fewer put neighbours together
    nodes=LIST   a team on each of these nodes only, e.g. nodes=0,2-3

The teams that it gives on a machine are decided in `team`.
"""

from __future__ import annotations

import re

from ktcli import config
from ktcli.errors import UsageError
from ktcli.hardware.text import cpu_list, cpu_text
from ktcli.records import dataclass

MAX_TEAMS = 64  # teams of a pool: KT_MAX_NODES of kt.h
_MOST_ASKED = 16  # the largest count; no machine with more nodes was there to try splitting on
_HINT = f"--numa takes auto, off, a number of teams from 1 to {_MOST_ASKED}, or nodes=LIST, e.g. nodes=0,2-3"


@dataclass(frozen=True, slots=True)
class Numa:
    """A parsed value of `--numa`: the number of teams, and whether memory is bound to them.

    Attributes:
        teams: the number of teams; None: one per node.
        bound: whether memory is bound to the teams that read it; False only for `off`.
        nodes: OS numbers of the only nodes to use, ascending; (): all there are.
    """

    teams: int | None = None
    bound: bool = True
    nodes: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The value as on the command line."""
        if not self.bound:
            return "off"
        if self.nodes:
            return f"nodes={cpu_text(self.nodes)}"
        return "auto" if self.teams is None else str(self.teams)


AUTO = Numa()
OFF = Numa(teams=1, bound=False)


def parse_numa(text: str, source: str = "--numa") -> Numa:
    """Returns the number of thread teams and the NUMA nodes that a value of --numa or KT_NUMA asks for.

    Args:
        source: the name of the option or variable, for the error message.
    Raises:
        UsageError: the text is not auto, off, a number of teams or nodes=LIST.
    """
    word = text.strip().lower()
    if word in ("auto", "off"):
        return AUTO if word == "auto" else OFF
    if re.fullmatch(r"[0-9]{1,9}", word):
        if not 1 <= int(word) <= _MOST_ASKED:
            raise UsageError(f"{source} must be 1 to {_MOST_ASKED} teams, not {word}", hint=_HINT)
        return Numa(teams=int(word))
    name, equals, numbers = word.partition("=")
    if (
        name == "nodes"
        and equals
        and re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", numbers)
    ):
        try:
            nodes = cpu_list(numbers)
        except ValueError:  # a number no machine has, or too long for one
            nodes = ()
        if nodes:
            return Numa(nodes=nodes)
    raise UsageError(f"{source} is {text[:60]!r}, which does not select any nodes", hint=_HINT)


def asked_numa(option: str | None) -> Numa:
    """Returns the parsed value of --numa (`option`) if it is given, else of the setting `numa` or KT_NUMA, else `AUTO`.

    Raises:
        UsageError: the value is not auto, off, a number of teams or nodes=LIST.
    """
    if option is not None:
        return parse_numa(option)
    said = config.stated("numa")
    return parse_numa(said.text, said.source) if said.text else AUTO
