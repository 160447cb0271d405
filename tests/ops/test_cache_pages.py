"""What an engine on the CPU writes into the pages of an fp8 cache, byte by byte, against the oracle of the format; and
what it reads of them, against the same attention over what the oracle reads."""

from __future__ import annotations

import numpy as np
import pytest
from kvoracle import decode, encode
from numpy.typing import NDArray

from ktcli.errors import NativeError
from ktcli.native import Arena, Batch, Format, Pool, Program, Run, Weight, isa_rows, packed_bytes
from ktcli.ops.kvformat import FP8
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.weights.formats import FORMATS

PAGE, TOKENS = 64, 150  # three pages, the last one not full
ROWS = [row.name for row in isa_rows() if row.usable]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def strange(width: int) -> Floats:
    """Rows of every size, with zeros, subnormal numbers and what is none."""
    draw = np.random.default_rng(width)
    x = draw.standard_normal((TOKENS, width)) * np.exp2(draw.integers(-150, 127, (TOKENS, 1)))
    x[::7] *= np.exp2(draw.integers(-30, 1, (len(x[::7]), width)))
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    x[5], x[6] = 0.0, -0.0
    x[9, 3], x[10, 2] = np.nan, np.inf
    return x


def plain(width: int) -> Floats:
    return np.random.default_rng(width).standard_normal((TOKENS, width)).astype(np.float32)


class Layer:
    """One attention with a cache of its own.

    Attributes:
        inputs: its operands by width: the queries, then what is cached.
    """

    def __init__(self, isa: str, cache: str, widths: tuple[int, ...], out: int) -> None:
        self.program = Program(
            Pool(2, isa=isa), max_tokens=TOKENS, max_outputs=1, exact=False, cache=cache
        )
        self.inputs = [self.program.buffer(width) for width in widths]
        self.out = self.program.buffer(out)

    def run(self, page_bytes: int, *values: Floats) -> Bytes:
        """Appends these rows; returns the pages, [3, page_bytes]."""
        self.program.finish()
        self.pages = Arena(3 * page_bytes)
        self.program.attach(self.pages, page_bytes)
        for view, rows in zip(self.inputs, values, strict=True):
            self.program.rows(view, TOKENS)[:] = rows
        ids = np.zeros(TOKENS, np.int32)
        self.program.run(Batch((Run(ids, 0, np.arange(3, dtype=np.int32), TOKENS),)))
        return self.pages.bytes.reshape(3, page_bytes)

    @property
    def result(self) -> Floats:
        return self.program.rows(self.out, TOKENS).copy()


def gqa(isa: str, cache: str, shape: GqaShape) -> Layer:
    s = shape
    widths = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.value_dim
    made = Layer(isa, cache, widths, s.heads * s.value_dim)
    facts = {"heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim, "v": s.v}
    made.program.append("gqa", (made.out, *made.inputs), scale=s.scale, **facts)
    return made


SHAPES = [GqaShape(4, 2, 64, 0.125), GqaShape(3, 1, 6, 0.4, v=17), GqaShape(2, 2, 40, 0.2, v=80)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("isa", ROWS)
def test_the_bytes_of_keys_and_values(isa: str, shape: GqaShape) -> None:
    s, d, v = shape, shape.head_dim, shape.value_dim
    keys, values = strange(s.kv_heads * d), strange(s.kv_heads * v)
    elements, heads = s.kept, 2 * s.kv_heads
    pages = gqa(isa, "fp8", s).run(
        PAGE * FP8.bytes_of(elements, heads), plain(s.heads * d), keys, values
    )
    ends = np.cumsum([PAGE * s.kv_heads * d, PAGE * s.kv_heads * v, PAGE * s.kv_heads])
    k, v_codes, k_scales, v_scales = np.split(pages, ends, axis=1)
    # K of each head in panels of 16 tokens: [page][head][4][columns / 2][16][2]; V in rows.
    k = k.reshape(3, s.kv_heads, 4, d // 2, 16, 2).transpose(0, 2, 4, 1, 3, 5)
    v_codes = v_codes.reshape(3, s.kv_heads, PAGE, v).transpose(0, 2, 1, 3)
    for x, codes, scales in ((keys, k, k_scales), (values, v_codes, v_scales)):
        expected, scale = encode(x.reshape(TOKENS, s.kv_heads, -1))
        found = codes.reshape(3 * PAGE, s.kv_heads, -1)[:TOKENS]
        np.testing.assert_array_equal(scales.reshape(3 * PAGE, -1)[:TOKENS], scale)
        np.testing.assert_array_equal(found, expected)


def weight(pool: Pool, n: int, k: int, heads: int) -> Weight:
    fmt: Format = FORMATS["bf16"]
    arena = Arena(packed_bytes(fmt, n, k) * heads)
    made = Weight(fmt, n, k, heads, arena.address, arena)
    pool.fill_random(made, n + 3 * k)
    return made


@pytest.mark.parametrize("rope", [16, 0])
@pytest.mark.parametrize("isa", ROWS)
def test_the_bytes_of_latent_rows(isa: str, rope: int) -> None:
    """The latent and what is rotated have scales of their own."""
    s = MlaShape(2, 32, rope, 32, 64, 0.2)
    made = Layer(isa, "fp8", (s.heads * (s.nope + rope), s.lora + rope), s.heads * s.v)
    pool = made.program.pool
    shapes = {"uk_in": (s.lora, s.nope), "uk_out": (s.nope, s.lora), "uv": (s.v, s.lora)}
    weights = {name: (weight(pool, n, k, s.heads),) for name, (n, k) in shapes.items()}
    facts = {name: getattr(s, name) for name in ("heads", "nope", "rope", "v", "lora", "scale")}
    made.program.append("mla", (made.out, *made.inputs), **facts, **weights)
    width, latent = s.lora + rope, strange(s.lora + rope)
    size = PAGE * FP8.bytes_of(width, s.cached_heads)
    pages = made.run(size, plain(s.heads * (s.nope + rope)), latent)
    codes = pages[:, : PAGE * width].reshape(3 * PAGE, width)[:TOKENS]
    scales = pages[:, PAGE * width :].reshape(3 * PAGE, s.cached_heads)[:TOKENS]
    for i, x in enumerate(np.split(latent, [s.lora], axis=1)[: s.cached_heads]):
        expected, scale = encode(x)
        np.testing.assert_array_equal(scales[:, i], scale)
        found = np.split(codes, [s.lora], axis=1)[i]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [1.0, 3e5, 1e-20], ids=["usual", "large", "small"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("isa", ROWS)
def test_codes_are_attended_to_as_the_numbers_that_they_mean(
    isa: str, shape: GqaShape, size: float
) -> None:
    """Which bf16 holds exactly: so a bf16 cache of them gives the same bits."""
    s, d, v = shape, shape.head_dim, shape.value_dim
    given = (
        plain(s.heads * d) / np.float32(size),
        *(plain(s.kv_heads * width) * np.float32(size) for width in (d, v)),
    )
    meant = [
        decode(*encode(x.reshape(TOKENS, s.kv_heads, -1))).reshape(TOKENS, -1) for x in given[1:]
    ]
    coded, held = gqa(isa, "fp8", s), gqa(isa, "bf16", s)
    coded.run(PAGE * FP8.bytes_of(s.kept, 2 * s.kv_heads), *given)
    held.run(PAGE * 2 * s.kept, given[0], *meant)
    assert np.isfinite(held.result).all()
    np.testing.assert_array_equal(coded.result, held.result)


def test_what_chooses_positions_is_refused() -> None:
    made = Layer(ROWS[0], "fp8", (64, 32, 2), 32)
    with pytest.raises(NativeError, match="choose: index keys in an fp8 cache"):
        made.program.append(
            "choose", tuple(made.inputs), heads=2, dim=32, top_k=8, block=1, scale=1.0
        )
