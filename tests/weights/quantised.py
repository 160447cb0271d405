"""Quantized matrices as the hub's checkpoints hold them, and what they mean, element by element.

Each function gives the parts of one matrix under a stem (name -> dtype, shape, bytes) and its values [n, k] f32,
taken from the formulas of the formats' authors one number at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from oracle import E4M3_VALUES

Parts = dict[str, tuple[str, tuple[int, ...], bytes]]
Made = tuple[Parts, np.ndarray]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ, order_map: nibble i holds this column of eight


def bf16(x: np.ndarray) -> np.ndarray:
    """Values that bf16 has."""
    return (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def part(dtype: str, x: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """As stored; the values must be exact in the type."""
    if dtype == "F8_E8M0":
        return dtype, x.shape, (np.log2(x) + 127).astype("u1").tobytes()
    if dtype == "BF16":
        return dtype, x.shape, (x.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    kinds = {"F32": "<f4", "F16": "<f2", "I32": "<u4", "U8": "u1", "I8": "i1", "F8_E4M3": "u1"}
    return dtype, x.shape, x.astype(kinds[dtype]).tobytes()


def scales_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random positive scales that are exact in the type."""
    if dtype == "F8_E8M0":
        return np.exp2(rng.integers(-20, 4, shape)).astype(np.float32)
    x = rng.uniform(0.5, 2, shape).astype(np.float32) * np.float32(2.0**-7)
    if dtype == "BF16":
        return bf16(x)
    return x.astype(np.float16).astype(np.float32) if dtype == "F16" else x


def every(n: int, k: int, value: Callable[[int, int], float]) -> np.ndarray:
    """[n, k] of value(row, column)."""
    return np.array([[value(r, c) for c in range(k)] for r in range(n)], dtype=np.float32)


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [a, b] of which 32 / bits lie in a word, from its low end on, [a, ceil(b * bits / 32)] u32."""
    per_word = 32 // bits
    out = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), dtype=np.uint32)
    for i in range(codes.shape[1]):
        out[:, i // per_word] |= codes[:, i].astype(np.uint32) << np.uint32(bits * (i % per_word))
    return out


def fp8(stem: str, n: int, k: int, rng: np.random.Generator, *, scale: str, of: str) -> Made:
    """E4M3 with a scale `of` "blocks" (weight_scale_inv), "V4 blocks" (scale), "standing blocks", 32 "columns", "rows",
    "row vector" or the "matrix"."""
    codes = rng.integers(0, 127, (n, k)) + 128 * rng.integers(0, 2, (n, k))
    name = {"blocks": "weight_scale_inv", "V4 blocks": "scale"}.get(of, "weight_scale")
    stands = of == "standing blocks"  # modelopt
    of = of.removeprefix("V4 ").removeprefix("standing ")
    shape = {
        "blocks": (-(-n // 128), -(-k // 128)),
        "columns": (n, k // 32),
        "rows": (n, 1),
        "row vector": (n,),
        "matrix": (),
    }[of]
    s = scales_of(rng, shape, scale)
    at: Callable[[int, int], float] = {
        "blocks": lambda r, c: s[r // 128, c // 128],
        "columns": lambda r, c: s[r, c // 32],
        "rows": lambda r, c: s[r, 0],
        "row vector": lambda r, c: s[r],
        "matrix": lambda r, c: s[()],
    }[of]  # fmt: skip
    stored = part(scale, s.reshape(shape[0], 1, shape[1], 1) if stands else s)
    parts = {f"{stem}.weight": part("F8_E4M3", codes), f"{stem}.{name}": stored}
    return parts, every(n, k, lambda r, c: E4M3_VALUES[codes[r, c]] * at(r, c))


def int8(stem: str, n: int, k: int, rng: np.random.Generator, *, scale: str) -> Made:
    """compressed-tensors int-quantized: a scale for each row."""
    codes, s = rng.integers(-127, 128, (n, k)), scales_of(rng, (n, 1), scale)
    parts = {f"{stem}.weight": part("I8", codes), f"{stem}.weight_scale": part(scale, s)}
    return parts, every(n, k, lambda r, c: np.float32(codes[r, c]) * s[r, 0])


def packed(
    stem: str, n: int, k: int, rng: np.random.Generator, *,
    bits: int, group: int, scale: str, symmetric: bool = True,
) -> Made:  # fmt: skip
    """compressed-tensors pack-quantized; group 0: a scale for each row."""
    half, columns = 1 << bits - 1, -(-k // group) if group else 1
    codes = rng.integers(-half, half, (n, k))
    if bits == 8:
        codes = np.maximum(codes, -127)
    zeros = (
        np.zeros((n, columns), np.int64) if symmetric else rng.integers(-half, half, (n, columns))
    )
    s = scales_of(rng, (n, columns), scale)
    parts = {
        f"{stem}.weight_packed": part("I32", words(codes + half, bits)),
        f"{stem}.weight_scale": part(scale, s),
        f"{stem}.weight_shape": part("I32", np.array([n, k])),
    }
    if not symmetric:  # packed along the rows
        parts[f"{stem}.weight_zero_point"] = part("I32", words(zeros.T + half, bits).T)
    at = group or k
    return parts, every(
        n, k, lambda r, c: np.float32(codes[r, c] - zeros[r, c // at]) * s[r, c // at]
    )


def mxfp4(stem: str, outer: tuple[int, ...], k: int, rng: np.random.Generator) -> Made:
    """gpt-oss: blocks [..., k / 32, 16] of two codes in a byte, the first in its low half."""
    blocks = rng.integers(0, 256, (*outer, k // 32, 16))
    exponents = rng.integers(110, 130, (*outer, k // 32))
    size = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def value(row: int, column: int) -> float:
        byte = blocks.reshape(-1, k // 2)[row, column // 2]
        code = byte >> 4 if column % 2 else byte & 15
        sign = -1 if code & 8 else 1
        return (
            sign
            * size[code & 7]
            * 2.0 ** int(exponents.reshape(-1, k // 32)[row, column // 32] - 127)
        )

    parts = {f"{stem}_blocks": part("U8", blocks), f"{stem}_scales": part("U8", exponents)}
    return parts, every(int(np.prod(outer)), k, value).reshape(*outer, k)


def fp4(stem: str, n: int, k: int, rng: np.random.Generator) -> Made:
    """DeepSeek-V4: the bytes of gpt-oss's MXFP4, rows of codes and rows of scales, under other names."""
    parts, values = mxfp4("m", (n,), k, rng)
    codes, scales = parts["m_blocks"][2], parts["m_scales"][2]
    stored = {
        f"{stem}.weight": ("I8", (n, k // 2), codes),
        f"{stem}.scale": ("F8_E8M0", (n, k // 32), scales),
    }
    return stored, values


def packed_fp4(stem: str, n: int, k: int, rng: np.random.Generator, *, codes: str) -> Made:
    """MXFP4 as compressed-tensors, modelopt and Quark have it: the bytes of gpt-oss, under names of their own."""
    parts, values = mxfp4("m", (n,), k, rng)
    stored = {
        f"{stem}.{codes}": ("U8", (n, k // 2), parts["m_blocks"][2]),
        f"{stem}.weight_scale": ("U8", (n, k // 32), parts["m_scales"][2]),
    }
    return stored, values


def nvfp4(stem: str, n: int, k: int, rng: np.random.Generator, *, divides: bool) -> Made:
    """compressed-tensors (whose scales are divided by one number of the matrix) and modelopt (multiplied)."""
    codes, scales = rng.integers(0, 256, (n, k // 2)), rng.integers(0, 127, (n, k // 16))
    whole = np.float32(rng.uniform(500, 3000) if divides else rng.uniform(1e-4, 1e-3))
    size = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def value(row: int, column: int) -> np.float32:
        code = codes[row, column // 2] >> 4 * (column % 2) & 15
        stored = E4M3_VALUES[scales[row, column // 16]]
        scale = stored / whole if divides else stored * whole
        return np.float32(-size[code & 7] if code & 8 else size[code & 7]) * scale

    name, one = ("weight_packed", (1,)) if divides else ("weight", ())
    parts = {
        f"{stem}.{name}": part("U8", codes),
        f"{stem}.weight_scale": part("F8_E4M3", scales),
        f"{stem}.weight_{'global_scale' if divides else 'scale_2'}": part(
            "F32", np.full(one, whole)
        ),
    }
    return parts, every(n, k, value)


def gptq(
    stem: str, n: int, k: int, rng: np.random.Generator, *, group: int,
    symmetric: bool = True, reordered: bool = False, v2: bool = False, g_idx: bool = True, bits: int = 4,
) -> Made:  # fmt: skip
    """AutoGPTQ: words of eight inputs (four of 8 bits); stored zeros are one less than meant, but in version 2."""
    groups, most = -(-k // group), 1 << bits
    codes, s = rng.integers(0, most, (k, n)), scales_of(rng, (groups, n), "F16")
    zeros = np.full((groups, n), most // 2) if symmetric else rng.integers(1, most, (groups, n))
    order = np.arange(k) // group
    if reordered:
        order = rng.permutation(order)
    parts = {
        f"{stem}.qweight": part("I32", words(codes.T, bits).T),
        f"{stem}.qzeros": part("I32", words(zeros if v2 else zeros - 1, bits)),
        f"{stem}.scales": part("F16", s),
    }
    if g_idx:
        parts[f"{stem}.g_idx"] = part("I32", order)
    return parts, every(
        n, k, lambda r, c: np.float32(codes[c, r] - zeros[order[c], r]) * s[order[c], r]
    )


def awq(
    stem: str, n: int, k: int, rng: np.random.Generator, *, group: int, symmetric: bool = False
) -> Made:
    """AutoAWQ (gemm): words of eight outputs, whose nibble i holds output AWQ_COLUMNS[i]."""
    groups = -(-k // group)
    codes, s = rng.integers(0, 16, (k, n)), scales_of(rng, (groups, n), "F16")
    zeros = np.full((groups, n), 8) if symmetric else rng.integers(0, 16, (groups, n))

    def ordered(x: np.ndarray) -> np.ndarray:
        return words(x.reshape(len(x), -1, 8)[:, :, list(AWQ_COLUMNS)].reshape(len(x), -1), 4)

    parts = {
        f"{stem}.qweight": part("I32", ordered(codes)),
        f"{stem}.qzeros": part("I32", ordered(zeros)),
        f"{stem}.scales": part("F16", s),
    }
    return parts, every(
        n, k, lambda r, c: np.float32(codes[c, r] - zeros[c // group, r]) * s[c // group, r]
    )


def compressed(**weights: object) -> dict[str, object]:
    """The config of compressed-tensors as Kimi-K2-Thinking has it, with these weights."""
    group = {
        "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {"type": "int", "symmetric": True, "dynamic": False, "actorder": None, **weights},
    }  # fmt: skip
    form = {"int": "pack-quantized", "float": "float-quantized"}[group["weights"]["type"]]
    if group["weights"]["type"] == "float" and "group_size" in weights:
        form = {4: "nvfp4-pack-quantized", 8: "mxfp8-quantized"}[weights["num_bits"]]
        form = (
            "mxfp4-pack-quantized"
            if weights["strategy"] == "group" and weights["num_bits"] == 4
            else form
        )
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"], "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }  # fmt: skip


def auto_round(packing: str, **more: object) -> dict[str, object]:
    """The config of auto-round, which names the layout that it writes."""
    return {
        "quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "bits": 4, "group_size": 64,
        "sym": True, "data_type": "int", "autoround_version": "0.9.2", "iters": 200,
        "extra_config": {"lm_head": {"bits": 16}, "model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
        "block_name_to_quantize": "model.layers", **more,
    }  # fmt: skip


def modelopt(algorithm: str, **more: object) -> dict[str, object]:
    """The config of modelopt as `config.json` has it since its version 0.29."""
    return {
        "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "model.layers.0*"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.33.1"},
        "config_groups": {"group_0": {"weights": {"dynamic": False}, "targets": ["Linear"]}}, **more,
    }  # fmt: skip


def quark(**weight: object) -> dict[str, object]:
    """The config of Quark with these weights."""
    layer = {
        "weight": {
            "is_dynamic": False, "symmetric": True, "round_method": "half_even", "ch_axis": None, "group_size": None,
            "observer_cls": "PerTensorMinMaxObserver", **weight,
        },
        "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "output_tensors": None, "bias": None,
    }  # fmt: skip
    return {
        "quant_method": "quark", "global_quant_config": layer, "exclude": ["lm_head", "*.gate"], "algo_config": None,
        "layer_quant_config": {"*k_proj": layer}, "layer_type_quant_config": {}, "quant_mode": "eager_mode",
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }  # fmt: skip
