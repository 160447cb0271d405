"""Checks a command line against the engine that is to take it: its flags are read from its own source, nothing is run.

A flag that is gone or renamed, that reads another kind of value, or that does not take this value any more is refused
with its name; so is a flag that the engine has come to require.
"""

from __future__ import annotations

from ktcli.errors import KtError, UsageError
from ktcli.server.sglang.flags import SWITCH, EngineFlag, FlagTable, require_parsed
from ktcli.server.sglang.line import EngineOption, ServerLine


class OtherFlags(KtError):
    """Raised when the installed engine does not accept kt's command line."""


def require_accepted(line: ServerLine, found: FlagTable, tested: FlagTable) -> None:
    """Raises an error unless an engine accepts a command line, with the same meaning as in the tested version.

    Args:
        found, tested: the flags of the engine that is to run, and of the version that kt was tested with.
    Raises:
        OtherFlags: it does not; the sentence names the flag.
    """
    have, known = found.by_name(), tested.by_name()
    for option in line.options:
        if why := _why_not(option, have.get(option.flag), known[option.flag]):
            raise _refused(f"{option.flag} {why}")
    given = {option.flag for option in line.options}
    for flag in found.flags:
        if flag.required and given.isdisjoint(flag.names):
            raise _refused(f"{flag.names[0]} is required")
    try:
        require_parsed(line.words(), found)
    except UsageError as error:
        raise _refused(str(error)) from error


def _why_not(option: EngineOption, found: EngineFlag | None, tested: EngineFlag) -> str:
    """Returns in which way a flag is not what it was; empty: it is."""
    if found is None:
        return "is gone or renamed"
    if found.kind != tested.kind:
        return f"takes {_words(found)} now, not {_words(tested)}"
    if found.nargs != tested.nargs:
        return "takes another number of values now"
    if found.choices is not None:
        strange = [each for each in option.values if each not in map(str, found.choices)]
        if strange:
            return (
                f"does not take {strange[0]!r} any more, only {', '.join(map(str, found.choices))}"
            )
    return ""


def _words(flag: EngineFlag) -> str:
    return "no value" if flag.kind == SWITCH else f"a value of type {flag.kind}"


def _refused(what: str) -> OtherFlags:
    return OtherFlags(
        f"the installed sglang-kt has other flags than this kt was tested with: {what}",
        hint="install the tested version: kt engine rm sglang-kt, then kt engine install sglang-kt",
    )
