"""The quantization that a config declares, as far as kt reads it; the rest is refused by name.

Which modules are quantized is not read here: `ignore` and `modules_to_not_convert` name those that lie there
as they are, and the files show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ktcli.errors import BadCheckpoint

READS = (
    "kt reads bf16, f16, f32, fp8 (E4M3; scales of 128 x 128 blocks, rows or matrices) with experts in fp8 or fp4, "
    "compressed-tensors int4, int8 and fp8, mxfp4, gptq and awq of 4 bits: convert such a release of the model"
)
EXPERTS = "expert_dtype"
MAX_GROUP = 65_536  # columns that share a scale


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantization of a checkpoint.

    Attributes:
        method: the config's name of the method; "" where nothing is quantized.
        group: GPTQ and AWQ: columns that share a scale; 0: a whole row.
        symmetric: GPTQ and AWQ: whether all zero points are declared to be 8.
        reordered: GPTQ: whether groups are not in the order of the columns.
        zero_plus: GPTQ: the number added to stored zero points.
        groups: compressed-tensors, for each kind of packed integers: bits; columns that share a scale, 0 for a whole
            row; whether they are symmetric.
        experts: FP8: the declared type of the routed experts, "fp8" or "fp4"; "" where nothing is said.
        scales: FP8: the declared kind of block scales, "ue8m0" (powers of two, of any type) or "float";
            "" where nothing is said.
    """

    method: str = ""
    group: int = 0
    symmetric: bool = True
    reordered: bool = False
    zero_plus: int = 0
    groups: tuple[tuple[int, int, bool], ...] = ()
    experts: str = ""
    scales: str = ""


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    """Returns the quantization scheme of a `config.json`, or of its text model where that is the quantized one
    (Kimi-K2.5).

    Raises:
        BadCheckpoint: it is of a kind that kt does not read, or contradicts itself.
    """
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, Mapping) else [config]
    keys = ("quantization_config", "compression_config")
    found = next((p[key] for p in places for key in keys if p.get(key) is not None), None)
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


def _refuse(what: str, value: object, kind: str = "which kt does not read") -> NoReturn:
    text = repr(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    raise BadCheckpoint(f"the checkpoint {what} {shown}, {kind}", hint=READS)


def _require(found: Mapping[str, Any], key: str, *allowed: object) -> Any:
    """The value of a key, which must be one of the allowed; a missing one is None."""
    value = found.get(key)
    if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
        known = ", ".join(repr(each) for each in allowed if each is not None)
        method = found.get("quant_method") or found.get("type") or "quantization"
        _refuse(f"is quantized ({method}) with {key}", value, f"kt reads {known} only")
    return value


def _group(found: Mapping[str, Any]) -> int:
    """The number of columns per scale; 0: a whole row, which configs call -1."""
    value = found.get("group_size")
    if value is None or value == -1:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_GROUP:
        _refuse("is quantized with group_size", value, f"kt reads -1 and 1 to {MAX_GROUP}")
    return value


def _fp8(found: Mapping[str, Any]) -> Scheme:
    _require(found, "fmt", None, "e4m3", "float8_e4m3fn")
    _require(found, "weight_block_size", None, [128, 128])
    experts = _require(found, EXPERTS, None, "fp8", "fp4")
    scales = _require(found, "scale_fmt", None, "ue8m0", "float")
    return Scheme("fp8", experts=experts or "", scales=scales or "")


def _mxfp4(found: Mapping[str, Any]) -> Scheme:
    return Scheme("mxfp4")


def _gptq(found: Mapping[str, Any]) -> Scheme:
    _require(found, "bits", 4)
    form = _require(found, "checkpoint_format", None, "gptq", "gptq_v2")
    return Scheme(
        "gptq",
        _group(found),
        symmetric=_require(found, "sym", None, True, False) is not False,
        reordered=_require(found, "desc_act", None, True, False) is True,
        zero_plus=0 if form == "gptq_v2" else 1,
    )


def _awq(found: Mapping[str, Any]) -> Scheme:
    bits = "bits" if "bits" in found else "w_bit"
    _require(found, bits, 4)
    version = found.get("version")
    if version is not None and (not isinstance(version, str) or version.lower() != "gemm"):
        _refuse("is quantized (awq) with version", version, "kt reads 'gemm' only")
    size = found if "group_size" in found else {"group_size": found.get("q_group_size")}
    zero = _require(found, "zero_point", None, True, False)
    return Scheme("awq", _group(size), symmetric=zero is False)


_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "dense")


def _compressed(found: Mapping[str, Any]) -> Scheme:
    _require(found, "format", None, *_FORMATS, "mixed-precision")
    sparsity = found.get("sparsity_config")
    if sparsity not in (None, {}) and (
        not isinstance(sparsity, Mapping) or sparsity.get("format") not in (None, "dense")
    ):
        _refuse("is sparse with", sparsity)
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or len(groups) > 64:
        _refuse("has the config_groups", groups)
    packed = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            _refuse("quantizes only activations, or nothing, with", group)
        if isinstance(group, Mapping):
            _require(group, "format", None, *_FORMATS)
        if (found_group := _weights(weights)) is not None:
            packed.append(found_group)
    return Scheme("compressed-tensors", groups=tuple(packed))


def _weights(weights: Mapping[str, Any]) -> tuple[int, int, bool] | None:
    """The bits, group and symmetry of integer weights; None: they are FP8."""
    kind = _require(weights, "type", "int", "float")
    if kind == "float":
        _require(weights, "num_bits", 8)
        strategy = _require(weights, "strategy", "channel", "tensor", "block")
        if strategy == "block":
            _require(weights, "block_structure", None, [128, 128], "128x128")
        return None
    bits = _require(weights, "num_bits", 4, 8)
    strategy = _require(weights, "strategy", "group", "channel")
    _require(weights, "actorder", None, "static", "weight", False)
    symmetric = _require(weights, "symmetric", None, True, False) is not False
    return bits, _group(weights) if strategy == "group" else 0, symmetric


_METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}
