"""How the program ends: help, errors, interrupts, closed pipes; the table of commands is true."""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from docs import reference
from ktcli import errors
from ktcli.commands.chat.wording import text_of
from ktcli.commands.cli import help, table
from ktcli.errors import KtError
from ktcli.main import main
from ktcli.settings import TABLE, Setting

PACKAGE = Path(errors.__file__).parent
SHOWN = [name for name, row in table.COMMANDS.items() if row.summary]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for name in ("KT_ISA", "KT_NUMA", "KT_THREADS", "KT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes `kt names` raise."""

    def put(error: BaseException) -> None:
        def command() -> None:
            raise error

        monkeypatch.setattr("ktcli.commands.names.names", command)

    return put


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("chat kt-mini hi --context abc", "--context must be a whole number, not 'abc'"),
        ("chat kt-mini hi -c 1.5", "--context must be a whole number, not '1.5'"),
        ("chat kt-mini hi -c 0", "--context must be at least 1, not 0"),
        ("bench mixed kt-mini --streams 99", "--streams must be at most 15, not 99"),
        ("chat kt-mini hi --temperature hot", "--temperature must be a number, not 'hot'"),
    ],
)
def test_a_wrong_number_is_said_in_our_own_words(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"error: {says}"


# --- the table --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", table.COMMANDS)
def test_a_command_can_be_loaded_and_its_summary_is_its_docstring(name: str) -> None:
    command, row = table.load(name), table.COMMANDS[name]
    if row.summary:
        assert (command.help or "").splitlines()[0] == row.summary
        assert row not in table.HEADINGS[""].values()


@pytest.mark.parametrize("name", SHOWN)
def test_help_has_examples_and_every_option_a_word(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"kt {name}" in text
    command = table.load(name)
    for verb in getattr(command, "commands", {}).values() or [command]:
        assert any(word in (verb.help or "") for word in ("Examples:", "kt "))
        for parameter in verb.params:
            assert getattr(parameter, "help", ""), f"{name} {parameter.name} has no help"


@pytest.mark.parametrize("columns", [40, 80])
def test_every_help_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines: list[list[str]] = [[]]
    for name in SHOWN:
        verbs = getattr(table.load(name), "commands", {})
        lines += [[name], *([name, verb] for verb in verbs)]
    for line in lines:
        assert main([*line, "--help"]) == 0
        for said in capsys.readouterr().out.splitlines():
            assert len(said) <= columns, (line, said)


def test_a_long_example_is_broken_as_a_shell_joins_it() -> None:
    line = "git diff | kt chat qwen3-30b-a3b --max-tokens 100 --system 'Be short.' \"Review this\""
    shown = help.example(line, 40)
    assert max(map(len, shown.splitlines())) <= 40
    assert "".join(shown.split("\\\n")).split() == line.split()


def test_the_help_has_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for setting in TABLE:
        assert re.search(rf"^  .*\b{setting.variable}\b", shown, re.MULTILINE), setting.name


@pytest.mark.parametrize("setting", [each for each in TABLE if each.option], ids=lambda s: s.name)
def test_the_option_of_a_setting_has_its_words(setting: Setting) -> None:
    commands = ("pull",) if setting.name.startswith("pull-") else ("chat", "serve")
    params = [each for command in commands for each in table.load(command).params]
    option = next(each for each in params if setting.option in each.opts)
    assert setting.help in option.help and option.help.endswith(f"Default: {setting.default}.")
    assert option.metavar in (setting.metavar, None)


def test_no_variable_is_read_past_the_table() -> None:
    """But for those that are no settings."""
    read = re.compile(r"""environ(?:\.get\(|\[)["'](KT_\w+)|getenv\(["'](KT_\w+)""")
    found = {
        name or other
        for path in PACKAGE.rglob("*.py")
        for name, other in read.findall(path.read_text())
    }
    others = {"KT_CONFIG", "KT_LIBRARY"}
    assert found - {setting.variable for setting in TABLE} == others


def test_the_help_shows_every_command_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    bare = capsys.readouterr().out
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert bare == text
    places = [text.index(f"\n  {name} ") for name in SHOWN]
    assert places == sorted(places)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    from ktcli import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kt {__version__}\n"


# --- errors -----------------------------------------------------------------------------------


def every_error(kind: type[KtError] = KtError) -> list[type[KtError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in every_error(child))]


CODES = {
    "KtError": 1, "UsageError": 2, "NotFound": 3, "NotEnoughMemory": 4, "NotEnoughDisk": 4, "NoMemoryLeft": 4,
    "BadCheckpoint": 5, "BadPack": 5, "NetworkError": 6, "HubError": 6, "Gated": 6,
    "ServerFailed": 6, "ServerBusy": 7, "Busy": 7, "QueueFull": 7,
    "ContextFull": 8, "NativeError": 9, "DeviceError": 10, "KernelFails": 10,
    "OutOfDeviceMemory": 10, "NotFinite": 1,
}  # fmt: skip


def made(name: str) -> KtError:
    if name == "NotEnoughMemory":
        return errors.NotEnoughMemory("the plan", 1 << 40, 1 << 30)
    if name == "NotEnoughDisk":
        return errors.NotEnoughDisk("the pull", 1 << 40, 1 << 30, "/disk")
    if name == "QueueFull":
        return errors.QueueFull(512, 512)
    if name == "NotFinite":
        return errors.NotFinite("the loss")
    error: KtError = getattr(errors, name)("something is wrong with 'x'", hint="do this")
    return error


@pytest.mark.parametrize("name", CODES)
def test_an_error_is_a_sentence_a_hint_and_a_code(
    name: str, failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    error = made(name)
    failing(error)
    assert main(["names"]) == CODES[name]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"error: {error}\n  {error.hint}\n"


@pytest.mark.parametrize("name", CODES)
def test_with_json_an_error_is_a_document(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = made(name)

    def fail() -> None:
        raise error

    monkeypatch.setattr("ktcli.store.library.entries", fail)
    assert main(["list", "--json"]) == CODES[name]
    assert json.loads(capsys.readouterr().out) == {
        "error": {"type": name, "message": str(error), "hint": error.hint, "exit_code": CODES[name]}
    }


def test_the_codes_cover_the_tree() -> None:
    ours = {kind.__name__ for kind in every_error() if kind.__module__ == "ktcli.errors"}
    assert ours == set(CODES)
    assert {0, 70, 130, *CODES.values()} == {int(code) for code in errors.ExitCode}
    assert all(code.meaning for code in errors.ExitCode)


def test_every_end_has_a_name() -> None:
    """No file of the package ends the program with a number of its own."""
    for path in sorted(PACKAGE.rglob("*.py")):
        numbers = re.findall(r"(?:typer\.Exit\(|exit_code = )\d+", path.read_text())
        assert numbers == [], path.name


OTHERS = {
    "interrupted": (KeyboardInterrupt(), 130, "error: interrupted\n"),
    "interrupted, with advice": (
        KeyboardInterrupt("do x"),
        130,
        "error: interrupted\n  do x\n",
    ),
    "exit": (typer.Exit(1), 1, ""),
    "abort": (typer.Abort(), 130, "error: interrupted\n"),
    "no memory": (MemoryError(), 4, "error: the system is out of memory\n"),
    "no memory for a thread": (
        RuntimeError("can't start new thread"),
        4,
        "error: the system is out of memory\n",
    ),
    "no memory for code": (
        ImportError("x.so: failed to map segment from shared object"),
        4,
        "error: the system is out of memory\n",
    ),
    "no memory for the system": (
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        4,
        "error: the system is out of memory\n",
    ),
    "a file": (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied\n"),
    "ours": (
        ValueError("too\nlong"),
        70,
        "error: internal error (ValueError: too)\n",
    ),
    "no words": (AssertionError(), 70, "error: internal error (AssertionError: )\n"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_every_other_end(
    kind: str, failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    error, code, sentence = OTHERS[kind]
    failing(error)
    assert main(["names"]) == code
    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert "Traceback" not in said


def test_the_traceback_appears_when_asked_for(
    failing: Callable[[BaseException], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KT_DEBUG", "1")
    failing(ValueError("too long"))
    assert main(["names"]) == 70
    assert "Traceback" in capsys.readouterr().err


BAD_LINES = {
    "nonsense": ["nonsense"],
    "a near miss": ["chatt"],
    "an unknown option": ["list", "--nonsense"],
    "too many arguments": ["list", "x"],
    "no argument": ["pull"],
    "not a number": ["plan", "kimi-k2", "--context", "many"],
    "below the least": ["plan", "kimi-k2", "--threads", "0"],
    "an unknown option of the program": ["--nonsense"],
    "a bad name": ["pull", "a b"],
    "rm of nothing": ["rm"],
    "an unknown shell": ["completion", "tcsh"],
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_wrong_command_line(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(BAD_LINES[kind]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) == 2, "a sentence and a hint"
    assert main([*BAD_LINES[kind], "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2


@pytest.mark.parametrize("line", [["chat", "--system"], ["chat", "--nonsense"]])
def test_a_wrong_option_points_at_the_help_of_its_command(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 2
    assert "for help: kt chat --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [("-5 + 3?", True), ("-really? yes", True), ("-5", True), ("-z", False), ("--no such", False)],
)
def test_a_question_that_begins_with_a_minus_is_told_where_it_goes(
    words: str, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "kt-mini", words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert ("after --: kt chat -- '-5 + 3?'" in said) is told


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_standard_input_is_read_as_its_byte_order_mark_says(encoding: str) -> None:
    said = "Wer hat das Öl \N{CLINKING BEER MUGS} verschüttet?"
    assert text_of(said.encode(encoding)) == said
    if encoding in ("utf-16", "utf-32"):  # a byte too few is no error
        assert text_of(said.encode(encoding)[:-1]).startswith(said[:-1])
    big = {"utf-16": codecs.BOM_UTF16_BE, "utf-32": codecs.BOM_UTF32_BE}.get(encoding, b"")
    if big:
        assert text_of(big + said.encode(f"{encoding}-be")) == said


@pytest.mark.parametrize(("word", "meant"), [("chatt", "chat"), ("run", "chat"), ("delete", "rm")])
def test_a_near_miss_and_a_word_of_other_programs_name_the_command(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "kt-mini"]) == 2
    assert capsys.readouterr().err.endswith(f"did you mean: kt {meant}\n")


# --- the real process -------------------------------------------------------------------------


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "ktcli", "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert process.stderr == ""
    assert process.returncode == 0


def test_nothing_but_text_goes_to_a_pipe() -> None:
    words = [["list", "--all"], ["doctor"], ["show", "kimi-k2"], ["--help"]]
    code = f"from ktcli.main import main\nfor words in {words}: print(main(words))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True,
        env={**os.environ, "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"},
    )  # fmt: skip
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"kimi-k2" in done.stdout and b"Usage" in done.stdout


# --- the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fresh"),
    [
        (reference.PAGE, reference.page),
        (reference.MANUAL, reference.manual),
        (reference.DATA, reference.data),
    ],
    ids=["page", "manual", "data"],
)
def test_the_reference_is_not_stale(path: Path, fresh: Callable[[], str]) -> None:
    assert path.read_text(encoding="utf-8") == fresh(), (
        f"{path.name} is stale: python docs/reference.py"
    )


def test_the_man_page_has_everything_and_nothing_that_roff_would_obey() -> None:
    text = reference.manual()
    for entry in reference.entries():
        assert f".SS {entry.words.replace('-', reference.DASH)}" in text
    for code in errors.ExitCode:
        assert f"\n.B {code:d}\n" in text
    requests = {line.split()[0] for line in text.splitlines() if line.startswith((".", "'"))}
    assert requests <= set(".TH .nh .ad .SH .SS .P .TP .B .RS .RE .nf .fi".split())
    assert text.isascii()


@pytest.mark.skipif(not shutil.which("groff"), reason="there is no groff")
def test_groff_understands_the_man_page() -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", reference.MANUAL], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
