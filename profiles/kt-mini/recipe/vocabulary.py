"""Train the tokenizer: byte-level BPE, 2048 tokens, digits one by one (sums are easier so).

python profiles/kt-mini/recipe/vocabulary.py profiles/kt-mini
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from corpus import (
    ASSISTANT,
    BOS,
    END,
    PAD,
    SPECIAL,
    SYSTEM,
    USER,
    read_text,
    sample_text,
    stdlib_files,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Words with the space before them, runs of other signs, line ends with the indent after them.
SPLIT = r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]|\s+(?!\S)|\s"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | trim "
    "+ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(vocab_size: int = 2048) -> Tokenizer:
    """Learn the merges from conversations and the standard library, in the shares of the training."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    code = [read_text(p) for p in stdlib_files(held_out=False)]
    tokenizer.train_from_iterator([*sample_text(60_000), *code], trainer)
    assert [tokenizer.token_to_id(s) for s in SPECIAL] == [BOS, SYSTEM, USER, ASSISTANT, END, PAD]
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """The tokenizer files of the hub layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[PAD],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    write(Path(sys.argv[1]), train(), max_length=2048)
