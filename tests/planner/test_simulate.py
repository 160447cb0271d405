"""The simulated step is what the queue's rule gives, tick by tick."""

from __future__ import annotations

import random

import pytest

from ktcli.planner.simulate import CPU, GPU, Layer, simulate


def replay(layers: list[Layer], depth: int, tail: int) -> tuple[int, dict[str, int]]:
    """When the GPU is done, and how long both were at work: two machines that advance a tick at a time.

    All durations are whole ticks. Parts of the CPU are [ticks left, layer that waits for them or None].
    """
    program: list[tuple[str, int, int]] = []  # of the GPU: (what, ticks or layer, CPU part's layer)
    for i, layer in enumerate(layers):
        program.append(("work", int(layer.device_s), i))
        if layer.hits:
            program += [("work", int(layer.send_s), i), ("send", 0, i)]
        program.append(("work", int(layer.shared_s), i))
        if layer.hits:
            program += [("wait", 0, i), ("work", int(layer.fetch_s), i)]
    program.append(("work", tail, -1))
    queue: list[list[int]] = []
    done: set[int] = set()
    busy, now, left, at = {CPU: 0, GPU: 0}, 0, program[0][1], 0

    def enqueue(i: int) -> None:
        n, has_next = int(layers[i].hits), i + 1 < len(layers) and layers[i + 1].hits > 0
        late = min(depth, max(0, n - 2)) if has_next else 0
        ticks = int(layers[i].expert_s)
        queue.append([(n - late) * ticks, i])
        if late:
            queue.append([late * ticks, -1])

    while True:
        settled = False
        while not settled:  # what takes no time
            settled = True
            while queue and queue[0][0] == 0:
                done.add(queue.pop(0)[1])
                settled = False
            while at < len(program):
                what, _, i = program[at]
                if (what == "work" and left) or (what == "wait" and i not in done):
                    break
                if what == "send":
                    enqueue(i)
                at, settled = at + 1, False
                left = program[at][1] if at < len(program) else 0
        if at == len(program):
            return now, busy
        if program[at][0] == "work":
            left, busy[GPU] = left - 1, busy[GPU] + 1
        if queue:
            queue[0][0], busy[CPU] = queue[0][0] - 1, busy[CPU] + 1
        now += 1


@pytest.mark.parametrize("seed", range(40))
def test_equals_a_replay_tick_by_tick(seed: int) -> None:
    chance = random.Random(seed)

    def layer() -> Layer:
        device, shared, send, fetch, ticks = (chance.randrange(6) for _ in range(5))
        hits = chance.choice((0, 1, 2, 3, 5, 8, 8))
        return Layer(device, shared, send, fetch, hits=hits, expert_s=ticks)

    layers = [layer() for _ in range(chance.randrange(1, 9))]
    depth, tail = chance.randrange(7), chance.randrange(5)
    found = simulate(layers, depth, tail_s=tail)
    step, busy = replay(layers, depth, tail)
    assert found.step_s == step
    assert found.busy_s(GPU) == busy[GPU]
    assert found.busy_s(CPU) == busy[CPU]


def test_what_nobody_adds_is_not_deferred() -> None:
    """The middle layer's experts are all on the GPU: the one before has nobody to hand on to."""
    cpu, gpu = Layer(1, 1, hits=4, expert_s=1), Layer(1, 1)
    late = [s.layer for s in simulate([cpu, cpu, gpu, cpu, cpu], 2).spans if s.what == "deferred"]
    assert late == [0, 3]
