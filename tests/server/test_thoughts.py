"""Thoughts that may have only so many tokens are ended as the model's family ends them, and the answer follows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests
from anthropic import Anthropic
from chat.fake_engine import VOCAB, FakeEngine, write_tokenizer
from server.running import Running, running, scripted, serving_models
from server.sources import ScriptedModel
from waits import until

from ktcli.answers.reader import AnswerReader
from ktcli.assembly.listener import SILENT
from ktcli.dialogue.local import LocalBackend
from ktcli.engine.scheduler import Limits
from ktcli.text.model import read_text_model
from ktcli.text.tokenizer import load_tokenizer

BUDGET = 6
CLOSING = "\n</think>\n\n"
ASKED: Any = [{"role": "user", "content": "2+2"}]


class Thinker(FakeEngine):
    """Thinks for ever, one letter after the other; behind a thought it says four letters that it draws, and ends.

    Attributes:
        letters: those of its answers.
        gate: what each of its logits waits for.
        ended: the ids of the answers that ended, in order.
        pauses: whether it closes the gate behind the second letter of an answer, once.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.gate, self.letters = threading.Event(), "uvwxyz"
        self.gate.set()
        self.pauses = False
        self.ended: list[list[int]] = []

    def logits(self, cache: list[int]) -> np.ndarray:
        assert self.gate.wait(60)
        cut = self.tokenizer.encode
        assistant = self.tokenizer.id_of("<|assistant|>")
        said = cache[max(i for i, id in enumerate(cache) if id == assistant) + 1 :]
        closing, (think,) = cut(CLOSING), cut("<think>")
        out = np.full(VOCAB, -10, dtype=np.float32)
        behind = next(
            (len(said) - at - 1 for at, id in enumerate(said) if id == cut("</think>")[0]), None
        )
        if not said:
            out[think] = 10
        elif behind is None:
            out[[cut(letter)[0] for letter in "abcdef"]] = 8
        elif behind < len(closing) - 2 + 4:
            out[[cut(letter)[0] for letter in self.letters]] = 8
            if self.pauses and behind == len(closing) - 2 + 1:
                self.pauses = False
                self.gate.clear()
        else:
            self.ended.append(list(cache))
            out[self.tokenizer.id_of("<|end|>")] = 10
        return out


@contextmanager
def thinking(folder: Path, limits: Limits | None = None) -> Iterator[Running]:
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text("{}")
    engine = Thinker(load_tokenizer(folder), lambda question: "", context=1024, streams=8)
    backend = LocalBackend("fake", engine, read_text_model("fake", folder))  # type: ignore[arg-type]
    with running(backend, limits=limits) as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with thinking(tmp_path_factory.mktemp("model")) as found:
        yield found


def closing_tokens(server: Running) -> int:
    return len(server.engine.tokenizer.encode(CLOSING))


def chat(server: Running, **more: Any) -> dict[str, Any]:
    body = {"messages": ASKED, "thinking_token_budget": BUDGET, "max_tokens": 60, **more}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_anthropic_keeps_to_the_budget_whole_and_in_pieces(server: Running) -> None:
    given: Any = {
        "model": "claude",
        "max_tokens": 60,
        "messages": ASKED,
        "thinking": {"type": "enabled", "budget_tokens": BUDGET},
    }
    with Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        whole = client.messages.create(**given)
        with client.messages.stream(**given) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        thinking, text = (block.to_dict() for block in message.content)
        # The mark that begins the thought is one of its tokens.
        assert len(thinking["thinking"]) == BUDGET - 1 and set(thinking["thinking"]) <= set(
            "abcdef"
        )
        assert len(text["text"]) == 4 and set(text["text"]) <= set("uvwxyz")
        assert message.stop_reason == "end_turn"
        assert message.usage.output_tokens == BUDGET + closing_tokens(server) + 4


def test_the_usage_counts_the_words_that_end_a_thought(server: Running) -> None:
    said = chat(server)
    message, used = said["choices"][0]["message"], said["usage"]
    assert len(message["reasoning"]) == BUDGET - 1 and len(message["content"]) == 4
    assert used["completion_tokens"] == BUDGET + closing_tokens(server) + 4
    assert used["completion_tokens_details"]["reasoning_tokens"] == BUDGET - 1
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    assert said["timings"]["predicted_n"] == used["completion_tokens"]


def test_a_seed_fixes_thought_and_answer_and_each_choice_has_its_own(server: Running) -> None:
    several = [chat(server, seed=7, n=4, temperature=1)["choices"] for _ in range(2)]
    first, again = ([choice["message"] for choice in choices] for choices in several)
    assert first == again
    assert len({message["reasoning"] for message in first}) > 1
    assert len({message["content"] for message in first}) > 1


def test_a_form_begins_behind_a_thought_that_was_ended(server: Running) -> None:
    for seed in range(3):
        said = chat(server, guided_regex="[xy]{5}", seed=seed)["choices"][0]
        message = said["message"]
        assert len(message["reasoning"]) == BUDGET - 1 and said["finish_reason"] == "stop"
        assert len(message["content"]) == 5 and set(message["content"]) <= set("xy")


def test_penalties_count_what_the_thought_said(tmp_path: Path) -> None:
    with thinking(tmp_path) as server:
        assert isinstance(server.engine, Thinker)
        server.engine.letters = "abcdef"
        more = {"thinking_token_budget": 3, "temperature": 0, "frequency_penalty": 1}
        message = chat(server, **more)["choices"][0]["message"]
        # The best id, the first of equals, is the least said one.
        assert (message["reasoning"], message["content"]) == ("ab", "cdef")


def test_chances_come_with_what_was_chosen(server: Running) -> None:
    said = chat(server, logprobs=True)["choices"][0]
    tokens = [row["token"] for row in said["logprobs"]["content"]]
    message = said["message"]
    assert "".join(tokens) == f"<think>{message['reasoning']}{message['content']}"


def test_stop_texts_count_behind_an_ended_thought(server: Running) -> None:
    said = chat(server, stop=list("uvwxyz"))
    choice = said["choices"][0]
    assert choice["finish_reason"] == "stop" and not choice["message"]["content"]
    assert len(choice["message"]["reasoning"]) == BUDGET - 1


def test_a_length_that_ends_in_or_behind_the_thought(server: Running) -> None:
    closing = closing_tokens(server)
    # A thought is not ended where no answer could follow.
    for most, expected in ((4, 4), (BUDGET + closing, BUDGET), (BUDGET + closing + 2,) * 2):
        said = chat(server, max_tokens=most)
        assert said["choices"][0]["finish_reason"] == "length"
        assert said["usage"]["completion_tokens"] == expected
    # Where the context ends there, too.
    head = chat(server)["usage"]["prompt_tokens"]
    asked = [{"role": "user", "content": "q" * (1024 - head - BUDGET)}]
    said = chat(server, messages=asked, max_tokens=None)
    assert said["choices"][0]["finish_reason"] == "length"
    assert len(said["choices"][0]["message"]["reasoning"]) == BUDGET - 1


def test_the_next_turn_finds_what_was_said(server: Running) -> None:
    long = [{"role": "user", "content": "q" * 300}]
    said = chat(server, messages=long, thinking_token_budget=200, max_tokens=400)
    message = said["choices"][0]["message"]
    assert len(message["reasoning"]) == 199
    text = f"<think>{message['reasoning']}{CLOSING}{message['content']}"
    back = [*long, {"role": "assistant", "content": text}, {"role": "user", "content": "so?"}]
    again = chat(server, messages=back)
    found = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found >= 300 + 200  # the thought and more


def test_nobody_comes_between_a_thought_and_its_answer(tmp_path: Path) -> None:
    """An answer that goes on needs no place in a queue that is full, and waits for nobody in it."""
    with thinking(tmp_path, Limits(waiting=2, active=1)) as server, ThreadPoolExecutor(3) as others:
        assert isinstance(server.engine, Thinker)
        server.engine.gate.clear()

        def ask(number: int) -> str:
            asked = [{"role": "user", "content": f"{number}+4"}]
            text: str = chat(server, messages=asked)["choices"][0]["message"]["content"]
            return text

        asked = [others.submit(ask, 0)]
        until(lambda: server.residency.counts().running == 1)
        asked += [others.submit(ask, number) for number in (1, 2)]
        until(lambda: server.residency.counts().waiting == 2)
        server.engine.gate.set()
        assert [len(each.result(60)) for each in asked] == [4] * 3
        (first,) = server.engine.tokenizer.encode("0")
        assert [first in ids for ids in server.engine.ended] == [True, False, False]


def test_an_answer_may_go_on_behind_its_thought_while_the_server_ends(tmp_path: Path) -> None:
    with thinking(tmp_path) as server, ThreadPoolExecutor(1) as others:
        assert isinstance(server.engine, Thinker) and server.serving is not None
        server.engine.gate.clear()
        asked = others.submit(chat, server)
        until(lambda: server.residency.counts().running == 1)
        server.serving.stop()
        time.sleep(0.2)  # it ends meanwhile
        server.engine.gate.set()
        assert len(asked.result(60)["choices"][0]["message"]["content"]) == 4


def test_who_leaves_behind_the_thought_ends_the_answer(server: Running) -> None:
    assert isinstance(server.engine, Thinker)
    assert server.serving is not None and server.serving.state is not None
    body = {"messages": ASKED, "thinking_token_budget": BUDGET, "stream": True, "ignore_eos": True}
    url = f"{server.url}/v1/chat/completions"
    server.engine.pauses = True
    with requests.post(url, json=body, stream=True, timeout=60) as answer:
        lines = answer.iter_lines(chunk_size=1)  # whose end would be that of the connection
        for line in lines:
            if b'"content":"' in line and b'"content":""' not in line:
                break
        known = list(server.serving.state.answering.values())  # others may not be forgotten yet
        (generation,) = [each for each in known if each._open]
    until(lambda: generation._cancelled)
    server.engine.gate.set()
    until(lambda: not server.leases)
    assert generation.tokens < 500  # of more than 900


def test_no_thought_at_all_where_the_model_ends_at_once(tmp_path: Path) -> None:
    """A budget of nothing, a prompt that opens the thought, and an end as the first id: the engine's thread lives."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    )
    with running(scripted(tmp_path, lambda question: "<think>", template=template)) as server:
        for budget in (0, 0, 5):
            body = {"messages": ASKED, "max_tokens": 20, "thinking_token_budget": budget}
            reply = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_one_answer_is_told_and_logged_and_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A mistake of ours while an answer is read: its client hears of it, and so does whoever reads the log."""
    model, warned = scripted(tmp_path, lambda question: f"{question} answered"), list[str]()
    listener: Any = SimpleNamespace(
        note=lambda text: None, warn=warned.append, progress=SILENT.progress
    )
    with serving_models([ScriptedModel(model)], listener=listener) as server:
        body = {"messages": ASKED, "max_tokens": 20, "stream": stream}
        url = f"{server.url}/v1/chat/completions"
        with monkeypatch.context() as patch:
            patch.setattr(AnswerReader, "next", lambda reader: {}["a secret"])
            failed = requests.post(url, json=body, timeout=60)
        assert failed.status_code == (200 if stream else 500)
        assert "internal" in failed.text and "secret" not in failed.text
        assert len(warned) == 1 and "KeyError" in warned[0] and "secret" not in warned[0]
        assert "answered" in requests.post(url, json={**body, "stream": False}, timeout=60).text
