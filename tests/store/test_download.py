"""Pulling from a hub on this machine: what is taken, what is recorded, and every way it can fail."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store.fake_hub import COMMIT, Hub, serve

from ktcli import manifest, smallfiles
from ktcli.errors import BadCheckpoint, Busy, HubError, NotEnoughDisk, NotFound, UsageError
from ktcli.main import main
from ktcli.store import contents, download, integrity, library, places, scan
from ktcli.store.download import SCRATCH, pull, wanted
from ktcli.store.entry import Entry
from ktcli.store.hubs import HuggingFace, RemoteFile, Snapshot
from ktcli.store.hubsearch import Hit, read_configs, search_hub
from ktcli.store.places import EntryKind
from ktcli.store.reference import parse
from ktcli.store.tokens import is_same_server

WEIGHTS = bytes(range(256)) * 4096 * 2  # 2 MiB


class Silent:
    """A watcher that counts."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, int]] = []
        self.advanced = 0

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None:
        self.parts.append((what, total_bytes))

    def advance(self, n_bytes: int) -> None:
        self.advanced += n_bytes

    def end(self) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", running.url)
        running.repositories["org/tiny"] = {
            "config.json": b'{"model_type": "test"}',
            "tokenizer.json": b"{}",
            "chat_template.jinja": b"hello",
            "LICENSE": b"free",
            "model-00001-of-00002.safetensors": WEIGHTS,
            "model-00002-of-00002.safetensors": WEIGHTS[::-1],
            "modeling_tiny.py": b"import os; os.abort()",
            "pytorch_model.bin": b"pickle",
            "consolidated.safetensors": b"again",
            "original/params.json": b"{}",
            "kt-source.json": b'{"source": {}, "files": []}',
            "kt.json": b"{}",
        }
        yield running


def get(name: str) -> Entry:
    return pull(parse(name), Silent())


TAKEN = {
    "config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "LICENSE",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}


def test_a_pull_that_was_killed_while_it_cleared_up_is_cleared_up_after(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            get("org/tiny")
    path = library.resolve("org/tiny", EntryKind.CHECKPOINT).path
    assert (path / SCRATCH).is_dir()
    hub.requests.clear()
    assert get("org/tiny").complete and not hub.requests
    assert not [each for each in path.iterdir() if each.is_dir() or each.name == scan.PULLING]


@pytest.mark.parametrize("prefix", ["", "hf:", "ms:"])
def test_a_pull_takes_the_data_and_records_it(hub: Hub, prefix: str) -> None:
    entry = get(f"{prefix}org/tiny")
    assert {path.name for path, _ in contents.walk(entry.path)} == TAKEN | {manifest.CHECKPOINT}
    record = manifest.read(entry.path / manifest.CHECKPOINT)
    assert record is not None
    assert {file.name for file in record.files} == TAKEN
    for file in record.files:
        data = (entry.path / file.name).read_bytes()
        assert data == hub.repositories["org/tiny"][file.name]
        assert (file.size_bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert record.repository == "org/tiny"
    assert record.revision == (COMMIT if prefix != "ms:" else "master")
    assert entry.complete
    assert entry.kind is EntryKind.CHECKPOINT


@pytest.mark.parametrize("prefix", ["hf:", "ms:"])
def test_what_says_how_an_embedding_model_pools_is_taken(hub: Hub, prefix: str) -> None:
    names = "modules.json 1_Pooling/config.json config_sentence_transformers.json".split()
    hub.repositories["org/tiny"] |= dict.fromkeys(names, b"{}")
    hub.repositories["org/tiny"] |= {"2_Dense/config.json": b"{}", "1_Pooling/a.py": b"import os"}
    entry = get(f"{prefix}org/tiny")
    found = {str(path.relative_to(entry.path)) for path, _ in contents.walk(entry.path)}
    assert found == {*TAKEN, *names, manifest.CHECKPOINT} and entry.complete
    (entry.path / names[1]).write_bytes(b"[]")
    assert main(["verify", f"{prefix}org/tiny", "--repair", "--quiet"]) == 0
    assert (entry.path / names[1]).read_bytes() == b"{}"


@pytest.mark.parametrize("commit", ["\x1b]52;c;ZXZpbA==\x07", "../../x", "g" * 40, "", "F" * 40])
def test_a_commit_that_is_none_is_not_kept(hub: Hub, commit: str) -> None:
    hub.facts = {"sha": commit}
    record = manifest.read(get("org/tiny").path / manifest.CHECKPOINT)
    assert record is not None and record.revision == ""


def test_a_slash_behind_a_mirror_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example/hf//")
    assert HuggingFace().endpoint == "http://mirror.example/hf"


def test_what_a_hub_calls_by_no_name_is_no_file(hub: Hub) -> None:
    files = [
        {"rfilename": name, "size": len(data)}
        for name, data in hub.repositories["org/tiny"].items()
    ]
    odd = [
        {"rfilename": None, "size": 3},
        {"rfilename": 7},
        {"rfilename": "LICENSE.b", "size": "9"},
    ]
    hub.facts = {"siblings": [*odd, {"rfilename": ""}, *files], "tags": ["license:\x1b[31mred"]}
    found = HuggingFace().look("org/tiny", "")
    assert len(found.files) == len(files) + 1 and found.license == ""
    assert get("org/tiny").complete


@pytest.mark.parametrize("prefix", ["hf", "ms"])
def test_a_token_stays_with_its_server(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """Not with its host alone: whoever listens at another port is somebody else."""
    for name in ("HF_TOKEN", "MODELSCOPE_API_TOKEN"):
        monkeypatch.setenv(name, "hf_secret")
    hub.repositories["org/tiny"] = {
        name: data for name, data in hub.repositories["org/tiny"].items() if name in TAKEN
    }
    with serve() as other:
        other.repositories = hub.repositories
        hub.moved_to = other.url
        assert get(f"{prefix}:org/tiny").complete
        search_hub(prefix, "tiny", 3)
        list(read_configs([Hit(prefix, "org/tiny")], 1000))
        assert any("hf_secret" in each for each in hub.secrets)
        assert other.requests and not other.secrets


def test_servers_are_told_apart_by_scheme_host_and_port() -> None:
    assert is_same_server("https://a.b/x", "https://a.b:443/y?z")
    for other in ("http://a.b", "https://a.b:444", "https://b.b", "https://a.b:x", "a.b"):
        assert not is_same_server("https://a.b", other)
    assert not is_same_server("https://a.b:x", "https://a.b:x")


def test_a_second_pull_asks_nobody(hub: Hub) -> None:
    first = get("org/tiny")
    hub.requests.clear()
    assert get("org/tiny") == first
    assert hub.requests == []


def test_a_revision_is_another_model(hub: Hub) -> None:
    assert get("org/tiny@main").path != get("org/tiny").path
    assert library.resolve("org/tiny@main").name == "org--tiny--main"


def test_progress_covers_every_byte(hub: Hub) -> None:
    watcher = Silent()
    pull(parse("org/tiny"), watcher)
    size = sum(len(hub.repositories["org/tiny"][name]) for name in TAKEN)
    assert [total for _, total in watcher.parts] == [size]
    assert watcher.advanced == size


def test_a_file_that_arrives_damaged_is_fetched_again(hub: Hub) -> None:
    bad = "model-00002-of-00002.safetensors"
    hub.corrupt.add(bad)
    with pytest.raises(HubError, match=r"model-00002.* arrived damaged"):
        get("org/tiny")
    assert library.find("org/tiny") is None
    hub.corrupt.clear()
    hub.requests.clear()
    assert get("org/tiny").complete
    assert hub.fetched(bad) == 1
    assert hub.fetched("model-00001-of-00002.safetensors") == 0


def test_a_connection_that_breaks_is_taken_up_again(hub: Hub) -> None:
    hub.cut_after["model-00001-of-00002.safetensors"] = 1 << 20
    try:
        entry = get("org/tiny")
    except HubError:
        entry = get("org/tiny")
    assert (entry.path / "model-00001-of-00002.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("prefix", ["", pytest.param("ms:", marks=pytest.mark.thorough)])
def test_ctrl_c_stops_at_once_and_the_next_pull_continues(hub: Hub, prefix: str) -> None:
    name = "model-00002-of-00002.safetensors"
    hub.repositories["org/tiny"][name] = os.urandom(8 << 20)
    hub.stall_after[name] = 2 << 20
    # Of a pull that was begun the headers are not looked at again; this model has none.
    begun = places.checkpoint_path(parse(f"{prefix}org/tiny").name)
    begun.mkdir(parents=True)
    (begun / scan.PULLING).write_text(f"{prefix or 'hf:'}org/tiny")
    command = [sys.executable, "-m", "ktcli", "pull", f"{prefix}org/tiny"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    home = Path(os.environ["KT_HOME"])
    # What the hub has sent and nobody has read yet would be sent again.
    while sum(part.stat().st_size for part in home.rglob(f"{name}.part")) < max(
        2 << 20, hub.sent[name]
    ):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    # The hub stays silent: a client that waited for the file would never end.
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"continue with: kt pull {prefix}org/tiny" in said
    assert "Traceback" not in said
    partial = library.matching(f"{prefix}org/tiny")[0]
    assert not partial.complete
    assert partial.again == f"kt pull {prefix or 'hf:'}org/tiny"
    hub.stall_after.clear()
    hub.goes_on.set()
    entry = get(f"{prefix}org/tiny")
    assert {path.name for path, _ in contents.walk(entry.path)} == TAKEN | {manifest.CHECKPOINT}
    assert hub.sent.total() <= 1.05 * entry.size_bytes


def test_files_that_are_complete_are_not_read_again(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = "model-00002-of-00002.safetensors"
    hub.corrupt.add(bad)
    with pytest.raises(HubError):
        get("org/tiny")
    hub.corrupt.clear()
    hub.requests.clear()
    monkeypatch.setattr(integrity, "digest", lambda path, advance: pytest.fail(f"reads {path}"))
    get("org/tiny")
    assert [line for line in hub.requests if "resolve" in line] == [
        f"GET /org/tiny/resolve/{COMMIT}/{bad}"
    ]


@pytest.mark.parametrize("prefix", ["", "ms:"])
def test_a_damaged_file_of_a_checkpoint_is_fetched_again_alone(hub: Hub, prefix: str) -> None:
    entry = get(f"{prefix}org/tiny")
    found = manifest.read(entry.path / manifest.CHECKPOINT)
    assert found is not None
    bad = entry.path / "model-00002-of-00002.safetensors"
    bad.write_bytes(WEIGHTS)
    hub.sent.clear()
    hub.corrupt.add(bad.name)
    with pytest.raises(HubError, match="arrived damaged"):
        download.refetch(entry.path, found, [bad.name], Silent())
    assert bad.read_bytes() == WEIGHTS  # what is there stays until something better is
    hub.corrupt.clear()
    download.refetch(entry.path, found, [bad.name], Silent())
    assert bad.read_bytes() == WEIGHTS[::-1]
    bad.write_bytes(WEIGHTS)
    assert main(["verify", f"{prefix}org/tiny", "--repair", "--quiet"]) == 0
    assert bad.read_bytes() == WEIGHTS[::-1]
    assert set(hub.sent) == {bad.name}
    assert {path.name for path, _ in contents.walk(entry.path)} == TAKEN | {manifest.CHECKPOINT}


# what goes wrong: status, Hugging Face's code → our error and a word of its sentence
FAULTS = {
    "no repository": (404, "RepoNotFound", NotFound, "no repository org/tiny"),
    "private": (401, "RepoNotFound", NotFound, "private"),
    "gated": (403, "GatedRepo", HubError, "licence"),
    "no revision": (404, "RevisionNotFound", NotFound, "no revision"),
    "broken": (500, "", HubError, "error 500"),
    "busy": (429, "", HubError, "error 429"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_answers_of_the_hub_become_sentences(
    hub: Hub, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.status, hub.error_code, kind, word = FAULTS[fault]
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between a client's own attempts
    with pytest.raises(kind, match=word) as caught:
        get("org/tiny@main")
    assert caught.value.hint
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("prefix", ["", "ms:"])
def test_a_repository_that_is_not_there_gets_the_nearest(hub: Hub, prefix: str) -> None:
    with pytest.raises(NotFound) as caught:
        get(f"{prefix}Qwen/Qwen3-30B-A38")
    assert f"did you mean: {prefix}Qwen/Qwen3-30B-A3B" in caught.value.hint
    with pytest.raises(NotFound) as caught:
        get(f"{prefix}org/nothing-like-it")
    assert "kt search nothing-like-it --hub" in caught.value.hint


@pytest.mark.parametrize("said", ["", "hub.local:80", "https://"])
@pytest.mark.parametrize(
    ("prefix", "variable"), [("", "HF_ENDPOINT"), ("ms:", "MODELSCOPE_ENDPOINT")]
)
def test_an_address_that_is_none_is_told_by_its_variable(
    prefix: str, variable: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    monkeypatch.setenv(variable, said)
    with pytest.raises(UsageError, match=f"{variable} is '{said}'") as caught:
        get(f"{prefix}org/tiny")
    assert f"unset {variable}" in caught.value.hint


@pytest.mark.parametrize("prefix", ["", "ms:"])
def test_offline_is_one_sentence(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(HubError, match="cannot get org/tiny from") as caught:
        get(f"{prefix}org/tiny")
    assert "check the network" in caught.value.hint
    assert "Errno" not in str(caught.value)


def test_too_little_space_is_said_before_the_first_byte(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktcli.smallfiles.free_bytes", lambda folder: download.SPARE_BYTES + 1000)
    with pytest.raises(NotEnoughDisk, match="only 256 MiB is free"):
        get("org/tiny")
    assert hub.sent == {}
    assert not any(entry.managed for entry in library.entries())


def test_a_second_process_is_told_who_is_pulling(hub: Hub) -> None:
    said = rf"process {os.getpid()} \(pulling org--tiny\)"
    with (
        smallfiles.lock(places.lock_path("org--tiny"), "pulling org--tiny"),
        pytest.raises(Busy, match=said),
    ):
        get("org/tiny")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["config.json", "pytorch_model.bin"], r"no safetensors weights, only \.bin files"),
        (["config.json", "model.gguf"], r"no safetensors weights, only \.gguf files"),
        (["model.safetensors"], "no config.json"),
        (["config.json", "original/model.safetensors"], "no safetensors weights"),
        ([], "no safetensors weights"),
    ],
)
def test_a_repository_without_a_model(names: list[str], sentence: str) -> None:
    files = tuple(RemoteFile(name, 1) for name in names)
    with pytest.raises(BadCheckpoint, match=sentence):
        wanted(Snapshot("hf", "org/tiny", "main", files))


def test_hostile_file_names_are_not_taken() -> None:
    names = [
        "../config.json",
        "/etc/x.json",
        "a/b.json",
        "x\n.json",
        "kt.json",
        "kt-source.json",
        "..",
        "a b.json",
    ]
    good = [RemoteFile("config.json", 1), RemoteFile("model.safetensors", 1)]
    files = (*good, *(RemoteFile(name, 1) for name in names))
    assert wanted(Snapshot("hf", "org/tiny", "main", files)) == tuple(good)


def test_a_name_without_a_repository_cannot_be_pulled(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no repository"):
        pull(parse("no-such-model"), Silent())


def test_the_hash_log_survives_being_cut(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    log = download._HashLog(tmp_path)
    log.note("a", "ff")
    with next((tmp_path / ".kt-pull").iterdir()).open("a") as stream:
        stream.write('["b", 3')
    assert download._HashLog(tmp_path).sha256("a") == "ff"
