"""`kt store`: a KV store for several servers, for those who run none."""

from __future__ import annotations

from typing import Annotated

import typer

from ktcli.client.address import bracketed
from ktcli.commands.cli.declarations import is_given, option
from ktcli.commands.cli.kv_store import InsecureOpt
from ktcli.commands.cli.options import CommandFamily
from ktcli.errors import UsageError, gib
from ktcli.output import out
from ktcli.settings import MOONCAKE, SIZES, Setting

HOST, PORT, MEMORY = "127.0.0.1", 50051, "4G"

app = CommandFamily()


@app.command()
def serve(
    here: typer.Context,
    host: Annotated[str, option("--host ADDRESS", "Address for the store's master.")] = HOST,
    port: Annotated[int, option("--port -p PORT", "Port for the master.", min=1, max=65535)] = PORT,
    memory: Annotated[str, option("--memory SIZE", "Memory that this machine lends.")] = MEMORY,
    join: Annotated[
        str | None,
        option(
            "--join mooncake://HOST:PORT",
            "Lend memory to the store of this master, instead of starting one.",
        ),
    ] = None,
    insecure: InsecureOpt = False,
) -> None:
    """Run a Mooncake store, in which servers share KV pages.

    Starts a master, and lends it memory of this machine, until Ctrl-C; then its pages are gone. Needs
    Mooncake: kt engine install mooncake. There is no authentication: whoever reaches the store reads
    conversations. So the master listens on this machine only, unless --host names an address of a
    private network. The part that lends memory always listens on all interfaces, on ports of its own:
    keep others out with a firewall.

    Examples:

      kt store serve --host 10.0.0.1 --memory 64G

      kt serve NAME --kv-store mooncake://node1:50051

      kt store serve --join mooncake://node1:50051 --memory 64G
    """
    from ktcli.assembly.mooncake import StoreSettings, require_host, serve_store
    from ktcli.store.mooncake.address import MooncakeAddress

    size = Setting("memory", SIZES, "SIZE", MEMORY, "", "--memory").read_option(memory)
    if not size:
        raise UsageError("--memory 0 leaves the store no memory", hint="lend some, such as 64G")
    if join is not None and (unused := [name for name in ("host", "port") if is_given(here, name)]):
        raise UsageError(
            f"--{unused[0]} has no meaning with --join, which names the master",
            hint=f"leave out --{unused[0]}",
        )
    if join is None:
        require_host(host, insecure=insecure)
    address = MooncakeAddress.parse(join or f"{MOONCAKE}{bracketed(host)}:{port}")
    settings = StoreSettings(address, size, join is not None, insecure)
    words = {"address": str(address), "memory_bytes": size}
    said = f"A KV store with {gib(size)} of this machine is at {address}; Ctrl-C ends it."
    serve_store(settings, lambda: out.result(words, said))
