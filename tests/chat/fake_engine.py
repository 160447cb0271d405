"""An engine without a model: it says what a script tells it to, and counts what it computes.

The logits after a position depend on the ids before it alone, as a model's do, so that reuse of a
prefix changes nothing. A reply is found by the last question in the prompt.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ktcli.chat.base import BaseChat
from ktcli.dialogue.local import LocalBackend
from ktcli.engine.logits import Logits
from ktcli.engine.pages import PagePool
from ktcli.engine.pagetable import pages_for
from ktcli.engine.pools import Pools
from ktcli.engine.sequence import Sequence as Timeline
from ktcli.errors import KtError
from ktcli.native import PAGE_TOKENS, Batch, Pool
from ktcli.native.operands import Run
from ktcli.planner.cost import PieceTimes
from ktcli.terminal.replstate import ReplState, UserOutput
from ktcli.terminal.screen import Screen
from ktcli.text.model import read_text_model
from ktcli.text.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = "<|end|>"
SPECIALS = ["<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHUNK = 16
VOCAB = 1024  # more than the tokenizer has ids
POOL = Pool(1)


def write_tokenizer(
    folder: Path,
    template: str = TEMPLATE,
    *,
    more: Sequence[str] = (),
    end: str = END,
    answers: object = None,
) -> None:
    """A byte-level tokenizer with a few merges, and the files beside it.

    Args:
        more: further special tokens.
        end: the one that ends an answer.
        answers: the template of answers; None: there is none.
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
        **({} if answers is None else {"response_template": answers}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))


class FakeEngine:
    """Says `script(question)` after each `<|assistant|>`, then `<|end|>`.

    Pages hold the ids that were computed. Every token chooses expert 0 in the first of two MoE layers, and expert 3 in
    the second.

    Args:
        streams: the contexts that there are pages for.
    Attributes:
        computed: the tokens that went through.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Callable[[str], str | list[int]],
        context: int = 4096,
        most: int = 4096,
        streams: int = 2,
    ) -> None:
        self.tokenizer, self.script, self.context = tokenizer, script, context
        self.spec = SimpleNamespace(
            vocab=VOCAB,
            output_width=VOCAB,
            embeds=False,
            moe_layers=2,
            experts=4,
            top_k=1,
            context=most,
        )
        self.pool, self.max_tokens, self.max_outputs = POOL, CHUNK, 9
        self.max_rows = CHUNK + self.max_outputs
        self._ids = np.zeros((streams * pages_for(context), PAGE_TOKENS), dtype=np.int64)
        self.pools = Pools(PagePool(len(self._ids)), None, self._copy, b"fake", context)
        self.computed = 0
        self.step_times, self.weights_bytes, self.adapters = None, 0, None
        self.piece_times = PieceTimes.assumed(CHUNK)

    def depth_at(self, position: int) -> int:
        return 0

    def how_at(self, position: int) -> int:
        return 0

    def chunk_tokens(self, left: int) -> int:
        return min(left, CHUNK)

    def sequence(self) -> Timeline:
        return Timeline(self.pools)

    def run(self, batch: Batch) -> list[Logits]:
        return [row for run in batch.runs for row in self._run(run)]

    def _run(self, run: Run) -> list[Logits]:
        self.computed += run.ids.size
        for at, id in enumerate(run.ids.tolist(), run.start):
            self._ids[run.pages[at // PAGE_TOKENS], at % PAGE_TOKENS] = id
        end = run.start + run.ids.size
        whole = self._ids[run.pages].ravel()[:end].tolist()
        return [
            Logits.of(self.logits(whole[: run.start + at + 1]), run.temperature)
            for at in range(run.first_output, run.ids.size)
        ]

    def operations(self) -> list[tuple[str, int]]:
        return [("experts", 1000 * self.computed), ("linear", 500 * self.computed)]

    def chosen(self) -> np.ndarray:
        return self.computed * np.array([[1, 0, 0, 0], [0, 0, 0, 1]], dtype=np.int64)

    def logits(self, cache: list[int]) -> np.ndarray:
        assistant = self.tokenizer.id_of("<|assistant|>")
        at = max((i for i, id in enumerate(cache) if id == assistant), default=-1)
        question = self.tokenizer.decode(cache[:at], special=True).rpartition("<|user|>")[2]
        reply = self.script(question.removesuffix("<|end|>"))
        ids = self.tokenizer.encode(reply) if isinstance(reply, str) else reply
        said = len(cache) - at - 1
        out = np.full(VOCAB, -10, dtype=np.float32)
        out[ids[said] if said < len(ids) else self.tokenizer.id_of("<|end|>")] = 10
        return out

    def _copy(self, source: int, target: int) -> None:
        self._ids[target] = self._ids[source]


class Undecided(FakeEngine):
    """After each z of its script any letter may follow: what is drawn decides."""

    def logits(self, cache: list[int]) -> np.ndarray:
        out = super().logits(cache)
        letters = self.tokenizer.encode("abcdefghijklmnopqrstuvwxyz")
        if out.argmax() == letters[-1]:
            out[letters] = 9 + 0.01 * (len(cache) % 7)
        return out


def backend(
    folder: Path,
    script: Callable[[str], str | list[int]] = lambda question: f"you said {question}",
    *,
    context: int = 4096,
    template: str = TEMPLATE,
    more: Sequence[str] = (),
    end: str = END,
    answers: object = None,
) -> LocalBackend:
    """A model that follows a script, with its files in `folder`."""
    write_tokenizer(folder, template, more=more, end=end, answers=answers)
    engine = FakeEngine(load_tokenizer(folder), script, context)
    return LocalBackend("fake", engine, read_text_model("fake", folder))


class Noted(list[str]):
    """A person, who remembers what is said."""

    def note(self, text: str) -> None:
        self.append(text)

    warn = note

    def error(self, error: KtError) -> None:
        self.append(str(error))


def repl_of(chat: BaseChat, person: UserOutput) -> ReplState:
    """A chat on a terminal that nobody sees."""
    return ReplState(chat, person, Screen(io.StringIO(), terminal=False, colour=False))
