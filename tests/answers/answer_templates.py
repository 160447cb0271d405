"""Answer templates of published families, and of none, with answers that they read: what such models say."""

from __future__ import annotations

from typing import Any

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
WHOLE = {"type": "function", "function": "{content}"}
_QWEN = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
}
_CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'


def _thought(opened: str, closed: str, name: str = "reasoning_content") -> dict[str, Any]:
    return {name: {"open": opened, "close": closed}}


def _xml(opened: str, closed: str, tag: str, **args: Any) -> dict[str, Any]:
    return {
        "open_pattern": opened,
        "close_pattern": closed,
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag, **args},
        "transform": FUNCTION,
    }


def _json(opened: str, closed: str, shape: Any = WHOLE, **more: Any) -> dict[str, Any]:
    return {
        "open_pattern": opened,
        "close": closed,
        "repeats": True,
        "content": "json",
        "transform": shape,
        **more,
    }


_LOOSE = {"value_parser": {"name": "json", "args": {"allow_non_json": True}}}
TEMPLATES: dict[str, dict[str, Any]] = {
    "qwen3": {
        **_QWEN,
        "fields": {
            **_thought("<think>", "</think>"),
            "tool_calls": _json(r"\s*<tool_call>", "</tool_call>"),
            "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>)"},
        },
    },
    "qwen3.5": {
        **_QWEN,
        "fields": {
            **_thought("<think>", "</think>"),
            "tool_calls": _xml(
                r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                r"</function>\s*</tool_call>",
                r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
            ),
            "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
        },
    },
    "smollm": {
        **_QWEN,
        "fields": {
            **_thought("<think>", "</think>", "thinking"),
            "tool_calls": {
                **_json("", "</tool_call>"),
                "open": "<tool_call>",
            },
            "content": {"close": "<|im_end|>"},
        },
    },
    "glm-4.5": {
        "start_anchor": "<|assistant|>",
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
            "tool_calls": _xml(
                r"<tool_call>(?P<name>\S+)\n?",
                r"</tool_call>\s*",
                r"<arg_key>(?P<key>[^<]+)</arg_key>\s*\n<arg_value>(?P<value>.*?)</arg_value>",
                **_LOOSE,
            ),
            "content": {"close_pattern": r"<\|user\|>\s*|$"},
        },
    },
    "cohere": {
        "start_anchor": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "defaults": {"role": "assistant", "plan": None},
        "fields": {
            "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
            **_thought("<|START_THINKING|>", "<|END_THINKING|>", "thinking"),
            "tool_calls": {
                "open": "<|START_ACTION|>",
                "close": "<|END_ACTION|>",
                "content": "json",
                "transform_each": True,
                "transform": {
                    "type": "function",
                    "function": {"name": "{tool_name}", "arguments": "{parameters}"},
                },
            },
        },
    },
    "ernie": {
        "start_anchor": "Assistant:",
        "fields": {
            "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            "content": {"open": "<response>\n", "close_pattern": r"\n?</response>"},
            "tool_calls": _json("<tool_call>", "</tool_call>"),
        },
    },
    "harmony": {
        "start_anchor": "<|start|>assistant",
        "fields": {
            **_thought("<|channel|>analysis<|message|>", "<|end|>", "thinking"),
            "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
            "tool_calls": _json(
                r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
                "<|call|>",
                FUNCTION,
            ),
        },
    },
    "gemma-4": {
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            **_thought("<|channel>thought\n", "<channel|>"),
            "tool_calls": _json(
                r"<\|tool_call>call:(?P<name>\w+)",
                "<tool_call|>",
                FUNCTION,
                content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            ),
            "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
        },
    },
    "llama-3": {
        "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "fields": {
            "tool_calls": {
                **_json(
                    r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*', "}<|eot_id|>", FUNCTION
                ),
            },
            "content": {"close_pattern": r"<\|eot_id\|>\s*"},
        },
    },
    "lfm-2.5": {
        **_QWEN,
        "fields": {
            "thinking": {"open": "<think>", "close_pattern": r"</think>\s*"},
            "tool_calls": _xml(
                r"(?:<\|tool_call_start\|>\[|,\s*)(?P<name>\w+)\(",
                r"\)(?:\]<\|tool_call_end\|>)?\s*",
                r"(?P<key>\w+)=(?P<value>'[^']*'|[\[{](?:[^\[\]{}]|[\[{][^\[\]{}]*[\]}])*[\]}]|[^,)]*)",
                value_parser={
                    "name": "json",
                    "args": {"string_delims": [["'", "'"]], "allow_non_json": True},
                },
            ),
            "content": {"close_pattern": r"<\|im_end\|>\s*"},
        },
    },
    "inkling": {
        "start_anchor": "<|message_model|>",
        "fields": {
            "thinking": {
                "open_pattern": r"(?:<\|message_model\|>)?[^<]*<\|content_thinking\|>",
                "close": "<|end_message|>",
                "repeats": True,
                "join": "\n",
                "content_args": {"strip": False},
            },
            "content": {
                "open_pattern": r"(?:<\|message_model\|>)?[^<]*<\|content_text\|>",
                "close": "<|end_message|>",
                "repeats": True,
                "join": "",
                "content_args": {"strip": False},
            },
            "tool_calls": _json(
                r"(?:<\|message_model\|>)?[^<]*<\|content_invoke_tool_json\|>",
                "<|end_message|>",
                {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.args}"},
                },
            ),
        },
    },
    "invoke": {
        "start_anchor_pattern": r"<\|bot\|>|<\|start\|>assistant",
        "fields": {
            "reasoning_content": {"open_pattern": r"to=self<\|message\|>", "close": "<|eom|>"},
            "content": {"open_pattern": r"to=user<\|message\|>", "close": ["<|eot|>", "<|eom|>"]},
            "tool_calls": _xml(
                r'<invoke\b[^>]*?\bname="(?P<name>[^"]+)">',
                "</invoke>",
                r'<parameter\b[^>]*?\bname="(?P<key>[^"]+)"[^>]*?>(?P<value>.*?)</parameter>',
                **_LOOSE,
                merge_duplicates=True,
            ),
        },
    },
    "lines": {
        "start_anchor": "Bot:",
        "defaults": {"role": "assistant", "sure": False},
        "fields": {
            "score": {"open": "[score]", "close": "[/]", "content": "int"},
            "share": {"open": "[share]", "close": "[/]", "content": "float"},
            "sure": {"open": ["[sure]", "[sure!]"], "close": "[/]", "content": "bool"},
            "notes": {"open": "[note]", "close_pattern": r"\[/\]\n*", "repeats": True},
            "tool_calls": {
                "open_pattern": r"\[call (?P<name>[a-z_]+)\]\n",
                "close": "[/]",
                "repeats": True,
                "content": "kv-lines",
                "content_args": {"kv_sep": "=", **_LOOSE},
                "transform": FUNCTION,
            },
            "content": {},
        },
    },
}

_XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
# What the models say, behind prompts that end with the words in front.
ANSWERS: dict[str, list[tuple[str, str]]] = {
    "qwen3": [
        ("<|im_start|>assistant\n", f"<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{_CALL}\n</tool_call>\n"
         f"<tool_call>\n{_CALL}\n</tool_call><|im_end|>\n<|endoftext|>"),
        ("<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nYes < no.<|im_end|>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes."),
    ],
    "qwen3.5": [
        ("<|im_start|>assistant\n<think>\n", f"hm</think>\n\nI look.\n\n{_XML}\n{_XML}<|im_end|>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", f"{_XML}"),
    ],
    "smollm": [("<|im_start|>assistant\n", f"<think>hm</think><tool_call>{_CALL}</tool_call>"), ("", "a<|im_end|>")],
    "glm-4.5": [
        ("<|assistant|>", "<think>hm</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris"
         "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"),
        ("<|assistant|>\n<think></think>", "\nYes, and\nno.<|user|>"),
    ],
    "cohere": [
        ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n"
         '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris", "days": 3}}\n]'
         "<|END_ACTION|>"),
        ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>"),
    ],
    "ernie": [
        ("Assistant:", f"hm\n</think>\n\n<tool_call>\n{_CALL}\n</tool_call>\n</s>"),
        ("Assistant:<think>\n", "hm\n</think>\n\n<response>\nYes.\n</response>\n</s>"),
    ],
    "harmony": [
        ("<|start|>assistant", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
         'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>'),
        ("<|start|>assistant", "<|channel|>final<|message|>Yes.<|end|>"),
    ],
    "gemma-4": [
        ("<|turn>model\n", '<|channel>thought\nhm<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}'
         "<tool_call|><|tool_response>"),
        ("<tool_response|>", "Yes.<turn|>"),
    ],
    "llama-3": [
        ("<|start_header_id|>assistant<|end_header_id|>\n\n",
         '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}<|eot_id|>'),
        ("", '{"name": 3} is no call<|eot_id|>'),
    ],
    "lfm-2.5": [
        ("<|im_start|>assistant\n", "<think>hm</think>\nI look.<|tool_call_start|>[get_weather(city='Paris', days=3), "
         "ping(on=[1, 2], at={'x': 1})]<|tool_call_end|><|im_end|>"),
    ],
    "inkling": [
        ("<|message_model|>", "<|content_thinking|>hm <|end_message|><|message_model|>me<|content_thinking|> so"
         "<|end_message|><|message_model|><|content_text|>I look.<|end_message|><|message_model|>me"
         '<|content_invoke_tool_json|>{"name": "get_weather", "args": {"city": "Paris", "days": 3}}<|end_message|>'),
    ],
    "invoke": [
        ("<|start|>assistant", ' to=self<|message|>hm<|eom|><|start|>assistant to=x<|message|><invoke id="1" '
         'name="get_weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
         '<parameter name="days">4</parameter></invoke><|eot|>'),
        ("<|bot|>", " to=user<|message|>Yes.<|eot|>"),
    ],
    "lines": [
        ("Bot:", " I look.\n[score] 7 [/][share].5[/][sure!]TRUE[/][note]a[/]\n\n[note]b[/]"
         "[call get_weather]\ncity = Paris\nnothing\ndays=3\n[/]"),
        ("", "[sure]"),
    ],
}  # fmt: skip
for _template in TEMPLATES.values():  # the two spellings exclude each other
    _calls = _template["fields"]["tool_calls"]
    if "open" in _calls:
        _calls.pop("open_pattern", None)
