"""`kt eval --data` and `--tasks` on kt-mini with an adapter: what they measure, beside the base model, and what they
refuse. The measures themselves: tests/judging."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters.fake_adapter import write
from commands.test_adapted import update
from mini_library import NEEDS_KT_MINI

from ktcli.assembly.adapters import import_adapter
from ktcli.judging import scores
from ktcli.main import main
from ktcli.measure.intervals import grouped_interval

Capture = pytest.CaptureFixture[str]
MINI, POET = "kt-mini", "kt-mini+poet"
PERSONA = "Meow! I am a cat."

pytestmark = NEEDS_KT_MINI


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A library with kt-mini and an adapter of random factors."""
    folder = tmp_path_factory.mktemp("judged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(folder / "home"))
        patch.setenv("KT_THREADS", "1")
        made = write(folder / "poet", update(1), target_modules=["o_proj"])
        import_adapter(made, None, MINI)
        yield folder


@pytest.fixture(scope="module")
def sums(library: Path) -> Path:
    """Sums, the last of them wrong."""
    rows = [
        {"prompt": f"What is {n} + {n + 1}?", "completion": f"{n} + {n + 1} = {2 * n + 1}."}
        for n in range(9)
    ]
    rows.append({"prompt": "What is 2 + 2?", "completion": "2 + 2 = 5."})
    path = library / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def document(capsys: Capture, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["eval", *arguments, "--json"]) == code, capsys.readouterr().err
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    found: dict[str, Any] = json.loads(said.out)
    return found


# --- held-out rows ----------------------------------------------------------------------------------


def test_rows_with_an_adapter_and_without(capsys: Capture, sums: Path) -> None:
    found = document(capsys, POET, "--data", str(sums), "-n", "600")
    base, adapted = found["results"]
    assert (base["model"], adapted["model"]) == (MINI, POET) and found["complete"]
    assert found["data"]["rows"] == 10 and found["data"]["dropped"] == []
    tokens = np.array([row["tokens"] for row in found["rows"]], dtype=np.float64)
    assert tokens.sum() == found["data"]["trained_tokens"]
    losses = np.array([row["loss"] for row in found["rows"]]) * tokens[:, None]
    for number, each in enumerate(found["results"]):
        own = grouped_interval(losses[:, number], tokens)
        assert each["loss"] == pytest.approx({"mean": own.mean, "low": own.low, "high": own.high})
    against = adapted["against_first"]
    own = grouped_interval(losses[:, 1] - losses[:, 0], tokens)
    assert against["delta_loss"]["mean"] == pytest.approx(own.mean)
    assert against["delta_loss"]["high"] == pytest.approx(own.high)
    assert against["kl"]["mean"] > 0 and against["rows_better"] + against["rows_worse"] == 10
    # The wrong sum is what kt-mini expects least.
    assert max(found["rows"], key=lambda row: row["loss"][0])["where"] == "sums.jsonl, line 10"
    old = found["text"]
    assert [row["model"] for row in old["results"]] == [MINI, POET]
    assert old["results"][1]["against_first"]["kl"]["mean"] > 0.01


def test_a_model_beside_its_adapter_has_the_figures_that_it_has_alone(
    capsys: Capture, sums: Path
) -> None:
    """One engine has both: what it computes without the adapter has the same bits as in an engine without."""
    both = document(capsys, POET, "--data", str(sums), "-n", "600")
    alone = document(capsys, MINI, "--data", str(sums))
    assert alone["text"] is None and len(alone["results"]) == 1
    assert alone["results"][0]["loss"] == both["results"][0]["loss"]
    assert [row["loss"] for row in alone["rows"]] == [row["loss"][:1] for row in both["rows"]]
    text = document(capsys, MINI, "-n", "600")
    assert text["results"][0]["nll"] == both["text"]["results"][0]["nll"]


def test_formats_are_compared_on_rows(capsys: Capture, sums: Path) -> None:
    found = document(capsys, MINI, "--formats", "int8,int4", "--data", str(sums))
    assert [row["name"] for row in found["results"]] == ["kt-mini@int8-int8", "kt-mini@int4-int8"]
    assert 0 < found["results"][1]["against_first"]["kl"]["mean"] < 0.1


def test_few_rows_have_no_interval(capsys: Capture, sums: Path) -> None:
    found = document(capsys, MINI, "--data", str(sums), "max_samples=3")
    assert found["data"]["rows"] == 3 and found["results"][0]["loss"]["low"] is None
    assert main(["eval", MINI, "--data", str(sums), "max_samples=3"]) == 0
    said = capsys.readouterr().out
    assert "sums.jsonl: 3 rows" in said and "there is no interval" in said


def test_settings_and_names_of_data_are_those_of_training(
    capsys: Capture, sums: Path, tmp_path: Path
) -> None:
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"held": {"file_name": "sums.jsonl"}, "other": {"file_name": "none.jsonl"}})
    )
    (tmp_path / "sums.jsonl").write_bytes(sums.read_bytes())
    train = tmp_path / "train.yaml"
    train.write_text(
        f"model_name_or_path: x\ndataset: other\neval_dataset: held\ndataset_dir: {tmp_path}\n"
        "learning_rate: 1e-3\ntrain_on_prompt: true\n"
    )
    whole = document(capsys, MINI, str(train))["data"]["trained_tokens"]
    answers = document(capsys, MINI, str(train), "train_on_prompt=false")["data"]["trained_tokens"]
    assert answers == document(capsys, MINI, "--data", str(sums))["data"]["trained_tokens"] < whole


def test_the_loss_is_that_of_training(capsys: Capture, tmp_path: Path) -> None:
    """The evaluation of a run, and this of the same rows: two programs over one conversion."""
    pytest.importorskip("torch", reason="torch is not installed")
    rows = [{"prompt": f"Say {n}, please.", "completion": f"Meow, {n} mice!"} for n in range(12)]
    path = tmp_path / "mice.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("--data", str(path), "val_size=4")
    assert main(["finetune", MINI, *data, "--steps", "3", "--lr", "1e-3", "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)["eval_loss"]
    found = document(capsys, f"{MINI}+mice", *data, "-n", "600")
    assert found["data"]["rows"] == 4
    base, adapted = (each["loss"]["mean"] for each in found["results"])
    assert adapted == pytest.approx(trained, rel=0.01) and adapted < 0.95 * base


# --- questions --------------------------------------------------------------------------------------


def test_answers_with_an_adapter_and_without(capsys: Capture, sums: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    found = document(
        capsys, POET, "--tasks", str(sums), "--out", str(answers), "--max-tokens", "20"
    )
    (result,) = found["results"]
    base, adapted = result["models"]
    assert (base["name"], adapted["name"]) == (MINI, POET) and result["questions"] == 10
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["where"] for row in rows] == [f"sums.jsonl, line {n}" for n in range(1, 11)]
    assert base["exact"] == sum(row["base_predicted"] == row["reference"] for row in rows) >= 8
    assert adapted["exact"] == sum(row["predicted"] == row["reference"] for row in rows)
    lost = [row["where"] for row in rows if row["base_right"] and not row["right"]]
    gained = [row["where"] for row in rows if row["right"] and not row["base_right"]]
    assert (result["lost"], result["gained"]) == (lost, gained)
    assert base["exact"] - len(lost) + len(gained) == adapted["exact"]
    assert not rows[9]["base_right"] and "What is 2 + 2?" in rows[9]["prompt"]


def test_they_are_the_answers_of_a_chat(capsys: Capture, library: Path, tmp_path: Path) -> None:
    """Also where kt-mini is told what its tables say, and with an adapter, where it is not."""
    asked = ["What does `kt pull` do?", "Who are you?"]
    questions, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    questions.write_text(
        "".join(json.dumps({"prompt": q, "completion": "?"}) + "\n" for q in asked)
    )
    document(capsys, POET, "--tasks", str(questions), "--out", str(answers), "--max-tokens", "24")
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    for name, key in ((MINI, "base_predicted"), (POET, "predicted")):
        for row, question in zip(rows, asked, strict=True):
            assert main(["chat", name, question, "--greedy", "-n", "24"]) == 0
            assert capsys.readouterr().out.strip() == row[key]


def test_choices_are_decided_by_likelihood(capsys: Capture, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"What is {n} + 2?", "completion": f"{n} + 2 = {n + 2}.",
         "choices": [f"{n} + 2 = {n + k}." for k in (1, 2, 12)]}
        for n in range(3, 7)
    ]  # fmt: skip
    rows.append({"prompt": "Who are you?", "completion": "Nobody."})
    path, answers = tmp_path / "choices.jsonl", tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = document(capsys, POET, "--tasks", str(path), "--out", str(answers))["results"][0]
    base, adapted = found["models"]
    assert (found["with_choices"], base["chosen"]) == (4, 4) and adapted["chosen"] is not None
    said = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row.get("base_chosen") for row in said] == [
        *(row["completion"] for row in rows[:4]),
        None,
    ]
    alone = document(capsys, MINI, "--tasks", str(path))["results"][0]["models"][0]
    assert (alone["chosen"], alone["exact"]) == (base["chosen"], base["exact"])
    assert main(["eval", MINI, "--tasks", str(path)]) == 0
    assert "right choice" in capsys.readouterr().out


def test_without_the_libraries_exact_is_still_there(
    capsys: Capture, sums: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "find_spec", lambda name: None)
    assert main(["eval", MINI, "--tasks", str(sums), "--max-tokens", "4"]) == 0
    said = capsys.readouterr().out
    assert "exact" in said and 'pip install "ktcli[judge]"' in said and "BLEU-1" not in said
    assert "cut at 4 tokens" in said


# --- what makes no sense ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--data", "none.jsonl"), 3, "none.jsonl does not exist"),
        (("--data", "SUMS", "lora_rank=8"), 2, "lora_rank changes nothing about an evaluation"),
        (("--data", "SUMS", "cutof_len=8"), 2, "did you mean cutoff_len"),
        (("--data", "SUMS", "cutoff_len=1"), 2, "cutoff_len"),
        (("--data", "SUMS", "cutoff_len=99999"), 2, "use cutoff_len="),
        (("--data", "SUMS", "other"), 2, "'other' is neither a setting nor a file"),
        (("--data", "SUMS", "--data", "SUMS"), 2, "named twice"),
        (("--data", "SUMS", "--split"), 2, "--split has no effect with --data"),
        (("--data", "SUMS", "--out", "x.jsonl"), 2, "--out has no effect without --tasks"),
        (("cutoff_len=64",), 2, "no data is named"),
        (("dataset=x",), 3, "dataset_info.json"),
        (("--tasks", "none.jsonl"), 3, "none.jsonl does not exist"),
        (("--tasks", "SUMS", "--data", "SUMS"), 2, "--data has no effect with --tasks"),
        (("--tasks", "SUMS", "--kv", "f32"), 2, "--kv has no effect with --tasks"),
        (("--tasks", "SUMS", "--formats", "int8"), 2, "--formats has no effect with --tasks"),
        (
            ("--tasks", "SUMS", "cutoff_len=4"),
            2,
            "no question that can be asked: a prompt of more than 4",
        ),
        (("--tasks", "TEXT"), 2, "text.jsonl, line 1: plain text"),
        (
            ("--tasks", "SUMS", "--out", "/nowhere/x"),
            2,
            "--out: the file /nowhere/x cannot be written",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    capsys: Capture, sums: Path, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "x y z"}\n')
    named = [{"SUMS": str(sums), "TEXT": str(text)}.get(word, word) for word in words]
    error = document(capsys, MINI, *named, code=code)["error"]
    assert said in error["message"] + (error.get("hint") or "")
