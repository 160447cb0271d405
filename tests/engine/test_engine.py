"""What an engine decides when nobody asks."""

import pytest
from shapes import RATES, shape

from ktcli.engine import Engine, Options
from ktcli.engine import cpu as engine
from ktcli.hardware.machine import Memory
from ktcli.planner.host import Host
from ktcli.planner.memory import LEAST_CONTEXT, need_bytes
from ktcli.planner.placement import place
from ktcli.planner.plan import Request
from ktcli.weights.recipe import Recipe


def test_the_default_context_is_what_a_plan_says_that_fits(monkeypatch: pytest.MonkeyPatch):
    """A load must not ask for more than the plan that was shown for it."""
    small = shape("qwen3-30b-a3b", num_hidden_layers=1, vocab_size=512, num_experts=8)
    room = need_bytes(small, Recipe(), 3000)
    planned = place(small, Host("made up", 1, "avx512", 0, room, RATES), Request())
    memory = Memory(total_bytes=0, available_bytes=room)
    monkeypatch.setattr(engine, "read_memory", lambda root: memory)
    made = Engine.random(small, Recipe(), Options(threads=1))
    assert LEAST_CONTEXT < made.context == planned.context < 3100
