# ruff: noqa: E501 - an attack is one line
"""Honest templates render as transformers renders them; hostile ones are stopped, in one sentence."""

import json
import re
import resource
import threading
from pathlib import Path

import pytest
from text import family_templates, templates

from ktcli.errors import BadCheckpoint
from ktcli.text.template import ChatTemplate, find_template, load_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "  What is 2+2?\n\nBriefly: é <b> 😀 "}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
CHATS = {
    "one": [USER],
    "two": [USER, THOUGHT, {"role": "user", "content": "sure?"}],
    "system": [{"role": "system", "content": "Be brief."}, USER, THOUGHT],
}


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", templates.ALL)
def test_equals_transformers(name: str, prompt: bool, chat: list[dict[str, str]]) -> None:
    judge = pytest.importorskip("transformers.utils.chat_template_utils")
    for more in ({}, {"enable_thinking": False}):
        [want], _ = judge.render_jinja_template(
            [chat],
            chat_template=templates.ALL[name],
            add_generation_prompt=prompt,
            **TOKENS,
            **more,
        )
        mine = ChatTemplate(templates.ALL[name], name="x", tokens=TOKENS)
        assert mine.render(chat, add_generation_prompt=prompt, **more) == want


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What it is like outside <now> & there.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town, e.g. Zürich"},
                "days": {"type": "integer", "default": 1},
                "units": {"type": "string", "enum": ["metric", "imperial"]},
                "parts": {"type": "array", "items": {"type": ["string", "null"]}},
            },
            "required": ["place"],
        },
    },
}
NOW = {
    "type": "function",
    "function": {"name": "now", "description": "The time.", "parameters": {}},
}
_CALL = {"name": "weather", "arguments": {"place": "Zürich", "days": 2, "parts": ["sky", None]}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcd12345", "type": "function", "function": _CALL}],
}
RESULT = {
    "role": "tool",
    "name": "weather",
    "tool_call_id": "abcd12345",
    "content": '{"sky": "blau"}',
}
WITH_TOOLS = [USER, CALLED, RESULT]
# As clients of other programs send them: fields that are null, reasoning under each of its names.
NULLS = {"name": None, "tool_calls": None, "tool_call_id": None, "reasoning": None}
REASONED = {"role": "assistant", "content": "4", "reasoning_content": None}
FOREIGN = [
    USER | NULLS,
    REASONED | NULLS | {"thinking": "two and two"},
    USER,
    REASONED | {"reasoning": "it is a sum", "tool_calls": []},
    USER,
    {**CALLED, "content": None, "thinking": "", "reasoning": "ask outside"},
    RESULT,
]
FAMILY_CHATS = {
    **{name: (chat, None) for name, chat in CHATS.items()},
    "foreign": (FOREIGN, [WEATHER]),
    "foreign end": (FOREIGN[:4], None),
    "tools": ([USER], [WEATHER, NOW]),
    "calls": (WITH_TOOLS, [WEATHER]),
    "after": ([CHATS["system"][0], *WITH_TOOLS, THOUGHT, USER], [NOW, WEATHER]),
}
SWITCHES = (
    {},
    *({"enable_thinking": on, "thinking": on, "reasoning_effort": "low"} for on in (True, False)),
)


@pytest.mark.parametrize("chat", FAMILY_CHATS.values(), ids=FAMILY_CHATS)
@pytest.mark.parametrize("name", family_templates.ALL)
def test_families_equal_transformers(name: str, chat: tuple[list[dict], list[dict] | None]) -> None:
    """With tools, their calls and results, thinking on and off, with the prompt for an answer and without."""
    judge = pytest.importorskip("transformers.utils.chat_template_utils")
    messages, tools = chat
    source = family_templates.ALL[name]
    mine = ChatTemplate(source, name="x", tokens=TOKENS)
    for more in SWITCHES:
        for prompt in (True, False):
            said = {"add_generation_prompt": prompt, "tools": tools, **more}
            try:
                [want], _ = judge.render_jinja_template(
                    [messages], chat_template=source, **TOKENS, **said
                )
            except Exception as error:  # the template refuses
                with pytest.raises(BadCheckpoint, match=re.escape(str(error)[:40])):
                    mine.render(messages, **said)
            else:
                assert mine.render(messages, **said) == want


def test_only_plain_values_reach_a_template() -> None:
    template = ChatTemplate("{{ tools }}", name="x")
    with pytest.raises(BadCheckpoint, match=r"received a \w*Path"):
        template.render([USER], tools=[Path("/")])
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadCheckpoint, match="runs too long"):
        template.render([USER], tools=deep)


@pytest.mark.parametrize("source", templates.SNIPPETS)
def test_the_dialect_is_that_of_transformers(source: str) -> None:
    judge = pytest.importorskip("transformers.utils.chat_template_utils")
    chat = [USER, THOUGHT]
    [want], _ = judge.render_jinja_template([chat], chat_template=source)
    assert ChatTemplate(source, name="x").render(chat, add_generation_prompt=False) == want


def test_a_long_conversation_passes() -> None:
    chat = [USER, {"role": "assistant", "content": "words " * 300}] * 1000
    for source in (templates.QWEN3, templates.CHATML):
        assert len(ChatTemplate(source, name="x").render(chat)) > 1_500_000


def test_a_template_may_refuse() -> None:
    with pytest.raises(BadCheckpoint, match=r"of m refuses .*roles must alternate"):
        ChatTemplate(templates.MISTRAL, name="m", tokens=TOKENS).render([USER, USER])


def test_today() -> None:
    made = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", name="x").render([])
    assert made[:2] == "20" and len(made) == 10


DOUBLING = "{% set ns = namespace(a='aaaaaaaa') %}{% for i in range(60) %}{% set ns.a = EXPR %}{% endfor %}"
NESTING = "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
NAMES = "{% set ns = namespace(a=1) %}" + "".join(
    f"{{% set n{i} = namespace(a=n{i - 1}, b=n{i - 1}) %}}" if i else "{% set n0 = namespace() %}"
    for i in range(60)
)

ATTACKS = {
    # numbers that nothing interrupts
    "division of hex": "{% set a = ('f' * 4000000)|int(0, 16) %}{% set b = ('f' * 2000000)|int(0, 16) %}{{ a % b }}",
    "product of hex": "{% set a = ('f' * 4000000)|int(0, 16) %}{{ a * a > 1 }}",
    # loops
    "nested loops": "{% for i in range(40000) %}{% for j in range(40000) %}{% endfor %}{% endfor %}",
    "long range": "{% for i in range(10**12) %}{% endfor %}",
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching macro": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "caller": "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{% for i in range(10**9) %}{% endfor %}{% endcall %}",
    "loop over text": "{% for i in 'a' * 4000000 %}{% endfor %}",
    "break does not help": "{% for i in range(50000) %}{% for j in range(50000) %}{% break %}{% endfor %}{% endfor %}",
    # growing text
    "multiply": "{{ 'a' * 10**10 }}",
    "multiply left": "{{ 10**10 * 'a' }}",
    "multiply twice": "{{ ('a' * 4000000) * 4000000 }}",
    "doubling +": DOUBLING.replace("EXPR", "ns.a + ns.a"),
    "doubling ~": DOUBLING.replace("EXPR", "ns.a ~ ns.a"),
    "doubling join": DOUBLING.replace("EXPR", "[ns.a, ns.a]|join"),
    "doubling .join": DOUBLING.replace("EXPR", "ns.a.join(['b', 'c', 'd', ns.a])"),
    "doubling replace": DOUBLING.replace("EXPR", "ns.a|replace('a', 'aa')"),
    "doubling .replace": DOUBLING.replace("EXPR", "ns.a.replace('a', 'aa')"),
    "doubling format": DOUBLING.replace("EXPR", "'%s%s' % (ns.a, ns.a)"),
    "doubling |format": DOUBLING.replace("EXPR", "'%s%s'|format(ns.a, ns.a)"),
    "doubling escape": DOUBLING.replace("EXPR", "(ns.a ~ '&')|escape|replace('a', '&')"),
    "doubling json": DOUBLING.replace("EXPR", "[ns.a, ns.a]|tojson"),
    "doubling string": DOUBLING.replace("EXPR", "[ns.a, ns.a]|string"),
    "doubling slice": DOUBLING.replace("EXPR", "(ns.a * 2)[1:]"),
    "doubling macro": "{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}" + DOUBLING.replace("EXPR", "m(ns.a)"),
    "doubling block": "{% set ns = namespace(a='a') %}{% for i in range(60) %}{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = b %}{% endfor %}",
    "text in loops": "{% set x %}{% for i in range(50000) %}" + "a" * 9000 + "{% endfor %}{% endset %}",
    "printed in loops": "{% for i in range(50000) %}" + "a" * 9000 + "{% endfor %}",
    "many long texts": "{% set ns = namespace(a=[]) %}{% for i in range(999) %}{% set ns.a = ns.a + [('a' * 900000)[1:]] %}{% endfor %}",
    "wide field": "{{ '%1000000000d' % 1 }}",
    "wide field 2": "{{ '%*d' % (1000000000, 1) }}",
    "wide field 3": "{{ '%.1000000000f'|format(1) }}",
    "center": "{{ 'a'.center(10**10) }}",
    "|center": "{{ 'a'|center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "indent": "{{ 'a\nb'|indent(10**10) }}",
    "indent text": "{{ ('a\n' * 90000)|indent('b' * 100) }}",
    "json indent": "{{ [1]|tojson(indent=10**10) }}",
    "json separators": "{{ [1, 2]|tojson(separators=('a' * 4000000, 'b')) }}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "wordwrap": "{{ 'a b'|wordwrap(1, wrapstring='a' * 4000000) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    # growing lists and numbers
    "list *": "{{ [0] * 10**10 }}",
    "list doubling": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "list of text": "{{ ('a' * 4000000)|list }}",
    "list of range": "{% set ns = namespace(a=[]) %}{% for i in range(99) %}{% set ns.a = ns.a + [range(50000)|list] %}{% endfor %}",
    "split": "{{ ('a' * 4000000).split('a') }}",
    "split spaces": "{{ ('a ' * 2000000).split() }}",
    "sort": "{{ ('a' * 4000000)|sort }}",
    "nested, printed": NESTING + "{{ ns.a }}",
    "nested, compared": NESTING + "{{ ns.a == ns.a }}",
    "nested dict": NESTING.replace("[ns.a, ns.a]", "{'a': ns.a, 'b': ns.a}") + "{{ ns.a }}",
    "nested dict()": NESTING.replace("[ns.a, ns.a]", "dict(a=ns.a, b=ns.a)") + "{{ ns.a }}",
    "nested tuple": NESTING.replace("[ns.a, ns.a]", "(ns.a, ns.a)") + "{{ {ns.a: 1} }}",
    "nested names": NAMES + "{{ n59 }}",
    "nested names, filtered": NAMES + "{{ n59|upper }}",
    "nested names, joined": NAMES + "{{ [n59, n59]|join }}",
    "deep list": "{% set ns = namespace(a=[1]) %}{% for i in range(9000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "powers": "{% set ns = namespace(a=9) %}{% for i in range(90) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "round": "{{ 1.5|round(100000000, 'ceil') }}",
    "digits": "{{ " + "9" * 100_000 + " }}",
    # attributes and code
    "class": "{{ ''.__class__ }}",
    "class by item": "{{ ''['__class__'] }}",
    "class by filter": "{{ ''|attr('__class__') }}",
    "class by map": "{{ ['']|map(attribute='__class__')|list }}",
    "class by sort": "{{ ['', '']|sort(attribute='__class__.__name__') }}",
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "format": "{{ '{0.__class__}'.format('') }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "globals": "{{ range.__globals__ }}",
    "init": "{{ namespace.__init__.__globals__ }}",
    "self": "{{ self._TemplateReference__context }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "lipsum globals": "{{ lipsum.__globals__ }}",
    "joiner": "{{ joiner.__init__ }}",
    "macro": "{% macro m() %}{% endmacro %}{{ m.__call__ }}",
    "underscore name": "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
    "mutation": "{{ messages.append(1) }}",
    "pop": "{{ messages[0].pop('role') }}",
    "encode": "{{ 'a'.encode() }}",
    "translate": "{{ 'aaaa'.translate({97: 'bbbbbbbb'}) }}",
    # other files and statements
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends '/etc/passwd' %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "do": "{% do messages.clear() %}",
    # what it is
    "not a template": "{% if %}",
    "unclosed": "{% for a in b %}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep sum": "{{ 1" + " + 1" * 5000 + " }}",
    "deep ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "nested fors": "{% for a in [1] %}" * 40 + "{% endfor %}" * 40,
    "too long": "a" * 300_000,
    "too many outputs": "{{ a }}" * 30_000,
    "endless list": "{{ [" + "1," * 120_000 + "] }}",
    "endless sum": "{{ " + "a~" * 120_000 + "a }}",
    "as long as may be": "{{ a.b }}" * 3_500,
    "no such filter": "{{ 1|shell }}",
    "no such variable": "{{ nothing.at.all }}",
    "internals of a missing value": "{{ nothing.__init__.__globals__ }}",
    "division": "{{ 1 // 0 }}",
    "wrong types": "{{ 'a' + 1 }}",
}  # fmt: skip


@pytest.mark.in_turn("source")
@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_attack_is_one_sentence(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, the peak so far
    with pytest.raises(BadCheckpoint) as caught:
        ChatTemplate(source, name="evil").render([USER])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    sentence = str(caught.value)
    assert sentence.startswith("the chat template of evil ")
    assert "\n" not in sentence and len(sentence) < 320
    assert "brief" not in sentence, "a class of the sandbox is named"
    assert grown < 120 << 10


@pytest.mark.thorough
def test_attacks_end_in_other_threads_too() -> None:
    said: list[str] = []

    def run() -> None:
        for name in ("nested loops", "branching macro", "doubling ~", "nested, printed"):
            try:
                ChatTemplate(ATTACKS[name], name="evil").render([USER])
            except BadCheckpoint as error:
                said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert len(said) == 4


def test_where_a_template_lies(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="has no chat template"):
        find_template(tmp_path, name="base")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "tool_use", "template": "T"},
                    {"name": "default", "template": "D{{ bos_token }}"},
                ],
                "bos_token": {"content": "<s>", "special": True},
            }
        )
    )
    assert load_template(tmp_path, name="x").render([]) == "D<s>"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_template(tmp_path, name="x").render([]) == "J"


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 99 + b"1" + b"}" * 99],
)
def test_broken_files_are_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"tokenizer_config\.json"):
        load_template(tmp_path, name="x")


def test_names_that_are_no_names(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        '{"chat_template": [{"name": ["x"], "template": "T{{ eos_token }}"}], "eos_token": "\\ud800"}'
    )
    template = load_template(tmp_path, name="x")
    assert template.render([]).encode() == b"T?"
