"""`kt chat --server`: what is sent to a server, and what is shown and kept of its answers."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from client.conftest import RemoteRun, remote_chat
from client.openai_server import DONE, Reply, ScriptedOpenAI, delta, refused, said

from ktcli.main import main
from ktcli.sampling import SamplingSettings
from ktcli.text.settings import Settings


def test_an_answer_is_printed_as_it_is(run: RemoteRun, server: ScriptedOpenAI) -> None:
    assert run("hello there") == (0, "hello\n", "")
    path, headers, document = server.requests[-1]
    assert path == "/v1/chat/completions" and "authorization" not in headers
    assert document == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello there"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_options_are_sent_and_nothing_else(run: RemoteRun, server: ScriptedOpenAI) -> None:
    options = (
        "--temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --seed 3 -n 9"
    )
    words = [*options.split(), "--stop", "X", "-s", "Be brief.", "--think", "--think-budget", "5"]
    assert run("m", "hi", *words)[0] == 0
    expected = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3,
        "max_tokens": 9, "stop": ["X"], "thinking_token_budget": 5,
        "chat_template_kwargs": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    }  # fmt: skip
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert expected.items() <= server.chats[-1].items()
    assert server.chats[-1]["messages"] == messages
    assert run("m", "hi", "--top-k", "0")[0] == 0 and server.chats[-1]["top_k"] == -1
    assert run("m", "hi", "--greedy")[0] == 0
    assert server.chats[-1]["temperature"] == 0 and "top_p" not in server.chats[-1]


def test_an_end_without_the_end_of_its_line(run: RemoteRun, server: ScriptedOpenAI) -> None:
    server.usual = Reply([*said("hello")[:-1], b"data: [DONE]"])
    assert run("hi there")[:2] == (0, "hello\n")


def test_settings_of_a_chat_with_a_model_here_are_sent(server: ScriptedOpenAI) -> None:
    """They were in force; a server need not hear of those that change nothing. The other way, what a server did by
    itself is up to the model here."""
    kept = Settings(SamplingSettings(temperature=0.4, top_p=0.8), max_tokens=7)
    chat = remote_chat(server)
    chat.settings = chat.settings.restored(kept.sampling, kept.others)
    list(chat.ask("hi"))
    sent = server.chats[-1]
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"]) == (0.4, 0.8, 7)
    assert "top_k" not in sent and "repetition_penalty" not in sent
    served = Settings(stated=frozenset()).sampled(top_k=5)
    mine = Settings(SamplingSettings(temperature=0.3, top_p=0.9)).restored(
        served.sampling, served.others
    )
    assert mine.sampling == SamplingSettings(temperature=0.3, top_p=0.9, top_k=5)
    assert mine.stated is None


def test_a_form_is_asked_for(run: RemoteRun, server: ScriptedOpenAI, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    run("hi there", "--schema", str(tmp_path / "s.json"))
    assert server.chats[-1]["response_format"]["json_schema"]["schema"] == schema
    run("hi there", "--format", "json")
    assert server.chats[-1]["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    "parts",
    [
        [delta(reasoning_content="so "), delta(reasoning="it is"), *said("Yes", ".")],
        [delta(reasoning_content="so ", reasoning="so "), delta(reasoning="it is"), *said("Yes.")],
        said("<thi", "nk>so it", " is</think>", "\n\nYes."),
    ],
    ids=["fields", "both names", "marks"],
)
def test_thoughts_are_told_from_the_answer(
    parts: list[bytes], run: RemoteRun, server: ScriptedOpenAI
) -> None:
    server.usual = Reply(parts)
    assert run("is it so?")[1].strip() == "Yes."
    document = json.loads(run("is it so?", "--json")[1])
    assert (document["text"], document["thinking"]) == ("Yes.", "so it is")


def test_json_has_the_counts_of_the_server(run: RemoteRun, server: ScriptedOpenAI) -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    server.usual = Reply(said("a", "b", usage=usage, finish="length"))
    code, out, _ = run("hi there", "--json")
    document = json.loads(out)
    counts = document["stats"]
    assert code == 0 and document["finish"] == "length" and document["ids"] == []
    assert document["model"] == "m" and counts["seed"] is None
    assert (counts["prompt_tokens"], counts["reused_tokens"], counts["eval_count"]) == (9, 4, 5)
    assert "(cut at 5 tokens" in run("hi there")[2]
    lines = [json.loads(line) for line in run("hi there", "--jsonl")[1].splitlines()]
    assert [line["event"] for line in lines] == ["text", "text", "answer"]


def test_calls_of_tools_are_shown(run: RemoteRun, server: ScriptedOpenAI) -> None:
    def call(**function: str) -> bytes:
        return delta(tool_calls=[{"index": 0, "id": "c1", "function": function}])

    parts = [
        call(name="weather", arguments=""),
        call(arguments='{"city":'),
        call(arguments=' "Rome"}'),
    ]
    server.usual = Reply([*parts, delta(finish="tool_calls"), DONE])
    out = run("hi there")[1]
    assert out == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'


def test_input_is_read_from_a_pipe(
    run: RemoteRun, server: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"some text")))
    assert run("m", "Sum it up")[0] == 0
    assert server.chats[-1]["messages"][-1]["content"] == "Sum it up\n\nsome text"


# --- models -----------------------------------------------------------------------------------------


def several(*names: str) -> dict[str, Any]:
    return {"data": [{"id": name} for name in names]}


def test_one_model_is_taken_and_one_of_several_is_named(
    run: RemoteRun, server: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.models = several("a/b", "c")
    code, _, err = run("hi there")
    assert code == 2 and "has several models: a/b, c" in err and "kt chat NAME --server" in err
    assert run("c", "hi")[0] == 0 and server.chats[-1]["model"] == "c"
    code, _, err = run("d", "hi")
    assert code == 3 and "has no model 'd'" in err and "it has a/b, c" in err
    monkeypatch.setenv("KT_MODEL", "a/b")  # the person's own, which this server has
    assert run("hi there")[0] == 0 and server.chats[-1]["model"] == "a/b"
    server.models = several("only")
    assert run("hi there")[0] == 0 and server.chats[-1]["model"] == "only"


def test_a_server_without_a_list_needs_a_name(run: RemoteRun, server: ScriptedOpenAI) -> None:
    for models in (None, b"not json", {"data": 5}, b"[]"):
        server.models = models
        code, _, err = run("hi there")
        assert code == 2 and "does not say which models it has" in err
        assert run("m", "hi")[0] == 0
    server.models = several()
    code, _, err = run("hi there")
    assert code == 3 and "has no model" in err


def test_an_unknown_model_is_said_by_the_server(run: RemoteRun, server: ScriptedOpenAI) -> None:
    server.script.append(refused(404, "The model `m` does not exist.", code="model_not_found"))
    code, out, err = run("hi there")
    assert (code, out) == (3, "") and "The model `m` does not exist." in err


def test_another_model_that_answers_is_told(run: RemoteRun, server: ScriptedOpenAI) -> None:
    server.usual = Reply([delta("m", content="a"), *said("b", model="other")])
    code, out, err = run("hi there")
    assert (code, out) == (0, "ab\n") and "now answers with the model other, not m" in err


# --- what needs ids ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["--draft 3", "--explain-cache", "--context 100", "--allow-special", "--no-kv-cache", "--attach always",
     "--no-attach", "--threads 2", "--device cpu", "--kv fp8", "--defer 1"],
)  # fmt: skip
def test_what_needs_a_model_here_is_refused(
    words: str, run: RemoteRun, server: ScriptedOpenAI
) -> None:
    code, _, err = run("hi there", *words.split())
    assert code == 2 and not server.requests
    assert f"{words.split()[0]} applies only to a model loaded here" in err


# --- which server -----------------------------------------------------------------------------------


def test_the_setting_names_a_server(
    run: RemoteRun, server: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KT_SERVER", f"{server.url}/v1/")
    assert run("hi there", server=None)[1] == "hello\n"
    # A server is not asked where the command line says so; kt-mini is loaded here instead.
    monkeypatch.setattr("ktcli.commands.chat.chat.who_and_what", _stopped)
    with pytest.raises(Stopped):
        main_raising(["chat", "--server", "off", "hi there"])


class Stopped(BaseException):
    """The chat would go on with a model here."""


def _stopped(*_: object) -> None:
    raise Stopped


def main_raising(words: list[str]) -> int:
    return main(words)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:80", "which is not the address of a server"),
        ("ftp://x", "which is not the address of a server"),
        ("http://", "which is not the address of a server"),
        ("http://x:99999", "which is not the address of a server"),
        ("http://x y", "which is not the address of a server"),
        ("http://ü.de", "which is not the address of a server"),
        ("http://x/api", "has '/api' after the host"),
        ("http://x/v1?a=b", "has '/v1?a=b' after the host"),
        ("http://me:secret@x", "contains a user name or a password"),
    ],
)
def test_an_address_that_is_none(address: str, said: str, run: RemoteRun) -> None:
    code, _, err = run("hi there", server=address)
    assert code == 2 and said in err and "secret" not in err


def test_the_key_is_read_from_a_file_of_ones_own(
    run: RemoteRun, server: ScriptedOpenAI, tmp_path: Path
) -> None:
    server.models = refused(401, "who are you?")
    code, _, err = run("hi there")
    assert code == 2 and "needs an API key" in err and "--server-key-file" in err
    key = tmp_path / "key"
    key.write_text("sk-1\n")
    key.chmod(0o644)
    code, _, err = run("hi there", "--server-key-file", str(key))
    assert code == 2 and "other users can read" in err and f"chmod 600 {key}" in err
    key.chmod(0o600)
    code, _, err = run("hi there", "--server-key-file", str(key))
    assert code == 2 and "rejected the API key" in err and "sk-1" not in err
    server.models = several("m")
    assert run("hi there", "--server-key-file", str(key))[0] == 0
    assert {headers["authorization"] for _, headers, _ in server.requests[-2:]} == {"Bearer sk-1"}
    code, _, err = run("hi there", "--server-key-file", str(key), server=None)
    assert code == 2 and "--server-key-file needs --server" in err


def test_a_password_of_netrc_is_not_sent(
    run: RemoteRun, server: ScriptedOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("default login me password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nor does one stand between us
    assert run("hi there")[0] == 0
    assert all("authorization" not in headers for _, headers, _ in server.requests)


def test_a_proxy_of_the_environment_is_asked_for_servers_elsewhere(
    run: RemoteRun, server: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "no_proxy"):  # which would count before these
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", server.url)
    assert run("m", "hi there", server="http://far.invalid:8000")[0] == 0
    paths = [path for path, _, _ in server.requests]
    assert paths == [
        f"http://far.invalid:8000/v1/{each}" for each in ("models", "chat/completions")
    ]
    monkeypatch.setenv("NO_PROXY", "far.invalid")
    code, _, err = run("m", "hi there", server="http://far.invalid:8000")
    assert code == 6 and "no response from http://far.invalid:8000" in err
    assert len(server.requests) == 2
