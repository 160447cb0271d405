"""Routing of up to 256 experts is one warp, whose dozens of reductions need no barrier of a block. So is a router with
its choice, of any number of experts; and who writes a program's sums draws its ticket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent
# triton_launches catches launches in the whole process, which therefore is one of its own.
SCRIPT = """
import json
import re
import triton
from triton.backends.compiler import GPUTarget
from triton_launches import empty, launches, router, sources
from ktcli.ops.table.experts import GroupScore, Routing, Score
from ktcli.ops.triton.small import route_all

for routing in (
    Routing(128, 8),
    Routing(256, 8, Score.SIGMOID, 8, 4, GroupScore.TOP2, True, 2.5),
    Routing(512, 10),
):
    launches.clear()
    route_all(empty(1, routing.experts), routing, empty(routing.experts))
    router(1, 2048, routing, empty(routing.experts))
    found = [routing.experts]
    for source, options in sources(90):
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        found += [options["num_warps"], ptx.count("bar.sync")]
    before, ticket, _ = re.split(r"(@%p\\d+) atom\\.global\\.gpu\\.acq_rel", ptx)
    found.append(re.findall(r"(@%p\\d+) st\\.global", before)[-2:] == [ticket] * 2)
    print(json.dumps(found))
"""


@pytest.mark.thorough
def test_routing_of_few_experts_needs_no_barrier(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parents[2]))),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each[:2] + each[3:4] for each in found] == [[128, 1, 1], [256, 1, 1], [512, 4, 1]]
    alone, together = ([each[at] for each in found] for at in (2, 4))
    # The last shows that barriers are seen where there are some.
    assert alone[:2] == [0, 0] and alone[2] > 20
    assert max(together) <= 4  # at the ticket
    assert all(each[5] for each in found)
