"""An interactive chat in a real pseudo-terminal: keys go in, what appears comes out."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest

from ktcli.chat.log import read_path

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/ptmx"), reason="no pseudo-terminals here")
HERE = Path(__file__).parent
ROWS = 24
CTRL_C, CTRL_D, ALT_ENTER, TAB, UP = "\x03", "\x04", "\x1b\r", "\t", "\x1b[A"


# Makes the terminal of its input that of its session, and becomes a program, which a closed terminal ends even where
# nohup started the tests. Between fork and exec of this process, which has threads, no Python is to run.
OWNS = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A program in a pseudo-terminal.

    Args:
        columns: the width; 0: unknown, so that the environment says 100.
    """

    def __init__(self, *command: str, home: Path, columns: int = 0, **more: str) -> None:
        self.parent, child = pty.openpty()
        environment = {
            **os.environ,
            "KT_HOME": str(home),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]),
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "TERM": "xterm",
            "COLUMNS": "" if columns else "100",
            **more,
        }
        if columns:
            self.resize(columns)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", OWNS, *command],
            stdin=child,
            stdout=child,
            stderr=child,
            env=environment,
            start_new_session=True,
        )
        os.close(child)
        self.raw = ""
        self._seen = 0

    def resize(self, columns: int) -> None:
        termios.tcsetwinsize(self.parent, (ROWS, columns))

    def type(self, keys: str) -> None:
        os.write(self.parent, keys.encode())

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Wait until `pattern` appears after what was expected before; everything up to it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = re.search(pattern, plain(self.raw[self._seen :]), re.DOTALL)
            if found:
                text = plain(self.raw[self._seen :])[: found.end()]
                self._seen = len(self.raw)
                return text
            if not self._read(0.2) and self.process.poll() is not None:
                break
        raise AssertionError(f"{pattern!r} did not appear in {plain(self.raw)[-1500:]!r}")

    def _read(self, wait_s: float) -> bool:
        if not select.select([self.parent], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self.parent, 65536)
        except OSError:  # the other end is closed
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)

    def end(self) -> int:
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        while self._read(0.05):
            pass
        os.close(self.parent)
        return code


def plain(text: str) -> str:
    """Without the line below an answer that is being made, and the sequences that prompt_toolkit draws with."""
    text = re.sub(r"\x1bD\x1b\[A\x1b7.*?\x1b8", "", text, flags=re.DOTALL)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r", "", text)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(
        sys.executable, str(HERE / "pty_chat.py"), str(tmp_path), home=tmp_path / "home"
    )
    try:
        made.expect("› ")
        yield made
    finally:
        if made.process.poll() is None:
            os.killpg(made.process.pid, signal.SIGKILL)
            made.process.wait()


def test_a_conversation(terminal: Terminal) -> None:
    terminal.type("hello\r")
    terminal.expect(r"you said b'hello'\n.*› ")
    terminal.type("/stats\r")
    terminal.expect(r"eval count: .*context: .*› ")
    terminal.type("/nothing\r")
    terminal.expect(r"error: unknown command /nothing.*› ")
    terminal.type("/exit\r")
    terminal.expect("LEFT after 2 messages")
    assert terminal.end() == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(terminal: Terminal) -> None:
    terminal.type("long\r")
    terminal.expect("word word word")
    terminal.type(CTRL_C)
    said = terminal.expect(r"\(stopped\).*› ")
    assert said.count("word") < 300
    terminal.type("half a line" + CTRL_C)
    terminal.expect("› ")
    terminal.type("still there?\r")
    terminal.expect(r"you said b'still there\?'\n.*› ")
    terminal.type(CTRL_D)
    terminal.expect("LEFT after 4 messages")
    assert terminal.end() == 0


@pytest.mark.thorough
def test_a_window_may_be_resized_while_an_answer_is_made(tmp_path: Path) -> None:
    """The line below it fits each time, and no word is broken."""
    terminal = Terminal(
        sys.executable, str(HERE / "pty_chat.py"), str(tmp_path), home=tmp_path / "home", columns=40
    )
    screen, fed = pyte.Screen(40, ROWS), 0
    stream = pyte.Stream(screen)
    try:
        terminal.expect("› ")
        terminal.type("long\r")
        for columns in (40, 80, 200, 40):
            terminal.resize(columns)
            terminal.expect("word( word)*", 10)
            stream.feed(terminal.raw[fed:])
            fed = len(terminal.raw)
            screen.resize(ROWS, columns)
            terminal.expect(r"(word\s+){9}", 10)  # so that the line is drawn again
            stream.feed(terminal.raw[fed : terminal.raw.rindex("\x1b8") + 2])
            fed = terminal.raw.rindex("\x1b8") + 2
            below = screen.display[screen.cursor.y + 1]
            assert re.match(r"[\d,]+ tokens, [\d.]+ tok/s", below), below
            assert ("context" in below) == (columns > 40)
            rows = screen.display[: screen.cursor.y + 1]
            assert all(re.match("› long|word ", row) for row in rows), rows  # no rest of a word
    finally:
        os.killpg(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait()
        os.close(terminal.parent)


def test_an_impatient_person_keeps_the_chat_too(terminal: Terminal) -> None:
    terminal.type("long\r")
    terminal.expect("word word word")
    for _ in range(2):
        os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.expect(r"\(stopped\).*› ")
    terminal.type("still there?\r")
    terminal.expect(r"you said b'still there\?'\n.*› ")


def test_a_killed_chat_goes_on(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type("remember me\r")
    terminal.expect(r"you said b'remember me'\n.*› ")
    os.killpg(terminal.process.pid, signal.SIGKILL)
    terminal.end()
    again = Terminal(
        sys.executable, str(HERE / "pty_chat.py"), str(tmp_path), home=tmp_path / "home"
    )
    again.expect("/load last continues.*› ")
    again.type("/load last\r")
    again.expect("2 messages.*› ")
    again.type(CTRL_D)
    again.expect("LEFT after 2 messages")
    assert again.end() == 0


def test_an_answer_is_kept_when_the_terminal_closes(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type("long\r")
    terminal.expect("word word word")
    os.close(terminal.parent)  # the terminal is gone: SIGHUP
    assert terminal.process.wait(60) == -signal.SIGHUP
    assert kept(tmp_path)[0] == "long" and kept(tmp_path)[1].startswith("word word word")


def test_a_closed_terminal_ends_its_program_where_the_tests_ignore_that(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        waiting = "import time; print('ready', flush=True); time.sleep(600)"
        terminal = Terminal(sys.executable, "-c", waiting, home=tmp_path)
        terminal.expect("ready")
    finally:
        signal.signal(signal.SIGHUP, before)
    os.close(terminal.parent)
    assert terminal.process.wait(60) == -signal.SIGHUP


def test_an_answer_is_kept_when_the_process_is_told_to_end(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.type("long\r")
    terminal.expect("word word word")
    terminal.process.terminate()
    assert terminal.end() == -signal.SIGTERM
    assert kept(tmp_path)[0] == "long" and kept(tmp_path)[1].startswith("word word word")


def kept(folder: Path) -> list[str]:
    """What was said in the one chat of a library."""
    [path] = (folder / "home" / "chats").iterdir()
    return [turn["content"] for turn in read_path(path).conversation.turns]


def test_a_full_disk_costs_a_sentence(tmp_path: Path) -> None:
    """Not a traceback for each line: one for what is typed, one for what is said."""
    script, home = str(HERE / "pty_chat.py"), tmp_path / "home"
    terminal = Terminal(sys.executable, script, str(tmp_path), "full", home=home)
    terminal.expect("› ")
    for line in ("hello", "again"):
        terminal.type(f"{line}\r")
        terminal.expect(rf"you said b'{line}'\n.*› ")
    terminal.type(CTRL_D)
    terminal.expect("LEFT after 4 messages")
    assert terminal.end() == 0
    shown = plain(terminal.raw)
    for words in ("input history is not saved", "this chat is not being saved"):
        assert shown.count(words) == 1
    assert "Traceback" not in shown and "ENTER" not in shown


def test_ctrl_z_suspends_at_the_prompt(tmp_path: Path) -> None:
    """Under a shell with job control, which says when its job stops and takes it to the front again."""
    job = f"{sys.executable} {HERE / 'pty_chat.py'} {tmp_path}"
    shell = f"set -m; {job}; echo stopped $?; fg >/dev/null"
    terminal = Terminal("bash", "-c", shell, home=tmp_path / "home")
    terminal.expect("› ")
    terminal.type("half\x1a")
    terminal.expect(f"stopped {128 + signal.SIGTSTP}.*› ")
    terminal.type(" a line\r")
    terminal.expect(r"you said b'half a line'\n.*› ")
    terminal.type(CTRL_D)
    terminal.expect("LEFT after 2 messages")
    assert terminal.end() == 0


def test_several_lines(terminal: Terminal) -> None:
    terminal.type("one\\\rtwo\r")
    terminal.expect(r"you said b'one\\ntwo'\n.*› ")
    terminal.type("a" + ALT_ENTER + "b\r")
    terminal.expect(r"you said b'a\\nb'\n.*› ")
    terminal.type('"""x\ry\rz"""\r')
    terminal.expect(r"you said b'x\\ny\\nz'\n.*› ")
    terminal.type("\x1b[200~pasted\nlines\x1b[201~\r")
    terminal.expect(r"you said b'pasted\\nlines'\n.*› ")


def test_history_and_completion(terminal: Terminal) -> None:
    terminal.type("first\r")
    terminal.expect(r"you said b'first'\n.*› ")
    terminal.type(UP + "\r")
    terminal.expect(r"you said b'first'\n.*› ")
    terminal.type("/he" + TAB)
    terminal.expect("/help")  # completion takes a moment
    terminal.type("\r")
    terminal.expect(r"/retry.*Ctrl-D +leave.*› ")


def test_model_text_is_never_obeyed(terminal: Terminal) -> None:
    terminal.type("/set thoughts shown\r")
    terminal.expect(r"thoughts +shown.*› ")
    terminal.type("evil\r")
    terminal.expect(r"\[bold\]ok\[/bold\]\n.*› ")
    assert "\x1b]0;" not in terminal.raw and "\x07" not in terminal.raw
    assert "\x1b[31m" not in terminal.raw and "␛]0;owned␇" in terminal.raw
    assert "\x1b[2m<think>␛[31mhm</think>\x1b[0m" in terminal.raw.replace("\x1b[0m\x1b[2m", "")


def test_an_earlier_question_is_asked_otherwise(terminal: Terminal) -> None:
    """The line holds the old words; the conversation as it was stays."""
    for question in ("first", "second"):
        terminal.type(f"{question}\r")
        terminal.expect(rf"you said b'{question}'.*› ")
    terminal.type("/edit 1\r")
    terminal.expect(r"› first")
    terminal.type(" of all\r")
    said = terminal.expect(r"you said b'first of all'.*› ")
    assert "the previous conversation is saved as " in said
    terminal.type("/edit\r")
    terminal.expect(r"› first of all")
    terminal.type(CTRL_C)
    terminal.expect("› ")
    terminal.type("third\r")
    terminal.expect(r"you said b'third'.*› ")
    terminal.type("/edit 3\r")
    terminal.expect("numbered from 1 to 2")


@pytest.mark.parametrize("columns", [1, 20])
def test_a_poor_terminal_and_a_history_that_is_a_folder(tmp_path: Path, columns: int) -> None:
    """One sentence, and the chat goes on: without colours, and of kt's own signs only those that ASCII has."""
    (tmp_path / "home" / "history").mkdir(parents=True)
    poor = {"TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C"}
    command = (sys.executable, "-m", "ktcli", "chat", "kt-mini", "--greedy")
    made = Terminal(*command, home=tmp_path / "home", columns=columns, **poor)
    try:
        made.expect("> ")
        made.type("what is kt?\r")
        said = made.expect("tok/s.*> ")
        made.type("/stats\r")
        said += made.expect("context:.*> ")
        made.type("/exit\r")
        assert made.end() == 0
    finally:
        if made.process.poll() is None:
            os.killpg(made.process.pid, signal.SIGKILL)
            made.process.wait()
    assert "".join(said.split()).count("inputhistoryisnotsaved") == 1
    assert not set("█░▸›·") & set(made.raw) and "\x1b[2m" not in made.raw
