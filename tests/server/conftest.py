"""For tests of the chat page: a server, a tab of a browser, and the page in it with nothing stored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server.browser import Browser, browser
from server.chatpage import loaded_only_from, script, visit
from server.running import Running, running, scripted

from ktcli.server.http.state import Rules


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("model")
    with running(scripted(folder, script, context=16384), Rules(aliases=("other",))) as found:
        yield found


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(tab: Browser, chat_server: Running) -> Iterator[Browser]:
    tab.resize(1000, 700, "light")
    tab.open("about:blank")
    tab.until("location.href === 'about:blank'")
    tab.clear(chat_server.url)
    tab.events.clear()
    visit(tab, chat_server)
    yield tab
    loaded_only_from(chat_server, tab)
    tab.value("(localStorage.clear(), sessionStorage.clear())")
