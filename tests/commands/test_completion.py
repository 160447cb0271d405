"""`kt completion`: what each shell offers, in the shell itself, and how it is installed and taken away."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ktcli.commands import completion
from ktcli.commands.cli import completable, startup, table
from ktcli.commands.cli.completable import Values
from ktcli.hardware.gpu import driven_gpus
from ktcli.main import main
from ktcli.resources import data_path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's folder, with a kt on the PATH."""
    program = tmp_path / "bin" / "kt"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ktcli "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KT_HOME", str(tmp_path / "library"))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


# --- completions ------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", completion.FILES)
def test_completions_are_not_stale(shell: str) -> None:
    path = data_path("completions", completion.FILES[shell])
    assert path.read_text(encoding="utf-8") == completion.script(shell), (
        f"{path.name} is stale: kt completion {shell} > completions/{path.name}"
    )


def options(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every option that takes a value, of a command and those below it."""
    for parameter in command.params:
        if parameter.param_type_name == "option" and not getattr(parameter, "is_flag", False):
            yield f"{words} {parameter.opts[0]}", parameter
    for name, child in getattr(command, "commands", {}).items():
        yield from options(f"{words} {name}", child)


def test_every_value_has_a_word_for_it_in_the_help() -> None:
    """And not the name of a type; completions are made of these words."""
    found = [
        each
        for name, row in table.COMMANDS.items()
        if row.summary
        for each in options(name, table.load(name))
    ]
    assert [name for name, parameter in found if not parameter.metavar] == []
    offered = {name: completable.values_of(parameter.metavar) for name, parameter in found}
    assert "int4-g32" in offered["convert --dense"].words and offered["plan --machine"].files
    assert offered["eval --against"].names == "all" and offered["chat --seed"] == Values()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Number format, e.g. int4. Default: the usual.", "Number format, e.g. int4"),
        ("Above 1: repeat less. Off by default.", "Above 1: repeat less"),
        ("Only the first.\n\nParagraph.", "Only the first"),
    ],
)
def test_a_meaning_is_the_first_sentence(text: str, line: str) -> None:
    assert completable._line(text) == line


def test_bash_completes_commands_options_and_models() -> None:
    path = data_path("completions", completion.FILES["bash"])
    words = [
        (["kt", "c"], "chat convert cache chats config completion"),
        (["kt", "pull", "--q"], "--quiet"),
        (["kt", "show", "kimi-k2-"], "kimi-k2-thinking"),
        (["kt", "show", "--experts", "kimi-k2-"], "kimi-k2-thinking"),
        (["kt", "plan", "x", "--machine", "laptop"], "laptop-16gb laptop-8gb-gpu"),
        (["kt", "plan", "x", "--device", "c"], "cpu cuda"),
        (["kt", "convert", "x", "--dense", "fp"], "fp8"),
        (["kt", "bench", "decode", "--policy", "f"], "fiddler"),
        (["kt", "eval", "x", "--kv", ""], "bf16 f32 fp8"),
        (["kt", "chat", "--max-tokens", ""], ""),
        (["kt", "chat", "--no-t"], "--no-think"),
        (["kt", "rm", "kt-m"], ""),
        (["kt", "completion", "z"], "zsh"),
        (["kt", "config", "set", "th"], "think think-budget thoughts threads"),
        (["kt", "chats", "e"], "export"),
        (["kt", "chats", "export", "x", "--format", ""], "md json"),
    ]
    for line, expected in words:
        program = f"""
            kt() {{ {sys.executable} -m ktcli "$@"; }}
            source {path}
            COMP_WORDS=({" ".join(word or "''" for word in line)}); COMP_CWORD={len(line) - 1}
            _kt; echo "${{COMPREPLY[*]}}"
        """
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


# What each shell must offer for a line, among other things; bash has the whole list above.
OFFERS = [
    ("kt comp", ["completion"]),
    ("kt plan x --machine laptop", ["laptop-16gb", "laptop-8gb-gpu"]),
    ("kt convert x --dense fp", ["fp8"]),
    ("kt completion install f", ["fish"]),
    ("kt config set thi", ["think", "think-budget"]),
    ("kt config set device cp", ["cpu"]),
    ("kt show kimi-k2-t", ["kimi-k2-thinking"]),
]


@pytest.mark.skipif(not shutil.which("fish"), reason="there is no fish")
def test_fish_offers_values(home: Path) -> None:
    assert main(["completion", "install", "fish"]) == 0
    lines = "; ".join(f"complete -C '{line}'; echo ---" for line, _ in OFFERS)
    done = subprocess.run(["fish", "-c", lines], capture_output=True, text=True, check=True)
    for (line, expected), said in zip(OFFERS, done.stdout.split("---\n"), strict=False):
        assert {each.split("\t")[0] for each in said.splitlines()} == set(expected), line


@pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh")
def test_zsh_offers_values(home: Path) -> None:
    """In a terminal: Tab completes what is clear, and lists what is not."""
    assert main(["completion", "install", "zsh"]) == 0
    with in_terminal(["zsh", "-i"], TERM="dumb") as (say, until):
        say("PROMPT='<'; PROMPT+='ready> '; setopt no_beep no_list_ambiguous; stty -echo\n")
        until("<ready> ")
        for line, expected in OFFERS:
            say(f"{line}\t")
            for word in expected:
                until(word)
            say("\x15")  # the line is taken back


@contextlib.contextmanager
def in_terminal(command: list[str], **environment: str) -> Iterator[tuple[Any, Any]]:
    """A program in a terminal: `say` types, `until` reads until a text was shown."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    os.close(theirs)
    shown = ""

    def say(text: str) -> None:
        os.write(ours, text.encode())

    def until(text: str) -> None:
        nonlocal shown
        end = time.monotonic() + 60
        while text not in shown:
            ready, _, _ = select.select([ours], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} was not shown: {shown!r}"
            shown += os.read(ours, 4096).decode(errors="replace")
        shown = shown.partition(text)[2]

    try:
        yield say, until
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# --- installing -------------------------------------------------------------------------------

ASKED = {
    "bash": ["bash", "-ic", "complete -p kt"],
    "zsh": ["zsh", "-ic", "print complete $_comps[kt] kt"],
    "fish": ["fish", "-c", "complete -C 'kt compl'"],
}


@pytest.mark.parametrize("shell", ASKED)
def test_a_shell_finds_what_was_installed(
    shell: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell}")
    assert main(["completion", "install", shell]) == 0
    assert f"undo: kt completion uninstall {shell}" in capsys.readouterr().out
    done = subprocess.run(ASKED[shell], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert re.search(r"complet", done.stdout), done.stderr
    assert main(["completion", "uninstall", shell]) == 0
    left = [path.name for path in home.rglob("*") if path.is_file() and path.read_bytes()]
    assert set(left) <= {".zcompdump", "fish_variables"}  # the shells' own


@pytest.mark.parametrize(
    "before", [None, "", "a\nb\n", "no end", "x # kt completion\ny\n", "\udcff\n"]
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_lines_of_a_startup_file_stay(shell: str, before: str | None, home: Path) -> None:
    place = startup.place_of(shell)
    assert place.startup is not None
    data = (before or "").encode("utf-8", "surrogateescape")
    if before is not None:
        place.startup.write_bytes(data)
        place.startup.chmod(0o600)
    mine = data.replace(b"x # kt completion\n", b"")
    assert startup.install(place, "made by: kt completion") == [place.script, place.startup]
    after = mine if mine.endswith(b"\n") or not mine else mine + b"\n"
    assert place.startup.read_bytes() == after + place.line.encode() + b"\n"
    if before is not None:
        assert place.startup.stat().st_mode & 0o777 == 0o600
    assert startup.install(place, "made by: kt completion") == []
    assert startup.install(place, "newer, made by: kt completion") == [place.script]
    startup.uninstall(place)
    assert place.startup.read_bytes() == after and not place.script.exists()
    assert startup.uninstall(place) == []


def test_folders_with_awkward_names(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "it's $HOME; a folder"))
    assert main(["completion", "install", "bash"]) == 0
    done = subprocess.run(ASKED["bash"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "_kt" in done.stdout


def test_what_is_not_ours_and_what_cannot_be_written(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = startup.place_of("fish")
    place.script.parent.mkdir(parents=True)
    place.script.write_text("another kt\n")
    for what in ("install", "uninstall"):
        assert main(["completion", what, "fish"]) == 2
        assert "not written by kt" in capsys.readouterr().err
    assert place.script.read_text() == "another kt\n"
    (home / ".bashrc").mkdir()
    assert main(["completion", "install", "bash"]) == 1
    assert "not a plain file" in capsys.readouterr().err


def test_the_shell_is_that_of_the_person(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert main(["completion", "install", "--json"]) == 0
    script = home / ".config/fish/completions/kt.fish"
    assert json.loads(capsys.readouterr().out) == {"shell": "fish", "changed": [str(script)]}
    for name in ("/bin/tcsh", ""):
        monkeypatch.setenv("SHELL", name)
        assert main(["completion", "install"]) == 2
        assert "kt completion install bash" in capsys.readouterr().err


def test_gpus_are_counted_without_asking_them(tmp_path: Path) -> None:
    assert driven_gpus(tmp_path / "none") == 0
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert driven_gpus(tmp_path / "gpus") == 2
