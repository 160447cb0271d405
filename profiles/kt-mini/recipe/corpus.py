"""The text kt-mini learns from, as rows of token ids with a weight per token.

Three streams: conversations, sums, and the sources of Python's standard library. One file in twenty of the
library is held out (chosen by a hash of its path) and used only by `evaluate.py`. In conversations the
answers carry the weight, their first words most; questions count only in a part of them.
"""

from __future__ import annotations

import random
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from dialogues import Dialogues, Turn, sum_turn
from lookup import TOLD
from phrases import Phrases, TooClose, held_out_questions
from tokenizers import Tokenizer
from torch import Tensor

BOS, SYSTEM, USER, ASSISTANT, END, PAD = range(6)
SPECIAL = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")
DECIDING = 8  # tokens of an answer
ROLE = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
SKIPPED = (
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "pydoc_data",
)


def stdlib_files(*, held_out: bool, root: Path | None = None) -> list[Path]:
    """Sources of the standard library, of the training or of the held-out part."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = (
        p for p in sorted(root.rglob("*.py")) if not set(p.relative_to(root).parts) & set(SKIPPED)
    )
    return [
        p
        for p in found
        if (zlib.crc32(p.relative_to(root).as_posix().encode()) % 20 == 0) == held_out
    ]


def read_text(path: Path) -> str:
    """The text of a file; the few files in old encodings lose a letter."""
    return path.read_text(encoding="utf-8", errors="ignore")


def common_words(n: int = 3000) -> list[str]:
    """Frequent words of the standard library: things to say "I don't know" about."""
    count: Counter[str] = Counter()
    for path in stdlib_files(held_out=False):
        count.update(set(re.findall(r"\b[a-z]{4,12}\b", read_text(path))))
    return [w for w, _ in count.most_common(n)]


def make_dialogues() -> Dialogues:
    """Dialogues that keep away from the held-out questions."""
    return Dialogues(Phrases(TooClose(held_out_questions()), common_words()))


@dataclass(frozen=True)
class Mix:
    """Share of each stream in tokens, as weights."""

    chat: float = 0.84
    sums: float = 0.04
    code: float = 0.12


class Corpus:
    """Endless batches for one worker."""

    def __init__(self, tokenizer: Tokenizer, seed: int, mix: Mix = Mix()) -> None:
        self.tokenizer, self.mix = tokenizer, mix
        self.rng = random.Random(seed)
        self.dialogues = make_dialogues()
        self.code = [
            t
            for p in stdlib_files(held_out=False)
            for t in (BOS, *tokenizer.encode(read_text(p), add_special_tokens=False).ids)
        ]

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Ids [rows, length + 1] and the weight of each as a target."""
        made = [self.row(length + 1) for _ in range(rows)]
        return torch.tensor([r[0] for r in made]), torch.tensor([r[1] for r in made])

    def row(self, length: int) -> tuple[list[int], list[float]]:
        """One row of one stream; its share of rows is its share of tokens."""
        stream = self.rng.choices(
            ("chat", "sums", "code"), (self.mix.chat, self.mix.sums, self.mix.code)
        )[0]
        if stream == "code":
            start = self.rng.randrange(len(self.code) - length)
            return self.code[start : start + length], [1.0] * length
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            turns = self.talk(stream, length)
            more, w = self.encode(turns, whole=stream == "sums" or is_told(turns))
            ids += more
            weights += w
        return ids[:length], weights[:length]

    def talk(self, stream: str, length: int) -> list[Turn]:
        """One conversation; in long rows some go on for very long."""
        if stream == "sums":
            return [t for _ in range(self.rng.choice((1, 1, 2, 4))) for t in sum_turn(self.rng)]
        return self.dialogues.conversation(
            self.rng, 40 if length > 1024 and self.rng.random() < 0.1 else None
        )

    def encode(self, turns: list[Turn], *, whole: bool = False) -> tuple[list[int], list[float]]:
        """Ids and weights of a conversation, in the form of the chat template.

        The first words of an answer decide which fact it is; they weigh most. The rest is learned quickly,
        so most conversations break off in their last answer (without an end token). Sums are `whole`, and so are
        answers that were told: there the last words decide.
        """
        texts = self.tokenizer.encode_batch([t for _, t in turns], add_special_tokens=False)
        ids, weights = [BOS], [0.0]
        question = 0.3 if self.rng.random() < 0.15 else 0.0
        for (role, _), text in zip(turns, texts, strict=True):
            ids += (ROLE[role], *text.ids, END)
            if role == "assistant":
                first = 1.0 if whole else 4.0
                n_rest = len(text.ids) - DECIDING
                weights += (
                    0.0,
                    *[first] * min(DECIDING, len(text.ids)),
                    *[5.0 - first] * n_rest,
                    1.0,
                )
            else:
                weights += (0.0, *[question] * (len(text.ids) + 1))
        n_rest = len(texts[-1].ids) - DECIDING
        if not whole and n_rest > 0 and self.rng.random() < 0.8:
            return ids[: -n_rest - 1], weights[: -n_rest - 1]
        return ids, weights


def is_told(turns: list[Turn]) -> bool:
    """Is the last answer of a conversation one that a system turn has told?"""
    return any(role == "system" and text == TOLD + turns[-1][1] for role, text in turns[-3:])


def sample_text(n: int, seed: int = 0) -> Iterator[str]:
    """Conversations as plain text, for the training of the tokenizer."""
    rng, dialogues = random.Random(seed), make_dialogues()
    for _ in range(n):
        yield from (text for _, text in dialogues.conversation(rng))
