"""What llama.cpp and transformers say of published models, recorded as data for the tests in tests/published.

    python -m pip install --target build/judges --no-deps xllamacpp==2026.10.11549
    PYTHONPATH=.:tests:build/judges .venv/bin/python -m benchmarks.peers.published [NAME ...]

It writes tests/data/published_NAME.json and .npz of the models named, smollm2 and gemma3. Ids of texts and renderings
of the chat template are llama.cpp's, asked over HTTP of the server in the package xllamacpp, which comes compiled.
Logits, likelihoods and greedy answers are those of transformers in f32, on the weights as the gguf package decodes
them: llama.cpp rounds activations, so that its own are no judge. Ids come from llama.cpp throughout: transformers reads
no way of cutting words from a GGUF file.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from published.packages import GEMMA3, SMOLLM2, PublishedModel, cache_folder, fetch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
ANSWER = 32  # tokens

TEXTS = (
    "The capital of France is Paris.",
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "for (size_t i = 0; i < n; ++i) {\n\tsum += x[i] * y[i];\n}",
    "SELECT a.id, COUNT(*) FROM t AS a WHERE a.x >= 10 GROUP BY a.id;",
    '{"key": [1, 2.5e-3, null, true], "text": "a\\nb"}',
    "#include <stdio.h>\nint main(void) { return 0x1F & ~7; }",
    "grep -rn 'x|y' --include=*.py . | wc -l && echo $?",
    "<html><body class='a b'>&nbsp;</body></html>",
    "1234567890",
    "3.14159265358979, 1,000,000 and 1e-10",
    "In 2024 there were 366 days; 00123 has two zeros.",
    "v1.2.3-rc4+5  10.0.0.255:8080",
    "x² + y³ = ½ · 10⁻⁶ ①②③ ٣٤٥ ४५६",
    "我喜欢机器学习,因为它很有趣。2024年",
    "東京は日本の首都です。カタカナとひらがな、漢字。",
    "안녕하세요, 세계! 한국어 문장입니다.",
    "𠮷野家で𩸽を食べる",
    "😀😃🎉 done",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 tone, 🇫🇷",
    "مرحبا بالعالم، هذا نص عربي.",
    "اللُّغَةُ العَرَبِيَّةُ ١٢٣",
    "שלום עולם, זה טקסט בעברית.",
    "नमस्ते दुनिया, यह हिंदी है।",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "Привет, мир! Ёлка и съезд.",
    "Ελληνικά: αβγδε, ΆΈΉ",
    "naïve café, Straße, Æsir, cafe\u0301",
    " ",
    "   three before, three behind   ",
    "a  b   c    d     e",
    "\t\ttabs\tinside\t",
    "one\r\ntwo\r\n\r\nthree\r",
    "\n\n\n\n",
    "  \n \n\t\n x",
    "no\u00a0break\u2003em\u200bzero\ufeff",
    "I'll, you're, it's, DON'T, they'VE, o'clock 'tis",
    "!!! ??? ... --- *** ((())) <<<>>> a_b-c/d\\e @user #tag $5 50%",
)
# With the names of control tokens.
CHATML = (
    "<|im_start|>user\nHi<|im_end|>",
    "<|endoftext|><repo_name><file_sep>",
    "a <|im_end|> b<|im_end|>c <|not_one|>",
)
TURNS = (
    "<start_of_turn>user\nHi<end_of_turn>",
    "<bos><eos><unk><pad><mask><unused7>",
    "a <end_of_turn> b<end_of_turn>c <not_one>",
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    [
        {"role": "user", "content": "  2 + 2?\n"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3 + 3?"},
    ],
    [{"role": "user", "content": "日本の首都は? 😀\r\n"}],
)
BEGINNINGS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time, there was a little",
    "The three primary colors are",
    "import numpy as np\n\ndef mean(values):\n",
    "Photosynthesis is the process by which",
    "The first president of the United States was",
    "To make a cup of tea, first",
    "The largest planet in our solar system is",
    "1, 2, 3, 4, 5,",
)
QUESTIONS = (
    "What is the capital of France?",
    "What is gravity?",
    "Name three fruits.",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "How many days are in a week?",
    "Translate 'good morning' into Spanish.",
    "What does a compiler do?",
    "Give me a tip for sleeping better.",
    "Who wrote Romeo and Juliet?",
)
STATEMENTS = (
    "Question: What is the capital of Italy?\nAnswer:",
    "Monday, Tuesday, Wednesday,",
    "def is_even(n):\n    return",
    "English: good morning\nSpanish:",
    "The opposite of hot is",
    "Gravity is the force that",
    "In the beginning God created",
    "SELECT name FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "<h1>Welcome</h1>\n<p>",
)
# Text that the two likelihoods are of, in the tree: English, and Python.
PASSAGES = ("LICENSE", "profiles/text/python.txt")
CHARACTERS = 4000  # of each, enough for a window


@contextmanager
def llama(path: Path) -> Iterator[Any]:
    """Runs llama.cpp's server on a file; yields the function that asks it."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)

    def ask(route: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{server.listening_address}/{route}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    yield ask


def common(reader: gguf.GGUFReader, architecture: str) -> dict[str, Any]:
    """Returns the fields of transformers' config that all architectures here have."""
    given = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "max_position_embeddings": "context_length",
    }
    found = {f: reader.fields[f"{architecture}.{key}"].contents() for f, key in given.items()}
    rows = next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight")
    return {**found, "vocab_size": rows, "tie_word_embeddings": True}


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


def filled(
    model: PreTrainedModel,
    reader: gguf.GGUFReader,
    names: dict[str, str],
    changed: Callable[[str, torch.Tensor], torch.Tensor],
) -> PreTrainedModel:
    """Returns the model with the tensors of a file in f32.

    Args:
        names: those that differ from NAMES.
        changed: returns the values that transformers has for a part of the file.
    """
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        raw = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        first, *rest = tensor.name.split(".")
        part, place = (rest[1], f"model.layers.{rest[0]}.") if first == "blk" else (first, "")
        name = {**NAMES, **names}[part]
        state[f"{place}{name}.weight"] = changed(part, torch.from_numpy(raw))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.eval()  # type: ignore[no-untyped-call]
    model.load_state_dict(state)
    return model


def llama_weights(path: Path) -> PreTrainedModel:
    """Returns the model of a GGUF file of the architecture llama, in f32."""
    reader = gguf.GGUFReader(path)
    given = common(reader, "llama")
    theta = float(reader.fields["llama.rope.freq_base"].contents())
    rope = {"rope_type": "default", "rope_theta": theta}
    counts = {
        "attn_q": int(given["num_attention_heads"]),
        "attn_k": int(given["num_key_value_heads"]),
    }

    def changed(part: str, values: torch.Tensor) -> torch.Tensor:
        """Halves of a head's rows are interleaved in the file."""
        if part not in counts:
            return values
        n, (rows, columns) = counts[part], values.shape
        return values.reshape(n, rows // n // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)

    model = LlamaForCausalLM(LlamaConfig(**given, rope_parameters=rope))
    return filled(model, reader, {"ffn_norm": "post_attention_layernorm"}, changed)


def gemma3_weights(path: Path) -> PreTrainedModel:
    """Returns the model of a GGUF file of the architecture gemma3, in f32."""
    reader = gguf.GGUFReader(path)
    fields = {"head_dim": "attention.key_length", "sliding_window": "attention.sliding_window"}
    own = {name: reader.fields[f"gemma3.{key}"].contents() for name, key in fields.items()}
    config = Gemma3TextConfig(
        **common(reader, "gemma3"), **own, query_pre_attn_scalar=own["head_dim"]
    )

    def changed(part: str, values: torch.Tensor) -> torch.Tensor:
        """The file has the norms' weights with one added."""
        return values - 1 if part.endswith("norm") else values

    names = {"ffn_norm": "pre_feedforward_layernorm"}
    return filled(Gemma3ForCausalLM(config), reader, names, changed)


@torch.no_grad()
def greedy(model: PreTrainedModel, ids: list[int], ends: set[int]) -> tuple[list[int], list[float]]:
    """Returns the likeliest tokens one after the other, ANSWER at most, without the one that ends the answer.

    Beside them, that one's included, the lead of each over the next in standard deviations of the logits.
    """
    cache, answer, leads, given = None, list[int](), list[float](), torch.tensor([ids])
    while len(answer) < ANSWER:
        out = model(given, past_key_values=cache, use_cache=True)
        cache, last = out.past_key_values, out.logits[0, -1].float()
        (first, second), best = (row.tolist() for row in last.topk(2))
        leads.append(round((first - second) / last.std().item(), 4))
        if best[0] in ends:
            break
        answer.append(int(best[0]))
        given = torch.tensor([[best[0]]])
    return answer, leads


@dataclass(frozen=True, slots=True)
class Subject:
    """A published model and what is asked of it.

    Attributes:
        weights: returns transformers' model of the file, in f32.
        texts: their ids are recorded.
        beginnings: are gone on with, as they are.
        questions: are asked by the chat template, if the file has one.
        window: tokens of a text whose likelihood is recorded.
        first: the ids before every text that the model is given.
    """

    model: PublishedModel
    weights: Callable[[Path], PreTrainedModel]
    texts: tuple[str, ...]
    beginnings: tuple[str, ...]
    questions: tuple[str, ...]
    window: int
    first: tuple[int, ...] = ()


SUBJECTS = {
    "smollm2": Subject(
        SMOLLM2, llama_weights, (*TEXTS, *CHATML), BEGINNINGS, QUESTIONS, window=512
    ),
    # A base model: its file has no template. Half as many logits of five times the tokens.
    "gemma3": Subject(
        GEMMA3,
        gemma3_weights,
        (*TEXTS, *TURNS),
        (*BEGINNINGS, *STATEMENTS),
        (),
        window=256,
        first=(2,),
    ),
}


@torch.no_grad()
def record(name: str, subject: Subject) -> None:
    """Asks the judges of a model, and writes what they say."""
    torch.set_num_threads(1)  # some threads beside the server's would wait for each other
    path = fetch(subject.model, cache_folder())
    ends = {int(gguf.GGUFReader(path).fields["tokenizer.ggml.eos_token_id"].contents())}
    found: dict[str, Any] = {
        "file": subject.model.file,
        "sha256": subject.model.sha256,
        "versions": {
            name: version(name) for name in ("xllamacpp", "transformers", "gguf", "torch")
        },
    }
    first = list(subject.first)
    with llama(path) as ask:

        def ids(text: str, special: bool) -> list[int]:
            made = ask("tokenize", content=text, add_special=False, parse_special=special)
            return [int(id) for id in made["tokens"]]

        found["texts"] = [
            {"text": text, "plain": ids(text, False), "special": ids(text, True)}
            for text in subject.texts
        ]
        found["chats"] = [
            {"messages": chat, "rendered": ask("apply-template", messages=chat)["prompt"]}
            for chat in (CHATS if subject.questions else ())
        ]
        prompts: list[tuple[Any, list[int]]] = [
            (text, first + ids(text, False)) for text in subject.beginnings
        ]
        for question in subject.questions:
            chat = [{"role": "user", "content": question}]
            prompts.append((chat, ids(ask("apply-template", messages=chat)["prompt"], True)))
        texts = [(ROOT / name).read_text(encoding="utf-8")[:CHARACTERS] for name in PASSAGES]
        windows = [(first + ids(text, False))[: subject.window] for text in texts]
    model = subject.weights(path)
    found["answers"] = []
    for prompt, given in prompts:
        answer, leads = greedy(model, given, ends)
        found["answers"].append({"prompt": prompt, "ids": given, "answer": answer, "leads": leads})
    found["likelihoods"], kept = [], {}
    for passage, window in zip(PASSAGES, windows, strict=True):
        logits = model(torch.tensor([window])).logits[0]
        lost = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]))
        found["likelihoods"].append({"file": passage, "ids": window, "nats_per_token": lost.item()})
        # Every eighth position's 64 likeliest tokens: all would be 100 MB.
        best = logits[7::8].topk(64)
        kept[f"{passage}/ids"] = best.indices.to(torch.int32).numpy()
        kept[f"{passage}/logits"] = best.values.numpy()
        kept[f"{passage}/spread"] = logits[7::8].std(-1).numpy()
    # What bf16 changes in transformers itself: weights, products and cache.
    model.bfloat16()
    found["equal_in_bf16"] = sum(
        greedy(model, row["ids"], ends)[0] == row["answer"] for row in found["answers"]
    )
    target = DATA / f"published_{name}.json"
    rows = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in found.items())
    target.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    np.savez_compressed(target.with_suffix(".npz"), **kept)


def _lines(value: Any) -> str:
    """JSON with a line for each element of a list."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(each) for each in value) + "\n]"


if __name__ == "__main__":
    for name in sys.argv[1:] or SUBJECTS:
        record(name, SUBJECTS[name])
