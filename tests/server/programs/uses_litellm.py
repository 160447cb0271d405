"""LiteLLM through the three APIs: whole, streams, tools, thoughts, an error."""

from __future__ import annotations

import json

import litellm
from cases import KEY, MODEL, URL, WEATHER, run

APIS = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL},
    "ollama": {"model": f"ollama_chat/{MODEL}", "api_base": URL},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def ask(api: str, messages: object, **more: object) -> object:
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return litellm.completion(
        **APIS[api], api_key=KEY, messages=messages, max_tokens=99, num_retries=0, **more
    )


def asked(api: str) -> None:
    said = ask(api, "hello").choices[0]
    assert (said.message.content, said.finish_reason) == ("you said hello", "stop"), said
    pieces = [each.choices[0].delta.content or "" for each in ask(api, "hello", stream=True)]
    assert "".join(pieces) == "you said hello" and len(pieces) > 2, pieces


def looped(api: str) -> None:
    messages: list[object] = [{"role": "user", "content": "weather in Paris?"}]
    said = ask(api, messages, tools=TOOLS).choices[0].message
    (call,) = said.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}, call
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
    found = ask(api, messages, tools=TOOLS).choices[0].message.content
    assert found == WEATHER, found


def case_openai() -> None:
    asked("openai")
    looped("openai")


def case_anthropic() -> None:
    asked("anthropic")
    looped("anthropic")


def case_ollama() -> None:
    asked("ollama")
    looped("ollama")


def case_thoughts() -> None:
    said = ask("openai", "think").choices[0].message
    assert (said.content, said.reasoning_content) == ("It is four.", "Let me see."), said


def case_error() -> None:
    try:
        ask("openai", "word " * 300_000)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no error")


run(globals())
