"""The script that runs Mooncake's client, in Mooncake's own Python environment; kt starts it, and kills it.

Calls of Mooncake's client cannot be cancelled, and may take minutes: whoever waits too long ends this process. It
imports nothing of kt. It gets requests as lines of JSON, on two sockets, so that what is written does not keep what is
read waiting; values pass through memory that both processes map.

    {"op": "open", "master": "10.0.0.1:50051", "lends": 0}          -> {"ready": true}
    {"op": "exist", "keys": [...]}                                  -> {"codes": [1, 0, ...]}
    {"op": "get", "keys": [...], "at": [...], "sizes": [...]}       -> {"codes": [bytes or below 0, ...]}
    {"op": "put", "keys": [...], "at": [...], "sizes": [...]}       -> {"codes": [0 or below 0, ...]}

Or {"error": "..."}: then it ends.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import threading
from typing import Any

# So that a cable that was pulled costs seconds, not minutes. The client reads them when it is imported.
_BOUNDS = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_SLICE_TIMEOUT": "2",
    "MC_STORE_CLIENT_METRIC": "0",
    "GLOG_logtostderr": "1",  # which nobody reads: it would fill /tmp otherwise
    "GLOG_minloglevel": "2",
}
_BUFFER_BYTES = 16 << 20  # of the client's own


def main() -> None:
    """Connects to the Mooncake store and answers requests for its values (exist, get, put), which arrive on two
    sockets, until one of them is closed; then ends the process.

    Command-line arguments: the id of the process that started this one, the descriptors of the two sockets and of the
    shared memory, and the memory's size in bytes.
    """
    parent, reads, writes, memory, size = map(int, sys.argv[1:6])
    # Killed with the thread that started it: PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
    sockets = [socket.socket(fileno=each) for each in (reads, writes)]
    files = [each.makefile("rwb") for each in sockets]
    line = files[0].readline()
    mapped = mmap.mmap(memory, size) if size else None  # until the end
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) if mapped is not None else 0
    try:
        store = _open(json.loads(line), base, size)
    except Exception as error:
        _say(files[0], {"error": str(error)[:300] or type(error).__name__})
        os._exit(1)
    _say(files[0], {"ready": True})
    threading.Thread(target=_serve, args=(files[1], store, base), daemon=True).start()
    _serve(files[0], store, base)
    os._exit(0)  # whatever its threads wait for


def _open(request: dict[str, Any], base: int, size: int) -> Any:
    """Returns the client, connected, which knows the memory at `base`."""
    os.environ.update(_BOUNDS)
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

    store, master = MooncakeDistributedStore(), str(request["master"])
    lends = int(request["lends"])
    code = store.setup(
        _own_address(master), "P2PHANDSHAKE", lends, _BUFFER_BYTES, "tcp", "", master
    )
    if code:
        raise OSError(f"the Mooncake master refused (code {code})")
    if size and (code := store.register_buffer(base, size)):
        raise OSError(f"Mooncake cannot use the memory (code {code})")
    return store


def _own_address(master: str) -> str:
    """The address under which other clients reach this machine, if they reach the master."""
    host, _, port = master.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_UNSPEC
    found = socket.getaddrinfo(host.strip("[]"), int(port), family, socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as asked:
        asked.connect(found[4])  # nothing is sent
        return str(asked.getsockname()[0])


def _serve(file: Any, store: Any, base: int) -> None:
    """Answers requests, one after the other."""
    while line := file.readline():
        try:
            request = json.loads(line)
            _say(file, {"codes": _codes(store, base, request)})
        except Exception as error:
            _say(file, {"error": str(error)[:300] or type(error).__name__})
    os._exit(0)


def _codes(store: Any, base: int, request: dict[str, Any]) -> list[int]:
    keys = request["keys"]
    if request["op"] == "exist":
        return list(store.batch_is_exist(keys))
    call = store.batch_get_into if request["op"] == "get" else store.batch_put_from
    return list(call(keys, [base + at for at in request["at"]], request["sizes"]))


def _say(file: Any, answer: dict[str, Any]) -> None:
    file.write(json.dumps(answer).encode() + b"\n")
    file.flush()


if __name__ == "__main__":
    main()
