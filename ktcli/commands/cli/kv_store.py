"""Declares the options of the folder in which several servers share KV pages, and reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ktcli import config
from ktcli.commands.cli.options import setting_option
from ktcli.settings import SETTINGS

if TYPE_CHECKING:
    from ktcli.assembly.kvpages import SharedStore

KvStoreOpt = Annotated[str | None, setting_option("kv-store")]
KvStoreSizeOpt = Annotated[str | None, setting_option("kv-store-size")]


def asked_store(folder: str | None, size: str | None) -> SharedStore | None:
    """Returns the shared folder that the options mean, or the settings where an option is not given; None: there is
    none.

    Raises:
        UsageError: a value makes no sense.
    """
    from ktcli.assembly.kvpages import SharedStore

    said, most = config.stated("kv-store"), config.value("kv-store-size")
    if size is not None:
        most = SETTINGS["kv-store-size"].read(size, "--kv-store-size", "leave it out")
    if folder is not None:
        text = SETTINGS["kv-store"].read(folder, "--kv-store", "leave it out")
        return SharedStore.parse(text, "--kv-store", most)
    return SharedStore.parse(said.value, said.source, most) if said.text else None
