"""The output of `kt --help`: the commands, grouped by purpose."""

from __future__ import annotations

from ktcli.commands.cli import help
from ktcli.commands.cli.table import COMMANDS, HEADINGS
from ktcli.settings import TABLE

SUMMARY = "Run Mixture-of-Experts models far larger than your VRAM on one machine."
VERSION = "Print the version."
_OPTIONS = (("--version", VERSION), ("-h, --help", "Show this message and exit."))
EXAMPLES = (
    "kt chat                          talk to the small built-in model",
    "kt doctor                        what this machine can run",
    "kt plan                          which models run here",
    "kt plan qwen3-30b-a3b            will it fit, how fast will it be",
    'kt chat qwen3-30b-a3b "Hello!"   one answer, then exit',
)


def page(width: int) -> str:
    """Returns the text of `kt --help` for a terminal of `width` columns: usage, commands, options,
    examples, settings.
    """
    wide = max(len(name) for name, row in COMMANDS.items() if row.summary)
    parts = [help.wrapped(text, width) for text in ("Usage: kt COMMAND [OPTIONS]", SUMMARY)]
    for heading, commands in HEADINGS.items():
        rows = [(f"{name:<{wide}}", row.summary) for name, row in commands.items() if row.summary]
        if rows:
            parts.append(f"{heading}:\n{help.listed(rows, width)}")
    parts.append(f"Options:\n{help.listed(_OPTIONS, width)}")
    parts.append("Examples:\n" + "\n".join(help.example(line, width) for line in EXAMPLES))
    names = ", ".join(setting.variable for setting in TABLE)
    said = help.wrapped(
        "Settings (kt config list shows them; each is also an environment variable):", width
    )
    parts.append(f"{said}\n  {help.wrapped(names, width - 2, '  ')}")
    return "\n\n".join(parts)
