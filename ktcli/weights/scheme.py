"""The quantization declared in a config, as far as kt supports it; everything else is refused by name.

Which modules are quantized is not read here: `ignore` and `modules_to_not_convert` name those that lie there
as they are, and the files show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ktcli.errors import BadCheckpoint
from ktcli.records import dataclass

READS = (
    "kt reads bf16, f16, f32, fp8 (E4M3; scales of 128 x 128 blocks, rows, matrices or 32 columns), mxfp4, nvfp4, "
    "int4 and int8 of compressed-tensors, gptq of 4 and 8 bits, awq of 4 bits, and auto-round, modelopt and quark "
    "where they write these: convert such a release of the model"
)
EXPERTS = "expert_dtype"
MAX_GROUP = 65_536  # columns that share a scale
FP4_GROUP = 32  # columns that share a power of two, in MXFP4 and MXFP8
MAX_RULES = 100_000  # exceptions and layers that a config lists; a model of 60 layers and 384 experts has 70,000

Json = Mapping[str, Any]
Integers = tuple[int, int, bool]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantization of a checkpoint.

    Attributes:
        method: the name of the layout; "" where nothing is quantized.
        groups: for each kind of packed integers: bits; columns that share a scale, 0 for a whole row; whether they are
            declared to be symmetric.
        reordered: GPTQ: whether groups are not in the order of the columns.
        zero_plus: GPTQ: the number added to stored zero points.
        floats: the declared kinds of packed floats, "mxfp4" and "nvfp4".
        experts: FP8: the declared type of the routed experts, "fp8" or "fp4"; "" where nothing is said.
        scales: FP8: the declared kind of block scales, "ue8m0" (powers of two, of any type) or "float";
            "" where nothing is said.
    """

    method: str = ""
    groups: tuple[Integers, ...] = ()
    reordered: bool = False
    zero_plus: int = 0
    floats: frozenset[str] = frozenset()
    experts: str = ""
    scales: str = ""


def read_scheme(config: Json, beside: Json | None = None) -> Scheme:
    """Returns how a checkpoint is quantized, as its `config.json`, or the part of it about the text model, says; an
    empty `Scheme()`: it is not quantized.

    Args:
        beside: the object in `hf_quant_config.json`, which counts where `config.json` says nothing.
    Raises:
        BadCheckpoint: the quantization is of a kind that kt does not read, or contradicts itself.
    """
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, Mapping) else [config]
    keys = ("quantization_config", "compression_config")
    found = next((p[key] for p in places for key in keys if p.get(key) is not None), None)
    if found is None and beside:
        found = {"quant_method": "modelopt", **beside}
    if found is None:
        return Scheme()
    if not isinstance(found, Mapping):
        _refuse("is quantized", found)
    method = found.get("quant_method")
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        _refuse("is quantized with", method)
    # DeepSeek-V4 says it beside the quantization, V4.1 and transformers 5.23 within it.
    said = [each[EXPERTS] for each in (found, *places) if each.get(EXPERTS) is not None]
    if any(each != said[0] for each in said):
        _refuse(f"gives its {EXPERTS} as", said, "which contradict each other")
    return read({**found, EXPERTS: said[0]} if said else found)


# Where a checkpoint holds 4-bit floats: the format of at most as many bits that comes nearest to its experts. Of NVFP4
# the others of 4 bits make more of an error: nl4-g32 7.4 to 7.8 %, nl4-s8 7.6 to 8.0, int4-g32 8 to 10; int8, of 8
# bits, 0.8 to 1.7 %.
_NEAREST = {"mxfp4": "mxfp4", "nvfp4": "nl4-g32"}


def usual_experts(config: Json) -> str | None:
    """Returns the name of kt's format that comes nearest to a checkpoint's experts, if its `config.json` says that they
    are MXFP4 or NVFP4 (4-bit floats); otherwise None.

    Raises:
        BadCheckpoint: as `read_scheme`.
    """
    scheme = read_scheme(config)
    is_mxfp4 = scheme.method == "mxfp4" or scheme.experts == "fp4"
    kinds = sorted({*scheme.floats, *["mxfp4"] * is_mxfp4})
    return _NEAREST[kinds[0]] if len(kinds) == 1 else None


def loss_of(config: Json, experts: str) -> str:
    """Returns a sentence for the user about what the format `experts` loses on a checkpoint with NVFP4 weights, which
    no format of kt but f32 holds exactly; "": its weights are not NVFP4. Raises BadCheckpoint as `read_scheme`."""
    if "nvfp4" not in read_scheme(config).floats:
        return ""
    nearest = _NEAREST["nvfp4"]
    if experts == nearest:
        return (
            f"no number format of kt holds its NVFP4 weights exactly: {nearest} adds an error of about 8 %,"
            " --experts int8 one of 1 to 2 %"
        )
    return f"no number format of kt holds its NVFP4 weights exactly: the nearest with 4 bits is {nearest}"


def _refuse(what: str, value: object, kind: str = "which kt does not read") -> NoReturn:
    text = repr(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    raise BadCheckpoint(f"the checkpoint {what} {shown}, {kind}", hint=READS)


def _require(found: Json, key: str, *allowed: object, method: str = "") -> Any:
    """The value of a key, which must be one of the allowed; a missing one is None."""
    value = found.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
        known = ", ".join(repr(each) for each in allowed if each is not None)
        method = method or found.get("quant_method") or found.get("type") or "quantization"
        kind = f"but kt reads only {known}" if len(known) < 100 else "which kt does not read"
        _refuse(f"is quantized ({method}) with {key}", value, kind)
    return value


def _group(found: Json) -> int:
    """The number of columns per scale; 0: a whole row, which configs call -1."""
    value = found.get("group_size")
    if value is None or value == -1:
        return 0
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_GROUP:
        _refuse("is quantized with group_size", value, f"kt reads -1 and 1 to {MAX_GROUP}")
    return value


def _rules(found: Json, key: str) -> Json:
    """The object of a key that lists layers, each with what is different there; {} where there is none."""
    value = found.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_RULES:
        _refuse(f"has the {key}", value)
    return value


def _fp8(found: Json) -> Scheme:
    _require(found, "fmt", None, "e4m3", "float8_e4m3fn")
    _require(found, "weight_block_size", None, [128, 128])
    experts = _require(found, EXPERTS, None, "fp8", "fp4")
    scales = _require(found, "scale_fmt", None, "ue8m0", "float")
    return Scheme("fp8", experts=experts or "", scales=scales or "")


def _mxfp8(found: Json) -> Scheme:
    _require(found, "fmt", None, "e4m3", "float8_e4m3fn")
    _require(found, "weight_block_size", None, [1, 32])
    _require(found, "scale_fmt", None, "ue8m0")
    return Scheme("mxfp8")


# --- GPTQ, AWQ and those who write their layouts ------------------------------------------------------------------


def _gptq(found: Json, zero_plus: int = 1) -> Scheme:
    form = "checkpoint_format" if found.get("checkpoint_format") is not None else "format"
    version = _require(found, form, None, "gptq", "gptq_v2")
    kinds = _kinds(found, _rules(found, "dynamic"), 4, 8)
    return Scheme(
        "gptq",
        kinds,
        reordered=_require(found, "desc_act", None, True, False) is True,
        zero_plus=0 if version == "gptq_v2" else zero_plus,
    )


def _kinds(found: Json, exceptions: Json, *bits: int) -> tuple[Integers, ...]:
    """The kinds of integers of a checkpoint and of the layers in it that are exceptions; one of 16 or more bits, or
    whose name begins with "-:" (GPTQModel), lies there as it is."""
    kinds = dict.fromkeys([_kind(found, *bits)])
    for name, other in exceptions.items():
        if not isinstance(other, Mapping):
            _refuse(f"quantizes {name[:60]} with", other)
        if not name.startswith("-:") and other.get("bits", found.get("bits")) not in (16, 32):
            kinds[_kind({**found, **other}, *bits)] = None
    return tuple(kinds)


def _kind(found: Json, *bits: int) -> Integers:
    width = _require(found, "bits", *bits)
    symmetric = _require(found, "sym", None, True, False) is not False
    return width, _group(found), symmetric


def _awq(found: Json) -> Scheme:
    bits = "bits" if "bits" in found else "w_bit"
    _require(found, bits, 4)
    for key in ("version", "checkpoint_format", "format"):
        version = found.get(key)
        if version is not None and (not isinstance(version, str) or version.lower() != "gemm"):
            _refuse(f"is quantized (awq) with {key}", version, "kt reads 'gemm' only")
    size = found if "group_size" in found else {"group_size": found.get("q_group_size")}
    zero = _require(found, "zero_point", None, True, False)
    return Scheme("awq", ((4, _group(size), zero is False),))


# The layout by what auto-round calls its packing, with or without "auto_round:" before it; what it calls after itself
# alone is GPTQ's with zero points as they are.
_OF_AUTO_ROUND = {
    "auto_gptq": "gptq",
    "gptq": "gptq",
    "auto_round": "gptq_v2",
    "gptqmodel": "gptq_v2",
    "auto_awq": "awq",
    "awq": "awq",
    "llm_compressor": "compressed-tensors",
    "fp8_static": "fp8",
}
_FLOATS_OF_AUTO_ROUND = {
    **dict.fromkeys(("mx_fp", "mx_fp4", "mx_fp_rceil", "mx_fp4_rceil"), "mxfp4"),
    **dict.fromkeys(("nv_fp", "nv_fp4"), "nvfp4"),
}


def _auto_round(found: Json) -> Scheme:
    """auto-round writes the layouts of others, and says which; see its `export_to_autoround`."""
    packing = found.get("packing_format", "auto_round:auto_gptq")
    name = packing.removeprefix("auto_round:") if isinstance(packing, str) else ""
    layout = _OF_AUTO_ROUND.get(name.partition(":")[0])
    if layout is None:
        _refuse("is quantized (auto-round) with packing_format", packing)
    exceptions = _rules(found, "extra_config")
    if layout == "fp8":
        _require(found, "fmt", None, "e4m3")
        return Scheme("fp8")
    if layout == "compressed-tensors":
        _require(found, "bits", 4)
        kind = _require(found, "data_type", *_FLOATS_OF_AUTO_ROUND)
        return Scheme(layout, floats=frozenset((_FLOATS_OF_AUTO_ROUND[kind],)))
    if layout == "awq":
        return Scheme("awq", _kinds(found, exceptions, 4))
    return Scheme("gptq", _kinds(found, exceptions, 4, 8), zero_plus=int(layout == "gptq"))


# --- compressed-tensors -------------------------------------------------------------------------------------------

_FORMATS = (
    "pack-quantized float-quantized int-quantized naive-quantized nvfp4-pack-quantized mxfp4-pack-quantized "
    "mxfp8-quantized dense"
).split()


def _compressed(found: Json) -> Scheme:
    _require(found, "format", None, *_FORMATS, "mixed-precision")
    sparsity = found.get("sparsity_config")
    if sparsity not in (None, {}) and (
        not isinstance(sparsity, Mapping) or sparsity.get("format") not in (None, "dense")
    ):
        _refuse("is sparse with", sparsity)
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or len(groups) > 64:
        _refuse("has the config_groups", groups)
    packed, floats = list[Integers](), set[str]()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            _refuse("quantizes only activations, or nothing, with", group)
        if isinstance(group, Mapping):
            _require(group, "format", None, *_FORMATS)
        if weights.get("type") == "float":
            floats |= _floats(weights)
        else:
            packed.append(_integers(weights))
    return Scheme("compressed-tensors", tuple(packed), floats=frozenset(floats))


def _integers(weights: Json) -> Integers:
    """The bits, group and symmetry of integer weights."""
    _require(weights, "type", "int", "float")
    bits = _require(weights, "num_bits", 4, 8)
    strategy = _require(weights, "strategy", "group", "channel")
    _require(weights, "actorder", None, "static", "weight", False)
    symmetric = _require(weights, "symmetric", None, True, False) is not False
    return bits, _group(weights) if strategy == "group" else 0, symmetric


def _floats(weights: Json) -> set[str]:
    """The kind of packed floats, or none: they are FP8, whose scales show what they are."""
    bits = _require(weights, "num_bits", 4, 8)
    if bits == 4:
        _require(weights, "symmetric", None, True)
        strategy = _require(weights, "strategy", "tensor_group", "group")
        _require(weights, "group_size", 16 if strategy == "tensor_group" else FP4_GROUP)
        return {"nvfp4" if strategy == "tensor_group" else "mxfp4"}
    strategy = _require(weights, "strategy", "channel", "tensor", "block", "group")
    if strategy == "block":
        _require(weights, "block_structure", None, [128, 128], "128x128")
    if strategy == "group":
        _require(weights, "group_size", FP4_GROUP)
    return set()


# --- the makers of GPUs -------------------------------------------------------------------------------------------

# modelopt's names of ways to quantize, in capitals, with the packed floats that weights are; "": FP8 or as they are.
_ALGORITHMS = {
    "FP8": "",
    "FP8_PER_CHANNEL_PER_TOKEN": "",
    "FP8_PC_PT": "",
    "FP8_PB_WO": "",
    "FP8_PB_REAL": "",
    "MXFP8": "",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "W4A8_NVFP4_FP8": "nvfp4",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
}


def _modelopt(found: Json) -> Scheme:
    """modelopt says it in `config.json`, or as "quantization" in `hf_quant_config.json`."""
    said = found.get("quantization", found)
    if not isinstance(said, Mapping):
        _refuse("is quantized (modelopt) with", said)
    name = said.get("quant_algo")
    layers = _rules(said, "quantized_layers") if name == "MIXED_PRECISION" else {"": said}
    kinds = set[str]()
    for layer in layers.values():
        algorithm = layer.get("quant_algo") if isinstance(layer, Mapping) else layer
        kind = _ALGORITHMS.get(algorithm.upper()) if isinstance(algorithm, str) else None
        if kind is None:
            _refuse("is quantized (modelopt) with quant_algo", algorithm)
        size = {"nvfp4": 16, "mxfp4": FP4_GROUP}.get(kind)
        if size and isinstance(layer, Mapping):
            _require(layer, "group_size", None, size, method="modelopt")
        kinds.add(kind)
    return Scheme("modelopt", floats=frozenset(kinds - {""}))


def _quark(found: Json) -> Scheme:
    """Quark says it for the whole model, for types of layers, and for layers by a pattern of their names."""
    export = _rules(found, "export")
    _require(export, "weight_format", None, "real_quantized", method="quark")
    others = [_rules(found, f"layer{of}_quant_config") for of in ("", "_type")]
    every = [found.get("global_quant_config"), *(each for o in others for each in o.values())]
    kinds = set[str]()
    for layer in every:
        if layer is None:
            continue
        weight = layer.get("weight") if isinstance(layer, Mapping) else layer
        if isinstance(weight, list) and len(weight) == 1:
            (weight,) = weight
        if weight is None:
            continue
        if not isinstance(weight, Mapping):
            _refuse("is quantized (quark) with weight", weight)
        if _require(weight, "dtype", "fp8_e4m3", "fp4", method="quark") == "fp4":
            _require(weight, "group_size", FP4_GROUP, method="quark")
            _require(weight, "scale_format", None, "e8m0", method="quark")
            kinds.add("mxfp4")
        else:
            scheme = _require(
                weight, "qscheme", "per_tensor", "per_channel", "per_block", method="quark"
            )
            axes, blocks = (None, 0, -2), [128, 128]
            _require(weight, "ch_axis", *axes, *[1, -1] * (scheme != "per_channel"), method="quark")
            _require(
                weight, "block_size", None, *[blocks] * (scheme == "per_block"), method="quark"
            )
    return Scheme("quark", floats=frozenset(kinds))


_METHODS: dict[str, Callable[[Json], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp8": _mxfp8,
    "mxfp4": lambda found: Scheme("mxfp4"),
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "quark": _quark,
}
