"""The package as others get it: sdist, wheel out of the sdist, and this (editable) install.

One wheel is built for the whole file, without network or build isolation, and installed into an
empty folder; a fresh interpreter then imports it from there.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from ktcli.resources import data_path
from ktcli.server.http.page.files import PARTS

ROOT = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

# Runs in the interpreter under test; prints nothing and fails with a traceback.
PROBE = """
import sys
from pathlib import Path
import ktcli
from ktcli._native import ffi
from ktcli.resources import data_path
home = Path(sys.argv[1])
assert Path(ktcli.__file__).parent == home, ktcli.__file__
library = ffi.dlopen(str(data_path("libkt.so")))
assert data_path("libkt.so").parent == home
assert library.kt_isa_rows(ffi.NULL, 0) >= 1
assert list(data_path("profiles", "models").glob("*.toml"))
assert data_path("profiles", "text", "python.txt").is_file()  # kt eval reads it
assert data_path("profiles", "text", "calibration.txt").is_file()  # kt convert --calibrate built-in
assert not any(name in sys.modules for name in ("torch", "numpy"))
import kt
assert Path(kt.__file__).parent.parent == home.parent and kt.load
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", out, ROOT, cwd=ROOT)
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, which pip unpacks elsewhere: nothing of this tree can slip in."""
    out = tmp_path_factory.mktemp("wheel")
    # What compiles fastest: what is in a wheel does not depend on it.
    quick = ("build-type=Debug", "define.CMAKE_C_FLAGS_DEBUG=-Og", "define.KT_ROWS=avx2")
    options = [word for each in quick for word in ("--config-settings", f"cmake.{each}")]
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", *options, "-w", out, sdist, cwd=out)
    (archive,) = out.iterdir()
    return archive


@pytest.mark.thorough
def test_sdist_holds_sources_only(sdist: Path):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "native/include/kt.h", "native/CMakeLists.txt"} <= names
    assert not [name for name in names if name.endswith((".so", "_native.py", ".pyc"))]


@pytest.mark.thorough
def test_sdist_holds_every_source(sdist: Path):
    """What is tracked, but for what continuous integration runs."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("this tree is no clone")
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = {name for name in tracked if (ROOT / name).is_file()} - names
    assert not [name for name in missing if not name.startswith((".ci/", ".git"))]


@pytest.mark.thorough
def test_wheel_holds_the_product_only(wheel: Path):
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        library = archive.read("ktcli/libkt.so")
    assert {"kt/py.typed", "ktcli/_native.py", "ktcli/py.typed", "ktcli/resources.py"} <= set(names)
    assert {f"ktcli/server/http/page/{name}" for name in PARTS} <= set(names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"kt", "ktcli"}
    assert not [name for name in names if "/recipe/" in name]
    assert [name for name in names if name.endswith(".data/data/share/man/man1/kt.1")]
    assert str(ROOT).encode() not in library


@pytest.mark.thorough
def test_wheel_works_where_it_is_installed(wheel: Path, tmp_path: Path):
    target = tmp_path / "site"
    run(*PIP, "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=tmp_path)
    # -S: without it the finder of an editable install would win over the path. What kt depends on
    # then comes by path too.
    path = os.pathsep.join([str(target), sysconfig.get_path("purelib")])
    # pip compiles what it installs: a user who may not write there starts it as fast.
    assert list((target / "ktcli" / "__pycache__").glob("main.*.pyc"))
    assert (target / "share/man/man1/kt.1").is_file()
    run(sys.executable, "-S", "-c", PROBE, target / "ktcli", cwd=tmp_path, PYTHONPATH=path)


@pytest.mark.thorough
def test_the_published_wheel_names_the_glibc_it_needs(wheel: Path, tmp_path: Path):
    """`make wheel`: auditwheel finds no library but libc's, and the newest version of a symbol is in the name."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path, wheel)
    run(*command, cwd=tmp_path, PATH=path)
    (published,) = tmp_path.iterdir()
    named = re.search(r"-py3-none-manylinux_2_(\d+)_x86_64\.whl$", published.name)
    with zipfile.ZipFile(published) as archive:
        symbols = re.findall(rb"GLIBC_2\.(\d+)", archive.read("ktcli/libkt.so"))
        assert not [name for name in archive.namelist() if name.startswith("ktcli.libs")]
    assert named and int(named[1]) == max(map(int, symbols))


def test_this_install_works(tmp_path: Path):
    home = Path(data_path("__init__.py")).parent
    run(sys.executable, "-c", PROBE, home, cwd=tmp_path)


# --- make install ---------------------------------------------------------------------------------

FAKE_TOOL = """\
#!/bin/sh
echo "$(basename "$0") $*" >>"$HOME/calls"
case "$*" in
    *environment*BIN_DIR | *"dir --bin") echo "$HOME/.local/bin" ;;
    *environment*VENVS | "tool dir") echo "$HOME/venvs" ;;
    *list*) echo "ktcli 0.1.0" ;;
esac
"""


def put_kt(what: str, home: Path, *tools: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """`sh install.sh`, with only these stand-ins for pipx and uv on the PATH."""
    programs = home.parent / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("sh", "dirname", "basename", "readlink", "mkdir", "ln", "rm", "grep"):
        if not (programs / name).exists():
            (programs / name).symlink_to(str(shutil.which(name)))
    for name in tools:
        (programs / name).write_text(FAKE_TOOL)
        (programs / name).chmod(0o755)
    return subprocess.run(
        ["sh", ROOT / "install.sh", what, home / "venv"], capture_output=True, text=True,
        env={"HOME": str(home), "PATH": f"{programs}{path}"},
    )  # fmt: skip


@pytest.fixture
def person(tmp_path: Path) -> Path:
    home = tmp_path / "a person"
    (home / "venv" / "bin").mkdir(parents=True)
    (home / "venv" / "bin" / "kt").write_text("#!/bin/sh\necho hello\n")
    (home / "venv" / "bin" / "kt").chmod(0o755)
    return home


def test_a_link_is_put_and_taken_away(person: Path) -> None:
    bin = person / ".local" / "bin"
    done = put_kt("install", person)
    assert done.returncode == 0 and f"Installed {bin}/kt" in done.stdout
    assert f"{bin} is not on your PATH yet" in done.stdout
    assert f'export PATH="{bin}:$PATH"' in done.stdout
    assert subprocess.run([bin / "kt"], capture_output=True, text=True).stdout == "hello\n"
    assert (person / ".local/share/man/man1/kt.1").samefile(ROOT / "docs" / "kt.1")
    again = put_kt("install", person, path=f":{bin}")
    assert (again.returncode, again.stderr) == (0, "")
    (person / "venv" / "bin" / "kt").unlink()  # as after `make clean`
    assert put_kt("uninstall", person).returncode == 0
    assert [each for each in (person / ".local").rglob("*") if not each.is_dir()] == []
    assert "not installed" in put_kt("uninstall", person).stdout


def test_what_is_not_of_kt_stays(person: Path) -> None:
    theirs = person / ".local" / "bin" / "kt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("another kt")
    done = put_kt("install", person)
    assert done.returncode == 1 and "move it away" in done.stderr
    put_kt("uninstall", person)
    assert theirs.read_text() == "another kt"


@pytest.mark.parametrize("tool", ["pipx", "uv"])
def test_pipx_and_uv_come_first(tool: str, person: Path) -> None:
    page = person / "venvs/ktcli/share/man/man1/kt.1"
    page.parent.mkdir(parents=True)
    page.write_text("")
    done = put_kt("install", person, tool)
    assert done.returncode == 0 and f"with {tool}" in done.stdout
    calls = (person / "calls").read_text()
    assert f"{tool} " in calls and "install --force" in calls and str(ROOT) in calls
    assert (person / ".local/share/man/man1/kt.1").samefile(page)
    assert put_kt("uninstall", person).returncode == 0
    assert "uninstall ktcli" in (person / "calls").read_text()


def test_missing_data_is_named():
    with pytest.raises(FileNotFoundError, match=r"no-such-file.* install ktcli again"):
        data_path("profiles", "no-such-file")


FAKE_PIP = """\
#!/bin/sh
echo "  Collecting numpy (from ktcli)"
for i in 1 2 3; do echo "  [$i/3] Building C object x$i.o"; done
exit $FAKE_CODE
"""


@pytest.mark.parametrize("code", [0, 1])
def test_make_chat_says_what_it_does_and_where_kt_is(code: int, tmp_path: Path) -> None:
    """Of an installation, with a stand-in for pip."""
    (tmp_path / "pip").write_text(FAKE_PIP)
    (tmp_path / "pip").chmod(0o755)
    (tmp_path / ".kt-venv").touch()
    stamp = tmp_path / ".kt-chat"
    # Not as a part of the make that may run this test.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", f"VENV={tmp_path}", f"PIP={tmp_path}/pip", "LOST=", str(stamp)],
        cwd=ROOT, capture_output=True, text=True, env={**outside, "FAKE_CODE": str(code)},
    )  # fmt: skip
    assert "  getting packages\n  compiling 3 files\n" in done.stdout
    assert (done.returncode == 0) == stamp.exists() == (code == 0)
    if code == 0:
        assert done.stdout.endswith(f"kt is {tmp_path}/bin/kt; make install puts it on your PATH\n")
    else:
        assert "[3/3] Building" in done.stdout and f"{stamp}.log" in done.stdout
