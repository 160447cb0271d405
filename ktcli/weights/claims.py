"""The rules that determine the storage type of a tensor: from the names, types and shapes in its files, and its
scheme.

Every rule begins with the name that a model asks for and looks for the parts that would hold it; a part that
is there without its companions, or whose shapes contradict each other, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ktcli.errors import BadCheckpoint
from ktcli.weights.across import Across
from ktcli.weights.coded import (
    E8M0,
    FP8_BLOCK,
    INT8_ROWS,
    MXFP4,
    MXFP8,
    NVFP4_COLUMNS,
    SCALES,
    NvFp4,
    fp8,
    integers,
    lossless_int4,
)
from ktcli.weights.scheme import FP4_GROUP, Integers, Scheme
from ktcli.weights.storage import PLAIN, WHOLE, Part, Storage, StorageSource

Parts = Mapping[str, Part]
Found = tuple[Storage, tuple[Part, ...]]
Shaped = tuple[tuple[int, ...], Storage, tuple[Part, ...]]

# Suffixes of a module's or weight's name. Their numbers kt takes from another tensor, or they concern
# activations and caches, which kt rounds in its own way.
COMPANIONS = re.compile(
    r".*[._](weight_shape|weight_zero_point|weight_g_idx|g_idx|input_scale|input_global_scale|output_scale|input_zero_point|"
    r"activation_scale|k_scale|v_scale|q_scale|kv_scale|k_zero_point|v_zero_point)"
)

INTEGERS = ("I32",)  # how zero points and the groups of inputs are stored
ROUTED = re.compile(r"(?:.*\.)?experts\..*")  # not the shared experts


def source_names(parts: Parts) -> set[str]:
    """Returns the names by which tensors of a checkpoint can be asked for: those in its files, and "X.weight" for each
    tensor that is stored as "X.weight_packed" or "X.qweight"."""
    names = set(parts)
    for name in parts:
        for suffix in (".weight_packed", ".qweight"):
            if name.endswith(suffix):
                names.add(name.removesuffix(suffix) + ".weight")
    return names


def source_named(name: str, parts: Parts, scheme: Scheme) -> StorageSource:
    """Returns the checkpoint tensor called `name`, one of `source_names`: its shape, its storage (how its numbers are
    coded) and the tensors of the files that it is made of.

    Raises:
        BadCheckpoint: it is of a type that kt does not read, or its parts do not fit together.
    """
    part, stem = parts.get(name), name.removesuffix(".weight")
    if part is None:
        packed = parts.get(f"{stem}.weight_packed")
        if packed is None:
            return StorageSource(name, *_across(stem, parts, scheme))
        read = _floats if packed.entry.dtype == "U8" else _packed
        return StorageSource(name, *read(stem, packed, parts, scheme))
    dtype, shape = part.entry.dtype, part.entry.shape
    if dtype in PLAIN:
        return StorageSource(name, shape, PLAIN[dtype], (part,))
    if dtype in WHOLE and name.endswith(".tid2eid"):  # others are no numbers of their own
        return StorageSource(name, shape, WHOLE[dtype], (part,))
    if dtype == "F8_E4M3" and len(shape) > 1:
        return StorageSource(name, shape, *_fp8(part, parts, scheme))
    fp4 = scheme.experts == "fp4" and ROUTED.fullmatch(name) is not None
    if dtype == "I8" and len(shape) == 2 and (fp4 or _short(name) in parts):
        return StorageSource(name, *_fp4(part, parts, scheme))
    if dtype == "I8" and len(shape) == 2 and f"{name}_scale" in parts:
        scales = _companion(part, f"{name}_scale", parts, [(shape[0],), (shape[0], 1)])
        return StorageSource(name, shape, INT8_ROWS, (part, scales))
    if dtype == "U8" and len(shape) == 2 and f"{name}_scale" in parts:
        return StorageSource(name, *_floats(stem, part, parts, scheme))
    if dtype == "U8" and name.endswith("_blocks") and len(shape) > 2 and shape[-1] == 16:
        scale_name = name.removesuffix("_blocks") + "_scales"
        scales = _companion(part, scale_name, parts, [shape[:-1]])
        return StorageSource(name, (*shape[:-2], 32 * shape[-2]), MXFP4, (part, scales))
    raise BadCheckpoint(
        f"{name} in {part.file} is stored as {dtype}, which kt cannot convert",
        hint=f"kt reads {', '.join(PLAIN)} and quantized weights with their scales",
    )


def _companion(
    part: Part,
    name: str,
    parts: Parts,
    shapes: list[tuple[int, ...]],
    dtypes: Collection[str] = SCALES,
) -> Part:
    """The tensor `name` that `part` cannot be read without, of one of these shapes and types."""
    found = parts.get(name)
    if found is None:
        raise BadCheckpoint(f"{part.name} in {part.file} lacks its {name}")
    if found.entry.dtype not in dtypes:
        known = ", ".join(sorted(dtypes))
        raise BadCheckpoint(
            f"{name} in {found.file} is stored as {found.entry.dtype}; kt reads {known} there"
        )
    if found.entry.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise BadCheckpoint(
            f"{name} in {found.file} has the shape {list(found.entry.shape)}, "
            f"but {part.name} requires {wanted}"
        )
    return found


def _fp8(part: Part, parts: Parts, scheme: Scheme) -> Found:
    """The storage of an FP8 tensor; the number of scales tells which rows and columns share one."""
    if scheme.experts == "fp4" and ROUTED.fullmatch(part.name):
        raise BadCheckpoint(
            f"{part.name} in {part.file} is stored as F8_E4M3, but config.json says that experts are fp4"
        )
    *outer, n, k = part.entry.shape
    several = tuple(outer)
    blocks = (*several, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
    shapes: dict[tuple[int, ...], tuple[int, int]] = {
        (*several, 1, 1): (0, 0),
        several or (1,): (0, 0),
        several: (0, 0),
        (*several, n): (1, 0),
        (*several, n, 1): (1, 0),
        blocks: (FP8_BLOCK, FP8_BLOCK),
        (*several, blocks[-2], 1, blocks[-1], 1): (FP8_BLOCK, FP8_BLOCK),  # modelopt
    }
    plain, inverse = f"{part.name}_scale", f"{part.name}_scale_inv"
    name = plain if plain in parts and inverse not in parts else inverse
    short = _short(part.name)
    if scheme.method != "fp8" and k % FP4_GROUP == 0 and name in parts:
        fine = parts[name].entry
        if fine.dtype in E8M0 and fine.shape == (*several, n, k // FP4_GROUP):
            return MXFP8, (part, parts[name])
    if short not in parts:
        scales = _companion(part, name, parts, list(shapes))
    elif name in parts:
        raise BadCheckpoint(f"{part.name} in {part.file} has both {name} and {short}")
    else:
        scales = _companion(part, short, parts, [blocks], ("F32", E8M0[0]))
    if scheme.scales == "float" and scales.entry.dtype in E8M0:
        raise BadCheckpoint(
            f"{scales.name} in {scales.file} is stored as {scales.entry.dtype}, but config.json says that scale_fmt "
            "is float"
        )
    return fp8(shapes[scales.entry.shape]), (part, scales)


def _short(name: str) -> str:
    """The name of a weight's scales in DeepSeek-V4."""
    return name.removesuffix("weight") + "scale"


def _fp4(part: Part, parts: Parts, scheme: Scheme) -> Shaped:
    """The storage of DeepSeek-V4's experts. Signed bytes could be other numbers too, so config.json must say that
    they are FP4."""
    n, row_bytes = part.entry.shape
    scale = _short(part.name)
    if scheme.experts != "fp4" or not ROUTED.fullmatch(part.name):
        what = "no routed expert" if scheme.experts == "fp4" else "not fp4 according to config.json"
        raise BadCheckpoint(
            f"{part.name} in {part.file} is stored as I8 next to {scale}, like fp4 experts, but is {what}"
        )
    k = 2 * row_bytes
    if k % FP4_GROUP:
        raise BadCheckpoint(
            f"{part.name} in {part.file} holds rows of {k} fp4 numbers; kt reads only multiples of {FP4_GROUP}"
        )
    scales = _companion(part, scale, parts, [(n, k // FP4_GROUP)], E8M0[:1])
    return (n, k), MXFP4, (part, scales)


def _floats(stem: str, part: Part, parts: Parts, scheme: Scheme) -> Shaped:
    """The storage of packed E2M1 codes: the type of their scales tells which kind it is, and the config has to name
    that kind."""
    name = f"{stem}.weight_scale"
    scales, shape = parts.get(name), part.entry.shape
    if len(shape) != 2 or scales is None:
        raise BadCheckpoint(
            f"{part.name} in {part.file} is U8 {list(shape)} {'without its' if scales is None else 'beside'} {name}"
        )
    n, k = shape[0], 2 * shape[1]
    kind, group = (
        ("nvfp4", NVFP4_COLUMNS) if scales.entry.dtype == "F8_E4M3" else ("mxfp4", FP4_GROUP)
    )
    if kind not in scheme.floats:
        raise BadCheckpoint(
            f"{part.name} in {part.file} has scales of {scales.entry.dtype}, as {kind} does, but config.json "
            "does not say so"
        )
    if k % group:
        raise BadCheckpoint(
            f"{part.name} in {part.file} holds rows of {k} {kind} numbers; kt reads only multiples of {group}"
        )
    known = ("F8_E4M3",) if kind == "nvfp4" else E8M0
    scales = _companion(part, name, parts, [(n, k // group)], known)
    if kind == "mxfp4":
        return (n, k), MXFP4, (part, scales)
    divisor = f"{stem}.weight_global_scale"
    divides = divisor in parts
    factor = divisor if divides else f"{stem}.weight_scale_2"
    whole = _companion(part, factor, parts, [(), (1,)], ("F32",))
    return (n, k), NvFp4(divides), (part, scales, whole)


def _packed(stem: str, part: Part, parts: Parts, scheme: Scheme) -> Shaped:
    """The storage of a compressed-tensors matrix: bits and group are those in the config that fit the shapes."""
    scales = parts.get(f"{stem}.weight_scale")
    if part.entry.dtype != "I32" or len(part.entry.shape) != 2 or scales is None:
        raise BadCheckpoint(
            f"{part.name} in {part.file} is {part.entry.dtype} {list(part.entry.shape)} "
            f"{'without its weight_scale' if scales is None else 'and not I32 of two dimensions'}"
        )
    n, words = part.entry.shape
    for bits, group, symmetric in scheme.groups if scales.entry.dtype in PLAIN else ():
        k = words * 32 // bits
        columns = -(-k // group) if group else 1
        if scales.entry.shape not in [(n, columns)] + [(n,)] * (columns == 1):
            continue
        zeros: tuple[Part, ...] = ()
        if not symmetric:
            shape = (-(-n * bits // 32), columns)
            zeros = (_companion(part, f"{stem}.weight_zero_point", parts, [shape], INTEGERS),)
        storage = integers(bits, group, scales.entry.dtype, symmetric=symmetric)
        return (n, k), storage, (part, scales, *zeros)
    known = ", ".join(
        f"{bits} bits in groups of {group or 'a row'}" for bits, group, _ in scheme.groups
    )
    raise BadCheckpoint(
        f"{scales.name} in {scales.file} is {scales.entry.dtype} {list(scales.entry.shape)}, but config.json gives "
        f"{part.name} {known or 'no packed integers'}"
    )


def _across(stem: str, parts: Parts, scheme: Scheme) -> Shaped:
    """The storage of a GPTQ or AWQ matrix: of the kinds of integers in the config the one that fits the shapes."""
    part = parts[f"{stem}.qweight"]
    if (
        scheme.method not in ("gptq", "awq")
        or part.entry.dtype != "I32"
        or len(part.entry.shape) != 2
    ):
        raise BadCheckpoint(
            f"{part.name} in {part.file} is {part.entry.dtype} {list(part.entry.shape)}, but config.json does not "
            "call the checkpoint gptq or awq"
        )
    outputs = scheme.method == "awq"
    fitting = [kind for kind in scheme.groups if _fits(stem, kind, parts, outputs)]
    bits, group, _ = (fitting or scheme.groups)[0]
    (n, k), groups, zeros_shape = _sizes(part, bits, group, outputs)
    if not k or not n or k % 8 or n % 8:
        raise BadCheckpoint(
            f"{part.name} in {part.file} holds {k} x {n} codes; kt reads only multiples of 8"
        )
    scales = _companion(part, f"{stem}.scales", parts, [(groups, n)], PLAIN)
    zeros = _companion(part, f"{stem}.qzeros", parts, [zeros_shape], INTEGERS)
    order: tuple[Part, ...] = ()
    if f"{stem}.g_idx" in parts:
        order = (_companion(part, f"{stem}.g_idx", parts, [(k,)], INTEGERS),)
    elif scheme.reordered:
        raise BadCheckpoint(f"{part.name} in {part.file} lacks its {stem}.g_idx")
    exact = bits == 4 and all(kind[2] for kind in fitting) and not scheme.reordered
    lossless = lossless_int4(group, scales.entry.dtype) if exact else None
    label = f"{scheme.method} of {bits} bits with groups of {group or k}"
    storage = Across(label, lossless, bits, group, scheme.zero_plus, outputs)
    return (n, k), storage, (part, scales, zeros, *order)


def _sizes(
    part: Part, bits: int, group: int, outputs: bool
) -> tuple[tuple[int, int], int, tuple[int, int]]:
    """The shape of the matrix that a `qweight` of so many bits is, its groups of inputs, and the shape of `qzeros`."""
    k, n = part.entry.shape
    per_word = 32 // bits
    k, n = (k, per_word * n) if outputs else (per_word * k, n)
    groups = -(-k // (group or k or 1))
    return (n, k), groups, (groups, n // per_word)


def _fits(stem: str, kind: Integers, parts: Parts, outputs: bool) -> bool:
    """Returns whether scales and zeros of a matrix have the shapes that a kind of integers has."""
    (n, _), groups, zeros = _sizes(parts[f"{stem}.qweight"], *kind[:2], outputs)
    wanted = {f"{stem}.scales": (groups, n), f"{stem}.qzeros": zeros}
    return all(name in parts and parts[name].entry.shape == wanted[name] for name in wanted)
