"""The day of a coding agent: its long instructions are read once, whatever comes between its questions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from anthropic import Anthropic
from server.running import served_by_command

from ktcli.native import PAGE_TOKENS

RULES = "Answer in one line. Name the command that does it. " * 25


@contextmanager
def served() -> Iterator[Anthropic]:
    """A client of a server of the built-in model."""
    with served_by_command() as url, Anthropic(base_url=url, api_key="none") as client:
        yield client


def ask(client: Anthropic, number: int, turns: list[dict[str, str]]) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and those that were in the cache."""
    system: Any = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"},
        {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}},
    ]
    messages: Any = turns
    said = client.messages.create(model="claude", max_tokens=12, system=system, messages=messages)
    cached = said.usage.cache_read_input_tokens or 0
    return said.content[0].to_dict()["text"], said.usage.input_tokens + cached, cached  # type: ignore[return-value]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.thorough
def test_instructions_are_read_once_in_a_day(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    question = "How do I list my models?"
    turns = [user(question)]
    with served() as client:
        first, n_prompt, cached = ask(client, 1, turns)
        assert cached == 0
        turns += [{"role": "assistant", "content": first}, user("And how do I remove one?")]
        _, _, cached = ask(client, 2, turns)
        assert cached > n_prompt - PAGE_TOKENS  # of the conversation so far
        _, n_other, cached = ask(client, 3, [user("What is kt?")])
        shared = n_other - PAGE_TOKENS - 20
        assert cached >= shared  # of another conversation with the same instructions
    with served() as client:
        _, _, cached = ask(client, 4, [user("What is a pack?")])
        assert cached >= shared
        _, n_long, cached = ask(client, 5, [*turns, user("Why?")])
        assert cached > n_prompt - PAGE_TOKENS and n_long > n_prompt
