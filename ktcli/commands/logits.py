"""`kt logits` (hidden): write the logits of every position of sequences, for comparison with other tools."""

from __future__ import annotations

import json as jsonlib
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ktcli import smallfiles
from ktcli.assembly.load import load
from ktcli.assembly.prepare import prepare
from ktcli.assembly.request import Wanted
from ktcli.commands.cli.declarations import option
from ktcli.commands.cli.options import ModelArg, NumaOpt, PullOpt, ThreadsOpt
from ktcli.engine import Engine
from ktcli.engine.logits import F32Array
from ktcli.errors import UsageError, refusals
from ktcli.hardware.numa import OFF, asked_numa
from ktcli.measure.reader import I32Array, TextReader, pieces, steps
from ktcli.output import out, safe

MAX_IDS_BYTES = 16 << 20  # a million ids
MOST_AT_ONCE = 16  # sequences of a step, each with room for the longest


def logits(
    model: ModelArg,
    ids: Annotated[Path, option("--ids FILE.json", "A JSON list of token ids, or of such lists.")],
    target: Annotated[Path, option("--out -o FILE.npy", "f32 [tokens, vocabulary].")],
    exact: Annotated[
        bool, option("--exact", "Plain kernels in one team, f32 activations and cache.")
    ] = False,
    threads: ThreadsOpt = None,
    numa: NumaOpt = None,
    yes: PullOpt = False,
) -> None:
    """Write the logits of every position of a sequence, or of several, one after the other.

    Several are computed together, with the bits that each has alone.

    Examples:

      kt logits kt-mini --ids ids.json --out logits.npy --exact
    """
    sequences = read_ids(ids)
    if exact and numa not in (None, "off"):
        raise UsageError("--exact runs as one team", hint="leave out --numa")
    teams = OFF if exact else asked_numa(numa)
    longest = max(each.size for each in sequences)
    streams = min(MOST_AT_ONCE, len(sequences))
    wanted = Wanted(longest, threads, exact=exact, all_logits=True, streams=streams, numa=teams)
    values = _compute(load(prepare(model, wanted, listener=out), wanted, out), sequences, streams)
    with refusals(f"cannot write {target}"), open(target, "wb") as file:
        np.save(file, values)
    tokens, vocab = values.shape
    document = {
        "path": str(target),
        "sequences": len(sequences),
        "tokens": tokens,
        "vocab": vocab,
        "exact": exact,
    }
    out.result(document, f"{safe(target)}: {tokens} x {vocab} f32")


def _compute(engine: Engine, sequences: list[I32Array], at_once: int) -> F32Array:
    """The logits of every id of every sequence, [T, V]."""
    if engine.spec.embeds:
        raise UsageError("the model produces embeddings, not logits")
    vocab = engine.spec.vocab
    for bad in (int(each.max()) for each in sequences if each.max() >= vocab):
        raise UsageError(f"token id {bad} is outside the vocabulary of {vocab}")
    rows = min(engine.max_tokens, engine.max_outputs)
    cuts = [pieces(each, 0, rows) for each in sequences]
    values, done = np.empty((sum(each.size for each in sequences), vocab), np.float32), 0
    with closing(TextReader(engine)) as reader:
        for step in steps(cuts, rows, at_once):
            found = reader.read(step)
            values[done : done + len(found)] = found
            done += len(found)
    return values


def read_ids(path: Path) -> list[I32Array]:
    """Returns the sequences of token ids in a JSON file, each an int32 array [tokens].

    Raises:
        UsageError: it cannot be read, or is neither a list of whole numbers nor a list of such lists.
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
    several = isinstance(values, list) and all(isinstance(each, list) for each in values)
    lists = values if several else [values]
    if not lists or not all(_are_ids(each) for each in lists):
        raise UsageError(
            f"{path} is not a list of token ids",
            hint="for example: [1, 15, 7], or for several sequences: [[1, 15], [1, 7]]",
        )
    return [np.array(each, dtype=np.int32) for each in lists]


def _are_ids(values: Any) -> bool:
    """Returns whether this is a list of numbers that could be ids, one at least."""
    return (
        isinstance(values, list)
        and bool(values)
        and all(type(value) is int and 0 <= value < 2**31 for value in values)
    )
