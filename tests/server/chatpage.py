"""Drives the chat page: what tests in Chromium do with it again and again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server.browser import PROGRAM, Browser
from server.running import Running

MARKDOWN = """\
<think>
Let me <b>see</b>.
</think>

# Heading

Some **bold** and *slanted* `code`, [a link](https://example.com/), $x_i$ for $5.
1. one
2. two

$$
\\sum_{i=1}^n x_i
$$

```python
print("<i>")
```

| a | b |
|---|--:|
| 1 | 2 |
"""
HOSTILE = """\
<script>window.hurt = 1</script><img src=x onerror="window.hurt = 1"><iframe src="https://evil.example"></iframe>

![picture](https://evil.example/x.png) [a](javascript:window.hurt=1) [b](data:text/html,x) [c](JaVaScRiPt:hurt=1)
[d](mailto:a@example.com) [e](//evil.example) <https://example.com/"onclick="hurt> ![](data:image/png,x)

```"><script>window.hurt = 1</script>
</code><svg onload="window.hurt = 1">
```

<svg><style><img src=x onerror="window.hurt = 1"></style></svg> <math><mtext><script>hurt</script></mtext></math>

$\\href{javascript:window.hurt=1}{x} \\includegraphics{https://evil.example/x.png} \\htmlStyle{color:red}{x}$

$$</math><img src=x onerror="window.hurt = 1">$$

$\\text{<img src=x onerror="window.hurt = 1">}$ <form action="https://evil.example"><input name=a></form>
"""
LONG = "x" * 3000  # an answer that goes on until it is stopped

# The tier with a real browser.
in_chromium = [
    pytest.mark.thorough,
    pytest.mark.skipif(PROGRAM is None, reason="there is no chromium on this machine"),
]


def script(question: str) -> str:
    """What the model of these tests says."""
    answers = {"markdown": MARKDOWN, "hostile": HOSTILE, "long": LONG}
    return answers.get(question, f"you said {question[:1000]}")


def visit(tab: Browser, server: Running) -> None:
    """Opens the page, and waits until it can be used."""
    tab.open(f"{server.url}/")
    tab.until(f"location.port === '{server.port}' && document.documentElement?.dataset.ready")
    tab.until("document.querySelector('#model')?.options.length")


def ask(page: Browser, text: str) -> None:
    page.click("#prompt")
    page.type(text)
    page.press("Enter")
    own = "document.querySelector('.own:nth-last-child(2), .own:last-child')"
    page.until(f"{own}?.textContent.startsWith({json.dumps(text[:50])})")
    done(page)


def done(page: Browser) -> None:
    page.until("document.querySelector('#status').textContent === 'The answer is complete.'")


def begin_long(page: Browser) -> None:
    """Begins an answer that does not end by itself soon."""
    page.to_front()  # nothing is drawn in a tab behind another
    page.click("#prompt")
    page.type("long")
    page.press("Enter")
    page.until("document.querySelector('.other:last-child .text')?.textContent.length > 20")


def texts(page: Browser) -> list[str]:
    """The texts of all messages that are shown."""
    found: list[str] = page.value(
        "[...document.querySelectorAll('.text')].map(e => e.textContent.trim())"
    )
    return found


def titles(page: Browser) -> list[str]:
    """The conversations in the list."""
    found: list[str] = page.value(
        "[...document.querySelectorAll('#conversations .open')].map(e => e.innerText)"
    )
    return found


def press(page: Browser, name: str, within: str = "body", last: bool = False) -> None:
    """Clicks a button by its accessible name, the first one or the last one of a part of the page."""
    page.until(
        f"(() => {{ const all = [...document.querySelectorAll({json.dumps(within + ' button')})]"
        f".filter(e => (e.ariaLabel ?? e.textContent.trim()) === {json.dumps(name)});"
        " all.splice(0, Infinity, ...all.filter(e => e.checkVisibility() && !e.disabled));"
        " document.querySelectorAll('[data-press]').forEach(e => e.removeAttribute('data-press'));"
        f" all.at({-1 if last else 0})?.setAttribute('data-press', ''); return all.length }})()"
    )
    page.click("[data-press]")


def record_requests(page: Browser) -> None:
    """Keeps the body of the latest request as `window.asked`."""
    page.value(
        "(f => { window.fetch = (path, about) => { if (about?.body) window.asked = JSON.parse(about.body);"
        " return f(path, about) } })(window.fetch)"
    )


def stored(page: Browser, table: str = "messages") -> list[dict[str, Any]]:
    """The rows of a table of the page's database."""
    found: list[dict[str, Any]] = page.value(
        "new Promise((done, failed) => { const r = indexedDB.open('kt'); r.onerror = failed;"
        " r.onsuccess = () => { const d = r.result;"
        f" const q = d.transaction('{table}').objectStore('{table}').getAll();"
        " q.onsuccess = () => { d.close(); done(q.result) } } })"
    )
    return found


def loaded_only_from(server: Running, tab: Browser) -> None:
    """Asserts that nothing was asked of anyone else, and that no script failed."""
    thrown = [each for each in tab.events if each.get("method") == "Runtime.exceptionThrown"]
    assert not thrown, thrown
    logged = [
        each["params"]["entry"] for each in tab.events if each.get("method") == "Log.entryAdded"
    ]
    assert not [each for each in logged if "Content Security Policy" in each["text"]], logged
    for each in tab.events:
        if each.get("method") == "Network.requestWillBeSent":
            url = each["params"]["request"]["url"]
            assert url.startswith((f"{server.url}/", "data:,", f"blob:{server.url}/")), url
