"""Writes into the pages what their commands really print, and the tables that follow from the code.

    python docs/record.py            all pages anew
    python docs/record.py --check    says what differs; figures of speed and time may

A block of a page between ```console and ``` is a session: its lines that begin with `$ ` are run, in a pseudo-terminal
of 80 columns without colours, in a home folder that is empty when the page begins; those that begin with `› ` are typed
into the chat above them. Everything else in the block is what came out. A part between `<!-- made: NAME -->` and
`<!-- end -->` is made by the function of that name in MADE.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from docs.reference import table  # noqa: E402
from docs.terminal import PROMPT, Shell, import_everything, masked, same_rows, ship_to  # noqa: E402
from ktcli.errors import ExitCode  # noqa: E402
from ktcli.settings import OTHER_VARIABLES  # noqa: E402
from ktcli.settings import TABLE as SETTINGS  # noqa: E402
from ktcli.store import catalog  # noqa: E402
from ktcli.terminal.slash import KEYS  # noqa: E402
from ktcli.terminal.slash import TABLE as SLASHES  # noqa: E402

PAGES = tuple(
    HERE / name
    for name in ("quickstart.md", "chat.md", "scripts.md", "troubleshooting.md", "library.md")
)
SESSION = re.compile(r"(?ms)^```console\n(.*?)^```$")
MADE_PART = re.compile(r"(?ms)^<!-- made: ([a-z-]+) -->\n(.*?)^<!-- end -->$")
READER = "/home/you"
OF_A_MACHINE = ("kt doctor",)  # what is inside depends on it
LONG = 2000  # columns of what shows one line of JSON
# Whose documents are described, by what they are asked.
ASKED = (
    "kt list", "kt show kt-mini", "kt verify kt-mini", "kt convert kt-mini", "kt pull kt-mini",
    "kt plan kt-mini --machine laptop-16gb", "kt plan --machine laptop-16gb", "kt doctor",
    'kt chat kt-mini "hi"', "kt eval kt-mini --tokens 300 --formats int8",
    "kt eval kt-mini --tokens 300 --formats int8 --split", "kt bench decode kt-mini --runs 1 -n 4",
    "kt chats", "kt cache du", "kt cache ls", "kt cache verify", "kt config list", "kt config get model",
    "kt search qwen3", "kt alias big kimi-k2", "kt alias", "kt alias --rm big",
    "kt names", "kt export kt-mini kt-mini.tar", "kt import kt-mini.tar",
    "kt rm kt-mini@int8-int8 --yes", "kt rm nothing",
)  # fmt: skip


# --- tables that follow from the code -------------------------------------------------------------------


def exit_codes() -> str:
    return table(("code", "name", "meaning"), [(str(int(c)), c.name, c.meaning) for c in ExitCode])


def variables() -> str:
    rows = [
        (s.variable, f"{s.help} It can be {s.domain.allowed}. Default: {s.default}.")
        for s in SETTINGS
    ]
    return table(("variable", "meaning"), [*rows, *OTHER_VARIABLES.items()])


def slash_commands() -> str:
    rows = [(f"/{name} {slash.usage}".strip(), slash.meaning) for name, slash in SLASHES.items()]
    return table(("command", "does"), rows)


def chat_keys() -> str:
    return table(("key", "does"), KEYS)


MADE: dict[str, Callable[[], str]] = {
    "exit-codes": exit_codes, "variables": variables, "slash-commands": slash_commands, "keys": chat_keys,
}  # fmt: skip


def with_tables(text: str) -> str:
    """A page with its made parts made anew; those of documents are left alone."""

    def put(found: re.Match[str]) -> str:
        if found[1] not in MADE:
            return found[0]
        return f"<!-- made: {found[1]} -->\n{MADE[found[1]]()}\n<!-- end -->"

    return MADE_PART.sub(put, text)


# --- sessions -------------------------------------------------------------------------------------------


def with_sessions(text: str) -> str:
    """A page with its sessions run anew; where only figures differ, what is there stays."""
    with tempfile.TemporaryDirectory(prefix="kt-", dir="/tmp") as folder:
        shell = Shell(Path(folder), environment(folder), partial(ship_to, Path(folder, "kt")))

        def put(found: re.Match[str]) -> str:
            fresh = _session(found[1], shell).replace(folder, READER)
            return f"```console\n{found[1] if masked(fresh) == masked(found[1]) else fresh}```"

        return SESSION.sub(put, text)


def environment(folder: str) -> dict[str, str]:
    return {
        "HOME": folder,
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "NO_COLOR": "1",
        "KT_THREADS": "1",
        "KT_DRAFT": "off",  # how many tokens pay is measured
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "MODELSCOPE_ENDPOINT": "http://127.0.0.1:9",
        "MODELSCOPE_API_MAX_RETRIES": "1",
        **same_rows(),
    }


def _session(recorded: str, shell: Shell) -> str:
    lines = recorded.splitlines()
    commands = [at for at, line in enumerate(lines) if line.startswith("$ ")]
    parts: list[str] = []
    for at, end in zip(commands, [*commands[1:], len(lines)], strict=True):
        keys = [line[2:] + "\r" for line in lines[at:end] if line.startswith(f"{PROMPT} ")]
        shown = shell.run(lines[at][2:], keys=keys)
        parts += [lines[at], *([shown.text] if shown.text else [])]
        gap = end < len(lines) and not lines[end - 1]
        parts += [""] if gap and parts[-1] else []
    return "\n".join(parts) + "\n"


# --- the keys of documents ------------------------------------------------------------------------------


def with_keys(text: str) -> str:
    """A page with its lists of the keys that documents have."""
    if "<!-- made: json-keys -->" not in text:
        return text
    with tempfile.TemporaryDirectory(prefix="kt-", dir="/tmp") as folder:
        shell = Shell(Path(folder), environment(folder), few_models)
        for line in ("kt convert kt-mini", "kt convert kt-mini --experts int8"):
            shell.run(line)
        shell.run("kt chat", keys=["hi\r", "/exit\r"])
        parts = []
        for line in ASKED:
            shown = shell.run(f"{line} --json 2> log.txt | cat", LONG)
            parts.append(f"**`{line}`**: {_keys(json.loads(shown.text), line not in OF_A_MACHINE)}")
    made = "\n\n".join(parts)
    return re.sub(
        r"(?ms)(^<!-- made: json-keys -->\n).*?(^<!-- end -->$)",
        lambda f: f"{f[1]}{made}\n{f[2]}",
        text,
    )


def few_models() -> None:
    """Shortens the catalogue: the keys are the same."""
    catalog.names = lambda: ("kt-mini", "qwen3-0.6b")


def _keys(document: dict[str, Any], inner: bool) -> str:
    """The keys of a document, and below each of them those inside of it."""
    found = []
    for name, value in document.items():
        several = isinstance(value, list)
        first = (value or [None])[0] if several else value
        below = ", ".join(f"`{key}`" for key in first) if isinstance(first, dict) and inner else ""
        found.append(f"`{name}{'[]' if several else ''}`" + (f" ({below})" if below else ""))
    return ", ".join(found)


def main(check: bool) -> int:
    import_everything()
    code = 0
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = with_keys(with_sessions(with_tables(before)))
        if check and before != after:
            code = 1
            lines = difflib.unified_diff(
                before.splitlines(), after.splitlines(), page.name, "now", lineterm="", n=1
            )
            print("\n".join(lines))
        elif not check:
            page.write_text(after, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
