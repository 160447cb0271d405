"""One engine per file, each in a process of its own: `python -m benchmarks.peers.workers.NAME SPEC`."""
