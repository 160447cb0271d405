"""Translates placements of other programs into rules: KTransformers' injection files and llama.cpp's `-ot` patterns.

Both name modules or tensors of a checkpoint by regular expressions. Each expression is asked about every name that a
part of kt has there, layer by layer; a part goes where all its names go. Whatever means no place is listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ktcli.hardware.text import cpu_text
from ktcli.planner.expressions import Expression, NotAnExpression
from ktcli.planner.partnames import PartNames
from ktcli.planner.rules import CPU, CUDA, EXPERTS, LAYERS, PlacementRule, PlacementRules, RulePlace
from ktcli.records import dataclass

MOST_LAYERS = 128  # that are asked about where nobody names a model; none has more
MOST_PATTERNS = 300
_SHOWN = 80

Names = Mapping[str, tuple[str, ...]]  # by the word of the part; {n}: the number of the layer

# transformers' names of modules, as injection files match them.
_LINEARS = "q_proj k_proj v_proj o_proj q_a_proj q_b_proj kv_a_proj_with_mqa".split()
MODULES: Names = {
    "attention": (
        "model.layers.{n}.self_attn",
        *(f"model.layers.{{n}}.self_attn.{each}" for each in _LINEARS),
    ),
    "router": ("model.layers.{n}.mlp.gate",),
    EXPERTS: ("model.layers.{n}.mlp.experts",),
    "shared_experts": tuple(
        f"model.layers.{{n}}.mlp.shared_experts{each}"
        for each in ("", ".gate_proj", ".up_proj", ".down_proj")
    ),
    "dense_mlp": tuple(
        f"model.layers.{{n}}.mlp.{each}" for each in ("gate_proj", "up_proj", "down_proj")
    ),
    "norms": tuple(f"model.layers.{{n}}.{each}_layernorm" for each in ("input", "post_attention")),
    "embedding": ("model.embed_tokens",),
    "output_head": ("lm_head",),
}
# llama.cpp's names of tensors.
TENSORS: Names = {
    "attention": tuple(f"blk.{{n}}.attn_{each}.weight" for each in ("q", "k", "v", "output")),
    "router": ("blk.{n}.ffn_gate_inp.weight",),
    EXPERTS: tuple(f"blk.{{n}}.ffn_{each}_exps.weight" for each in ("gate", "up", "down")),
    "shared_experts": tuple(
        f"blk.{{n}}.ffn_{each}_shexp.weight" for each in ("gate", "up", "down")
    ),
    "dense_mlp": tuple(f"blk.{{n}}.ffn_{each}.weight" for each in ("gate", "up", "down")),
    "norms": ("blk.{n}.attn_norm.weight", "blk.{n}.ffn_norm.weight"),
    "embedding": ("token_embd.weight",),
    "output_head": ("output.weight",),
}


@dataclass(frozen=True, slots=True)
class ForeignPattern:
    """An expression of another program.

    Attributes:
        text: the expression.
        place: where what it matches goes; None: it means no place in kt, but later ones do not have what it matches.
        only: the words of parts that it is about; (): all that it matches.
        why: the reason why it means no place.
    """

    text: str
    place: RulePlace | None
    only: tuple[str, ...] = ()
    why: str = ""

    @property
    def shown(self) -> str:
        """The text of the expression, cut to 80 characters for a sentence."""
        return self.text[:_SHOWN]


@dataclass(frozen=True, slots=True)
class Imported:
    """The placement rules of an imported file, and the lines without an equivalent.

    Attributes:
        rules: the rules.
        left: what is no rule, a sentence each.
    """

    rules: PlacementRules
    left: tuple[str, ...]


def translate(
    patterns: Sequence[ForeignPattern], names: Names, model: PartNames | None = None
) -> Imported:
    """Returns kt's placement rules that do what another program's patterns do, and a sentence on each pattern without
    an equivalent. The first pattern that matches a name counts.

    Args:
        names: the names that the other program has for each part of a model, by kt's word for it.
        model: the parts of the model; None: unknown; a pattern that matches every number of a layer then means all
            layers.
    """
    count = model.layers if model else MOST_LAYERS
    left = list[str]()
    if len(patterns) > MOST_PATTERNS:
        left.append(f"{len(patterns) - MOST_PATTERNS} patterns: kt reads {MOST_PATTERNS}")
    read = list[tuple[ForeignPattern, Expression]]()
    for each in patterns[:MOST_PATTERNS]:
        try:
            read.append((each, Expression.parse(each.text)))
        except NotAnExpression as error:
            left.append(f"{each.shown}: {error}")
    have = {word: forms for word, forms in names.items() if model is None or _has(model, word)}
    owners = {word: _owners(word, forms, read, count) for word, forms in have.items()}
    said = list[tuple[str, RulePlace]]()
    for index, (pattern, _) in enumerate(read):
        parts = {w: _layers(index, w, have[w], owners[w], read, model) for w in have}
        if pattern.place is None:
            left.append(f"{pattern.shown}: {pattern.why}")
        elif not any(parts.values()):
            left.append(f"{pattern.shown}: matches no whole part, or earlier patterns have it")
        elif model is None and any(_is_open(own, count) for own in parts.values() if len(own) > 1):
            left.append(f"{pattern.shown}: goes on to the last layer, which --model would tell")
        else:
            said += [(match, pattern.place) for match in _matches(parts, have, count)]
    rules = tuple(PlacementRule(n, match, place) for n, (match, place) in enumerate(said, 1))
    return Imported(PlacementRules(rules), tuple(dict.fromkeys(left)))


def _has(model: PartNames, word: str) -> bool:
    return word in model.top or word in model.words


def _layers(
    index: int,
    word: str,
    forms: Sequence[str],
    own: Sequence[int | None],
    read: Sequence[tuple[ForeignPattern, Expression]],
    model: PartNames | None,
) -> Sequence[int]:
    """The layers whose part of a word a pattern has; where nobody says how many there are, all, if earlier rules have
    the others."""
    mine = [n for n, owner in enumerate(own) if owner == index]
    if model is None and mine and len(own) > 1 and own[-1] == index:
        expression = read[index][1]
        rest = (
            owner < index and read[owner][0].place is not None
            if owner is not None
            else all(expression.occurs(form.replace("{n}", str(n))) for form in forms)
            for n, owner in enumerate(own)
            if owner != index
        )
        if all(rest):
            return range(len(own))
    if model is None or len(own) == 1:
        return mine
    there = model.moe if word == EXPERTS else np.flatnonzero(model.layered[word]).tolist()
    return [n for n in mine if n in there]


def _is_open(numbers: Sequence[int], count: int) -> bool:
    """Returns whether layers go on to the last that was asked about, but are not all."""
    return numbers[-1] == count - 1 and len(numbers) < count


def _owners(
    word: str, forms: Sequence[str], read: Sequence[tuple[ForeignPattern, Expression]], layers: int
) -> list[int | None]:
    """The pattern that has the part of a word in each layer; None: none has all of its names."""
    about = [
        (n, expression)
        for n, (each, expression) in enumerate(read)
        if not each.only or word in each.only
    ]
    found = list[int | None]()
    for layer in range(layers if "{n}" in forms[0] else 1):
        texts = [form.replace("{n}", str(layer)) for form in forms]
        first = {next((n for n, each in about if each.occurs(text)), None) for text in texts}
        if word != EXPERTS:
            first.discard(None)  # of a layer's linear products some keep their device
        found.append(first.pop() if len(first) == 1 else None)
    return found


def _matches(parts: Mapping[str, Sequence[int]], names: Names, count: int) -> Iterator[str]:
    """The patterns of kt for parts in layers; one for all parts of the same layers."""
    inner = [word for word in names if "{n}" in names[word][0]]
    where = {
        word: "*" if len(parts[word]) == count else cpu_text(parts[word])
        for word in inner
        if parts[word]
    }
    if len(where) == len(inner) and len(set(where.values())) == 1:
        yield f"{LAYERS}.{where[inner[0]]}"
    else:
        yield from (f"{LAYERS}.{numbers}.{word}" for word, numbers in where.items())
    yield from (word for word in names if word not in inner and parts[word])


def device_place(text: str) -> RulePlace | None:
    """Returns the place in a placement rule for another program's name of a device: "cuda:1", "CUDA1", "cuda", "cpu";
    None for any other text.
    """
    plain = text.strip().lower().replace(":", "")
    if plain == CPU:
        return RulePlace(CPU)
    digits = plain.removeprefix(CUDA)
    if plain.startswith(CUDA) and (
        not digits or (digits.isdecimal() and digits.isascii() and len(digits) < 5)
    ):
        return RulePlace(CUDA, int(digits or 0))
    return None
