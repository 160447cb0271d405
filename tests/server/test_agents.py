"""Six coding agents, by their published packages, on a model that follows a script: a picture, a call that is cut off,
a second run that goes on with the conversation, and then a system text in the middle of what the agent had sent.

The agents are none of kt's requirements: where one is not installed its test is skipped (`agents.py` says how to
install them). What is not the agent's own: the system text is put into its last request here, since none of them can be
told to send one. Continue reads a picture as text and sends none. aider has no tools, so that nothing of its is cut off
and it reads no picture; its second run restores the conversation from its history file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests
from server.agents import AGAIN, AGENTS, ASKED, SAID, Agent, program, run, watched

from ktcli.server.http.contents import unseen

_LATE = "DELTA comes late"


def script(agent: Agent, picture: Path) -> Any:
    """What the model answers to a prompt: it reads a picture, is cut off while it reads it again, and then answers."""
    tool, argument = agent.reads
    whole = json.dumps({"name": tool, "arguments": {argument: str(picture)}})

    def answer(prompt: str) -> str:
        if tool and f"/{tool}/" not in prompt:
            return "A title"  # agents also ask for one, and offer no tools
        n_results = prompt.rpartition(ASKED)[2].count("<|tool|>")
        if AGAIN in prompt or not tool or n_results > 1:
            return SAID
        return (
            f"I look.\n<tool_call>\n{whole[:-12]}"
            if n_results
            else f"I look.\n<tool_call>\n{whole}\n</tool_call>"
        )

    return answer


def with_late_system(agent: Agent, body: dict[str, Any]) -> dict[str, Any]:
    """An agent's request with a system text before its last message."""
    name = "input" if "input" in body else "messages"
    role = "developer" if name == "input" else "system"
    *before, last = body[name]
    return {**body, name: [*before, {"role": role, "content": _LATE}, last], "stream": False}


@pytest.mark.thorough
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_goes_on_after_a_picture_and_a_call_that_was_cut_off(
    tmp_path: Path, name: str
) -> None:
    agent = AGENTS[name]
    if program(agent) is None:
        pytest.skip(f"{agent.program} is not installed: see tests/server/agents.py")
    home = tmp_path / "home"
    with watched(tmp_path / "model", script(agent, home / "work/picture.png")) as seen:
        url = seen.server.url
        for words in (agent.first, agent.again):
            done = run(agent, home, url, words)
            assert done.returncode == 0 and SAID in done.stdout, (done.stdout, done.stderr)
        statuses = {each["status"] for each in seen.log if each["method"] == "POST"}
        assert statuses == {200}, seen.log
        # The first of the second run: what an agent asks for besides may come behind it.
        last = next(each for each in seen.engine.prompts if AGAIN in each)
        assert ASKED in last and SAID in last.partition(ASKED)[2]
        if agent.reads[0]:
            assert last.count("<tool_call>") >= 2 and last.count("<|tool|>") >= 2
        assert (unseen("an image") in last) == agent.sends
        body = next(each for each in seen.bodies if AGAIN.encode() in each)
        late = with_late_system(agent, json.loads(body))
        answer = requests.post(url + agent.path, json=late, timeout=60)
        assert answer.status_code == 200 and SAID in answer.text
        assert _LATE in seen.engine.prompts[-1]
