"""Whatever stands in a file that somebody else wrote, reading it gives a result or one sentence.

Each case changes an honest file at random for a bounded time, in `make test` always in the same order, in `make
test-all` in that of the commit's turn: `KT_FUZZ_SEED` starts elsewhere, `KT_FUZZ_S` goes on for so many seconds.
Tokenizers, whose errors may end a process, have a program of their own (text/fuzz_tokenizer.py).
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert import convert
from gguf_cases import CASES
from gguf_models import write_gguf
from safetensors.numpy import save
from text import family_templates, templates
from tiers import turn_now
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli import manifest
from ktcli.errors import BadCheckpoint
from ktcli.models import build
from ktcli.native import Pool
from ktcli.resources import data_path
from ktcli.text.template import ChatTemplate
from ktcli.weights.header import read_header
from ktcli.weights.reader import examine
from ktcli.weights.recipe import Recipe

SEED = os.environ.get("KT_FUZZ_SEED")
SECONDS = (1.0, float(os.environ.get("KT_FUZZ_S", "5")))  # in `make test`, in `make test-all`
LEAST = 30  # tries, on a machine that others use: of as many some are read and some refused

ODD_BYTES = (
    b"",
    b"\0",
    b"\xff" * 8,
    b"\x7f" + b"\xff" * 7,
    b"9" * 40,
    b"[" * 400,
    b"-1",
    b'"',
    b"\n",
    b"{",
    b"1e999",
)
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 1 << 40, 1 << 70, 0.5, -0.0, float("nan"), float("inf"), "", "\0", "a\nb", "yarn",
    "x" * 5000, [], {}, [[]], [None] * 40, {"": {}}, {"type": "yarn", "factor": 0},
)  # fmt: skip
ODD_JINJA = (
    "{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{% if x %}", "{% endif %}", "{%- set x = x ~ x -%}",
    "{{ x * 10**9 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "| tojson", "| int", ".__class__", "[::-1]",
    "| map(attribute='content')", "{# ", "{{ raise_exception('no') }}", "loop", "namespace(a=1)", "range(10**8)",
)  # fmt: skip

Target = Callable[[random.Random], object]


def changed_bytes(draw: random.Random, raw: bytes) -> bytes:
    """A few places, or none, overwritten, cut, doubled or filled with what parsers stumble over."""
    data = bytearray(raw)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 5))):
        at, n = draw.randrange(len(data) + 1), draw.choice((1, 1, 4, 8, 64))
        match draw.randrange(5):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                data[at : at + n] = b""
            case 2:
                data[at:at] = data[at : at + n]
            case 3:
                data[at:at] = draw.choice(ODD_BYTES)
            case _:
                odd = draw.choice(ODD_BYTES)
                data[at : at + len(odd)] = odd
    return bytes(data)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    if path:
        yield path
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from places(part, (*path, key))


def changed_values(draw: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """A few values left out, odd, or those of other places."""
    changed = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 2, 4))):
        every = list(places(changed))
        if not every:
            break
        *way, last = draw.choice(every)
        parent = changed
        for key in way:
            parent = parent[key]
        match draw.randrange(4):
            case 0:
                del parent[last]
            case 1:
                *way, other = draw.choice(every)
                source = changed
                for key in way:
                    source = source[key]
                parent[last] = copy.deepcopy(source[other])
            case _:
                parent[last] = copy.deepcopy(draw.choice(ODD_VALUES))
    return changed


# --- what is read ---------------------------------------------------------------------------------


def safetensors_header(folder: Path) -> Target:
    path = folder / "changed.safetensors"
    honest = {f"layers.{i}.weight": np.zeros((3, 1 + i), np.float32) for i in range(4)}
    raw = save(honest, {"format": "np"})
    length = 8 + int.from_bytes(raw[:8], "little")

    def read(draw: random.Random) -> None:
        text = changed_bytes(draw, raw[8:length])
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[length:])
        header, size = read_header(path), path.stat().st_size
        assert all(
            0 <= e.offset <= e.offset + e.size_bytes <= size for e in header.entries.values()
        )

    return read


def gguf_file(folder: Path) -> Target:
    raw = write_gguf(CASES[0], folder / "honest.gguf").read_bytes()
    path = folder / "changed.gguf"
    head = min(len(raw), 1 << 16)

    def read(draw: random.Random) -> None:
        path.write_bytes(changed_bytes(draw, raw[:head]) + raw[head:])
        examine(path)

    return read


def pack_manifest(folder: Path) -> Target:
    """By value, and sealed again as if kt had written it; or by byte."""
    source = random_checkpoint(folder / "honest", QWEN3)
    convert(source, folder / "pack", Recipe.named("int4", "int8"), Pool(1))
    raw = (folder / "pack" / "kt.json").read_bytes()

    def read(draw: random.Random) -> None:
        if draw.random() < 0.5:
            data = changed_bytes(draw, raw)
        else:
            document = changed_values(draw, json.loads(raw))
            document.pop("sha256", None)
            data = json.dumps(document).encode()
        try:
            found = manifest.parse(data)
        except ValueError as error:
            assert "\n" not in str(error)
            raise BadCheckpoint(str(error)) from error
        manifest.parse(found.encode())

    return read


def model_config(folder: Path) -> Target:
    paths = sorted(data_path("profiles", "models").iterdir())
    published = [tomllib.loads(path.read_text()).get("config") for path in paths]
    configs = [{**each, "num_hidden_layers": 4} for each in published if each]
    return lambda draw: build(changed_values(draw, draw.choice(configs)))


def chat_template(folder: Path) -> Target:
    sources = [*templates.ALL.values(), *family_templates.ALL.values()]
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "x", "tool_calls": []},
    ]

    def render(draw: random.Random) -> None:
        source = draw.choice(sources)
        for _ in range(draw.choice((1, 2, 4))):
            at, n = draw.randrange(len(source)), draw.choice((0, 1, 8))
            source = source[:at] + draw.choice(ODD_JINJA) + source[at + n :]
        assert isinstance(ChatTemplate(source, name="changed").render(talk), str)

    return render


TARGETS = (safetensors_header, gguf_file, pack_manifest, model_config, chat_template)


@pytest.mark.parametrize(
    "seconds",
    [SECONDS[0], pytest.param(SECONDS[1], marks=pytest.mark.thorough)],
    ids=["short", "long"],
)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_read_or_refused(target: Callable[[Path], Target], seconds: float, tmp_path: Path) -> None:
    read, over = target(tmp_path), time.monotonic() + seconds
    start = SEED or (turn_now() if seconds == SECONDS[1] else 0)
    refused = accepted = 0
    while time.monotonic() < over or refused + accepted < LEAST:
        seed = f"{start}-{refused + accepted}"
        try:
            read(random.Random(seed))
            accepted += 1
        except BadCheckpoint as error:
            assert "\n" not in str(error) and len(str(error)) < 1500, seed
            refused += 1
        except BaseException as error:
            error.add_note(f"{target.__name__} with random.Random({seed!r})")
            raise
    assert refused and accepted, f"{refused} refused, {accepted} read: nothing is tried"
