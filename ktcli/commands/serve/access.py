"""Who may ask a server: its rules and API keys, from the options of `kt serve`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ktcli.client.address import bracketed
from ktcli.commands.cli.api_key import given_keys, require_key
from ktcli.errors import UsageError
from ktcli.output import out
from ktcli.server.http.access import ANY, LOOPBACK, allowed_host, allowed_origin, is_loopback
from ktcli.server.http.keys import ApiKeys
from ktcli.server.http.state import Rules


def access_rules(
    host: str, port: int, keys: ApiKeys, names: Sequence[str], origins: Sequence[str], who: str
) -> Rules:
    """Returns the rules by which a server at `host` and `port` accepts requests: API keys, host names, and origins of
    web pages.

    Args:
        names, origins: further host names, and origins of web pages, to accept.
        who: the option or setting that gives the address, for an error's sentence.
    Raises:
        UsageError: other machines or all web pages could use the server without a key; or a name or origin is
            malformed.
    """
    require_key(host, has_key=bool(keys), who=who)
    hosts = frozenset(allowed_host(each, has_key=bool(keys)) for each in names)
    pages = frozenset(allowed_origin(each, has_key=bool(keys)) for each in origins)
    is_open = not is_loopback(host.lower()) or ANY in hosts
    address = f"http://{bracketed(host)}:{port}"
    return Rules(keys, frozenset() if is_open else LOOPBACK | hosts, pages, address=address)


def checked_root_path(said: str) -> str:
    """Returns the URL path of --root-path without slashes at its end; empty: there is none.

    Raises:
        UsageError: `said` is not a URL path.
    """
    if said and not re.fullmatch(r"/[!-~]*", said):
        raise UsageError(f"--root-path {said[:100]!r} is not a path, such as /kt")
    return said.rstrip("/")


def reload_of(keys: ApiKeys, file: Path | None) -> Callable[[], None] | None:
    """Returns a function that replaces `keys` by the API keys that the file has when the function is called; if the
    file cannot be used, it prints a warning and keeps the old keys. None if there is no file.
    """
    if file is None:
        return None

    def reload() -> None:
        try:
            found = given_keys(None, file)
        except UsageError as error:
            hint = f" ({error.hint})" if error.hint else ""
            out.warn(f"the API keys stay as they were: {error}{hint}")
            return
        keys.replace(found)
        names = ", ".join(dict.fromkeys(each.name for each in found))
        out.note(f"API keys read again: {names[:1000]}")

    return reload
