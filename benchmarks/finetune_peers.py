"""A step of LoRA fine-tuning with kt beside transformers with peft, from the same random checkpoint.

    python benchmarks/finetune_peers.py [--layers N] [--tokens N] [--rounds N] [--only KIND] [--out FILE]

The checkpoint has layers of the shapes of qwen3-30b-a3b (128 experts) and a small vocabulary. kt trains from packs with
experts in bf16 and in int4; transformers computes in bf16, experts in grouped products, and computes layers again in
the backward pass as kt does (LLaMA-Factory's default). A step is forward, backward and AdamW over the adapter, all
tokens trained. Each program is a process of its own; they take turns, one step each, so that other work on the machine
meets all of them. Figures are medians over the rounds; a ratio is the median of the rounds' own, by the clock and by
the processor time of each process, which other programs change less. Memory is the most that a process ever had, above
what its interpreter takes with the libraries loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

RANK, ALPHA, LENGTH, VOCAB = 8, 16, 512, 4096
TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "experts": ("experts.gate_up_proj", "experts.down_proj"),
}
PROGRAMS = ("kt-bf16", "kt-int4", "peft")


def checkpoint(folder: Path, layers: int) -> None:
    """Writes random weights of these shapes, as transformers saves them."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config: Any = Qwen3MoeConfig
    shapes = config(
        vocab_size=VOCAB, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(1)
    library: Any = Qwen3MoeForCausalLM
    library._from_config(shapes, dtype=torch.bfloat16).save_pretrained(folder)


def convert(folder: Path, out: Path, experts: str, dense: str) -> None:
    """Converts it."""
    from ktcli.native import Pool
    from ktcli.weights.convert import convert_source
    from ktcli.weights.reader import source_at
    from ktcli.weights.recipe import Recipe

    with source_at(folder, folder.name) as source:
        convert_source(source, out, Recipe.named(experts, dense), Pool(2))


# --- one program --------------------------------------------------------------------------------------


def documents(tokens: int, round_number: int) -> list[list[int]]:
    """The documents of a step."""
    import numpy as np

    draw = np.random.default_rng([1, round_number])
    return [draw.integers(0, VOCAB, LENGTH).tolist() for _ in range(tokens // LENGTH)]


def kt_step(pack: Path, targets: tuple[str, ...], tokens: int) -> Callable[[int], float]:
    """Returns what does a step of kt."""
    from ktcli.assembly.training import require_torch

    require_torch()
    import torch

    from ktcli.assembly.host import team_here
    from ktcli.finetune.optimizer import FactorOptimizer
    from ktcli.finetune.settings import FinetuneSettings
    from ktcli.hardware.numa import OFF
    from ktcli.training.lora import LoraSettings
    from ktcli.training.model import TrainableModel, TrainingOptions
    from ktcli.weights.pack import Pack

    pool = team_here(None, OFF)
    torch.set_num_threads(pool.threads)
    model = TrainableModel.open(
        Pack.open(pack), pool, LoraSettings(RANK, ALPHA, targets), TrainingOptions(LENGTH, max_rows=min(4096, tokens))
    )  # fmt: skip
    optimizer = FactorOptimizer(model.factors, FinetuneSettings(max_grad_norm=1.0))

    def step(number: int) -> float:
        ids = documents(tokens, number)
        found = model.loss_and_gradients(ids, [[True] * LENGTH] * len(ids))
        optimizer.step(1.0)
        return found.loss

    return step


def peft_step(folder: Path, targets: tuple[str, ...], tokens: int) -> Callable[[int], float]:
    """Returns what does a step of transformers with peft."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeForCausalLM

    base: Any = Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )  # fmt: skip
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()
    base.config.use_cache = False
    of_experts = targets[0].startswith("experts")
    named = (
        {"target_parameters": [f"mlp.{each}" for each in targets], "target_modules": []}
        if of_experts
        else {"target_modules": list(targets)}
    )
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, **named))
    model.train()
    trained = [each for each in model.parameters() if each.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-4)

    def step(number: int) -> float:
        ids = torch.tensor(documents(tokens, number))
        adam.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        return float(loss.detach())

    return step


def work(program: str, place: Path, kind: str, tokens: int) -> None:
    """Answers each line with the seconds and the loss of one step, the last with the memory of this process."""
    import torch  # noqa: F401  before memory is looked at

    if program == "peft":
        import peft  # noqa: F401
        import transformers  # noqa: F401
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    given = place / ("checkpoint" if program == "peft" else program), TARGETS[kind], tokens
    step = peft_step(*given) if program == "peft" else kt_step(*given)
    print("ready", flush=True)
    for line in sys.stdin:
        began, processor = time.perf_counter(), time.process_time()
        loss = step(int(line))
        processor = time.process_time() - processor
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        figures = {
            "seconds": time.perf_counter() - began,
            "processor_s": processor,
            "loss": loss,
            "bytes": (most - before) << 10,
        }
        print(json.dumps(figures), flush=True)


class Program:
    """A process that does a step when it is asked to."""

    def __init__(self, name: str, place: Path, kind: str, tokens: int) -> None:
        line = [sys.executable, __file__, "--worker", name, kind, str(place), "--tokens", str(tokens)]  # fmt: skip
        self._child = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        if self._child.stdout.readline() != "ready\n":
            raise SystemExit(f"{name} does not start")

    def step(self, number: int) -> dict[str, float]:
        """Returns the figures of one step."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(f"{number}\n")
        self._child.stdin.flush()
        found: dict[str, float] = json.loads(self._child.stdout.readline())
        return found

    def end(self) -> None:
        """Ends the process."""
        self._child.communicate()


# --- all of them --------------------------------------------------------------------------------------


def measure(place: Path, kind: str, tokens: int, rounds: int, names: tuple[str, ...]) -> dict[str, Any]:  # fmt: skip
    """Returns the figures of the programs, in turns; the first round is left out."""
    programs = {name: Program(name, place, kind, tokens) for name in names}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name, each in programs.items():
            rows[name].append(each.step(number))
            row = rows[name][-1]
            said = f"{row['seconds']:.2f} s, {row['processor_s']:.2f} s of processors"
            print(f"{kind} round {number} {name}: {said}", file=sys.stderr)
    for each in programs.values():
        each.end()
    found: dict[str, Any] = {"trained": kind, "tokens": tokens, "load": os.getloadavg()}
    for name in names:
        seconds = [row["seconds"] for row in rows[name][1:]]
        found[name] = {
            "tok_s": tokens / median(seconds),
            "step_s": median(seconds),
            "processor_s": median(row["processor_s"] for row in rows[name][1:]),
            "every_s": [round(each, 3) for each in seconds],
            "memory_bytes": rows[name][-1]["bytes"],
            "losses": [round(row["loss"], 4) for row in rows[name]],
        }
        if name != "peft" and "peft" in names:
            for key, said in (("seconds", "times_as_fast"), ("processor_s", "by_processor_time")):
                both = zip(rows[name][1:], rows["peft"][1:], strict=True)
                found[name][said] = median(peer[key] / own[key] for own, peer in both)
            found[name]["share_of_memory"] = rows[name][-1]["bytes"] / rows["peft"][-1]["bytes"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help=f"a multiple of {LENGTH}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(TARGETS))
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--keep", type=Path, help="folder of the checkpoint, kept for another run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        name, kind, place = asked.worker
        work(name, Path(place), kind, asked.tokens)
        return
    with tempfile.TemporaryDirectory() as made:
        place = asked.keep or Path(made)
        if not (place / "kt-int4").exists():
            checkpoint(place / "checkpoint", asked.layers)
            convert(place / "checkpoint", place / "kt-bf16", "bf16", "bf16")
            convert(place / "checkpoint", place / "kt-int4", "int4", "int8")
        kinds = [asked.only] if asked.only else list(TARGETS)
        rows = [
            measure(place, kind, asked.tokens, asked.rounds, tuple(asked.programs.split(",")))
            for kind in kinds
        ]
    from ktcli.hardware.probe import probe

    machine = probe()
    document = {"machine": {"cpu": machine.cpu.model, "isa": machine.cpu.isa[0], "threads": machine.cpu.threads},
                "layers": asked.layers, "rank": RANK, "rows": rows}  # fmt: skip
    text = json.dumps(document, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
