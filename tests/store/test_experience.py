"""What running a model taught about this machine: kept, and a file that says something else."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from ktcli.store import experience
from ktcli.store.experience import Experience


def test_memory_is_remembered_while_it_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    limit = lambda free: experience.recall("m", "g", free).limit_bytes  # noqa: E731
    assert experience.recall("m", "g", 100) == Experience()
    experience.note_memory("m", "g", 1000, 700)
    experience.note_memory("other", "g", 1000, 600)
    experience.note_times("m", "g", (1e-4, 2e-4, 0.0))
    assert experience.recall("m", "g", 1000) == Experience(700, (1e-4, 2e-4, 0.0))
    assert limit(900) == 700
    assert limit(1100) is None  # somebody has gone


@pytest.mark.parametrize(
    "text",
    [
        "", "[1]", "{", '{"m on g": 3}', '{"m on g": {"memory": {"free_bytes": "x"}}}',
        '{"m on g": {"layer_s": [1.0, 2.0]}}', '{"m on g": {"layer_s": [NaN, 1.0, 1.0]}}',
        '{"m on g": {"layer_s": [0.0, 1.0, 1.0]}}',
        '{"m on g": {"memory": {"free_bytes": @, "limit_bytes": @}}}'.replace("@", "9" * 400),
    ],
)  # fmt: skip
def test_a_damaged_note_is_no_note(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    (tmp_path / "gpu.json").write_text(text)
    assert experience.recall("m", "g", 1000) == Experience()
    experience.note_memory("m", "g", 1000, 500)
    assert experience.recall("m", "g", 1000).limit_bytes == 500


def test_the_speed_of_prompts_is_remembered_for_one_conversion_on_one_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    rate = experience.recall_prompt_rate
    assert rate("m", "c") is None
    experience.note_prompt_rate("m", "c", 200.0)
    experience.note_prompt_rate("m", "other", 300.0)
    assert (rate("m", "c"), rate("m", "other"), rate("n", "c")) == (200.0, 300.0, None)
    experience.note_prompt_rate("m", "c", 210.0)
    assert rate("m", "c") == 200.0  # about the same is not written again
    experience.note_prompt_rate("m", "c", 250.0)
    assert rate("m", "c") == 250.0


ODD = ("0.0", "-1.0", "NaN", "Infinity", "1e99", '"7"', "[7.0]", "null", "true", "9" * 400)


@pytest.mark.parametrize("entry", ["3", "[]", *(f'{{"prompt_tok_s": {value}}}' for value in ODD)])
def test_a_damaged_speed_is_none(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    (tmp_path / "cpu.json").write_text(f'{{"m on c": {entry}}}')
    assert experience.recall_prompt_rate("m", "c") is None
    experience.note_prompt_rate("m", "c", 200.0)
    assert experience.recall_prompt_rate("m", "c") == 200.0


def test_a_way_that_failed_is_remembered_for_these_versions_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    why = lambda *of: experience.recall_failures(*of)[0]  # noqa: E731
    assert experience.recall_failures("m", "g", "v1") == ({}, "")
    experience.forget_failures()
    assert list(tmp_path.iterdir()) == []  # nothing to forget, nothing written
    experience.note_memory("m", "g", 1000, 700)
    experience.note_failures("m", "g", "v1", {"graphs": "no\nway\x1b[2J", "early": ""})
    assert experience.recall_failures("m", "g", "v1") == (
        {"graphs": "no way [2J"},
        date.today().isoformat(),
    )
    assert [why(*of) for of in (("m", "g", "v2"), ("n", "g", "v1"), ("m", "h", "v1"))] == [{}] * 3
    experience.note_failures("m", "g", "v2", {"kernels": "x" * 999})
    assert (why("m", "g", "v1"), why("m", "g", "v2")) == ({}, {"kernels": "x" * 400})
    experience.forget_failures()
    assert why("m", "g", "v2") == {}
    assert experience.recall("m", "g", 1000).limit_bytes == 700


NOTES = [
    "3", "[]", "null", '{"failed": 7}', '{"failed": {"with": "v", "on": "2026-11-24"}}',
    '{"failed": {"with": "v", "on": "today", "why": {"graphs": "no"}}}',
    '{"failed": {"with": "v", "on": "20261124", "why": {"graphs": "no"}}}',
    '{"failed": {"with": "v", "on": 5, "why": {"graphs": "no"}}}',
    '{"failed": {"with": ["v"], "on": "2026-11-24", "why": {"graphs": "no"}}}',
    '{"failed": {"with": "v", "on": "2026-11-24", "why": ["graphs"]}}',
    '{"failed": {"with": "v", "on": "2026-11-24", "why": {"graphs": 1, "early": null}}}',
    '{"failed": {"with": "v", "on": "2026-11-24", "why": {"graphs": "\\u001b[2J"}}}',
    '{"failed": {"with": "v", "on": "2026-11-24", "why": {"graphs": "@"}}}'.replace("@", "x" * 401),
]  # fmt: skip


@pytest.mark.parametrize("note", NOTES)
def test_a_damaged_failure_is_none(
    note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    (tmp_path / "gpu.json").write_text(f'{{"other": 3, "m on g": {note}}}')
    assert experience.recall_failures("m", "g", "v") == ({}, "")
    experience.forget_failures()
    assert experience.recall_failures("m", "g", "v") == ({}, "")
    experience.note_failures("m", "g", "v", {"graphs": "no"})
    assert experience.recall_failures("m", "g", "v")[0] == {"graphs": "no"}
