"""Declares the options of the store in which several servers share KV pages, and reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ktcli import config
from ktcli.commands.cli.options import setting_option
from ktcli.errors import UsageError
from ktcli.settings import MOONCAKE, SETTINGS

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
    from ktcli.assembly.kvpages import OFF, shared_place

    said, most = config.stated("kv-store"), config.value("kv-store-size")
    text = said.value if said.text else OFF
    if store is not None:
        text = SETTINGS["kv-store"].read(store, "--kv-store", "leave it out")
    is_mooncake = text.startswith(MOONCAKE)
    if size is not None:
        most = SETTINGS["kv-store-size"].read(size, "--kv-store-size", "leave it out")
        if is_mooncake:
            raise UsageError(
                "--kv-store-size has no meaning for a Mooncake store",
                hint="how large it is says whoever lends it memory: kt store serve --memory SIZE",
            )
    if insecure and not is_mooncake:
        raise UsageError(
            "--insecure has no meaning without a Mooncake store",
            hint=f"leave it out, or name a store with --kv-store {MOONCAKE}HOST:PORT",
        )
    return shared_place(text, most, is_insecure=insecure or bool(config.value("kv-insecure")))
