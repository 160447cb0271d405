"""Control words are found wherever they begin, and guarded texts hold no part that could become one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ktcli.text.words import MAX_HEADS, ControlWords

MARK = "\ufdd6"
LETTERS = st.text("<|>ab[/] ", min_size=2, max_size=6)
SOME_WORDS = st.lists(LETTERS, min_size=1, max_size=6)


@given(SOME_WORDS, st.text("<|>ab[/] ", max_size=30))
def test_every_place_where_a_word_begins(words: list[str], text: str) -> None:
    found = [at for at in range(len(text)) if any(text.startswith(word, at) for word in words)]
    known = ControlWords(words)
    assert list(known.places(text)) == found
    assert all(text.startswith(word, at) for word, at in zip(known.found(text), found, strict=True))
    marked = known.marked(text, MARK)
    assert marked.replace(MARK, "") == text
    assert list(known.places(marked)) == []


@given(
    st.lists(LETTERS.map(lambda word: f"<{word}>"), min_size=1, max_size=4),
    st.text("<|>ab[/] ", max_size=4),
    st.text("<|>ab[/] ", max_size=8),
    st.text("<|>ab[/] ", max_size=4),
)
def test_a_guarded_text_is_part_of_no_word(
    words: list[str], before: str, text: str, behind: str
) -> None:
    """Whatever stands before and behind it, and if a template takes the spaces at its ends away."""
    known = ControlWords(words)
    made = known.guarded(text, MARK)
    assert made.replace(MARK, "") == text
    for middle in (made, made.strip()):
        around = known.found(before) + known.found(behind)
        assert len(known.found(before + middle + behind)) <= len(around) or not text.strip()


def test_thousands_of_words_with_many_beginnings() -> None:
    words = [f"{first}x{n}{last}" for n in range(MAX_HEADS) for first, last in ("<>", "[]", "|;")]
    known = ControlWords([*words, "{{", "]~b]"])
    text = f"a{words[7]}b{words[99]}{{{{{{ ]~b]~b]"
    assert known.found(text) == [words[7], words[99], "{{", "{{", "]~b]", "]~b]"]


def test_no_words() -> None:
    known = ControlWords([])
    assert known.found("<s>") == []
    assert known.guarded("<s>", MARK) == "<s>"
