"""Pages of a device are one session's at a time."""

from __future__ import annotations

import pytest
import torch
from shapes import shape

from ktcli.engine.device.cache import DeviceCache
from ktcli.errors import NotEnoughMemory

SPEC = shape("qwen3-30b-a3b", num_hidden_layers=2, vocab_size=64, num_experts=8).spec
CPU = torch.device("cpu")


def test_pages_are_taken_once_and_come_back() -> None:
    cache = DeviceCache(SPEC, 5, CPU)
    first, second = cache.pages.take(3), cache.pages.take(2)
    assert sorted(first + second) == list(range(5)) and cache.scratch not in first + second
    with pytest.raises(NotEnoughMemory):
        cache.pages.take(1)
    cache.pages.give_back(second)
    with pytest.raises(NotEnoughMemory):
        cache.pages.take(3)
    assert len(cache.pages) == 2 and set(cache.pages.take(2)) == set(second)


@pytest.mark.parametrize("exact", [False, True])
def test_each_layer_has_its_own_zeroed_part_of_every_page(exact: bool) -> None:
    cache = DeviceCache(SPEC, 3, CPU, exact=exact)
    item = 4 if exact else 2
    assert cache.page_bytes == 64 * SPEC.position_elements * item
    assert len(cache.layers) == SPEC.layers
    assert cache.size_bytes >= 4 * cache.page_bytes
    for layer in cache.layers:
        assert (
            layer.shape == (4 * 64 * SPEC.states[0].position_elements,)
            and layer.element_size() == item
        )
        assert layer.is_contiguous() and not layer.any() and layer.data_ptr() % 64 == 0
    cache.layers[0].fill_(1)
    assert not cache.layers[1].any()
