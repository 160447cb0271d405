"""`kt cache`, and what `kt chat` leaves for the next process: as a user meets them."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from packs import pretend_pack
from store.page_labels import conversation, opened, put, shared

from ktcli.assembly.kvplaces import MooncakePlace, SharedStore
from ktcli.commands.cli.kv_store import KvStoreOptions, asked_store
from ktcli.errors import Busy, gib
from ktcli.main import main
from ktcli.store import experience, pagefolder
from ktcli.store.pagefile import Space
from ktcli.store.pagefolder import PageFolder

Capture = pytest.CaptureFixture[str]
PROMPT = "Please count: " + ", ".join(f"page {n}" for n in range(60))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for name in (
        "KT_ISA", "KT_NUMA", "KT_THREADS", "KT_TILE_MIN", "KT_DEBUG", "KT_CACHE", "KT_KV_STORE", "KT_KV_STORE_SIZE",
        "KT_KV_INSECURE",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def folder(home: Path) -> PageFolder:
    """The library's pages, with some of a model "m"."""
    home.mkdir()
    made = PageFolder(home / "kv")
    store = opened(made)
    put(store, conversation("a", 3, states=3))
    store.close()
    return made


def pages(home: Path) -> list[Path]:
    return sorted((home / "kv").glob("*/*.pages"))


def document(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    """The one document that a command prints with --json."""
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


# --- kt cache ---------------------------------------------------------------------------------------


def test_without_pages(home: Path, capsys: Capture) -> None:
    assert document(["cache", "ls"], capsys) == {"folder": str(home / "kv"), "models": []}
    assert document(["cache", "du"], capsys)["size_bytes"] == 0
    assert document(["cache", "verify"], capsys) == {"ok": True, "files": 0, "bad": {}}
    assert document(["cache", "rm"], capsys) == {"removed": [], "freed_bytes": 0}
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == "There are no KV pages.\n"
    assert not home.exists()


def test_what_there_is(
    folder: PageFolder, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = pages(folder.path.parent)
    (model,) = document(["cache", "ls"], capsys)["models"]
    expected = {"model": "m", "layout": "cpu", "tokens": 192, "pages": 3, "states": 1, "files": 1}
    assert expected.items() <= model.items() and model["size_bytes"] == path.stat().st_size
    assert main(["cache", "ls"]) == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()] == [
        ["MODEL", "ID", "LAYOUT", "TOKENS"],
        ["m", model["id"], "cpu", "192"],
    ]
    found = document(["cache", "du"], capsys)
    assert found["size_bytes"] == path.stat().st_size < found["quota_bytes"]
    monkeypatch.setenv("KT_CACHE", "1.5G")
    assert document(["cache", "du"], capsys)["quota_bytes"] == 3 << 29


def test_damage_is_found_said_and_removed(folder: PageFolder, capsys: Capture) -> None:
    (path,) = pages(folder.path.parent)
    assert main(["cache", "verify"]) == 0
    assert "1 of 1 files are intact" in capsys.readouterr().out
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    found = document(["cache", "verify"], capsys, 5)
    assert not found["ok"] and "checksum" in found["bad"][str(path)] and not path.exists()
    assert document(["cache", "verify"], capsys)["ok"]


def test_damage_that_cannot_be_removed_is_not_said_to_be(
    folder: PageFolder, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (path,) = pages(folder.path.parent)
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["cache", "verify"]) == 5
    (damage, summary) = capsys.readouterr().out.splitlines()
    assert "cannot be removed: Permission denied" in damage and summary.startswith("0 of 1")


def test_pages_are_removed_by_name_and_all_at_once(folder: PageFolder, capsys: Capture) -> None:
    assert main(["cache", "rm", "nobody", "--yes"]) == 3
    assert "there are no KV pages of nobody" in capsys.readouterr().err
    assert main(["cache", "rm", "m"]) == 2  # no terminal to ask on
    assert "--yes" in capsys.readouterr().err and pages(folder.path.parent)
    assert document(["cache", "rm", "m", "--yes"], capsys)["freed_bytes"] > 3000
    assert not pages(folder.path.parent)
    (folder.path / "kt-kv.json").write_text('{"kt_kv": 7}')
    assert document(["cache", "rm", "--yes"], capsys)["freed_bytes"] > 0
    assert list(folder.path.iterdir()) == []


def test_a_store_of_another_version_is_one_sentence(folder: PageFolder, capsys: Capture) -> None:
    (folder.path / "kt-kv.json").write_text('{"kt_kv": 2}')
    for verb in ("ls", "du", "verify"):
        assert main(["cache", verb]) == 1
        said = capsys.readouterr().err
        assert "version 2, not version 1" in said and "kt cache rm" in said
    assert pages(folder.path.parent)


MARKS = [
    "",
    "[]",
    "{",
    '{"kt_kv": true}',
    '{"kt_kv": "1"}',
    '{"kt_kv": null}',
    "\0" * 99,
    "[" * 9999,
]


@pytest.mark.parametrize("mark", [*MARKS, None])
def test_a_store_that_nonsense_marks_is_one_sentence_and_stays(
    mark: str | None, folder: PageFolder, home: Path, capsys: Capture
) -> None:
    path = folder.path / "kt-kv.json"
    path.unlink()
    path.mkdir() if mark is None else path.write_text(mark)
    for verb in ("ls", "du", "verify"):
        assert main(["cache", verb]) == 1
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 2 and "have an unknown version, not version 1" in said[0]
    assert len(pages(home)) == 1


def test_without_a_quota_nothing_is_kept(
    folder: PageFolder, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_CACHE", "0")
    assert document(["cache", "du"], capsys)["quota_bytes"] == 0
    assert main(["cache", "du"]) == 0
    assert "(no new ones are written)" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["much", "-1", "1e9", "10 Q", "1.2.3G", "٣G", "nan", "G"])
def test_a_quota_of_nonsense_is_refused(
    text: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_CACHE", text)
    for arguments in (["cache", "du"], ["chat", "kt-mini", "hi"]):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: KT_CACHE is {text!r}, which is not a size")
        assert len(said.splitlines()) == 2


# --- kt cache --store -------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A shared folder with pages of two writers, and nothing in the library."""
    for writer in "ab":
        made = opened(shared(tmp_path / "store", writer))
        put(made, conversation(writer, 3))
        made.close()
    return tmp_path / "store"


def test_a_shared_folder_is_shown_with_its_writers(
    store: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ["--store", str(store)]
    (model,) = document(["cache", "ls", *here], capsys)["models"]
    assert (model["tokens"], model["files"], model["read_tokens"]) == (384, 2, 0)
    monkeypatch.setenv("KT_KV_STORE_SIZE", "2G")
    found = document(["cache", "du", *here], capsys)
    assert found["folder"] == str(store) and found["quota_bytes"] == 2 << 30
    assert [each["writer"] for each in found["writers"]] == ["a", "b"]
    assert sum(each["size_bytes"] for each in found["writers"]) == found["size_bytes"]
    assert main(["cache", "du", *here]) == 0
    said = capsys.readouterr().out
    assert "the limit of each writer is 2.0 GiB" in said and "WRITER" in said
    assert document(["cache", "ls"], capsys)["models"] == []


def test_tokens_that_were_read_are_counted_by_tier(
    store: Path, home: Path, capsys: Capture
) -> None:
    home.mkdir()
    (space,) = (each.name for each in store.iterdir() if each.is_dir())
    for _ in range(2):
        experience.add_restored(space, {"disk": 0, "store": 64})
    (model,) = document(["cache", "ls", "--store", str(store)], capsys)["models"]
    assert model["read_tokens"] == 128
    (home / "kv.json").write_text(json.dumps({space: {"restored_tokens": {"store": "many"}}}))
    (model,) = document(["cache", "ls", "--store", str(store)], capsys)["models"]
    assert model["read_tokens"] == 0


def test_a_shared_folder_is_verified_and_emptied(store: Path, capsys: Capture) -> None:
    here = ["--store", str(store)]
    assert document(["cache", "verify", *here], capsys)["files"] == 2
    path = sorted(store.glob("*/*.pages"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in document(["cache", "verify", *here], capsys, 5)["bad"] and not path.exists()
    assert main(["cache", "rm", *here]) == 2  # no terminal to ask on
    assert document(["cache", "rm", "m", *here, "--yes"], capsys)["freed_bytes"] > 3000
    assert document(["cache", "rm", *here, "--yes"], capsys)["freed_bytes"] == 0
    assert [each.name for each in store.iterdir()] == ["kt-kv.json"]
    (store / "kt-kv.json").write_text('{"kt_kv": 2}')
    assert main(["cache", "verify", *here]) == 1
    assert "kt cache rm --store" in capsys.readouterr().err
    document(["cache", "rm", *here, "--yes"], capsys)
    assert document(["cache", "verify", *here], capsys)["ok"]


def test_files_of_others_that_cannot_be_read_are_not_removed(
    store: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    before = sorted(store.glob("*/*.pages"))
    monkeypatch.setattr(pagefolder, "read_table", refuse)
    bad = document(["cache", "verify", "--store", str(store)], capsys, 5)["bad"]
    assert bad == {str(each): "cannot be read: Permission denied" for each in before}
    assert sorted(store.glob("*/*.pages")) == before


def test_what_is_no_shared_folder_is_one_sentence(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    cases = {"none": "No such file", "mine": "there is no KV store in"}
    for name, words in cases.items():
        for verb in (["ls"], ["du"], ["verify"], ["rm", "--yes"]):
            assert main(["cache", *verb, "--store", str(tmp_path / name)]) == 1
            assert words in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kv-store", "store"], "not an absolute path"),
        (["--kv-store", "redis://here"], "not an absolute path"),
        (["--kv-store", "/tmp/x", "--kv-store-size", "much"], "not a size"),
        (
            ["--kv-store", "mooncake://h:1", "--kv-store-size", "1G"],
            "has no meaning for a Mooncake",
        ),
        (["--insecure"], "has no meaning without a Mooncake store"),
        (["--kv-store", "/tmp/x", "--insecure"], "has no meaning without a Mooncake store"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_store_of_nonsense_is_refused(
    command: str, words: list[str], said: str, capsys: Capture
) -> None:
    assert main([command, "kt-mini", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[0].startswith(("error: --kv-store", "error: --insecure"))
        and said in lines[0]
        and len(lines) == 2
    )


def test_a_setting_names_the_store_as_well(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_KV_STORE", "mooncake://here:1")
    assert asked_store(KvStoreOptions()) == MooncakePlace("mooncake://here:1")
    assert asked_store(KvStoreOptions(insecure=True)) == MooncakePlace("mooncake://here:1", True)
    monkeypatch.setenv("KT_KV_INSECURE", "on")
    assert asked_store(KvStoreOptions("mooncake://x:1")) == MooncakePlace("mooncake://x:1", True)
    assert asked_store(KvStoreOptions("off")) is None
    monkeypatch.setenv("KT_KV_STORE", "~/store")
    monkeypatch.setenv("KT_KV_STORE_SIZE", "1G")
    assert asked_store(KvStoreOptions()) == SharedStore(Path("~/store").expanduser(), 1 << 30)
    assert asked_store(KvStoreOptions("/mnt/kv", "2G")) == SharedStore(Path("/mnt/kv"), 2 << 30)
    assert main(["chat", "kt-mini", "hi", "--no-kv-cache", "--kv-store", "/mnt/kv"]) == 2
    assert "--no-kv-cache and --kv-store cannot be used together" in capsys.readouterr().err


# --- kt rm ------------------------------------------------------------------------------------------


def stored(folder: PageFolder, model: str, space: str = "") -> int:
    """Stores a page of a conversion; returns the bytes of its file."""
    store = opened(
        folder, space=Space(sha256((space or model).encode()).digest(), "cpu"), model=model
    )
    put(store, conversation(model, 1))
    store.close()
    return sum(each.size_bytes for each in folder.stored() if each.conversion == model)


def conversions(folder: PageFolder) -> list[str]:
    return sorted(each.conversion for each in folder.stored())


def test_with_a_model_its_pages_go_and_no_others(
    folder: PageFolder, home: Path, capsys: Capture
) -> None:
    for name in ("a@int4-int8", "a@int8-int8", "ab@int4-int8"):
        experts = name.partition("@")[2].partition("-")[0]
        pretend_pack(home / "packs" / name, experts, files={"config.json": name.encode()})
        stored(folder, name)
    stored(folder, "a@bf16-bf16")  # a conversion that was removed by hand
    size = stored(folder, "a@int4-int8", "with another context")
    assert main(["cache", "du"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "MODEL", "m", "a@int4-int8", "a@bf16-bf16", "a@int8-int8", "ab@int4-int8",
    ]  # fmt: skip
    assert main(["rm", "a@int4-int8"]) == 2  # no terminal to ask on
    said = capsys.readouterr().err
    assert f"the KV pages of a@int4-int8 ({gib(size)})" in said and len(conversions(folder)) == 6
    found = document(["rm", "a@int4-int8", "--yes"], capsys)
    assert found["removed"] == ["a@int4-int8"] and found["kv_pages_bytes"] >= size
    assert conversions(folder) == ["a@bf16-bf16", "a@int8-int8", "ab@int4-int8", "m"]
    document(["rm", "a", "--yes"], capsys)
    assert conversions(folder) == ["ab@int4-int8", "m"]
    # Of a model that is gone already.
    assert document(["rm", "m", "--yes"], capsys)["removed"] == []
    assert conversions(folder) == ["ab@int4-int8"]


def test_while_somebody_writes_pages_nothing_is_removed(
    folder: PageFolder, home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = pretend_pack(home / "packs" / "m@int4-int8")
    stored(folder, "m@int4-int8")
    monkeypatch.setattr(PageFolder.lock, "__defaults__", (0.0,))
    with folder.lock():
        assert main(["rm", "m", "--yes"]) == Busy.exit_code
    assert "writing KV pages" in capsys.readouterr().err
    assert pack.is_dir() and conversions(folder) == ["m", "m@int4-int8"]


def test_pages_that_an_equal_conversion_can_use_stay(
    folder: PageFolder, home: Path, capsys: Capture
) -> None:
    for name in ("a@int4-int8", "b@int4-int8"):
        pretend_pack(home / "packs" / name)
    stored(folder, "a@int4-int8")
    document(["rm", "a", "--yes"], capsys)
    assert conversions(folder) == ["a@int4-int8", "m"]
    document(["rm", "b", "--yes"], capsys)
    assert conversions(folder) == ["a@int4-int8", "m"]  # noted under another name: kt cache rm a
    document(["rm", "a", "--yes"], capsys)
    assert conversions(folder) == ["m"]


def test_pages_of_unknown_origin_and_of_other_versions_stay(
    folder: PageFolder, home: Path, capsys: Capture
) -> None:
    pretend_pack(home / "packs" / "m@int4-int8")
    (about,) = folder.path.glob("*/about.json")
    for text in ("", "[]", '{"model": 7}', '{"model": ["m"]}'):
        about.write_text(text)
        assert document(["rm", "m", "--yes"], capsys, 3 if text else 0) is not None
    about.write_text('{"model": "m"}')
    (folder.path / "kt-kv.json").write_text('{"kt_kv": 7}')
    assert main(["rm", "m", "--yes"]) == 3
    assert len(pages(home)) == 1


# --- kt chat ----------------------------------------------------------------------------------------


def chat(home: Path, *options: str, **environment: str) -> tuple[dict[str, Any], str]:
    """One `kt chat --json` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "ktcli", "chat", "kt-mini", PROMPT, "-n", "8", "--greedy", "--json", *options],
        env={**os.environ, "KT_HOME": str(home), "KT_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_new_process_goes_on_where_the_last_one_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def chat_here() -> tuple[dict[str, Any], str]:
        """The same in this process, where another shows no more."""
        monkeypatch.setenv("KT_THREADS", "1")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        words = ["chat", "kt-mini", PROMPT, "-n", "8", "--greedy", "--json"]
        assert main(words) == 0
        said = capsys.readouterr()
        return json.loads(said.out), said.err

    without, _ = chat(home, "--no-kv-cache")
    assert not (home / "kv").exists()
    first, _ = chat(home)
    (path,) = pages(home)
    second, said = chat(home)
    n = first["stats"]["prompt_tokens"]
    assert first["stats"]["reused_tokens"] == 0 and said == ""
    assert second["stats"]["reused_tokens"] == (n - 1) // 64 * 64 > 0
    assert first["ids"] == second["ids"] == without["ids"]
    assert pages(home) == [path]  # and nothing was written twice
    # The same with pages that are damaged, and with no room for any.
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\xaa")
    third, said = chat(home)
    assert third["ids"] == first["ids"] and third["stats"]["reused_tokens"] < n // 64 * 64
    assert said.count("warning:") == 1 and f"{path}; it is removed" in said
    assert path.read_bytes() == whole  # written again
    left = pages(home)
    monkeypatch.setenv("KT_CACHE", "0")
    off, _ = chat_here()
    monkeypatch.delenv("KT_CACHE")
    assert pages(home) == left  # what is there stays until somebody removes it
    assert off["ids"] == first["ids"] and off["stats"]["reused_tokens"] == 0
    (home / "kv" / "kt-kv.json").write_text('{"kt_kv": 2}')
    left, said = chat_here()
    assert left["ids"] == first["ids"] and left["stats"]["reused_tokens"] == 0
    assert said.count("warning:") == 1 and "version 2" in said


def test_removing_everything_is_asked_on_a_terminal(folder: PageFolder) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ktcli", "cache", "rm"],
        env={**os.environ, "KT_HOME": str(folder.path.parent)},
        stdin=terminal, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    os.write(controller, b"n\n")
    assert process.wait(60) == 1
    os.close(controller)
    assert pages(folder.path.parent)
