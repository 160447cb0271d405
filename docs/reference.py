"""Writes docs/commands.md and docs/kt.1, the man page: every command, option, setting and exit code; and the same
as data, with formats, families, models and pages, for kt-mini to learn (profiles/kt-mini/recipe/facts/tables.json) and
to be told where it has not learned them (profiles/kt-mini/rows.json).

    python docs/reference.py

Nothing in them is written by hand: commands and options come from the commands themselves, settings from their table,
codes from theirs. A test fails when they are stale.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktcli.commands.cli.help import meaning, paragraphs, usage
from ktcli.commands.cli.table import COMMANDS, load
from ktcli.errors import ExitCode
from ktcli.models import families
from ktcli.settings import OTHER_VARIABLES, TABLE
from ktcli.store import catalog
from ktcli.terminal import slash
from ktcli.weights.formats import FORMATS

HERE = Path(__file__).parent
PAGE, MANUAL = HERE / "commands.md", HERE / "kt.1"
RECIPE = HERE.parent / "profiles" / "kt-mini" / "recipe"
DATA = RECIPE / "facts" / "tables.json"
TITLE = "run Mixture-of-Experts models far larger than your VRAM on one machine"
ORDER = "An environment variable overrides the settings file; a command-line option overrides both."
DASH = r"\-"  # a hyphen that is a part of a word to type
DOCTOR = "kt doctor exits with 0: good; 1: usable, with warnings; or 2: kt cannot run here."


@dataclass(frozen=True, slots=True)
class Entry:
    """A command as the reference shows it.

    Attributes:
        words: "kt bench decode".
        usage: what follows them: "[OPTIONS] MODEL".
        paragraphs: its help; those that begin with spaces are examples.
        options: names with the word for the value, and meaning.
    """

    words: str
    usage: str
    paragraphs: tuple[str, ...]
    options: tuple[tuple[str, str], ...]


def entries() -> list[Entry]:
    """Every command that the help shows, subcommands after their family."""
    shown = [name for name, row in COMMANDS.items() if row.summary]
    return [entry for name in shown for entry in _entries(f"kt {name}", load(name))]


def _entries(words: str, command: Any) -> Iterator[Entry]:
    children = getattr(command, "commands", {})
    kinds = ("argument", "option")
    parameters = sorted(command.params, key=lambda p: kinds.index(p.param_type_name))
    yield Entry(
        words,
        usage(command),
        tuple(paragraphs(command.help or "")),
        tuple(meaning(each) for each in parameters),
    )
    for name, child in children.items():
        yield from _entries(f"{words} {name}", child)


# --- Markdown -----------------------------------------------------------------------------------------


def page() -> str:
    """The text of docs/commands.md."""
    found = entries()
    parts = [
        "# Commands, settings, exit codes",
        f"`kt`: {TITLE}. This page is generated: `python docs/reference.py`; `man kt` says the same.",
        "- "
        + "\n- ".join(
            f"[{e.words}](#{e.words.replace(' ', '-')}): {e.paragraphs[0]}" for e in found
        ),
    ]
    for entry in found:
        parts += [f"## {entry.words}", f"`{entry.words} {entry.usage}`"]
        parts += [_block(each) for each in entry.paragraphs]
        if entry.options:
            parts.append(table(("option", "meaning"), entry.options))
    settings = [
        (s.name, s.variable, s.domain.allowed, s.default, s.help + ("" if s.kept else " Not kept."))
        for s in TABLE
    ]
    codes = [(str(int(code)), f"{code.meaning}") for code in ExitCode]
    parts += [
        "## Settings",
        f"{ORDER} `kt config` shows and changes them; those that are not kept are for trials.",
        table(("setting", "variable", "can be", "default", "meaning"), settings, code=2),
        "Other variables that kt heeds:",
        table(("variable", "meaning"), OTHER_VARIABLES.items()),
        "## Exit codes",
        table(("code", "meaning"), codes),
        DOCTOR,
    ]
    return "\n\n".join(parts) + "\n"


def _block(paragraph: str) -> str:
    if not paragraph.startswith("  "):
        return re.sub(r"([<>])", r"\\\1", paragraph)
    return "```\n" + re.sub(r"(?m)^  ", "", paragraph) + "\n```"


def table(head: tuple[str, ...], rows: Any, code: int = 1) -> str:
    """A table whose first `code` columns are literal."""

    def cell(at: int, text: str) -> str:
        text = text.replace("|", "\\|")
        return f"`{text}`" if at < code else re.sub(r"([<>])", r"\\\1", text)

    lines = [" | ".join(cell(at, text) for at, text in enumerate(row)) for row in rows]
    return "\n".join(
        f"| {line} |" for line in [" | ".join(head), "|".join(["---"] * len(head)), *lines]
    )


# --- roff ---------------------------------------------------------------------------------------------


def manual() -> str:
    """The text of the man page."""
    lines = [
        '.TH KT 1 "" "kt" "User Commands"',
        ".nh",
        ".ad l",
        ".SH NAME",
        f"kt \\- {_roff(TITLE)}",
    ]
    lines += [
        ".SH SYNOPSIS",
        ".B kt",
        r"\fICOMMAND\fR [\fIOPTIONS\fR] [\fIARGUMENTS\fR]",
        ".SH COMMANDS",
    ]
    for entry in entries():
        lines += [f".SS {_roff(entry.words)} {_roff(entry.usage)}".rstrip()]
        for paragraph in entry.paragraphs:
            lines += _roff_paragraph(paragraph)
        lines += _items(entry.options)
    settings = [
        (
            s.name,
            f"{s.help} It can be {s.domain.allowed}. Default: {s.default}. Variable: {s.variable}.",
        )
        for s in TABLE
        if s.kept
    ]
    trials = [(s.variable, f"{s.help} Default: {s.default}.") for s in TABLE if not s.kept]
    lines += [
        ".SH SETTINGS",
        _roff(f"{ORDER} kt config shows and changes them."),
        *_items(settings),
    ]
    lines += [".SH ENVIRONMENT", "Each setting has a variable; there are others:"]
    lines += _items([*trials, *OTHER_VARIABLES.items()])
    lines += [
        ".SH EXIT STATUS",
        *_items((str(int(c)), f"{c.meaning[0].upper()}{c.meaning[1:]}.") for c in ExitCode),
    ]
    lines += [".P", _roff(DOCTOR), ".SH FILES"]
    lines += _items(
        [
            ("~/.config/kt/config.toml", "Settings."),
            ("~/.local/share/kt", "Models, chats and KV pages."),
        ]
    )
    return "\n".join(lines) + "\n"


_ROFF = {"…": "...", "→": "\\(->", "×": "\\(mu", "–": "\\(en", "’": "'"}


def _roff(text: str) -> str:
    plain = text.replace("\\", "\\e").replace("-", DASH).replace("~", "\\(ti").replace("^", "\\(ha")
    plain = "".join(c if c.isascii() else _ROFF.get(c, "?") for c in plain.replace("`", "\\(ga"))
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain


def _roff_paragraph(paragraph: str) -> list[str]:
    if not paragraph.startswith("  "):
        return [".P", _roff(paragraph)]
    return [
        ".P",
        ".RS 4",
        ".nf",
        *(_roff(line[2:]) for line in paragraph.splitlines()),
        ".fi",
        ".RE",
    ]


def _items(items: Any) -> list[str]:
    return [line for name, text in items for line in (".TP", f".B {_roff(name)}", _roff(text))]


# --- data ---------------------------------------------------------------------------------------------


def data() -> str:
    """The text of tables.json: by table, rows of strings that each begin with what the row is known by."""
    found = entries()
    options: dict[tuple[str, str], list[str]] = {}
    for entry in found:
        for names, text in entry.options:
            if names.startswith("-"):
                options.setdefault((names, text), []).append(entry.words)
    models = [
        (name, profile) for name in catalog.names() if (profile := catalog.get(name)).parameters
    ]
    tables: dict[str, list[list[str]]] = {
        "commands": [[e.words, e.paragraphs[0]] for e in found],
        "options": [[names, text, *words] for (names, text), words in options.items()],
        "settings": [[s.name, s.variable, s.option, s.default, s.help] for s in TABLE],
        "variables": [
            [n, text] for names, text in OTHER_VARIABLES.items() for n in names.split(", ")
        ],
        "codes": [[str(int(code)), code.meaning] for code in ExitCode],
        "slash": [[f"/{name}", row.usage, row.meaning] for name, row in slash.TABLE.items()]
        + [
            [f"/{a}", "", f"the same as /{name}"]
            for a, name in slash.ALIASES.items()
            if a.isalpha()
        ],
        "formats": [[f.name, str(f.bits), str(f.group or "")] for f in FORMATS.values()],
        "families": [[name, *types] for name, types in families().items()],
        "models": [
            [name, p.title, p.license, str(p.parameters), str(p.download_bytes)]
            for name, p in models
        ],
        "pages": [[f"docs/{p.name}", _title(p)] for p in sorted(HERE.glob("*.md"))],
    }
    rows = [
        f"{json.dumps(table)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]"
        for table, rows in tables.items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


if __name__ == "__main__":
    DATA.write_text(data(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    MANUAL.write_text(manual(), encoding="utf-8")
    subprocess.run([sys.executable, RECIPE / "lookup.py"], check=True)
