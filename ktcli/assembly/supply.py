"""Downloads the weight files of a checkpoint while a conversion reads them, and deletes each after its last use.

PACK/.kt-stream/                the small files, and of each weight file its header
PACK/.kt-stream/kt-source.json  lists all files with their hashes, and says where they come from; written last
PACK/.kt-stream/shards/         the weight files that are here: complete ones are verified
PACK/.kt-stream/gone            the bytes of these that were given back to the disk, see `released`
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from ktcli import config, smallfiles
from ktcli.assembly.released import ReleasedRanges
from ktcli.manifest import CHECKPOINT, Manifest
from ktcli.store import contents
from ktcli.store.bounded import BoundedTransfer
from ktcli.store.download import SCRATCH, SPARE_BYTES, Watcher
from ktcli.store.huberrors import explained
from ktcli.store.hubs import RemoteFile, Snapshot, hub_named
from ktcli.weights.arriving import Arriving, OtherHeader
from ktcli.weights.conversion import Conversion
from ktcli.weights.pack import WeightFile
from ktcli.weights.ranges import between
from ktcli.weights.schedule import Schedule, Shards, schedule

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
        self._sizes = sizes
        self._schedule = Schedule((), Shards(sizes))
        self._released: ReleasedRanges | None = None
        self._transfer: BoundedTransfer | None = None
        self._coming: list[str] = []  # the files of the transfer
        self._open: set[str] = set()
        self._done = self._told = 0

    def close(self) -> None:
        """Ends the transfer in progress; files that arrived are kept."""
        if self._transfer is not None:
            self._transfer.stop()
        self._watcher.end()
        self.checkpoint.close()

    def begin(self, plan: Conversion, made: Collection[str]) -> None:
        """Starts downloading the weight files that the first steps of a conversion need; `made` names the pack's files
        that exist already.

        Raises:
            NotEnoughDisk: there is less room than pack and files will take together. HubError, NotFound: the hub fails.
        """
        folder, pack = self._head / SHARDS, self._head.parent
        scratch = folder / SCRATCH
        scratch.mkdir(parents=True, exist_ok=True)
        self._schedule = steps = self._planned(plan, made)
        need = max(0, steps.peak_bytes - contents.written_bytes(pack)) + SPARE_BYTES
        smallfiles.require_room(pack, need, f"converting {self._snapshot.repository}")
        self._coming = [name for name in steps.files if not (folder / name).is_file()]
        with self._explained():
            places = [self._hub.locate(self._snapshot, self._remote[name]) for name in self._coming]
        transfer = BoundedTransfer(places, folder, scratch, self._limit or None)
        total = sum(self._sizes[name] for name in self._coming)
        title = f"Pulling and converting {self._snapshot.repository}"
        self._watcher.begin(title, total, transfer.present_bytes)
        self._transfer = transfer
        self._allow()
        if places:
            transfer.start()

    def _planned(self, plan: Conversion, made: Collection[str]) -> Schedule:
        """Plans what is left to do with what is here, and gives up what of it is not needed any more."""
        folder, also = self._head / SHARDS, self.checkpoint.presumed
        self._released = released = ReleasedRanges(self._head, folder)
        shards = Shards(self._sizes, punched=released.can_shrink)
        steps = schedule(plan, made, shards, also)
        _tidy(folder, steps.files)
        released.keep({name: steps.kept(name, 0) for name in steps.files})
        present = frozenset(name for name in steps.files if (folder / name).is_file())
        cut = frozenset(name for name in present if released.lost(name))
        # Others were not opened, and nobody has looked at all that somebody wants to see.
        for name in cut:
            self._shrink(steps, name, 0)
        return replace(steps, source=replace(shards, present=present, cut=cut))

    def _shrink(self, steps: Schedule, name: str, done: int) -> None:
        """Gives up what of a file is not needed after `done` steps, but for its header."""
        assert self._released is not None
        if steps.source.punched:
            start = self.checkpoint.data_start(name)
            self._released.shrink(name, between(steps.kept(name, done), start, self._sizes[name]))
        self.checkpoint.lost(name, self._released.lost(name))

    @contextmanager
    def at_hand(self, file: WeightFile) -> Iterator[None]:
        """Opens a context, without a value, in which the checkpoint's weight files that `file` of the pack is made from
        are on the disk. It waits for their download, raises what stopped it, and ends by removing those not needed.
        """
        transfer, folder = self._transfer, self._head / SHARDS
        step = self._schedule.steps[self._done]
        assert transfer is not None and step.name == file.name, "steps are taken in their order"
        for name in sorted(step.needs.keys() - self._open):
            if name in self._coming:
                with self._explained():
                    transfer.wait_for(name, self.tell)
            try:
                self.checkpoint.arrived(name, folder / name)
            except OtherHeader:
                (self._head / CHECKPOINT).unlink(missing_ok=True)
                raise
            self._open.add(name)
            self._shrink(self._schedule, name, self._done)
        yield
        self.tell()
        self._done += 1
        for name in sorted(self._open):
            if self._schedule.last_use[name] < self._done:
                self.checkpoint.gone(name)
                (folder / name).unlink()
                self._open.remove(name)
            elif name in step.needs:
                self._shrink(self._schedule, name, self._done)
        self._allow()

    def _allow(self) -> None:
        ahead = set(self._schedule.files[: self._schedule.allowed(self._done)])
        assert self._transfer is not None
        self._transfer.allow(sum(name in ahead for name in self._coming))

    def tell(self) -> None:
        """Reports to the watcher the number of bytes that have arrived since the last call."""
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
