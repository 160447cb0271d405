"""The packer and the oracle agree to the byte: formats x ISA rows x awkward shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktcli.errors import BadCheckpoint, NativeError
from ktcli.native import (
    Blocked,
    Codes,
    Format,
    Gathered,
    Numbers,
    Pool,
    Scale,
    Weight,
    isa_rows,
    packed_bytes,
)
from ktcli.weights.formats import FORMATS, LINEAR

# Beyond the table: what a new row may need.
WITHOUT_ZERO = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
STEEP = (-128, -64, -32, -16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64)
OTHERS = (
    Format("steep", bits=4, group=32, scale=Scale.BF16, codebook=STEEP),
    Format("two values", bits=4, group=32, scale=Scale.BF16, codebook=(-1,) * 8 + (1,) * 8),
    Format("no zero", bits=4, group=64, scale=Scale.BF16, codebook=WITHOUT_ZERO),
    Format("int4-row", bits=4, group=0, scale=Scale.F32, codebook=LINEAR),
    Format("int4-f32", bits=4, group=64, scale=Scale.F32, codebook=LINEAR),
    Format("turned", bits=4, group=64, scale=Scale.BF16, codebook=STEEP, rotation=64),
    Format("int8-g64", bits=8, group=64, scale=Scale.BF16),
    Format("mxint8", bits=8, group=32, scale=Scale.E8M0),
    Format("mxfp8", bits=8, group=32, scale=Scale.E8M0, codes=Codes.E4M3),
)
ALL = (*FORMATS.values(), *OTHERS)
SHAPES = ((1, 1), (16, 64), (17, 65), (5, 128), (33, 300), (48, 2880 // 8))
ROWS = [row.name for row in isa_rows() if row.usable]
POOLS = {isa: Pool(2, isa=isa, spin_us=0) for isa in ROWS}


def matrices(n: int, k: int) -> dict[str, np.ndarray]:
    """Weights as they occur, and as they should not."""
    rng = np.random.default_rng(n * 1000 + k)
    normal = rng.standard_normal((n, k)).astype(np.float32)
    rows = np.zeros((n, k), dtype=np.float32)
    rows[::2] = normal[::2]
    return {
        "normal": normal * np.float32(0.02),
        "heavy": rng.standard_t(2, (n, k)).astype(np.float32),
        "outliers": normal * np.where(rng.random((n, k)) < 0.01, 50, 1).astype(np.float32),
        "zero rows": rows,
        "zeros": np.zeros((n, k), dtype=np.float32),
        "tiny": normal * np.float32(2.0**-62),
        "subnormal": normal * np.float32(1e-40),
        "large": normal * np.float32(1e18),
        "one sign": -np.abs(normal),
        "few values": np.round(normal * 2) / np.float32(2),
    }


def c_pack(pool: Pool, fmt: Format, x: np.ndarray) -> np.ndarray:
    data = np.full(packed_bytes(fmt, *x.shape), 0xAA, dtype=np.uint8)
    pool.pack(fmt, Numbers.of(x).whole, data)
    return data


def c_unpack(pool: Pool, fmt: Format, data: np.ndarray, n: int, k: int) -> np.ndarray:
    return pool.unpack(Weight(fmt, n, k, 1, data.ctypes.data, data))


@pytest.mark.each_once
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_packed_bytes_are_the_oracles(fmt: Format, n: int, k: int):
    for what, x in matrices(n, k).items():
        expected = oracle.pack(fmt, x).tobytes()
        for isa, pool in POOLS.items():
            assert expected == c_pack(pool, fmt, x).tobytes(), f"{isa} {what}"


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_unpacked_values_are_the_oracles(fmt: Format):
    for n, k in SHAPES:
        data = oracle.pack(fmt, matrices(n, k)["heavy"])
        expected = oracle.unpack(fmt, data, n, k)
        found = c_unpack(POOLS[ROWS[0]], fmt, data, n, k)
        assert expected.tobytes() == found.tobytes(), f"{n} x {k}"


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_what_a_format_can_hold_comes_back(fmt: Format):
    """Packing decoded weights again changes no value."""
    x = matrices(33, 320)["normal"]  # whole groups: padding is 0, which a codebook may not have
    once = oracle.unpack(fmt, oracle.pack(fmt, x), *x.shape)
    again = oracle.unpack(fmt, oracle.pack(fmt, once), *x.shape)
    # amax / 127, m / 7: within a step of f32 or bf16; another code of the largest row would be more.
    if fmt.scale is Scale.F32 or (fmt.bits == 8 and fmt.scale is Scale.BF16):
        assert np.abs(again - once).max() <= np.abs(once).max() * 2.0**-7
    else:
        assert np.array_equal(once, again)


def test_reported_error_is_the_difference():
    for fmt in FORMATS.values():
        # Rotated columns beyond k have errors too, which no product sees; with feedback they are left out.
        k = 384 if fmt.rotation else 360
        x, counts = matrices(48, k)["heavy"], importance(k)
        data = np.zeros(packed_bytes(fmt, *x.shape), dtype=np.uint8)
        sums = POOLS[ROWS[0]].pack(fmt, Numbers.of(x).whole, data)
        assert sums[:2] == pytest.approx(sums[2:4], rel=1e-5, abs=1e-12)
        weighted = POOLS[ROWS[0]].pack(fmt, Numbers.of(x).whole, data, importance=counts)
        back, source = oracle.unpack(fmt, data, *x.shape).astype(np.float64), x.astype(np.float64)
        squares = ((back - source) ** 2, source**2)
        assert weighted[:2] == pytest.approx([each.sum() for each in squares], rel=1e-5, abs=1e-12)
        if not fmt.rotation or oracle.feeds_back(
            fmt
        ):  # else importance is that of the rotated columns
            squares = (*squares, back**2)
            expected = [(each * counts).sum() for each in squares]
            assert weighted[2:] == pytest.approx(expected, rel=1e-5, abs=1e-12)


def importance(k: int) -> np.ndarray:
    """Of columns: three orders of magnitude."""
    draw = np.random.default_rng(k)
    return (10 ** draw.uniform(-2, 1, k)).astype(np.float32)


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_weighted_search_is_the_oracles(fmt: Format):
    """The importance of columns changes which scale is found, in every row of kernels alike."""
    for n, k in ((17, 65), (5, 128), (33, 300)):
        x, counts = matrices(n, k)["outliers"], importance(k)
        expected = oracle.pack(fmt, x, importance=counts).tobytes()
        for isa, pool in POOLS.items():
            data = np.zeros(packed_bytes(fmt, n, k), dtype=np.uint8)
            pool.pack(fmt, Numbers.of(x).whole, data, importance=counts)
            assert expected == data.tobytes(), f"{isa} {n} x {k}"


def test_importance_lowers_the_error_that_counts():
    x, counts = matrices(33, 320)["heavy"], importance(320)
    for fmt in (row for row in FORMATS.values() if row.bits == 4 and row.scale is not Scale.E8M0):
        if fmt.rotation:
            continue
        plain, found = (
            (oracle.unpack(fmt, oracle.pack(fmt, x, importance=each), *x.shape) - x) ** 2 @ counts
            for each in (None, counts)
        )
        assert found.sum() < 0.97 * plain.sum(), fmt.name


FEEDING = [fmt for fmt in ALL if oracle.feeds_back(fmt)]


def test_int6_is_encoded_with_feedback():
    assert FORMATS["int6"] in FEEDING
    assert FORMATS["int4-row-had"] not in FEEDING


@pytest.mark.each_once
@pytest.mark.parametrize("fmt", FEEDING, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("kind", ["three orders", "the ends", "one column", "alike"])
def test_bytes_with_feedback_are_the_oracles(fmt: Format, kind: str):
    """However uneven columns and weights are, and whatever is left of a block and of a panel."""
    for n, k in ((1, 1), (17, 65), (16, 192), (33, 300)):
        counts = {
            "three orders": importance(k),
            "the ends": np.where(np.arange(k) % 3 == 0, 2.0**20, 2.0**-20),
            "one column": np.where(np.arange(k) == k // 2, 2.0**20, 1.0),
            "alike": np.full(k, 3.0),
        }[kind].astype(np.float32)
        for what, x in matrices(n, k).items():
            expected = oracle.pack(fmt, x, importance=counts).tobytes()
            for isa, pool in POOLS.items():
                data = np.full(packed_bytes(fmt, n, k), 0xAA, dtype=np.uint8)
                pool.pack(fmt, Numbers.of(x).whole, data, importance=counts)
                assert expected == data.tobytes(), f"{isa} {n} x {k} {what}"


@pytest.mark.parametrize("fmt", FEEDING, ids=lambda fmt: fmt.name)
def test_columns_that_count_alike_are_encoded_by_themselves(fmt: Format):
    x = matrices(33, 320)["heavy"]
    alike = oracle.pack(fmt, x, importance=np.full(320, 1, np.float32))
    assert alike.tobytes() == oracle.pack(fmt, x).tobytes()


def test_feedback_is_the_triangle_of_the_errors_that_count():
    """L' D L is what a block's errors count by: the importance of its columns, seen from the rotated ones."""
    counts = importance(64)
    (lower,) = oracle.feedback_of(counts).astype(np.float64)
    hadamard = oracle.rotate(np.eye(64, dtype=np.float32), 64).astype(np.float64)
    damped = counts + counts.sum(dtype=np.float64) / 4096
    counted = hadamard @ np.diag(damped) @ hadamard
    unit = lower + np.eye(64)
    middle = np.linalg.inv(unit).T @ counted @ np.linalg.inv(unit)
    assert np.abs(middle - np.diag(middle.diagonal())).max() < 1e-4 * middle.max()
    # What is left of uneven columns is their geometric mean, which is less than their mean.
    assert middle.diagonal().prod() == pytest.approx(damped.prod(), rel=1e-3)


@pytest.mark.parametrize("fmt", FEEDING, ids=lambda fmt: fmt.name)
def test_feedback_lowers_the_error_that_counts(fmt: Format):
    x, counts = matrices(33, 320)["normal"], importance(320)
    plain, found = (
        (oracle.unpack(fmt, oracle.pack(fmt, x, importance=each), *x.shape) - x) ** 2 @ counts
        for each in (None, counts)
    )
    assert found.sum() < 0.75 * plain.sum()


def test_importance_must_be_a_number():
    x, data = np.ones((16, 64), np.float32), np.zeros(16 * 64, np.uint8)
    for wrong in (0.0, np.nan, np.inf, -1.0):
        counts = np.ones(64, np.float32)
        counts[3] = wrong
        with pytest.raises(BadCheckpoint, match="importance of a column"):
            POOLS[ROWS[0]].pack(FORMATS["int4"], Numbers.of(x).whole, data, importance=counts)


def test_a_rotation_is_the_hadamard_matrix():
    """Of every block, whatever the number of columns: orthogonal, symmetric, its own inverse."""
    had = FORMATS["int4-row-had"]
    for k, block in ((64, 64), (100, 128), (300, 64), (768, 256), (2880, 64), (2048, 256)):
        assert oracle.rotation_block(had, k) == had.of_columns(k).rotation == block
        unit = oracle.rotate(np.eye(block, dtype=np.float32), block)
        signs = [[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
        np.testing.assert_allclose(unit, np.array(signs) / np.sqrt(block), rtol=1e-6)


def test_search_beats_the_largest_value():
    """The searched scale is never worse than the one that just holds the largest value."""
    x = matrices(33, 300)["heavy"]
    for name in ("int4", "int4-g32", "int4-g128"):
        fmt = FORMATS[name]
        groups = np.zeros((33, oracle.layout(fmt, 300).columns), dtype=np.float32)
        groups[:, :300] = x
        groups = groups.reshape(-1, fmt.group)
        codes, scales = oracle.encode(fmt, groups)
        searched = ((oracle.decode(fmt, codes, scales) - groups) ** 2).sum()
        s = np.abs(groups).max(axis=1, keepdims=True) / np.float32(7)
        s[s == 0] = 1
        plain = ((np.clip(np.rint(groups / s), -8, 7) * s - groups) ** 2).sum()
        assert searched < plain


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_sizes_agree(fmt: Format):
    for n, k in ((1, 1), (16, 64), (2880, 2880), (151936, 2048), (7168, 18432)):
        panels = -(-n // 16)
        assert oracle.layout(fmt, k).panel_bytes * panels == packed_bytes(fmt, n, k)


def test_panels_of_two_matrices_alternate():
    x, y = matrices(40, 96)["normal"], matrices(40, 96)["heavy"]
    sources = Numbers.of(x), Numbers.of(y)
    rows = np.full((3, 2, 16, 2), -1, np.int32)  # panels, matrices, rows, (matrix, row)
    rows[..., 0], rows[..., 1] = np.arange(2)[:, None], np.arange(48).reshape(3, 1, 16)
    rows[2, :, 8:] = -1  # there are 40
    rows = rows.reshape(-1, 2)
    for fmt in FORMATS.values():
        panel = packed_bytes(fmt, 16, 96)
        both = np.zeros(6 * panel, dtype=np.uint8)
        POOLS[ROWS[0]].pack(fmt, Gathered(sources, rows, 96), both)
        found = both.reshape(3, 2, panel)
        assert np.array_equal(found[:, 0].reshape(-1), oracle.pack(fmt, x))
        assert np.array_equal(found[:, 1].reshape(-1), oracle.pack(fmt, y))


@settings(max_examples=40)
@given(
    fmt=st.sampled_from(ALL),
    n=st.integers(1, 20),
    k=st.integers(1, 140),
    seed=st.integers(0, 2**32 - 1),
    power=st.integers(-70, 60),
)
def test_any_shape_and_size(fmt: Format, n: int, k: int, seed: int, power: int):
    x = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32) * np.float32(
        2.0**power
    )
    data = oracle.pack(fmt, x)
    assert data.tobytes() == c_pack(POOLS[ROWS[0]], fmt, x).tobytes()
    back = oracle.unpack(fmt, data, n, k)
    assert np.all(np.isfinite(back))
    bound = {32: 0.0, 16: 2.0**-8, 8: 2.0**-6, 6: 2.0**-4, 4: 2.0**-1}[fmt.bits]
    if len(set(fmt.codebook)) == 2:
        bound = 1.0  # neither is 0
    if fmt.codes is Codes.E4M3:
        bound = 2.0**-4  # of 3 bits after the leading one, half the last
    dropped = float(oracle.TINY) if fmt.bits < 16 else 0.0  # a group below this encodes as zero
    wrong = blocks_of(fmt, back - x)
    if not fmt.rotation:
        assert np.abs(wrong).max() <= bound * np.abs(x).max() + dropped
        return
    # What is rounded are rotated columns, of which rows that are no multiple of a block have more; so each block of
    # columns is wrong by no more than all of them together.
    block = wrong.shape[1]
    rounded = bound / 2 * np.abs(oracle.rotate(blocks_of(fmt, x), block)).max() + dropped
    assert np.linalg.norm(wrong, axis=1).max() <= np.sqrt(block) * rounded


def blocks_of(fmt: Format, x: oracle.F32) -> oracle.F32:
    """Returns the columns of a matrix by the blocks in which they are rotated, or all as one block."""
    k = x.shape[1]
    block = oracle.rotation_block(fmt, k) if fmt.rotation else k
    return np.pad(x, ((0, 0), (0, -k % block))).reshape(-1, block)


def test_e4m3_is_the_type_of_that_name():
    """Every code means what torch says of float8_e4m3fn, and comes back."""
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(oracle.E4M3_VALUES, values, equal_nan=True)
    real = (codes & 127) != 127
    assert np.array_equal(oracle.nearest_e4m3(values[real]), codes[real])
    assert np.array_equal(np.signbit(values[real]), codes[real] >= 128)


def test_e4m3_rounds_to_nearest_even():
    """Between any two neighbours: the middle goes to the even code, what is beside it to its side."""
    low, high = oracle.E4M3_VALUES[:126], oracle.E4M3_VALUES[1:127]
    middle, codes = (low + high) / 2, np.arange(126)
    assert np.array_equal(oracle.nearest_e4m3(middle), codes + codes % 2)
    assert np.array_equal(oracle.nearest_e4m3(-np.nextafter(middle, low)), codes + 128)
    assert np.array_equal(oracle.nearest_e4m3(np.nextafter(middle, high)), codes + 1)
    assert oracle.nearest_e4m3(np.float32([1e9, -464, -0.0])).tolist() == [126, 254, 128]
    x = np.float32([*middle, *np.nextafter(middle, low), *np.nextafter(middle, high)])[None]
    fmt, given = FORMATS["fp8"], np.ones((1, 3), dtype=np.float32)
    data = np.empty(packed_bytes(fmt, *x.shape), dtype=np.uint8)
    for isa, pool in POOLS.items():
        pool.pack(fmt, Numbers.of(x).whole, data, scales=given)
        assert np.array_equal(data, oracle.pack(fmt, x, given)), isa


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 150),
    k=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
    power=st.integers(-50, 50),
)
def test_fp8_of_blocks_is_kept_bit_for_bit(n: int, k: int, seed: int, power: int):
    """Codes decoded by any scales of blocks, packed with these, are the same codes and scales."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
    codes[(codes & 127) == 127] = 128  # no NaN, but -0
    blocks = rng.uniform(-1, 1, (-(-n // 128), -(-k // 128))).astype(np.float32)
    blocks = np.where(np.abs(blocks) < 2.0**-9, np.float32(1), blocks) * np.float32(2.0**power)
    pool, fmt = POOLS[ROWS[0]], FORMATS["fp8"]
    source = Numbers(Blocked(8, oracle.E4M3_VALUES, (128, 128), blocks), codes, n, k).whole
    x = pool.decode(source)
    scales = np.repeat(blocks, 128, axis=0)[:n]
    data = np.empty(packed_bytes(fmt, n, k), dtype=np.uint8)
    error, *_ = pool.pack(fmt, source, data, scales=scales)
    assert error == 0 and data.tobytes() == oracle.pack(fmt, x, scales).tobytes()
    lay = oracle.layout(fmt, k)
    panels = data.reshape(-1, lay.panel_bytes)
    lines = panels[:, : 16 * lay.columns].reshape(len(panels), -1, 16, 4).transpose(0, 2, 1, 3)
    assert np.array_equal(lines.reshape(-1, lay.columns)[:n, :k], codes)
    tail = panels[:, 16 * lay.columns :].copy().view("<f4")[:, : lay.groups * 16]
    kept = tail.reshape(-1, lay.groups, 16).transpose(0, 2, 1).reshape(-1, lay.groups)[:n]
    assert kept.tobytes() == scales.tobytes()
    assert c_unpack(pool, fmt, data, n, k).tobytes() == x.tobytes()


def test_scales_are_given_only_where_they_fit():
    x = matrices(16, 64)["normal"]
    for fmt in ALL:
        data = np.empty(packed_bytes(fmt, 16, 64), dtype=np.uint8)
        groups = oracle.layout(fmt, 64).groups
        with pytest.raises(NativeError, match="scales are not"):
            POOLS[ROWS[0]].pack(
                fmt, Numbers.of(x).whole, data, scales=np.zeros((16, groups + 1), np.float32)
            )
        if fmt.bits <= 8 and fmt.scale is Scale.F32 and not fmt.rotation:
            POOLS[ROWS[0]].pack(
                fmt, Numbers.of(x).whole, data, scales=np.zeros((16, groups), np.float32)
            )
            assert data.tobytes() == oracle.pack(fmt, x).tobytes()  # 0: the encoder chooses
        else:
            with pytest.raises(NativeError, match=f"not for {fmt.bits} bits"):
                POOLS[ROWS[0]].pack(
                    fmt, Numbers.of(x).whole, data, scales=np.zeros((16, groups), np.float32)
                )


def test_bf16_rounds_to_nearest_even():
    x = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-45], dtype=np.float32)
    assert [hex(v) for v in oracle.round_to_bf16(x)] == [
        "0x3f80", "0x3f80", "0x3f82", "0xbf80", "0x7f80", "0x0",
    ]  # fmt: skip


def test_rows_of_the_table_differ():
    assert len({replace(row, name="") for row in FORMATS.values()}) == len(FORMATS)
