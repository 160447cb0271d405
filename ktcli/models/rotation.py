"""Reads rotations (rotary position embeddings) from configs, in transformers' spelling and in the hub's.

The type of a rotation is in `rope_type` or `type`. Two types depend on the length of the text, although cached keys are
rotated once: "longrope" has two sets of wavelengths, and the planned context decides which (`LongRope`); "dynamic"
stretches only beyond `max_position_embeddings`, which no context exceeds. Every reader raises BadCheckpoint where a
field is missing, of the wrong type, out of bounds or not supported.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ktcli.errors import BadCheckpoint
from ktcli.layers.rope import Llama3, LongRope, Yarn, long_rotary, rotary
from ktcli.models.config import MAX_CONTEXT, Fields
from ktcli.ops.table.rowwise import Rope

STRETCHED = ("yarn", "llama3", "longrope")  # types that need the context of pre-training
MSCALES = "short_mscale", "long_mscale"  # of cos and sin with longrope (Phi-3.5-MoE)
_KINDS = ("default", "linear", "dynamic", "factors", *STRETCHED)


def read_rope(fields: Fields, dim: int, *, interleaved: bool) -> tuple[Rope, float]:
    """Returns the rotary embedding that a config describes for `dim` columns of a head, and the factor that its YaRN
    puts on attention scores (1 without YaRN).

    The fields are those of `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (the hub).

    Args:
        interleaved: pairs are (2i, 2i+1) instead of (i, i + dim/2).
    """
    rope = rope_fields(fields)
    theta, kind = read_theta(fields), rope_type(rope)
    rope.require("type", kind, *_KINDS)
    if kind == "dynamic":
        rope.number("factor", low=1.0, high=1e4)
    if kind == "longrope":
        return _read_longrope(rope, fields, dim, theta, interleaved=interleaved), 1.0
    if kind == "yarn":
        yarn = _read_yarn(rope, fields)
        return rotary(dim, theta, yarn=yarn, interleaved=interleaved), yarn.score_scale
    if kind == "llama3":
        return rotary(dim, theta, llama3=_read_llama3(rope, fields), interleaved=interleaved), 1.0
    if kind == "factors":
        factors = _read_factors(rope, "factors", dim // 2)
        return rotary(dim, theta, factors=factors, interleaved=interleaved), 1.0
    linear = rope.number("factor", low=1.0, high=1e4) if kind == "linear" else 1.0
    return rotary(dim, theta, linear=linear, interleaved=interleaved), 1.0


def read_proportional(fields: Fields, dim: int) -> Rope:
    """Returns the rotary embedding of `dim` columns (Gemma 4) in which only the first pairs are rotated, a share
    `partial_rotary_factor`. They have the frequencies of a rotation of all pairs; the other pairs have frequency 0.
    """
    rope, part = rope_fields(fields), rotated_part(fields)
    factor = rope.number("factor", low=1.0, high=1e4, default=1.0)
    every = rotary(dim, read_theta(fields), linear=factor, interleaved=False)
    turning = int((1.0 if part is None else part) * dim // 2)
    still = (0.0,) * (dim // 2 - turning)
    return replace(every, inv_freq=every.inv_freq[:turning] + still)


def read_theta(fields: Fields) -> float:
    """Returns the base of the rotary embedding's wavelengths, the config's `rope_theta`; 10000 if it is missing."""
    rope = rope_fields(fields)
    source = rope if rope.has("rope_theta") else fields
    return source.number("rope_theta", low=1.0 + 1e-6, high=1e12, default=10_000.0)


def rope_type(rope: Fields) -> str:
    """Returns the type of a rotary embedding ("yarn", "llama3" …) from its fields; "default" where they have none."""
    return rope.text("rope_type", rope.text("type", "default"))


def rotated_columns(fields: Fields, head_dim: int) -> int:
    """Returns the number of columns of a head that are rotated, an even number: the config's `rotary_dim`, or the share
    `partial_rotary_factor` of `head_dim`, else all.
    """
    part = rotated_part(fields)
    dim = int(head_dim * (1.0 if part is None else part))
    if part is not None and dim % 2:
        raise BadCheckpoint(
            f"{fields.where}: partial_rotary_factor {part:g} of head_dim {head_dim} is {dim} columns, which is odd"
        )
    given = fields.whole("rotary_dim", high=head_dim, default=dim)
    if part is not None and given != dim:
        raise BadCheckpoint(
            f"{fields.where}: rotary_dim is {given}, but partial_rotary_factor {part:g} rotates {dim} columns"
        )
    fields.require_multiple("rotary_dim", given, 2)
    return given


def rotated_part(fields: Fields) -> float | None:
    """Returns the fraction of a head's columns that is rotated, in 0..1; None: the config has no
    `partial_rotary_factor`.
    """
    rope, name = rope_fields(fields), "partial_rotary_factor"
    source = rope if rope.has(name) else fields
    return source.number(name, high=1.0) if source.has(name) else None


def rope_fields(fields: Fields) -> Fields:
    """Returns the config's nested `rope_parameters` or `rope_scaling`, the fields of its rotary embedding; an empty
    object if it has neither.
    """
    nested = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    return Fields(nested, f"{fields.where}: rope")


def _read_factors(rope: Fields, name: str, count: int) -> list[float]:
    """Reads one factor per pair of columns: LongRoPE's, or what GGUF files give instead of how it was computed."""
    given = rope.values.get(name)
    if not isinstance(given, list) or len(given) != count:
        raise BadCheckpoint(f"{rope.where}: {name} is not a list of {count} numbers")
    return [Fields({name: each}, rope.where).number(name, low=1e-6) for each in given]


def _read_longrope(
    rope: Fields, fields: Fields, dim: int, theta: float, *, interleaved: bool
) -> LongRope:
    original = _original_context(rope, fields)
    longest = fields.whole("max_position_embeddings", high=MAX_CONTEXT)
    factor = rope.number("factor", low=1e-3, high=1e4, default=longest / original)
    implied = 1.0
    if factor > 1.0 and original > 1:
        implied = math.sqrt(1.0 + math.log(factor) / math.log(original))
    scale = rope.number("attention_factor", high=1e3, default=implied)
    near, far = (rope.number(name, high=1e3, default=scale) for name in MSCALES)
    return long_rotary(
        dim,
        theta,
        _read_factors(rope, "short_factor", dim // 2),
        _read_factors(rope, "long_factor", dim // 2),
        scale=(near, far),
        original=original,
        interleaved=interleaved,
    )


def _read_llama3(rope: Fields, fields: Fields) -> Llama3:
    low = rope.number("low_freq_factor", low=1e-3, high=1e4)
    high = rope.number("high_freq_factor", low=1e-3, high=1e4)
    if high <= low:
        raise BadCheckpoint(
            f"{rope.where}: high_freq_factor is {high:g}, low_freq_factor {low:g}; it must be larger"
        )
    return Llama3(
        factor=rope.number("factor", low=1e-3, high=1e4),
        original_context=_original_context(rope, fields),
        low=low,
        high=high,
    )


def _original_context(rope: Fields, fields: Fields) -> int:
    """Reads the number of positions of pre-training; where the config does not say, those the model was made for."""
    name, context = "original_max_position_embeddings", "max_position_embeddings"
    source = rope if rope.has(name) else fields
    return source.whole(name, context, high=MAX_CONTEXT)


def _read_yarn(rope: Fields, fields: Fields) -> Yarn:
    original = _original_context(rope, fields)
    explicit = rope.number("attention_factor", high=1e3) if rope.has("attention_factor") else None
    return Yarn(
        factor=rope.number("factor", low=1e-3, high=1e4),
        original_context=original,
        beta_fast=rope.number("beta_fast", low=1e-3, high=1e4, default=32.0) or 32.0,
        beta_slow=rope.number("beta_slow", low=1e-3, high=1e4, default=1.0) or 1.0,
        mscale=rope.number("mscale", high=100.0, default=0.0),
        mscale_all_dim=rope.number("mscale_all_dim", high=100.0, default=0.0),
        attention_factor=explicit,
        truncate=rope.flag("truncate", True),
    )
