"""Markdown on a terminal, judged by a terminal emulator: what is on the screen, not which letters were sent."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from itertools import pairwise

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it.token import Token

from ktcli.terminal import inline, markdown
from ktcli.terminal.blocks import LineKind, LineStart, classify
from ktcli.terminal.flow import PlainText
from ktcli.terminal.markdown import Markdown
from ktcli.terminal.screen import visible

TEXT = """# A title with `code`
Some **bold *and slanted* words**, a `snippet`, snake_case_word, 2 * 3 * 4, [docs](https://example.org/a) and [1].
- an item which is quite long and needs a second line
  - nested **item**
- [x] done
10. ten
> a quote that is long enough to be broken

```python
def f(x):  # comment
    return "x" + `y`
```
| a | b | c |
|---|--:|:-:|
| 1 | 22 | **x** |
| 日本語 | 3 | `q` |

***
日本語の文章はどこでも改行できますが、句読点は行頭に来ません。
A word that has **no end"""

AT_40 = """A title with code
Some bold and slanted words, a snippet,
snake_case_word, 2 * 3 * 4, docs
(https://example.org/a) and [1].
• an item which is quite long and needs
  a second line
  ◦ nested item
☑ done
10. ten
│ a quote that is long enough to be
│ broken

```python
def f(x):  # comment
    return "x" + `y`
```
╭────────┬────┬───╮
│ a      │  b │ c │
├────────┼────┼───┤
│ 1      │ 22 │ x │
│ 日本語 │  3 │ q │
╰────────┴────┴───╯

───────────────────────────────────────
日本語の文章はどこでも改行できますが、
句読点は行頭に来ません。
A word that has **no end"""


def on_screen(pieces: Sequence[str], columns: int = 40, *, drawn: bool = True) -> pyte.Screen:
    screen = pyte.Screen(columns, 100)
    stream = pyte.Stream(screen)

    def write(text: str) -> None:
        stream.feed(text.replace("\n", "\r\n"))

    drawing = (
        Markdown(write, lambda: columns) if drawn else PlainText(write, lambda: columns, obeys=True)
    )
    for piece in pieces:
        drawing.feed(visible(piece))
    drawing.finish()
    return screen


def lines(screen: pyte.Screen) -> str:
    """What a person sees: a wide character is one, not one and an empty place."""
    return "\n".join(line.rstrip() for line in screen.display).rstrip()


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


def test_everything_at_forty_columns() -> None:
    assert lines(on_screen([TEXT])) == AT_40


@given(st.lists(st.integers(0, len(TEXT)), max_size=60))
@settings(max_examples=15)
def test_any_split_gives_the_same_screen(places: list[int]) -> None:
    screen = on_screen(cut(TEXT, places))
    assert lines(screen) == AT_40
    assert screen.buffer[1][5].bold and not screen.buffer[1][0].bold
    assert screen.buffer[1][10].italics


# Of the letters that mean something in Markdown, in any order.
NOISE = st.text(st.sampled_from("ab *_`~[]()!<>#-+.|1\\\n界"), max_size=80)


@given(NOISE, st.lists(st.integers(0, 80), max_size=20), st.sampled_from([2, 7, 40]))
@settings(max_examples=150)
def test_no_text_depends_on_its_pieces(text: str, places: list[int], columns: int) -> None:
    assert lines(on_screen(cut(text, places), columns)) == lines(on_screen([text], columns))


@given(NOISE)
@settings(max_examples=60)
def test_letters_are_never_lost(text: str) -> None:
    seen = lines(on_screen([text], 30))
    for letter in "ab界":
        if "|" not in text and "[" not in text and "`" not in text:
            assert seen.count(letter) == text.count(letter)


@pytest.mark.parametrize("columns", [1, 2, 20, 40, 80, 200])
def test_words_are_never_cut_where_they_fit(columns: int) -> None:
    words = ["word" + "x" * (i % 9) for i in range(60)]
    for drawn in (True, False):
        text = lines(on_screen(re.findall(r".{1,3}", " ".join(words)), columns, drawn=drawn))
        if columns > 14:
            assert text.split() == words
        else:  # the screen holds the last 100 lines
            assert "".join(text.split()) in "".join(words)


def test_nothing_in_a_text_is_obeyed() -> None:
    screen = on_screen(["\x1b[2J**a\x1b]0;t\x07b** `\x1b[31m`\n| \x1b[H |\n|--|\n| \u202e |\n"], 60)
    assert "[2J" in lines(screen) and "[31m" in lines(screen) and "[H" in lines(screen)
    assert screen.title == "" and "\u202e" not in lines(screen)


@pytest.mark.parametrize("line", ["`" * 20_000, " " * 20_000, "~~~ " + "a b " * 5000, "```" + " a" * 9000])  # fmt: skip
def test_a_line_that_stays_uncertain_is_read_a_few_times(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def counted(source: str, *, last: bool) -> LineStart | None:
        read.append(len(source))
        return classify(source, last=last)

    monkeypatch.setattr(markdown, "classify", counted)
    drawing = Markdown(lambda text: None, lambda: 80)
    for at in range(0, len(line), 4):
        drawing.feed(line[at : at + 4])
    drawing.finish()
    assert sum(read) < 8 * len(line)


SHAPES = ("# a\n", "- a\n", "> a\n", "[a](", "[a](b) ", "_a ", "x")  # again and again


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES)
def test_any_text_is_drawn_in_linear_time(shape: str) -> None:
    def cpu_s(chars: int) -> float:
        text = shape * (chars // len(shape))
        drawing = Markdown(lambda text: None, lambda: 80)
        began = time.thread_time()
        for at in range(0, len(text), 4):
            drawing.feed(text[at : at + 4])
        drawing.finish()
        return time.thread_time() - began

    short, long = (min(cpu_s(chars) for _ in range(2)) for chars in (4_000, 16_000))
    assert long < 8 * short  # linear: 4


def test_a_resized_window_counts_from_the_next_word() -> None:
    wide = [30]
    screen = pyte.Screen(80, 40)
    stream = pyte.Stream(screen)
    drawing = Markdown(lambda text: stream.feed(text.replace("\n", "\r\n")), lambda: wide[0])
    drawing.feed("word " * 8)
    wide[0] = 60
    drawing.feed("word " * 16)
    drawing.finish()
    seen = [len(line.rstrip()) for line in screen.display if line.strip()]
    assert seen[0] <= 30 and 30 < max(seen) < 60


@pytest.mark.parametrize(
    ("kind", "sources"),
    [
        (LineKind.HEADING, ("# t",)),
        (LineKind.RULE, ("---", "- - -")),
        (LineKind.ROW, ("| a |",)),
        (LineKind.FENCE, ("```py", "~~~")),
        (
            LineKind.TEXT,
            ("#tag", "#######  x", "- x", "**b**", "```a`b", "~~gone~~", "1999 was", "", "> | a"),
        ),
    ],
)
def test_what_a_line_is_never_changes_once_it_is_certain(
    kind: LineKind, sources: tuple[str, ...]
) -> None:
    for source in sources:
        final = classify(source, last=True)
        assert final is not None and final.kind is kind
        for size in range(len(source)):
            early = classify(source[:size], last=False)
            assert early is None or (early.kind, early.first) == (final.kind, final.first)


@pytest.mark.parametrize("unit", ["*a ", "**", "[a](", "`", "~~x ", "<a", "_a _", "!["])
def test_what_waits_for_its_end_is_short_and_parsed_a_bounded_number_of_times(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []

    def count(source: str) -> list[Token]:
        parsed.append(len(source))
        return []

    monkeypatch.setattr(inline, "_parsed", count)
    line = inline.Inline()
    source = unit * (8000 // len(unit))
    spans = list(line.feed(source))
    drawn = "".join(text for text, _ in (*spans, *line.finish()))
    assert drawn == source
    assert max(parsed, default=0) <= 400
    assert sum(parsed) <= 400 * 200 * 20


def test_quotes_within_quotes_and_marks_without_end_are_soon_certain() -> None:
    quoted = classify(">" * 10_000, last=False)
    assert quoted is not None and len(quoted.first) <= 24
    for marks in ("#" * 10_000, "- " * 5000):
        assert classify(marks, last=False) is not None
