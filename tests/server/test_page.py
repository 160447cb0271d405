"""The chat page: what it may load, and, in a real Chromium, what clicks and keys do and what hostile answers cannot."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from server.browser import PROGRAM, Browser, browser
from server.running import Running, running, scripted

from ktcli.server.http.keys import ApiKeys
from ktcli.server.http.page import files
from ktcli.server.http.state import Rules

FOLDER = Path(files.__file__).parent
MARKDOWN = """\
<think>
Let me <b>see</b>.
</think>

# Heading

Some **bold** and *slanted* `code`, [a link](https://example.com/).
1. one
2. two

```python
print("<i>")
```

| a | b |
|---|---|
| 1 | 2 |
"""
HOSTILE = """\
<script>window.hurt = 1</script><img src=x onerror="window.hurt = 1"><iframe src="https://evil.example"></iframe>

![picture](https://evil.example/x.png) [a](javascript:window.hurt=1) [b](data:text/html,x) [c](JaVaScRiPt:hurt=1)

```"><script>window.hurt = 1</script>
</code><svg onload="window.hurt = 1">
"""
DEEP = "> " * 400 + "- " * 400 + "**_" * 400 + "[" * 4000 + "`" * 4000 + "|-" * 2000
LONG = "x" * 3000  # an answer that goes on until it is stopped


def script(question: str) -> str:
    answers = {"markdown": MARKDOWN, "hostile": HOSTILE, "long": LONG}
    return answers.get(question, f"you said {question}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("model")
    with running(scripted(folder, script, context=16384), Rules(aliases=("other",))) as found:
        yield found


def test_a_browser_may_load_nothing_from_elsewhere(server: Running) -> None:
    reply = requests.get(server.url, headers={"accept": "text/html,*/*"}, timeout=5)
    assert reply.status_code == 200 and "<title>kt</title>" in reply.text
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    named = re.findall(r'(?:src|href)="([^"#]+)"', reply.text)
    for path in named:
        assert path == "data:," or requests.get(f"{server.url}/{path}", timeout=5).ok, path
    assert requests.get(f"{server.url}/page/files.py", timeout=5).status_code == 404


def test_programs_that_ask_whether_a_server_is_here_get_a_word(server: Running) -> None:
    assert requests.get(server.url, timeout=5).text == "kt is running"
    assert requests.head(server.url, timeout=5).status_code == 200


def test_the_page_needs_no_key_and_tells_nothing(tmp_path: Path) -> None:
    with running(scripted(tmp_path, script), Rules(ApiKeys.of("secret"))) as server:
        for path in sorted(files.PATHS):
            assert requests.get(f"{server.url}{path}", timeout=5).ok
        assert requests.get(f"{server.url}/v1/models", timeout=5).status_code == 401


def test_every_part_is_sent_and_no_text_is_read_as_markup() -> None:
    there = {path.name for path in FOLDER.iterdir() if path.suffix not in (".py", "")}
    assert there == set(files.PARTS)
    for name in there:
        text = (FOLDER / name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(", text
        )
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\bstyle=", text)


# --- in Chromium ----------------------------------------------------------------------------------------

in_chromium = [
    pytest.mark.thorough,
    pytest.mark.skipif(PROGRAM is None, reason="there is no chromium on this machine"),
]


def marked(function):  # type: ignore[no-untyped-def]
    for mark in in_chromium:
        function = mark(function)
    return function


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(tab: Browser, server: Running) -> Iterator[Browser]:
    tab.resize(1000, 700, "light")
    tab.events.clear()
    visit(tab, server)
    yield tab
    tab.value("(localStorage.clear(), sessionStorage.clear())")
    thrown = [each for each in tab.events if each.get("method") == "Runtime.exceptionThrown"]
    assert not thrown, thrown
    asked = [each for each in tab.events if each.get("method") == "Network.requestWillBeSent"]
    for each in asked:
        assert each["params"]["request"]["url"].startswith((f"{server.url}/", "data:,"))


def visit(tab: Browser, server: Running) -> None:
    tab.open(f"{server.url}/")
    tab.until(
        f"location.port === '{server.port}' && document.querySelector('#model')?.options.length"
    )


def ask(page: Browser, text: str) -> None:
    page.click("#prompt")
    page.type(text)
    page.press("Enter")
    done(page)


def done(page: Browser) -> None:
    page.until("document.querySelector('#status').textContent === 'The answer is complete.'")


def texts(page: Browser) -> list[str]:
    found: list[str] = page.value("[...document.querySelectorAll('.text')].map(e => e.innerText)")
    return found


@marked
def test_an_answer_is_shown_with_its_thoughts_folded_and_its_speed(page: Browser) -> None:
    ask(page, "markdown")
    names = "[...document.querySelectorAll('.other .text *')].map(e => e.tagName)"
    found = page.value(names)
    assert {"H2", "STRONG", "EM", "CODE", "A", "OL", "LI", "PRE", "TABLE", "TH", "TD"} <= set(found)
    assert page.value("document.querySelector('.other pre code').textContent") == 'print("<i>")'
    assert page.value("document.querySelector('.other details').open") is False
    page.click(".other summary")
    thoughts = "document.querySelector('.other .thoughts')"
    assert page.value(f"[{thoughts}.textContent, {thoughts}.checkVisibility()]") == [
        "Let me <b>see</b>.",
        True,
    ]
    assert "tokens/s" in page.value("document.querySelector('.other .row').innerText")
    assert re.fullmatch(
        r"\d+ of 16,384 tokens", page.value("document.querySelector('#context').innerText")
    )


@marked
def test_what_a_model_says_is_only_text(page: Browser) -> None:
    ask(page, "hostile")
    found = page.value(
        "[window.hurt ?? 0, document.querySelectorAll('.text :is(script, img, iframe, svg)').length,"
        " [...document.querySelectorAll('.text a')].every(a => /^https?:/.test(a.href))]"
    )
    assert found == [0, 0, True]


@marked
def test_marks_in_marks_are_read_to_a_depth(page: Browser) -> None:
    for text in (
        DEEP,
        *DEEP.split("|")[:1],
        "[" * 20_000,
        "-" * 20_000 + "x",
        "a|b\n" + "-" * 20_000 + "x",
    ):
        found = page.value(
            f"import('/page/markdown.js').then(m => {{ const e = document.createElement('div');"
            f" m.show(e, {json.dumps(text)}); return [e.textContent.length,"
            " Math.max(...[...e.querySelectorAll('*')].map(x => { let n = 0; for (; x !== e; n++) x = x.parentNode;"
            " return n }))] })"
        )
        assert found[0] > 1000 and found[1] < 40


@marked
def test_an_answer_can_be_stopped_and_the_server_is_free_again(
    page: Browser, server: Running
) -> None:
    for stop in (lambda: page.click("#stop"), lambda: page.press("Escape")):
        page.click("#prompt")
        page.type("long")
        page.press("Enter")
        page.until("document.querySelector('article:last-child .text')?.innerText.length > 20")
        stop()
        page.until("document.querySelector('#status').textContent === 'Stopped.'")
    page.until("fetch('health').then(r => r.json()).then(h => h.running === 0)")
    ask(page, "still here?")
    assert texts(page)[-1] == "you said still here?"


@marked
def test_an_answer_can_be_made_anew_and_a_question_changed(page: Browser) -> None:
    ask(page, "first")
    ask(page, "second")
    page.click("article:last-child .row button")  # Retry
    page.until("document.querySelectorAll('.text').length === 4")
    done(page)
    assert texts(page) == ["first", "you said first", "second", "you said second"]
    page.click("article:first-child .row button")  # Edit
    assert page.value("[document.querySelector('#prompt').value, document.activeElement.id]") == [
        "first",
        "prompt",
    ]
    page.type(" again")
    page.press("Enter")
    done(page)
    assert texts(page) == ["first again", "you said first again"]


KEPT = "JSON.parse(localStorage.getItem('kt.conversations'))[0].messages.map(e => e.content)"
GONE = "window.fetch = () => Promise.reject(new TypeError('gone'))"
WRONG = "document.querySelector('#status.wrong')?.textContent.includes('Cannot reach')"
WRITTEN = "document.querySelector('#prompt').value"
REPLACED = "document.querySelectorAll('.replaced').length"


@marked
@pytest.mark.parametrize("leave", ["Escape", "#cancel", "#fresh"])
def test_a_message_that_is_edited_stays_until_another_one_is_sent(
    page: Browser, server: Running, leave: str
) -> None:
    ask(page, "first")
    ask(page, "second")
    before = ["first", "you said first", "second", "you said second"]
    page.click("#prompt")
    page.type("a draft")
    page.click("article:first-child .row button")  # Edit
    page.type(" again")
    assert page.value(WRITTEN) == "first again" and page.value(REPLACED) == 4
    assert texts(page) == before and page.value(KEPT) == before
    if leave == "Escape":
        page.press(leave)
    else:
        page.click(leave)
    assert page.value(WRITTEN) == "a draft" and page.value(REPLACED) == 0
    assert page.value("document.querySelector('#cancel').checkVisibility()") is False
    assert page.value(KEPT) == before and texts(page) == ([] if leave == "#fresh" else before)
    page.click("#conversations li button")
    page.click("article:first-child .row button")
    visit(page, server)  # leaving the page loses nothing either
    page.click("#conversations li button")
    assert texts(page) == before


@marked
def test_what_was_to_be_replaced_comes_back_if_there_is_no_answer(page: Browser) -> None:
    ask(page, "first")
    ask(page, "second")
    before = ["first", "you said first", "second", "you said second"]
    page.value(GONE)
    page.click("article:first-child .row button")  # Edit
    page.type(" again")
    page.press("Enter")
    page.until(WRONG)
    assert texts(page) == before and page.value(KEPT) == before
    assert page.value(WRITTEN) == "first again" and page.value(REPLACED) == 4
    page.press("Escape")
    assert page.value(REPLACED) == 0 and page.value(WRITTEN) == ""
    page.click("article:last-child .row button")  # Retry
    page.until(WRONG)
    assert texts(page) == before and page.value(KEPT) == before


@marked
def test_only_the_last_answer_can_be_made_anew_at_one_click(page: Browser) -> None:
    ask(page, "first")
    ask(page, "second")
    shown = "[...document.querySelectorAll('.other .row button')].map(e => e.checkVisibility())"
    assert page.value(shown) == [False, True]


@marked
@pytest.mark.parametrize("block", ["# a\n", "> a\n\n", "- a\n", "|a|\n|-|\n|b|\n\n", "|-|-|\n"])
def test_a_long_text_is_drawn_in_linear_time(page: Browser, block: str) -> None:
    made = f"m.show(document.createElement('div'), {json.dumps(block)}.repeat"
    short, long = (
        page.work_s(f"import('/page/markdown.js').then(m => {made}({n})))") for n in (3000, 12_000)
    )
    assert long < 8 * short  # linear: 4; it was 14 and more


@marked
def test_several_conversations_outlive_the_page(page: Browser, server: Running) -> None:
    ask(page, "apples")
    page.click("#fresh")
    assert texts(page) == []
    ask(page, "pears")
    visit(page, server)
    titles = "[...document.querySelectorAll('#conversations li button:first-child')].map(e => e.innerText)"
    assert page.value(titles) == ["pears", "apples"]
    page.click("#conversations li:last-child button")
    assert texts(page) == ["apples", "you said apples"]
    page.click("#conversations li:first-child button:last-child")  # delete
    assert page.value(titles) == ["apples"]
    visit(page, server)
    assert page.value(titles) == ["apples"]


@marked
@pytest.mark.parametrize(
    "kept", ["{", "[1, {}]", '{"a": 1}', '[{"id": "x", "title": "y", "messages": [{}]}]']
)
def test_what_the_browser_kept_may_be_junk(page: Browser, server: Running, kept: str) -> None:
    page.value(f"localStorage.setItem('kt.conversations', {json.dumps(kept)})")
    visit(page, server)
    ask(page, "hello")
    assert texts(page) == ["hello", "you said hello"]


@marked
def test_models_and_colours_are_chosen_and_remembered(page: Browser, server: Running) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.value(back)
    page.click("#theme")
    dark = page.value(back)
    assert dark != light
    page.value(
        "(e => { e.value = 'other'; e.dispatchEvent(new Event('change')) })(document.querySelector('#model'))"
    )
    visit(page, server)
    assert (
        page.value(back) == dark and page.value("document.querySelector('#model').value") == "other"
    )
    page.click("#theme")
    page.resize(1000, 700, "dark")
    assert page.value(back) == light


@marked
def test_keys_reach_everything_and_a_reader_hears_what_happens(page: Browser) -> None:
    ask(page, "hello")
    page.value("document.body.focus()")
    seen = []
    for _ in range(20):
        page.press("Tab")
        seen.append(page.value("document.activeElement.id || document.activeElement.innerText"))
    assert {"model", "theme", "fresh", "log", "prompt", "send", "Edit", "Retry"} <= set(seen)
    nameless = page.value(
        "[...document.querySelectorAll('button, select, textarea, input')]"
        ".filter(e => !(e.innerText || e.ariaLabel || e.labels?.length)).length"
    )
    assert nameless == 0
    assert page.value("document.querySelector('#status').getAttribute('role')") == "status"


@marked
def test_a_phone_has_room_for_it(page: Browser) -> None:
    page.resize(360, 640, "dark")
    ask(page, "markdown")
    assert page.value("document.documentElement.scrollWidth") <= 360
    assert page.value("document.querySelector('#side').checkVisibility()") is False
    page.click("#menu")
    assert page.value("document.querySelector('#side').checkVisibility()") is True
    page.click("#fresh")
    assert page.value("document.querySelector('#side').checkVisibility()") is False


@marked
def test_a_server_with_a_key_is_told_it(tab: Browser, tmp_path: Path) -> None:
    with running(scripted(tmp_path, script), Rules(ApiKeys.of("secret"))) as server:
        tab.open(f"{server.url}/")
        tab.until(f"location.port === '{server.port}' && document.querySelector('#ask')?.open")
        tab.click("#key")
        tab.type("secret")
        tab.press("Enter")
        tab.until("document.querySelector('#model').options.length")
        ask(tab, "hello")
        assert texts(tab)[-1] == "you said hello"
