"""Datasets are found by name, and nothing that a `dataset_info.json` says leads out of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktcli.errors import KtError, NotFound
from ktcli.samples.columns import Columns, Tags
from ktcli.samples.source import DataSource, sources_of


def write(folder: Path, **entries: Any) -> Path:
    (folder / "dataset_info.json").write_text(json.dumps(entries))
    for name in ("a.jsonl", "b.json", "sub/c.csv"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}\n")
    return folder


def test_entries_and_files(tmp_path: Path) -> None:
    tags = {"role_tag": "role", "content_tag": "content"}
    folder = write(
        tmp_path,
        plain={"file_name": "a.jsonl", "hf_hub_url": None, "ranking": False},
        named={"file_name": "b.json", "columns": {"prompt": "q", "response": "r", "images": None}},
        chats={"file_name": "sub/c.csv", "formatting": "sharegpt", "tags": tags, "num_samples": 7},
    )
    own = folder / "sub/c.csv"
    assert sources_of(["plain", "named", "chats"], folder, [own]) == (
        DataSource("c.csv", own),
        DataSource("plain", folder / "a.jsonl"),
        DataSource("named", folder / "b.json", "alpaca", Columns(prompt="q", response="r")),
        DataSource(
            "chats",
            own,
            "sharegpt",
            tags=Tags(role_tag="role", content_tag="content"),
            num_samples=7,
        ),
    )


OUTSIDE = "points outside the folder"
BAD = {
    "above": ({"file_name": "../a.jsonl"}, OUTSIDE),
    "far above": ({"file_name": "sub/../../../etc/passwd"}, OUTSIDE),
    "absolute": ({"file_name": "/etc/passwd"}, OUTSIDE),
    "link": ({"file_name": "link/passwd.json"}, OUTSIDE),
    "circle": ({"file_name": "circle/a.json"}, "points outside|does not exist"),
    "zero": ({"file_name": "a\0.json"}, OUTSIDE),
    "long": ({"file_name": "a" * 5000 + ".json"}, f"{OUTSIDE}|does not exist"),
    "no name": ({}, "file_name is missing"),
    "number": ({"file_name": 3}, "file_name is missing"),
    "kind": ({"file_name": "x.parquet"}, "does not read parquet"),
    "missing": ({"file_name": "aa.jsonl"}, "does not exist"),
    "hub": ({"hf_hub_url": "x/y"}, "hf_hub_url is not supported"),
    "script": ({"script_url": "x"}, "script_url is not supported"),
    "ranking": ({"file_name": "a.jsonl", "ranking": True}, "ranking is not supported"),
    "typo": ({"file_nam": "a.jsonl"}, "'file_nam' is not a known key"),
    "split": ({"file_name": "a.jsonl", "split": "test"}, "split is 'test'"),
    "formatting": ({"file_name": "a.jsonl", "formatting": "x"}, "formatting is 'x'"),
    "columns": ({"file_name": "a.jsonl", "columns": []}, "columns is not an object"),
    "column": ({"file_name": "a.jsonl", "columns": {"promt": "x"}}, "columns: 'promt' is not a known key"),
    "chosen": ({"file_name": "a.jsonl", "columns": {"chosen": "x"}}, "chosen is not supported"),
    "tag": ({"file_name": "a.jsonl", "tags": {"role_tag": 3}}, "role_tag is '3', but must be a name"),
    "count": ({"file_name": "a.jsonl", "num_samples": 0}, "num_samples is 0"),
    "true": ({"file_name": "a.jsonl", "num_samples": True}, "num_samples is True"),
    "entry": ("a.jsonl", "is not an object"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_entries_are_one_sentence(case: str, tmp_path: Path) -> None:
    entry, said = BAD[case]
    folder = write(tmp_path, mine=entry)
    (folder / "link").symlink_to("/etc")
    (folder / "circle").symlink_to("circle")
    with pytest.raises(KtError, match=said) as caught:
        sources_of(["mine"], folder, [])
    assert len(str(caught.value)) < 1200 and "\n" not in str(caught.value)


def test_names_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"there is no .*dataset_info\.json"):
        sources_of(["mine"], tmp_path, [])
    folder = write(tmp_path, alpaca_en={"file_name": "a.jsonl"}, other={"file_name": "b.json"})
    with pytest.raises(NotFound, match="has no dataset 'alpaca_e'") as caught:
        sources_of(["alpaca_e"], folder, [])
    assert caught.value.hint == "did you mean alpaca_en?"
    with pytest.raises(NotFound, match="does not exist") as caught:
        sources_of([], None, [folder / "sub/cc.csv"])
    assert caught.value.hint == "did you mean c.csv?"
    with pytest.raises(KtError, match="no data is named"):
        sources_of([], None, [])
    with pytest.raises(KtError, match="is named twice"):
        sources_of([], None, [folder / "a.jsonl"] * 2)
    (folder / "dataset_info.json").write_text("[]")
    with pytest.raises(KtError, match="holds a list, not an object"):
        sources_of(["mine"], folder, [])
