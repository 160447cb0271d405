"""peft as the judge: small random bases, adapters that peft saves, and the weights that peft merges."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from reference import case_named, write_checkpoint

from ktcli.adapters.adapter import Adapter
from ktcli.adapters.merged import MergedAdapter
from ktcli.models import Model, build
from ktcli.native import Pool
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.storage import ByteSpan, Reader

POOL = Pool(1, spin_us=0)
# To import it takes 4 s in each process that collects tests: those that use it do so themselves.
NEEDS_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of peft, which is the judge and not the product."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load_peft(model: Any, folder: Path, **options: Any) -> Any:
    """A model of transformers with the adapter of a folder, as peft loads it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder, **options)


@dataclass(frozen=True)
class Base:
    """A random checkpoint of one family, in f32."""

    name: str
    folder: Path

    @property
    def model(self) -> Model:
        return build(json.loads((self.folder / "config.json").read_text()))

    def load(self, dtype: torch.dtype = torch.float32) -> Any:
        made = case_named(self.name).model_class.from_pretrained(self.folder, dtype=dtype)
        return made.eval()


def base_of(name: str, folder: Path) -> Base:
    return Base(name, write_checkpoint(case_named(name), folder / name, torch.float32))


@dataclass(frozen=True)
class Recipe:
    """What is adapted: arguments of LoraConfig."""

    family: str
    modules: tuple[str, ...] | str = ()
    parameters: tuple[str, ...] = ()
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        modules = self.modules if isinstance(self.modules, str) else list(self.modules)
        made = {"r": 4, "lora_alpha": 6, "target_modules": modules}
        if self.parameters:
            made["target_parameters"] = list(self.parameters)
        return made | dict(self.more)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
SHARED = tuple(f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))
DENSE = ("gate_proj", "up_proj", "down_proj")
# Of each family all that a training usually changes.
WHOLE = {
    "qwen3-dense": Recipe("qwen3-dense", (*ATTENTION, *DENSE)),
    "qwen3": Recipe("qwen3", ATTENTION, (*EXPERTS, "mlp.gate.weight")),
    "mixtral": Recipe("mixtral", ATTENTION, (*EXPERTS, "mlp.gate.weight")),
    "deepseek-v3": Recipe(
        "deepseek-v3", LATENT, (*EXPERTS, *SHARED, "mlp.gate_proj.weight", "mlp.gate.weight")
    ),
    "gpt-oss": Recipe("gpt-oss", ATTENTION, (*EXPERTS, "router.weight")),
}


_ELSEWHERE = ("vision", "visual", "audio", "projector")  # encoders, of which kt has none
# Modules that peft does not wrap, or wraps as what they are not: of Mamba, products of groups, gate and up in one, and
# Llama 4's experts, which lie transposed in memory.
_NOT_WRAPPED = (
    "mixer.out_proj",
    "o_a_proj",
    "mlp.gate_up_proj",
    "shared_experts.gate_up_proj",
    "feed_forward.experts",
)
_IN_MLP = {"mlp", "block_sparse_moe", "feed_forward", "mixer", "shared_mlp", *DENSE}


def everything(base: Base) -> Recipe:
    """Every linear module, all experts and the routers of a family, each by its whole name. peft takes modules of an
    MLP beside experts for these, unless they are parameters."""
    case, model = case_named(base.name), base.load()
    names = [
        (name, module)
        for name, module in model.named_modules()
        if not any(each in name for each in _ELSEWHERE) and not name.endswith(_NOT_WRAPPED)
    ]
    tied = model.config.get_text_config().tie_word_embeddings
    linear = [name for name, module in names if isinstance(module, torch.nn.Linear)]
    linear = [name for name in linear if name != "lm_head" or not tied]
    linear = [name for name in linear if not name.endswith(case.router)]
    experts = [
        f"{name}.{parameter}"
        for name, module in names
        for parameter, value in module.named_parameters(recurse=False)
        if value.ndim == 3 and name.endswith("experts")
    ]
    routers = [
        f"{name}.weight"
        for name, module in names
        if name.endswith(case.router) and "weight" in dict(module.named_parameters(recurse=False))
    ]
    in_mlp = [name for name in linear if experts and _IN_MLP & set(name.split("."))]
    modules = tuple(name for name in linear if name not in in_mlp)
    parameters = (*experts, *routers, *(f"{name}.weight" for name in in_mlp))
    return Recipe(base.name, modules, parameters)


def adapted(base: Base, recipe: Recipe, seed: int = 1, size: float = 0.2) -> Any:
    """peft's model with random factors of this deviation, A and B different for each module, expert and element."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    with quietly():
        model = get_peft_model(base.load(), LoraConfig(**recipe.arguments))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.normal_(0, size)
            elif "modules_to_save" in name:
                value.uniform_(0.5, 1.5)
    return model.eval()


def save(model: Any, folder: Path) -> Path:
    with quietly():
        model.save_pretrained(folder)
    return folder


def merged(model: Any, folder: Path) -> Path:
    """The checkpoint that peft's merge_and_unload gives, in the hub's names."""
    with quietly():
        whole = model.merge_and_unload()
        whole.save_pretrained(folder)
    return folder


def numbers(reader: Reader, name: str) -> NDArray[np.float32]:
    source = reader.find(name)
    span = ByteSpan(source)
    raws = [reader.read(each) for each in source.storage.reads(span)]
    return np.array(reader.decode(POOL, span, raws))


def difference(adapter: Adapter, base: Base, expected: Path) -> tuple[float, int]:
    """The largest difference between ours and theirs, of the largest value of the tensor; and how many changed."""
    worst, changed = 0.0, 0
    with Checkpoint(base.folder) as plain, Checkpoint(expected) as theirs:
        change = MergedAdapter(adapter, base.model.tensors, plain)
        ours = plain.changed(change)
        assert set(theirs.names) <= set(plain.names)
        for name in theirs.names:
            found, wanted = numbers(ours, name), numbers(theirs, name)
            changed += not np.array_equal(wanted, numbers(plain, name))
            worst = max(worst, float(np.abs(found - wanted).max() / np.abs(wanted).max()))
            if name not in change.names:
                assert np.array_equal(found, wanted), name
    return worst, changed
