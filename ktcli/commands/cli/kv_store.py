"""Declares the options of the store in which several servers share KV pages, and reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ktcli import config
from ktcli.commands.cli.declarations import option, setting_option
from ktcli.errors import UsageError
from ktcli.records import dataclass
from ktcli.settings import MOONCAKE, SETTINGS

if TYPE_CHECKING:
    from ktcli.assembly.kvplaces import MooncakePlace, SharedStore

InsecureOpt = Annotated[
    bool,
    option(
        "--insecure",
        "Use a Mooncake store on an address that is not of a private network, although it has no authentication.",
    ),
]


@dataclass(frozen=True, slots=True)
class KvStoreOptions:
    """The options of the store."""

    kv_store: Annotated[str | None, setting_option("kv-store")] = None
    kv_store_size: Annotated[str | None, setting_option("kv-store-size")] = None
    insecure: InsecureOpt = False


def asked_store(options: KvStoreOptions) -> SharedStore | MooncakePlace | None:
    """Returns the shared store of KV pages, a folder or a Mooncake store, that the options name, or the settings where
    an option is not given; None if neither names one.

    Raises:
        UsageError: a value is invalid, or an option does not apply to the store.
    """
    from ktcli.assembly.kvplaces import OFF, shared_place

    said, most = config.stated("kv-store"), config.value("kv-store-size")
    text = said.value if said.text else OFF
    if options.kv_store is not None:
        text = SETTINGS["kv-store"].read_option(options.kv_store)
    is_mooncake = text.startswith(MOONCAKE)
    if options.kv_store_size is not None:
        most = SETTINGS["kv-store-size"].read_option(options.kv_store_size)
        if is_mooncake:
            raise UsageError(
                "--kv-store-size has no meaning for a Mooncake store",
                hint="how large it is says whoever lends it memory: kt store serve --memory SIZE",
            )
    if options.insecure and not is_mooncake:
        raise UsageError(
            "--insecure has no meaning without a Mooncake store",
            hint=f"leave it out, or name a store with --kv-store {MOONCAKE}HOST:PORT",
        )
    is_insecure = options.insecure or bool(config.value("kv-insecure"))
    return shared_place(text, most, is_insecure=is_insecure)
