"""The chat page: what it may load, and which libraries it ships. `test_page_*.py` run it in a browser."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import requests
from server.chatpage import script
from server.running import Running, one_key, running, scripted

from ktcli.server.http.page import files
from ktcli.server.http.page.libraries import LIBRARIES
from ktcli.server.http.state import Rules

FOLDER = Path(files.__file__).parent
OWN = [name for name in files.PARTS if not name.startswith("vendor/")]


def test_a_browser_may_load_nothing_from_elsewhere(chat_server: Running) -> None:
    reply = requests.get(chat_server.url, headers={"accept": "text/html,*/*"}, timeout=60)
    assert reply.status_code == 200 and "<title>kt</title>" in reply.text
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    named = re.findall(r'(?:src|href)="([^"#]+)"', reply.text)
    for path in named:
        assert path == "data:," or requests.get(f"{chat_server.url}/{path}", timeout=60).ok, path
    for path in ("files.py", "libraries.py", "vendor", "vendor/", "vendor/../files.py", "x.js"):
        found = requests.get(f"{chat_server.url}/page/{path}", timeout=60)
        assert found.status_code == 404, path


def test_programs_that_ask_whether_a_server_is_here_get_a_word(chat_server: Running) -> None:
    assert requests.get(chat_server.url, timeout=60).text == "kt is running"
    assert requests.head(chat_server.url, timeout=60).status_code == 200


def test_the_page_needs_no_key_and_tells_nothing(tmp_path: Path) -> None:
    with running(scripted(tmp_path, script), Rules(one_key("secret"))) as server:
        for path in sorted(files.PATHS):
            assert requests.get(f"{server.url}{path}", timeout=60).ok
        assert requests.get(f"{server.url}/v1/models", timeout=60).status_code == 401


def test_every_part_is_sent_and_no_text_is_read_as_markup() -> None:
    there = [path for path in FOLDER.rglob("*.*") if path.suffix not in (".py", ".pyc")]
    assert {str(path.relative_to(FOLDER)) for path in there} == set(files.PARTS)
    for name in OWN:
        text = (FOLDER / name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(", text
        )
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\bstyle=", text)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name


def test_every_module_is_there_and_used() -> None:
    used = {"app.js"}
    for name in OWN:
        if name.endswith(".js"):
            text = (FOLDER / name).read_text()
            for path in re.findall(r'^(?:import|export) .*"\./([^"]+)";$', text, re.M):
                assert path in files.PARTS, (name, path)
                used.add(path)
    assert used == {each for each in files.PARTS if each.endswith((".js", ".mjs"))}


def test_the_libraries_are_the_pinned_ones_with_their_licences(chat_server: Running) -> None:
    page = (FOLDER / "index.html").read_text()
    for library in LIBRARIES:
        assert any(name.endswith(".LICENSE") for _, name, _ in library.files), library
        for _, name, sha256 in library.files:
            data = (FOLDER / "vendor" / name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == sha256, name
            assert library.version in name
            reply = requests.get(f"{chat_server.url}/page/vendor/{name}", timeout=60)
            assert reply.content == data and "immutable" in reply.headers["cache-control"]
            assert not name.endswith(".LICENSE") or f"page/vendor/{name}" in page
