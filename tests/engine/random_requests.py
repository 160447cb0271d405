"""Random requests and cancels on a converted model; a program, so that it can run with another library below.

    python tests/engine/random_requests.py PACK REQUESTS SEED

Prints the number of requests that ended in each way. It fails unless all pages and states are free at the end.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

from benchmarks.loading import load_pack
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.engine import CpuEngine, Finish, GenerationRequest, Limits, Scheduler
from ktcli.engine.request import Answer, Finished
from ktcli.hardware.gpu import CPU
from ktcli.sampling import SamplingSettings

CONTEXT, VOCAB = 256, 99


def main(pack: Path, requests: int, seed: int) -> None:
    engine = load_pack(
        pack, Wanted(device=DeviceWords(device=CPU, defer=1), context=CONTEXT, threads=2, streams=4)
    )
    counts = serve(engine, requests, random.Random(seed))
    assert sum(counts.values()) == requests
    pages, states = engine.pools.pages, engine.pools.states
    assert pages.held == 0, f"{pages.held} pages are held"
    engine.pools.forget()
    assert sorted(pages.take(pages.count)) == list(range(pages.count))
    assert states is None or states.free == states.count
    print(*(f"{finish.name}={n}" for finish, n in counts.items()))


def serve(engine: CpuEngine, requests: int, draw: random.Random) -> Counter[Finish]:
    """Few texts, so that prefixes are shared; more than the pages hold, so that some wait and some give back."""
    scheduler = Scheduler(engine, Limits(active=6, waiting=30))
    texts = [[draw.randrange(VOCAB) for _ in range(CONTEXT)] for _ in range(4)]
    flying: list[Answer] = []
    counts: Counter[Finish] = Counter()

    def step() -> None:
        ended = [event.finish for event in scheduler.step() if isinstance(event, Finished)]
        counts.update(ended)

    for i in range(requests):
        text = draw.choice(texts)[: draw.choice([1, 9, 63, 64, 65, 140, 200, CONTEXT - 1])]
        sampling = SamplingSettings(greedy=True) if i % 3 else SamplingSettings(seed=i)
        request = GenerationRequest(text, sampling, max_tokens=draw.choice([1, 2, 9]))
        while scheduler.waiting >= 30:
            step()
        flying.append(scheduler.submit(request))
        for _ in range(draw.randrange(4)):
            step()
        if draw.random() < 0.4:
            draw.choice(flying[-12:]).cancel()
    while not scheduler.idle:
        step()
    return counts


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
