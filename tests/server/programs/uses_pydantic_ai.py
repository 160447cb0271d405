"""Pydantic AI: chat completions and Responses, tools, an output of a type."""

from __future__ import annotations

from cases import KEY, MODEL, PERSON, URL, WEATHER, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    """A person."""

    name: str
    age: int


PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
CHAT = OpenAIChatModel(MODEL, provider=PROVIDER)
RESPONSES = OpenAIResponsesModel(MODEL, provider=PROVIDER)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


def case_chat() -> None:
    assert Agent(CHAT).run_sync("hello").output == "you said hello"


def case_responses() -> None:
    assert Agent(RESPONSES).run_sync("hello").output == "you said hello"


def case_tools() -> None:
    for model in (CHAT, RESPONSES):
        found = Agent(model, tools=[get_weather]).run_sync("weather in Paris?").output
        assert found == WEATHER, (model, found)


def case_type() -> None:
    for kind in (Person, NativeOutput(Person)):
        found = Agent(CHAT, output_type=kind).run_sync("Who is Ada?").output
        assert found == Person(**PERSON), (kind, found)


def case_stream() -> None:
    found = Agent(CHAT).run_stream_sync("hello")
    pieces = list(found.stream_text(delta=True, debounce_by=None))
    assert "".join(pieces) == "you said hello" and len(pieces) > 2, pieces


run(globals())
