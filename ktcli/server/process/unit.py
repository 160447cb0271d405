"""Writes the unit with which systemd runs a server for its user."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ktcli.errors import ExitCode
from ktcli.server.process.discovery import END_S

NAME, ROUTER_NAME = "kt.service", "kt-route.service"
_RELOAD = "ExecReload=/bin/kill -HUP $MAINPID\n"
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+", re.ASCII)
# What goes wrong again however often it is tried: a wrong option, a model that is not there, damaged files.
_FINAL = (ExitCode.USAGE, ExitCode.NOT_FOUND, ExitCode.DAMAGED)


def unit(
    name: str,
    program: Sequence[str],
    environment: Mapping[str, str],
    drain_s: float,
    *,
    reloads: bool = False,
    routes: bool = False,
) -> str:
    """Returns the text of a systemd unit that runs a server for `systemctl --user`; see systemd.service(5).

    Args:
        name: of the model, for people; of a router, the servers that it routes to.
        program: the command line of the server.
        environment: the variables that the server needs, by name.
        drain_s: the seconds that answers may take to finish when it is stopped.
        reloads: whether SIGHUP makes the server read files again.
        routes: whether the server is a router.
    """
    file, command, does = (
        (ROUTER_NAME, "kt route URL...", "routes to")
        if routes
        else (NAME, "kt serve ...", "serves")
    )
    stem, model = file.partition(".")[0], "" if routes else " Pull the model first (kt pull)."
    variables = [f"Environment={quoted(f'{key}={value}')}\n" for key, value in environment.items()]
    final = " ".join(str(int(code)) for code in _FINAL)
    return f"""\
# {does.capitalize()} {_in_a_line(name)} with kt. To install it:
#
#   mkdir -p ~/.config/systemd/user
#   {command} --print-unit > ~/.config/systemd/user/{file}
#   systemctl --user daemon-reload
#   systemctl --user enable --now {file}
#   loginctl enable-linger          (starts it at boot, without a login)
#
# systemctl --user status {stem} shows its state, journalctl --user -u {stem} its log.{model} Put an
# API key into a separate file and pass it with --api-key-file: others may read this unit.

[Unit]
Description=kt {does} {_in_a_line(name).replace("%", "%%")}

[Service]
Type=notify
ExecStart={" ".join([quoted(program[0]), *(quoted(word, in_command=True) for word in program[1:])])}
{_RELOAD if reloads else ""}\
{"".join(variables)}\
# Loading a large model takes minutes; answers in progress may finish after a stop.
TimeoutStartSec=infinity
TimeoutStopSec={END_S + drain_s:.0f}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus={final}
# It writes only to the library, and conversations must not end up in core files.
UMask=0077
LimitCORE=0
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""


def quoted(word: str, *, in_command: bool = False) -> str:
    """Returns a word as a systemd unit has it: quoted where necessary, with its specifiers, quotation marks and control
    characters escaped.

    Args:
        in_command: whether the word is an argument in a command line, where $ is escaped as well.
    """
    text = word.replace("%", "%%")
    if in_command:
        text = text.replace("$", "$$")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + "".join(_escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def _in_a_line(text: str) -> str:
    """Returns a text as part of one line of a unit, where a backslash at the end would continue the line."""
    return "".join(each if each.isprintable() else "?" for each in text).rstrip("\\")
