"""The chat page in a real Chromium: asking, answers, settings and files, by clicks."""

from __future__ import annotations

from pathlib import Path

from server.browser import Browser
from server.chatpage import (
    ask,
    begin_long,
    done,
    in_chromium,
    press,
    record_requests,
    script,
    texts,
    visit,
)
from server.running import Running, one_key, running, scripted

from ktcli.server.http.state import Rules

pytestmark = in_chromium


def test_an_answer_is_shown_with_its_thoughts_folded_and_its_speed(page: Browser) -> None:
    ask(page, "markdown")
    names = "[...document.querySelectorAll('.other .text *')].map(e => e.tagName)"
    found = page.value(names)
    wanted = {"H2", "STRONG", "EM", "CODE", "A", "OL", "LI", "PRE", "TABLE", "TH", "TD", "math"}
    assert wanted <= set(found)
    assert page.value("document.querySelector('.other pre').textContent") == 'print("<i>")\n'
    assert page.value("document.querySelectorAll('.other pre .hljs-built_in').length") == 1
    assert page.value("document.querySelector('.other details').open") is False
    thoughts = "document.querySelector('.other .thoughts').textContent"
    assert page.value(thoughts).strip() == "Let me <b>see</b>."
    assert "tokens/s" in page.value("document.querySelector('.other .speed').textContent")
    assert page.value("document.querySelectorAll('h1').length") == 1
    link = "(e => [e.href, e.rel, e.target])(document.querySelector('.other .text a'))"
    assert page.value(link) == ["https://example.com/", "noopener noreferrer", "_blank"]
    assert " of 16,384 tokens" in page.value("document.querySelector('#context').textContent")


def test_an_answer_can_be_stopped_and_gone_on_with(page: Browser, chat_server: Running) -> None:
    begin_long(page)
    page.press("Escape")
    page.until("document.querySelector('#status').textContent === 'Stopped.'")
    page.until("fetch('health').then(r => r.json()).then(h => h.running === 0)")
    assert page.value("document.querySelector('.state').textContent") == "Stopped"
    before = len(texts(page)[-1])
    press(page, "Continue")
    page.until(f"document.querySelector('.other .text').textContent.length > {before + 20}")
    page.click("#stop")
    page.until("document.querySelector('#status').textContent === 'Stopped.'")
    assert set(texts(page)[-1]) == {"x"} and len(texts(page)) == 2
    ask(page, "still here?")
    assert texts(page)[-1] == "you said still here?"


def test_answers_and_code_are_copied(page: Browser) -> None:
    page.value("navigator.clipboard.writeText = async text => { window.copied = text }")
    ask(page, "markdown")
    press(page, "Copy", ".codeblock")
    page.until("window.copied === 'print(\"<i>\")\\n'")
    page.until("document.querySelector('.codehead button').innerText.trim() === 'Copied'")
    press(page, "Copy", ".other .row")
    page.until("window.copied.startsWith('# Heading')")


def test_what_a_conversation_is_set_to_reaches_the_request(
    page: Browser, chat_server: Running
) -> None:
    record_requests(page)
    ask(page, "before")
    assert page.value("Object.keys(window.asked).sort().join()") == (
        "messages,model,return_progress,stream,stream_options"
    )
    page.click("#settings")
    values = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "40"}
    values |= {"min_p": "0.05", "seed": "7", "max_tokens": "30", "title": "A new title"}
    for name, value in values.items():
        page.click(f"#set-{name}")
        if name == "title":
            page.value("document.querySelector('#set-title').select()")
        page.type(value)
    page.click("[name=isDefault]")
    page.click("#adjust .save")
    page.until("document.querySelector('#title').textContent === 'A new title'")
    for again in (False, True):  # in a new conversation, too
        if again:
            visit(page, chat_server)
            record_requests(page)
            page.click("#fresh")
        ask(page, "after")
        asked = page.value("window.asked")
        assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
        numbers = {
            name: float(value) for name, value in values.items() if name not in ("title", "system")
        }
        assert {name: asked[name] for name in numbers} == numbers


def test_a_setting_that_the_server_would_refuse_is_not_saved(page: Browser) -> None:
    page.click("#settings")
    page.click("#set-top_p")
    page.type("3")
    page.click("#adjust .save")
    assert page.value("document.querySelector('#adjust').open") is True
    press(page, "Cancel", "#adjust")
    page.until("!document.querySelector('#adjust').open")


def test_an_answer_that_reaches_the_limit_says_so(page: Browser) -> None:
    page.click("#settings")
    page.click("#set-max_tokens")
    page.type("3")
    page.press("Enter")
    page.until("!document.querySelector('#adjust').open")
    page.click("#prompt")
    page.type("long")
    page.press("Enter")
    page.until("document.querySelector('.state')?.textContent === 'Reached the token limit'")
    press(page, "Continue")
    page.until("document.querySelector('.other .text').textContent === 'xxxxxx'")


def test_files_of_text_go_along_with_a_question(page: Browser, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes\n```\ncode\n```\n")
    (tmp_path / "data.bin").write_bytes(b"\x00\x01\xff")
    (tmp_path / "wide.txt").write_bytes("Grüße".encode("utf-16"))
    (tmp_path / "large.log").write_bytes(b"x" * (1024 * 1024 + 1))
    chosen = [tmp_path / name for name in ("notes.md", "data.bin", "wide.txt", "large.log")]
    page.choose_files("#attached", chosen)
    page.until("document.querySelectorAll('#files li').length === 2")
    said = page.value("document.querySelector('#status.wrong').textContent")
    assert "data.bin is not a text file" in said and "large.log is too large" in said
    press(page, "Remove wide.txt")
    record_requests(page)
    page.click("#prompt")
    page.type("what is it?")
    page.press("Enter")
    done(page)
    content = page.value("window.asked.messages[0].content")
    assert content == "what is it?\n\nnotes.md:\n\n````md\n# Notes\n```\ncode\n```\n````"
    assert page.value("document.querySelector('.own .file summary').innerText") == "notes.md"
    press(page, "Edit")
    page.until("document.querySelectorAll('#files li').length === 1")
    page.press("Escape")
    page.until("document.querySelectorAll('#files li').length === 0")


def test_models_and_colours_are_chosen_and_remembered(page: Browser, chat_server: Running) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.value(back)
    page.click("#theme")
    dark = page.value(back)
    assert dark != light
    ask(page, "one")
    page.value(
        "(e => { e.value = 'other'; e.dispatchEvent(new Event('change')) })(document.querySelector('#model'))"
    )
    ask(page, "two")
    speeds = page.value("[...document.querySelectorAll('.speed')].map(e => e.textContent)")
    assert speeds[0].startswith("fake · ") and speeds[1].startswith("other · ")
    visit(page, chat_server)
    assert page.value(back) == dark
    assert page.value("document.querySelector('#model').value") == "other"
    page.click("#theme")
    page.resize(1000, 700, "dark")
    assert page.value(back) == light


def test_a_phone_has_room_for_it(page: Browser) -> None:
    page.resize(360, 640, "dark")
    ask(page, "markdown")
    assert page.value("document.documentElement.scrollWidth") <= 360
    shown = "document.querySelector('#side').checkVisibility()"
    assert page.value(shown) is False
    page.click("#menu")
    assert page.value(shown) is True
    page.click("#fresh")
    assert page.value(shown) is False


def test_a_server_with_a_key_is_told_it(tab: Browser, tmp_path: Path) -> None:
    with running(scripted(tmp_path, script), Rules(one_key("secret"))) as server:
        tab.open(f"{server.url}/")
        tab.until(f"location.port === '{server.port}' && document.querySelector('#ask')?.open")
        tab.click("#key")
        tab.type("secret")
        tab.press("Enter")
        tab.until("document.querySelector('#model').options.length")
        ask(tab, "hello")
        assert texts(tab)[-1] == "you said hello"
