"""GGUF files that hold only a tokenizer, and texts to cut up with it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
from gguf_models import GgufCase
from tokenizers.pre_tokenizers import ByteLevel

from ktcli.resources import data_path
from ktcli.weights.gguf.words import WORDS

# No combining marks: llama.cpp's patterns leave out the class of them, which those of the models have.
TEXTS = (
    "Hello, world!",
    "The quick brown fox can't jump; they'll say I'VE done it.",
    "x = 3.14159 * 1234567 - 12 + 1000000000",
    "def f(a,b):\n\treturn a+b  # done\n\n\n    pass\n",
    "  leading and trailing   ",
    "naïve café, Größe, Ελλάδα, Привет МИР, HTTPServer camelCase",
    "你好,世界。 日本語のテキスト 한국어 العربية",
    "mixed中文and English123abc",
    "🙂 emoji 👩‍👩‍👧 and symbols ™ © § € — “quoted” …",
    "a\r\nb\r\n\r\n  c",
    "\t\ttabs\u00a0and\u3000spaces",
    "!!!??? ::= -> => // /* */ <|user|> <|end|>",
    "1 12 123 1234 12345678 0x1F 3rd 2e10 ٣٤٥٦ ²³ v1.22.333",
    "if (x_1 >= 0.5) { return 'It''s'; } // $5 + 10% = ^~`|\\\n\r\n\t#end",
    "we'RE it'll I'd 'tis d'or, a b cd e. f\n/g/\n\n/h;\n",
    "     five  two    four         nine\n  \n \t x",
    "한글 ㄱㄴ ㄅㄆ，、 ไทย ລາວ។ ។ကa",
    "",
    " ",
    "\n",
)


def mini_vocabulary(pre: str) -> dict[str, Any]:
    """Metadata of the built-in model's tokenizer, words cut as `pre` says, and its template."""
    file = json.loads((data_path("profiles", "kt-mini") / "tokenizer.json").read_text())
    vocab: dict[str, int] = file["model"]["vocab"]
    special = {token["content"]: token["id"] for token in file["added_tokens"]}
    texts = {id: text for text, id in {**vocab, **special}.items()}
    merges = [each if isinstance(each, str) else " ".join(each) for each in file["model"]["merges"]]
    template = (data_path("profiles", "kt-mini") / "chat_template.jinja").read_text()
    every = [texts[id] for id in range(len(texts))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": every,
        "tokenizer.ggml.token_type": [3 if text in special else 1 for text in every],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": special["<|bos|>"],
        "tokenizer.ggml.eos_token_id": special["<|end|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }


def byte_level(pre: str) -> GgufCase:
    """The built-in model's vocabulary, cut into words as `pre` says."""
    return _only_vocabulary(pre, mini_vocabulary(pre))


@cache
def _every_word() -> dict[str, Any]:
    """Metadata of a vocabulary of bytes in which whatever stands together in a text becomes one token, up to `_LONGEST`
    bytes: its ids show where words are cut."""
    letters = ByteLevel(add_prefix_space=False, use_regex=False)
    found: dict[str, None] = dict.fromkeys(sorted(ByteLevel.alphabet()))
    merges: dict[str, None] = {}
    for size in range(2, _LONGEST + 1):
        for text in TEXTS:
            level = "".join(word for word, _ in letters.pre_tokenize_str(text))
            found |= dict.fromkeys(level[i : i + size] for i in range(len(level) - size + 1))
    found = {word: None for word in found if not any(control in word for control in _CONTROLS)}
    for word in sorted(found, key=lambda word: (-len(word), word)):
        if len(word) > 1:  # the longest first: what has begun to grow goes on
            merges |= dict.fromkeys((f"{word[:-1]} {word[-1]}", f"{word[0]} {word[1:]}"))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*found, *_CONTROLS],
        "tokenizer.ggml.token_type": [1] * len(found) + [3] * len(_CONTROLS),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


_LONGEST, _CONTROLS = 12, ("<|user|>", "<|end|>")
# Texts that llama.cpp cuts otherwise than the models' own patterns do, whose classes its regular expressions leave out:
# letters by case, digits and blanks beyond ASCII's. One digit each is DeepSeek-LLM's.
OTHERWISE = {
    "deepseek-llm": r"[0-9]{2}|\u3000",
    "deepseek-coder": r"\u3000",
    **dict.fromkeys(("youtu", "tiny_aya", "cohere2moe", "kimi-k2"), "[a-z][A-Z]"),
    "superbpe": "[٣-٦]",
}


def words(pre: str) -> GgufCase:
    """A vocabulary that shows how texts are cut into words."""
    return _only_vocabulary(pre, _every_word() | {"tokenizer.ggml.pre": pre})


def sentencepiece(name: str, **changes: Any) -> GgufCase:
    """Pieces with scores: letters, and unions that a tokenizer would have learned from these texts."""
    letters = sorted({letter for text in TEXTS for letter in text if letter.isalpha()})[:60]
    words = (
        "the quick brown fox jump and done world Hello emoji symbols English mixed leading".split()
    )
    unions = {word[:end] for word in words for end in range(2, len(word) + 1)}
    unions |= {f"\u2581{word[:end]}" for word in words for end in range(1, len(word) + 1)}
    pieces = ["\u2581", *letters, *sorted(unions, key=lambda union: (len(union), union))]
    texts = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *dict.fromkeys(pieces),
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(texts) - 259)]
    return _only_vocabulary(
        name,
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": texts,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": [float(-max(id - 259, 0)) for id in range(len(texts))],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_bos_token": False,
            **changes,
        },
    )


def _only_vocabulary(name: str, metadata: dict[str, Any]) -> GgufCase:
    shape = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    one = np.ones(32, np.float32)
    return GgufCase(
        name, "llama", "F32", lambda case: iter([("output_norm.weight", one)]), shape | metadata
    )


VOCABULARIES = (
    *map(words, WORDS),
    sentencepiece("pieces"),
    sentencepiece("pieces-without-prefix", **{"tokenizer.ggml.add_space_prefix": False}),
)
