"""Separates the model from the prompt on a `kt chat` command line, and assembles the prompt."""

from __future__ import annotations

import sys
from pathlib import Path

from ktcli.commands.cli.piped import is_piped, is_typed, standard_input
from ktcli.errors import NotFound, UsageError
from ktcli.store import library
from ktcli.store.entry import BUILTIN
from ktcli.store.reference import parse

GREETING = "Hello!"  # what is said to the model when nobody says anything
PIPE = "-"  # a prompt that is all on standard input


def who_and_what(
    name: str | None, prompt: str | None, default: str = BUILTIN
) -> tuple[str, str | None]:
    """Returns the model and the prompt that a command line names; the prompt is None in an interactive chat.

    One argument is a model if it can be one, else a prompt for the default model if it contains white
    space.

    Raises:
        UsageError, NotFound: it is neither; the hint has the nearest names.
    """
    if name is None or prompt is not None:
        return default if name is None else name, prompt
    if not name.strip():
        return default, None
    if name == PIPE:
        return default, PIPE
    try:
        reference = parse(name)
        if not reference.repository:  # of formats that are not there yet the conversion is made
            library.matching(reference.name or name) or library.resolve(name)
        return name, None
    except (UsageError, NotFound) as error:
        if any(letter.isspace() for letter in name):
            return default, name
        say = f'to send this to the built-in model: kt chat {BUILTIN} "{name[:40]}"'
        error.hint = f"{error.hint}; {say}" if error.hint else say
        raise


def words_for_model(prompt: str | None, option: str) -> str | None:
    """Returns the prompt for the model: that of the command line, with the text on standard input below it; None: an
    interactive chat.

    Args:
        option: one that needs a prompt; empty: none.
    Raises:
        UsageError: there is nothing to say, or a file that the prompt names cannot be read.
    """
    from ktcli.terminal import attachments

    if prompt is None:
        if not is_terminal():
            words = standard_input()
            if not words and is_piped():
                raise UsageError(
                    "standard input is empty", hint='for example: git diff | kt chat "review this"'
                )
            return words or GREETING
        if option:
            raise UsageError(
                f"{option} needs a prompt", hint=f'for example: kt chat "Hello!" {option}'
            )
        return None
    if prompt == PIPE:
        words, empty = standard_input(), "standard input is empty"
    else:
        prompt = attachments.joined(*attachments.named_in(prompt))
        piped = "" if is_typed() else standard_input(beside=True)
        words, empty = (
            "\n\n".join(part for part in (prompt, piped) if part.strip()),
            "the prompt is empty",
        )
    if not words:
        raise UsageError(empty, hint=f'for example: kt chat {BUILTIN} "Hello!"')
    return words


def lasting_name(model: str) -> str:
    """Returns the name that finds a model again from any folder."""
    path = Path(model).expanduser()
    is_path = model.startswith((".", "~", "/")) or model.endswith(".gguf")
    return str(path.absolute()) if is_path and path.exists() else model


def is_terminal() -> bool:
    """Returns whether standard input and output are both a terminal."""
    try:
        return is_typed() and sys.stdout.isatty()
    except ValueError:  # closed
        return False
