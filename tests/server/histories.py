"""Histories that clients send back, as data of no API and as the bodies of four, and small templates with the habits of
published ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dialogue.test_history import TEMPLATES as BASIC
from hypothesis import strategies as st

_OPEN = "{% if add_generation_prompt %}<A>{% endif %}"
_CALL = "{{ c.function.name }}{{ c.function.arguments | tojson }}"
_CALLS = f"{{% for c in m.tool_calls or [] %}}[{_CALL}]{{% endfor %}}"


def _over(body: str, before: str = "", messages: str = "messages") -> str:
    return f"{before}{{% for m in {messages} %}}{body}{{% endfor %}}{_OPEN}"


# Each has a habit, or a few, of the published template that it is named after; none is one of them.
TEMPLATES = {
    **BASIC,
    "thoughts after the last question (qwen3)": _over(
        "{% if m.content is string %}{% set content = m.content %}{% else %}{% set content = '' %}{% endif %}"
        "{% if m.role == 'assistant' %}{% set thought = '' %}"
        "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
        "{% elif '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1] %}"
        "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
        "<A>{% if loop.index0 > ns.last and thought %}<think>{{ thought }}</think>{% endif %}{{ content }}" + _CALLS +
        "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<U>{% endif %}"
        "<tool_response>{{ content }}</tool_response>{% else %}<{{ m.role[0] | upper }}>{{ content }}{% endif %}",
        "{% set ns = namespace(last=messages | length - 1) %}{% for m in messages[::-1] %}"
        "{% if m.role == 'user' and ns.last == messages | length - 1 %}"
        "{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}",
    ),
    "a question is needed (qwen3.5)": _over(
        "<{{ m.role[0] | upper }}>{{ m.content }}" + _CALLS,
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('No user query found in messages.') }}{% endif %}",
    ),
    "visible text (glm)": _over(
        "<{{ m.role }}>{{ visible(m.content) }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}<k>{{ k }}</k><v>"
        "{{ v if v is string else v | tojson }}</v>{% endfor %}{% endfor %}",
        "{% macro visible(content) %}{% if content is string %}{{ content }}{% elif content is iterable and "
        "content is not mapping %}{% for each in content %}{% if each is mapping and each.type == 'text' %}"
        "{{ each.text }}{% endif %}{% endfor %}{% else %}{{ content }}{% endif %}{% endmacro %}",
    ),
    "system texts at the top (deepseek)": _over(
        "{% if m.role == 'user' %}{% set ns.tool = false %}<U>{{ m.content }}{% endif %}"
        "{% if m.role == 'assistant' and m.tool_calls %}{% for c in m.tool_calls %}"
        "{% if loop.first and m.content is none %}<A>{% elif loop.first %}<A>{{ m.content }}{% endif %}"
        "[{{ c.type + c.function.name + c.function.arguments }}]{% endfor %}{% endif %}"
        "{% if m.role == 'assistant' and not m.tool_calls %}<A>{{ m.content }}<E>{% endif %}"
        "{% if m.role == 'tool' %}<T>{{ m.content }}{% endif %}",
        "{% set ns = namespace(system='', tool=false) %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = ns.system + m.content %}{% endif %}{% endfor %}{{ ns.system }}",
    ),
    "alternating but for tools, ids of nine (mistral)": _over(
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS]"
        "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "{{ c.function | tojson }}{{ c.id }}{% endfor %}{% elif m.role == 'assistant' %}{{ m.content }}"
        "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "[TOOL_RESULTS]{{ m.content | string }}{{ m.tool_call_id }}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}",
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}{% set ns = namespace(n=0) %}{% for m in rest %}"
        "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is undefined) %}"
        "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}",
        "rest",
    ),
    "another name of the assistant (gemma)": _over(
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "<{{ 'model' if m.role == 'assistant' else m.role }}>{% if loop.first %}{{ ns.first }}{% endif %}"
        "{{ m.content | trim }}",
        "{% set ns = namespace(first='') %}{% if messages[0].role == 'system' %}"
        "{% set ns.first = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}",
        "rest",
    ),
    "tools in the first question, one call (llama)": _over(
        "{% if not (m.role == 'tool' or m.tool_calls) %}<{{ m.role }}>{{ m.content | trim }}"
        "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        "{% set c = m.tool_calls[0] %}<A>[" + _CALL + "]{% else %}<ipython>"
        "{% if m.content is mapping or m.content is iterable and m.content is not string %}{{ m.content | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endif %}",
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content | trim %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{{ first }}"
        "{% if tools %}{% if not rest %}{{ raise_exception('no first user message') }}{% endif %}"
        "<U>{{ tools | tojson }}{{ rest[0].content | trim }}{% set rest = rest[1:] %}{% endif %}",
        "rest",
    ),
    "results name the last call (gpt-oss)": _over(
        "{% if m.role == 'developer' or m.role == 'system' %}{% if not loop.first %}"
        "{{ raise_exception('first only') }}{% endif %}<S>{{ m.content }}{% elif m.role == 'assistant' %}"
        "{% if 'tool_calls' in m %}{% if m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}"
        "<A>{{ m.content or m.thinking or '' }}{% set c = m.tool_calls[0] %}to={{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% set ns.name = c.function.name %}{% else %}<A>{{ m.content }}"
        "{% set ns.name = none %}{% endif %}{% elif m.role == 'tool' %}{% if ns.name is none %}"
        "{{ raise_exception('no previous assistant message with a tool call') }}{% endif %}"
        "<{{ ns.name }}>{{ m.content | tojson }}{% else %}<U>{{ m.content }}{% endif %}",
        "{% set ns = namespace(name=none) %}"
        "{% for t in tools or [] %}{{ '// ' + t.function.description + t.function.name }}{% endfor %}",
    ),
    "names or ids of results (kimi)": _over(
        "<{{ m.name or m.role }}>{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
        "{% if m.content is string %}{{ m.content }}{% elif m.content is not none %}{% for c in m.content %}"
        "{{ c.text }}{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}<c>{{ c.id }}<a>"
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}{% endfor %}"
    ),
    "results follow a call (minimax)": _over(
        "{% if m.role == 'assistant' %}<A>{{ m.content }}{% if m.tool_calls %}{% set ns.call = true %}"
        "{% for c in m.tool_calls %}{% set f = c.function or c %}[{{ f.name }}{% for k, v in f.arguments.items() %}"
        "{{ k }}={{ v | tojson if v is not string else v }}{% endfor %}]{% endfor %}{% else %}"
        "{% set ns.call = false %}{% endif %}{% elif m.role == 'tool' %}{% if not ns.call %}"
        "{{ raise_exception('Message has tool role, but there was no previous call') }}{% endif %}"
        "<response>{{ m.content }}</response>{% else %}<{{ m.role[0] | upper }}>{{ m.content }}{% endif %}",
        "{% set ns = namespace(call=false) %}",
    ),
    "thought, text and call in one (nemotron)": _over(
        "{% if m.role == 'tool' %}<T>{{ m.content }}{% else %}<{{ m.role[0] | upper }}>"
        "<think>{{ m.reasoning_content or '' }}</think>{{ m.content | trim }}" + _CALLS + "{% endif %}"
    ),
    "parts of contents, else the text (llama 4)": _over(
        "<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}" + _CALLS
    ),
    "roles that it does not know are left out (phi)": _over(
        "{% if m.role == 'system' %}<S>{{ m.content }}{% elif m.role == 'user' %}<U>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<A>{{ m.content }}{% endif %}"
    ),
    "the text of the last turn alone is trimmed (falcon)": _over(
        "{{ m.role | title + ': ' }}{{ m.content | trim if loop.last else m.content }}\n",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """A message of a history.

    Attributes:
        role: user, assistant, system, developer or tool.
        texts: its blocks of text.
        other: a block that is no text: picture, document, text document, unknown; empty: none.
        thought: of the model; empty: none.
        calls: names, arguments and ids; None: the field is there and empty.
        id: of the call whose result it is.
    """

    role: str
    texts: tuple[str, ...] = ()
    other: str = ""
    thought: str = ""
    calls: tuple[tuple[str, Any, str | None], ...] | None = ()
    id: str | None = None


# Between two halves of a word, so that no trimming takes them away.
_ODD = (
    "",
    " ",
    "\n\n",
    "\ud83d",
    "é🙂",
    "<|end|>",
    "<A>",
    "{{ x }}",
    "{% raw %}",
    '"',
    "\\",
    "<tool_call>",
    "\x00",
    "'",
)
_N = st.integers(0, 999)
_WORDS = st.builds(lambda n, odd, k: f"w{n}w{odd}v{k}v", _N, st.sampled_from(_ODD), _N)
_PLAIN = _N.map(lambda n: f"p{n}p")
_TEXTS = st.lists(_WORDS, min_size=1, max_size=3).map(tuple)
_OTHER = st.sampled_from(["", "", "", "picture", "document", "text document", "unknown", "empty"])
_ARGUMENTS = st.sampled_from(
    [
        '{"k": 1}',
        "{}",
        "",
        "null",
        None,
        "{cut",
        "[1]",
        {"k": [1, {"a": None}]},
        3,
        '{"k": "\\ud83d"}',
        '"text"',
        {"": 1.5},
    ]
)
_IDS = st.sampled_from([None, "call_1", "toolu_2", "x" * 9, "functions.look:0", ""])
_CALLED = st.lists(
    st.tuples(st.sampled_from(["look", "now", "apply_patch"]), _ARGUMENTS, _IDS), max_size=3
).map(tuple)
_TURN = st.one_of(
    st.builds(Turn, st.just("user"), _TEXTS, _OTHER),
    st.builds(Turn, st.just("user"), _TEXTS),
    st.builds(Turn, st.just("assistant"), st.just(()) | _PLAIN.map(lambda text: (text,)), st.just(""),
        st.just("") | _PLAIN, st.none() | _CALLED),
    st.builds(Turn, st.sampled_from(["system", "developer"]), _TEXTS),
    st.builds(Turn, st.just("tool"), st.just(()) | _TEXTS, _OTHER, id=_IDS | st.just("none of them")),
)  # fmt: skip
_FUNCTION = st.fixed_dictionaries(
    {"name": st.sampled_from(["look", "now"])},
    optional={
        "description": st.sampled_from(["Looks", "", None]),
        "parameters": st.sampled_from(
            [
                {},
                {"type": "object"},
                {"type": "object", "properties": {"k": {"type": "string"}}},
                None,
            ]
        ),
    },
)


@dataclass(frozen=True)
class History:
    """A conversation, and the tools that it offers; pictures are in no last question."""

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def texts(self) -> list[str]:
        """What must reach the model: texts of people and tools, and answers; lone surrogates as U+FFFD.

        A text of the model beside its calls is not among them: Mistral's templates leave it out.
        """
        said = [text for turn in self.turns for text in turn.texts if not turn.calls]
        said += [_DOCUMENT for turn in self.turns if turn.other == "text document"]
        return [text.replace("\ud83d", "\ufffd") for text in said]


def _history(turns: Sequence[Turn], tools: Sequence[dict[str, Any]]) -> History:
    last = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
    seen = ("picture", "document")
    whole = [
        Turn(turn.role, turn.texts) if at == last and turn.other in seen else turn
        for at, turn in enumerate(turns)
    ]
    return History(tuple(whole), tuple(tools))


HISTORIES = st.builds(
    _history, st.lists(_TURN, min_size=1, max_size=8).filter(lambda turns: any(turn.texts for turn in turns)),
    st.lists(_FUNCTION, max_size=2),
)  # fmt: skip
_DOCUMENT = "Long text"

# --- bodies of four APIs ------------------------------------------------------------------------------------


def openai(history: History) -> dict[str, Any]:
    """The body of a chat completion."""
    return {"messages": [_message(turn) for turn in history.turns], **_tools(history)}


def _tools(history: History) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": each} for each in history.tools] or None}


def _message(turn: Turn) -> dict[str, Any]:
    found: dict[str, Any] = {"role": turn.role, "content": _content(turn, "text", _OPENAI)}
    if turn.role == "assistant":
        found["content"] = turn.texts[0] if turn.texts else None
        found["tool_calls"] = None if turn.calls is None else [_call(*each) for each in turn.calls]
        if turn.thought:
            found["reasoning_content"] = turn.thought
    if turn.role == "tool" and turn.id is not None:
        found["tool_call_id"] = turn.id
    return found


def _call(name: str, arguments: Any, id: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if name == _CUSTOM:
        found = {"type": "custom", "custom": {"name": name, "input": arguments}}
    return found if id is None else {"id": id, **found}


_CUSTOM = "apply_patch"  # a tool that takes a text
_DATA = {"type": "base64", "media_type": "image/png", "data": "AA"}
_UNKNOWN: dict[str, Any] = {"type": "of another year", "value": {"a": [1]}}
_ANTHROPIC: dict[str, Any] = {
    "picture": {"type": "image", "source": _DATA},
    "document": {"type": "document", "source": _DATA},
    "text document": {"type": "document", "source": {"type": "text", "data": _DOCUMENT}},
    "unknown": _UNKNOWN,
    "empty": {"type": "text", "text": ""},
}
_OPENAI: dict[str, Any] = {
    **_ANTHROPIC,
    "picture": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    "document": {"type": "file", "file": {"file_id": "f"}},
}
_RESPONSES: dict[str, Any] = {
    **_ANTHROPIC,
    "picture": {"type": "input_image", "image_url": "data:image/png;base64,AA"},
    "document": {"type": "input_file", "file_id": "f"},
    "empty": {"type": "input_text", "text": ""},
}


def _content(turn: Turn, kind: str, others: dict[str, Any]) -> Any:
    """One text as a string, more as blocks, none as null."""
    if not turn.other and len(turn.texts) < 2:
        return turn.texts[0] if turn.texts else None
    blocks = [{"type": kind, "text": text} for text in turn.texts]
    return blocks[:1] + ([others[turn.other]] if turn.other else []) + blocks[1:]


def responses(history: History) -> dict[str, Any]:
    """The body of a response."""
    items: list[Any] = []
    for turn in history.turns:
        if turn.role == "tool":
            item = {
                "type": "function_call_output",
                "output": _content(turn, "input_text", _RESPONSES),
            }
            items.append(item if turn.id is None else {"call_id": turn.id, **item})
        elif turn.role == "assistant":
            items += _items(turn)
        else:
            items.append({"role": turn.role, "content": _content(turn, "input_text", _RESPONSES)})
            items += [_UNKNOWN] if turn.other == "unknown" else []
    tools = [{"type": "function", **each} for each in history.tools]
    return {"input": items, "tools": [*tools, {"type": "web_search"}]}


def _items(turn: Turn) -> list[Any]:
    found: list[Any] = []
    if turn.thought:
        summary = [{"type": "summary_text", "text": turn.thought}]
        found.append({"type": "reasoning", "id": "rs", "summary": summary, "content": None})
    if turn.texts:
        content = [{"type": "output_text", "text": turn.texts[0], "annotations": []}]
        found.append({"type": "message", "role": "assistant", "content": content})
    for name, arguments, id in turn.calls or ():
        call = {"type": "function_call", "name": name, "arguments": arguments}
        if name == _CUSTOM:
            call = {"type": "custom_tool_call", "name": name, "input": arguments}
        found.append(call if id is None else {"call_id": id, **call})
    return found


def anthropic(history: History) -> dict[str, Any]:
    """The body of a message; system texts at the beginning are the field of that name."""
    turns = list(history.turns)
    system = []
    while turns and turns[0].role in ("system", "developer"):
        system += [{"type": "text", "text": text} for text in turns.pop(0).texts]
    tools = [
        {
            "name": each["name"],
            "input_schema": each.get("parameters") or {},
            **({"description": each["description"]} if "description" in each else {}),
        }
        for each in history.tools
    ]
    messages = [_blocks(turn) for turn in turns] or [{"role": "user", "content": "p0p"}]
    return {"messages": messages, "system": system, "tools": tools, "max_tokens": 9}


def _blocks(turn: Turn) -> dict[str, Any]:
    if turn.role == "tool":
        result = {"type": "tool_result", "content": _content(turn, "text", _ANTHROPIC)}
        result |= {} if turn.id is None else {"tool_use_id": turn.id}
        return {"role": "user", "content": [result]}
    if turn.role != "assistant":
        role = "user" if turn.role == "user" else "system"
        return {"role": role, "content": _content(turn, "text", _ANTHROPIC)}
    content: list[Any] = [{"type": "redacted_thinking", "data": "x"}]
    if turn.thought:
        content.append({"type": "thinking", "thinking": turn.thought, "signature": ""})
    content += [{"type": "text", "text": text} for text in turn.texts]
    for name, arguments, id in turn.calls or ():
        call = {"type": "tool_use", "name": name, "input": arguments}
        content.append(call if id is None else {"id": id, **call})
    return {"role": "assistant", "content": content}


def ollama(history: History) -> dict[str, Any]:
    """The body of a chat: one text each, pictures beside it, and calls without ids."""
    messages = []
    for turn in history.turns:
        message: dict[str, Any] = {"role": turn.role, "content": "\n".join(turn.texts)}
        if turn.other == "picture":
            message["images"] = ["AA"]
        if turn.other == "text document":
            message["content"] += _DOCUMENT
        if turn.role == "tool":
            message["tool_name"] = "look"
        if turn.thought:
            message["thinking"] = turn.thought
        if turn.role == "assistant":
            calls = [
                {"function": {"name": name, "arguments": each}}
                for name, each, _ in turn.calls or ()
            ]
            message["tool_calls"] = None if turn.calls is None else calls
        messages.append(message)
    return {"messages": messages, **_tools(history)}


APIS: dict[str, Callable[[History], dict[str, Any]]] = {
    "openai": openai,
    "responses": responses,
    "anthropic": anthropic,
    "ollama": ollama,
}


def sent(body: dict[str, Any]) -> bytes:
    """A body as bytes, with lone surrogates as JavaScript escapes them."""
    return json.dumps(body).encode()
