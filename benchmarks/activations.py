"""Which rounding of activations costs what: a simulation in f32, before kernels, on models that exist.

    PYTHONPATH=.:tests .venv/bin/python -m benchmarks.activations [MODEL ...] [--tokens N] [--json FILE]

MODEL is smollm2 or gemma3, published weights that are fetched as tests/published does, or a folder that transformers
reads, such as profiles/kt-mini. transformers runs the model in f32; the weight and the input of every product are
rounded as a way says, but for the output head, whose input is nearly exact in kt, and the router, which
is exact. Each way is compared with the model as it is: nats per token lost, KL divergence, share of equal top tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from published.packages import cache_folder, fetch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.peers.published import SUBJECTS
from ktcli.text.tokenizer import load_tokenizer
from ktcli.weights.reader import small_files_of

TEXT = Path(__file__).parents[1] / "profiles" / "text" / "python.txt"
WINDOW = 512
Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    """Returns x as it is."""
    return x


def groups(x: Tensor, group: int) -> Tensor:
    """Returns x [..., k] rounded to 8 bits with one scale for each `group` columns; 0: for all."""
    k = x.shape[-1]
    group = group or k
    parts = torch.unflatten(functional.pad(x, (0, -k % group)), -1, (-1, group))
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    rounded: Tensor = ((parts / scale).round() * scale).flatten(-2)[..., :k]
    return rounded


def twice(x: Tensor, group: int) -> Tensor:
    """Returns x as two values of 8 bits hold it, the second what the first left over."""
    first = groups(x, group)
    return first + groups(x - first, group)


def largest_apart(x: Tensor, n: int, group: int) -> Tensor:
    """Returns x with its n largest values exact, the others rounded as `groups` rounds them."""
    largest = x.abs().topk(n, dim=-1).indices
    kept = torch.zeros_like(x).scatter(-1, largest, x.gather(-1, largest))
    return groups(x - kept, group) + kept


def rotated(x: Tensor, most: int) -> Tensor:
    """Returns x times a block-diagonal Hadamard matrix, its blocks the largest power of two <= most that fits."""
    k, block = x.shape[-1], most
    while k % block:
        block //= 2
    h = torch.ones(1, 1)
    while len(h) < block:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    turned: Tensor = (torch.unflatten(x, -1, (-1, block)) @ (h / block**0.5)).flatten(-2)
    return turned


@dataclass(frozen=True, slots=True)
class Way:
    """How a product rounds its weight [n, k] and its input [..., k]; a rotation comes before."""

    name: str
    weight: Rounding
    x: Rounding
    rotation: int = 1


def ways() -> list[Way]:
    """Returns the ways to compare, in the order of the table."""

    def by(group: int) -> Rounding:
        return lambda x: groups(x, group)

    row = by(0)
    return [
        Way("weights by row, x exact", row, exact),
        Way("weights by 64, x exact", by(64), exact),
        Way("weights by 32, x exact", by(32), exact),
        Way("weights exact, x by row", exact, row),
        Way("weights exact, x by 128", exact, by(128)),
        Way("weights exact, x by 64", exact, by(64)),
        Way("weights exact, x by 32", exact, by(32)),
        Way("weights exact, x by 16", exact, by(16)),
        Way("weights exact, x in 15 bits", exact, lambda x: twice(x, 0)),
        Way("weights exact, x by row, 4 largest apart", exact, lambda x: largest_apart(x, 4, 0)),
        Way("weights exact, x by row, 16 largest apart", exact, lambda x: largest_apart(x, 16, 0)),
        Way("weights exact, x by 64, 4 largest apart", exact, lambda x: largest_apart(x, 4, 64)),
        Way("weights exact, x by 64, 16 largest apart", exact, lambda x: largest_apart(x, 16, 64)),
        Way("weights exact, x rotated 64, by row", exact, row, 64),
        Way("weights exact, x rotated 256, by row", exact, row, 256),
        Way("weights exact, x rotated 64, by 64", exact, by(64), 64),
        Way("weights exact, x rotated 256, by 64", exact, by(64), 256),
        Way("weights by row, x by row", row, row),
        Way("weights by row, x by 64", row, by(64)),
        Way("weights by 64, x by 64", by(64), by(64)),
        Way("weights by 32, x by 64", by(32), by(64)),
        Way("weights by 32, x by 32", by(32), by(32)),
        Way("both rotated 64, weights by row, x by 64", row, by(64), 64),
        Way("both rotated 256, weights by row, x by row", row, row, 256),
        Way("both rotated 256, weights by row, x by 64", row, by(64), 256),
        Way("both rotated 256, weights by 64, x by 64", by(64), by(64), 256),
    ]


class Simulation:
    """A model whose products round as a way says."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes over torch's product, by which transformers multiplies everywhere."""
        config: Any = model.config
        apart = (config.vocab_size, getattr(config, "n_routed_experts", 0))
        self._model, self._apart = model, {n for n in apart if n}
        self._way: Way | None = None
        self._weights: dict[int, Tensor] = {}
        self._plain = functional.linear
        functional.linear = self._linear  # type: ignore[assignment]

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        way = self._way
        if way is None or weight.shape[0] in self._apart:
            return self._plain(x, weight, bias)
        key = weight.data_ptr()
        if key not in self._weights:
            self._weights[key] = way.weight(rotated(weight, way.rotation))
        return self._plain(way.x(rotated(x, way.rotation)), self._weights[key], bias)

    @torch.no_grad()
    def predict(self, windows: list[list[int]], way: Way | None) -> list[Tensor]:
        """Returns the log-probabilities [T, V] of each window."""
        self._way = way
        self._weights.clear()
        return [self._model(torch.tensor([w])).logits[0].log_softmax(-1) for w in windows]


def compare(windows: list[list[int]], first: list[Tensor], this: list[Tensor]) -> dict[str, float]:
    """Returns how far a way's predictions are from the first's: nats lost, KL and the share of equal top tokens."""
    lost, kl, same = [], [], []
    for ids, p, q in zip(windows, first, this, strict=True):
        following = torch.tensor(ids[1:])[:, None]
        lost.append((p[:-1].gather(1, following) - q[:-1].gather(1, following))[:, 0])
        kl.append((p.exp() * (p - q)).sum(-1)[:-1])
        same.append((p.argmax(-1) == q.argmax(-1)).float()[:-1])
    return {
        name: torch.cat(values).double().mean().item()
        for name, values in (("nats", lost), ("kl", kl), ("same", same))
    }


def loaded(name: str) -> tuple[PreTrainedModel, Path, tuple[int, ...]]:
    """Returns a model in f32, the file or folder with its tokenizer, and the ids before every text."""
    if name not in SUBJECTS:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        model.set_experts_implementation("eager")
        model.eval()  # type: ignore[no-untyped-call]
        return model, Path(name), ()
    subject = SUBJECTS[name]
    path = fetch(subject.model, cache_folder())
    return subject.weights(path), path, subject.first


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in args.models:
        model, path, before = loaded(name)
        with small_files_of(path) as folder:
            ids = load_tokenizer(folder).encode(
                TEXT.read_text(encoding="utf-8")[: 8 * args.tokens]
            )[: args.tokens]
        windows = [[*before, *ids[i : i + WINDOW]] for i in range(0, len(ids), WINDOW)]
        simulation = Simulation(model)
        first = simulation.predict(windows, None)
        rows = found[name] = {}
        for way in ways():
            row = rows[way.name] = compare(windows, first, simulation.predict(windows, way))
            print(
                f"{name:14} {way.name:46} {row['nats']:+.4f} {row['kl']:.4f} {row['same']:.2%}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
