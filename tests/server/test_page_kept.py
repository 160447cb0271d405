"""The chat page in a real Chromium: nothing that was written is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server.browser import Browser
from server.chatpage import (
    ask,
    begin_long,
    done,
    in_chromium,
    press,
    stored,
    texts,
    titles,
    visit,
)
from server.running import Running

pytestmark = in_chromium

TWO = ["first", "you said first", "second", "you said second"]
GONE = "window.fetch = () => Promise.reject(new TypeError('gone'))"
BACK = "delete window.fetch"
STATUS = "document.querySelector('#status').textContent"
WARNING = "document.querySelector('#warning').innerText"
WRONG = "document.querySelector('#status.wrong')?.textContent"
WRITTEN = "document.querySelector('#prompt').value"
REPLACED = "document.querySelectorAll('.replaced').length"
STATE = "document.querySelector('article:last-child .state')?.textContent"


def two_questions(page: Browser) -> None:
    ask(page, "first")
    ask(page, "second")
    assert texts(page) == TWO


def contents(page: Browser) -> list[str]:
    return sorted(each["content"] for each in stored(page))


def stored_all(page: Browser, count: int) -> None:
    """Waits until so many messages are stored."""
    page.until(
        "new Promise(done => { indexedDB.open('kt').onsuccess = e => { const d = e.target.result;"
        " d.transaction('messages').objectStore('messages').getAll().onsuccess = f => { d.close();"
        f" done(f.target.result.filter(m => m.state !== 'open').length === {count}) }} }} }})"
    )


def storing_ended(page: Browser) -> None:
    """Waits until what was begun to be stored is stored: transactions that write come one after the other."""
    page.value(
        "new Promise(done => { indexedDB.open('kt').onsuccess = e => { const d = e.target.result;"
        " const t = d.transaction(['conversations', 'messages'], 'readwrite'); t.objectStore('messages').count();"
        " t.oncomplete = () => { d.close(); done() } } })"
    )


# --- answers ------------------------------------------------------------------------------------------------


def test_an_answer_outlives_a_reload_in_its_middle_and_goes_on(
    page: Browser, chat_server: Running
) -> None:
    ask(page, "first")
    begin_long(page)
    page.until(
        "new Promise(done => { indexedDB.open('kt').onsuccess = e => { const d = e.target.result;"
        " d.transaction('messages').objectStore('messages').getAll().onsuccess = f => { d.close();"
        " done(f.target.result.some(m => m.content.startsWith('xxx'))) } } })"
    )
    visit(page, chat_server)
    before = texts(page)
    assert before[:3] == ["first", "you said first", "long"] and set(before[3]) == {"x"}
    assert page.value(STATE) == "Interrupted"
    press(page, "Continue")
    length = "document.querySelector('article:last-child .text').textContent.length"
    page.until(f"{length} > {len(before[3]) + 20}")
    page.press("Escape")
    page.until(f"{STATUS} === 'Stopped.'")
    assert set(texts(page)[3]) == {"x"} and len(texts(page)) == 4


def test_the_conversation_that_was_open_and_the_draft_are_there_after_a_reload(
    page: Browser, chat_server: Running
) -> None:
    two_questions(page)
    page.click("#fresh")
    ask(page, "another")
    page.click("#conversations li:last-child .open")
    page.until("document.querySelectorAll('.text').length === 4")
    page.click("#prompt")
    page.type("a draft")
    visit(page, chat_server)
    assert texts(page) == TWO and page.value(WRITTEN) == "a draft"
    assert page.value("document.title") == "first – kt"


def test_an_answer_goes_on_while_another_conversation_is_read(page: Browser) -> None:
    ask(page, "first")
    page.click("#fresh")
    begin_long(page)
    page.click("#conversations li:last-child .open")
    page.until("document.querySelector('.text')?.textContent === 'first'")
    assert page.value("document.querySelectorAll('.running').length") == 1
    ask(page, "second")
    page.click("#conversations li:has(.running) .open")
    page.until("document.querySelector('.text')?.textContent === 'long'")
    page.click("#stop")
    page.until("!document.querySelector('.running')")
    assert set(texts(page)[1]) == {"x"}


# --- branches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", ["Escape", "#cancel", "#fresh"])
def test_a_message_that_is_edited_stays_until_another_one_is_sent(
    page: Browser, chat_server: Running, leave: str
) -> None:
    two_questions(page)
    page.click("#prompt")
    page.type("a draft")
    press(page, "Edit")
    page.type(" again")
    assert page.value(WRITTEN) == "first again" and page.value(REPLACED) == 4
    assert texts(page) == TWO and contents(page) == sorted(TWO)
    if leave == "Escape":
        page.press(leave)
    else:
        page.click(leave)
    assert page.value(WRITTEN) == "a draft" and page.value(REPLACED) == 0
    assert page.value("document.querySelector('#cancel').checkVisibility()") is False
    assert contents(page) == sorted(TWO) and texts(page) == ([] if leave == "#fresh" else TWO)
    page.click("#conversations .open")
    page.until("document.querySelectorAll('.text').length === 4")
    press(page, "Edit")
    page.type(" once more")
    visit(page, chat_server)  # leaving the page loses nothing either
    assert texts(page) == TWO
    assert page.value(WRITTEN) == "first once more" and page.value(REPLACED) == 4
    page.press("Escape")
    assert page.value(WRITTEN) == "a draft" and page.value(REPLACED) == 0


def test_an_edited_question_is_another_branch(page: Browser, chat_server: Running) -> None:
    two_questions(page)
    press(page, "Edit")
    page.type(" again")
    page.press("Enter")
    page.until("document.querySelector('.text').textContent === 'first again'")
    done(page)
    assert texts(page) == ["first again", "you said first again"]
    stored_all(page, 6)
    assert page.value("document.querySelector('.pager').innerText.trim()") == "2/2"
    press(page, "Previous version")
    assert texts(page) == TWO
    assert page.value("document.querySelector('.pager').innerText.trim()") == "1/2"
    storing_ended(page)
    visit(page, chat_server)
    assert texts(page) == TWO
    press(page, "Next version")
    assert texts(page) == ["first again", "you said first again"]
    stored_all(page, 6)


def test_an_answer_that_is_retried_stays_beside_the_new_one(page: Browser) -> None:
    two_questions(page)
    press(page, "Retry")  # the first answer
    page.until("document.querySelectorAll('.text').length === 2")
    done(page)
    assert texts(page) == TWO[:2]
    press(page, "Previous version")
    assert texts(page) == TWO
    press(page, "Retry", last=True)
    page.until("document.querySelector('article:last-child .pager')")
    done(page)
    assert texts(page) == TWO
    stored_all(page, 6)


def test_a_question_without_an_answer_stays_and_can_be_asked_again(
    page: Browser, chat_server: Running
) -> None:
    page.value(GONE)
    page.click("#prompt")
    page.type("first")
    page.press("Enter")
    page.until(f"{WRONG}?.includes('Cannot reach')")
    assert page.value(STATE) == "Not answered"
    visit(page, chat_server)
    page.until("document.querySelectorAll('.text').length === 1")
    assert texts(page) == ["first"]
    press(page, "Retry")
    done(page)
    assert texts(page) == TWO[:2]


def test_what_was_there_stays_if_there_is_no_new_answer(page: Browser) -> None:
    two_questions(page)
    page.value(GONE)
    press(page, "Retry", last=True)
    page.until(f"{WRONG}?.includes('Cannot reach')")
    assert texts(page) == TWO and contents(page) == sorted(TWO)
    press(page, "Edit")
    page.type(" again")
    page.press("Enter")
    page.until("document.querySelector('.text').textContent === 'first again'")
    page.until(f"{WRONG}?.includes('Cannot reach')")
    press(page, "Previous version")
    assert texts(page) == TWO


# --- conversations ------------------------------------------------------------------------------------------


def test_several_conversations_outlive_the_page(page: Browser, chat_server: Running) -> None:
    ask(page, "apples")
    page.click("#fresh")
    assert texts(page) == []
    ask(page, "pears")
    visit(page, chat_server)
    assert titles(page) == ["pears", "apples"]
    page.click("#conversations li:last-child .open")
    page.until("document.querySelector('.text').textContent === 'apples'")
    assert texts(page) == ["apples", "you said apples"]


def test_a_deleted_conversation_comes_back(page: Browser, chat_server: Running) -> None:
    ask(page, "apples")
    page.click("#fresh")
    ask(page, "pears")
    press(page, "Delete pears")
    page.until("document.querySelector('#undo').checkVisibility()")
    assert titles(page) == ["apples"] and texts(page) == []
    page.click("#undo")
    page.until("document.querySelectorAll('.text').length === 2")
    assert titles(page) == ["pears", "apples"]
    press(page, "Delete apples")
    page.until("document.querySelectorAll('#conversations li').length === 1")
    visit(page, chat_server)  # there is no Undo now
    assert titles(page) == ["pears"]
    page.click("#deleted summary")
    press(page, "Restore apples")
    page.until("document.querySelectorAll('#conversations li').length === 2")
    press(page, "Delete apples")
    page.until("document.querySelectorAll('#conversations li').length === 1")
    press(page, "Delete apples permanently")
    page.until("!document.querySelector('#deleted').checkVisibility()")
    assert contents(page) == ["pears", "you said pears"]


def test_conversations_are_found_by_their_words(page: Browser) -> None:
    for text in ("apples", "pears", "plums"):
        page.click("#fresh")
        ask(page, text)
    page.click("#search")
    page.type("SAID PEARS")
    page.until("document.querySelector('#found').textContent === '1 found'")
    assert titles(page) == ["pears"]
    page.value("document.querySelector('#search').select()")
    page.type("nothing of the kind")
    page.until("document.querySelector('#found').textContent === 'Nothing found'")
    page.value("document.querySelector('#search').select()")
    page.press("Backspace")
    page.until("document.querySelectorAll('#conversations li').length === 3")


def test_two_tabs_add_to_each_other(page: Browser, chat_server: Running) -> None:
    ask(page, "first")
    with page.another() as other:
        other.resize(1000, 700, "light")
        visit(other, chat_server)
        assert titles(other) == ["first"] and texts(other) == []
        ask(other, "elsewhere")
        page.until("document.querySelectorAll('#conversations li').length === 2")
        other.click("#conversations li:last-child .open")
        other.until("document.querySelector('.text')?.textContent === 'first'")
        begin_long(other)
        page.until(f"{STATE} === 'Being written in another tab'")
        other.press("Escape")
        page.until(f"{STATE} === 'Stopped'")
        ask(page, "second")
        other.until("document.querySelectorAll('.text').length === 6")
        press(other, "Retry", "article:last-child")  # there is none while the answer is written
        page.until("document.querySelector('article:last-child .pager')")
        found = contents(page)
    assert len(found) == 9 and {"elsewhere", "first", "second", "long"} <= set(found)


def test_a_conversation_that_another_tab_deletes_is_left(
    page: Browser, chat_server: Running
) -> None:
    begin_long(page)
    with page.another() as other:
        visit(other, chat_server)
        press(other, "Delete long")
        page.until("document.querySelectorAll('.text').length === 0")
        page.until("!document.querySelector('#conversations li')")
        other.click("#undo")
        page.until("document.querySelectorAll('#conversations li').length === 1")
    page.click("#conversations .open")
    page.until("document.querySelectorAll('.text').length === 2")


# --- storage ------------------------------------------------------------------------------------------------


def test_a_full_storage_is_told_and_loses_nothing_of_the_tab(
    page: Browser, chat_server: Running
) -> None:
    ask(page, "first")
    stored_all(page, 2)
    page.value(
        "window.put = IDBObjectStore.prototype.put; void (IDBObjectStore.prototype.put ="
        " () => { throw new DOMException('full', 'QuotaExceededError') })"
    )
    page.click("#prompt")
    page.type("second")
    page.press("Enter")
    page.until(f"{WARNING}.includes('storage is full')")
    done(page)
    page.until("!document.querySelector('.running')")
    page.click("#fresh")
    page.click("#conversations .open")
    page.until("document.querySelectorAll('.text').length === 4")
    assert texts(page) == TWO and len(stored(page)) == 2
    press(page, "Delete first")
    page.until("document.querySelectorAll('#conversations li').length === 0")
    assert stored(page) == []  # which makes room
    page.value("void (IDBObjectStore.prototype.put = window.put)")
    page.click("#undo")
    page.until("document.querySelectorAll('.text').length === 4")
    stored_all(page, 4)
    ask(page, "third")
    page.until(f"{WARNING} === ''")
    stored_all(page, 6)


def test_without_storage_a_conversation_lasts_as_long_as_the_tab(
    page: Browser, chat_server: Running
) -> None:
    blocked = (
        "indexedDB.open = () => { throw new DOMException('no', 'SecurityError') };"
        "for (const n of ['localStorage', 'sessionStorage'])"
        " Object.defineProperty(window, n, { get() { throw new DOMException('no', 'SecurityError') } })"
    )
    with page.running_first(blocked):
        visit(page, chat_server)
        page.until(f"{WARNING}.includes('until this tab is closed')")
        ask(page, "first")
        page.click("#fresh")
        ask(page, "other")
        page.click("#conversations li:last-child .open")
        page.until("document.querySelector('.text')?.textContent === 'first'")
        press(page, "Delete other")
        page.until("document.querySelectorAll('#conversations li').length === 1")
    visit(page, chat_server)


def test_conversations_of_the_page_before_are_taken_over(
    page: Browser, chat_server: Running
) -> None:
    def message(role: str, content: str) -> dict[str, Any]:
        return {"role": role, "content": content, "figures": "12 tokens/s", "used": 40}

    old = [
        {"id": "b", "title": "newer", "messages": [message("user", "first"), message("assistant", "you said first")]},
        {"id": "a.1", "title": "older", "messages": [message("user", "hello"), message("assistant", "hi")]},
        {"id": "<", "title": "junk", "messages": [message("user", "x")]},
        {"id": "c", "title": "none", "messages": []},
    ]  # fmt: skip
    page.value(f"localStorage.setItem('kt.conversations', {json.dumps(json.dumps(old))})")
    visit(page, chat_server)
    assert titles(page) == ["newer", "older"]
    assert page.value("localStorage.getItem('kt.conversations')") is None
    page.click("#conversations .open")
    page.until("document.querySelectorAll('.text').length === 2")
    ask(page, "second")
    assert texts(page) == TWO


@pytest.mark.parametrize("kept", ["{", "[1, {}]", '{"a": 1}', '[{"id": "x", "messages": [{}]}]'])
def test_what_the_browser_kept_may_be_junk(page: Browser, chat_server: Running, kept: str) -> None:
    page.value(f"localStorage.setItem('kt.conversations', {json.dumps(kept)})")
    visit(page, chat_server)
    ask(page, "hello")
    assert texts(page) == ["hello", "you said hello"]
