"""The memory of pages on a device."""

from __future__ import annotations

import pytest
import torch
from shapes import shape

from ktcli.engine.device.cache import DeviceCache, PageCopy, cached_parts
from ktcli.engine.device.stream import HostStream
from ktcli.errors import DeviceError, NotEnoughMemory
from ktcli.ops.kvformat import BF16, F32_CACHE, FP8, CacheFormat
from ktcli.ops.operation import Cached
from ktcli.ops.recording import record
from ktcli.ops.torch.pages import own_parts

MODEL = shape("qwen3-30b-a3b", num_hidden_layers=2, vocab_size=64, num_experts=8)
SPEC = MODEL.spec
CPU = torch.device("cpu")


def test_the_scratch_page_is_nobodys() -> None:
    cache = DeviceCache(SPEC, 5, (CPU,) * SPEC.layers)
    assert cache.scratch not in cache.pages.take(5)
    with pytest.raises(NotEnoughMemory, match="the context on the GPU"):
        cache.pages.take(1)


def test_a_copied_page_is_the_same_in_every_layer() -> None:
    cache, widths = (
        DeviceCache(SPEC, 3, (CPU,) * SPEC.layers),
        cached_parts(record(MODEL.forward), SPEC.layers),
    )
    assert [sum(each) for each in widths] == [state.position_elements for state in SPEC.states]
    assert all(len(each) == 2 for each in widths)  # keys and values
    cached = [Cached(0, tuple(each), 0) for each in widths]
    parts = [p for at in zip(cache.layers, cached, strict=True) for p in own_parts(*at)]
    for i, part in enumerate(parts):
        part[1] = i + 1
    PageCopy(cache.parts(widths), [HostStream()])(1, 2)
    for i, part in enumerate(parts):
        assert (part[1:3] == i + 1).all() and not part[0].any() and not part[3].any()


def test_a_device_that_fails_in_copying_a_page_is_known_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outside of any step: a conversation goes on with pages that others hold, too."""

    def lost(self: HostStream) -> None:
        raise RuntimeError(
            "CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA"
        )

    cache = DeviceCache(SPEC, 3, (CPU,) * SPEC.layers)
    copy = PageCopy(cache.parts(cached_parts(record(MODEL.forward), SPEC.layers)), [HostStream()])
    monkeypatch.setattr(HostStream, "running", lost)
    with pytest.raises(
        DeviceError, match="failed during copying pages: CUDA error: unspecified"
    ) as found:
        copy(1, 2)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("fmt", [BF16, F32_CACHE, FP8])
def test_each_layer_has_its_own_zeroed_part_of_every_page(fmt: CacheFormat) -> None:
    cache = DeviceCache(SPEC, 3, (CPU,) * SPEC.layers, fmt=fmt)
    state, item = SPEC.states[0], fmt.element_bytes
    assert cache.pages.each_bytes == 64 * SPEC.layers * state.position_bytes(fmt)
    assert len(cache.layers) == SPEC.layers
    assert cache.size_bytes >= 4 * cache.pages.each_bytes
    for layer in cache.layers:
        assert (
            layer.shape == (4 * 64 * state.position_bytes(fmt) // item,)
            and layer.element_size() == item
        )
        assert layer.is_contiguous() and not layer.any() and layer.data_ptr() % 64 == 0
    cache.layers[0].fill_(1)
    assert not cache.layers[1].any()
