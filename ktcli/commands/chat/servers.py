"""Decides whether a chat is with a server that speaks OpenAI's API, and which one that is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ktcli import config
from ktcli.commands.chat.attaching import OWN
from ktcli.commands.cli.declarations import given_options
from ktcli.errors import UsageError
from ktcli.output import out
from ktcli.records import dataclass

if TYPE_CHECKING:
    from ktcli.client.address import ServerAddress
    from ktcli.commands.chat.request import KeptChat

OFF = "off"  # of the setting server
_KEY_FILE = "server-key-file"
# Parameters of kt chat that are about a model loaded on this machine: a server gets texts, and no ids.
_LOCAL = {*OWN, "context", "draft", "attach", "no_attach", "explain_cache", "allow_special"}


@dataclass(frozen=True, slots=True)
class AskedServer:
    """The server that a chat is with.

    Attributes:
        key: what it is shown; empty: nothing.
    """

    address: ServerAddress
    key: str


def asked_server(
    here: typer.Context, server: str | None, key_file: Path | None, kept: KeptChat | None
) -> AskedServer | None:
    """Returns the address and API key of the server that the command line of `kt chat`, a saved conversation or the
    settings name; None if they name none, or "off".

    A kept conversation continues on its server, unless --server names another. The key file of the settings is used for
    the server of the settings only, or for that of --server if the settings name no server.

    Raises:
        UsageError: the server is not an address, another option needs the model in this process, a key file is given
            without a server, or it cannot be read, is malformed or can be read by others.
    """
    stated = config.stated("server")
    if server is not None:
        said, source = server, "--server"
    elif kept is not None:
        said, source = kept.server or OFF, f"the chat {kept.path.stem}"
    else:
        said, source = str(stated.value or OFF), stated.source
    if said == OFF:
        if key_file is not None:
            raise UsageError("--server-key-file needs --server")
        return None
    from ktcli.client.address import ServerAddress  # most chats are with a model here
    from ktcli.commands.cli.api_key import keys_of_file

    address = ServerAddress.parse(said, source)
    _refuse_local(here, address)
    if key_file is None and _is_for(stated, address, chosen=server is not None):
        found = config.value(_KEY_FILE)
        key_file = None if found is None else Path(found)
    key = ""
    if key_file is not None:
        key = keys_of_file(key_file.expanduser(), "--server-key-file")[0].key
    if key and not address.encrypted and not address.is_here:
        out.warn(f"the key is sent to {address.url} unencrypted; https would protect it")
    return AskedServer(address, key)


def _is_for(stated: config.Stated, address: ServerAddress, *, chosen: bool) -> bool:
    """Returns whether the key file of the settings is for a server.

    Args:
        stated: the server of the settings.
        chosen: whether the command line names the server.
    """
    if not stated.text or stated.value == OFF:
        return chosen
    return address.parse(stated.text, stated.source).url == address.url


def _refuse_local(here: typer.Context, address: ServerAddress) -> None:
    """Raises: UsageError: the command line has an option about a model loaded here."""
    for name, option in given_options(here).items():
        if name in _LOCAL:
            raise UsageError(
                f"{option} applies only to a model loaded here, not to one of the server {address.url}",
                hint=f"leave out {option}, or chat without a server: --server off",
            )
