"""Streams in the forms of vLLM, SGLang and llama-server of 2026, as `kt chat --server` reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from client.conftest import RemoteRun
from client.openai_server import DONE, Reply, ScriptedOpenAI, event, refused

Chunk = dict[str, Any]


def called(*calls: tuple[str, str]) -> str:
    """Calls of tools as a chat shows them."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def vllm(delta: Chunk, finish: str | None = None) -> Chunk:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    more = {"stop_reason": None, "token_ids": None} if finish else {"token_ids": None}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": [{**choice, **more}]}


def vllm_usage(**counts: Any) -> Chunk:
    return {**vllm({}), "choices": [], "usage": counts}


def vllm_call(index: int, id: str | None, name: str | None, arguments: str) -> Chunk:
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    named = {"id": id, "type": "function"} if id else {}
    return vllm({"tool_calls": [{"index": index, **named, "function": function}]})


def sglang(finish: str | None = None, usage: Chunk | None = None, **delta: Any) -> Chunk:
    said = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None, **delta}
    choice = {"index": 0, "delta": said, "logprobs": None, "finish_reason": finish}
    head = {"id": "7d", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": [{**choice, "matched_stop": 2 if finish else None}], "usage": usage}


def sglang_call(id: str | None, name: str | None, arguments: str) -> Chunk:
    function = {"name": name, "arguments": arguments}
    return sglang(tool_calls=[{"id": id, "index": 0, "type": "function", "function": function}])


def llama(delta: Chunk, finish: str | None = None, **more: Any) -> Chunk:
    choice = {"finish_reason": finish, "index": 0, "delta": delta}
    head = {"created": 1, "id": "x", "model": "m", "system_fingerprint": "b1", **more}
    return {"choices": [choice], "object": "chat.completion.chunk", **head}


# Name: the chunks; thoughts and text that come of them; prompt, cached and answer's tokens.
STREAMS: dict[str, tuple[list[Chunk], str, str, tuple[int, int, int]]] = {
    "vLLM thinks": (
        [vllm({"role": "assistant", "content": "", "reasoning": None}), vllm({"reasoning": "so"}),
         vllm({"reasoning": " it is"}), vllm({"content": "\n\nYes"}), vllm({"content": "."}, "stop"),
         vllm_usage(prompt_tokens=9, total_tokens=15, completion_tokens=6, prompt_tokens_details={"cached_tokens": 8})],
        "so it is", "Yes.", (9, 8, 6),
    ),
    "vLLM says usage only": (
        [vllm({"role": "assistant", "content": ""}), vllm({"content": "a"}), vllm({"content": ""}, "length"),
         vllm_usage(prompt_tokens=4, total_tokens=5, completion_tokens=1, prompt_tokens_details=None)],
        "", "a", (4, 0, 1),
    ),
    "vLLM calls two tools": (
        [vllm({"role": "assistant", "content": ""}), vllm_call(0, "call_a", "f", ""),
         vllm_call(0, None, None, '{"x": '), vllm_call(0, None, None, "1}"), vllm_call(1, "call_b", "g", "{"),
         vllm_call(1, "call_b", "g", "}"), vllm({"content": ""}, "tool_calls")],  # the last one has its name again
        "", called(("f", '{"x": 1}'), ("g", "{}")), (0, 0, 5),
    ),
    "vLLM of 2025 draws an id for each piece": (
        [vllm_call(0, "call_a", "f", ""), vllm_call(0, "call_b", None, '{"x"'), vllm_call(0, "call_c", None, ": 1}"),
         vllm({}, "tool_calls")],
        "", called(("f", '{"x": 1}')), (0, 0, 3),
    ),
    "SGLang thinks": (
        [sglang(role="assistant", content=""), sglang(reasoning_content="so"), sglang(content="Yes"), sglang("stop"),
         {**sglang(), "choices": [], "usage": {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3,
          "prompt_tokens_details": {"cached_tokens": 2}, "reasoning_tokens": 1}}],
        "so", "Yes", (3, 2, 3),
    ),
    "SGLang calls two tools with one index": (
        [sglang_call("call_a", "f", ""), sglang_call("call_a", None, "{}"), sglang_call("call_b", "g", ""),
         sglang_call("call_b", None, '{"y": 2}'), sglang("tool_calls")],
        "", called(("f", "{}"), ("g", '{"y": 2}')), (0, 0, 4),
    ),
    "llama-server thinks and counts": (
        [llama({"role": "assistant", "content": None}), llama({"reasoning_content": "so"}), llama({"content": "Yes"}),
         llama({}, "stop"), {**llama({}), "choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 5,
          "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 1}}, "timings": {"prompt_n": 4}}],
        "so", "Yes", (5, 1, 3),
    ),
    "arguments as an object, without an index": (
        [vllm({"tool_calls": [{"id": "1", "index": None, "function": {"name": "f", "arguments": {"x": 1}}}]}, "stop")],
        "", called(("f", '{"x": 1}')), (0, 0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_others_is_read(name: str, run: RemoteRun, server: ScriptedOpenAI) -> None:
    chunks, thoughts, text, (prompt, cached, tokens) = STREAMS[name]
    server.usual = Reply([*map(event, chunks), DONE])
    code, out, err = run("hi there", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert (document["thinking"], document["text"]) == (thoughts, text)
    counts = document["stats"]
    said = (counts["prompt_tokens"], counts["reused_tokens"], counts["eval_count"])
    assert said == (prompt, cached, tokens)


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
        "You passed 5000 input tokens and requested 0 output tokens. However, the model's context length is only 4096"
        " tokens, resulting in a maximum input length of 4096 tokens.",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "Requested token count exceeds the model's maximum context length of 4096 tokens.",
    ],
)
def test_a_context_that_is_full_is_recognized(
    words: str, run: RemoteRun, server: ScriptedOpenAI
) -> None:
    server.usual = refused(400, words, type="BadRequestError", param=None, code=400)
    code, _, err = run("hi there")
    assert code == 8 and words[:60] in err


@pytest.mark.parametrize(
    ("said", "code", "kept"),
    [
        ({"error": {"message": "it died", "type": "InternalServerError", "code": 500}}, 6, ""),
        ({"object": "error", "message": "it died", "type": "x", "param": None, "code": 500}, 6, ""),
        ({"error": {"message": "it died", "type": "x", "code": 503}}, 7, ""),
        (vllm({}, "abort"), 6, ""),
        (vllm({"content": "?"}, "error"), 6, "?"),
    ],
)
def test_an_error_in_a_stream_of_others_is_one(
    said: Chunk, code: int, kept: str, run: RemoteRun, server: ScriptedOpenAI
) -> None:
    server.usual = Reply([event(vllm({"content": "half"})), event(said), DONE])
    assert run("hi there")[:2] == (code, f"half{kept}\n")
