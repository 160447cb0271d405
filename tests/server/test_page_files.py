"""The chat page in a real Chromium: export and import, of hostile files, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server.browser import Browser
from server.chatpage import ask, done, in_chromium, press, stored, texts, titles, visit
from server.running import Running

pytestmark = in_chromium

TWO = ["first", "you said first", "second", "you said second"]
STATUS = "document.querySelector('#status').textContent"
WRONG = "document.querySelector('#status.wrong')?.textContent"


def test_an_export_is_imported_as_it_was(
    page: Browser, chat_server: Running, tmp_path: Path
) -> None:
    ask(page, "first")
    ask(page, "second")
    press(page, "Retry", last=True)
    page.until("document.querySelector('article:last-child .pager')")
    done(page)
    page.download_to(tmp_path)
    page.click("#export")
    page.until_file(tmp_path, "kt-conversations-*.json")
    [file] = tmp_path.glob("kt-conversations-*.json")
    said = json.loads(file.read_text())
    assert said["format"] == "kt-conversations" and len(said["conversations"][0]["messages"]) == 5
    page.open("about:blank")
    page.until("location.href === 'about:blank'")
    page.clear(chat_server.url)
    visit(page, chat_server)
    assert titles(page) == []
    for words in ("Imported 1 conversation.", "Imported 0 conversations; 1 was already here."):
        page.choose_files("#imported", [file])
        page.until(f"{STATUS} === '{words}'")
    page.click("#conversations .open")
    page.until("document.querySelectorAll('.text').length === 4")
    assert texts(page) == TWO
    page.until("document.querySelector('.pager').innerText.trim() === '2/2'")  # once it is drawn


def export_of(*messages: object, **fields: object) -> dict[str, Any]:
    conversation = {"id": "a", "title": "t", "messages": messages, **fields}
    return {"format": "kt-conversations", "version": 1, "conversations": [conversation]}


def said(id: str, parent: str | None, **fields: object) -> dict[str, Any]:
    return {"id": id, "parent": parent, "role": "user", "content": "x", **fields}


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ([], "was not exported"),
        ({"format": "kt-conversations", "version": 99, "conversations": []}, "version"),
        ({"format": "kt-conversations", "version": 1, "conversations": {}}, "must contain a list"),
        ({"format": "kt-conversations", "version": 1, "conversations": [None]}, "not an object"),
        (export_of(id="<b>"), "has no id"),
        (export_of(title=7), "has no title"),
        (export_of(messages={}), "has no messages"),
        (export_of(None), "not an object"),
        (export_of(said("1", None), said("1", None)), "no id of its own"),
        (export_of(said("1", "2"), said("2", "1")), "does not follow"),
        (export_of(said("1", "1")), "does not follow"),
        (export_of(said("1", None, role="system")), "neither a question nor an answer"),
        (export_of(said("1", None, content=["x"])), "has no text"),
        (export_of(said("1", None, content="x" * 4_000_001)), "too long"),
        (export_of(said("1", None, files=[{"name": "a"}])), "file without a name"),
        (export_of(*(said(str(i), None) for i in range(20_001))), "more than 20,000"),
    ],
)
def test_a_file_that_is_no_sound_export_is_refused_in_a_sentence(
    page: Browser, tmp_path: Path, file: object, sentence: str
) -> None:
    (tmp_path / "a.json").write_text(file if isinstance(file, str) else json.dumps(file))
    page.choose_files("#imported", [tmp_path / "a.json"])
    page.until(f"{WRONG}?.includes({json.dumps(sentence)})")
    assert stored(page) == []


def test_an_import_overwrites_nothing_and_takes_over_known_fields_only(
    page: Browser, tmp_path: Path
) -> None:
    ask(page, "first")
    id = stored(page, "conversations")[0]["id"]
    row = stored(page)[0]
    hostile = export_of(
        said(row["id"], None, content="overwritten"),
        said("__proto__", row["id"], role="assistant", evil=1, speed={"rate": "x"}, made=1e99),
        id=id,
        title="overwritten",
        settings={"temperature": "hot", "top_k": 3, "system": 5, "evil": 1},
    )
    (tmp_path / "a.json").write_text(json.dumps(hostile))
    page.choose_files("#imported", [tmp_path / "a.json"])
    page.until(f"{STATUS} === 'Imported 0 conversations; 1 was already here.'")
    assert titles(page) == ["first"]
    rows = {each["id"]: each for each in stored(page)}
    assert rows[row["id"]] == row and len(rows) == 3
    added = rows["__proto__"]
    assert {"evil", "speed"}.isdisjoint(added) and added["made"] < 100
    page.type("still works")
    page.press("Enter")
    done(page)
