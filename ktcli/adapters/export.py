"""Writes an adapter's folder in the layout that another program reads.

    peft         what peft 0.21 with transformers 5 saves and loads: all experts of a layer in one parameter
    per-expert   modules of their own for each expert, as SGLang and vLLM take them
    kt-kernel    peft's files without experts, and fused_expert_lora.safetensors with its manifest

The update stays the same: one A for gate and up becomes two equal ones. Back, two become one of twice the rank, whose
other half is zeros; where their scales differ, B takes over the quotient. kt-kernel's experts are bf16, so that other
numbers are rounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ktcli import smallfiles
from ktcli.adapters.adapter import Adapter, LoraPair
from ktcli.adapters.config import WrittenModule, settings_document
from ktcli.adapters.factors import F32, encoded, hash_of
from ktcli.adapters.folder import EXPERTS, SEALS, WEIGHTS
from ktcli.adapters.pairs import PREFIX
from ktcli.adapters.regrouped import Half, Regrouped, halves_of, whole_of
from ktcli.adapters.settings import CONFIG
from ktcli.adapters.targets import EACH, LoraTarget, Targets, own_spelling
from ktcli.errors import UsageError
from ktcli.models import Model
from ktcli.records import dataclass
from ktcli.weights.header import encode_header
from ktcli.weights.writer import FileWriter


class AdapterLayout(Enum):
    """The layouts that an adapter can be written in."""

    PEFT = "peft"
    EACH = "per-expert"
    KT_KERNEL = "kt-kernel"


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """One tensor that is written.

    Attributes:
        dtype: of FLOATS.
        values: returns its numbers, in the order of `shape`; called once, when they are written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Callable[[], F32]


class Exporter:
    """A function that writes an open adapter in the layout of another program.

    Args:
        model: the base that it was checked against.
    """

    def __init__(self, adapter: Adapter, model: Model) -> None:
        self._adapter, self._targets = adapter, Targets(model)
        self._experts = [p for p in adapter.pairs if p.target.is_fused or p.target.is_each]
        self._plain = [p for p in adapter.pairs if not (p.target.is_fused or p.target.is_each)]
        self._spelled: Callable[[str], str] = own_spelling

    def write(self, folder: Path, layout: AdapterLayout) -> None:
        """Writes the adapter's files in the given layout into an empty folder.

        Raises:
            UsageError: the layout cannot express the adapter.
            BadCheckpoint: a factor cannot be read. OSError: a file cannot be written.
        """
        # Those who take modules of each expert call all modules as the checkpoint does.
        self._spelled = str if layout is AdapterLayout.EACH else own_spelling
        tensors, modules = self._of_plain(layout)
        apart: list[WrittenTensor] = []
        if layout is AdapterLayout.PEFT:
            self._fused(tensors, modules)
        elif layout is AdapterLayout.EACH:
            self._each(tensors, modules)
        elif self._experts:
            apart = list(self._stacked())
        for gain in self._adapter.gains:
            name, entry = f"{PREFIX}{self._spelled(gain.module)}.weight", gain.part.entry
            read = partial(self._adapter.gain, gain)
            tensors.append(WrittenTensor(name, entry.dtype, entry.shape, read))
        document = settings_document(
            self._adapter.settings,
            modules,
            [self._spelled(gain.module) for gain in self._adapter.gains],
            self._names(),
            (self._experts[0].rank, self._experts[0].alpha) if apart else None,
        )
        smallfiles.write(folder / CONFIG, json.dumps(document, indent=2, sort_keys=True) + "\n")
        _write(folder / WEIGHTS, tensors)
        if apart:
            _write(folder / EXPERTS, apart)
            seals = json.dumps(self._seals(folder, apart), indent=2, sort_keys=True) + "\n"
            smallfiles.write(folder / SEALS, seals)

    def _names(self) -> list[str]:
        """The names of all modules of the base, as transformers has them or had them."""
        known = self._targets.by_name.values()
        return [self._spelled(each.name) for each in known if not each.is_fused]

    def _of_plain(self, layout: AdapterLayout) -> tuple[list[WrittenTensor], list[WrittenModule]]:
        """The tensors and modules that are the same in all layouts."""
        tensors, modules = list[WrittenTensor](), list[WrittenModule]()
        fuses = layout is AdapterLayout.PEFT and any(
            target.is_fused for target in self._targets.by_name.values()
        )
        for pair in self._plain:
            name = self._spelled(pair.target.name)
            leaf = name.rpartition(".")[2]
            shapes = (pair.rank, pair.target.k), (pair.target.n, pair.rank)
            values = partial(self._adapter.values, pair)
            tensors += _factors(f"{PREFIX}{name}", pair.dtype, *shapes, values)
            modules.append(WrittenModule(name, pair.rank, pair.alpha, fuses and leaf in _REMAPPED))
        return tensors, modules

    def _by_tensor(self) -> Iterator[list[LoraPair]]:
        """Yields the pairs of experts that change the same stored tensor."""
        found: dict[str, list[LoraPair]] = {}
        for pair in self._experts:
            found.setdefault(pair.target.pieces[0].tensor.name, []).append(pair)
        yield from found.values()

    def _fused(self, tensors: list[WrittenTensor], modules: list[WrittenModule]) -> None:
        """Adds the factors of experts as peft's wrappers of parameters have them."""
        found: dict[str, list[tuple[LoraTarget, list[LoraPair]]]] = {}
        for pairs in self._by_tensor():
            target = self._targets.parameter(pairs[0].target.pieces[0].tensor)
            if target is None:
                raise UsageError(
                    f"peft has no parameter that holds all of {pairs[0].module}",
                    hint="write modules for each expert: --layout per-expert",
                )
            found.setdefault(target.name.rpartition(".")[0], []).append((target, pairs))
        for stem, parts in found.items():
            order = [each.name for each in self._targets.fused(stem)]
            parts.sort(key=lambda each: order.index(each[0].name))
            for at, (target, pairs) in enumerate(parts):
                whole = whole_of(target, pairs, self._adapter)
                inner = ".base_layer" if at < len(parts) - 1 else ""
                name = f"{PREFIX}{own_spelling(stem)}{inner}"
                height = whole.rank * target.count
                shapes = (height, target.k), (target.n, height)
                tensors += _factors(name, whole.dtype, *shapes, partial(_packed, whole))
                alpha = self._alpha(whole.scale, whole.rank, pairs)
                name = own_spelling(target.name)
                modules.append(WrittenModule(name, whole.rank, alpha, True))

    def _alpha(self, scale: float, rank: int, pairs: list[LoraPair]) -> float:
        """The alpha that gives a scale with a rank: that of the pair itself where its rank is the same."""
        if len(pairs) == 1 and pairs[0].rank == rank:
            return pairs[0].alpha
        return scale * (rank**0.5 if self._adapter.settings.rslora else rank)

    def _halves(self) -> Iterator[Half]:
        """Yields the updates of gate, up and down of each expert."""
        for pairs in self._by_tensor():
            for pair in pairs:
                found = list(halves_of(pair, self._targets, self._adapter))
                if not found:
                    raise UsageError(
                        f"no layout has separate modules for the experts of {pair.module}",
                        hint="write them as peft does: --layout peft",
                    )
                yield from found

    def _each(self, tensors: list[WrittenTensor], modules: list[WrittenModule]) -> None:
        """Adds the factors of each expert."""
        for half in self._halves():
            name = half.target.name
            pair, count = half.pair, half.target.count
            modules.append(WrittenModule(name, pair.rank, pair.alpha, count=count))
            held = _HeldFactors(half.values)
            for e in range(count):
                stem = f"{PREFIX}{name.replace(EACH, str(e))}"
                shapes = (pair.rank, half.target.k), (half.target.n, pair.rank)
                tensors += _factors(stem, pair.dtype, *shapes, partial(held.of, e))

    def _stacked(self) -> Iterator[WrittenTensor]:
        """Yields the tensors of kt-kernel's file of experts."""
        halves = list(self._halves())
        ranks = {(half.pair.rank, half.pair.scale) for half in halves}
        if len(ranks) > 1 or self._adapter.settings.rslora:
            said = ", ".join(f"{rank} (scale {scale:g})" for rank, scale in sorted(ranks))
            raise UsageError(
                f"kt-kernel's layout has one rank and scale alpha / r; the experts here have {said}",
                hint="write another layout: --layout peft",
            )
        rank = halves[0].pair.rank
        known = {(half.target.pieces[0].tensor.layer, half.target.name): half for half in halves}
        for layer in sorted({layer for layer, _ in known if layer is not None}):
            for kind in ("gate", "up", "down"):
                target = self._targets.experts(layer, kind)
                if target is not None:
                    yield from _of_kind(layer, kind, target, rank, known.get((layer, target.name)))

    def _seals(self, folder: Path, apart: list[WrittenTensor]) -> dict[str, Any]:
        """kt-kernel's manifest of the files that are written."""
        artifacts: dict[str, Any] = {}
        for name in (CONFIG, WEIGHTS, EXPERTS):
            path = folder / name
            artifacts[name] = {"size": path.stat().st_size, "sha256": hash_of(path)}
        contract = {each.name: {"shape": list(each.shape), "dtype": each.dtype} for each in apart}
        artifacts[EXPERTS] |= {"tensor_count": len(contract), "tensors": contract}
        pair = self._experts[0]
        return {
            "version": 1,
            "status": "ready",
            "base": {"model_name_or_path": self._adapter.settings.base},
            "lora": {"rank": pair.rank, "alpha": pair.alpha},
            "artifacts": artifacts,
        }


# Ends of names that peft 0.21 takes for routed experts, or wraps otherwise, where the base has these in one parameter.
_REMAPPED = frozenset("gate gate_proj up_proj down_proj w1 w2 w3 router".split())


class _HeldFactors:
    """The factors of all experts while those of each are written one after the other.

    Args:
        values: reads them.
    """

    def __init__(self, values: Callable[[], tuple[F32, F32]]) -> None:
        self._values = values
        self._found: tuple[F32, F32] | None = None
        self._left = -1

    def of(self, expert: int) -> tuple[F32, F32]:
        """Returns A and B of one expert; what is held is let go behind the last."""
        if self._found is None:
            self._found = self._values()
            self._left = 2 * len(self._found[0])
        a, b = self._found
        self._left -= 1
        if not self._left:
            self._found = None
        return a[expert], b[expert]


def _packed(whole: Regrouped) -> tuple[F32, F32]:
    """A and B of all experts as peft packs them: rows below each other, columns in turn."""
    a, b = whole.values()
    return a, b.transpose(1, 2, 0)


def _factors(
    stem: str,
    dtype: str,
    shape_a: tuple[int, ...],
    shape_b: tuple[int, ...],
    values: Callable[[], tuple[F32, F32]],
) -> Iterator[WrittenTensor]:
    yield WrittenTensor(f"{stem}.lora_A.weight", dtype, shape_a, lambda: values()[0])
    yield WrittenTensor(f"{stem}.lora_B.weight", dtype, shape_b, lambda: values()[1])


def _of_kind(
    layer: int, kind: str, target: LoraTarget, rank: int, half: Half | None
) -> Iterator[WrittenTensor]:
    """The two tensors of gate, up or down of a layer: zeros where nothing was trained, as all six have to be there."""
    for letter, shape, at in (
        ("a", (target.count, rank, target.k), 0),
        ("b", (target.count, target.n, rank), 1),
    ):

        def made(shape: tuple[int, ...] = shape, at: int = at) -> F32:
            return np.zeros(shape, np.float32) if half is None else half.values()[at]

        yield WrittenTensor(f"layers.{layer}.experts.{kind}_lora_{letter}", "BF16", shape, made)


def _write(path: Path, tensors: list[WrittenTensor]) -> None:
    """Writes a safetensors file, one tensor in memory at a time."""
    table: Mapping[str, tuple[str, tuple[int, ...]]] = {
        each.name: (each.dtype, each.shape) for each in tensors
    }
    with FileWriter(path) as writer:
        writer.write(encode_header(table, {"format": "pt"}))
        for each in tensors:
            writer.write(encoded(each.values(), each.dtype))
        writer.finish()
