"""`kt bench cache`: what caches and routers would do with requests that were recorded, and what is needed for them."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Annotated

from ktcli.assembly.served import ServedFacts, served_facts
from ktcli.assembly.subject import find_subject
from ktcli.commands.cli.declarations import argument, option
from ktcli.commands.view.trace_replay import ReplaySubject, replay_document, replay_words
from ktcli.errors import UsageError, gib
from ktcli.measure.request_trace import MOST_BLOCK_TOKENS, RequestTrace, read_trace
from ktcli.measure.routing import Rule
from ktcli.measure.sizing import Choices, compare
from ktcli.measure.trace_replay import SPILL, ReplaySpeed
from ktcli.output import out
from ktcli.records import dataclass
from ktcli.settings import SIZES

_RULES = [rule.value for rule in Rule]
_ALL_RULES = ",".join(_RULES)
_MOST_SERVERS, _MOST_FLEETS = 64, 500
# Of reading pages, slower than any NVMe drive; reading must beat computing to matter.
_DISK_BPS = 1e9
_TOKENS = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([kKMG]?)\s*tokens?", re.ASCII)
_THOUSANDS = {"": 1, "k": 1000, "K": 1000, "M": 1_000_000, "G": 1_000_000_000}
_UNLIMITED = "unlimited"
_SIZES = "sizes separated by commas, such as 16G, 500ktokens, 2Mtokens, unlimited or 0"

ModelOpt = Annotated[
    str | None,
    argument(
        "MODEL",
        "Model whose plan says the speed, the bytes of a token and the sizes of the caches here.",
    ),
]
TraceOpt = Annotated[
    Path,
    option("--trace FILE", "Trace of requests, as kt serve --record-trace and Mooncake write it."),
]
MemoryOpt = Annotated[
    str | None,
    option(
        "--memory SIZE,...",
        "Sizes of each server's cache in memory: 16G, 500ktokens, unlimited. Default: that of kt serve MODEL,"
        " else unlimited.",
    ),
]
DiskOpt = Annotated[
    str | None,
    option(
        "--disk SIZE,...",
        "Sizes of its cache on disk. Default: that of kt serve MODEL and unlimited, else 0.",
    ),
]
ServersOpt = Annotated[str, option("--servers N,...", "Numbers of servers.")]
RoutingOpt = Annotated[
    str,
    option("--routing RULE,...", f"Rules by which a router chooses a server: {', '.join(_RULES)}."),
]
SpillOpt = Annotated[
    int,
    option(
        "--spill N",
        "With prefix routing: requests by which a server may have more than another before load decides.",
        min=0,
        max=1_000_000,
    ),
]
BlockOpt = Annotated[
    int | None,
    option(
        "--block N",
        "Tokens of a block of the trace. Default: the power of two that fits its lengths.",
        min=1,
        max=MOST_BLOCK_TOKENS,
    ),
]


@dataclass(frozen=True, slots=True)
class TimeOptions:
    """How fast requests come, and are read and answered."""

    speed: Annotated[
        float | None,
        option(
            "--speed TOK_S",
            "Tokens of prompts that a server computes in a second. Default: MODEL's, as measured or planned here.",
            min=0.01,
            max=1e9,
        ),
    ] = None
    decode_speed: Annotated[
        float | None,
        option(
            "--decode-speed TOK_S",
            "Tokens that it writes in a second, of all answers together. Default: answers take no time.",
            min=0.01,
            max=1e9,
        ),
    ] = None
    bytes_per_token: Annotated[
        int | None,
        option(
            "--bytes-per-token N",
            "Bytes of a token in the cache. Default: MODEL's.",
            min=1,
            max=1 << 30,
        ),
    ] = None
    max_wait: Annotated[
        float | None,
        option(
            "--max-wait SECONDS",
            "Longest wait for the first token that 95 % of the requests may have. Default: any.",
            min=0.001,
            max=1e9,
        ),
    ] = None
    stretch: Annotated[
        float,
        option(
            "--stretch X",
            "Replay the trace over X times its time: 10 for a tenth of its requests per second.",
            min=1e-6,
            max=1e6,
        ),
    ] = 1.0

    def replay_speed(
        self, facts: ServedFacts | None, token_bytes: int | None
    ) -> ReplaySpeed | None:
        """Returns the tokens per second at which the replay computes prompts, reads them from disk and generates
        answers, and the factor by which it stretches the trace in time; None if neither --speed nor a model gives the
        first.

        Args:
            facts: the facts of the named model, with its prompt speed; None: no model was named.
            token_bytes: the bytes of a token in the KV cache; None: not known.
        Raises:
            UsageError: that speed is missing, and another option depends on it.
        """
        tok_s = self.speed or (facts.prompt_tok_s if facts else None)
        if tok_s is None:
            given = {
                "--decode-speed": self.decode_speed is not None,
                "--stretch": self.stretch != 1,
                "--max-wait": self.max_wait is not None,
            }
            if used := next((option for option, is_given in given.items() if is_given), ""):
                raise UsageError(
                    f"{used} needs the speed at which prompts are read",
                    hint="name a MODEL, or use --speed TOK_S",
                )
            return None
        disk_tok_s = max(tok_s, _DISK_BPS / token_bytes) if token_bytes else inf
        return ReplaySpeed(tok_s, disk_tok_s, self.decode_speed or inf, self.stretch)

    def source(self, facts: ServedFacts | None) -> str:
        """Returns where the speed of computing prompts comes from: "given" (--speed), "measured" or "predicted" (of the
        model); empty: there is none.
        """
        if self.speed is not None:
            return "given"
        return "" if facts is None else "measured" if facts.is_measured else "predicted"


def cache(
    *,
    trace: TraceOpt,
    model: ModelOpt = None,
    memory: MemoryOpt = None,
    disk: DiskOpt = None,
    servers: ServersOpt = "1,2,4",
    routing: RoutingOpt = _ALL_RULES,
    spill: SpillOpt = SPILL,
    timed: TimeOptions,
    block: BlockOpt = None,
) -> None:
    """Replay recorded requests: is a second server needed, a larger cache, or only a router?

    Counts how much of the prompts would be found in caches of these sizes, with so many servers behind a router, and
    how long requests would wait. The first value of each list is what you have, the others are what you could have
    instead; every combination is tried. Nothing is loaded.

    Examples:

      kt bench cache qwen3-30b-a3b --trace requests.jsonl

      kt bench cache --trace requests.jsonl --memory 500ktokens,2Mtokens --speed 300

      kt bench cache qwen3-30b-a3b --trace requests.jsonl --servers 2,3 --disk 40G,400G --max-wait 20

      kt bench cache --trace conversation_trace.jsonl --stretch 40 --speed 500 --json
    """
    numbers, rules = _numbers(servers), _rules(routing)
    sizes = {"--memory": _sizes("--memory", memory), "--disk": _sizes("--disk", disk)}
    name, facts = _served(model)
    token_bytes = timed.bytes_per_token or (facts.token_bytes if facts else None)
    _require_bytes(sizes, token_bytes)
    times, source = timed.replay_speed(facts, token_bytes), timed.source(facts)
    requests = _read(trace, block)
    blocks = _blocks(sizes, facts, token_bytes, requests.block)
    choices = Choices(numbers, rules, *blocks, spill)
    if (n := len(choices.fleets())) > _MOST_FLEETS:
        raise UsageError(
            f"these are {n:,} combinations, more than {_MOST_FLEETS}", hint="give fewer values"
        )
    with out.progress("Replaying", n, unit="replays") as bar:
        found = compare(requests, choices, times, lambda done: bar.update(done=done))
    about = ReplaySubject(trace, requests, name, source, token_bytes, timed.max_wait)
    out.result(replay_document(about, found), lambda: replay_words(about, found))


def _served(model: str | None) -> tuple[str, ServedFacts | None]:
    """Returns the name of a model, and what a server of it would be here; None: no model was named."""
    if model is None:
        return "", None
    subject = find_subject(model, ask_hub=True, tell=out.note)
    facts = served_facts(subject, out)
    plan = facts.plan
    if not plan.fits:  # as where a server has it in memory already
        need, free = gib(plan.need_bytes), gib(plan.host.available_bytes)
        out.warn(
            f"{subject.title} needs {need} of memory, but only {free} is free now; --speed and --memory say what a"
            " server has, if that is not its plan"
        )
    return subject.title, facts


def _read(path: Path, block: int | None) -> RequestTrace:
    try:
        size = path.stat().st_size
    except OSError:
        size = 0  # reading it says what is wrong
    with out.progress(f"Reading {path.name}", size or None, unit="B") as bar:
        return read_trace(path, block, lambda read: bar.update(done=read))


def _parts(text: str) -> list[str]:
    return [each.strip() for each in text.split(",")]


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of servers. Raises: UsageError: they are not."""
    parts = _parts(text)
    if not all(
        len(each) < 4 and each.isascii() and each.isdigit() and 1 <= int(each) <= _MOST_SERVERS
        for each in parts
    ):
        raise UsageError(
            f"--servers cannot be {text[:40]!r}",
            hint=f"use numbers from 1 to {_MOST_SERVERS}, for example 1,2,4",
        )
    return tuple(dict.fromkeys(map(int, parts)))


def _rules(text: str) -> tuple[Rule, ...]:
    """Returns the rules of routing. Raises: UsageError: they are not."""
    parts = _parts(text)
    if wrong := [each for each in parts if each not in _RULES]:
        raise UsageError(
            f"--routing has no rule {wrong[0][:40]!r}", hint=f"use some of {_ALL_RULES}"
        )
    return tuple(dict.fromkeys(map(Rule, parts)))


@dataclass(frozen=True, slots=True)
class _Size:
    """A size of a cache, in bytes or in tokens; neither: it has no limit."""

    size_bytes: int | None = None
    tokens: int | None = None


def _sizes(option: str, text: str | None) -> list[_Size] | None:
    """Returns the sizes of an option; None: it was not given. Raises: UsageError: they are not sizes."""
    if text is None:
        return None
    found = []
    for each in _parts(text):
        if tokens := _TOKENS.fullmatch(each):
            found.append(_Size(tokens=int(float(tokens[1]) * _THOUSANDS[tokens[2]])))
        elif each == _UNLIMITED:
            found.append(_Size())
        else:
            try:
                size_bytes = SIZES.read(each)
            except ValueError:
                raise UsageError(
                    f"{option} cannot be {text[:40]!r}", hint=f"use {_SIZES}"
                ) from None
            found.append(_Size(size_bytes) if size_bytes else _Size(tokens=0))
    return found


def _require_bytes(sizes: dict[str, list[_Size] | None], token_bytes: int | None) -> None:
    """Checks that sizes in bytes mean something. Raises: UsageError: the bytes of a token are not known."""
    for name, given in sizes.items():
        if token_bytes is None and any(each.size_bytes is not None for each in given or ()):
            raise UsageError(
                f"{name} is in bytes, but the bytes of a token are not known",
                hint="name a MODEL, use --bytes-per-token N, or give tokens, such as 500ktokens",
            )


def _blocks(
    sizes: dict[str, list[_Size] | None],
    facts: ServedFacts | None,
    token_bytes: int | None,
    block: int,
) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Returns the sizes of the caches in memory and on disk, in blocks; None: without a limit."""
    usual = {"--memory": [_Size()], "--disk": [_Size(tokens=0)]}
    if facts is not None:
        usual["--memory"] = [_Size(tokens=facts.memory_tokens)]
        usual["--disk"] = [_Size(facts.disk_bytes), _Size()]

    def blocks(size: _Size) -> int | None:
        if size.size_bytes is not None:
            assert token_bytes is not None
            return size.size_bytes // (token_bytes * block)
        return None if size.tokens is None else size.tokens // block

    memory, disk = (
        tuple(dict.fromkeys(blocks(size) for size in given or usual[option]))
        for option, given in sizes.items()
    )
    return memory, disk
