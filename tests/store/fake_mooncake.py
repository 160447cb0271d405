"""A Mooncake client for tests: its values are files of a folder, and it lies, fails or hangs as a file there says.

`helper.py` imports it as `mooncake.store`, in a process of its own.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from ktcli.store.mooncake import process
from ktcli.store.mooncake.address import MooncakeAddress
from ktcli.store.mooncake.client import StoreConnection

_MODULE = '''
import ctypes, os, time
from hashlib import sha256
from pathlib import Path

FOLDER = Path({folder!r})

def fault(what):
    """What goes wrong with a call."""
    try:
        said = (FOLDER / "fault").read_text()
    except FileNotFoundError:
        return ""
    name, _, why = said.partition(" ")
    if name == what and why == "stall":
        time.sleep(1000)
    if name == what and why == "die":
        os._exit(3)
    return why if name == what else ""

def place(key):
    return FOLDER / sha256(key.encode()).hexdigest()

class MooncakeDistributedStore:
    def setup(self, host, metadata, segment, buffer, protocol, devices, master):
        return int(fault("setup") or 0)

    def register_buffer(self, at, size):
        return 0

    def batch_is_exist(self, keys):
        why = fault("exist")
        if why == "nonsense":
            return ["yes"] * (len(keys) + 1)
        return [int(why)] * len(keys) if why else [int(place(key).exists()) for key in keys]

    def batch_get_into(self, keys, places, sizes):
        return [self.get(*each) for each in zip(keys, places, sizes)]

    def get(self, key, at, size):
        if why := fault("get"):
            return int(why)
        if not place(key).exists():
            return -704
        data = place(key).read_bytes()
        if len(data) > size:
            return -600
        ctypes.memmove(at, data, len(data))
        return len(data)

    def batch_put_from(self, keys, places, sizes):
        if why := fault("put"):
            return [int(why)] * len(keys)
        for key, at, size in zip(keys, places, sizes):
            if not place(key).exists():
                place(key).write_bytes(ctypes.string_at(at, size))
        return [0] * len(keys)
'''
_START = "import runpy, sys; sys.path.insert(0, {lib!r}); runpy.run_path({script!r}, run_name='__main__')"


class FakeMooncake:
    """A store that several clients share.

    Attributes:
        connection: what a client needs to know.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder / "values"
        (folder / "lib" / "mooncake").mkdir(parents=True)
        self._folder.mkdir()
        (folder / "lib" / "mooncake" / "__init__.py").write_text("")
        module = _MODULE.format(folder=str(self._folder))
        (folder / "lib" / "mooncake" / "store.py").write_text(module)
        start = _START.format(lib=str(folder / "lib"), script=str(process._SCRIPT))
        command = [sys.executable, "-I", "-S", "-c", start]
        self.connection = StoreConnection(command, MooncakeAddress("127.0.0.1", port))

    def fails(self, call: str, how: str = "stall") -> None:
        """Lets a call hang ("stall"), end the process ("die"), or return a code from now on."""
        (self._folder / "fault").write_text(f"{call} {how}")

    def recovers(self) -> None:
        """Lets all calls do what they should."""
        (self._folder / "fault").unlink()

    def path(self, key: str) -> Path:
        """The file of a value."""
        return self._folder / sha256(key.encode()).hexdigest()

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(len(path.name) == 64 for path in self._folder.iterdir())


@contextmanager
def fake_mooncake(folder: Path) -> Iterator[FakeMooncake]:
    """Opens a store whose master accepts connections, and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield FakeMooncake(folder, listening.getsockname()[1])
