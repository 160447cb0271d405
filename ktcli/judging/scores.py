"""Compares texts with right ones: exactly, and by BLEU and ROUGE where their libraries are installed.

BLEU is sacrebleu's, of all answers together. ROUGE is the mean F1 of rouge-score, whose own tokenizer knows no letters
but English ones: it is given words of any alphabet, of which the English ones are the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from ktcli.records import dataclass

INSTALL = 'pip install "ktcli[judge]"'
_LIBRARIES = ("sacrebleu", "rouge_score")
ORDERS = (1, 2, 3, 4)  # of BLEU
_ROUGES = {"1": "rouge1", "2": "rouge2", "L": "rougeL"}
# Scripts without blanks between words: each character counts as one.
_KANA, _HAN = "\u3040-\u30ff", "\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(f"[{_KANA}{_HAN}]|[^\\W_{_KANA}{_HAN}]+")


@dataclass(frozen=True, slots=True)
class TextScores:
    """The similarity of texts to the right ones, each score 0 to 100.

    Attributes:
        bleu: by the longest n-gram. rouge: by kind, "1", "2" and "L".
        signature: says how BLEU was computed.
    """

    bleu: dict[int, float]
    rouge: dict[str, float]
    signature: str


def is_right(text: str, reference: str) -> bool:
    """Returns whether a model's answer is literally the right one; white space around it does not count."""
    return text.strip() == reference


def missing() -> str:
    """Returns the names of the Python libraries that BLEU and ROUGE need and that are not installed, as one text;
    empty if none is missing.
    """
    return ", ".join(name for name in _LIBRARIES if find_spec(name) is None)


def text_scores(texts: Sequence[str], references: Sequence[str]) -> TextScores | None:
    """Returns the BLEU and ROUGE scores, 0 to 100, of at least one text against its reference; None if their libraries
    are not installed.
    """
    if missing():
        return None
    from sacrebleu.metrics import BLEU

    tokenize = _tokenizer(references)
    bleu, signature = {}, ""
    for order in ORDERS:
        # An order that no answer is long enough for does not count.
        metric = BLEU(max_ngram_order=order, effective_order=True, tokenize=tokenize)
        bleu[order] = float(metric.corpus_score(list(texts), [list(references)]).score)
        signature = str(metric.get_signature())
    return TextScores(bleu, _rouge(texts, references), signature)


def _tokenizer(references: Sequence[str]) -> str:
    """The name of sacrebleu's tokenizer for a language: its usual one wants blanks between words."""
    whole = "".join(references)
    if re.search(f"[{_KANA}]", whole):
        return "char"
    return "zh" if re.search(f"[{_HAN}]", whole) else "13a"


def _rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(_ROUGES.values()), tokenizer=WordTokenizer())
    found: list[dict[str, Any]] = [
        scorer.score(reference, text) for reference, text in zip(references, texts, strict=True)
    ]
    return {
        kind: 100 * sum(float(each[name].fmeasure) for each in found) / len(found)
        for kind, name in _ROUGES.items()
    }


class WordTokenizer:
    """The word tokenizer for rouge-score."""

    def tokenize(self, text: str) -> list[str]:
        """Returns the words of a text in lower case, in order, without punctuation; Han and Kana characters are words
        of their own.
        """
        return _WORD.findall(text.lower())
