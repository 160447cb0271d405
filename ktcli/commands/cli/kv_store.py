"""Declares the options of the store in which several servers share KV pages, and reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ktcli import config
from ktcli.commands.cli.options import setting_option
from ktcli.settings import SETTINGS

if TYPE_CHECKING:
    from ktcli.assembly.kvpages import MooncakePlace, SharedStore

KvStoreOpt = Annotated[str | None, setting_option("kv-store")]
KvStoreSizeOpt = Annotated[str | None, setting_option("kv-store-size")]
InsecureOpt = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Use a Mooncake store on an address that is not of a private network, although it has no authentication.",
    ),
]


def asked_store(
    store: str | None, size: str | None, *, insecure: bool = False
) -> SharedStore | MooncakePlace | None:
    """Returns the shared store that the options mean, or the settings where an option is not given; None: there is
    none.

    Raises:
        UsageError: a value makes no sense.
    """
    from ktcli.assembly.kvpages import shared_place

    said, most = config.stated("kv-store"), config.value("kv-store-size")
    if size is not None:
        most = SETTINGS["kv-store-size"].read(size, "--kv-store-size", "leave it out")
    insecure = insecure or bool(config.value("kv-insecure"))
    if store is not None:
        text = SETTINGS["kv-store"].read(store, "--kv-store", "leave it out")
        return shared_place(text, most, is_insecure=insecure)
    return shared_place(said.value, most, is_insecure=insecure) if said.text else None
