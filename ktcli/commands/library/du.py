"""`kt du`: show what uses how much space in the library."""

from __future__ import annotations

from dataclasses import asdict

from ktcli import config, smallfiles
from ktcli.commands.cli.options import JsonOpt, QuietOpt
from ktcli.errors import gib
from ktcli.output import out
from ktcli.store import space
from ktcli.store.space import Taken


def du(json: JsonOpt = False, quiet: QuietOpt = False) -> None:
    """Show how much disk space each model takes.

    For each model: its checkpoint, its conversions and the KV pages of chats with it, the largest
    first. Then everything else in the library: chats, records, and what kt prune removes.

    Examples:

      kt du
      kt du --json
    """
    models, home = space.by_model(), config.home()
    total, free = space.all_bytes(), smallfiles.free_bytes(home)
    left = space.left_bytes()
    other = total - left - sum(each.total_bytes for each in models)
    document = {
        "home": str(home),
        "models": [asdict(each) | {"total_bytes": each.total_bytes} for each in models],
        "other_bytes": other,
        "left_by_killed_bytes": left,
        "total_bytes": total,
        "free_bytes": free,
    }
    rest = f"{gib(other)} of chats and records" + (
        f", {gib(left)} left by killed processes (kt prune)" if left else ""
    )
    summary = f"{rest}; {gib(total)} in total, {gib(free)} free on the disk of {home}"
    out.result(document, lambda: "\n".join([*_table(models), summary]))


def _table(models: tuple[Taken, ...]) -> list[str]:
    rows = [
        (each.name, *map(_size, (each.checkpoint_bytes, each.packs_bytes, each.pages_bytes)), gib(each.total_bytes))
        for each in models
    ]  # fmt: skip
    head = ("MODEL", "CHECKPOINT", "PACKS", "KV PAGES", "TOTAL")
    return [out.table(rows, head, right=(1, 2, 3, 4)), ""] if rows else []


def _size(size_bytes: int) -> str:
    return gib(size_bytes) if size_bytes else ""
