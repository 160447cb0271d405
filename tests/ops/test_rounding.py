"""Exact products that round their input as those of another format do, against the same in numpy;
and whole models that do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle
import pytest
from convert import convert_checkpoint
from loading import load_engine
from numpy.typing import NDArray
from reference import case_named, write_checkpoint
from timelines import logits_of

from ktcli.errors import NativeError
from ktcli.native import Arena, Batch, Codes, Format, Pool, Program, Run, Weight
from ktcli.ops.table.rowwise import Reads
from ktcli.weights.formats import FORMATS
from ktcli.weights.recipe import Recipe

F32 = FORMATS["f32"]
T, ROWS = 5, 40
EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 2, 96, 80
# One scale per row; one for 64 columns; rotated, in blocks that 96 columns have, also with scales for groups, and
# in blocks that 256 have; bf16; none.
INPUTS = ("int8-row", "int4", "nl4-g32", "int8", "int6", "int4-row-had", "bf16", "fp8", "f32")

Array = NDArray[np.float32]


def rounded(x: Array, fmt: Format, reads: Reads = Reads.FORMAT) -> Array:
    """Rows of x as a product with weights of a format reads them, as f32."""
    if reads is Reads.F32 or fmt.bits == 32 or fmt.codes is Codes.E4M3:
        return x
    if fmt.bits == 16:
        return (oracle.round_to_bf16(x).astype(np.uint32) << 16).view(np.float32)
    rows, k = x.shape
    wide = np.zeros((rows, -(-k // 64) * 64), np.float32)
    wide[:, :k] = x
    block = oracle.rotation_block(fmt, k) if fmt.rotation else 0
    turned = oracle.rotate(wide, block) if block else wide
    fine = fmt.rotation > 0 and (fmt.bits == 8 or fmt.group > 0) and reads is not Reads.FORMAT
    parts = turned.reshape(rows, -1, 64 if fmt.group or fine else wide.shape[1])
    out = on_grid(parts)
    if reads is Reads.WIDE and not fine:
        out = out + on_grid(parts - out)
    out = out.reshape(wide.shape)
    return (oracle.rotate(out, block) if block else out)[:, :k]


def on_grid(x: Array) -> Array:
    """x rounded to whole multiples of a 127th of the largest magnitude of each row."""
    unit = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(unit == 0, 1, unit)).astype(np.float32) * unit


def weight(values: Array, reading: Format) -> Weight:
    """Matrices [count, n, k] in f32, with the input of another format."""
    count, n, k = values.shape
    packed = np.concatenate([oracle.pack(F32, each).reshape(-1) for each in values])
    arena = Arena(packed.nbytes)
    arena.bytes[: packed.nbytes] = packed
    return Weight(F32, n, k, count, arena.address, arena, reading)


def random(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("reads", [*Reads])
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("k", [96, 256])
def test_a_linear_product_equals_numpy(name: str, k: int, reads: Reads) -> None:
    x, w, reading = random(T, k), random(1, ROWS, k), FORMATS[name]
    program = Program(Pool(2), max_tokens=T, max_outputs=1, exact=True)
    given, out, plain = program.buffer(k), program.buffer(ROWS), program.buffer(ROWS)
    program.input(given)
    program.append("linear", (out, given), weight=(weight(w, reading),), reads=int(reads))
    program.append("linear", (plain, given), weight=(weight(w, F32),), reads=int(reads))
    program.finish()
    program.rows(given, T)[:] = x
    program.run(Batch((Run(np.zeros(T, np.int32), 0, np.zeros(1, np.int32), T),)))
    most = 1e-5 * np.abs(x @ w[0].T).max()
    read = rounded(x, reading, reads)
    np.testing.assert_allclose(program.rows(out, T), read @ w[0].T, atol=most, rtol=0)
    np.testing.assert_allclose(program.rows(plain, T), x @ w[0].T, atol=most, rtol=0)
    if reads is Reads.FORMAT and name not in ("fp8", "f32"):
        assert np.abs((read - x) @ w[0].T).max() > 10 * most, "nothing was rounded"


@pytest.mark.parametrize("name", INPUTS)
def test_experts_equal_numpy(name: str) -> None:
    """Both their input and their hidden values are rounded."""
    reading, x = FORMATS[name], random(T, HIDDEN)
    wide, narrow = random(EXPERTS, 2 * WIDTH, HIDDEN), random(EXPERTS, HIDDEN, WIDTH)
    program = Program(Pool(2), max_tokens=T, max_outputs=1, exact=True)
    given, out = program.buffer(HIDDEN), program.buffer(HIDDEN)
    program.input(given)
    routing = program.given(EXPERTS, TOP_K)
    stacks = {"gate_up": [weight(wide, reading)], "down": [weight(narrow, reading)]}
    program.append("experts", (out, given), routing=routing, **stacks)
    program.finish()
    program.rows(given, T)[:] = x
    ids, gate = program.routing(routing, T, TOP_K)
    ids[:] = [(t % EXPERTS, (t + 1) % EXPERTS) for t in range(T)]
    gate[:] = np.abs(random(T, TOP_K))
    program.run(Batch((Run(np.zeros(T, np.int32), 0, np.zeros(1, np.int32), T),)))
    want, read = np.zeros((T, HIDDEN), np.float32), rounded(x, reading)
    for t, k in np.ndindex(T, TOP_K):
        pairs = (wide[ids[t, k]] @ read[t]).reshape(-1, 2, 16)  # panels of gate and of up in turn
        g, u = pairs[:, 0].reshape(-1), pairs[:, 1].reshape(-1)
        hidden = rounded((g / (1 + np.exp(-g)) * u)[None], reading)[0]
        want[t] += gate[t, k] * (narrow[ids[t, k]] @ hidden)
    # A hidden value that lies between two steps of the grid may go either way: then it is a whole step off.
    close = np.abs(program.rows(out, T) - want) <= 2e-5 * np.abs(want).max()
    assert close.mean() > 0.95


def test_only_input_in_f32_is_rounded() -> None:
    program = Program(Pool(1), max_tokens=T, max_outputs=1, exact=False)
    x, out, stored = program.buffer(64), program.buffer(16), FORMATS["bf16"]
    packed = oracle.pack(stored, random(16, 64))
    arena = Arena(packed.nbytes)
    given = Weight(stored, 16, 64, 1, arena.address, arena, FORMATS["int8"])
    with pytest.raises(NativeError, match="only input that is read as f32"):
        program.append("linear", (out, x), weight=(given,))
    with pytest.raises(NativeError, match="is not a valid format"):
        wrong = Weight(F32, 16, 64, 1, arena.address, arena, Format("", 5))
        program.append("linear", (out, x), weight=(wrong,))


@pytest.mark.each_once
@pytest.mark.parametrize("formats", ["bf16 bf16", "int4 int4", "int4-g32 int8-row"])
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_a_model_reads_as_its_own_recipe_says(name: str, formats: str, tmp_path: Path) -> None:
    """An exact engine that rounds as the fast one does gives what that one gives; without, something else."""
    experts, dense = formats.split()
    checkpoint = write_checkpoint(case_named(name), tmp_path / "checkpoint")
    pack = convert_checkpoint(checkpoint, tmp_path / "pack", experts=experts, dense=dense)
    ids = np.random.default_rng(3).integers(0, 99, 20).tolist()

    def logits(**how: object) -> Array:
        engine = load_engine(pack, all_logits=True, threads=2, context=32, **how)
        found: Array = logits_of(engine.session(), ids)
        return found

    fast, exact = logits(cache="f32"), logits(exact=True)
    rounding = logits(exact=True, rounding=Recipe.named(experts, dense))
    # Sums in another order move a value across a step of the grid now and then, or a token to another expert: all that
    # see that token differ then. So it is the first tokens that are compared.
    apart = np.abs(exact - fast).max(axis=1)
    off = np.abs(rounding - fast).max(axis=1)
    assert np.quantile(off, 0.2) < 0.01 * np.quantile(apart, 0.2)
    assert np.abs(logits(exact=True, cache="bf16") - exact).max() > 0
