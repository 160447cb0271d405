"""Declares the option of the address at which a server tells routers which KV pages it holds, and reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ktcli import config
from ktcli.commands.cli.declarations import setting_option
from ktcli.settings import SETTINGS

if TYPE_CHECKING:
    from ktcli.server.kvevents.address import EventsAddress

KvEventsOpt = Annotated[str | None, setting_option("kv-events")]


def asked_events(address: str | None) -> EventsAddress | None:
    """Returns the address in the option, or in the setting where the option is not given; None: there is none.

    Raises:
        UsageError: it is not an address.
    """
    from ktcli.server.kvevents.address import EventsAddress

    said = config.stated("kv-events")
    if address is not None:
        text = SETTINGS["kv-events"].read_option(address)
        return EventsAddress.parse(text, "--kv-events")
    return EventsAddress.parse(said.value, said.source) if said.text else None
