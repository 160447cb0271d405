"""`kt route` with servers that follow a script and a program in the place of smg: asked, refused, started, watched."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from ports import free_port
from processes import is_gone
from server.routed import (
    FakeSmg,
    Reply,
    ScriptedServer,
    endless,
    install_fake,
    kt_server,
    models,
    scripted_server,
    silent,
)
from server.standins import Log
from waits import until

from ktcli.errors import ExitCode, KtError, NotFound, UsageError
from ktcli.main import main
from ktcli.server.process import discovery
from ktcli.server.router import asking, supervision
from ktcli.server.router import process as router_process
from ktcli.server.router.address import address_of
from ktcli.server.router.asking import facts_of
from ktcli.server.router.plan import RouterKeys, RouterPlace, plan_for
from ktcli.server.router.supervision import RouterSettings, RouterSupervisor
from ktcli.store import engines


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def smg() -> FakeSmg:
    return install_fake()


@pytest.fixture
def pair() -> Iterator[list[ScriptedServer]]:
    """Two servers of kt-mini."""
    with ExitStack() as held:
        yield [held.enter_context(scripted_server(kt_server())) for _ in range(2)]


# --- what servers say -----------------------------------------------------------------------------


def test_a_server_of_kt_says_everything() -> None:
    counted = b"kt_first_prompt_cache_hits_total 4000\nkt_first_prompt_cache_queries_total 10000\n"
    with scripted_server({**kt_server(streams=8), "/metrics": counted}) as server:
        found = facts_of(address_of(server.url), "KEY")
        assert server.seen[0] == ("/v1/models", "Bearer KEY")
    assert (found.model, found.context, found.streams) == ("kt-mini", 2048, 8)
    assert (found.common, found.program) == (0.4, "kt 0.1.0")


def test_of_several_models_the_servers_own_is_meant() -> None:
    replies = {**kt_server("b"), "/v1/models": models("a", "b")}
    with scripted_server(replies) as server:
        assert facts_of(address_of(server.url), "").model == "b"
        assert facts_of(address_of(server.url), "", "a").model == "a"
        with pytest.raises(UsageError, match="does not serve c; it has a, b"):
            facts_of(address_of(server.url), "", "c")
    with (
        scripted_server({"/v1/models": models("a", "b")}) as server,
        pytest.raises(UsageError, match="serves several models: a, b"),
    ):
        facts_of(address_of(server.url), "")


def test_servers_of_others_say_what_they_have() -> None:
    vllm = {
        "/v1/models": models("m", context=4096),
        "/metrics": b'vllm:inter_token_latency_seconds_sum{model_name="m"} 6.0\n'
        b'vllm:inter_token_latency_seconds_count{model_name="m"} 100\n',
    }
    rank = {"effective_max_running_requests_per_dp": 24, "last_gen_throughput": 3.5}
    info = {"max_running_requests": None, "dp_size": 2, "internal_states": [rank, rank]}
    sglang = {
        "/v1/models": models("m"),
        "/get_server_info": json.dumps(info).encode(),  # /server_info since 2026
        "/metrics": b'sglang:prompt_tokens_total{model_name="m"} 8000\n'
        b'sglang:cached_tokens_total{model_name="m",cache_source="device"} 1500\n'
        b'sglang:cached_tokens_total{model_name="m",cache_source="host"} 500\n',
    }
    alias = {"model_alias": "gpt", "total_slots": 2, "default_generation_settings": {"n_ctx": 1024}}
    row = {"id": "m.gguf", "owned_by": "llamacpp", "meta": {"n_ctx_train": 9999, "n_vocab": 5}}
    llama = {
        "/v1/models": json.dumps({"models": [{"name": "m.gguf"}], "data": [row]}).encode(),
        "/props": json.dumps(alias).encode(),
    }
    with ExitStack() as held:
        servers = [held.enter_context(scripted_server(each)) for each in (vllm, sglang, llama)]
        found = [facts_of(address_of(each.url), "") for each in servers]
    assert (found[0].context, found[0].streams, found[0].token_s) == (4096, None, 0.06)
    assert (found[1].streams, found[1].common, found[1].cached) == (48, None, 0.25)
    assert (found[2].model, found[2].context, found[2].streams) == ("m.gguf", 1024, 2)


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        ({}, "does not say which models it serves: HTTP 404"),
        ({"/v1/models": (500, b"x")}, "HTTP 500"),
        ({"/v1/models": (503, models("m"))}, "does not answer yet: HTTP 503"),
        ({"/v1/models": b"<html>"}, "it lists none"),
        ({"/v1/models": b'{"data": []}'}, "it lists none"),
        ({"/v1/models": b'{"data": [{"id": 3}]}'}, "it lists none"),
        ({"/v1/models": b"[" * 100_000}, "it lists none"),
        ({"/v1/models": b" " * (50 << 20)}, "its answer is too long"),
        ({"/v1/models": endless}, "did not finish its response in 3 s"),
        ({"/v1/models": lambda handler: None}, "no response from .*: "),
        ({"/v1/models": silent}, "no response from .*: timed out"),
        ({"/v1/models": (401, b"")}, "needs an API key"),
    ],
)
def test_a_server_that_cannot_be_used_is_said(
    replies: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said.endswith(("in 3 s", "timed out")):  # any other may take its time
        monkeypatch.setattr(asking, "ANSWER_S", 3.0)
    with (
        scripted_server(replies) as server,  # type: ignore[arg-type]
        pytest.raises(KtError, match=said) as caught,
    ):
        asking.facts_of(address_of(server.url), "")
    assert server.url in str(caught.value) and caught.value.hint


def test_what_makes_no_sense_beside_the_models_counts_as_not_said() -> None:
    replies = {"/v1/models": models("m", context=-3), "/props": b'{"total_slots": -4}'}
    more = {"/server_info": b"[" * 99, "/metrics": b"\x00" * 1000}
    with scripted_server({**replies, **more}) as server:
        found = facts_of(address_of(server.url), "")
    assert (found.model, found.context, found.streams, found.token_s) == ("m", None, None, None)


# --- the command ----------------------------------------------------------------------------------


def run(*words: str) -> int:
    return main(["route", *words])


def test_a_dry_run_shows_the_command_and_starts_nothing(
    smg: FakeSmg, pair: list[ScriptedServer], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:SECRET1\nbob:SECRET2\n")
    keys.chmod(0o600)
    words = [*(each.url for each in pair), "--api-key-file", str(keys), "--port", "8000"]
    assert run(*words, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "threshold  0.1 of a prompt: not learned yet" in shown
    assert "--port 8000" in shown and "--prometheus-port 8001" in shown and "SECRET" not in shown
    assert run(*words, "--dry-run", "--json", "--host", "0.0.0.0") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["url"] for each in found["servers"]] == [each.url for each in pair]
    assert found["command"][0] == "smg" and "SECRET" not in json.dumps(found)
    assert not (smg.package / "starts").exists()
    assert pair[0].seen[0] == ("/v1/models", "Bearer SECRET1")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "no server was given"),
        (["http://127.0.0.1:1/v1"], 2, "after the host"),
        (["http://a:b@127.0.0.1:1"], 2, "contains a user name or a password"),
        (["http://127.0.0.1:1", "http://127.0.0.1:1"], 2, "was given twice"),
        (["http://127.0.0.1:1", "--port", "9", "--metrics-port", "9"], 2, "are both 9"),
        (["http://127.0.0.1:1", "--host", "0.0.0.0"], 2, "reachable from other machines"),
        (["http://127.0.0.1:1"], 6, "no response from http://127.0.0.1:1: Connection refused"),
        (["http://127.0.0.1:1", "--dry-run", "--background"], 2, "cannot be used together"),
        (["--add", "http://a:1", "--remove", "http://a:1"], 2, "each take one server"),
        (["status"], 3, "no router of this library runs on port 11436"),
        (["--add", "http://a:1"], 3, "no router of this library runs on port 11436"),
    ],
)
def test_bad_input_is_one_sentence(
    smg: FakeSmg, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == code
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown and len(shown.splitlines()) <= 2


def test_two_models_and_two_contexts_are_refused(
    smg: FakeSmg, pair: list[ScriptedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    for replies in (kt_server("other"), kt_server(context=4096)):
        with scripted_server(replies) as third:
            assert run(pair[0].url, third.url) == 2
            shown = capsys.readouterr().err
            assert pair[0].url in shown and third.url in shown


@pytest.mark.parametrize("option", ["--api-key-file", "--control-key-file"])
def test_a_key_file_that_others_can_read_is_refused(
    smg: FakeSmg, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("SECRET")
    file.chmod(0o644)
    assert run("http://127.0.0.1:1", option, str(file)) == 2
    assert "other users can read the keys" in capsys.readouterr().err


def test_the_control_key_is_another_one(
    smg: FakeSmg, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("SECRET")
    file.chmod(0o600)
    both = ["--api-key-file", str(file), "--control-key-file", str(file)]
    assert run("http://127.0.0.1:1", *both) == 2
    assert "has a key that users have, too" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["--port", "--metrics-port"])
def test_a_port_in_use_is_said(
    smg: FakeSmg, which: str, pair: list[ScriptedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = free_port()
        ports = {"--port": other, "--metrics-port": free_port(), which: port}
        words = [word for name, each in ports.items() for word in (name, str(each))]
        assert run(pair[0].url, *words) == ExitCode.BUSY
    shown = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1 is already in use" in shown and f"kt route {which}" in shown


def test_without_smg_the_command_that_installs_it_is_said(
    pair: list[ScriptedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(pair[0].url, "--dry-run") == 3
    shown = capsys.readouterr().err
    assert "smg is not installed" in shown and "kt engine install smg" in shown


def test_smg_of_another_version_is_not_started(
    pair: list[ScriptedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    install_fake("1.12.0")
    assert run(pair[0].url, "--dry-run") == 3
    needed = engines.row_of("smg").version
    said = f"smg 1.12.0 is installed, and this kt needs version {needed}"
    assert said in capsys.readouterr().err


def test_a_unit_has_the_command_and_no_key(
    smg: FakeSmg, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("SECRET")
    file.chmod(0o600)
    words = ["http://a:1", "http://b:1", "--host", "0.0.0.0", "--api-key-file", str(file)]
    assert run(*words, "--print-unit") == 0
    text = capsys.readouterr().out
    assert "SECRET" not in text and "kt-route.service" in text and "kt pull" not in text
    assert "-- http://a:1 http://b:1" in text and f"--api-key-file={file}" in text


# --- the process ----------------------------------------------------------------------------------


def settings_of(servers: list[ScriptedServer], drain_s: int = 1) -> RouterSettings:
    facts = tuple(facts_of(address_of(each.url), "") for each in servers)
    place = RouterPlace("127.0.0.1", free_port(), free_port(), drain_s)
    engine = engines.require("smg")
    keys = RouterKeys((("default", "USERS"),), "CONTROL")
    return RouterSettings(engine, plan_for(facts), place, keys, facts, (), "kt-mini")


@contextmanager
def supervised(
    settings: RouterSettings, then: Callable[[RouterSupervisor], None], log: Log | None = None
) -> Iterator[tuple[RouterSupervisor, Log]]:
    """A router on this thread, which runs until `then`, on another one, has returned."""
    log, failed = log or Log(), []

    def act() -> None:
        try:
            then(router)
        except BaseException as error:
            failed.append(error)
        finally:
            router.stop()

    threads: list[threading.Thread] = []

    def ready() -> None:
        threads.append(threading.Thread(target=act))
        threads[0].start()

    router = RouterSupervisor(settings, log, ready)  # type: ignore[arg-type]
    router.run()
    for each in threads:
        each.join()
    if failed:
        raise failed[0]
    yield router, log


def test_a_router_runs_until_it_is_stopped(smg: FakeSmg, pair: list[ScriptedServer]) -> None:
    settings = settings_of(pair)
    with supervised(settings, lambda router: None) as (_, log):
        until(lambda: "smg: a warning of smg" in log.lines)
        assert smg.words[smg.words.index("--api-key") + 1] == "USERS"
        assert b"USERS" not in smg.seen and b"CONTROL" not in smg.seen
        assert is_gone(smg.pids[0])
        assert not any("SECURITY" in line for line in log.lines)


def test_servers_come_and_go_and_are_there_after_a_crash(
    smg: FakeSmg, pair: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_BACKOFF_S", 0.01)
    first, second = pair

    def act(router: RouterSupervisor) -> None:
        router.add(address_of(second.url))
        assert [each.url for each in router.client.workers()] == [first.url, second.url]
        elsewhere = address_of(second.url.replace("127.0.0.1", "localhost"))
        with pytest.raises(UsageError, match=f"the router has {second.url} already"):
            router.add(elsewhere)
        with scripted_server(kt_server("other")) as third:
            with pytest.raises(UsageError, match="does not serve kt-mini; it has other"):
                router.add(address_of(third.url))
            with pytest.raises(NotFound, match="does not route to"):
                router.remove(address_of(third.url))
        os.kill(router.pid, signal.SIGKILL)
        until(lambda: len(smg.pids) == 2 and router.client.readiness() is not None)
        assert [each.url for each in router.client.workers()] == [first.url, second.url]
        router.remove(address_of(first.url))
        with pytest.raises(UsageError, match=f"{second.url} is the router's only server"):
            router.remove(elsewhere)

    with supervised(settings_of([first]), act) as (router, log):
        assert router.restarts == 1
        assert any("ended by itself" in line and "signal 9" in line for line in log.lines)


def test_a_server_that_was_not_there_is_used_once_it_answers(
    smg: FakeSmg, pair: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "HEALTH_S", 0.05)
    later, replies = pair[1], pair[1].replies
    later.replies = {"/v1/models": lambda handler: None}
    settings = replace(settings_of(pair[:1]), absent=(address_of(later.url),))

    def act(router: RouterSupervisor) -> None:
        said: list[str] = router._listener.lines  # type: ignore[attr-defined]
        until(lambda: len(later.seen) > 1)
        assert router.absent == (later.url,)
        later.replies = replies
        until(lambda: len(router.servers) == 2)
        (smg.package / "ill").touch()
        until(lambda: any("its requests go to the other servers" in line for line in said))
        until(lambda: f"{later.url} answers now and is used" in said)

    with supervised(settings, act) as (router, _):
        assert router.absent == ()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (kt_server("other"), "does not serve kt-mini; it has other"),
        (kt_server(context=4096), "has a context of 2,048 tokens, and by now of 4,096"),
        ({"/v1/models": (401, b"")}, "refuses the API key"),
    ],
)
def test_a_server_that_changes_under_way_is_left_out_until_it_is_what_it_was(
    smg: FakeSmg,
    changed: dict[str, Reply],
    said: str,
    pair: list[ScriptedServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervision, "HEALTH_S", 0.05)
    monkeypatch.setattr(supervision, "CHECK_S", 0.0)
    first, second = pair
    replies = second.replies

    def act(router: RouterSupervisor) -> None:
        second.replies = changed
        until(lambda: router.absent == (second.url,))
        assert [each.url for each in router.client.workers()] == [first.url]
        first.replies, was = changed, first.replies  # the last one stays
        until(lambda: any("the router's only server" in line for line in log.lines))
        first.replies, second.replies = was, replies
        until(lambda: f"{second.url} answers now and is used" in log.lines)
        assert len(router.servers) == 2

    log = Log()
    with supervised(settings_of(pair), act, log):
        (line,) = [each for each in log.lines if each.endswith("is not used any more")]
        assert second.url in line and said in line


def test_a_server_that_hangs_holds_up_no_end(
    smg: FakeSmg, pair: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "HEALTH_S", 0.05)
    monkeypatch.setattr(asking, "ANSWER_S", 1000.0)
    hanging, over, waited = pair[1], threading.Event(), list[bool]()
    settings = replace(settings_of(pair[:1]), absent=(address_of(hanging.url),))
    hanging.replies = {"/v1/models": lambda handler: waited.append(over.wait(100))}
    with supervised(settings, lambda router: until(lambda: hanging.seen)):
        assert not waited  # it hangs still
    over.set()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("crash", r"smg .* ended at its start: the port is taken \(exit code 3\)"),
        ("traceback", r"ended at its start: RuntimeError: no such option \(exit code 1\)"),
    ],
)
def test_a_router_that_ends_at_its_start_says_why(
    smg: FakeSmg, how: str, said: str, pair: list[ScriptedServer]
) -> None:
    smg.does(how)
    with (
        pytest.raises(KtError, match=said),
        supervised(settings_of(pair), lambda router: None),
    ):
        pass
    assert is_gone(smg.pids[0])


def test_a_router_that_uses_no_server_is_given_up(
    smg: FakeSmg, pair: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "READY_S", 0.5)
    smg.does("unready")
    with (
        pytest.raises(KtError, match="could use none of its servers"),
        supervised(settings_of(pair), lambda router: None),
    ):
        pass
    assert all(map(is_gone, smg.pids))


@pytest.mark.thorough
def test_a_router_that_crashes_again_and_again_is_given_up(
    smg: FakeSmg, pair: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_BACKOFF_S", 0.01)
    smg.does("later")

    def act(router: RouterSupervisor) -> None:
        smg.dies()
        until(lambda: router._stops > 0)

    with (
        pytest.raises(KtError, match=r"out of file descriptors \(exit code 4\)"),
        supervised(settings_of(pair), act),
    ):
        pass
    assert len(smg.pids) == 5


def test_a_router_that_hangs_at_its_end_is_killed(
    smg: FakeSmg, pair: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_process, "SETTLE_S", 0)
    monkeypatch.setattr(router_process, "_SPARE_S", 0)
    smg.does("hang")
    with supervised(settings_of(pair), lambda router: None) as (_, log):
        assert "the router did not end by itself; it was killed" in log.lines
    assert is_gone(smg.pids[0])


def test_a_second_stop_ends_at_once(smg: FakeSmg, pair: list[ScriptedServer]) -> None:
    smg.does("hang")

    def act(router: RouterSupervisor) -> None:
        router.stop()
        until(lambda: any("Ctrl-C again" in line for line in router._listener.lines))  # type: ignore[attr-defined]

    with supervised(settings_of(pair, drain_s=600), act):
        assert is_gone(smg.pids[0])


# --- beside servers, in a process of its own ------------------------------------------------------


def kt(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ktcli", *words], capture_output=True, text=True, timeout=60
    )


def test_a_router_in_the_background_is_seen_asked_and_stopped(
    smg: FakeSmg, pair: list[ScriptedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    port, first, second = str(free_port()), *(each.url for each in pair)
    ports = ("--port", port, "--metrics-port", str(free_port()))
    (smg.package / "metrics").write_text(
        f'smg_worker_requests_total{{worker="{first}",model="kt-mini"}} 30\n'
        f'smg_worker_requests_total{{worker="{second}",model="kt-mini"}} 10\n'
        'smg_cache_aware_policy_branch_total{branch="spill"} 7\n'
    )
    started = kt("route", first, second, *ports, "--background")
    assert started.returncode == 0, started.stderr
    assert f"stop it with: kt stop {port}" in started.stderr
    (found,) = discovery.running_servers()
    try:
        assert found.status is not None and found.status.servers == [first, second]
        assert main(["ps"]) == 0
        assert "kt-mini (router of 2)" in capsys.readouterr().out
        assert run("status", "--port", port, "--json") == 0
        status = json.loads(capsys.readouterr().out)
        assert [each["share"] for each in status["servers"]] == [0.75, 0.25]
        assert (status["spilled"], status["model"]) == (7, "kt-mini")
        assert run("status", "--port", port) == 0
        assert "7 spilled to another server" in capsys.readouterr().out
        assert run("--remove", second, "--port", port) == 0
        assert second not in capsys.readouterr().out
        assert run("--remove", first, "--port", port) == ExitCode.USAGE
        assert run("--add", second, "--port", port) == 0
        assert second in capsys.readouterr().out
        with pytest.raises(KtError, match="is running"):
            engines.remove(engines.require("smg"))
    finally:
        assert main(["stop", port]) == 0
    assert is_gone(smg.pids[0]) and discovery.running_servers() == []


def test_no_router_is_left_where_kt_is_killed(smg: FakeSmg, pair: list[ScriptedServer]) -> None:
    smg.does("hang")
    words = ["route", pair[0].url, "--port", str(free_port()), "--metrics-port", str(free_port())]
    with subprocess.Popen(
        [sys.executable, "-m", "ktcli", *words], stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        assert any(line.startswith("routing kt-mini") for line in child.stderr)
        child.kill()
    until(lambda: is_gone(smg.pids[0]))
