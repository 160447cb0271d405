"""`kt logits` (hidden): write the logits of every position of a sequence, for comparison with other tools."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ktcli import smallfiles
from ktcli.assembly.load import load
from ktcli.assembly.prepare import prepare
from ktcli.assembly.request import Wanted
from ktcli.commands.options import JsonOpt, ModelArg, NumaOpt, ThreadsOpt
from ktcli.errors import KtError, UsageError
from ktcli.hardware.numa import OFF, asked_numa
from ktcli.output import out, safe

MAX_IDS_BYTES = 16 << 20  # a million ids

IdsOpt = Annotated[
    Path, typer.Option("--ids", metavar="FILE.json", help="A JSON list of token ids.")
]
OutOpt = Annotated[
    Path, typer.Option("--out", "-o", metavar="FILE.npy", help="f32 [tokens, vocabulary].")
]
ExactOpt = Annotated[
    bool, typer.Option("--exact", help="Plain kernels in one team, f32 activations and cache.")
]


def logits(
    model: ModelArg,
    ids: IdsOpt,
    target: OutOpt,
    exact: ExactOpt = False,
    threads: ThreadsOpt = None,
    numa: NumaOpt = None,
    json: JsonOpt = False,
) -> None:
    """Write the logits of every position of a sequence.

    Examples:

      kt logits kt-mini --ids ids.json --out logits.npy --exact
    """
    numbers = read_ids(ids)
    if exact and numa not in (None, "off"):
        raise UsageError("--exact runs as one team", hint="leave --numa out")
    teams = OFF if exact else asked_numa(numa)
    wanted = Wanted(len(numbers), threads, exact=exact, all_logits=True, numa=teams)
    engine = load(prepare(model, wanted, listener=out), wanted, out)
    values = engine.session().logits(numbers)
    try:
        with open(target, "wb") as file:
            np.save(file, values)
    except OSError as error:
        raise KtError(f"cannot write {target}: {error.strerror}") from error
    tokens, vocab = values.shape
    document = {"path": str(target), "tokens": tokens, "vocab": vocab, "exact": exact}
    out.result(document, f"{safe(target)}: {tokens} x {vocab} f32")


def read_ids(path: Path) -> list[int]:
    """The ids in a file.

    Raises:
        UsageError: it is not a list of whole numbers.
    """
    try:
        data = smallfiles.read_start(path, MAX_IDS_BYTES + 1)
        if len(data) > MAX_IDS_BYTES:
            raise UsageError(f"{path} is too large for a list of ids")
        values: Any = jsonlib.loads(data)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON") from error
    if (
        not isinstance(values, list)
        or not values
        or not all(type(value) is int and 0 <= value < 2**31 for value in values)
    ):
        raise UsageError(f"{path} is not a list of token ids", hint="for example: [1, 15, 7]")
    return values
