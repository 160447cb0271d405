"""`kt bench resume` measures what it says: the prefix comes back, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktcli.main import main


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for name in ("KT_THREADS", "KT_NUMA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def test_the_prefix_comes_back_in_one_document(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "bench",
        "resume",
        "kt-mini",
        "--layers",
        "2",
        "--tokens",
        "200",
        "--runs",
        "1",
        "--threads",
        "1",
    ]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["results"]
    assert {key: found[key] for key in ("prefill_s", "warm_s", "cold_s")}.items() <= row.items()
    assert all(row[key] > 0 for key in ("prefill_s", "warm_s", "cold_s", "warm_percent"))
    assert (row["work"], row["n_tokens"], row["restored_tokens"], row["layers"]) == (
        "resume",
        200,
        200,
        2,
    )
    # Four pages, and the last of them once more, with the token that was computed behind it.
    assert row["restored_bytes"] <= row["file_bytes"] <= 1.05 * 5 / 4 * row["restored_bytes"]
    assert not list(home.glob("resume-*")) and not (home / "kv").exists()
    assert main(words) == 0
    assert "s to the next token" in capsys.readouterr().out
