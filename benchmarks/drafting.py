"""What drafted tokens gain where every draft is right, and what guesses from the conversation are worth on texts.

    python benchmarks/drafting.py [MODEL] [--layers 8] [--length 8] [--pairs 9] [--out FILE.json]

Steps of 1 + N tokens against as many of one token, in alternation, on a model's true shapes with random weights; then
`Lookup` over the texts of this tree, cut by kt-mini's tokenizer: how many tokens have a guess, by the length of the
match, and the share of its first token that is right.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.assembly.bench import Trial, plan_trial
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.subject import find_subject
from ktcli.engine import Engine
from ktcli.engine.draft import GRAMS, Lookup
from ktcli.engine.sequence import Sequence
from ktcli.hardware.gpu import CPU
from ktcli.native import Batch
from ktcli.resources import data_path
from ktcli.text.tokenizer import load_tokenizer

I32Array = NDArray[np.int32]
ROOT = Path(__file__).parents[1]
TEXTS = {
    "prose": ("README.md", "docs/text.md", "docs/gpu.md"),
    "code": ("ktcli/engine/sequence.py", "ktcli/engine/scheduler.py", "native/src/mla.c"),
    "json": ("benchmarks/results/2026-11-20-amd-epyc-2-cores.json",),
}
STEPS = 6  # of a run with drafts


def seconds(engine: Engine, line: Sequence, ids: I32Array, rows: int) -> float:
    """The seconds of steps of so many rows, all of which count and give logits, as those of right drafts do."""
    line.truncate(64)
    started = time.perf_counter()
    for at in range(0, ids.size, rows):
        chunk = (line.length, 1)
        run = line.extend(ids[at : at + rows], first_output=0, chunk=chunk)
        engine.run(Batch((run,)))
        line.commit(run, prompt=False)
    return time.perf_counter() - started


def gain(model: str, layers: int, length: int, pairs: int) -> dict[str, Any]:
    """The speed of right drafts as a multiple of the speed without: medians of pairs."""
    subject = find_subject(model, None, None)
    asked = Wanted(512, device=DeviceWords(device=CPU))
    engine = plan_trial(Trial(subject, asked, layers)).load()
    line, draw = engine.sequence(), np.random.default_rng(1)
    start = line.extend(draw.integers(0, engine.spec.vocab, 64).astype(np.int32))
    engine.run(Batch((start,)))
    line.commit(start)
    ratios, plain = [], []
    for pair in range(pairs + 1):  # the first warms up
        ids = draw.integers(0, engine.spec.vocab, STEPS * (1 + length)).astype(np.int32)
        alone, together = seconds(engine, line, ids, 1), seconds(engine, line, ids, 1 + length)
        if pair:
            ratios.append(alone / together)
            plain.append(len(ids) / alone)
    return {
        "model": model,
        "layers": layers,
        "length": length,
        "isa": engine.pool.isa,
        "threads": engine.pool.threads,
        "pairs": pairs,
        "tok_s_plain": median(plain),
        "gain": median(ratios),
        "gain_min": min(ratios),
        "gain_max": max(ratios),
    }


def guesses(kind: str, files: tuple[str, ...]) -> dict[str, Any]:
    """How `Lookup` guesses the texts of a kind, each a conversation of its own."""
    tokenizer = load_tokenizer(data_path("profiles", "kt-mini"))
    tried, right, tokens = [0] * len(GRAMS), [0] * len(GRAMS), 0
    for name in files:
        ids = tokenizer.encode((ROOT / name).read_text(encoding="utf-8")[:60_000])
        lookup, tokens = Lookup(), tokens + len(ids)
        for id in ids:
            guess = lookup.draft(1)
            if guess.ids:
                tried[guess.kind] += 1
                right[guess.kind] += guess.ids[0] == id
            lookup.extend(id)
    rows = zip(GRAMS, tried, right, strict=True)
    shares = {n: {"guesses": t, "right": r / t if t else None} for n, t, r in rows}
    return {"text": kind, "tokens": tokens, "by_match": shares}


def main() -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--texts-only", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    document: dict[str, Any] = {"guesses": [guesses(*each) for each in TEXTS.items()]}
    for row in document["guesses"]:
        print(json.dumps(row), flush=True)
    if not args.texts_only:
        document["right"] = gain(args.model, args.layers, args.length, args.pairs)
        print(json.dumps(document["right"]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
