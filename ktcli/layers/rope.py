"""Rotary position embeddings: the frequencies, plain and stretched.

Only the frequencies are made here; rotating is a backend operation. Everything is f32, in the order of
operations that transformers uses, so that positions of thousands agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ktcli.ops.table.rowwise import Rope
from ktcli.records import dataclass

F32Array = NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Yarn:
    """The parameters of YaRN's stretching of a context. Source: arXiv 2309.00071, section 3.

    Attributes:
        factor: context extension.
        original_context: the number of positions of pre-training.
        beta_fast, beta_slow: rotations per original context at the ends of the ramp.
        mscale, mscale_all_dim: DeepSeek's split of the attention factor; 0 = absent.
        attention_factor: given explicitly, or None to derive it.
        truncate: whether the ends of the ramp are rounded to whole dimensions.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def cos_sin_scale(self) -> float:
        """The factor that the cosines and sines of the rotary embedding are multiplied by: YaRN's attention factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def score_scale(self) -> float:
        """The factor that attention scores are multiplied by: (0.1 * mscale_all_dim * ln(factor) + 1)^2 (DeepSeek); 1
        if `mscale_all_dim` is 0 or nothing is stretched."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True, slots=True)
class Llama3:
    """The parameters of Llama 3.1's stretching: slow pairs by `factor`, fast ones not, between them by degrees.

    Attributes:
        original_context: the number of positions of pre-training.
        low, high: rotations per original context below which a pair is slow, above which it is fast.
    """

    factor: float
    original_context: int
    low: float
    high: float

    def stretch(self, inverse: F32Array) -> F32Array:
        """Returns the frequencies stretched as in Llama 3.1: radians per position of each pair of columns, [dim / 2]
        f32.

        Args:
            inverse: the frequencies before, in the same unit and shape.
        """
        turns = self.original_context / (2 * math.pi / inverse)
        slow, fast = turns < self.low, turns > self.high
        keep = (turns - self.low) / (self.high - self.low)
        stretched = inverse / self.factor
        between = (1 - keep) * stretched + keep * inverse
        out: F32Array = np.where(slow, stretched, np.where(fast, inverse, between))
        return out


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotary(
    dim: int,
    theta: float,
    *,
    yarn: Yarn | None = None,
    llama3: Llama3 | None = None,
    linear: float = 1.0,
    factors: Sequence[float] = (),
    interleaved: bool = False,
) -> Rope:
    """Returns the rotary embedding of `dim` columns: the frequency (radians per position) of each pair of columns,
    plain or stretched, and the factor of cos and sin.

    Args:
        theta: the base of the frequencies, as `rope_theta` in a config.json.
        linear: the divisor of positions (rope_type "linear").
        factors: a divisor of the frequency of each pair; empty: none.
    """
    wavelengths = _wavelengths(dim, theta)
    inverse = np.float32(1.0) / wavelengths / np.float32(linear)
    scale = 1.0
    if yarn is not None:
        keep = 1 - _ramp(yarn, dim, theta)
        inverse = (1.0 / (np.float32(yarn.factor) * wavelengths)) * (1 - keep) + inverse * keep
        scale = yarn.cos_sin_scale
    if llama3 is not None:
        inverse = llama3.stretch(inverse)
    if factors:
        inverse = np.divide(inverse, np.array(factors, dtype=np.float32), dtype=np.float32)
    return Rope(
        dim, tuple(float(value) for value in inverse.astype(np.float32)), scale, interleaved
    )


@dataclass(frozen=True, slots=True)
class LongRope(Rope):
    """LongRoPE's two rotations, of which a context chooses one: that of the fields of `Rope`, or `beyond`.

    Source: arXiv 2402.13753. transformers chooses anew for every call, by its text; with cached keys that would mix
    both, so engines choose once, by the positions they are planned for.

    Attributes:
        original: the longest context, in positions, that uses the first.
        beyond: radians per position of each pair in a longer context.
        beyond_scale: factor of cos and sin there.
    """

    original: int = 0
    beyond: tuple[float, ...] = ()
    beyond_scale: float = 1.0

    def at(self, context: int) -> Rope:
        """Returns the rotary embedding for a context of `context` positions: the first one for up to `original`
        positions, otherwise the one for longer contexts."""
        is_long = context > self.original
        chosen = self.beyond if is_long else self.inv_freq
        scale = self.beyond_scale if is_long else self.scale
        return Rope(self.dim, chosen, scale, self.interleaved, self.shift)


def at_context(part: T, context: int) -> T:
    """Returns `part` of a model with every `LongRope` inside it replaced by the rotary embedding for a context of
    `context` positions; `part` itself if it contains none."""
    made: Any = part
    if isinstance(part, LongRope):
        made = part.at(context)
    elif isinstance(part, tuple):
        each = tuple(at_context(one, context) for one in part)
        changed = any(new is not old for new, old in zip(each, part, strict=True))
        made = each if changed and type(part) is tuple else part
    elif is_dataclass(part) and not isinstance(part, type):
        values = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
        found = {name: at_context(value, context) for name, value in values.items()}
        changed_ones = {name: new for name, new in found.items() if new is not values[name]}
        made = replace(part, **changed_ones) if changed_ones else part
    return cast(T, made)


def long_rotary(
    dim: int,
    theta: float,
    short: Sequence[float],
    long: Sequence[float],
    *,
    scale: tuple[float, float],
    original: int,
    interleaved: bool = False,
) -> LongRope:
    """Returns LongRoPE's two rotary embeddings of `dim` columns as one object: for contexts of up to `original`
    positions, and for longer ones.

    Args:
        theta: the base of the frequencies, as `rope_theta` in a config.json.
        short, long: factors of the wavelength of each pair, up to `original` positions and beyond.
        scale: factors of cos and sin, up to `original` positions and beyond.
    """
    wavelengths = _wavelengths(dim, theta)
    near, far = (
        tuple(float(value) for value in np.float32(1.0) / (np.float32(factors) * wavelengths))
        for factors in (np.array(short), np.array(long))
    )
    of_near, of_far = scale
    return LongRope(
        dim, near, of_near, interleaved, original=original, beyond=far, beyond_scale=of_far
    )


def _wavelengths(dim: int, theta: float) -> F32Array:
    """The positions in which each pair of columns turns by one radian, f32 [dim / 2].

    Rounded from f64: the last bit of numpy's powers in f32 depends on the CPU, and with it would the keys of pages.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    base = float(np.float32(theta))
    return np.array([base**each for each in exponents.tolist()], np.float32)


def _ramp(yarn: Yarn, dim: int, theta: float) -> F32Array:
    """The share of each pair that is stretched: 0 where it rotates often, 1 where it rotates rarely; [dim/2] f32."""

    def dimension_of(rotations: float) -> float:
        return (
            dim
            * math.log(yarn.original_context / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero, as the reference does
    steps = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    clipped: F32Array = np.clip(steps, 0, 1).astype(np.float32)
    return clipped
