"""`kt chat` as scripts and people call it; the model is a fake that follows a script."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from chat.fake_engine import TEMPLATE, VOCAB, FakeEngine, backend, write_tokenizer

from ktcli.assembly.ready import Ready
from ktcli.assembly.request import Wanted
from ktcli.commands.chat import wording
from ktcli.engine.drafting import NO_DRAFTS, DraftOptions
from ktcli.errors import NotFound, UsageError
from ktcli.hardware.numa import AUTO, OFF, Numa
from ktcli.main import main
from ktcli.store import heat
from ktcli.text.tokenizer import load_tokenizer

LINES = [
    r"prompt eval count: {4}\d+ token\(s\)",
    r"prompt eval duration: \d+\.\d{9}s",
    r"prompt eval rate: {5}\d+\.\d\d tokens/s",
    r"eval count: {11}\d+ token\(s\)",
    r"eval duration: {8}\d+\.\d{9}s",
    r"eval rate: {12}\d+\.\d\d tokens/s",
]


class Run:
    """Runs command lines with a fake model; remembers which model was asked for."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capture = folder, capture
        self.names: list[str] = []
        self.context = self.most = 4096
        write_tokenizer(folder)

    def find(self, name: str) -> Ready:
        self.names.append(name)
        return Ready(name, self.folder)

    def load(self, ready: Ready, wanted: Wanted, *_: object) -> FakeEngine:
        script = lambda question: f"you said {question}"  # noqa: E731
        tokenizer = load_tokenizer(self.folder)
        self.engine = FakeEngine(tokenizer, script, wanted.context or self.context, self.most)
        return self.engine

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = main(["chat", *arguments])
        said = self.capture.readouterr()
        return code, said.out, said.err


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    made = Run(tmp_path, capsys)
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KT_CACHE", "0")  # what is fake is not stored
    monkeypatch.setattr("ktcli.assembly.talking.at_hand", made.find)
    monkeypatch.setattr("ktcli.assembly.talking.load", made.load)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    return made


def test_one_answer(run: Run) -> None:
    assert run("kt-mini", "hello") == (0, "you said hello\n", "")
    assert run("what is kt?") == (0, "you said what is kt?\n", "")
    assert run.names == ["kt-mini", "kt-mini"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "hello from a pipe"),
        (("qwen3-30b-a3b",), "hello from a pipe"),
        (("-",), "hello from a pipe"),
        (("kt-mini", "-"), "hello from a pipe"),
        (("kt-mini", "what is this?"), "what is this?\n\nhello from a pipe"),
        (("what is this?",), "what is this?\n\nhello from a pipe"),
        (("kt-mini", ""), "hello from a pipe"),
    ],
)
def test_a_pipe_is_answered_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello from a pipe\n")))
    assert run(*arguments) == (0, f"you said {said}\n", "")


@pytest.mark.parametrize("stdin", [None, io.TextIOWrapper(io.BytesIO(b" \n")), "closed"])
def test_empty_input_gets_a_greeting(
    run: Run, monkeypatch: pytest.MonkeyPatch, stdin: object
) -> None:
    if stdin == "closed":
        stdin = io.TextIOWrapper(io.BytesIO(b""))
        stdin.close()
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run() == (0, "you said Hello!\n", "")


def test_an_empty_pipe_is_an_error_with_and_without_a_model(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with open(reading) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        for arguments in (("kt-mini",), ()):
            code, out, err = run(*arguments)
            assert (code, out) == (2, "") and "standard input is empty" in err


def test_files_that_a_prompt_names_come_below_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.md").write_text("be kind\n")
    code, out, _ = run("kt-mini", "follow @rules.md")
    assert code == 0 and out == "you said follow rules.md\n\nrules.md:\n```\nbe kind\n```\n"
    (tmp_path / "rules.md").write_bytes(b"\xff")
    code, out, err = run("kt-mini", "follow @rules.md")
    assert (code, out) == (2, "") and "rules.md is not UTF-8 text" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("kt-mini", "-"), "standard input is empty"),
        (("-",), "standard input is empty"),
        (("kt-mini", ""), "the prompt is empty"),
        (("kt-mini", " \n"), "the prompt is empty"),
    ],
)
def test_nothing_to_say_is_an_error(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and err.startswith(f"error: {words}") and run.names == []


def test_a_pipe_that_says_nothing_is_waited_for_aloud(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever left an open pipe as standard input learns what a prompt waits for."""
    there, here = os.pipe()
    warned: list[str] = []

    def warn(text: str) -> None:
        warned.append(text)
        os.write(here, b"late")
        os.close(here)

    with os.fdopen(there) as pipe:
        monkeypatch.setattr(wording, "SILENCE_S", 0.0)
        monkeypatch.setattr(wording, "_nobody_writes", lambda descriptor: False)
        monkeypatch.setattr(sys, "stdin", pipe)
        monkeypatch.setattr(wording.out, "warn", warn)
        assert run("kt-mini", "hi")[1] == "you said hi\n\nlate\n"
    assert len(warned) == 1 and "standard input" in warned[0] and "</dev/null" in warned[0]


READ = (
    "from ktcli.commands.chat import wording as read; read.SILENCE_S = 0.1;"
    " print(repr(read.standard_input(beside=True)))"
)


def test_a_pipe_that_nobody_can_write_to_is_left_out() -> None:
    """As a program leaves it that starts this one, holds the other end and writes nothing."""
    held = subprocess.Popen(
        [sys.executable, "-c", READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with held:
        assert held.stdout.read() == "''\n"


def test_a_slow_program_in_front_of_a_pipe_is_waited_for() -> None:
    command = f'(sleep 0.6; echo late) | "{sys.executable}" -c "{READ}" 2>/dev/null'
    assert subprocess.check_output(["sh", "-c", command], text=True) == "'late'\n"


def test_what_somebody_wrote_who_ended_meanwhile_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = os.pipe()

    def look(descriptor: int) -> bool:
        os.write(here, b"late")
        os.close(here)
        return True

    with os.fdopen(there) as pipe:
        monkeypatch.setattr(wording, "SILENCE_S", 0.0)
        monkeypatch.setattr(wording, "_nobody_writes", look)
        monkeypatch.setattr(sys, "stdin", pipe)
        monkeypatch.setattr(wording.out, "warn", lambda text: None)
        assert wording.standard_input(beside=True) == "late"


def test_a_cut_answer_says_so(run: Run) -> None:
    code, out, err = run("kt-mini", "hello", "-n", "3")
    assert code == 0 and out and "cut at 3 tokens" in err and "--max-tokens" in err
    assert run("kt-mini", "hello", "-n", "3", "--quiet")[2] == ""


def test_hints_name_only_what_would_help(run: Run) -> None:
    """One answer is no chat: it has no /clear; and a model's context ends somewhere."""
    long = ("kt-mini", "word " * 2000)
    run.most = 4096
    _, _, err = run(*long, "--context", "100")
    assert "--context gives more room, up to 4,096" in err and "/clear" not in err
    run.most = 100
    _, _, err = run(*long, "--context", "100")
    assert "supports at most 100 tokens" in err and "--context" not in err
    run.context = run.most = 12
    code, _, err = run("kt-mini", "hello")
    assert code == 0 and "tokens is full" in err and "--context" not in err


def test_a_seed_that_changes_nothing_is_said(run: Run) -> None:
    assert "--seed 3 has no effect" in run("kt-mini", "hi", "--seed", "3")[2]
    assert run("kt-mini", "hi", "--seed", "3", "--temperature", "1", "-n", "1", "-q")[2] == ""


def test_json_is_one_document(run: Run) -> None:
    code, out, err = run("kt-mini", "hi", "--json", "--greedy", "--max-tokens", "4")
    document = json.loads(out)
    assert code == 0 and err == ""
    assert len(document["ids"]) == 4 == document["stats"]["eval_count"]
    tokenizer = load_tokenizer(run.folder)
    assert document["text"] == tokenizer.decode(document["ids"])
    assert document["finish"] == "length"
    stats = document["stats"]
    assert stats["prompt_tokens"] == stats["prompt_eval_count"] + stats["reused_tokens"]


def test_stats_are_the_six_lines(run: Run) -> None:
    code, out, err = run("kt-mini", "hi", "--stats")
    assert (code, out) == (0, "you said hi\n")
    lines = err.splitlines()
    assert len(lines) == 6
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(LINES, lines, strict=True))


def test_threads_and_teams_reach_the_engine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_NUMA", raising=False)
    asked: list[Wanted] = []
    monkeypatch.setattr(
        "ktcli.assembly.talking.load",
        lambda ready, wanted, *_: asked.append(wanted) or run.load(ready, wanted),
    )
    run("kt-mini", "hi", "--numa", "2", "--threads", "4")
    run("kt-mini", "hi")
    monkeypatch.setenv("KT_NUMA", "off")
    run("kt-mini", "hi")
    assert [(w.threads, w.numa) for w in asked] == [(4, Numa(2)), (None, AUTO), (None, OFF)]


def test_options_reach_the_answer(run: Run) -> None:
    assert run("kt-mini", "a STOP b", "--stop", "STOP")[1] == "you said a \n"
    hot = ("kt-mini", "x", "--temperature", "30", "--max-tokens", "9", "--seed")
    assert run(*hot, "1")[1] == run(*hot, "1")[1] != run(*hot, "2")[1]
    assert run("kt-mini", "x", "--system", "y" * 99, "--context", "60")[0] == 8


def test_answers_are_held_to_a_form(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"enum": [true, 7]}')
    code, out, err = run("kt-mini", "a pet?", "--schema", str(path))
    assert (code, err) == (0, "") and json.loads(out) in (True, 7)
    assert run("kt-mini", "a pet?", "--format", "json", "-n", "4")[0] == 0
    path.write_text(r'{"type": "string", "pattern": "(a)\\1"}')
    code, out, err = run("kt-mini", "a pet?", "--schema", str(path))
    assert (code, out) == (2, "") and "--schema cannot be used" in err
    assert run.names == ["kt-mini", "kt-mini"]  # it is not even loaded


@pytest.mark.parametrize("flag", ["--think", "--no-think"])
def test_a_choice_that_the_template_does_not_have_is_said(flag: str, run: Run) -> None:
    assert f"warning: {flag}: the chat template" in run("kt-mini", "hi", flag)[2]
    write_tokenizer(run.folder, "{{ enable_thinking }}" + TEMPLATE)
    assert "warning" not in run("kt-mini", "hi", flag)[2]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("qwen3-30b",), 3, "did you mean: qwen3-30b-a3b"),
        (("hi",), 3, 'kt chat kt-mini "hi"'),
        (("./nowhere",), 3, "nowhere"),
        (("kt-mini", "hi", "--top-p", "7"), 2, "top-p must be 0 to 1 (off), not 7.0"),
        (("kt-mini", "hi", "--max-tokens", "0"), 2, "max-tokens"),
        (("kt-mini", "hi", "--greedy", "--temperature", "1"), 2, "cannot be used together"),
        (("kt-mini", "hi", "more"), 2, "argument"),
        (("kt-mini", "hi", "--format", "xml"), 2, "--format must be json"),
        (("kt-mini", "hi", "--schema", "nowhere"), 2, "cannot read nowhere"),
        (("kt-mini", "hi", "--schema", "x", "--format", "json"), 2, "cannot be used together"),
        (("kt-mini", "hi", "--numa", "0"), 2, "1 to 16 teams"),
        (("kt-mini", "hi", "--numa", "some"), 2, "nodes=0,2-3"),
        (("kt-mini", "word " * 2000, "--context", "100"), 8, "the context holds 100"),
    ],
)
def test_mistakes_are_one_sentence(
    run: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    got, out, err = run(*arguments)
    assert (got, out) == (code, "")
    assert err.startswith("error: ") and words in err and len(err.splitlines()) <= 2


def test_ctrl_c_ends_with_what_was_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FakeEngine.logits

    def pressed(engine: FakeEngine, cache: list[int]) -> object:
        if engine.tokenizer.decode(cache).endswith("you"):
            signal.raise_signal(signal.SIGINT)
        return whole(engine, cache)

    monkeypatch.setattr(FakeEngine, "logits", pressed)
    code, out, err = run("kt-mini", "hello")
    assert code == 130 and err.strip().endswith("interrupted")
    assert out.startswith("you") and "hello" not in out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("end", "code"),
    [("answered", 0), ("interrupted", 130), ("context full", 0), ("not numbers", 5), ("left", 0)],
)
def test_what_was_chosen_is_recorded_however_a_chat_ends(
    run: Run, monkeypatch: pytest.MonkeyPatch, end: str, code: int
) -> None:
    (run.folder / "kt.json").write_text("{}")
    whole = FakeEngine.logits

    def spoilt(engine: FakeEngine, cache: list[int]) -> object:
        if engine.tokenizer.decode(cache).endswith("you"):
            if end == "interrupted":
                signal.raise_signal(signal.SIGINT)
            if end == "not numbers":
                return np.full(VOCAB, np.nan, dtype=np.float32)
        return whole(engine, cache)

    monkeypatch.setattr(FakeEngine, "logits", spoilt)
    arguments = ["kt-mini", "hello"]
    if end == "context full":
        run.context = 12
    if end == "left":
        arguments = ["kt-mini"]
        monkeypatch.setattr(wording, "is_terminal", lambda: True)
        lines = iter(["hello", "and you?", "/exit"])
        monkeypatch.setattr("ktcli.terminal.prompt.Prompt.ask", lambda prompt, draft: next(lines))
    got, _, err = run(*arguments)
    assert got == code and (end != "context full" or "tokens is full" in err)
    computed = run.engine.computed
    found = heat.read(run.folder, (2, 4))
    assert found is not None and found.tokens == computed > 5
    assert (found.counts == run.engine.chosen()).all()
    monkeypatch.setattr(FakeEngine, "logits", whole)
    run("kt-mini", "again", "--context", "99")
    again = heat.read(run.folder, (2, 4))
    assert again is not None and (again.counts == found.counts + run.engine.chosen()).all()


def test_recording_can_be_turned_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.folder / "kt.json").write_text("{}")
    monkeypatch.setenv("KT_HEAT", "off")
    assert run("kt-mini", "hello")[0] == 0
    assert heat.read(run.folder, (2, 4)) is None
    monkeypatch.setenv("KT_HEAT", "never")
    code, out, err = run("kt-mini", "hello")
    assert (code, out) == (2, "") and "KT_HEAT is 'never'" in err and run.names == ["kt-mini"]


def test_a_library_that_cannot_be_written_ends_no_chat(run: Run, tmp_path: Path) -> None:
    (run.folder / "kt.json").write_text("{}")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "heat").write_text("")
    assert run("kt-mini", "hello") == (0, "you said hello\n", "")


def test_broken_text_files_are_one_sentence(run: Run) -> None:
    (run.folder / "tokenizer.json").write_bytes(b"")
    code, out, err = run("kt-mini", "hi")
    assert (code, out) == (5, "") and "tokenizer.json is empty" in err
    write_tokenizer(run.folder, "{% for i in range(10**9) %}{% endfor %}")
    code, out, err = run("kt-mini", "hi")
    assert (code, out) == (5, "") and "the chat template of kt-mini was stopped" in err


def test_logits_that_are_not_numbers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "logits", lambda *_: np.full(VOCAB, np.nan, dtype=np.float32))
    code, out, err = run("kt-mini", "hi")
    assert (code, out.strip()) == (5, "") and "instead of a number" in err


def test_who_and_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert wording.who_and_what(None, None) == ("kt-mini", None)
    assert wording.who_and_what("", None) == ("kt-mini", None)
    assert wording.who_and_what("kt-mini@nl4-bf16", None) == ("kt-mini@nl4-bf16", None)
    assert wording.who_and_what("Qwen/Qwen3-30B-A3B", None) == ("Qwen/Qwen3-30B-A3B", None)
    assert wording.who_and_what(str(folder), None) == (str(folder), None)
    assert wording.who_and_what("is a/b a path?", None) == ("kt-mini", "is a/b a path?")
    assert wording.who_and_what("x", "y") == ("x", "y")
    with pytest.raises((NotFound, UsageError)):
        wording.who_and_what("nonsense", None)


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", "[1.5]", "[-1]", '["a"]', "[true]", "[" * 9999, "[[1], []]", "[1, [2]]"],
)
def test_logits_wants_a_list_of_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "ids.json"
    path.write_text(content)
    assert main(["logits", "kt-mini", "--ids", str(path), "--out", str(tmp_path / "o.npy")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and len(said.err.splitlines()) <= 2


def test_nothing_heavy_is_loaded() -> None:
    """An answer needs neither torch, transformers, a hub client, nor (into a pipe) a prompt."""
    code = (
        "import sys; import ktcli.commands.chat.chat, ktcli.assembly.prepare, ktcli.assembly.load, ktcli.terminal.repl;"
        "print(sorted(m for m in ('torch', 'transformers', 'huggingface_hub', 'modelscope',"
        "'prompt_toolkit', 'rich') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_fake_is_a_speaker(tmp_path: Path) -> None:
    assert backend(tmp_path).texts.stop_ids


def test_endless_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            assert 0 < size < 10 << 20
            return b"a" * size

    monkeypatch.setattr("sys.stdin", type("Stdin", (), {"buffer": Endless()}))
    with pytest.raises(UsageError, match="standard input has more than"):
        wording.standard_input()


def test_drafts_change_no_answer_and_are_counted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, int | None]] = []

    def of(wish: DraftOptions, engine: object) -> None:
        if wish is not NO_DRAFTS:  # that of every request without a wish
            asked.append((wish.drafts, wish.length))

    monkeypatch.setattr(DraftOptions, "of", of)
    monkeypatch.setenv("KT_DRAFT", "3")
    for words in ((), ("--draft", "off"), ("--draft", "lookup"), ("--draft", "8")):
        assert run("kt-mini", "hi", *words)[0] == 0
    monkeypatch.delenv("KT_DRAFT")
    document = json.loads(run("kt-mini", "hi", "--json")[1])
    assert asked == [(True, 3), (False, None), (True, None), (True, 8), (True, None)]
    stats = document["stats"]
    assert (stats["drafted_count"], stats["accepted_count"]) == (0, 0)
    assert stats["tokens_per_step"] == 1


def test_drafts_that_cannot_be_made(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run("kt-mini", "hi", "--draft", "9")
    assert code == 2 and "--draft must be off, lookup, or 1 to 8, not '9'" in err
    code, _, err = run("kt-mini", "hi", "--draft", "lookup")
    assert code == 2 and "could change answers here" in err and "--draft off" in err
    monkeypatch.setenv("KT_DRAFT", "sometimes")
    code, _, err = run("kt-mini", "hi")
    assert code == 2 and "KT_DRAFT must be off, lookup, or 1 to 8, not 'sometimes'" in err
