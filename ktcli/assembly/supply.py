"""Brings the weight files of a checkpoint while a conversion consumes them, and drops each behind its last use.

PACK/.kt-stream/                the small files, and of each weight file its header
PACK/.kt-stream/kt-source.json  lists all files with their hashes, and says where they come from; written last
PACK/.kt-stream/shards/         the weight files that are here: complete ones are verified
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ktcli import config, smallfiles
from ktcli.errors import NotEnoughDisk
from ktcli.manifest import CHECKPOINT, Manifest
from ktcli.store import contents
from ktcli.store.download import SCRATCH, SPARE_BYTES, Watcher
from ktcli.store.gated import GatedTransfer
from ktcli.store.hubs import RemoteFile, Snapshot, explained, hub_named
from ktcli.weights.arriving import Arriving, OtherHeader
from ktcli.weights.conversion import Conversion
from ktcli.weights.pack import WeightFile
from ktcli.weights.schedule import Schedule, schedule

SHARDS = "shards"


class HubSupply:
    """The supply of a conversion from a hub, see `Supply`. Close it.

    Args:
        found: the files of the repository, as `kt-source.json` lists them.
        head: the folder of the small files and headers.
        limit_bps: the most bytes per second, 0: no limit; None: the setting `pull-limit`.
    """

    def __init__(
        self, found: Manifest, head: Path, watcher: Watcher, limit_bps: int | None = None
    ) -> None:
        self._hub, self._head, self._watcher = hub_named(found.hub), head, watcher
        self._limit = config.value("pull-limit") if limit_bps is None else limit_bps
        weights = [each for each in found.files if each.name.endswith(".safetensors")]
        self._remote = {r.name: RemoteFile(r.name, r.size_bytes, r.sha256) for r in weights}
        sizes = {record.name: record.size_bytes for record in weights}
        self._snapshot = Snapshot(
            found.hub, found.repository, found.revision, tuple(self._remote.values())
        )
        self.checkpoint = Arriving(head, sizes)
        self._schedule = Schedule((), sizes)
        self._transfer: GatedTransfer | None = None
        self._coming: list[str] = []  # the files of the transfer
        self._open: set[str] = set()
        self._done = self._told = 0

    def close(self) -> None:
        """Ends what is going on; what arrived stays."""
        if self._transfer is not None:
            self._transfer.stop()
        self._watcher.end()
        self.checkpoint.close()

    def begin(self, plan: Conversion, made: Collection[str]) -> None:
        """Begins to fetch what the first steps need.

        Raises:
            NotEnoughDisk: there is less room than pack and files will take together.
        """
        sizes, also = self._schedule.sizes, self.checkpoint.presumed
        self._schedule = steps = schedule(plan, made, sizes, also)
        folder, pack = self._head / SHARDS, self._head.parent
        scratch = folder / SCRATCH
        scratch.mkdir(parents=True, exist_ok=True)
        _tidy(folder, steps.files)
        need = max(0, steps.peak_bytes - contents.written_bytes(pack)) + SPARE_BYTES
        if need > (free := smallfiles.free_bytes(pack)):
            raise NotEnoughDisk(f"converting {self._snapshot.repository}", need, free, str(pack))
        self._coming = [name for name in steps.files if not (folder / name).is_file()]
        with self._explained():
            places = [self._hub.locate(self._snapshot, self._remote[name]) for name in self._coming]
        transfer = GatedTransfer(places, folder, scratch, self._limit or None)
        total = sum(sizes[name] for name in self._coming)
        title = f"Pulling and converting {self._snapshot.repository}"
        self._watcher.begin(title, total, transfer.present_bytes)
        self._transfer = transfer
        self._allow()
        if places:
            transfer.start()

    @contextmanager
    def at_hand(self, file: WeightFile) -> Iterator[None]:
        """Waits for what a file is made from; drops afterwards what nobody needs any more."""
        transfer, folder = self._transfer, self._head / SHARDS
        step = self._schedule.steps[self._done]
        assert transfer is not None and step.name == file.name, "steps are taken in their order"
        for name in sorted(step.needs - self._open):
            if name in self._coming:
                with self._explained():
                    transfer.wait_for(name, self.tell)
            try:
                self.checkpoint.arrived(name, folder / name)
            except OtherHeader:
                (self._head / CHECKPOINT).unlink(missing_ok=True)
                raise
            self._open.add(name)
        yield
        self.tell()
        self._done += 1
        for name in [each for each in self._open if self._schedule.last_use[each] < self._done]:
            self.checkpoint.gone(name)
            (folder / name).unlink()
            self._open.remove(name)
        self._allow()

    def _allow(self) -> None:
        ahead = set(self._schedule.files[: self._schedule.allowed(self._done)])
        assert self._transfer is not None
        self._transfer.allow(sum(name in ahead for name in self._coming))

    def tell(self) -> None:
        """Tells the watcher what has arrived."""
        assert self._transfer is not None
        now = self._transfer.new_bytes
        self._watcher.advance(now - self._told)
        self._told = now

    def _explained(self) -> AbstractContextManager[None]:
        about = self._snapshot
        return explained(about.hub, about.repository, about.revision)


def _tidy(folder: Path, needed: Collection[str]) -> None:
    """Removes what lies in the folder of weight files and is not needed: a process was killed before it did."""
    for path, _ in contents.walk(folder):
        name = path.name.removesuffix(".part").removesuffix(".done")
        if name not in needed:
            path.unlink()
