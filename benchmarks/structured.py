"""What holding answers to a JSON schema costs: steps of answers that are held to one against steps of the same answers.

    python benchmarks/structured.py [MODEL] [--layers 8] [--streams 1] [--pairs 9] [--greedy] [--bounded] [--add]

A model's true shapes with random weights; its vocabulary is learnt from Python's library, as many tokens as the model
has, and kept in the folder of --words. What the answers say is found first, by sampling within the schema; then both
kinds of runs say just that, so that the same experts work, in alternation. `slower` compares whole steps, which drift
with the machine; `choosing_slower` only the time in which tokens are chosen, masks and all, as a share of a plain step:
all else is the same work.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
from naming import result_path

from ktcli.answers.grammar.compiler import GrammarCompiler
from ktcli.answers.grammar.form import Form, Notation
from ktcli.answers.grammar.whole import Shape
from ktcli.assembly.bench import Trial, plan_trial
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.subject import find_subject
from ktcli.engine import Engine
from ktcli.engine.logits import Logits
from ktcli.engine.request import Answer, GenerationRequest
from ktcli.engine.scheduler import Limits, Scheduler
from ktcli.hardware.gpu import CPU
from ktcli.hardware.probe import probe
from ktcli.native import Batch
from ktcli.sampling import SamplingSettings
from ktcli.text.tokenizer import Tokenizer, load_tokenizer

GOALS = {1: 0.01, 16: 0.03}  # the share of its speed that an answer may lose, by the streams
PROMPT, END = 16, "<|end|>"
# As published with Qwen3.
SAMPLING = SamplingSettings(temperature=0.6, top_p=0.95, top_k=20)
GREEDY = SamplingSettings(greedy=True)
TEXT, BOUNDED = {"type": "string"}, {"type": "string", "maxLength": 24}


def schema(text: dict[str, Any]) -> dict[str, Any]:
    """Records as programs ask for them, with such texts; so many that no answer ends."""
    degrees = {"type": "integer", "minimum": -180, "maximum": 180}
    properties = {
        "name": text,
        "kind": {"enum": ["city", "river", "mountain", "lake"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "position": {"type": "array", "items": degrees, "minItems": 2, "maxItems": 2},
        "remarks": {"type": "array", "items": text, "maxItems": 3},
        "capital": {"type": "boolean"},
    }
    record = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "array",
        "minItems": 100_000,
        "items": {**record, "additionalProperties": False},
    }


def vocabulary(folder: Path, size: int) -> Tokenizer:
    """A byte-level tokenizer of so many tokens, learnt from Python's library."""
    path = folder / "tokenizer.json"
    if not path.exists():
        from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Inner

        inner = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False
        )
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))
        own = (path for path in paths if "site-packages" not in path.parts)
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in own)
        inner.train_from_iterator(texts, trainer)
        inner.add_special_tokens([AddedToken(END, special=True)])
        inner.save(str(path))
    return load_tokenizer(folder)


# What the answers say: short texts, and blanks as most models write them.
_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SHORT = json.dumps({**schema(BOUNDED), "x-guidance": _BLANKS})
_LEARNT = Shape(Form(Notation.GBNF, f"start: %json {_SHORT}", "schema"))


class Saying:
    """An engine that computes everything, and whose answers then say what they are told to.

    Attributes:
        texts: the ids that each answer says; empty: whatever it likes. Prompts begin with their number.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.texts: dict[int, list[int]] = {}
        self._whose: dict[int, int] = {}  # first page -> answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, batch: Batch) -> list[Logits]:
        rows = iter(self._engine.run(batch))
        return [row for run in batch.runs for row in self._said(run, rows)]

    def _said(self, run: Any, rows: Iterator[Logits]) -> Iterator[Logits]:
        if run.start == 0:
            self._whose[int(run.pages[0])] = int(run.ids[0])
        said = self.texts.get(self._whose[int(run.pages[0])])
        for at in range(run.first_output, run.ids.size):
            row, place = next(rows), run.start + at + 1 - PROMPT
            if said is None or place >= len(said):
                yield row
                continue
            id, value = said[place], row.values[row.best] + 8
            row.values[id] = row.peaks[id // 64] = value
            yield row._replace(best=id)


class Bench:
    """Runs of some answers at once, plain or held to the schema."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
        self.engine, self._streams, self._steps = Saying(engine), args.streams, args.steps
        self._tokenizer = tokenizer
        end = tokenizer.id_of(END)
        assert end is not None
        self._grammars = GrammarCompiler(tokenizer, {end}, engine.spec.vocab)
        self._shape = Shape(Form.of_schema(schema(BOUNDED if args.bounded else TEXT), "schema"))

    def run(self, sampling: SamplingSettings, *, held: bool) -> tuple[float, list[Answer]]:
        """The seconds of a step, without the first, and the answers."""
        self.engine.pools.forget()
        scheduler = Scheduler(cast(Engine, self.engine), Limits(active=self._streams))
        shape, count = self._shape if self.engine.texts else _LEARNT, self._streams if held else 0
        found = self._grammars.constraints(shape, None, None, count)
        answers = [
            scheduler.submit(
                GenerationRequest(
                    [
                        number,
                        *np.random.default_rng(number).integers(0, 50_000, PROMPT - 1).tolist(),
                    ],
                    sampling,
                    max_tokens=self._steps,
                    constraint=found[number] if held else None,
                )
            )
            for number in range(self._streams)
        ]
        while any(not answer.ids for answer in answers):
            scheduler.step()
        least = min(len(answer.ids) for answer in answers)
        scheduler.step()
        began = time.perf_counter()
        for _ in range(self._steps - least - 2):
            scheduler.step()
        seconds = (time.perf_counter() - began) / (self._steps - least - 2)
        while not scheduler.idle:
            scheduler.step()
        return seconds, answers

    def learn(self) -> str:
        """Finds what the answers say, and returns one of them."""
        likely = SamplingSettings(temperature=1.0, seed=1)
        _, answers = self.run(likely, held=True)
        self.engine.texts = {answer.request.prompt[0]: list(answer.ids) for answer in answers}
        return self._tokenizer.decode(answers[0].ids)


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The medians of pairs."""
    subject = find_subject(args.model, None, None)
    asked = Wanted(512, device=DeviceWords(device=CPU), streams=args.streams)
    engine = plan_trial(Trial(subject, asked, args.layers)).load()
    bench = Bench(engine, vocabulary(folder, engine.spec.vocab), args)
    text, sampling = bench.learn(), GREEDY if args.greedy else SAMPLING
    pairs = []
    for pair in range(args.pairs + 1):  # the first warms up
        order = (False, True) if pair % 2 else (True, False)
        runs = {held: bench.run(sampling, held=held) for held in order}
        pairs.append((runs[True], runs[False]))
    losses = [held / plain - 1 for (held, _), (plain, _) in pairs[1:]]
    choosing = [
        (_choosing(held) - _choosing(plain)) / step for (_, held), (step, plain) in pairs[1:]
    ]
    return {
        "work": "structured",
        "model": args.model,
        "layers": args.layers,
        "streams": args.streams,
        "texts": "bounded" if args.bounded else "free",
        "sampling": "greedy" if args.greedy else "as published",
        "isa": engine.pool.isa,
        "threads": engine.pool.threads,
        "pairs": args.pairs,
        "step_ms_plain": 1000 * median(plain for _, (plain, _) in pairs[1:]),
        "slower": median(losses),
        "slower_min": min(losses),
        "slower_max": max(losses),
        "choosing_slower": median(choosing),
        "choosing_slower_min": min(choosing),
        "choosing_slower_max": max(choosing),
        "goal": GOALS.get(args.streams),
        "text": text[:200],
    }


def _choosing(answers: list[Answer]) -> float:
    """The seconds in a step in which tokens are chosen, masks and all."""
    return answers[0].stats.choosing_s / answers[0].stats.steps


def main() -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--bounded", action="store_true", help="texts have a maxLength")
    parser.add_argument("--words", type=Path, help="where the vocabulary is kept")
    parser.add_argument("--add", action="store_true", help="add the row to today's file of results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = measured(args, args.words or Path(folder))
    print(json.dumps(row), flush=True)
    if args.add:
        machine = probe()
        out = result_path(machine.cpu.model, len(machine.cpu.cores), "structured")
        found = json.loads(out.read_text())["results"] if out.exists() else []
        out.write_text(json.dumps({"results": [*found, row]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
