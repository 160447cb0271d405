"""`kt chats`: list saved conversations, and change them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ktcli.chat import chats
from ktcli.chat.chats import Listed
from ktcli.chat.conversation import Saved
from ktcli.chat.document import markdown_of, text_of
from ktcli.commands.cli.declarations import argument, option, require_yes
from ktcli.commands.cli.options import CommandFamily, JsonOpt, QuietOpt, YesOpt
from ktcli.commands.view.amounts import age
from ktcli.errors import UsageError
from ktcli.output import out, safe

BEGINS = 48  # characters of the first question in a list
CHOICES = 10  # chats to choose from

app = CommandFamily(invoke_without_command=True)
ChatArg = Annotated[str, argument("CHAT", "Name or its beginning, 'last', or the path of a file.")]


@app.callback()
def chats_list(context: typer.Context, json: JsonOpt = False, quiet: QuietOpt = False) -> None:
    """List saved conversations, and change them.

    Every chat on the terminal is saved as it goes, in a file of its own. kt chat --continue
    continues the last one, kt chat --resume CHAT any of them.

    Examples:

      kt chats                              all of them, the last one first
      kt chats show last
      kt chats export last --format md > talk.md
      kt chats rename 2026-11-22-195454 holiday
    """
    if context.invoked_subcommand is not None:
        return
    lines = [chats.line_of(path) for path in chats.files()]
    out.result(
        {"folder": str(chats.chats_folder()), "chats": list(map(_row, lines))},
        lambda: listed(lines),
    )
    if not lines:
        out.note(f"No chat has been saved in {chats.chats_folder()} yet.")


@app.command()
def show(chat: ChatArg) -> None:
    """Show the messages of a conversation.

    Examples:

      kt chats show last
      kt chats show holiday | less
    """
    path = chats.find(chat)
    saved = chats.load(path)
    out.result(_document(path, saved), lambda: _as_text(saved))


@app.command()
def search(
    words: Annotated[list[str], argument("TEXT...", "Words to find; all of them must occur.")],
) -> None:
    """List the conversations that contain all of the words, yours or the model's.

    Examples:

      kt chats search holiday
      kt chats search numa threads --json
    """
    found = [
        (chats.line_of(path), said) for path in chats.files() if (said := chats.said(path, words))
    ]
    out.result(
        {"chats": [{**_row(line), "said": said} for line, said in found]},
        lambda: _found(found),
    )
    if not found:
        out.note(f"No saved conversation contains {' and '.join(map(repr, words))[:200]}.")


@app.command()
def rm(
    names: Annotated[list[str], argument("CHAT...", "Names, as kt chats shows them.")],
    yes: YesOpt = False,
) -> None:
    """Remove conversations.

    Examples:

      kt chats rm holiday
      kt chats rm 2026-11-22-195454 2026-11-23-101500 --yes
    """
    paths = list(dict.fromkeys(_in_library(name) for name in names))
    names = [path.stem for path in paths]
    require_yes(f"Remove {', '.join(names)}?")
    for path in paths:
        chats.remove(path)
    out.result({"removed": names}, f"Removed {safe(', '.join(names))}.")


@app.command()
def export(
    chat: ChatArg,
    form: Annotated[str, option("--format md|json", "Markdown, or JSON that /load reads.")] = "md",
) -> None:
    """Print a conversation as a document.

    Examples:

      kt chats export last > talk.md
      kt chats export holiday --format json > holiday.json
    """
    if form not in _FORMS:
        raise UsageError(f"unknown format {form[:40]!r}", hint=f"use one of {', '.join(_FORMS)}")
    path = chats.find(chat)
    text = _FORMS[form](chats.load(path))
    out.result({"name": path.stem, "format": form, "text": text}, text, exact=True)


@app.command()
def rename(chat: ChatArg, name: Annotated[str, argument("WORD", "The new name.")]) -> None:
    """Rename a conversation.

    Examples:

      kt chats rename last holiday
    """
    path = _in_library(chat)
    chats.require_closed(path)
    target = chats.rename(path, name)
    document = {"name": target.stem, "before": path.stem, "path": str(target)}
    out.result(document, f"{safe(path.stem)} is now called {safe(target.stem)}.")


def _in_library(name: str) -> Path:
    """The file of a chat that may be changed.

    Raises:
        UsageError: it lies elsewhere.
    """
    path = chats.find(name)
    if path.parent.resolve() != chats.chats_folder().resolve():
        raise UsageError(f"{path} is not in the library folder, so kt will not change it")
    return path


def chosen() -> Path:
    """Lets the user choose one of the CHOICES (10) last used chats by number on the terminal; returns the path of its
    file.

    Raises:
        UsageError: there is no terminal or no saved chat, or the answer is none of the numbers.
    """
    paths = [path for path in chats.files() if chats.kept_itself(path)][:CHOICES]
    if not paths:
        raise UsageError("no chat has been saved yet", hint=chats.saved_hint())
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("--resume needs the name of a chat", hint=chats.saved_hint())
    out.note(listed([chats.line_of(path) for path in paths], numbered=True))
    return paths[out.choose("Which one?", len(paths)) - 1]


# --- what is shown ----------------------------------------------------------------------------------


def listed(lines: list[Listed], *, numbered: bool = False) -> str:
    """Returns a table of saved chats with their names, last use, models, turns, tokens and first words; empty if there
    are none. `numbered`: with a first column of numbers to choose by.
    """
    rows = []
    for number, line in enumerate(lines, 1):
        words = line.problem or " ".join(line.begins[: 4 * BEGINS].split())
        cut = f"{words[:BEGINS]}…" if len(words) > BEGINS and not line.problem else words
        counts = ("", "") if line.problem else (str(line.questions), _count(line.tokens))
        name = f"{line.name} (open)" if line.is_open else line.name
        used = age(time.time() - line.used_s)
        rows.append((str(number), name, used, line.model, *counts, cut)[not numbered :])
    head = ("", "NAME", "USED", "MODEL", "TURNS", "TOKENS", "BEGINS")[not numbered :]
    right = [head.index(each) for each in ("", "TURNS", "TOKENS") if each in head]
    return out.table(rows, head, right=right) if rows else ""


def _found(found: list[tuple[Listed, str]]) -> str:
    rows = [(line.name, age(time.time() - line.used_s), said) for line, said in found]
    return out.table(rows, ("NAME", "USED", "SAID")) if rows else ""


def _count(tokens: int | None) -> str:
    return "" if tokens is None else f"{tokens:,}"


def _row(line: Listed) -> dict[str, Any]:
    return {
        "name": line.name,
        "path": str(line.path),
        "used_s": line.used_s,
        "size_bytes": line.size_bytes,
        "model": line.model,
        "turns": line.questions,
        "tokens": line.tokens,
        "begins": line.begins[:200],
        "open": line.is_open,
        "problem": line.problem,
    }


def _document(path: Path, saved: Saved) -> dict[str, Any]:
    return {
        "name": path.stem,
        "path": str(path),
        "model": saved.model,
        "pack": saved.identity.pack,
        "system": saved.conversation.system,
        "turns": saved.conversation.turns,
        "tokens": saved.tokens,
        "unfinished": saved.unfinished,
        "damaged_lines": saved.damaged,
    }


def _as_text(saved: Saved) -> str:
    names = {"system": "system", "user": "you", "assistant": saved.model or "the model"}
    said = [f"{names[m['role']]}:\n{m['content']}\n" for m in saved.conversation.messages]
    if saved.damaged:
        said.append(f"({saved.damaged} damaged lines of the file were skipped)\n")
    return "\n".join(said) or "(empty conversation)"


_FORMS: dict[str, Callable[[Saved], str]] = {"md": markdown_of, "json": text_of}
