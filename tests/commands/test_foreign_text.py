"""What others wrote (names, titles, manifests, a hub's answers) reaches no terminal as something it obeys."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands.test_output import OBEYED
from gguf_cases import CASES
from gguf_models import write_gguf
from packs import pretend_pack
from store.fake_hub import serve as serve_hub

import ktcli
from ktcli import manifest
from ktcli.chat.log import line_of
from ktcli.commands.serve.lines import log_request
from ktcli.main import main
from ktcli.manifest import FileRecord, Manifest
from ktcli.store import places

Capture = pytest.CaptureFixture[str]
EVIL = "e\x1b]52;c;ZXZpbA==\x07\x9b2J\u202ev\x7f"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library in which every name and every text is foreign."""
    monkeypatch.setenv("KT_HOME", str(tmp_path / f"home{EVIL}"))
    monkeypatch.setenv("KT_CONFIG", str(tmp_path / f"{EVIL}.toml"))
    monkeypatch.chdir(tmp_path)
    folder = places.checkpoint_path("tiny")
    for each in (folder, folder.with_name(f"tiny{EVIL}"), tmp_path / f"model{EVIL}"):
        each.mkdir(parents=True)
        config = {"model_type": EVIL, "architectures": [EVIL]}
        (each / "config.json").write_text(json.dumps(config))
        (each / f"{EVIL}.safetensors").write_bytes(b"\0" * 9)
        record = Manifest((FileRecord(f"x{EVIL}", 2, "0" * 64),), EVIL, f"org/{EVIL}", EVIL)
        (each / manifest.CHECKPOINT).write_bytes(record.encode())
    pretend_pack(folder.parents[1] / "packs" / f"tiny@int4-{EVIL}", EVIL, EVIL, repository=EVIL)
    case = replace(CASES[0], architecture=EVIL, metadata={"general.name": EVIL})
    write_gguf(case, tmp_path / f"model{EVIL}.gguf")
    (tmp_path / f"{EVIL}.toml").write_text(f"model = 5\n{json.dumps(EVIL)} = 3\n")
    chats = folder.parents[1] / "chats"
    chats.mkdir()
    records = {"kt_chat": 2, "model": EVIL, "asked": EVIL, "pack": EVIL}, {"user": EVIL}
    for name in ("told", f"told{EVIL}"):
        (chats / f"{name}.jsonl").write_bytes(b"".join(map(line_of, records)))
    (chats / f"bad{EVIL}.jsonl").write_bytes(EVIL.encode())
    return tmp_path


MODELS = f"./model{EVIL}", f"./model{EVIL}.gguf", EVIL, "tiny", f"tiny{EVIL}", f"no/{EVIL}"
PLAIN = (
    "list", "list --all", "du", "prune", "alias", "names", "names --chats", "chats", "chats show told", "cache",
    "verify", "config list", "config path", "ps", f"config get {EVIL}", f"config set model {EVIL}", f"{EVIL}",
    f"list --{EVIL}", f"bench {EVIL}", f"completion {EVIL}", f"stop {EVIL}", f"import {EVIL}", f"chats show told{EVIL}",
    f"chats search {EVIL}", f"plan --machine {EVIL} tiny", f"chats rename told{EVIL} {EVIL}",
)  # fmt: skip


def of_models() -> Iterator[list[str]]:
    for name in MODELS:
        for command in ("show", "plan", "pull", "convert", "verify", "eval", "path", "export"):
            yield [command, name]
        yield from (["show", name, "--program"], ["show", name, "--experts"], ["chat", name, "hi"])
        yield from (["alias", f"a{EVIL}", name], ["pull", name, "--as", EVIL], ["rm", "-y", name])


COMMANDS = {"of nothing": [line.split(" ") for line in PLAIN], "of models": [*of_models()]}


@pytest.mark.parametrize(
    "which", ["of nothing", pytest.param("of models", marks=pytest.mark.thorough)]
)
def test_no_command_passes_it_on(
    home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    for variable in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(variable, f"http://127.0.0.1:9/{EVIL}")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for words in COMMANDS[which]:
        for more in ([], ["--json"]):
            code = main([*words, *more])
            said = capsys.readouterr()
            assert not OBEYED & set(said.out + said.err), (words, said)
            assert code != 70, (words, said)


def test_a_hub_says_nothing_to_the_terminal(
    home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("KT_DEBUG", "1")  # tracebacks say it, too
        hub.repositories["org/tiny"] = {
            "config.json": b"{}",
            f"{EVIL}.safetensors": b"",
            "a.safetensors": b"x",
        }
        hub.facts = {"sha": EVIL, "tags": [f"license:{EVIL}"], "id": f"org/{EVIL}", "gated": EVIL}
        for words in (["pull", "org/tiny"], ["search", "tiny", "--hub"]):
            main(words)
        hub.status, hub.error_code = 418, "teapot"
        main(["pull", "org/other"])
    said = capsys.readouterr()
    assert "org/tiny" in said.err and not OBEYED & set(said.out + said.err)


def test_the_stack_of_an_error_is_shown_and_not_obeyed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_DEBUG", "1")
    assert main(["show", f"./{EVIL}"]) == 3
    said = capsys.readouterr().err
    assert "Traceback" in said and not OBEYED & set(said)


def test_a_request_is_one_line_of_the_log(capsys: Capture) -> None:
    entry = {
        "client": "::1",
        "method": "GET",
        "path": f"/\n12:00:00 ::1 GET / {EVIL}",
        "status": 404,
        "seconds": 0.0,
    }
    log_request(entry)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and not OBEYED & set(said)


# --- the exceptions, all of them --------------------------------------------------------------------

# Results that a program may have exactly: a path, a script, a unit, a conversation, the value of a setting.
EXACT = {
    "list.py",
    "completion.py",
    "service.py",
    "chats.py",
    "config.py",
}
# Who writes to a stream past `Output`: pages of help, lines of JSON in ASCII, figures, and answers (`chat.screen`).
WRITERS = {
    "main.py",
    "output.py",
    "commands/cli/group.py",
    "commands/serve/serve.py",
    "commands/chat/answering.py",
}
WRITERS |= {"terminal/slash_files.py"}  # to the terminal's clipboard, in base64


STREAMS = ("print", "traceback.print_exception", "sys.stdout.write", "sys.stderr.write")


def test_nobody_else_writes_past_the_escaping() -> None:
    root = Path(ktcli.__file__).parent
    exact, writers = set(), set()
    for path in root.rglob("*.py"):
        text = path.read_text()
        if not any(word in text for word in ("exact=", *STREAMS)):
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute):
                name = ast.unparse(call.func)
                if name == "out.result" and any(each.arg == "exact" for each in call.keywords):
                    exact.add(path.name)
                if name in STREAMS:
                    writers.add(str(path.relative_to(root)))
    assert exact == EXACT
    assert writers <= WRITERS
