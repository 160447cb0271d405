"""Train kt-mini from scratch.

    python profiles/kt-mini/recipe/train.py --minutes 60 --out build/kt-mini

makes the tokenizer (once), trains with one process per core (or on one GPU), writes a checkpoint in hub layout
every few minutes and a finished one at the end. `--start FOLDER` goes on from a checkpoint. The learning rate
rises for some steps, stays, and falls to nearly zero over the last part of the time given.

Compute is bf16 with f32 master weights. Experts are balanced without a loss term: after each step the router's
correction bias of overloaded experts goes down, of underloaded ones up (DeepSeek-V3 report, section 2.1.2).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

import checkpoint
import vocabulary
from corpus import BOS, END, PAD, Corpus
from model import HeadLoss, Shape, Weights, forward, init_weights

GENERATION = {"do_sample": False, "temperature": 0.3, "top_p": 0.9, "max_new_tokens": 256}
# glibc would give large buffers back after every use, and the system would clear them again.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "268435456"}


@dataclass(frozen=True)
class Options:
    """What the command line sets."""

    out: str
    minutes: float = 60.0
    start: str = ""
    workers: int = 2
    seed: int = 1
    rate: float = 3e-3                     # AdamW; matrices also decay by 0.05
    warmup: int = 80                       # steps
    decay_share: float = 0.5               # last part of the time, in which the rate falls
    save_minutes: float = 4.0
    batch: int = 2048                      # tokens per worker and step


def rate_factor(step: int, share: float, o: Options) -> float:
    """Rise over `warmup` steps, stay at 1, fall linearly to 0.02 over the last `decay_share` of the time."""
    rise = min(1.0, (step + 1) / o.warmup)
    fall = 1.0 if o.decay_share == 0 else min(1.0, max(0.0, 1.0 - share) / o.decay_share)
    return rise * max(0.02, fall)


def leaves(master: Weights) -> Weights:
    """Copies to compute with: matrices bf16, norms and routers f32."""
    return {k: v.detach().to(torch.bfloat16 if v.dim() > 1 and not k.endswith("mlp.gate") else v.dtype, copy=True)
            .requires_grad_() for k, v in master.items()}


def weighted_positions(weight: Tensor, multiple: int = 1024) -> Tensor:
    """Indices of the targets that count, filled up with ones that do not (few shapes: see `Experts`)."""
    order = (weight.reshape(-1) > 0).to(torch.uint8).argsort(descending=True, stable=True)
    n = -(-int((weight > 0).sum()) // multiple) * multiple
    return order[:n]


def average(tensors: list[Tensor], n_workers: int) -> list[Tensor]:
    """Mean of each tensor over the workers, sent as one buffer."""
    if n_workers == 1:
        return tensors
    flat = torch.cat([t.float().reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    flat /= n_workers
    return [p.view_as(t) for p, t in zip(flat.split([t.numel() for t in tensors]), tensors)]


def optimizer(master: Weights, o: Options) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    groups = [{"params": [v for v in master.values() if (v.dim() > 1) == m], "weight_decay": d}
              for m, d in ((True, 0.05), (False, 0.0))]
    return torch.optim.AdamW(groups, lr=o.rate, betas=(0.9, 0.95), fused=True)


class Trainer:
    """One worker: weights, optimizer, data and the step."""

    def __init__(self, o: Options, rank: int) -> None:
        self.o, self.rank = o, rank
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if o.start:
            w, self.bias, self.shape = checkpoint.load(Path(o.start))
        else:
            self.shape = Shape()
            w = init_weights(self.shape, o.seed)
            self.bias = torch.zeros(self.shape.num_hidden_layers, self.shape.n_routed_experts)
        self.master = {k: v.to(self.device) for k, v in w.items()}
        self.bias = self.bias.to(self.device)
        self.adam = optimizer(self.master, o)
        tokenizer = Tokenizer.from_file(str(Path(o.out) / "tokenizer.json"))
        self.corpus = Corpus(tokenizer, seed=o.seed * 1000 + rank)
        self.tokens = 0

    def step(self, n: int, share: float) -> float:
        """One batch, forward, backward and update; the loss."""
        length = 2048 if n % 24 == 23 else 512 if n % 4 == 3 else 256
        rows = max(1, self.o.batch // length)
        ids, weight = (t.to(self.device) for t in self.corpus.batch(rows, length))
        w = leaves(self.master)
        hidden, load = forward(w, self.bias, ids[:, :-1], self.shape)
        counted = weighted_positions(weight[:, 1:])
        target, weight = (x[:, 1:].reshape(-1)[counted] for x in (ids, weight))
        loss = HeadLoss.apply(hidden.flatten(0, 1)[counted], w["lm_head"], target, weight)
        loss.backward()
        for group in self.adam.param_groups:
            group["lr"] = self.o.rate * rate_factor(n, share, self.o)
        *grads, load, mean_loss = average([*(w[k].grad for k in self.master), load, loss.detach()], self.o.workers)
        for p, g in zip(self.master.values(), grads):
            p.grad = g.float()
        torch.nn.utils.clip_grad_norm_(list(self.master.values()), 1.0)
        self.adam.step()
        speed = 0.003 * rate_factor(self.o.warmup, share, self.o)
        self.bias += speed * (load.mean(1, keepdim=True) - load).sign() * (load.sum(1, keepdim=True) > 0)
        self.tokens += ids[:, 1:].numel() * self.o.workers
        self.imbalance = float((load.amax(1)[1:] / load.mean(1)[1:]).max())
        return float(mean_loss)


def write_checkpoint(t: Trainer) -> None:
    """The model folder in hub layout; readable at any time."""
    out = Path(t.o.out)
    checkpoint.save(out, t.master, t.bias, t.shape)
    config = t.shape.hub_config(bos=BOS, eos=END, pad=PAD)
    generation = {**GENERATION, "bos_token_id": BOS, "eos_token_id": [END, BOS], "pad_token_id": PAD}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def run(rank: int, o: Options) -> None:
    """The loop of one worker; worker 0 keeps the clock, writes and reports."""
    torch.set_num_threads(1 if o.workers > 1 else os.cpu_count() or 1)
    if o.workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{o.out}/.meeting", rank=rank, world_size=o.workers)
    t = Trainer(o, rank)
    began = saved = time.time()
    n, smooth, share = 0, math.nan, 0.0
    while share < 1.0:
        loss = t.step(n, share)
        smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
        clock = torch.tensor([(time.time() - began) / 60 / o.minutes])
        if o.workers > 1:
            dist.broadcast(clock, 0)
        share, n = float(clock), n + 1
        if rank == 0 and n % 100 == 0:
            print(f"step {n}  {t.tokens / 1e6:.2f} M tokens  {t.tokens / (time.time() - began):.0f} tok/s  "
                  f"loss {smooth:.4f}  imbalance {t.imbalance:.2f}  {100 * share:.0f} %", flush=True)
        if rank == 0 and (time.time() - saved > 60 * o.save_minutes or share >= 1.0):
            write_checkpoint(t)
            saved = time.time()


def main() -> None:
    """Parse, make the tokenizer if there is none, start the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, field in Options.__dataclass_fields__.items():
        kind = {"str": str, "int": int, "float": float}[str(field.type)]
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=name == "out",
                            default=None if name == "out" else field.default)
    o = Options(**vars(parser.parse_args()))
    out = Path(o.out).resolve()
    o = Options(**{**vars(o), "out": str(out)})
    if not (out / "tokenizer.json").exists():
        vocabulary.write(out, vocabulary.train(), max_length=2048)
    (out / ".meeting").unlink(missing_ok=True)
    if o.workers == 1:
        run(0, o)
    else:
        os.environ |= MALLOC
        torch.multiprocessing.spawn(run, args=(o,), nprocs=o.workers)


if __name__ == "__main__":
    main()
