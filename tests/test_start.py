"""The program from its first line to its last: Ctrl-C while it is still being loaded, and streams that are closed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktcli import __version__

# Presses Ctrl-C when a module is about to be imported.
PRESSED = """
import signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            sys.argv[1] = "names"
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Press())
from ktcli.start import run
sys.argv[0] = "kt"
run()
"""


@pytest.mark.parametrize("module", ["ktcli.main", "typer", "ktcli.commands.cli.table"])
def test_ctrl_c_while_the_program_is_loaded(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRESSED, module], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


# Presses Ctrl-C while the program's own handler is about to be set.
PRESSED_AT_ONCE = """
import _signal
real = _signal.getsignal
def getsignal(number):
    _signal.getsignal = real
    _signal.raise_signal(_signal.SIGINT)
_signal.getsignal = getsignal
from ktcli.start import run
run()
"""


def test_ctrl_c_before_it_is_handled() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRESSED_AT_ONCE], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


# Presses Ctrl-C at a moment of a command's run: at the n-th call or return of a function; 0: never, and their number is
# told at the end. One process makes the children, as nothing of kt is loaded in it.
PRESSED_AT = """
import atexit, os, sys
def child(n):
    seen = 0
    def note(frame, event, arg):
        nonlocal seen
        seen += 1
        if seen == n:
            sys.setprofile(None)
            os.kill(os.getpid(), 2)
    if not n:
        atexit.register(lambda: os.write(told[1], str(seen).encode()))
    sys.argv[0] = "kt"
    os.dup2(told[1], 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.setprofile(note)
    from ktcli.start import run
    run()
def ended(n):
    global told
    told = os.pipe()
    if not (process := os.fork()):
        child(n)
    os.close(told[1])
    said = b"".join(iter(lambda: os.read(told[0], 1 << 16), b"")).decode()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), said
moments = int(sys.argv.pop(1))
_, calls = ended(0)
for each in range(1, moments + 1):
    print(ended(1 + int(calls) * each // (moments + 1)))
"""


@pytest.mark.parametrize(
    ("moments", "command"),
    [(8, "--version"), pytest.param(40, "names", marks=pytest.mark.thorough)],
)
def test_ctrl_c_at_any_moment(moments: int, command: str, home: Path) -> None:
    """Imports, the command, and the interpreter's end: never a traceback, always the same end."""
    done = subprocess.run(
        [sys.executable, "-c", PRESSED_AT, str(moments), command],
        capture_output=True,
        text=True,
        env={**os.environ, "KT_HOME": str(home)},
        timeout=300,
    )
    assert done.stdout.splitlines() == [str((130, "error: interrupted\n"))] * moments, done.stderr


def test_nothing_is_imported_before_ctrl_c_is_handled() -> None:
    """What the interpreter imports by itself is out of reach; `run` adds as good as nothing to that."""
    code = (
        "import io, os, sys; before = set(sys.modules); import ktcli.start;"
        "print(*set(sys.modules) - before - set(sys.builtin_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) == {"ktcli", "ktcli.start"}


# Prints how often the interpreter looks for dead cycles while a command runs.
WALKS = """
import atexit, gc, sys
from ktcli.start import run
walks = []
gc.callbacks.append(lambda phase, info: walks.append(phase))
atexit.register(lambda: print(len(walks), file=sys.stderr))
sys.argv[0] = "kt"
run()
"""

# Prints how many objects the interpreter's own end still looks at, and how many it leaves alone.
LEFT = """
import atexit, gc, sys
from ktcli.start import run
atexit.register(lambda: print(len(gc.get_objects()), gc.get_freeze_count(), file=sys.stderr))
sys.argv[0] = "kt"
run()
"""

FULL = "error: cannot write the output: No space left on device\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def test_the_first_answer_waits_for_no_search_for_dead_cycles(home: Path) -> None:
    """Each would walk a hundred thousand objects of imported modules, which all stay."""
    done = subprocess.run(
        [sys.executable, "-c", WALKS, "chat", "kt-mini", "hi", "-n", "1"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "KT_HOME": str(home)},
        timeout=120,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "0")


def test_the_end_walks_over_nothing_that_a_command_left(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT, "list"],
        capture_output=True,
        text=True,
        env={**os.environ, "KT_HOME": str(home)},
        timeout=120,
    )
    looked_at, left_alone = map(int, done.stderr.splitlines()[-1].split())
    assert (done.returncode, looked_at < 100 < left_alone) == (0, True), done.stderr


def in_shell(line: str, home: Path) -> subprocess.CompletedProcess[str]:
    """What a line of a shell says and how it ends, without anything to read."""
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "KT_HOME": str(home)},
        timeout=300,
    )


@pytest.mark.in_turn("line")
@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("--version >&-", 1, "", "error: standard output is closed\n"),
        ("names --json >&-", 1, "", "error: standard output is closed\n"),
        ("chat kt-mini hi -n 1 >&-", 1, "", "error: standard output is closed\n"),
        ("no-such-command --json >&-", 2, "", "error: unknown command 'no-such-command'\n"),
        ("no-such-command 2>&-", 2, "", ""),
        ("no-such-command 2>/dev/full", 2, "", ""),
        ("--version <&-", 0, f"kt {__version__}\n", ""),
        ("> /dev/full", 1, "", FULL),
        ("names > /dev/full", 1, "", FULL),
        ("chat kt-mini hi -n 1 --quiet > /dev/full", 1, "", FULL),
        ("chat kt-mini hi -n 1 <&- >&- 2>&-", 1, "", ""),
    ],
)
def test_closed_and_full_streams(line: str, code: int, out: str, err: str, home: Path) -> None:
    """A sentence where there is somewhere to say it; no file of the program ever takes the place of a stream."""
    done = in_shell(f"{sys.executable} -m ktcli {line}", home)
    said = [line for line in done.stderr.splitlines(True) if not line.startswith(" ")]
    assert (done.returncode, done.stdout, "".join(said)) == (code, out, err)


@pytest.mark.thorough
@pytest.mark.parametrize("encoding", ["ascii:surrogateescape"])
def test_characters_that_streams_cannot_write_end_nothing(encoding: str, home: Path) -> None:
    """They are written as JSON and Python write them; and what cannot be read is no end either."""
    chat = [sys.executable, "-m", "ktcli", "chat", "kt-mini", "-n", "2", "--json"]
    said = []
    for environment in ({"PYTHONIOENCODING": encoding}, {"PYTHONUTF8": "1"}):
        done = subprocess.run(
            [*chat, "--seed", "1", "ä 漢 \U0001f600", "--system", "ü"],
            input="größer".encode(),
            capture_output=True,
            env={**os.environ, "KT_HOME": str(home), **environment},
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.decode("utf-8" if "PYTHONUTF8" in environment else "latin-1"))
    documents = [json.loads(each) for each in said]
    assert [each.keys() for each in documents] == [documents[1].keys()] * 2


# Writes characters of every kind to both streams.
WRITES = """
import sys
from ktcli import start
start._write_any_character()
for stream in (sys.stdout, sys.stderr):
    stream.write("a\\xe4\\u6f22\\U0001f600\\udc80")
"""


def test_characters_are_escaped_where_an_encoding_lacks_them() -> None:
    for encoding, expected in {
        "ascii": b"a\\u00e4\\u6f22\\ud83d\\ude00\\udc80",
        "latin-1": b"a\xe4\\u6f22\\ud83d\\ude00\\udc80",
        "utf-8": "a\xe4漢\U0001f600\\udc80".encode(),
        "ascii:replace": b"a????",
    }.items():
        done = subprocess.run(
            [sys.executable, "-c", WRITES],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            timeout=60,
        )
        assert (done.stdout, done.stderr.startswith(b"a")) == (expected, True)


# Everything that a command prints goes on, or it ends with a sentence: what a library cannot say is said before.
SMALL = [
    (60, "list", 0),
    (100, "plan kt-mini", 4),
    (100, "doctor", 4),
    (100, "chats", 4),
    (150, "eval kt-mini", 4),
    (150, "convert kt-mini", 4),
    (150, "chat kt-mini hi", 4),
    (150, "serve kt-mini", 4),
]
MORE = [
    "doctor",
    "plan kt-mini",
    "show kt-mini",
    "chats",
    "convert kt-mini",
    "eval kt-mini",
    "chat kt-mini hi -n 2",
]


@pytest.mark.parametrize(
    ("mib", "line", "code"),
    [
        *SMALL,
        *(
            pytest.param(mib, line, None, marks=pytest.mark.thorough)
            for mib in (100, 160, 200, 256, 300, 400)
            for line in MORE
        ),
    ],
)
def test_little_address_space_is_told_in_a_sentence(
    mib: int, line: str, code: int | None, home: Path
) -> None:
    done = in_shell(f"ulimit -v {mib << 10}; exec {sys.executable} -m ktcli {line}", home)
    warned = line == "doctor"  # of this machine, with exit code 1
    assert done.returncode in ((0, 4, int(warned)) if code is None else (code,)), done.stderr
    assert "Traceback" not in done.stderr
    if done.returncode == 4:
        assert done.stderr.startswith("error: ")
        assert "ulimit -v" in done.stderr or "memory" in done.stderr
