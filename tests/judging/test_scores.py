"""BLEU and ROUGE of answers: by hand, and rouge-score's own words where it knows the letters."""

from __future__ import annotations

import pytest

from ktcli.judging import scores
from ktcli.judging.scores import WordTokenizer, is_right, text_scores

ENGLISH = ["It's 5_000 ft high, isn't it? Yes: 3.5 km!", "", "--- ___"]


def test_right_is_to_the_letter_but_for_blanks_around() -> None:
    assert is_right(" 66.\n", "66.")
    assert not is_right("66", "66.") and not is_right("Yes.", "yes.")


def test_without_the_libraries_there_are_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "find_spec", lambda name: None)
    assert text_scores(["a"], ["a"]) is None
    assert scores.missing() == "sacrebleu, rouge_score"


def test_scores_by_hand() -> None:
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    pytest.importorskip("rouge_score", reason="rouge-score is not installed")
    found = text_scores(["the cat sat on a mat"], ["the cat sat on the mat"])
    assert found is not None
    # 5 of 6 words; 3 of 5 pairs; both texts have 6 words, so nothing is taken off for length.
    assert found.bleu[1] == pytest.approx(100 * 5 / 6)
    assert found.bleu[2] == pytest.approx(100 * (5 / 6 * 3 / 5) ** 0.5)
    assert found.bleu[3] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4) ** (1 / 3))
    assert found.bleu[4] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert found.rouge == pytest.approx({"1": 100 * 5 / 6, "2": 60.0, "L": 100 * 5 / 6})
    assert "tok:13a" in found.signature


@pytest.mark.parametrize("text", ["yes", "猫在垫子上", "ねこはここにいる", "кот сидит"])
def test_right_answers_of_any_alphabet_and_length_score_100(text: str) -> None:
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    pytest.importorskip("rouge_score", reason="rouge-score is not installed")
    found, other = text_scores([text], [text]), text_scores(["no"], [text])
    assert found is not None and other is not None
    assert list(found.bleu.values()) == pytest.approx([100.0] * 4)
    assert (found.rouge["1"], found.rouge["L"]) == (100.0, 100.0)
    assert other.rouge["1"] == 0.0


@pytest.mark.parametrize("text", ENGLISH)
def test_english_words_are_those_of_rouge_score(text: str) -> None:
    tokenizers = pytest.importorskip("rouge_score.tokenizers", reason="rouge-score is missing")
    own = tokenizers.DefaultTokenizer(use_stemmer=False).tokenize(text)
    assert WordTokenizer().tokenize(text) == own
