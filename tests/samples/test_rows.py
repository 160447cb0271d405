"""Rows come out of files as they went in, wherever a block of the file ends; what is no row is one sentence."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from ktcli.errors import KtError, NotFound
from ktcli.samples import blocks, rows

ROWS = [
    {"text": 'äöü 😀 \n " \\ [{]}'},
    {"a": {"b": [1, 2.5, None, True, {"c": "}"}]}, "text": ""},
    {"text": "x" * 40},
]
FORMS = {
    "lines": ("r.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)),
    "ascii": ("r.jsonl", "".join(json.dumps(row) + "\r\n" for row in ROWS)),
    "list": ("r.json", json.dumps(ROWS, ensure_ascii=False)),
    "pretty": ("r.json", json.dumps(ROWS, indent=2)),
    "spaces": ("r.json", "\ufeff\n\n [ " + " ,\n".join(map(json.dumps, ROWS)) + "\n ]\n\n"),
    "one after the other": ("r.ndjson", "\n\n".join(json.dumps(row, indent=1) for row in ROWS)),
}


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize("form", FORMS)
def test_json(form: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, text = FORMS[form]
    (tmp_path / name).write_bytes(text.encode())
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", block)
    told: list[int] = []
    found = list(rows.rows(tmp_path / name, told.append))
    assert [row.values for row in found] == ROWS
    assert told[-1] == len(text.encode())
    lines = [int(row.where.rpartition(" ")[2]) for row in found]
    assert [text.split("\n")[line - 1].lstrip(" [,\ufeff")[:1] for line in lines] == ["{"] * 3


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_csv(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.csv"
    given = [
        {"instruction": "a,b", "output": 'say "x"\n\nand y'},
        {"instruction": "ü", "output": ""},
    ]
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["instruction", "output"])
        writer.writeheader()
        writer.writerows(given)
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", block)
    found = list(rows.rows(path))
    assert [row.values for row in found] == given
    assert [row.where for row in found] == ["r.csv, line 2", "r.csv, line 5"]


BAD = {
    "empty": ("r.jsonl", b"", "r.jsonl is empty"),
    "spaces": ("r.jsonl", b" \n \n", "r.jsonl has no rows"),
    "empty list": ("r.json", b"[ ]", "is an empty list"),
    "no object": ("r.jsonl", b'{"a":1}\n\n"text"\n', "line 3: a row must be an object"),
    "rows of lists": ("r.json", b"[[1]]", "line 1: a row must be an object"),
    "words": ("r.jsonl", b"hello\n", "line 1: a row must be an object"),
    "cut": ("r.jsonl", b'{"a":1}\n{"a": "b', "line 2: not JSON: unterminated string"),
    "cut list": ("r.json", b'[{"a":1},\n', "line 2: the file ends in the middle of the list"),
    "no comma": ("r.json", b'[{"a":1}\n{"a":2}]', "line 2: a comma or the end of the list is missing"),
    "behind": ("r.json", b'[{"a":1}]\n{"a":2}', "line 2: something follows the end of the list"),
    "no quotes": ("r.jsonl", b'{"a":1}\n{a: 1}\n' + b'{"a":1}\n' * 99, "line 2: not JSON: expecting prop"),
    "open quote": ("r.jsonl", b'{"a":1}\n{"a": "x}\n{"a":1}\n', "line 2: not JSON: invalid control char"),
    "zero byte": ("r.jsonl", b'{"a": "\0"}', "line 1: not JSON"),
    "deep": ("r.jsonl", b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64 levels deep"),
    "deeper": ("r.jsonl", b'{"a":' + b"[" * 99_999, "nested too deeply"),
    "digits": ("r.jsonl", b'{"a":' + b"9" * 9_999 + b"}", "a number has too many digits"),
    "latin": ("r.jsonl", b'{"a":1}\n{"a":2}\n{"a":"\xe9t\xe9"}\n', "line 3: it is not UTF-8 text"),
    "utf-16": ("r.jsonl", '{"a":1}'.encode("utf-16"), "line 1: it is not UTF-8 text"),
    "cut letter": ("r.jsonl", b'{"a":1}\n\xe2\x82', "line 2: it is not UTF-8 text"),
    "long": ("r.jsonl", b'{"a":1}\n{"a":"' + b"x" * (9 << 20), "line 2: a row is larger than 8.0 MiB"),
    "csv columns": ("r.csv", b"a,b\n1,2\n1,2,3\n", "line 3: 3 values, but the first line names 2 columns"),
    "csv quote": ("r.csv", b'a,b\n"1"x,2\n', "line 2: not CSV"),
    "csv twice": ("r.csv", b"a,a\n1,2\n", "line 1: the column 'a' occurs twice"),
    "csv zero": ("r.csv", b"a,b\n1,\0\n", "line 2: it contains a zero byte"),
    "csv open": ("r.csv", b'a,b\n1,"' + b"x\n" * (5 << 20), "line 2: a row is larger than 8.0 MiB"),
    "csv latin": ("r.csv", b"a,b\n1,2\n1,\xe9\n", "line 3: it is not UTF-8 text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_row_is_one_sentence(case: str, tmp_path: Path) -> None:
    name, data, said = BAD[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(KtError) as caught:
        list(rows.rows(tmp_path / name))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_json_has_what_json_has(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": NaN, "a": 1, "b": -Infinity, "c": "\\ud800"}')
    [row] = rows.rows(path)
    assert row.values == {"a": 1, "b": float("-inf"), "c": "\ud800"}


def test_only_plain_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    for name, said in (("pipe.jsonl", "not a plain file"), ("folder.jsonl", "is a folder")):
        with pytest.raises(KtError, match=said):
            list(rows.rows(tmp_path / name))
    with pytest.raises(NotFound, match=r"none\.jsonl does not exist"):
        list(rows.rows(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("my data.parquet", "pandas.read_parquet('my data.parquet').to_json('my data.jsonl'"),
        ("x.XLSX", "read_excel"),
        ("x.txt", '{"text": "…"}'),
        ("x.jsonl.gz", "gunzip x.jsonl.gz"),
        ("x.yaml", "kt reads .json, .jsonl and .csv"),
        ("x", "kt reads .json, .jsonl and .csv"),
    ],
)
def test_other_files_are_refused_with_what_to_do(name: str, hint: str) -> None:
    with pytest.raises(KtError, match="kt does not read") as caught:
        rows.check_kind(Path(name))
    assert hint in caught.value.hint
