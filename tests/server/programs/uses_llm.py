"""The command `llm`, with the server in its extra-openai-models.yaml: whole, streamed, a schema, a tool."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cases import MODEL, PERSON, URL, WEATHER, run

FOLDER = Path.cwd() / "llm"
FOLDER.mkdir()
os.environ["LLM_USER_PATH"] = str(FOLDER)
(FOLDER / "extra-openai-models.yaml").write_text(
    f"- model_id: kt\n  model_name: {MODEL}\n  api_base: {URL}/v1\n"
    "  supports_tools: true\n  supports_schema: true\n"
)
(FOLDER / "tool.py").write_text(
    "def get_weather(city: str) -> str:\n"
    '    "The weather of a city."\n'
    "    return f'18 degrees in {city}'\n"
)

from click.testing import CliRunner  # noqa: E402
from llm.cli import cli  # noqa: E402


def said(*words: str) -> str:
    found = CliRunner().invoke(cli, ["-m", "kt", "--key", "none", *words])
    assert found.exit_code == 0, (found.output, found.exception)
    return found.output.strip()


def case_whole() -> None:
    assert said("--no-stream", "hello") == "you said hello"


def case_stream() -> None:
    assert said("hello") == "you said hello"


def case_schema() -> None:
    assert json.loads(said("--schema", "name, age int", "Who is Ada?")) == PERSON


def case_tool() -> None:
    found = said("--functions", str(FOLDER / "tool.py"), "weather in Paris?")
    assert found.endswith(WEATHER), found


run(globals())
