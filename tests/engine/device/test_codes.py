"""Laws of an fp8 cache on a device, torch on the CPU: its codes are the encoder's, bit by bit, and mean what it says.

Nothing here is within a tolerance of what codes cost: they are compared where there is nothing to round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from convert import convert_checkpoint
from cores import TWO
from hybrid import ANSWER, CONTEXT, IDS, F32Array, Made
from kvoracle import decode, encode
from loading import load_engine
from reference import case_named, write_checkpoint
from timelines import logits_of
from torch import Tensor

from ktcli.engine import Session
from ktcli.engine.device.engine import DeviceEngine
from ktcli.models import build
from ktcli.ops.kvformat import FP8
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import EXACT, TORCH, Kernel, Kernels
from ktcli.ops.torch.pages import ScaledPages
from ktcli.weights.pack import Pack

ATTENTION = ("gqa", "mla")
Given = Callable[[dict[str, Any]], None]  # looks at what attention is given, or changes it


def heads_of(given: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The columns of each head of what attention caches, by the name of its operand."""
    shape = given["shape"]
    if isinstance(shape, GqaShape):
        return {"k": (shape.head_dim,) * shape.kv_heads, "v": (shape.value_dim,) * shape.kv_heads}
    assert isinstance(shape, MlaShape)
    return {"latent": (shape.lora, shape.rope)}


def split(rows: np.ndarray, widths: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(widths)[:-1], -1)


def round_all(given: dict[str, Any]) -> None:
    """Attention is given the numbers that the codes of its heads mean."""
    for name, widths in heads_of(given).items():
        heads = split(given[name].numpy(), widths)
        given[name] = torch.from_numpy(np.concatenate([decode(*encode(x)) for x in heads], -1))


@dataclass
class Seen:
    """Compares each row that attention appends with the codes of what it was given.

    Attributes:
        rows: those that were compared, by the number of rows of their step.
    """

    rows: dict[int, int] = field(default_factory=dict)

    def __call__(self, given: dict[str, Any]) -> None:
        rows: Rows = given["rows"]
        places = [
            (rows.pages[i // rows.run, at // 64].item(), at % 64)
            for i, at in enumerate(rows.positions.tolist())
        ]
        for (name, widths), pages in zip(heads_of(given).items(), given["cache"], strict=True):
            assert isinstance(pages, ScaledPages)
            codes = np.stack([pages.codes[place].numpy() for place in places])
            scales = np.stack([pages.scales[place].numpy() for place in places])
            for i, head in enumerate(split(given[name].numpy(), widths)):
                right, scale = encode(head)
                np.testing.assert_array_equal(split(codes, widths)[i], right)
                np.testing.assert_array_equal(scales[:, i], scale)
        self.rows[len(places)] = self.rows.get(len(places), 0) + len(places)


def around(kernels: Kernels, before: Given | None = None, after: Given | None = None) -> Kernels:
    """The kernels, of which attention is looked at."""

    def wrapped(kernel: Kernel) -> Kernel:
        def attend(**given: Any) -> Tensor:
            if before is not None:
                before(given)
            made: Tensor = kernel(**given)
            if after is not None:
                after(given)
            return made

        return attend

    own = {name: wrapped(kernels.operations[name]) for name in ATTENTION}
    return replace(kernels, operations={**kernels.operations, **own})


def engine_with(
    made: Made, kernels: Kernels, cache: str, patch: pytest.MonkeyPatch
) -> DeviceEngine:
    with patch.context() as own:
        own.setattr("ktcli.engine.device.kernelchoice.kernels_for", lambda *of, **named: kernels)
        return made.engine(made.placed("some", cache=cache), exact=False)


def read(session: Session) -> F32Array:
    """The logits of a prompt, and of what follows it, one by one."""
    rows = [session.feed([token]).values.copy() for token in ANSWER[:1]]
    return np.concatenate([rows, logits_of(session, IDS), *one_by_one(session, ANSWER)])


def one_by_one(session: Session, ids: list[int]) -> list[F32Array]:
    return [session.feed([token]).values[None].copy() for token in ids]


def test_codes_are_the_encoders_and_mean_what_it_says(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prompts and in captured steps: an fp8 cache holds the codes of what attention is given, byte by byte, and is a
    bf16 cache of the numbers that they mean: not a bit of any logit differs."""
    seen = Seen()
    coded = engine_with(made, around(TORCH, after=seen), "fp8", monkeypatch)
    plain = engine_with(made, around(TORCH, before=round_all), "bf16", monkeypatch)
    unrounded = engine_with(made, TORCH, "bf16", monkeypatch)
    assert coded.cache_format == FP8
    assert 2 * coded.memory.page_bytes > plain.memory.page_bytes > coded.memory.page_bytes
    seen.rows.clear()
    found = read(coded.session())
    layers = made.model.spec.layers
    assert seen.rows[1] == layers * (len(ANSWER) + 1)
    assert sum(seen.rows.values()) == layers * (len(ANSWER) + 1 + len(IDS))
    np.testing.assert_array_equal(found, read(plain.session()))
    assert not np.array_equal(found, read(unrounded.session()))


def test_so_are_those_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with sinks; the window's pages are others."""
    made = Made.convert("gpt-oss", tmp_path)
    test_codes_are_the_encoders_and_mean_what_it_says(made, monkeypatch)


def in_rows(page: np.ndarray, shape: GqaShape | MlaShape) -> np.ndarray:
    """The part of a layer in a CPU's page as a device has it: of keys, panels of 16 tokens become rows."""
    if isinstance(shape, MlaShape):
        return page
    heads, pairs = shape.kv_heads, shape.head_dim // 2
    ends = np.cumsum([64 * heads * width for width in (shape.head_dim, shape.value_dim)])
    keys, values, scales = np.split(page, ends)
    keys = keys.reshape(heads, 4, pairs, 16, 2).transpose(1, 3, 0, 2, 4)
    values = values.reshape(heads, 64, -1).transpose(1, 0, 2)
    return np.concatenate([keys.ravel(), values.ravel(), scales])


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_the_first_layers_bytes_are_the_cpus(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it caches is no attention's result, which a CPU rounds otherwise, and with f32 weights not a product of
    rounded numbers. What is left is the order of sums: a code is another only where a number is between two."""
    checkpoint = write_checkpoint(case_named(name), tmp_path / "checkpoint")
    path = convert_checkpoint(checkpoint, tmp_path / "pack", experts="f32", dense="f32")
    pack = Pack.open(path)
    made, shapes = Made(path, build(pack.config), pack), []
    kernels = around(EXACT, before=lambda given: shapes.append(given["shape"]))
    device = engine_with(made, kernels, "fp8", monkeypatch)
    cpu = load_engine(path, context=CONTEXT, threads=TWO, all_logits=True, cache="fp8")
    sessions = device.session(), cpu.session()
    found, wanted = (read(session) for session in sessions)
    # The CPU rounds weights of attention to bf16, and a router may decide otherwise at some position.
    error = np.sqrt(((found - wanted) ** 2).mean(axis=1)) / wanted.std()
    assert np.median(error) < 0.02
    size = 64 * device.spec.states[0].position_bytes(FP8)
    codes = others = 0
    for number in range(2):
        pages = [
            engine.memory.saved_page(session.sequence.pages[number])
            for engine, session in zip((device, cpu), sessions, strict=True)
        ]
        own, of_cpu = pages[0][:size], in_rows(pages[1][:size], shapes[0])
        codes, others = codes + size, others + int((own != of_cpu).sum())
    assert codes > 4000 and others <= codes // 1000, (codes, others)
