"""Small random embedding models in the layout of sentence-transformers, and transformers as their judge."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from chat.fake_engine import write_tokenizer
from numpy.typing import NDArray

F64Array = NDArray[np.float64]
VOCAB, HIDDEN, CONTEXT = 320, 80, 512
MODES = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
}
END = "<|end|>"  # which the tokenizer puts behind a text, as Qwen3-Embedding's does
ST = "sentence_transformers.models"


def modules(*kinds: str) -> list[dict[str, Any]]:
    """`modules.json` with these steps."""
    return [
        {
            "idx": at,
            "name": str(at),
            "path": "" if at == 0 else f"{at}_{kind}",
            "type": f"{ST}.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]


def write_pooling(
    folder: Path,
    mode: str = "last",
    *,
    normalize: bool = True,
    prompts: Mapping[str, str] | None = None,
    default: str | None = None,
    **more: Any,
) -> None:
    """The files of sentence-transformers that say how a model pools.

    Args:
        default: the name of the prompt that goes before a text.
        more: fields of the Pooling step.
    """
    steps = ("Transformer", "Pooling", "Normalize")[: 2 + normalize]
    (folder / "modules.json").write_text(json.dumps(modules(*steps)))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    said = {"word_embedding_dimension": HIDDEN, **dict.fromkeys(MODES.values(), False)}
    said |= {MODES[mode]: True, "include_prompt": True, **more}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    named = {"prompts": prompts or {}, "default_prompt_name": default}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(named))


def write_embedder(
    folder: Path,
    mode: str = "last",
    config: Mapping[str, Any] | None = None,
    *,
    template: bool = True,
    **more: Any,
) -> Path:
    """A random Qwen3 for embeddings as transformers saves one: no head, and no prefix before the names.

    Args:
        config: fields beside those of transformers.
        template: whether it has a chat template, as few such models do.
        more: see `write_pooling`.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    values = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=72,
        num_attention_heads=4,
        num_hidden_layers=3,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    transformers.Qwen3Model(values).to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    write_tokenizer(folder, more=[END])
    if not template:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        del settings["chat_template"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    _end_texts(folder / "tokenizer.json")
    write_pooling(folder, mode, **more)
    return folder


def _end_texts(path: Path) -> None:
    """Lets a tokenizer put END behind each text, by the post-processor that Qwen3-Embedding has."""
    document = json.loads(path.read_text())
    (id,) = (each["id"] for each in document["added_tokens"] if each["content"] == END)
    template = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": END, "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {END: {"id": END, "ids": [id], "tokens": [END]}},
    }  # fmt: skip
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    document["post_processor"] = {"type": "Sequence", "processors": [level, template]}
    path.write_text(json.dumps(document))


class Judge:
    """transformers' model of a folder, its tokenizer with post-processor, and a few lines of pooling."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers
        from tokenizers import Tokenizer

        self._torch = torch
        self._model = transformers.Qwen3Model.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def hidden(self, ids: Sequence[int]) -> F64Array:
        """The hidden states behind the last norm, [T, HIDDEN]."""
        with self._torch.no_grad():
            found = self._model(self._torch.tensor([list(ids)])).last_hidden_state[0]
        rows: F64Array = found.double().numpy()
        return rows

    def vector(self, ids: Sequence[int], mode: str, since: int = 0) -> F64Array:
        """The pooled hidden states, not normalized."""
        rows = self.hidden(ids)
        return {"last": rows[-1], "mean": rows[since:].mean(axis=0), "cls": rows[0]}[mode]

    def embedding(self, text: str, mode: str = "last") -> F64Array:
        """The embedding of a text, normalized."""
        found = self.vector(self.ids(text), mode)
        return found / np.sqrt(found @ found)


def cosine(a: Any, b: Any) -> float:
    one, other = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))
