"""What a store of KV pages costs and brings that servers share (kt serve --kv-store): real servers, one thread each.

    python benchmarks/store.py [--only PART ...] [--out FILE.json]      for `saved` first: kt engine install smg

`wide` is a model of random weights with 64 KiB of pages per token, like DeepSeek-R1. Servers have no disk of
their own unless a row says so. What is compared was measured in turn; figures are medians of the pairs'.

    found    from the first token of a request with `kt_persist` until its answer ends, when another server finds the
             pages, beside 0.3 s and the time of writing as many bytes to the same folder; also while it answers others
    decode   seconds per token of a server that writes behind, beside one without a store, and the processor time that
             it takes
    saved    two servers behind kt route, each of which is started again under way: tokens found in caches with the
             folder beside those without, one request after the other
    gone     the folder hangs or is unmounted, the master of a Mooncake store is killed or its cable pulled: what
             requests take longer than those of a server without a store, and how long SIGTERM takes
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from naming import result_path
from route import conversations
from routed import MODEL, ask, free_port, kt, router
from serving import written
from store_faults import measure_gone
from streamed import stream

from ktcli.hardware.probe import probe

WIDE = {
    "model_type": "qwen3_moe",
    "vocab_size": 2048,  # of kt-mini's tokenizer
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 16,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
IDS = (300, 1800)  # of words
FOUND_TOKENS, FOUND_ROUNDS = (512, 1792), 5
PROMPT, ANSWER, PAIRS = 1024, 256, 15  # whose decode is compared
SEEDS, READY_S = (1,), 60.0
GOALS = {"beyond_writing_s": 0.3, "decode": 1.02, "saved": 1.08}


def drawn(draw: random.Random, tokens: int) -> list[int]:
    """A prompt that nobody has read."""
    return [draw.randrange(*IDS) for _ in range(tokens)]


def _name(model: str) -> str:
    return model if model == MODEL else "wide"


@contextmanager
def servers(model: str, folder: Path, *options: tuple[str, ...]) -> Iterator[list[tuple[int, int]]]:
    """The ports and processes of servers with these options, each with a library of its own."""
    with ExitStack() as held:
        made = []
        for number, more in enumerate(options):
            words, port = ("serve", model, "--threads", "1", *more), free_port()
            child = held.enter_context(kt(*words, port=port, KT_HOME=str(folder / f"home{number}")))
            made.append((port, child.pid))
        yield made


# --- found --------------------------------------------------------------------------------------------


def measure_found(wide: str) -> list[dict[str, Any]]:
    """How soon another server finds what one has read."""
    rows = []
    for model in (MODEL, wide):
        for tokens in FOUND_TOKENS:
            rows += [_found(model, tokens, answers=answers) for answers in (False, True)]
    return rows


def _found(model: str, tokens: int, *, answers: bool) -> dict[str, Any]:
    draw = random.Random(tokens)
    rows = []
    with tempfile.TemporaryDirectory(dir=Path.home()) as made:
        folder, store = Path(made), Path(made, "store")
        shared = ("--kv-store", str(store), "--parallel", "2")
        with servers(model, folder, shared, shared) as ((one, _), (two, _)):
            for _ in range(FOUND_ROUNDS):
                with _company(one, model, draw) if answers else ExitStack():
                    rows.append(_found_once(model, (one, two), store, drawn(draw, tokens)))
    figures = {name: median(row[name] for row in rows) for name in rows[0]}
    row = {
        "model": _name(model),
        "tokens": tokens,
        "answers_another": answers,
        **figures,
        "beyond_writing_s": median(row["found_s"] - row["writing_s"] for row in rows),
        "worst_beyond_writing_s": max(row["found_s"] - row["writing_s"] for row in rows),
        "computed_by_the_other": max(row["computed"] for row in rows),
    }
    print(json.dumps(row), flush=True)
    return row


@contextmanager
def _company(port: int, model: str, draw: random.Random) -> Iterator[None]:
    """Another request, which is answered meanwhile."""
    thread = threading.Thread(target=stream, args=(port, drawn(draw, 64), 1024, model))
    thread.start()
    time.sleep(0.1)
    yield
    thread.join()


def _found_once(
    model: str, ports: tuple[int, int], store: Path, ids: list[int]
) -> dict[str, float]:
    before = set(store.glob("*/*.pages"))
    first = stream(ports[0], ids, 1, model, kt_persist=True)
    second = stream(ports[1], ids, 1, model)
    sizes = [path.stat().st_size for path in set(store.glob("*/*.pages")) - before]
    return {
        "bytes": sum(sizes),
        "files": len(sizes),
        "computing_s": first.first_s,
        "found_s": first.ended_s - first.moments[0],
        "writing_s": _writing_s(store.parent, sizes),
        "other_first_s": second.first_s,
        "computed": second.prompt - second.cached,
    }


def _writing_s(folder: Path, sizes: list[int]) -> float:
    """The seconds of writing files of as many bytes, each flushed and renamed. All are kept until the last one is
    written: memory of files that are gone would be used again, which is faster."""
    data = os.urandom(max(sizes, default=0))
    with tempfile.TemporaryDirectory(dir=folder) as made:
        began = time.perf_counter()
        for number, size in enumerate(sizes):
            path = Path(made, f"{number}.tmp")
            with path.open("wb") as file:
                file.write(memoryview(data)[:size])
                os.fsync(file.fileno())
            path.rename(Path(made, str(number)))
        return time.perf_counter() - began


# --- decode -------------------------------------------------------------------------------------------


def measure_decode(wide: str) -> list[dict[str, Any]]:
    """What writing behind costs an answer."""
    return [_decode(model) for model in (MODEL, wide)]


def _decode(model: str) -> dict[str, Any]:
    draw, pairs = random.Random(3), []
    with tempfile.TemporaryDirectory(dir=Path.home()) as made:
        store = Path(made, "store")
        with servers(model, Path(made), ("--kv-store", str(store)), ()) as both:
            for pair in range(PAIRS + 1):
                ids, took = drawn(draw, PROMPT), {}
                for each in (0, 1) if pair % 2 else (1, 0):
                    port, pid = both[each]
                    took[each] = stream(port, ids, ANSWER, model, pid)
                pairs.append((took[0], took[1]))
        size = sum(path.stat().st_size for path in store.glob("*/*.pages"))
    del pairs[0]  # which warmed both up
    low, middle, high = quantiles([a.token_s / b.token_s for a, b in pairs], n=4)
    cpu = quantiles([a.cpu_s / b.cpu_s for a, b in pairs], n=4)
    row = {
        "model": _name(model),
        "prompt_tokens": PROMPT,
        "tokens": ANSWER,
        "pairs": PAIRS,
        "written_bytes": size,
        "step_ms": 1000 * median(b.token_s for _, b in pairs),
        "decode": middle,
        "quartiles": [low, high],
        "decode_cpu": cpu[1],
        "quartiles_cpu": [cpu[0], cpu[2]],
    }
    print(json.dumps(row), flush=True)
    return row


# --- saved --------------------------------------------------------------------------------------------


def measure_saved(_: str) -> list[dict[str, Any]]:
    """Tokens found in caches while each of two servers is started again, with a folder and without."""
    rows = []
    for disk in (False, True):
        runs = []
        for seed in SEEDS:
            runs.append((_trace(seed, disk, shared=True), _trace(seed, disk, shared=False)))
            print(json.dumps(runs[-1]), flush=True)
        with_folder, without = (
            sum(each["cached"] for each in side) for side in zip(*runs, strict=True)
        )
        row = {
            "own_disk": disk,
            "prompt_tokens": sum(each["prompt"] for each, _ in runs),
            "cached_with": with_folder,
            "cached_without": without,
            "saved": with_folder / without,
            "runs": runs,
        }
        rows.append(row)
    return rows


def _trace(seed: int, disk: bool, *, shared: bool) -> dict[str, int]:
    """The tokens of all conversations, turn by turn; each server is away for a sixth of them."""
    talks = conversations(seed, 0)
    turns = iter([(talk, turn) for turn in range(len(talks[0].questions)) for talk in talks])
    sixth = sum(len(talk.questions) for talk in talks) // 6
    counts = {"prompt": 0, "cached": 0}
    with tempfile.TemporaryDirectory(dir=Path.home()) as made, ExitStack() as held:
        more = ("--kv-store", str(Path(made, "store"))) if shared else ()
        cache = "1G" if disk else "0"
        ports, port = [free_port(), free_port()], free_port()
        running = [held.enter_context(ExitStack()) for _ in ports]

        def begin(number: int) -> None:
            words = ("serve", MODEL, "--threads", "1", "--parallel", "4", *more)
            home = str(Path(made, f"home{number}"))
            server = kt(*words, port=ports[number], KT_HOME=home, KT_CACHE=cache)
            running[number].enter_context(server)

        for number in (0, 1):
            begin(number)
        held.enter_context(router(*ports, port=port))
        _talk(port, islice(turns, sixth), counts)
        for number in (0, 1):
            running[number].close()
            _until_ready(port, 1)
            _talk(port, islice(turns, sixth), counts)
            begin(number)
            _until_ready(port, 2)
            _talk(port, islice(turns, sixth), counts)
        _talk(port, turns, counts)
    return counts


def _talk(port: int, turns: Any, counts: dict[str, int]) -> None:
    """Asks one question after the other, and counts tokens."""
    for talk, turn in turns:
        talk.messages.append({"role": "user", "content": talk.questions[turn]})
        asked, answer = ask(port, talk.messages, temperature=0)
        assert asked.status == 200, asked
        talk.messages.append({"role": "assistant", "content": answer})
        counts["prompt"] += asked.prompt
        counts["cached"] += asked.cached


def _until_ready(port: int, servers: int) -> None:
    """Waits until a router uses so many servers."""
    command = [sys.executable, "-m", "ktcli", "route", "status", "--json", "--port", str(port)]
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if sum(each["state"] == "ready" for each in json.loads(said)["servers"]) == servers:
            return
    raise SystemExit(f"the router does not use {servers} servers")


# --- all ----------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[str], Any]] = {
    "found": measure_found,
    "decode": measure_decode,
    "saved": measure_saved,
    "gone": lambda _: measure_gone(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = probe()
    with tempfile.TemporaryDirectory() as made:
        wide = str(written(Path(made), WIDE))
        found = {name: PARTS[name](wide) for name in options.only}
    document = {
        "cpu": machine.cpu.model,
        "cores": machine.cpu.physical_cores,
        "load": os.getloadavg()[2],
        "goals": GOALS,
        **found,
    }
    path = options.out or result_path(machine.cpu.model, machine.cpu.physical_cores, "store")
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
