"""Make the outlier variant of kt-mini: the same function, with weights that are hard to quantise.

    python profiles/kt-mini/recipe/outliers.py profiles/kt-mini build/kt-mini-outliers [--activations]

Large models have a few channels with very large values; a model this small has none, so every 4-bit format
looks good on it. The variant puts them in by pairs of factors that cancel:

- hidden channel c: the norm before the experts is divided by alpha[c]; the columns of everything that reads it
  (router, shared expert, gate and up of every expert) are multiplied by alpha[c];
- expert channel i: row i of up is divided by beta[i], column i of down multiplied by it.

With --activations it is the other way round: the norm and the rows of up are multiplied, those that read them divided,
so that what is hard is the input of products, whose largest values are then 20 times the others and more, as in
published models.

The outliers are synthetic and say nothing about any real model. Factors are powers of two, so that nothing is
rounded: in f32 the logits are those of the original (the script checks it), and the variant is bf16 too.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import checkpoint
import torch
from model import Shape, Weights, forward
from torch import Tensor

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def factors(n: int, n_large: int, large: float, gen: torch.Generator) -> Tensor:
    """Log-normal factors (sigma 0.5) with some large ones, each rounded to a power of two."""
    f = (0.5 * torch.randn(n, generator=gen)).exp()
    f[torch.randperm(n, generator=gen)[:n_large]] *= large
    return f.log2().round().exp2()


def inject(w: Weights, s: Shape, seed: int, *, activations: bool = False) -> Weights:
    """Weights of the same function with outliers: two hidden channels x 12 per layer, one x 8 per expert; in what is
    multiplied with them both x 32."""
    gen = torch.Generator().manual_seed(seed)
    hidden, inner, way = (32.0, 32.0, -1) if activations else (12.0, 8.0, 1)
    out = dict(w)
    for n in range(s.first_k_dense_replace, s.num_hidden_layers):
        prefix = f"layers.{n}."
        alpha = factors(s.hidden_size, 2, hidden, gen) ** way
        experts = range(s.n_routed_experts)
        beta = (
            torch.stack([factors(s.moe_intermediate_size, 1, inner, gen) for _ in experts]) ** way
        )
        out[prefix + "post_attention_layernorm"] = w[prefix + "post_attention_layernorm"] / alpha
        for reader in ("mlp.gate", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"):
            out[prefix + reader] = w[prefix + reader] * alpha
        gate, up = (w[prefix + "mlp.experts.gate_up"] * alpha).chunk(2, dim=1)  # [E, I, H] each
        out[prefix + "mlp.experts.gate_up"] = torch.cat((gate, up / beta[:, :, None]), dim=1)
        out[prefix + "mlp.experts.down"] = w[prefix + "mlp.experts.down"] * beta[:, None, :]
    return out


@torch.no_grad()
def largest_change(a: Weights, b: Weights, bias: Tensor, s: Shape) -> float:
    """Largest difference of the f32 logits on random tokens, relative to their standard deviation."""
    ids = torch.randint(0, s.vocab_size, (4, 256), generator=torch.Generator().manual_seed(0))
    x, y = (forward(w, bias, ids, s)[0] @ w["lm_head"].T for w in (a, b))
    return float((x - y).abs().max() / x.std())


def main() -> None:
    """Parse, inject, check, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--activations", action="store_true", help="in activations, not in weights")
    args = parser.parse_args()
    w, bias, s = checkpoint.load(args.source)
    changed = inject(w, s, args.seed, activations=args.activations)
    change = largest_change(w, changed, bias, s)
    if change > 1e-4:
        raise SystemExit(f"the logits changed by {change:.1e} of their standard deviation")
    checkpoint.save(args.out, changed, bias, s)
    for name in COPIED:
        shutil.copy(args.source / name, args.out / name)
    print(
        f"wrote {args.out}; largest change of the f32 logits: {change:.1e} of their standard deviation"
    )


if __name__ == "__main__":
    main()
