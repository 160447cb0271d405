"""Instructor in its modes. Its partial objects of a stream take it minutes, whatever the server, with pydantic 2.14."""

from __future__ import annotations

import instructor
from cases import KEY, MODEL, PERSON, URL, run
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


ASKED = [{"role": "user", "content": "Who is Ada?"}]


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=mode)


def made(mode: instructor.Mode) -> None:
    found = client(mode).chat.completions.create(
        model=MODEL, messages=ASKED, response_model=Person, max_retries=0
    )
    assert found.model_dump() == PERSON, found


def case_tools() -> None:
    made(instructor.Mode.TOOLS)


def case_tools_strict() -> None:
    made(instructor.Mode.TOOLS_STRICT)


def case_json_schema() -> None:
    made(instructor.Mode.JSON_SCHEMA)


def case_json() -> None:
    made(instructor.Mode.JSON)


def case_md_json() -> None:
    made(instructor.Mode.MD_JSON)


run(globals())
