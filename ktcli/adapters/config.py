"""Writes adapter_config.json so that peft wraps exactly the modules of an adapter, with their ranks and alphas."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ktcli.adapters.patterns import ends_of
from ktcli.adapters.settings import AdapterSettings
from ktcli.adapters.targets import EACH
from ktcli.records import dataclass

PEFT_VERSION = "0.21.2"  # whose layout is written; readers go by it where shapes do not tell


@dataclass(frozen=True, slots=True)
class WrittenModule:
    """One module or parameter of a config.

    Attributes:
        name: as transformers calls it; "{e}" stands for the number of an expert.
        rank, alpha: what the patterns have to say of it.
        parameter: whether it is a target parameter.
        count: the number of experts.
    """

    name: str
    rank: int
    alpha: float
    parameter: bool = False
    count: int = 1


def settings_document(
    settings: AdapterSettings,
    modules: Sequence[WrittenModule],
    saved: Sequence[str],
    known: Sequence[str],
    usual: tuple[int, float] | None = None,
) -> dict[str, Any]:
    """Returns the contents of the adapter_config.json, as a JSON object, that makes peft wrap exactly these modules.

    Args:
        settings: those of the adapter, whose base model and dropout are taken over.
        modules: the modules and parameters that have LoRA factors.
        saved: the names of the modules that the adapter replaces as a whole (`modules_to_save`).
        known: the names of all modules of the base, so that targets can be named by their ends.
        usual: the rank and alpha that no pattern has to name; None: the most frequent.
    """
    often = Counter((each.rank, each.alpha) for each in modules).most_common(1)
    rank, alpha = usual or (often[0][0] if often else (settings.rank, settings.alpha))
    parameters = [each for each in modules if each.parameter]
    plain = [each for each in modules if not each.parameter]
    keys = {each.name: _key(each) for each in modules}
    return {
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": settings.base or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(alpha),
        # peft loads no adapter of parameters that was trained with dropout, which has no effect here.
        "lora_dropout": 0.0 if parameters else settings.dropout,
        "use_rslora": settings.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": _ends(plain, known),
        "target_parameters": [*_weights(parameters, known)] or None,
        "rank_pattern": {keys[e.name]: e.rank for e in modules if e.rank != rank},
        "alpha_pattern": {keys[e.name]: _number(e.alpha) for e in modules if e.alpha != alpha},
        "modules_to_save": list(saved) or None,
    }


def _key(module: WrittenModule) -> str:
    """The expression that names a module in a pattern."""
    ends = ".weight" if module.parameter and not _is_of_experts(module) else ""
    return re.escape(f"{module.name}{ends}").replace(re.escape(EACH), "[0-9]+")


def _is_of_experts(module: WrittenModule) -> bool:
    """Returns whether a parameter holds all experts: its name has no ".weight" behind it."""
    return ".experts." in module.name


def _weights(modules: Sequence[WrittenModule], known: Sequence[str]) -> list[str]:
    """The target parameters: those of all experts by their whole names, as they need not be in every layer."""
    experts = [each.name for each in modules if _is_of_experts(each)]
    others = [each for each in modules if not _is_of_experts(each)]
    return [*experts, *(f"{end}.weight" for end in _ends(others, known))]


def _ends(modules: Sequence[WrittenModule], known: Sequence[str]) -> list[str]:
    """The shortest ends of names, at dots, that no other name has; "{e}" becomes each number."""
    wanted, found = {each.name for each in modules}, dict[str, None]()
    others = [f".{name}" for name in known if name not in wanted]
    for module in modules:
        ends = reversed(ends_of(module.name))
        short = next(end for end in ends if not any(o.endswith(f".{end}") for o in others))
        for number in range(module.count if EACH in short else 1):
            found[short.replace(EACH, str(number))] = None
    return list(found)


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value
