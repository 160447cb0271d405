"""An engine without a model: it says what a script tells it to, and counts what it computes.

The logits after a position depend on the ids before it alone, as a model's do, so that reuse of a
prefix changes nothing. A reply is found by the last question in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ktcli.chat.chat import Speaker, read_voice
from ktcli.chat.tokenizer import Tokenizer, load_tokenizer
from ktcli.engine.logits import Logits
from ktcli.errors import ContextFull

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = "<|end|>"
SPECIALS = ["<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHUNK = 16
VOCAB = 1024  # more than the tokenizer has ids


def write_tokenizer(
    folder: Path, template: str = TEMPLATE, *, more: Sequence[str] = (), end: str = END
) -> None:
    """A byte-level tokenizer with a few merges, and the files beside it.

    Args:
        more: further special tokens.
        end: the one that ends an answer.
    """
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["hello world, this is the answer to that question"] * 3, trainer)
    inner.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIALS, *more)])
    inner.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    inner.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|bos|>",
        "eos_token": {"content": end},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))


class FakeSession:
    """A timeline that answers by a script."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.cache: list[int] = []
        self.computed = 0  # tokens that went through
        self.depths = b""
        self.recurrent = False
        self.marks: list[tuple[int, ...]] = []  # of each prompt

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.cache)

    def truncate(self, position: int) -> int:
        del self.cache[position:]
        return len(self.cache)

    def advance(
        self,
        ids: Sequence[int],
        *,
        progress=None,
        temperature: float = 0.0,
        depths: bytes = b"",
        marks: Sequence[int] = (),
    ) -> tuple[Logits, int]:
        self.marks.append(tuple(marks))
        limit = min(len(ids) - 1, len(self.cache))
        common = next((i for i in range(limit) if ids[i] != self.cache[i]), limit)
        if len(ids) > self._engine.context:
            raise ContextFull("too long")
        self.truncate(common)
        return self.feed(ids[common:], progress=progress, temperature=temperature), common

    def feed(
        self, ids: Sequence[int], *, progress=None, temperature: float = 0.0, defer: int = 0
    ) -> Logits:
        if len(self.cache) + len(ids) > self._engine.context:
            raise ContextFull("too long")
        for start in range(0, len(ids), CHUNK):
            self.cache += ids[start : start + CHUNK]
            self.computed += len(ids[start : start + CHUNK])
            if progress:
                progress(min(start + CHUNK, len(ids)), len(ids))
        return Logits.of(self._engine.logits(self.cache), temperature)


class FakeEngine:
    """Says `script(question)` after each `<|assistant|>`, then `<|end|>`.

    Every token chooses expert 0 in the first of two MoE layers, and expert 3 in the second.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Callable[[str], str | list[int]],
        context: int = 4096,
        most: int = 4096,
    ) -> None:
        self.tokenizer, self.script, self.context = tokenizer, script, context
        self.spec = SimpleNamespace(vocab=VOCAB, moe_layers=2, experts=4, top_k=1, context=most)
        self.sessions: list[FakeSession] = []
        self.step_times = None
        self.memory = None  # nothing to store

    def depth_at(self, position: int) -> int:
        return 0

    def session(self) -> FakeSession:
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]

    def chosen(self) -> np.ndarray:
        computed = sum(session.computed for session in self.sessions)
        return computed * np.array([[1, 0, 0, 0], [0, 0, 0, 1]], dtype=np.int64)

    def logits(self, cache: list[int]) -> np.ndarray:
        assistant = self.tokenizer.id_of("<|assistant|>")
        at = max(i for i, id in enumerate(cache) if id == assistant)
        question = self.tokenizer.decode(cache[:at], special=True).rpartition("<|user|>")[2]
        reply = self.script(question.removesuffix("<|end|>"))
        ids = self.tokenizer.encode(reply) if isinstance(reply, str) else reply
        said = len(cache) - at - 1
        out = np.full(VOCAB, -10, dtype=np.float32)
        out[ids[said] if said < len(ids) else self.tokenizer.id_of("<|end|>")] = 10
        return out


def speaker(
    folder: Path,
    script: Callable[[str], str | list[int]] = lambda question: f"you said {question}",
    *,
    context: int = 4096,
    template: str = TEMPLATE,
    more: Sequence[str] = (),
    end: str = END,
) -> Speaker:
    """A model that follows a script, with its files in `folder`."""
    write_tokenizer(folder, template, more=more, end=end)
    engine = FakeEngine(load_tokenizer(folder), script, context)
    return Speaker("fake", engine, read_voice("fake", folder))
