"""The program from its first line to its last: Ctrl-C while it is still being loaded, and streams that are closed."""

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


@pytest.mark.parametrize("module", ["ktcli.main", "typer", "ktcli.commands.table"])
def test_ctrl_c_while_the_program_is_loaded(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRESSED, module], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


# Presses Ctrl-C while the program's own handler is about to be set.
PRESSED_AT_ONCE = """
import signal, sys
real = signal.getsignal
def getsignal(number):
    signal.getsignal = real
    signal.raise_signal(signal.SIGINT)
signal.getsignal = getsignal
from ktcli.start import run
run()
"""


def test_ctrl_c_before_it_is_handled() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRESSED_AT_ONCE], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


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


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("--version >&-", 1, "", "error: standard output is closed\n"),
        ("names --json >&-", 1, "", "error: standard output is closed\n"),
        ("chat kt-mini hi -n 1 >&-", 1, "", "error: standard output is closed\n"),
        ("no-such-command --json >&-", 2, "", "error: there is no command 'no-such-command'\n"),
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
    shell = f"{sys.executable} -m ktcli {line}"
    done = subprocess.run(
        ["bash", "-c", shell],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "KT_HOME": str(home)},
        timeout=120,
    )
    said = [line for line in done.stderr.splitlines(True) if not line.startswith(" ")]
    assert (done.returncode, done.stdout, "".join(said)) == (code, out, err)
