"""The possible completions after each command: its options, its arguments, and their values.

What completes a value follows from its metavar, the word that stands for it in the help.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ktcli.commands.cli.table import COMMANDS, load
from ktcli.records import dataclass
from ktcli.settings import SETTINGS, TABLE

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Values:
    """The values that an option or argument can have.

    Attributes:
        words: literal values.
        names: which names: of models "all", "here" (on disk), "mine" (in the library); "chats"; "gpus"; empty: none.
        files: which files: "any", ".gguf" (folders too), "folders"; empty: none.
    """

    words: tuple[str, ...] = ()
    names: str = ""
    files: str = ""


@dataclass(frozen=True, slots=True)
class Flag:
    """A long option; `values` is None if it takes none."""

    name: str
    help: str
    values: Values | None = None


@dataclass(frozen=True, slots=True)
class Verb:
    """A command line to complete: "pull", or "bench decode".

    Attributes:
        words: the command and its subcommand.
        help: its line in the help.
        argument: the values of its first argument; None: it has none.
        several: whether what completes the first argument completes all of them.
        children: the names of its subcommands.
        follows: the values of its second argument, by that of the first.
    """

    words: str
    help: str
    flags: tuple[Flag, ...]
    argument: Values | None
    several: bool
    children: tuple[str, ...]
    follows: tuple[tuple[str, Values], ...] = ()


def verbs() -> list[Verb]:
    """Returns a `Verb` (words, help, options, arguments) for every command that the help shows; subcommands follow
    their family.
    """
    found = []
    for name, row in COMMANDS.items():
        if row.summary:
            found += _verbs(name, row.summary, load(name))
    return found


def _verbs(words: str, summary: str, command: Any) -> list[Verb]:
    children = getattr(command, "commands", {})
    flags: list[Flag] = []
    arguments = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            arguments.append(parameter)
            continue
        text = _line(getattr(parameter, "help", "") or "")
        values = None if getattr(parameter, "is_flag", False) else values_of(parameter.metavar)
        names = (*parameter.opts, *parameter.secondary_opts)
        flags += [Flag(name, text, values) for name in names if name.startswith("--")]
    flags.append(Flag("--help", "Show this message and exit"))
    first = arguments[0] if arguments else None
    here = Verb(
        words,
        _line(summary),
        tuple(flags),
        _argument(words, str(first.metavar or "")) if first else None,
        first is not None and (first.nargs != 1 or words in _ALIKE),
        tuple(children),
        _follows(words),
    )
    below = [v for n, c in children.items() for v in _verbs(f"{words} {n}", c.help or "", c)]
    return [here, *below]


def _follows(words: str) -> tuple[tuple[str, Values], ...]:
    """The values of a second argument that depend on the first."""
    if words == "completion":
        return tuple((each, Values(SHELLS)) for each in ("install", "uninstall"))
    if words == "config set":
        found = ((s.name, values_of(s.metavar)) for s in TABLE if s.kept)
        return tuple((name, values) for name, values in found if values != Values())
    return ()


def _argument(words: str, metavar: str) -> Values:
    """The values of a command's argument: most commands take a model, some only one that is on disk."""
    if words in ("config set", "config unset"):
        return Values(tuple(setting.name for setting in TABLE if setting.kept))
    if metavar.strip("[].") not in ("MODEL", "NAME"):
        return values_of(metavar.rstrip("."))
    here = ("verify", "convert", "path", "export")
    names = "mine" if words == "rm" else "here" if words in here else "all"
    return Values(names=names, files="any" if words == "export" else ".gguf")


def values_of(metavar: str | None) -> Values:
    """Returns the values that shell completion offers for a metavar: its literal words, and the kinds of names and
    files that its other words stand for. "[auto|cpu|FILE]" gives two words and any file.
    """
    found = Values()
    for word in (metavar or "").strip("[]").split("|"):
        if word in _MEANINGS:
            more = _MEANINGS[word]()
        else:
            literal = word and not re.search(r"[,:=]", word) and word not in _TYPED
            more = Values((word,) if literal else ())
        found = Values(
            (*found.words, *more.words), found.names or more.names, found.files or more.files
        )
    return found


def _formats() -> Values:
    from ktcli.weights.formats import FORMATS

    return Values(tuple(FORMATS))


def _machines() -> Values:
    from ktcli.hardware.profile import shipped

    return Values(tuple(sorted(shipped())))


# Words of metavars that stand for others, and those for what only the user knows.
_MEANINGS: dict[str, Callable[[], Values]] = {
    "FORMAT": _formats,
    "MACHINE": _machines,
    "MODEL": lambda: Values(names="all", files=".gguf"),
    "ALIAS": lambda: Values(names="all", files=".gguf"),  # and after one a model
    "cuda:N": lambda: Values(names="gpus"),
    "CHAT": lambda: Values(names="chats"),
    "SETTING": lambda: Values(tuple(SETTINGS)),
    **{f"FILE{end}": lambda: Values(files="any") for end in ("", ".json", ".tar", ".npy")},
    "DIR": lambda: Values(files="folders"),
}
# Commands whose second argument is completed like the first: a model and then a file, an alias and then a model.
_ALIKE = {"export", "alias"}
_TYPED = {"N", "NAME", "K", "P", "X", "TEXT", "LIST", "ROW", "WORD", "VALUE", "SIZE"}


def _line(text: str) -> str:
    """The first sentence of a help text, on one line, safe between single quotes."""
    first = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<!e\.g)(?<!i\.e)\.(?: (?=[A-Z])|$)", first)[0]
    return sentence.replace("'", "’").replace("`", "")
