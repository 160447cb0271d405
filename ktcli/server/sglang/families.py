"""Tells which models SGLang with kt-kernel runs, and what it is told of a family's checkpoint, by its config.json.

Whether kt-kernel computes the experts of a family is what KTransformers' pages of November 2026 say; of others nobody
published that it works, so they are refused unless a method is asked for, or all experts fit on the GPUs.

Of a model's files it looks for Python code of the repository, and whether an adapter changes routed experts. Nothing of
them is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint, UsageError
from ktcli.records import dataclass
from ktcli.weights.header import read_header

BF16, FP8, FP8_ROWS, RAWINT4 = "BF16", "FP8", "FP8_PERCHANNEL", "RAWINT4"
MXFP4, MXFP8, GPTQ_INT4 = "MXFP4", "MXFP8", "GPTQ_INT4"
AMXINT4, AMXINT8 = "AMXINT4", "AMXINT8"
# These read kt-kernel's own conversion in place of the checkpoint, and the bits of a weight there.
CONVERTED = {AMXINT4: 4, AMXINT8: 8}
_FLASHINFER = "flashinfer"


@dataclass(frozen=True, slots=True)
class ExpertStorage:
    """The format in which a checkpoint stores its experts.

    Attributes:
        method: kt-kernel's for them.
        experts, dense: the formats of kt that take as many bytes.
        block: the columns that a factor stands for, which no GPU's share of an expert may cut; 1: any share will do.
    """

    method: str
    experts: str
    dense: str
    block: int = 1


# By kt-kernel's method; the dense weights of the second row are of any kind, as published.
STORED = {
    each.method: each
    for each in (
        ExpertStorage(BF16, "bf16", "bf16"),
        ExpertStorage(FP8, "fp8", "fp8", 128),
        ExpertStorage(FP8_ROWS, "int8-row", "int8-row"),
        ExpertStorage(RAWINT4, "int4-g32", "bf16", 32),
        ExpertStorage(MXFP4, "mxfp4", "fp8", 32),
        ExpertStorage(MXFP8, "mxfp8", "mxfp8", 32),
        ExpertStorage(GPTQ_INT4, "int4-g128", "bf16", 128),
    )
}
METHODS = (*STORED, *CONVERTED)


@dataclass(frozen=True, slots=True)
class SglangFamily:
    """The options of SGLang for a family of models.

    Attributes:
        attention: the backend of attention that was published for it; empty: the engine chooses.
        tools, thoughts: its parsers of tool calls and of thoughts; empty: the config does not tell which.
        on_cpu: whether kt-kernel computes its experts.
        code: what of the repository's Python code it needs to run; empty: none.
    """

    attention: str = ""
    tools: str = ""
    thoughts: str = ""
    on_cpu: bool = True
    code: str = ""


_KIMI_CODE = "its tokenizer is Python code of its repository"
_MIMO_CODE = "its configuration is Python code of its repository"
# By model_type. DeepSeek-V3 and R1, GLM-4.5 to 4.7 and the kinds of Qwen3 have one type each and several formats of
# tool calls and thoughts: no parser is named there.
FAMILIES: dict[str, SglangFamily] = {
    "deepseek_v2": SglangFamily(_FLASHINFER),
    "deepseek_v3": SglangFamily(_FLASHINFER),
    "deepseek_v32": SglangFamily(tools="deepseekv32", thoughts="deepseek-v3"),
    "deepseek_v4": SglangFamily(tools="deepseekv4", thoughts="deepseek-v4"),
    "kimi_k2": SglangFamily(_FLASHINFER, "kimi_k2", "kimi_k2", code=_KIMI_CODE),
    "kimi_k25": SglangFamily(_FLASHINFER, "kimi_k2", "kimi_k2", code=_KIMI_CODE),
    "glm4_moe": SglangFamily(_FLASHINFER),
    "glm_moe_dsa": SglangFamily(tools="glm47", thoughts="glm45"),
    "qwen3_moe": SglangFamily(_FLASHINFER),
    "qwen3_next": SglangFamily(),
    "qwen3_5_moe": SglangFamily(tools="qwen3_coder", thoughts="qwen3"),
    "minimax_m2": SglangFamily(_FLASHINFER, "minimax-m2", "minimax-append-think"),
    "minimax_m3_vl": SglangFamily(_FLASHINFER, "minimax-m3", "minimax-m3"),
    "mimo_v2_flash": SglangFamily(tools="mimo", thoughts="qwen3", on_cpu=False, code=_MIMO_CODE),
    "gpt_oss": SglangFamily(tools="gpt-oss", thoughts="gpt-oss", on_cpu=False),
    "nemotron_h": SglangFamily(tools="qwen3_coder", thoughts="nano_v3", on_cpu=False),
    "glm4_moe_lite": SglangFamily(tools="glm47", thoughts="glm45", on_cpu=False),
    "qwen3_5": SglangFamily(tools="qwen3_coder", thoughts="qwen3", on_cpu=False),
    "afmoe": SglangFamily(tools="trinity", on_cpu=False),
}
_UNKNOWN = SglangFamily(on_cpu=False)


def family_of(config: Mapping[str, Any]) -> SglangFamily:
    """Returns SGLang's options for the family of a model, by the `model_type` in its config.json; defaults for an
    unknown one."""
    return FAMILIES.get(str(config.get("model_type")), _UNKNOWN)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config.json that describes the language model; the whole if there is no separate part."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def stored_of(config: Mapping[str, Any]) -> ExpertStorage:
    """Returns the format in which a checkpoint stores its experts, by its config.json.

    Raises:
        UsageError: kt-kernel has no method for this format.
    """
    text = text_config(config)
    said = text.get("quantization_config") or config.get("quantization_config") or {}
    if not isinstance(said, Mapping):
        said = {}
    if text.get("expert_dtype") == "fp4":
        return STORED[MXFP4]
    if not said:
        return STORED[BF16]
    if (method := _method(said)) is None:
        what = " ".join(str(said.get(key)) for key in ("quant_method", "format") if key in said)
        raise UsageError(
            f"kt-kernel has no method for experts stored as {what[:100] or 'this config says'}",
            hint=f"its native methods are {', '.join(STORED)}; pull a repository with one of these",
        )
    return STORED[method]


def _method(said: Mapping[str, Any]) -> str | None:
    kind = str(said.get("quant_method", "")).lower()
    if kind == "fp8":
        return FP8 if said.get("weight_block_size") else FP8_ROWS
    if kind in ("mxfp4", "mxfp8"):
        return kind.upper()
    if kind == "gptq":
        return GPTQ_INT4 if said.get("bits") == 4 else None
    if kind == "compressed-tensors":
        return _compressed(said)
    return None


def _compressed(said: Mapping[str, Any]) -> str | None:
    """The method for a checkpoint of compressed-tensors, by its first group of weights."""
    groups = said.get("config_groups")
    first: object = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    bits, group, kind = weights.get("num_bits"), weights.get("group_size"), weights.get("type")
    if (bits, kind) == (4, "int") and group == 32:
        return RAWINT4
    return FP8_ROWS if (bits, kind) == (8, "float") else None


_MOST_BYTES = 16 << 20
_AUTO = "auto_map"
_SUFFIX = ".safetensors"
_PLAIN_TYPES = frozenset(name for name, row in FAMILIES.items() if not row.code)


@dataclass(frozen=True, slots=True)
class RepositoryCode:
    """The Python code that a checkpoint needs to run in the engine.

    Attributes:
        why: what needs it; empty: nothing does.
        missing: the files of it that are not in the folder.
    """

    why: str = ""
    missing: tuple[str, ...] = ()


def code_of(folder: Path, config: Mapping[str, Any]) -> RepositoryCode:
    """Returns why the checkpoint in a folder needs Python code of its repository (empty: it does not), and which files
    of that code the folder lacks.

    Code for its configuration is not needed if kt's table of families knows its `model_type` as one without code.

    Raises:
        BadCheckpoint: a JSON file of the checkpoint is damaged.
    """
    named = dict[str, str]()
    tokenizer = _object(folder / "tokenizer_config.json").get(_AUTO)
    if files := _files(tokenizer):
        named |= dict.fromkeys(files, "its tokenizer is Python code of its repository")
    if str(config.get("model_type")) not in _PLAIN_TYPES:
        own = _files(_object(folder / "config.json").get(_AUTO))
        named |= dict.fromkeys(own, "its configuration is Python code of its repository")
    missing = tuple(sorted(each for each in named if not (folder / each).is_file()))
    return RepositoryCode(next(iter(named.values()), ""), missing)


def require_code(code: RepositoryCode, name: str, folder: Path) -> None:
    """Raises UsageError if a file of a checkpoint's own Python code is missing."""
    if code.missing:
        raise UsageError(
            f"{name} needs {', '.join(code.missing)[:300]} of its repository, which kt does not download",
            hint=f"read that code, and put it into {folder}",
        )


def changes_experts(folder: Path) -> bool:
    """Returns whether the LoRA adapter in a folder changes routed experts: whether a tensor has `.experts.` in its
    name.

    Raises:
        BadCheckpoint: a file is damaged.
    """
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    return any(".experts." in name for file in files for name in read_header(file).entries)


def _files(said: object) -> set[str]:
    """Returns the files that an auto_map names: "tokenization_kimi.TikTokenTokenizer" is of tokenization_kimi.py."""
    values = list(said.values()) if isinstance(said, Mapping) else [said]
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    names = (each.rpartition("--")[2] for each in flat if isinstance(each, str) and "." in each)
    stems = {name.partition(".")[0] for name in names}
    return {f"{stem}.py" for stem in stems if stem.isidentifier()}


def _object(path: Path) -> Mapping[str, Any]:
    """Returns the object in a JSON file; an empty one where there is no such file."""
    try:
        found = json.loads(smallfiles.read_bounded(path, _MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"cannot read {path}: {str(error)[:200]}") from error
    return found if isinstance(found, dict) else {}
