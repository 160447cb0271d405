"""Train kt-mini from scratch.

    python profiles/kt-mini/recipe/train.py --minutes 60 --out build/kt-mini

makes the tokenizer (once), trains with one process per core (or on one GPU), writes a checkpoint in hub layout
every few minutes and a finished one at the end. `--start FOLDER` goes on from a checkpoint. The learning rate
rises for some steps, stays, and falls to nearly zero over the last part of the time given, which counts only while
the process computes.

Compute is bf16 with f32 master weights, rounded to 8 bits on the way, so that a conversion to integers costs little:
the weights learn to bear it. The workers share the weights in memory and each applies its own
steps without waiting for the others (Hogwild): on a machine that does other things too, nobody waits
for the slowest. So two runs give models of the same quality, but not the same bytes. What is written is the
mean of the weights over the last steps, which is better than the last weights and loses less when it is quantised.

Experts are balanced without a loss term: after each step the router's correction bias of overloaded experts goes
down, of underloaded ones up (DeepSeek-V3 report, section 2.1.2).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import checkpoint
import tables
import torch
import vocabulary
from corpus import BOS, END, PAD, Corpus, Mix
from model import HeadLoss, Shape, Weights, forward, in_8_bits, init_weights
from phrases import Phrases
from tokenizers import Tokenizer
from torch import Tensor

GENERATION = {"do_sample": False, "temperature": 0.3, "top_p": 0.9, "max_new_tokens": 256}
WEIGHT_DECAY = 0.1  # as DeepSeek-V3's (report, section 4.2)
AVERAGING = 8  # exponent of the mean over the steps: Shamir and Zhang 2013, section 3.2
# glibc would give large buffers back after every use, and the system would clear them again.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass(frozen=True)
class Options:
    """What the command line sets."""

    out: str
    minutes: float = 60.0  # of computing, in each worker
    start: str = ""
    workers: int = 2
    seed: int = 1
    rate: float = 2e-3  # of AdamW
    warmup: int = 80  # steps of each worker
    decay_share: float = 0.5  # last part of the time, in which the rate falls
    save_minutes: float = 4.0
    batch: int = 1024  # tokens per step of a worker
    code: float = Mix.code  # share of the standard library in the text


def rate_factor(step: int, share: float, o: Options) -> float:
    """Rise over `warmup` steps, stay at 1, fall linearly to 0.02 over the last `decay_share`."""
    rise = min(1.0, (step + 1) / o.warmup)
    fall = min(1.0, max(0.0, 1.0 - share) / o.decay_share) if o.decay_share else 1.0
    return rise * max(0.02, fall)


@dataclass
class State:
    """What all workers share: the weights as one flat vector, the correction bias, and the means of both."""

    flat: Tensor
    bias: Tensor  # of the routers, [L, E]
    mean: Tensor  # of `flat` over the last steps: what is written
    mean_bias: Tensor
    shape: Shape
    layout: dict[str, tuple[int, ...]]
    learned: dict[
        str, str
    ]  # the answer for each row of kt's tables as they were when the training began

    @staticmethod
    def make(w: Weights, bias: Tensor, shape: Shape) -> State:
        """On the GPU if there is one, else in memory that all workers see."""
        flat = torch.cat([t.reshape(-1) for t in w.values()])
        layout = {k: tuple(t.shape) for k, t in w.items()}
        of_rows = Phrases(lambda question: False).of_rows()
        learned = {key: fact.answer for key, fact in sorted(of_rows.items())}
        shared = (t.clone() for t in (flat, bias, flat, bias))
        if torch.cuda.is_available():
            return State(*(t.cuda() for t in shared), shape, layout, learned)
        return State(*(t.share_memory_() for t in shared), shape, layout, learned)

    def weights(self, flat: Tensor) -> Weights:
        """A flat vector cut into named tensors."""
        parts = flat.split([math.prod(s) for s in self.layout.values()])
        return {k: p.view(s) for (k, s), p in zip(self.layout.items(), parts, strict=True)}

    def average(self, step: int) -> None:
        """Draw the means towards the weights; they reach over about the last ninth of the steps so far."""
        share = (AVERAGING + 1) / (AVERAGING + step + 1)
        self.mean.lerp_(self.flat, share)
        self.mean_bias.lerp_(self.bias, share)


def leaves(w: Weights) -> Weights:
    """Copies to compute with: matrices bf16 as 8 bits would hold them, norms and routers f32."""
    return {name: _leaf(name, weight) for name, weight in w.items()}


def _leaf(name: str, weight: Tensor) -> Tensor:
    if weight.dim() == 1 or name.endswith("mlp.gate"):
        return weight.clone().requires_grad_()
    return in_8_bits(weight).to(torch.bfloat16).requires_grad_()


def weighted_positions(weight: Tensor, multiple: int = 256) -> Tensor:
    """Indices of the targets that count, filled up with others (few shapes: see `Experts`)."""
    order = (weight.reshape(-1) > 0).to(torch.uint8).argsort(descending=True, stable=True)
    n = -(-int((weight > 0).sum()) // multiple) * multiple
    return order[:n]


class Worker:
    """One process: its data and its steps on the shared state."""

    def __init__(self, o: Options, state: State, rank: int) -> None:
        self.o, self.state = o, state
        self.device = state.flat.device
        tokenizer = Tokenizer.from_file(str(Path(o.out) / "tokenizer.json"))
        self.corpus = Corpus(tokenizer, seed=o.seed * 1000 + rank, mix=Mix(code=o.code))
        self.adam = torch.optim.AdamW(
            [state.flat], lr=o.rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True
        )
        self.tokens = 0
        self.imbalance = 0.0

    def step(self, n: int, share: float) -> float:
        """One batch, forward, backward and update; the loss."""
        length = 2048 if n % 48 == 47 else 512 if n % 8 == 7 else 256
        batch = self.corpus.batch(max(1, self.o.batch // length), length)
        ids, weight = (t.to(self.device) for t in batch)
        s, w = self.state, leaves(self.state.weights(self.state.flat))
        hidden, load = forward(w, s.bias, ids[:, :-1], s.shape, rounded=True)
        counted = weighted_positions(weight[:, 1:])
        target, weight = (x[:, 1:].reshape(-1)[counted] for x in (ids, weight))
        loss = HeadLoss.apply(hidden.flatten(0, 1)[counted], w["lm_head"], target, weight)
        loss.backward()
        factor = rate_factor(n, share, self.o)
        grad = torch.cat([t.grad.float().reshape(-1) for t in w.values()])
        s.flat.grad = grad * (1.0 / (grad.norm() + 1e-6)).clamp(max=1.0)
        self.adam.param_groups[0]["lr"] = self.o.rate * factor
        self.adam.step()
        s.bias += 0.003 * factor * (load.mean(1, keepdim=True) - load).sign()
        self.tokens += ids[:, 1:].numel()
        self.imbalance = float((load.amax(1)[1:] / load.mean(1)[1:]).max())
        return float(loss.detach())


def write_checkpoint(o: Options, state: State) -> None:
    """The model folder in hub layout; readable at any time."""
    out = Path(o.out)
    checkpoint.save(out, state.weights(state.mean), state.mean_bias, state.shape)
    config = state.shape.hub_config(bos=BOS, eos=END, pad=PAD)
    ends = {"bos_token_id": BOS, "eos_token_id": [END, BOS], "pad_token_id": PAD}
    files = {
        "config.json": config,
        "generation_config.json": GENERATION | ends,
        tables.LEARNED.name: {"rows": state.learned},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def run(rank: int, o: Options, state: State) -> None:
    """The loop of one worker until the time is over; worker 0 writes and reports."""
    torch.set_num_threads(1 if o.workers > 1 else os.cpu_count() or 1)
    worker = Worker(o, state, rank)
    began = saved = time.time()
    worked = (
        time.thread_time()
    )  # on a machine that does other things too, only what this process got
    n, smooth, share = 0, math.nan, 0.0
    while share < 1.0:
        loss = worker.step(n, share)
        if rank == 0:
            state.average(n)
        smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
        share, n = (time.thread_time() - worked) / 60 / o.minutes, n + 1
        if rank == 0 and n % 100 == 0:
            rate = worker.tokens / (time.time() - began)
            print(
                f"step {n}  {worker.tokens / 1e6:.2f} M tokens and {rate:.0f} tok/s in one of {o.workers} workers  "
                f"loss {smooth:.4f}  imbalance {worker.imbalance:.2f}  {100 * share:.0f} %",
                flush=True,
            )
        if rank == 0 and time.time() - saved > 60 * o.save_minutes:
            write_checkpoint(o, state)
            saved = time.time()
    print(f"worker {rank}: {worker.tokens / 1e6:.2f} M tokens in {n} steps", flush=True)


def parse() -> Options:
    """Options from the command line; every field is a flag."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, field in Options.__dataclass_fields__.items():
        kind = {"str": str, "int": int, "float": float}[str(field.type)]
        default = None if name == "out" else field.default
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, required=name == "out", default=default)
    values = vars(parser.parse_args())
    return Options(**values | {"out": str(Path(values["out"]).resolve())})


def main() -> None:
    """Make the tokenizer if there is none, start the workers, write the result."""
    o = parse()
    began = time.time()
    if o.start:
        for name in vocabulary.FILES:
            shutil.copyfile(Path(o.start) / name, Path(o.out) / name)
    elif not (Path(o.out) / "tokenizer.json").exists():
        vocabulary.write(Path(o.out), vocabulary.train(), max_length=2048)
    if o.start:
        state = State.make(*checkpoint.load(Path(o.start)))
    else:
        shape = Shape()
        bias = torch.zeros(shape.num_hidden_layers, shape.n_routed_experts)
        state = State.make(init_weights(shape, o.seed), bias, shape)
    if state.flat.is_cuda or o.workers == 1:
        o = Options(**asdict(o) | {"workers": 1})
        run(0, o, state)
    else:
        os.environ |= MALLOC
        torch.multiprocessing.spawn(run, args=(o, state), nprocs=o.workers)
    write_checkpoint(o, state)
    print(f"trained for {(time.time() - began) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
