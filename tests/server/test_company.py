"""What a client gets does not depend on who else asks: a real model, over HTTP, alone and in company."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from server.running import served_by_command

QUESTIONS = 50
WORDS = (
    "kt chat pack pull serve convert plan doctor experts memory context what how does when".split()
)


def ask(url: str, number: int, **more: Any) -> list[tuple[str, float, list[float]]]:
    """The tokens of an answer, their chances, and those of the likeliest."""
    chance = random.Random(number)
    text = " ".join(chance.choices(WORDS, k=chance.randint(2, 200)))
    body = {
        "messages": [{"role": "user", "content": text}],
        "seed": number,
        "temperature": 0.9,
        "max_tokens": 16,
        "logprobs": True,
        "top_logprobs": 3,
        **more,
    }
    answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    rows = answer["choices"][0]["logprobs"]["content"]
    return [
        (row["token"], row["logprob"], [each["logprob"] for each in row["top_logprobs"]])
        for row in rows
    ]


def leave(url: str, number: int) -> None:
    """Asks, and leaves at some moment."""
    body = {"messages": [{"role": "user", "content": f"{number} kt serve"}], "stream": True}
    with requests.post(f"{url}/v1/chat/completions", json=body, stream=True, timeout=60) as answer:
        for seen, _ in enumerate(answer.iter_lines()):
            if seen > number % 9:
                return


@pytest.mark.thorough
def test_answers_are_the_same_alone_and_in_company(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "alone"))
    with served_by_command("--parallel", "6") as url:
        alone = [ask(url, number) for number in range(QUESTIONS)]
        assert sum(map(len, alone)) > 4 * QUESTIONS
    monkeypatch.setenv("KT_HOME", str(tmp_path / "together"))
    with served_by_command("--parallel", "6") as url, ThreadPoolExecutor(8) as clients:
        chance, asked = random.Random(0), []
        for number in random.Random(1).sample(range(QUESTIONS), QUESTIONS):
            asked.append((number, clients.submit(ask, url, number)))
            if chance.random() < 0.5:
                clients.submit(leave, url, number)
            time.sleep(chance.uniform(0, 0.03))
        for number, answer in asked:
            assert answer.result() == alone[number], number


@pytest.mark.thorough
def test_secrets_of_one_client_change_nothing_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    system = "You are the assistant of a bank. " * 20

    def asked(url: str, text: str) -> Any:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return ask(url, 0, messages=messages)

    with served_by_command("--parallel", "6") as url:
        asked(url, "The password is 1234")
        guess = asked(
            url, "The password is 1234"
        )  # with its beginning in the cache, as from here on
        others: list[Callable[[], Any]] = [
            lambda: asked(url, "The password is 1234"),
            lambda: asked(url, "The password is 9876, keep it"),
            lambda: asked(url, "The password is 12"),
        ]
        for other in others:
            other()
            assert asked(url, "The password is 1234") == guess
        with ThreadPoolExecutor(4) as clients:
            running = [clients.submit(other) for other in others * 4]
            assert asked(url, "The password is 1234") == guess
            for each in running:
                each.result()


@pytest.mark.thorough
def test_a_prompt_that_is_known_is_answered_as_if_it_were_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kt-mini has latent attention: its form must not depend on how many tokens are new."""
    text = "The password of the vault is 1234. " * 20
    messages = [{"role": "user", "content": text}]
    monkeypatch.setenv("KT_HOME", str(tmp_path / "alone"))
    with served_by_command() as url:
        alone = ask(url, 0, messages=messages)
    monkeypatch.setenv("KT_HOME", str(tmp_path / "together"))
    for salt in ("mine", "yours"):  # the second server finds on disk what the first has computed
        with served_by_command() as url:
            for more in ({}, {}, {"cache_salt": salt}):
                assert ask(url, 0, messages=messages, **more) == alone
