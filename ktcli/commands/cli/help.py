"""The help of a command as data and as text: its arguments and options with their meaning, in a terminal of any
width.

The reference in docs/ is made of the same data. Nothing is wider than the terminal: text is broken between words,
an example as a shell lets it be broken, and where two columns do not fit the second goes below the first.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import Any

MOST_COLUMNS = 100  # longer lines are hard to read
_LEAST_COLUMNS = 24  # a narrower terminal breaks lines by itself
_MOST_NAMES = 32  # columns of the names of options; longer ones stand alone
_OPTION_VALUE = re.compile(r"(--[\w-]+) (?!-)")
_GLUE = "\x1f"  # holds an option and its value together
_COMMENT = "   "  # comes before what an example's line says of it


def columns() -> int:
    """Returns the width in columns for which help is written: that of the terminal, but 24 to 100."""
    return max(_LEAST_COLUMNS, min(shutil.get_terminal_size().columns, MOST_COLUMNS))


def usage(command: Any) -> str:
    """Returns the part of a command's usage line that follows the command's name: "[OPTIONS] NAME"."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    shown = [_argument(each) for each in arguments]
    if not shown and getattr(command, "commands", {}):
        shown = ["COMMAND"]
    options = any(p.param_type_name == "option" for p in command.params)
    return " ".join([*(["[OPTIONS]"] if options else []), *shown])


def _argument(parameter: Any) -> str:
    word = str(parameter.metavar).strip("[]")
    return word if parameter.required else f"[{word}]"


def meaning(parameter: Any) -> tuple[str, str]:
    """Returns two texts for the help on a parameter: its names with its metavar ("-n, --tokens N"), and its help text
    with its default.
    """
    if parameter.param_type_name == "argument":
        names = str(parameter.metavar).strip("[]")
    else:
        names = ", ".join([*sorted(parameter.opts, key=len), *parameter.secondary_opts])
        if not getattr(parameter, "is_flag", False):
            names += f" {parameter.metavar}"
    text = " ".join(str(parameter.help).split())
    default = getattr(parameter.default, "value", parameter.default)
    says = (
        isinstance(default, (int, float, str)) and not isinstance(default, bool) and default != ""
    )
    if says and "Default" not in text:
        text += f" Default: {default}."
    return names, text


def paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs of a command's docstring; consecutive examples, indented by spaces, are one paragraph."""
    examples: list[str] = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("  "):
            examples.append(paragraph)
            continue
        if examples:
            yield "\n".join(examples)
            examples = []
        if paragraph.strip() != "Examples:":
            yield " ".join(paragraph.split())
    if examples:
        yield "\n".join(examples)


def render(words: str, command: Any, parameters: Iterable[Any], width: int) -> str:
    """Returns the text of a command's help: usage, description, arguments, options, subcommands.

    Args:
        words: the words that call the command: "kt bench decode".
        parameters: its arguments and options, including --help.
        width: the columns of the terminal.
    """
    parts = [wrapped(f"Usage: {words} {usage(command)}", width, " " * 7)]
    for paragraph in paragraphs(command.help or ""):
        if paragraph.startswith("  "):
            lines = [line[2:] for line in paragraph.splitlines()]
            parts.append("Examples:\n" + "\n".join(example(line, width) for line in lines))
        else:
            parts.append(wrapped(paragraph, width))
    known = list(parameters)
    for heading, kind in (("Arguments", "argument"), ("Options", "option")):
        rows = [meaning(each) for each in known if each.param_type_name == kind]
        if rows:
            parts.append(f"{heading}:\n{listed(rows, width)}")
    verbs = [
        (name, next(paragraphs(child.help or ""), ""))
        for name, child in getattr(command, "commands", {}).items()
    ]
    if verbs:
        parts.append(f"Commands:\n{listed(verbs, width)}")
    return "\n\n".join(parts)


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Returns a text broken into lines of at most `width` columns; those after the first begin with `indent`."""
    lines = wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)


def example(line: str, width: int) -> str:
    """Returns the example of a command line indented by two spaces; one that is too long is continued on further lines
    with backslashes.
    """
    command, _, comment = line.partition(_COMMENT)
    if len(line) + 2 <= width:
        return f"  {line}"
    parts = wrap(
        _OPTION_VALUE.sub(rf"\1{_GLUE}", command),
        width - 4,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    said = "  " + " \\\n  ".join(parts).replace(_GLUE, " ")
    if comment.strip():
        lines = wrap(comment.strip(), width - 6)
        said += "".join(f"\n      {each}" for each in lines)
    return said


def listed(rows: Iterable[tuple[str, str]], width: int) -> str:
    """Returns the text of a list of names and their meanings: in two columns where both have room, else one below the
    other.
    """
    known = list(rows)
    first = max((len(name) for name, _ in known if len(name) <= _MOST_NAMES), default=0)
    beside = first + 4 <= width // 2
    indent = " " * (first + 4 if beside else 6)
    lines: list[str] = []
    for name, text in known:
        if beside and len(name) <= first:
            lines += wrap(
                text, width, initial_indent=f"  {name:<{first}}  ", subsequent_indent=indent
            ) or [f"  {name}"]
        else:
            lines += wrap(
                name, width, initial_indent="  ", subsequent_indent=" " * 4, break_on_hyphens=False
            )
            lines += wrap(text, width, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)
