"""How an embedding model computes one vector from a text's hidden states, according to `KEY` in its config.

No publisher writes that field: whoever reads a model's files fills it in, from those of sentence-transformers
(weights/sentence.py), from a GGUF file's metadata, or from a profile. A model with it ends at its last norm, and has
no head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models.config import MAX_CONTEXT, MAX_WIDTH, Fields
from ktcli.records import dataclass

KEY = "kt_pooling"
MAX_PROMPTS = 64
MAX_PROMPT_CHARS = 10_000
MAX_LENGTHS = 64
# Fields with which a published model attends to later tokens, too, which kt does not compute.
_CAUSAL = {"is_causal": True, "use_bidirectional_attention": False}


class PoolingMode(StrEnum):
    """The choices of hidden states that become a text's vector; the values are written into configs."""

    LAST = "last"  # that of the last token
    MEAN = "mean"  # the mean of all
    FIRST = "cls"  # that of the first token


@dataclass(frozen=True, slots=True)
class TextPooling:
    """The way in which a text's hidden states become one vector.

    Attributes:
        mode: which hidden states count.
        normalize: whether the vector gets the length 1.
        include_prompt: whether the hidden states of a prompt before the text count, too.
        prompts: texts that may be put before a text, by name.
        default_prompt: the name of that which is, unless a request says otherwise; "": none.
        max_tokens: the most tokens of a text; 0: the context decides.
        lengths: the lengths to which a vector may be shortened; (): to none.
        any_length: whether it may be shortened to any.
    """

    mode: PoolingMode
    normalize: bool = True
    include_prompt: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    default_prompt: str = ""
    max_tokens: int = 0
    lengths: tuple[int, ...] = ()
    any_length: bool = False

    @property
    def words(self) -> str:
        """A description of the pooling for people, such as "the mean of all tokens, normalized"."""
        of = {
            PoolingMode.LAST: "the last token",
            PoolingMode.MEAN: "the mean of all tokens",
            PoolingMode.FIRST: "the first token",
        }
        return of[self.mode] + (", normalized" if self.normalize else "")


def read_pooling(config: Mapping[str, Any], hidden: int) -> TextPooling | None:
    """Returns how an embedding model with hidden states of `hidden` columns makes one vector of a text; None: the
    config has no `kt_pooling`, so it is not an embedding model.

    Raises:
        BadCheckpoint: a field has an invalid value, or asks for what kt does not compute.
    """
    said = config.get(KEY)
    if said is None:
        return None
    whole = Fields(config)
    for name, usual in _CAUSAL.items():
        whole.require(name, whole.flag(name, usual), usual)
    f = Fields(said, f"config.json: {KEY}")
    mode = f.text("mode", "")
    f.require("mode", mode, *PoolingMode)
    width = f.whole("dimensions", high=MAX_WIDTH, default=hidden)
    f.require("dimensions", width, hidden)
    prompts = _prompts(f)
    named = f.text("default_prompt", "")
    if named and named not in prompts:
        raise BadCheckpoint(f"{f.where}: default_prompt {named[:40]!r} is not one of its prompts")
    return TextPooling(
        PoolingMode(mode),
        f.flag("normalize", False),
        f.flag("include_prompt", True),
        prompts,
        named,
        f.whole("max_tokens", low=0, high=MAX_CONTEXT, default=0),
        *_lengths(config, f, hidden),
    )


def _prompts(f: Fields) -> dict[str, str]:
    prompts = f.values.get("prompts") or {}
    if not isinstance(prompts, dict) or len(prompts) > MAX_PROMPTS:
        raise BadCheckpoint(
            f"{f.where}: prompts must be an object of at most {MAX_PROMPTS} strings"
        )
    for name, text in prompts.items():
        if not isinstance(text, str) or max(len(text), len(name)) > MAX_PROMPT_CHARS:
            limit = f"a string of at most {MAX_PROMPT_CHARS:,} characters"
            raise BadCheckpoint(f"{f.where}: prompts: {name[:40]!r} must be {limit}")
    return dict(prompts)


def _lengths(config: Mapping[str, Any], f: Fields, hidden: int) -> tuple[tuple[int, ...], bool]:
    """Returns the lengths to which vectors may be shortened, and whether to any: the fields that vLLM reads, or what a
    profile says."""
    name, whole = "matryoshka_dimensions", Fields(config)
    listed = config.get(name)
    if listed is None:
        return (), whole.flag("is_matryoshka", False) or f.flag("any_length", False)
    good = isinstance(listed, list) and 0 < len(listed) <= MAX_LENGTHS
    if not good or not all(type(each) is int and 0 < each <= hidden for each in listed):
        raise BadCheckpoint(f"config.json: {name} must be a list of lengths of 1 to {hidden}")
    return tuple(sorted(set(listed))), False
