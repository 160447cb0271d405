"""LangChain's ChatOpenAI: chat completions and Responses, streams, tools, structured output, an error."""

from __future__ import annotations

from cases import KEY, MODEL, PERSON, URL, WEATHER, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import BadRequestError
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


def chat(**more: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_retries=0, **more)


def loop(model: ChatOpenAI) -> str:
    bound = model.bind_tools([get_weather])
    messages: list[object] = [HumanMessage("weather in Paris?")]
    said = bound.invoke(messages)
    messages.append(said)
    assert said.tool_calls, said
    for call in said.tool_calls:
        messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    return str(bound.invoke(messages).text)


def case_invoke() -> None:
    said = chat().invoke("hello")
    assert said.content == "you said hello" and said.usage_metadata["output_tokens"] > 0, said


def case_stream() -> None:
    pieces = [each.content for each in chat().stream("hello")]
    assert "".join(pieces) == "you said hello" and len(pieces) > 2, pieces


def case_tools() -> None:
    assert loop(chat()) == WEATHER


def case_responses() -> None:
    said = chat(use_responses_api=True).invoke("hello")
    assert str(said.text) == "you said hello", said
    assert loop(chat(use_responses_api=True)) == WEATHER


def case_structured() -> None:
    for method in ("json_schema", "function_calling"):
        found = chat().with_structured_output(Person, method=method).invoke("Who is Ada?")
        assert found == Person(**PERSON), (method, found)


def case_error() -> None:
    try:
        chat(temperature=200).invoke("hello")
    except BadRequestError as error:
        assert error.param == "temperature"
    else:
        raise AssertionError("no error")


run(globals())
