"""Text models for the tests of samples: a template of a family, and a byte-level tokenizer with its control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chat.fake_engine import write_tokenizer
from text import family_templates, templates

from ktcli.text.model import TextModel, read_text_model

TEMPLATES = {**templates.ALL, **family_templates.ALL}
del TEMPLATES["macros"]  # it is no conversation's
# The tokens that end an answer, as generation_config.json of the family has them.
STOPS = {
    "chatml": ["<|im_end|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "qwen3": ["<|im_end|>"],
    "mistral": ["</s>"],
    "llama3": ["<|eot_id|>", "<|eom_id|>"],
    "mistral-tools": ["</s>"],
    "deepseek-v3.1": ["<｜end▁of▁sentence｜>"],
    "kimi-k2": ["<|im_end|>"],
    "qwen3-tools": ["<|im_end|>"],
    "glm4": ["<|user|>", "<|observation|>"],
    "minimax-m2": ["[e~["],
    "harmony": ["<|return|>", "<|call|>"],
}
CONTROL = """
<s> </s> <|im_start|> <|im_end|> <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>
<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
<｜tool▁output▁begin｜> <｜tool▁output▁end｜>
[INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]
<|eot_id|> <|eom_id|> <|start_header_id|> <|end_header_id|>
<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|> <|tool_calls_section_end|>
<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>
[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> ]~!b[ ]~b] [e~[
<|start|> <|end|> <|message|> <|channel|> <|return|> <|call|>
""".split()


def write_text_model(folder: Path, template: str, stops: list[str], **more: Any) -> TextModel:
    """Writes and reads the text files of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, template, more=[w for w in CONTROL if w not in ("<|user|>",)])
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {row["content"]: row["id"] for row in vocabulary}
    config = folder / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": [ids[stop] for stop in stops]}))
    tokens = {"bos_token": "<s>", "eos_token": stops[0], "chat_template": template, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return read_text_model("m", folder)


def family(folder: Path, name: str) -> TextModel:
    """Returns the text model of a family by the name of its template."""
    return write_text_model(folder / name, TEMPLATES[name], STOPS[name])
