"""Conversations come in the form of other models' servers, and reach a chat template in a form that it takes: with all
their texts, in their order. Each template here has one habit of published ones."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktcli import resources
from ktcli.answers.calls.styles import GENERIC
from ktcli.answers.format import AnswerFormat
from ktcli.dialogue.history import normalized
from ktcli.dialogue.rendering import rendered as rendered_by
from ktcli.errors import BadCheckpoint
from ktcli.text import capabilities
from ktcli.text.capabilities import Capabilities, IdForm
from ktcli.text.control import ControlTokens
from ktcli.text.model import TextModel, read_text_model
from ktcli.text.settings import Settings
from ktcli.text.template import ChatTemplate
from ktcli.text.tokenizer import Tokenizer, load_tokenizer

_OPEN = "{% if add_generation_prompt %}<A>{% endif %}"
_TURN = "<{{ m.role[0] | upper }}>{{ m.content or '' }}"
_CALLS = "{% for c in m.tool_calls or [] %}"


def over(body: str, before: str = "") -> str:
    """A template that renders each message by `body`."""
    return f"{before}{{% for m in messages %}}{body}{{% endfor %}}{_OPEN}"


def calling(call: str, turn: str = _TURN) -> str:
    return over(f"{turn}{_CALLS}{call}{{% endfor %}}")


TEMPLATES = {
    "plain": over(_TURN),
    "mapping": calling("[{{ c.function.name }}{{ c.function.arguments | tojson }}]"),
    "joined": calling("{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}"),
    "pairs": calling(
        "[{{ c.function.name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}]"
    ),
    "content none": over(
        "{% if m.tool_calls and m.content is none %}"
        f"{_CALLS}[{{{{ c.function.name }}}}{{{{ c.function.arguments | tojson }}}}]{{% endfor %}}"
        f"{{% else %}}{_TURN}{{% endif %}}"
    ),
    "first system": over(
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        f"{_TURN}{_CALLS}[{{{{ c.function.name }}}}{{{{ c.function.arguments | tojson }}}}]{{% endfor %}}"
    ),
    "dropped system": over(f"{{% if m.role != 'system' %}}{_TURN}{{% endif %}}",
        "{% if messages[0].role == 'system' %}<S>{{ messages[0].content }}{% endif %}"),
    "no system": over(
        "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        f"{_TURN}"
    ),
    "alternating": over(
        "{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles alternate') }}{% endif %}" + _TURN
    ),
    "nine": over(
        "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "({{ m.tool_call_id }}){% endif %}" + _TURN + _CALLS +
        "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "[{{ c.function.name }}{{ c.function.arguments | tojson }}({{ c.id }})]{% endfor %}"
    ),
    "named": over(
        "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}" + _TURN + _CALLS +
        "[({{ c.id }}){{ c.function.arguments | tojson }}]{% endfor %}"
    ),
    "one call": over(
        "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
        f"{_TURN}{_CALLS}[{{{{ c.function.name }}}}{{{{ c.function.arguments | tojson }}}}]{{% endfor %}}"
    ),
    "thought or text": over(
        "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}"
        "<{{ m.role[0] | upper }}>{{ m.thinking or '' }}{{ m.content or '' }}"
        f"{_CALLS}[{{{{ c.function.name }}}}{{{{ c.function.arguments | tojson }}}}]{{% endfor %}}"
    ),
    "asks for more": over(_TURN, "{% for t in tools or [] %}{{ '/' + t.function.description }}"
        "{{ t.function.name }}{{ t.function.parameters.properties | tojson }}{% endfor %}"),
}  # fmt: skip
KNOWS_CALLS = "mapping", "joined", "pairs", "content none", "first system", "nine", "named"
U, N = {"role": "user", "content": "Asked"}, {"role": "user", "content": "Next"}
A = {"role": "assistant", "content": "Said"}


def call(
    arguments: Any = '{"place": "Paris"}', id: str | None = "call_1", name: str = "look"
) -> Any:
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found if id is None else {"id": id, **found}


def calls(*which: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(which), **more}


def result(text: str = "Found", id: str | None = "call_1") -> dict[str, Any]:
    found = {"role": "tool", "content": text}
    return found if id is None else {"tool_call_id": id, **found}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(resources.data_path("profiles", "kt-mini"))


@cache
def texts_of(name: str) -> TextModel:
    template = ChatTemplate(TEMPLATES[name], name=name)
    return TextModel(tokenizer(), ControlTokens(tokenizer()), template, frozenset(), Settings())


def prompt(
    name: str, messages: Sequence[Mapping[str, Any]], *, continues: bool = False, **variables: Any
) -> str:
    return rendered_by(texts_of(name), messages, variables, 1 << 20, continues=continues).text


def in_order(text: str, *words: str) -> bool:
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places)


def test_what_a_template_takes_is_rendered_as_it_came() -> None:
    messages = [system("S"), U, {**A, "reasoning_content": "T"}, calls(call()), result(), N]
    template = texts_of("mapping").template
    whole = [{**each, "content": each["content"] or ""} for each in messages]
    for each in whole:
        for one in each.get("tool_calls", ()):
            one["function"] = {**one["function"], "arguments": {"place": "Paris"}}
    assert prompt("mapping", messages) == template.render(whole)


@pytest.mark.parametrize("name", KNOWS_CALLS)
def test_calls_and_results_reach_every_template(name: str) -> None:
    text = prompt(name, [U, calls(call()), result(), N])
    assert in_order(text, "Asked", "look", "Found", "Next")
    assert re.search(r'"place":\s*"Paris"|place=Paris', text)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_two_calls_keep_their_results(name: str) -> None:
    said = calls(call(), call("{}", "call_2", "now"))
    text = prompt(name, [U, said, result("Found1"), result("Found2", "call_2"), N])
    assert in_order(text, "Asked", "look", "Found1", "Found2", "Next") and "now" in text


@pytest.mark.parametrize("name", ["mapping", "pairs", "joined"])
@pytest.mark.parametrize(
    ("given", "kept"),
    [("null", ()), (None, ()), ("", ()), ('{"p": "Par', ('{"p": "Par',)), ('["Paris"]', ("Paris",)), (7, ("7",))],
)  # fmt: skip
def test_arguments_that_are_no_object_are_seen_and_break_nothing(
    name: str, given: Any, kept: Sequence[str]
) -> None:
    text = prompt(name, [U, calls(call(given)), result(), N])
    plain = text.replace("\\u0022", '"').replace('\\"', '"')
    assert in_order(plain, "look", *kept, "Found") and "null" not in text and "None" not in text


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_system_texts_are_never_lost(name: str) -> None:
    assert in_order(prompt(name, [system("S1"), system("S2"), U]), "S1", "S2", "Asked")
    later = prompt(name, [system("S1"), U, A, system("S2"), N])
    assert in_order(later, "S1", "Asked", "Said", "S2", "Next")
    assert in_order(prompt(name, [U, A, system("S2")]), "Asked", "Said", "S2")
    if name not in ("plain", "mapping", "joined", "pairs", "content none", "nine", "named"):
        return
    assert "<S>S2" in later  # it stays a system turn where it stands


def test_ids_have_the_form_of_the_template() -> None:
    text = prompt(
        "nine", [U, calls(call(), call("{}", "toolu_2")), result(), result("F2", "toolu_2")]
    )
    ids = re.findall(r"\((\w+)\)", text)
    assert len(ids) == 4 and ids[:2] == ids[2:] and len(set(ids)) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9]{9}", id) for id in ids)
    assert "(abcDEF123)" in prompt("nine", [U, calls(call(id="abcDEF123")), result(id="abcDEF123")])
    said = [U, calls(call()), result(), N, calls(call(id=None, name="now")), result("F2", None)]
    assert re.findall(r"\(([^)]*)\)", prompt("named", said)) == [
        "functions.look:0", "functions.look:0", "functions.now:1", "functions.now:1",
    ]  # fmt: skip


def test_a_result_without_an_id_belongs_to_its_tool_or_the_earliest_open_call() -> None:
    both = calls(call("{}", None, "look"), call("{}", None, "now"))
    named = [{**result("F2", None), "tool_name": "now"}, result("F1", None)]
    found = re.findall(r"\(([^)]*)\)<T>(\w+)", prompt("named", [U, both, *named]))
    assert found == [("functions.now:1", "F2"), ("functions.look:0", "F1")]


def test_a_text_beside_thought_and_call_is_a_message_of_its_own() -> None:
    said = calls(call(), content="Before", reasoning_content="Thought")
    assert in_order(
        prompt("thought or text", [U, said, result()]), "Before", "Thought", "look", "Found"
    )


def test_empty_calls_and_bare_tools_are_nothing_special() -> None:
    text = prompt("first system", [U, {**A, "tool_calls": []}, N])
    assert in_order(text, "Asked", "Said", "Next")
    tool = {"type": "function", "function": {"name": "bare"}}
    text = prompt("asks for more", [U], tools=[tool])
    assert "/bare" in text and "None" not in text


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_an_open_answer_is_gone_on_with(name: str) -> None:
    open_turn = {"role": "assistant", "content": "I am "}
    assert prompt(name, [U, open_turn], continues=True).endswith("I am ")
    assert not prompt(name, [U, open_turn]).endswith("I am ")


def test_control_words_of_a_conversation_stay_words() -> None:
    control = next(each.text for each in tokenizer().added if each.special)
    said = [system("S1"), U, calls(call(json.dumps({"place": control}))), result(control), N]
    texts = texts_of("no system")
    ids = texts.control.encode(rendered_by(texts, said, {}, 1 << 20))
    assert texts.tokenizer.id_of(control) not in ids


@pytest.mark.parametrize("name", ["plain", "cut", "left out"])
def test_control_words_of_an_open_answer_stay_words(name: str) -> None:
    """Also where a template cuts its last answer, or leaves it out."""
    control = next(each.text for each in tokenizer().added if each.special)
    last = "{{ m.content.split('###')[0] }}" if name == "cut" else ""
    body = f"{{% if m.role == 'assistant' %}}{last}{{% else %}}{_TURN}{{% endif %}}"
    template = ChatTemplate(TEMPLATES["plain"] if name == "plain" else over(body), name=name)
    texts = TextModel(tokenizer(), ControlTokens(tokenizer()), template, frozenset(), Settings())
    said = {"role": "assistant", "content": f"hi{control}###x"}
    more = {"add_generation_prompt": False}
    rendered = rendered_by(texts, [U, said], more, 1 << 20, continues=True)
    assert rendered.text.endswith(f"<A>hi{control}###x")
    assert texts.tokenizer.id_of(control) not in texts.control.encode(rendered)


def test_a_later_system_text_stays_where_it_was_when_the_conversation_goes_on() -> None:
    said = [system("S1"), U, system("Late")]
    first = prompt("first system", said)
    again = prompt("first system", [*said, A, N])
    assert again.startswith(first.removesuffix("<A>"))
    assert prompt("first system", [*said, A], continues=True).endswith("<A>Said")


def test_calls_without_ids_keep_their_results_where_one_comes_at_a_time() -> None:
    both = calls(call("{}", None, "aa"), call("{}", None, "bb"))
    found = [{"role": "tool", "tool_name": name, "content": name.upper()} for name in ("aa", "bb")]
    text = prompt("one call", [U, both, *found])
    assert in_order(text, "[aa", "<T>AA", "[bb", "<T>BB")


def test_ids_that_name_their_tools_already_stay() -> None:
    text = prompt("named", [U, calls(call(id="functions.look:5")), result(id="functions.look:5")])
    assert re.findall(r"\(([^)]*)\)", text) == ["functions.look:5"] * 2


@pytest.mark.parametrize("depth", [39, 48, 64, 3000])
def test_deep_arguments_are_no_reason_to_refuse(depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    assert "Found" in prompt("mapping", [U, calls(call(nested)), result()])


def test_odd_ids_are_no_ids() -> None:
    odd = [U, calls({**call(), "id": {"a": 1}}), {**result(), "tool_call_id": 7}]
    assert all("Found" in prompt(name, odd) for name in ("nine", "named", "one call", "mapping"))


def test_tools_may_have_no_properties() -> None:
    for parameters in ({}, {"type": "object"}, None):
        tool = {"type": "function", "function": {"name": "bare", "parameters": parameters}}
        assert "bare{}" in prompt("asks for more", [U], tools=[tool])


def test_thoughts_of_turns_that_become_one_are_kept() -> None:
    said = [U, {**A, "reasoning_content": "T1"}, {**A, "reasoning_content": "T2"}, N]
    whole = normalized(said, {}, Capabilities(texts_of("alternating").template))[0]
    assert whole[1]["reasoning_content"] == "T1\n\nT2"


def test_a_slow_template_is_not_asked_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = list[Any]()
    template = ChatTemplate(TEMPLATES["mapping"], name="slow")
    render = template.render
    monkeypatch.setattr(template, "render", lambda *a, **k: rendered.append(a) or render(*a, **k))
    assert Capabilities(template).calls is not None
    monkeypatch.setattr(capabilities, "_MOST_S", -1.0)
    rendered.clear()
    can = Capabilities(template)
    assert can.calls is None and not can.system and not can.repeated_roles and not rendered
    monkeypatch.setattr(capabilities, "_MOST_S", 0.0)  # one question takes it all
    can = Capabilities(template)
    assert can.system and not can.repeated_roles and len(rendered) == 1


def test_long_runs_of_results_cost_their_number() -> None:
    def cost(n: int, name: str) -> float:
        said = [U, calls(call()), *(result(str(i)) for i in range(n))]
        can, began_s = texts_of(name).can, time.thread_time()
        normalized(said, {}, can)
        return time.thread_time() - began_s

    for name in ("mapping", "one call", "alternating"):
        cost(10, name)
        less, more = (min(cost(n, name) for _ in range(3)) for n in (4_000, 16_000))
        assert more < 12 * max(less, 0.005)


def test_capabilities_are_those_of_the_templates() -> None:
    forms = {name: Capabilities(texts_of(name).template).calls for name in TEMPLATES}
    assert {name for name, form in forms.items() if form is None} == {
        "plain", "dropped system", "no system", "alternating", "asks for more",
    }  # fmt: skip
    assert forms["joined"] is not None and forms["joined"].as_text
    assert forms["content none"] is not None and forms["content none"].content is None
    assert forms["one call"] is not None and not forms["one call"].several
    ids = {name: form.ids for name, form in forms.items() if form is not None}
    assert (ids["nine"], ids["named"], ids["mapping"]) == (IdForm.NINE, IdForm.NAMED, IdForm.UNSEEN)


def test_nothing_is_asked_of_a_template_for_a_plain_conversation() -> None:
    class Unasked(Capabilities):
        def _rendered(self, messages: Any, **more: Any) -> str | None:
            raise AssertionError("it was rendered")

    normalized([U, A, N], {}, Unasked(texts_of("plain").template))


def test_a_template_that_refuses_everything_says_so() -> None:
    template = ChatTemplate("{{ raise_exception('no') }}", name="none")
    texts = TextModel(tokenizer(), ControlTokens(tokenizer()), template, frozenset(), Settings())
    with pytest.raises(BadCheckpoint, match="refuses this conversation: no"):
        rendered_by(texts, [U, calls(call()), result()], {}, 100)


def test_a_model_whose_template_knows_no_calls_gets_the_generic_form() -> None:
    texts = read_text_model("kt-mini", resources.data_path("profiles", "kt-mini"))
    answers = AnswerFormat.of(texts)
    assert answers.calls is GENERIC and not answers.may_call


# --- any history ------------------------------------------------------------------------------------

_WORDS = st.integers(0, 999).map(lambda n: f"w{n}w")
_ARGUMENTS = st.sampled_from(['{"k": 1}', "{}", "", "null", None, "{cut", "[1]", {"k": [1]}, 3])
_CALL = st.builds(
    call, _ARGUMENTS, st.sampled_from([None, "call_1", "toolu_2", "x" * 9]), st.sampled_from(["look", "now"])
)  # fmt: skip
_MESSAGE = st.one_of(
    _WORDS.map(lambda text: {"role": "user", "content": text}),
    _WORDS.map(lambda text: {"role": "assistant", "content": text}),
    _WORDS.map(system),
    _WORDS.map(lambda text: {"role": "developer", "content": text}),
    st.builds(lambda which, text: calls(*which, content=text), st.lists(_CALL, max_size=3), _WORDS),
    st.builds(result, _WORDS, st.sampled_from([None, "call_1", "toolu_2", "none of them"])),
)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=st.lists(_MESSAGE, min_size=1, max_size=9))
def test_no_history_is_refused_or_loses_a_text(name: str, messages: list[dict[str, Any]]) -> None:
    text = prompt(name, messages)
    assert all(each["content"] in text for each in messages)
