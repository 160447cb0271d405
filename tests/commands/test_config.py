"""`kt config` and what settings do: file < environment < option, and a file of nonsense stops nothing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from chat.fake_engine import FakeEngine
from commands.test_chat import Run
from hypothesis import given, settings
from hypothesis import strategies as st

from ktcli import config, settingsfile
from ktcli.assembly.ready import Ready
from ktcli.assembly.request import Wanted
from ktcli.commands.chat.request import preferred_settings
from ktcli.config import Origin
from ktcli.engine.drafting import DraftOptions
from ktcli.errors import UsageError
from ktcli.hardware.gpu import parse_device
from ktcli.hardware.numa import parse_numa
from ktcli.main import main
from ktcli.settings import SETTINGS, TABLE
from ktcli.text.settings import Settings

# A value of each setting that can be kept, as a person types it, and what it means.
VALUES: dict[str, tuple[str, Any]] = {
    "home": ("/models/kt", "/models/kt"), "libraries": ("/a:~/b", ["/a", "~/b"]),
    "model": ("qwen3-30b-a3b", "qwen3-30b-a3b"),
    "system": ('Say "no"\toften \\ \x7f ü.', 'Say "no"\toften \\ \x7f ü.'), "temperature": ("1e-1", 0.1),
    "max-tokens": ("0100", 100), "think": ("off", False), "context": ("4096", 4096), "draft": ("3", "3"),
    "kv": ("fp8", "fp8"),
    "device": ("cuda:1", "cuda:1"), "threads": ("8", 8), "numa": ("nodes=0,2-3", "nodes=0,2-3"), "heat": ("off", False),
    "kv-store": ("/mnt/kv", "/mnt/kv"), "kv-store-size": ("2G", 2 << 30),
    "kv-events": ("tcp://[::1]:5557", "tcp://[::1]:5557"),
    "kv-insecure": ("on", True),
    "cache": ("20G", 20 << 30), "thoughts": ("hidden", "hidden"), "markdown": ("off", False), "status": ("off", False),
    "gpus": ("0,1", "0,1"), "defer": ("2", 2), "top-k": ("20", 20), "top-p": ("0.9", 0.9), "min-p": ("0.05", 0.05),
    "seed": ("7", 7), "stop": ("END", "END"), "attach": ("never", "never"),
    "server": ("http://x:80", "http://x:80"), "server-key-file": ("~/key", "~/key"),
    "host": ("::1", "::1"), "port": ("8000", 8000),
    "api-key-file": ("~/key", "~/key"), "parallel": ("8", 8), "keep-alive": ("1h30m", "1h30m"),
    "pull-limit": ("20M", 20 << 20), "think-budget": ("200", 200), "when-full": ("stop", "stop"),
    "max-pause": ("0.2", 0.2), "placement": ("~/rules.toml", "~/rules.toml"),
}  # fmt: skip
WRONG = {
    "home": "models", "libraries": "/a:b",
    "model": " ", "system": "x" * 20_001, "temperature": "nan", "max-tokens": "0", "think": "maybe",
    "context": "1.5", "draft": "x", "kv": "fp4",
    "device": "tpu", "threads": "²", "numa": "some", "heat": "true", "cache": "much",
    "kv-store": "kv", "kv-store-size": "much", "kv-events": "5557", "kv-insecure": "yes",
    "attach": "sometimes", "server": "x:80", "server-key-file": "key",
    "top-k": "x", "top-p": "1.1", "min-p": "x", "seed": "x", "stop": " ", "host": "a b", "port": "0",
    "api-key-file": "key", "parallel": "65", "max-pause": "0", "keep-alive": "for ever",
    "gpus": "0,x", "defer": "65", "thoughts": "loud", "markdown": "html", "status": "x",
    "pull-limit": "fast", "think-budget": "0", "when-full": "burst", "placement": "rules.toml",
}  # fmt: skip


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for setting in TABLE:
        monkeypatch.delenv(setting.variable, raising=False)
    path = tmp_path / "config" / "config.toml"
    monkeypatch.setenv("KT_CONFIG", str(path))
    return path


def write(file: Path, text: str | bytes) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def kt(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["config", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


# --- the table --------------------------------------------------------------------------------------


def test_every_setting_has_its_cases() -> None:
    assert VALUES.keys() == WRONG.keys() == {setting.name for setting in TABLE if setting.kept}


def test_what_the_table_lets_pass_is_understood_where_it_is_used() -> None:
    for text in ("auto", "cpu", "cuda", "cuda:12"):
        SETTINGS["device"].domain.read(text)
        parse_device(text)
    for text in ("auto", "off", "2", "nodes=0-1,3"):
        SETTINGS["numa"].domain.read(text)
        parse_numa(text)
    for text in ("off", "lookup", "1", "4"):
        SETTINGS["draft"].domain.read(text)
        DraftOptions.parse(text, "draft")


# --- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VALUES)
def test_a_setting_that_is_kept_is_the_same_afterwards(
    name: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, value = VALUES[name]
    assert kt(capsys, "set", name, text)[0] == 0
    assert (config.stated(name).origin, config.value(name)) == (Origin.FILE, value)
    code, out, _ = kt(capsys, "get", name, "--json")
    assert code == 0 and json.loads(out)["value"] == value
    assert settingsfile.complaint(file) == ""
    assert kt(capsys, "unset", name)[0] == 0
    assert (config.stated(name).origin, config.value(name)) == (Origin.DEFAULT, None)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_and_nothing_written(
    name: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = kt(capsys, "set", name, WRONG[name])
    assert (code, out) == (2, "") and SETTINGS[name].domain.allowed in err
    assert not file.exists()


def test_the_environment_comes_before_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, "threads = 8\n")
    assert (config.value("threads"), config.stated("threads").undo) == (
        8,
        "kt config unset threads",
    )
    monkeypatch.setenv("KT_THREADS", " 2 ")
    assert (config.value("threads"), config.stated("threads").undo) == (2, "unset KT_THREADS")
    code, _, err = kt(capsys, "set", "threads", "4")
    assert code == 0 and "KT_THREADS=2 overrides the file" in err
    monkeypatch.setenv("KT_THREADS", "many")
    found = json.loads(kt(capsys, "list", "--json")[1])
    (row,) = (each for each in found["settings"] if each["name"] == "threads")
    assert (row["origin"], row["value"]) == ("environment", None) and "KT_THREADS is" in row[
        "fault"
    ]


def test_the_library_folder_of_the_file(file: Path, tmp_path: Path) -> None:
    write(file, f"home = '{tmp_path}/lib'\n")
    assert config.home() == tmp_path / "lib"
    write(file, f"home = '{tmp_path}/none/lib'\n")
    with pytest.raises(Exception, match=r"home in .*config\.toml is"):
        config.home()


class WantingRun(Run):
    """Remembers how engines were wanted, too."""

    def load(self, ready: Ready, wanted: Wanted, *_: object) -> FakeEngine:
        self.wanted = wanted
        return super().load(ready, wanted)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> WantingRun:
    made = WantingRun(tmp_path, capsys)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KT_CACHE", "0")  # what is fake is not stored
    monkeypatch.setattr("ktcli.assembly.talking.at_hand", made.find)
    monkeypatch.setattr("ktcli.assembly.talking.load", made.load)
    return made


def test_a_chat_takes_what_is_set_and_options_come_first(
    run: WantingRun, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(file, 'model = "some-model"\ncontext = 300\ndevice = "cpu"\nmax-tokens = 2\n')
    assert main(["chat", "what is this?"]) == 0
    assert run.names == ["some-model"]
    wanted = run.wanted
    assert (wanted.context, wanted.device.device) == (300, "cpu")
    monkeypatch.setenv("KT_CONTEXT", "200")
    assert main(["chat", "kt-mini", "what is this?", "--device", "auto"]) == 0
    wanted = run.wanted
    assert (run.names[-1], wanted.context, wanted.device.device) == ("kt-mini", 200, "auto")
    assert main(["chat", "kt-mini", "what is this?", "--context", "100"]) == 0
    assert run.wanted.context == 100
    monkeypatch.setenv("KT_DEVICE", "tpu")
    assert main(["chat", "kt-mini", "hello there"]) == 2


def test_sampling_is_set_for_all_chats_and_options_come_first(
    run: WantingRun, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, 'top-k = 5\ntop-p = 0.5\nmin-p = 0.1\nseed = 9\nstop = "END"\n')
    found = preferred_settings(Settings())
    sampling = found.sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (5, 0.5, 0.1, 9)
    assert found.stops == ("END",)
    assert main(["chat", "kt-mini", "what is this?", "--top-k", "7", "--stop", "x"]) == 0


def test_a_server_is_set_up_by_settings_and_other_machines_need_a_key(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, 'host = "0.0.0.0"\nport = 8123\n')
    assert main(["serve", "kt-mini", "--print-unit"]) == 2
    err = capsys.readouterr().err
    assert (
        "host in " in err and "0.0.0.0 is reachable from other machines and needs an API key" in err
    )
    assert main(["serve", "kt-mini", "--print-unit", "--host", "127.0.0.1"]) == 0
    key = tmp_path / "key"
    key.write_text("secret")
    monkeypatch.setenv("KT_API_KEY_FILE", str(key))
    key.chmod(0o644)
    assert main(["serve", "kt-mini", "--print-unit"]) == 2
    assert "other users can read the key" in capsys.readouterr().err
    key.chmod(0o600)
    assert main(["serve", "kt-mini", "--print-unit"]) == 0
    assert f"KT_API_KEY_FILE={key}" in capsys.readouterr().out
    monkeypatch.setenv("KT_KEEP_ALIVE", "5 minutes")
    assert main(["serve", "kt-mini", "--print-unit"]) == 2
    assert "KT_KEEP_ALIVE is '5 minutes'" in capsys.readouterr().err


def test_a_model_that_is_set_and_not_there_is_told_with_who_set_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KT_MODEL", "no-such-model")
    assert main(["chat", "what is this?"]) == 3
    assert "KT_MODEL=no-such-model asks for it; unset KT_MODEL" in capsys.readouterr().err


# --- bad files --------------------------------------------------------------------------------------

BAD = {
    "unknown keys": (
        b"thread = 8\n[x]\ny = 1\n",
        "line 1: 'thread' is not a setting; line 2: settings have no tables, so [x] has no effect",
    ),
    "a wrong value": (b"\nthreads = 'many'\n", "line 2: threads is 'many', which is not a whole"),
    "a list": (b"threads = [\n1]\n", "line 1: threads is '[1]', which is not a whole number"),
    "a switch for a number": (
        b"threads = true\n",
        "threads is 'on', which is not a whole number",
    ),
    "a variable only": (b"isa = 'avx2'\n", "isa can only be set as a variable, KT_ISA"),
    "no TOML": (b"threads: 8\n", "line 1: it cannot be read (expected '=' after a key"),
    "bytes": (b"\xff\xfe\0", "line 1: it cannot be read (it is not UTF-8)"),
    "nested": (b"x = " + b"[" * 30_000, "line 1: it cannot be read (it is nested too deeply)"),
    "a long number": (b"threads = " + b"9" * 9_000, "line 1: it cannot be read ("),
    "a longer number": (b"threads = 0x" + b"9" * 9_000, "threads is a number with too many digits"),
    "too large": (b"#" * (settingsfile.MAX_BYTES + 1), "it cannot be read (it is larger than"),
    "many": (b"".join(b"x%d = 1\n" % i for i in range(9)), "and 6 more"),
    "control characters": (b'"a\\u001b[31m" = 1\n', "not a setting"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_of_nonsense_is_one_sentence(
    kind: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, sentence = BAD[kind]
    write(file, data)
    assert config.value("threads") is None
    code, out, err = kt(capsys, "get", "threads")
    assert (code, out) == (0, "one per performance core\n")
    assert err.startswith("warning: ") and sentence in err and len(err.splitlines()) == 3
    assert err.endswith(f"Default: {SETTINGS['threads'].default}.\n")
    assert "\x1b" not in err


# What a person leaves between two settings, and how it is told; empty: nothing is wrong.
BROKEN = {
    "wrong type": (b"max-tokens = [1, 2]", "line 2: max-tokens is '[1, 2]', which is"),
    "unknown key": (b"new-in-kt-9 = 1", "line 2: 'new-in-kt-9' is not a setting"),
    "not TOML": (b"max-tokens: 8", "line 2: it cannot be read ("),
    "set twice": (b"threads = 4", "line 2: threads is set twice; line 1 applies"),
    "latin-1": ('system = "Schr\xf6der"'.encode("latin-1"), "line 2: it cannot be read (it is not UTF-8)"),
    "latin-1 in a comment": (b"# Schr\xf6der", ""),
    "unclosed quote": (b'system = "never ends', "line 2: it cannot be read ("),
    "unclosed text": (b'system = """never ends', "line 2: it cannot be read ("),
    "unclosed list": (b"max-tokens = [", "line 2: it cannot be read ("),
    "a table": (b"[kt]", "line 2: settings have no tables, so [kt] has no effect"),
    "CRLF": (b"max-tokens = 5\r", ""),
    "zero bytes": (b"\0\0\0", "line 2: it cannot be read ("),
    "several lines": (b'system = """\n[x]\nthreads = 9\n"""', ""),
    "huge": (b"x" * 40_000, "line 2: it cannot be read ("),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
def test_one_bad_line_drops_no_other(
    kind: str, bom: bytes, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, sentence = BROKEN[kind]
    before = bom + b"threads = 2\n" + line + b"\nheat = false # last\n"
    write(file, before)
    assert (config.value("threads"), config.records_heat()) == (2, False)
    code, _, err = kt(capsys, "get", "threads")
    assert code == 0 and (sentence in err if sentence else "warning" not in err)

    code, _, err = kt(capsys, "set", "temperature", "0.5")
    assert code == 0 and "Traceback" not in err
    assert all(each in file.read_bytes() for each in before.splitlines())
    assert (config.value("threads"), config.value("temperature")) == (2, 0.5)
    assert kt(capsys, "unset", "temperature")[0] == 0
    assert file.read_bytes() == before
    assert kt(capsys, "set", "threads", "3")[0] == 0
    assert (config.value("threads"), config.records_heat()) == (3, False)
    assert line in file.read_bytes() and file.read_bytes().startswith(bom)
    assert kt(capsys, "unset", "threads")[0] == 0
    assert (config.value("threads"), config.records_heat()) == (None, False)


@pytest.mark.parametrize(
    "line", ["max-tokens: 8", "max-tokens = [", "KT_MAX_TOKENS=8 # x", "export KT_MAX_TOKENS=x"]
)
def test_a_change_turns_a_broken_line_of_the_setting_into_a_comment(
    line: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, f"threads = 2\r\n{line}\r\nheat = false\r\n")
    assert kt(capsys, "set", "max-tokens", "9")[0] == 0
    assert file.read_bytes() == (
        f"threads = 2\r\nmax-tokens = 9\r\n# {line}\r\nheat = false\r\n".encode()
    )
    assert settingsfile.complaint(file) == ""
    assert kt(capsys, "unset", "max-tokens")[0] == 0
    assert file.read_bytes() == f"threads = 2\r\n# {line}\r\nheat = false\r\n".encode()


@pytest.mark.parametrize("name", settingsfile.WHERE_BYTES_GO)
@pytest.mark.parametrize(
    "line", ["NAME = 5x", "NAME = '/a", "NAME: /a", "KT_NAME=/a", "NAME = '/a'\nNAME = '/b'",
             "NAME = {}", "[NAME]\npath = '/a'", "kt_NAME = '/a'", "NAME.path = '/a'", "NAME = '\udcf6'"]
)  # fmt: skip
def test_where_bytes_go_is_never_replaced_by_a_default(
    name: str, line: str, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    write(file, ("threads = 2\n" + line.replace("NAME", name)).encode("utf-8", "surrogateescape"))
    asked = {"home": config.home, "libraries": config.libraries, "cache": config.cache_bytes}[name]
    where = 3 if line.count("NAME") == 2 and name != "cache" else 2  # /a is not a size either
    with pytest.raises(UsageError, match=rf"config\.toml, line {where}: "):
        asked()
    assert config.value("threads") == 2
    if name == "home":
        monkeypatch.delenv("KT_HOME", raising=False)
        assert main(["list"]) == 2
        assert f"line {where}: " in capsys.readouterr().err
    code, out, _ = kt(capsys, "list")
    assert code == 0 and f"line {where}: " in out
    monkeypatch.setenv(f"KT_{name.upper()}", "0" if name == "cache" else "/c")
    assert config.stated(name).value is not None  # who says it now is not asked about the file
    monkeypatch.delenv(f"KT_{name.upper()}")
    assert kt(capsys, "unset", name)[0] == 0
    assert config.stated(name).value is None and config.value("threads") == 2


def test_a_file_that_cannot_be_read_at_all_may_say_where_the_library_is(file: Path) -> None:
    write(file, b"#" * (settingsfile.MAX_BYTES + 1))
    with pytest.raises(UsageError, match=r"it may set home"):
        config.home()


def test_no_settings_file_is_asked_for_with_dev_null(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KT_CONFIG", os.devnull)
    assert kt(capsys, "get", "threads")[1] == "one per performance core\n"
    assert "warning" not in capsys.readouterr().err


def test_ends_of_values_are_looked_for_within_a_bound(file: Path) -> None:
    write(file, b"x=[\n" * (settingsfile.MAX_BYTES // 4 - 4) + b"threads=2")
    began = time.process_time()
    assert config.value("threads") == 2
    assert time.process_time() - began < 10


def test_a_folder_a_pipe_and_a_closed_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.mkdir(parents=True)
    assert "it is not a plain file" in kt(capsys, "get", "threads")[2]
    assert kt(capsys, "set", "threads", "2")[0] == 2
    file.rmdir()
    os.mkfifo(file)
    assert "it is not a plain file" in kt(capsys, "get", "threads")[2]
    file.unlink()
    write(file.parent.parent / "x", "")
    os.environ["KT_CONFIG"] = str(file.parent.parent / "x" / "config.toml")
    code, _, err = kt(capsys, "set", "threads", "2")
    assert code == 1 and "cannot create the folder" in err and "Traceback" not in err
    os.environ["KT_CONFIG"] = "/"  # a path without a name
    code, _, err = kt(capsys, "set", "threads", "2")
    assert code in (1, 2) and "mistake" not in err


# --- writing ----------------------------------------------------------------------------------------


def test_a_change_leaves_every_other_line_as_it_is(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = "# mine\n\n  threads=4 # few\nnew-in-kt-9 = [1,\n  2]\n[table]\nthreads = 5\n"
    write(file, before)
    assert kt(capsys, "set", "threads", "8")[0] == 0
    before = before.replace("]\nthreads = 5", "]\n# threads = 5")  # tables mean nothing
    assert file.read_text() == before.replace("  threads=4 # few", "threads = 8")
    assert kt(capsys, "set", "heat", "off")[0] == 0
    assert file.read_text().index("heat") < file.read_text().index("[table]")
    kt(capsys, "unset", "heat")
    kt(capsys, "unset", "threads")
    assert file.read_text() == before.replace("  threads=4 # few\n", "")


def test_a_value_of_several_lines_is_replaced_as_a_whole(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, 'system = """\nthreads = 1\n"""\nheat = false\n')
    assert kt(capsys, "set", "threads", "8")[0] == 0
    assert config.value("system") == "threads = 1\n"
    assert kt(capsys, "set", "system", "short")[0] == 0
    assert file.read_text() == 'system = "short"\nheat = false\nthreads = 8\n'


def test_a_link_stays_a_link(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = file.parent.parent / "dotfiles.toml"
    write(file, "")
    file.rename(real)
    file.symlink_to(real)
    assert kt(capsys, "set", "threads", "2")[0] == 0
    assert file.is_symlink() and "threads = 2" in real.read_text()


def test_two_who_write_at_once_lose_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settingsfile, "_WAIT_S", 60.0)  # for as many as here
    names = [name for name in VALUES if name not in ("home", "system")]
    threads = [
        threading.Thread(target=settingsfile.change, args=(file, SETTINGS[n], VALUES[n][0]))
        for n in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(settingsfile.read(file).texts) == set(names)


def test_the_file_of_a_new_reader_has_every_setting_as_a_comment(file: Path) -> None:
    text = settingsfile.template()
    assert tomllib.loads(text) == {}
    for setting in TABLE:
        assert (f"# {setting.name} = " in text) is setting.kept


LINES = st.lists(
    st.one_of(
        st.sampled_from(
            ["", "# note", " threads = 8", "threads=8 # few", 'system = "a # b"', 'system = "ü"', "x = 1.50", "y = 00",
             "y = 1.", "heat = true", "[table]", "a.b = 1", "z = 'q'", 'w = "\\t"', "v = 1_0", "u = nan", "\t", "\x0b"]
        ),
        st.text(max_size=12),
        st.builds("{} = {}".format, st.text("ab-_. ", max_size=3), st.text("0129.e+-\"'", max_size=6)),
    ),
    max_size=4,
)  # fmt: skip


@settings(max_examples=40)
@given(LINES, st.sampled_from(["\n", "\r\n", "\r"]))
def test_a_file_means_line_by_line_what_it_means_in_toml(lines: list[str], end: str) -> None:
    text = end.join(lines)
    entries = list(settingsfile._entries(settingsfile._lines(text)))
    try:
        whole = tomllib.loads(text)
    except ValueError:
        return
    if not any(each.is_table for each in entries):
        plain = {name: value for name, value in whole.items() if not isinstance(value, dict)}
        found = {e.name: e.value for e in entries if not isinstance(e.value, dict)}
        assert str(found) == str(plain) and not any(each.fault for each in entries)  # nan is nan


def test_a_file_of_this_version_is_read_without_tomllib(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in VALUES if name != "system"]
    for name in names:
        settingsfile.change(file, SETTINGS[name], VALUES[name][0])
    monkeypatch.setitem(sys.modules, "tomllib", None)
    settingsfile._read.cache_clear()
    assert list(settingsfile.read(file).texts) == names


# --- the command ------------------------------------------------------------------------------------


def test_the_list_fits_narrow_terminals(file: Path) -> None:
    shell = f"stty cols 80 2>/dev/null; {sys.executable} -m ktcli config list"
    done = subprocess.run(
        ["script", "-qec", shell, "/dev/null"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )  # fmt: skip
    lines = done.stdout.replace("\r", "").splitlines()
    assert lines[0].startswith("SETTING") and max(map(len, lines[:-2])) <= 80


def test_a_folder_that_cannot_be_made_names_the_variable_of_the_settings_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.parent.write_text("a file, not a folder")
    code, _, err = kt(capsys, "set", "threads", "2")
    assert code != 0 and "export KT_CONFIG=" in err and "KT_HOME" not in err


def test_names_are_found_as_variable_and_option_too(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kt(capsys, "set", "KT_MAX_TOKENS", "5")[0] == 0
    assert kt(capsys, "get", "--", "--max-tokens")[1] == "5\n"
    code, _, err = kt(capsys, "get", "thread")
    assert code == 3 and "did you mean: threads" in err
    code, _, err = kt(capsys, "set", "isa", "avx2")
    assert code == 2 and "KT_ISA=" in err


def test_edit_needs_a_terminal(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = kt(capsys, "edit")
    assert code == 2 and str(file) in err and not file.exists()


def test_edit_opens_the_editor_and_tells_what_is_wrong_afterwards(file: Path) -> None:
    """In a real terminal, with an editor that adds a line."""
    editor = file.parent.parent / "editor"
    editor.write_text("#!/bin/sh\necho 'threads = 0' >> \"$1\"\n")
    editor.chmod(0o755)
    done = subprocess.run(
        ["script", "-qec", f"{sys.executable} -m ktcli config edit", "/dev/null"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env={**os.environ, "VISUAL": str(editor)},
    )  # fmt: skip
    assert done.returncode == 0 and "threads is '0', which is not" in done.stdout
    assert file.read_text().startswith(settingsfile.HEADING)


def test_the_library_folder_has_the_name_that_people_give_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KT_HOME", raising=False)
    monkeypatch.setenv("KT_CONFIG", str(tmp_path / "config.toml"))
    assert main(["config", "set", "library", str(tmp_path / "models")]) == 0
    assert main(["config", "get", "home"]) == 0
    assert str(tmp_path / "models") in capsys.readouterr().out
