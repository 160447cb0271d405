"""The FP8 cache's exact rule, against torch's own E4M3 and against what the rule promises."""

from __future__ import annotations

import numpy as np
import pytest
from kvoracle import decode, encode

from ktcli.ops.kvformat import BF16, F32_CACHE, FORMATS, FP8, MOST

CASES = {
    "normal": lambda draw: draw.standard_normal((200, 48)),
    "spread over all exponents": lambda draw: (
        draw.standard_normal((400, 24)) * np.exp2(draw.integers(-145, 126, (400, 1)))
    ),
    "far apart in a head": lambda draw: (
        draw.standard_normal((400, 24)) * np.exp2(draw.integers(-40, 40, (400, 24)))
    ),
    "halves between codes": lambda draw: draw.integers(-896, 897, (300, 16)) / 2,
    "subnormal": lambda draw: draw.integers(-9, 10, (200, 16)) * 2.0**-149,
    "least": lambda draw: draw.integers(-9, 10, (200, 16)) * 2.0**-127,
    "alone": lambda draw: draw.standard_normal((300, 1)),
    "zero": lambda draw: np.zeros((4, 8)) * draw.choice([-1.0, 1.0], (4, 8)),
}


def rows(name: str) -> np.ndarray:
    return CASES[name](np.random.default_rng(len(name))).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_codes_are_those_of_torch_at_the_scale_of_the_rule(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = rows(name)
    codes, scale = encode(x)
    exact = (
        torch.from_numpy(x).double() * torch.exp2(127.0 - torch.from_numpy(scale).double())[:, None]
    )
    given = exact.clamp(-MOST, MOST).float()  # nothing that is rounded to a code is rounded here
    found = given.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    zero = (x == 0).all(axis=1)
    assert (codes[~zero] == found[~zero]).all() and not codes[zero].any()
    back = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    assert (decode(codes, scale) == (back * np.exp2(scale - 127.0)[:, None]).astype("f4")).all()


@pytest.mark.parametrize("name", CASES)
def test_the_scale_is_the_least_that_holds_a_head(name: str) -> None:
    x = rows(name).astype(np.float64)
    _, scale = encode(x.astype(np.float32))
    most, unit = np.abs(x).max(axis=1), np.exp2(scale.astype(np.float64) - 127)
    assert (most <= MOST * unit).all()
    more = (scale > 0) & (most > 0)
    assert (most > MOST / 2 * unit)[more].all()


def test_what_comes_back_is_within_half_a_step() -> None:
    """A sixteenth of a number, or, below 2^-6 of the scale, half of 2^-9 of it: 2^-18 of the greatest at most."""
    x = rows("far apart in a head").astype(np.float64)
    codes, scale = encode(x.astype(np.float32))
    unit = np.exp2(scale.astype(np.float64) - 127)[:, None]
    error = np.abs(decode(codes, scale) - x)
    assert (error <= np.maximum(np.abs(x) / 16, unit * 2.0**-10)).all()


def test_what_is_no_number() -> None:
    x = np.array([[np.nan, 1.0, -2.0], [np.inf, 1.0, -np.inf]], np.float32)
    codes, scale = encode(x)
    assert codes.tolist() == [[0x7F, 0, 0x80], [0x7E, 0, 0xFE]] and scale.tolist() == [247, 247]


def test_codes_of_codes_are_themselves() -> None:
    """As pages are copied as bytes, nothing depends on it; but a scale is never larger than needed."""
    codes, scale = encode(rows("normal"))
    again, scale_again = encode(decode(codes, scale))
    assert (decode(again, scale_again) == decode(codes, scale)).all()


def test_bytes_of_the_formats() -> None:
    assert [FORMATS[name] for name in ("bf16", "f32", "fp8")] == [BF16, F32_CACHE, FP8]
    assert [each.bytes_of(1024, 8) for each in FORMATS.values()] == [2048, 4096, 1032]
