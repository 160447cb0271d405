"""The latest responses are kept in bounded memory, for those who asked for them; thoughts can be sealed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import requests
from chat.fake_engine import END
from openai import NotFoundError, OpenAI
from server.running import Running, running, scripted

from ktcli.server.http import kept as kept_module
from ktcli.server.http.kept import KeptResponses, KeptSlot
from ktcli.server.http.openai.response_fields import ResponseBody, Turn
from ktcli.server.http.openai.stored import _refers
from ktcli.server.http.seal import ThoughtSeal
from ktcli.server.http.state import ServerState
from ktcli.text.settings import Settings

ASKED: list[str] = []


def script(question: str) -> str:
    ASKED.append(question)
    return (
        "<think>\nA secret.\n</think>\n\nhello" if question == "hello" else f"you said {question}"
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(scripted(tmp_path_factory.mktemp("model"), script, end=END)) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def kept_state(server: Running) -> ServerState:
    assert server.serving is not None and server.serving.state is not None
    return server.serving.state


def kept_by(server: Running) -> KeptResponses:
    return kept_state(server).kept


def tokens(client: OpenAI, items: Any, **more: Any) -> int:
    return client.responses.input_tokens.count(model="fake", input=items, **more).input_tokens


def test_a_response_goes_on_with_all_before_it(client: OpenAI) -> None:
    first = client.responses.create(model="fake", input="one", instructions="be kind")
    second = client.responses.create(model="fake", input="two", previous_response_id=first.id)
    assert second.previous_response_id == first.id and second.output_text == "you said two"
    third: Any = [{"role": "user", "content": "three"}]
    whole: Any = [
        {"role": "user", "content": "one"}, *first.output,
        {"role": "user", "content": "two"}, *second.output, *third,
    ]  # fmt: skip
    found = client.responses.create(model="fake", input=third, previous_response_id=second.id)
    assert found.usage is not None and found.usage.input_tokens == tokens(client, whole)
    # Instructions are those of each request.
    assert tokens(client, third, previous_response_id=second.id) == tokens(client, whole)


def test_references_stand_for_items(client: OpenAI) -> None:
    first = client.responses.create(model="fake", input="hello")
    items: Any = [{"role": "user", "content": "hello"}, *first.output]
    named: Any = [items[0], *({"type": "item_reference", "id": each.id} for each in first.output)]
    last: Any = {"role": "user", "content": "and"}
    assert len(first.output) == 2
    assert tokens(client, [*named, last]) == tokens(client, [*items, last])
    untyped: Any = [items[0], *({"id": each.id, "type": None} for each in first.output)]
    assert tokens(client, [*untyped, last]) == tokens(client, [*items, last])
    second = client.responses.create(model="fake", input=[*named, last])
    page = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [each.type for each in page.data] == ["message", "reasoning"] and page.has_more
    rest = client.responses.input_items.list(second.id, order="asc", after=page.data[-1].id)
    assert next(each.id for each in rest.data) == first.output[1].id


def test_a_kept_response_is_the_one_that_was_sent(client: OpenAI) -> None:
    made = client.responses.create(model="fake", input="one", metadata={"a": "b"})
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    with client.responses.stream(model="fake", input="two") as stream:
        last = stream.get_final_response()
    assert client.responses.retrieve(last.id).output_text == "you said two"
    client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(NotFoundError, match="has no response"):
            gone(made.id)
    with pytest.raises(NotFoundError) as found:
        client.responses.create(model="fake", input="x", previous_response_id=made.id)
    assert found.value.param == "previous_response_id" and found.value.code == "not_found"


@pytest.mark.parametrize("id", ["x", "rs_x_0", "msg__0", "fc_" + "9" * 5000, "msg_0_²", ""])
def test_an_unknown_item_is_not_found(client: OpenAI, id: str) -> None:
    with pytest.raises(NotFoundError) as found:
        client.responses.create(
            model="fake", input=[{"role": "user", "content": "a"}, {"type": "item_reference", "id": id}]
        )  # fmt: skip
    assert found.value.param == "input[1].id" and len(found.value.message) < 500


def test_an_item_has_the_id_of_its_kind_and_answer(client: OpenAI) -> None:
    made = client.responses.create(model="fake", input="one").output[0].id
    assert made is not None
    for id in (made[:-1] + "1", made.replace("msg", "rs"), made + "0"):
        with pytest.raises(NotFoundError):
            client.responses.create(model="fake", input=[{"type": "item_reference", "id": id}])  # type: ignore[list-item]


def test_what_is_not_to_be_stored_is_not_kept(client: OpenAI, server: Running) -> None:
    before = len(kept_by(server))
    made = client.responses.create(model="fake", input="one", store=False)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(made.id)
    wrong: Any = [
        {"store": "yes"},
        {"previous_response_id": 3},
        {"include": 3},
        {"top_logprobs": 99},
        {"input": [{"role": "user", "content": "a"}] * 10_000},
        {"previous_response_id": "x" * 100_000},
        {"input": [{"role": "user", "content": "a"}, {"id": "msg_x_0"}]},
        {"input": [{"role": "user", "content": "a"}, {"type": "message", "content": "b"}]},
        {"input": [{"role": "user", "content": "a"}, {"content": "b"}]},
        {"service_tier": 1}, {"prompt_cache_key": []}, {"safety_identifier": 1}, {"max_tool_calls": "x"},
    ]  # fmt: skip
    for each in wrong:
        reply = requests.post(f"{server.url}/v1/responses", json={"input": "x", **each}, timeout=60)
        error = reply.json()["error"]
        assert reply.status_code in (400, 404) and error["message"] and len(reply.content) < 1000
    assert len(kept_by(server)) == before and made.store is False


def test_fields_say_what_was_used(server: Running) -> None:
    asked = {
        "input": "x", "temperature": 0.5, "max_tool_calls": 3, "prompt_cache_key": "k",
        "safety_identifier": "u", "service_tier": "flex",
    }  # fmt: skip
    found = requests.post(f"{server.url}/v1/responses", json=asked, timeout=60).json()
    assert found["completed_at"] >= found["created_at"]
    assert (found["temperature"], found["top_p"], found["service_tier"]) == (0.5, 1.0, "default")
    assert found["presence_penalty"] == found["frequency_penalty"] == 0.0
    for name in ("max_tool_calls", "prompt_cache_key", "safety_identifier"):
        assert found[name] == asked[name]
    cut = {**asked, "max_output_tokens": 1}
    found = requests.post(f"{server.url}/v1/responses", json=cut, timeout=60).json()
    assert found["status"] == "incomplete" and found["completed_at"] is None


def test_sealed_thoughts_are_thoughts(client: OpenAI, server: Running) -> None:
    include: Any = ["reasoning.encrypted_content"]
    made = client.responses.create(model="fake", input="hello", include=include, store=False)
    thought: Any = made.output[0]
    sealed = thought.encrypted_content
    assert sealed and "secret" not in sealed
    streamed = client.responses.create(model="fake", input="hello", include=include, stream=True)
    done = [e.item for e in streamed if e.type == "response.output_item.done"]
    assert done[0].encrypted_content  # type: ignore[union-attr]
    flipped = sealed[:40] + ("A" if sealed[40] != "A" else "B") + sealed[41:]
    seal = kept_state(server).seal
    for said in (sealed, flipped, "x", "kt1.", "kt1.é", "kt1." + "A" * 5_000_000, 3):
        item: Any = {"type": "reasoning", "summary": [], "encrypted_content": said}
        items: Any = [item, made.output[1].model_dump(), {"role": "user", "content": "and"}]
        turn = Turn(items, (), partial(seal.open, owner=""))
        messages = ResponseBody().chat_request(Settings(), "", turn).messages
        assert messages[0]["reasoning_content"] == ("A secret." if said == sealed else "")
        assert tokens(client, items)


def test_a_seal_opens_what_it_sealed_for_its_owner_only() -> None:
    seal, text = ThoughtSeal(), "thoughts \ud800 é"
    for said in (text, ""):
        sealed = seal.seal(said, "alice")
        assert seal.open(sealed, "alice") == said
        assert seal.open(sealed, "bob") is None and ThoughtSeal().open(sealed, "alice") is None
    assert seal.seal(text, "alice") != seal.seal(text, "alice")
    for at in range(4, len(sealed) - 3, 7):
        changed = sealed[:at] + ("A" if sealed[at] != "A" else "B") + sealed[at + 1 :]
        assert seal.open(changed, "alice") is None
    assert seal.seal("x" * (8 << 20), "alice") == ""


def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "COUNT_MOST", 3)
    monkeypatch.setattr(kept_module, "BYTES_MOST", 100)
    monkeypatch.setattr(kept_module, "EACH_BYTES_MOST", 60)
    kept = KeptResponses()

    def keep(id: str, size: int = 8, previous: str = "", owner: str = "") -> None:
        kept.begin(id, owner, previous, b"[]")
        KeptSlot(kept, id).fill(b"x" * size)

    keep("a")
    keep("b", previous="a")
    keep("c", owner="bob")
    found = kept.conversation("b", "")
    assert found is not None and len(found) == 2
    keep("d")  # "c" is the one that nobody used for longest
    assert kept.find("c", "bob") is None and kept.find("a", "bob") is None
    assert kept.size_bytes == 30 and len(kept) == 3
    keep("e", 55)
    keep("f", 40)
    assert kept.size_bytes <= 100 and kept.find("f", "") and kept.conversation("b", "") is None
    keep("g", 61)
    assert kept.find("g", "") is None
    kept.begin("h", "", "", b"[]")  # an answer that failed
    assert kept.find("h", "") is None
    KeptSlot(kept, "h").give_up()
    kept.finish("h", b"{}")  # and one that had to make room
    assert kept.find("h", "") is None
    for id in "abcdefgh":
        kept.drop(id)
    assert kept.size_bytes == len(kept) == 0


def test_what_is_named_counts_as_if_it_were_sent(
    client: OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client.responses.create(model="fake", input="a long one")
    monkeypatch.setattr("ktcli.server.http.openai.stored.EACH_BYTES_MOST", 1000)
    item = {"type": "item_reference", "id": made.output[0].id}
    asked = {"input": [{"role": "user", "content": "x"}, *[item] * 100]}
    reply = requests.post(f"{server.url}/v1/responses", json=asked, timeout=60)
    assert reply.status_code == 413 and reply.json()["error"]["param"].startswith("input[")


@pytest.mark.parametrize(
    ("query", "field"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")],
)
def test_a_list_is_asked_for_in_ways_that_there_are(
    client: OpenAI, server: Running, query: str, field: str
) -> None:
    made = client.responses.create(model="fake", input="one")
    path = f"{server.url}/v1/responses/{made.id}"
    reply = requests.get(f"{path}/input_items?{query}", timeout=60)
    assert reply.status_code in (400, 404) and reply.json()["error"]["param"] == field
    assert requests.get(f"{path}?stream=true", timeout=60).json()["error"]["param"] == "stream"
    assert (
        json.loads(requests.get(f"{path}/other", timeout=60).text)["error"]["code"] == "not_found"
    )


@pytest.mark.parametrize(
    ("item", "refers"),
    [
        ({"type": "item_reference", "id": "a"}, True),
        ({"id": "a"}, True),
        ({"id": "a", "type": None}, True),
        ({"id": "a", "role": "user", "content": "b"}, False),
        ({"id": "a", "call_id": "c", "output": "d"}, False),
        ({"id": "a", "summary": []}, False),
        ({}, False),
    ],
)
def test_what_refers_to_another_item_has_nothing_of_its_own(
    item: dict[str, Any], refers: bool
) -> None:
    assert _refers(item) is refers
