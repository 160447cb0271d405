"""Measure a kt-mini checkpoint: held-out questions, rows of kt's tables, held-out perplexity, and what rounding costs.

    python profiles/kt-mini/recipe/evaluate.py profiles/kt-mini
    python profiles/kt-mini/recipe/evaluate.py profiles/kt-mini --round int4     # experts at 4 bits
    python profiles/kt-mini/recipe/evaluate.py profiles/kt-mini --parity         # logits against transformers

Answers are greedy, one question per conversation, scored by `tests/mini_quality.py`. Rounded weights are
computed in f32, so that only the loss of the weights is seen.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import checkpoint
import torch
from corpus import ASSISTANT, BOS, END, SYSTEM, USER, common_words, read_text, stdlib_files
from dialogues import Dialogues
from lookup import TOLD, lookup
from model import Weights, forward
from phrases import Fact, Phrases, expand
from tokenizers import Tokenizer
from torch.nn import functional as F

from ktcli.text.rows import KnownRow, KnownRows

TESTS = Path(__file__).parents[3] / "tests"


def round_groups(w: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Symmetric rounding with one scale per group along the last axis, by the largest value."""
    top = 2 ** (bits - 1) - 1
    parts = w.unflatten(-1, (-1, group))
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / top
    return ((parts / scale).round().clamp(-top - 1, top) * scale).flatten(-2)


def bits_of(name: str, t: torch.Tensor, how: str) -> int | None:
    """Bits of one weight under `--round`; None: kept as it is."""
    if ".experts." in name:
        return 4 if how.startswith("int4") else 8
    kept = t.dim() == 1 or name == "embed_tokens" or name.endswith(("mlp.gate", "kv_b_proj"))
    return None if kept or "dense8" not in how else 8


def rounded(w: Weights, how: str) -> Weights:
    """Experts at 4 bits (groups of 64) or 8 (rows); with `dense8` the dense matrices at 8 too."""
    bits = {name: bits_of(name, t, how) for name, t in w.items()}
    return {
        name: t if (b := bits[name]) is None else round_groups(t, b, 64 if b == 4 else t.shape[-1])
        for name, t in w.items()
    }


class Judge:
    """A loaded model that answers and is measured."""

    def __init__(self, folder: Path, how: str = "") -> None:
        self.w, self.bias, self.shape = checkpoint.load(folder)
        self.w = rounded(self.w, how) if how else self.w
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.phrases = Phrases(lambda question: False, common_words())
        self.known = lookup(self.phrases)

    def turn(self, role: int, text: str) -> list[int]:
        """The ids of one turn."""
        return [role, *self.tokenizer.encode(text, add_special_tokens=False).ids, END]

    def told(self, question: str) -> list[int]:
        """The ids of the turn that tells what the question names; none where it names nothing."""
        found = self.known.find(question)
        return self.turn(SYSTEM, TOLD + found) if found else []

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, S] -> [B, S, V]."""
        return forward(self.w, self.bias, ids, self.shape)[0] @ self.w["lm_head"].T

    @torch.no_grad()
    def answers(self, questions: list[str], limit: int = 90) -> list[str]:
        """Greedy answers, all questions side by side; shorter prompts are filled on the right.

        As in kt, a question that names a row of the tables is told it; but the answer is the weights' own, and not held
        to the row.
        """
        prompts = [[BOS, *self.told(q), *self.turn(USER, q), ASSISTANT] for q in questions]
        rows = [list(p) for p in prompts]
        live = set(range(len(rows)))
        for _ in range(limit):
            order = sorted(live)
            width = max(len(rows[i]) for i in order)
            ids = torch.tensor([rows[i] + [END] * (width - len(rows[i])) for i in order])
            hidden = forward(self.w, self.bias, ids, self.shape)[0]
            last = hidden[torch.arange(len(order)), torch.tensor([len(rows[i]) - 1 for i in order])]
            for i, token in zip(
                order, (last @ self.w["lm_head"].T).argmax(-1).tolist(), strict=True
            ):
                if token == END:
                    live.discard(i)
                else:
                    rows[i].append(token)
            if not live:
                break
        return [self.tokenizer.decode(r[len(p) :]) for r, p in zip(rows, prompts, strict=True)]

    def perplexity(self, n_tokens: int, length: int = 512) -> tuple[float, float]:
        """Mean negative log likelihood per token and bytes per token on the held-out files."""
        text = [read_text(p) for p in stdlib_files(held_out=True)]
        ids = [
            t for s in text for t in (BOS, *self.tokenizer.encode(s, add_special_tokens=False).ids)
        ]
        rows = torch.tensor(ids[: min(n_tokens, len(ids)) // length * length]).view(-1, length)
        total = sum(
            float(
                F.cross_entropy(
                    self.logits(r)[:, :-1].flatten(0, 1), r[:, 1:].flatten(), reduction="sum"
                )
            )
            for r in rows.split(8)
        )
        return total / rows[:, 1:].numel(), sum(len(s.encode()) for s in text) / len(ids)


def report_questions(judge: Judge, *, verbose: bool) -> None:
    """Share of right answers of each part of the test set."""
    sys.path.insert(0, str(TESTS))
    from mini_quality import load_items, score

    for part, items in load_items().items():
        answers = judge.answers([i["question"] for i in items])
        right = [score(a, i) for a, i in zip(answers, items, strict=True)]
        print(f"{part:10} {sum(right)} of {len(right)} right")
        for item, answer in (
            (i, a) for i, a, ok in zip(items, answers, right, strict=True) if verbose and not ok
        ):
            print(f"   Q {item['question']}\n   A {answer}")


def report_rows(judge: Judge, *, verbose: bool) -> None:
    """Share of the rows of kt's tables, by kind, whose answer begins rightly when asked what the row is."""
    kinds: dict[str, list[Fact]] = defaultdict(list)
    for fact in judge.phrases.facts:
        if fact.rows:
            kinds[fact.rows[0].split()[0]].append(fact)
    for kind, facts in sorted(kinds.items()):
        questions = [f"what is {next(expand(f.names[0]))}?" for f in facts]
        answers = judge.answers(questions, limit=24)
        begins = [
            f.answer.split()[:6] == a.split()[:6] for f, a in zip(facts, answers, strict=True)
        ]
        print(f"{kind:10} {sum(begins)} of {len(facts)} rows known", flush=True)
        for question, answer, ok in zip(questions, answers, begins, strict=True):
            if verbose and not ok:
                print(f"   Q {question}\n   A {answer}")


def report_invented(judge: Judge, n: int = 200) -> None:
    """Share of rows that no table has, told to the model, that it says to the last letter when asked what they are."""
    made, rng = Dialogues(judge.phrases), random.Random(2027)
    facts = [made.invented(rng) for _ in range(n)]
    judge.known = KnownRows(KnownRow(((f.names[0].lower(),),), f.answer) for f in facts)
    answers = judge.answers([f"what is {f.names[0]}?" for f in facts])
    right = [f.answer == a for f, a in zip(facts, answers, strict=True)]
    print(f"invented   {sum(right)} of {n} rows said to the last letter")


def parity(folder: Path, judge: Judge) -> float:
    """Largest difference of logits from transformers' model, relative to their standard deviation."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(
        [judge.tokenizer.encode(read_text(stdlib_files(held_out=True)[0])).ids[:256]]
    )
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(ids).logits
    return float((judge.logits(ids) - expected).abs().max() / expected.std())


def main() -> None:
    """Parse and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--round", default="", choices=["", "int8", "int4", "int8+dense8", "int4+dense8"]
    )
    parser.add_argument(
        "--tokens", type=int, default=40960, help="held-out tokens for the perplexity"
    )
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print wrong answers")
    parser.add_argument("--ask", nargs="*", default=[], help="answer these questions instead")
    args = parser.parse_args()
    judge = Judge(args.folder, args.round)
    if args.ask:
        print(
            "\n".join(f"> {q}\n{a}" for q, a in zip(args.ask, judge.answers(args.ask), strict=True))
        )
        return
    if args.parity:
        print(
            f"largest difference from transformers: {parity(args.folder, judge):.1e} of the standard deviation"
        )
        return
    report_questions(judge, verbose=args.verbose)
    if not args.round:
        report_rows(judge, verbose=args.verbose)
        report_invented(judge)
    nll, size = judge.perplexity(args.tokens)
    print(
        f"held-out standard library: {nll:.4f} nats per token, "
        f"perplexity {math.exp(nll):.2f}, {size:.2f} bytes per token"
    )


if __name__ == "__main__":
    main()
