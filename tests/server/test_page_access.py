"""The chat page in a real Chromium: by the keyboard alone, for screen readers, and as axe-core judges it."""

from __future__ import annotations

import pytest
from server.browser import Browser
from server.chatpage import ask, done, in_chromium, press, texts
from server.fetch_libraries import AXE, CACHE

pytestmark = in_chromium


def test_keys_reach_everything_and_a_reader_hears_what_happens(page: Browser) -> None:
    ask(page, "hello")
    page.value("document.activeElement.blur()")
    seen = []
    for _ in range(24):
        page.press("Tab")
        seen.append(
            page.value("(e => e.id || e.ariaLabel || e.innerText.trim())(document.activeElement)")
        )
        if seen[-1] not in ("", "kt"):
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            around = "getComputedStyle(document.activeElement.closest('#form') ?? document.body).borderColor"
            assert page.value(outline) != "none" or page.value(around), seen[-1]
    ids = "model settings theme fresh search import export log prompt attach send".split()
    assert {*ids, "hello", "Delete hello", "Copy", "Edit", "Retry"} <= set(seen)
    assert page.value("document.querySelector('#status').getAttribute('role')") == "status"


def test_a_conversation_by_keys_alone(page: Browser) -> None:
    def to(name: str) -> None:
        for _ in range(40):
            page.press("Tab")
            if name in page.value(
                "(e => [e.id, e.ariaLabel, e.innerText?.trim()])(document.activeElement)"
            ):
                return
        raise AssertionError(f"{name} is not reached")

    page.type("hello")
    page.press("Enter")
    done(page)
    to("Edit")
    page.press("Enter")
    page.type(" again")
    page.press("Enter")
    page.until("document.querySelector('.text')?.textContent === 'hello again'")
    done(page)
    to("Previous version")
    page.press(" ")
    assert texts(page) == ["hello", "you said hello"]
    assert page.value("document.activeElement.ariaLabel") == "Next version"
    to("Delete hello")
    page.press("Enter")
    page.until("document.querySelector('#undo').checkVisibility()")
    to("undo")
    page.press("Enter")
    page.until("document.querySelectorAll('.text').length === 2")


@pytest.mark.skipif(
    not (CACHE / AXE.files[0][1]).exists(),
    reason="axe-core is not here; make page fetches it",
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_axe_finds_nothing(page: Browser, scheme: str, width: int) -> None:
    page.resize(width, 800, scheme)
    axe = (CACHE / AXE.files[0][1]).read_text()

    def check() -> None:
        page.value(f"void (window.axe || (function () {{ {axe} }}).call(window))")
        rules = "{rules: {'label-content-name-mismatch': {enabled: true}}}"
        found = page.value(
            f"axe.run(document, {rules}).then(r => r.violations.map(v =>"
            " [v.id, v.nodes.map(n => n.html.slice(0, 200))]))"
        )
        assert found == []

    check()
    ask(page, "markdown")
    page.value("document.querySelector('details').open = true")
    press(page, "Retry", last=True)
    done(page)
    page.until("document.querySelectorAll('.pager').length")
    check()
    if width < 500:
        page.click("#menu")
        check()
        page.press("Escape")
    page.click("#settings")
    check()
    press(page, "Cancel", "#adjust")
