"""Shows what replays of a request trace found: as a document, as a table, and as an answer in words."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from ktcli.errors import counted, gib, predicted
from ktcli.measure.request_trace import RequestTrace
from ktcli.measure.routing import Rule
from ktcli.measure.sizing import WAITING_PERCENT, Compared, Need, Recommendation, recommend
from ktcli.measure.trace_replay import USUAL_LOAD, Fleet, Replayed
from ktcli.output import out
from ktcli.records import dataclass

_ROUTING = {
    Rule.ROUND_ROBIN: "round robin",
    Rule.LEAST_LOADED: "least-loaded routing",
    Rule.PREFIX: "prefix-aware routing",
}
_NEEDED = {
    Need.ROUTER: "Only another router is needed",
    Need.CACHE: "Only a larger cache is needed",
}
_WORTH = 0.05  # of all tokens, that a larger cache has to save to be named
_HEAD = "servers,routing,memory,disk,cached,pooled,on disk,requests,load,wait,p95".split(",")


@dataclass(frozen=True, slots=True)
class ReplaySubject:
    """The trace that was replayed, and the assumptions of the replay.

    Attributes:
        model: the name of the model that servers have; empty: none was named.
        source: who says the speed: "given", "measured" or "predicted"; empty: nobody does.
        token_bytes: the bytes of a token in the cache; None: nobody says.
        most_wait_s: the seconds that most requests may wait; None: any.
    """

    path: Path
    trace: RequestTrace
    model: str
    source: str
    token_bytes: int | None
    most_wait_s: float | None


def replay_document(about: ReplaySubject, compared: Compared) -> dict[str, Any]:
    """Returns the results of a replayed trace as the document for --json: the trace, the results of each fleet of
    servers, and what is needed. Shares are in percent, sizes in tokens; a size is None if there is no limit.
    """
    trace, speed = about.trace, compared.speed
    found = recommend(compared, about.most_wait_s)
    return {
        "work": "cache",
        "trace": str(about.path),
        "model": about.model or None,
        "requests": trace.requests,
        "span_s": trace.span_s,
        "stretch": speed.stretch if speed else 1.0,
        "input_tokens": trace.tokens,
        "output_tokens": int(trace.outputs.sum()),
        "block_tokens": trace.block,
        "blocks": trace.blocks,
        "distinct_blocks": trace.distinct_blocks,
        "common_percent": 100 * trace.common_share,
        "ideal_percent": 100 * compared.ideal.cached,
        "ideal_blocks_percent": 100 * compared.ideal.cached_blocks,
        "bytes_per_token": about.token_bytes,
        "tok_s": speed and speed.tok_s,
        "tok_s_source": about.source or None,
        "decode_tok_s": speed.decode_tok_s if speed and isfinite(speed.decode_tok_s) else None,
        "results": [_row(about, compared, each) for each in compared.replays.values()],
        "need": found.need.value,
        "needed": None if found.fleet is None else _fleet(found.fleet, trace.block),
        "servers_at_least": found.servers,
        "answer": answer(about, compared, found),
    }


def _fleet(fleet: Fleet, block: int) -> dict[str, Any]:
    return {
        "servers": fleet.servers,
        "routing": fleet.rule.value if fleet.servers > 1 else None,
        "memory_tokens": None if fleet.memory is None else fleet.memory * block,
        "disk_tokens": None if fleet.disk is None else fleet.disk * block,
    }


def _row(about: ReplaySubject, compared: Compared, each: Replayed) -> dict[str, Any]:
    times: dict[str, float | None] = dict.fromkeys(
        ("load_percent", "wait_s", "wait_s_p50", "wait_s_p95")
    )
    if compared.speed is not None:
        times |= {
            "load_percent": 100 * each.load if isfinite(each.load) else None,
            "wait_s": float(each.waits_s.mean()),
            "wait_s_p50": float(np.percentile(each.waits_s, 50)),
            "wait_s_p95": _p95(each),
        }
    return {
        **_fleet(each.fleet, about.trace.block),
        "cached_percent": 100 * each.cached,
        "cached_blocks_percent": 100 * each.cached_blocks,
        "disk_percent": 100 * each.disk_tokens / each.tokens,
        "bound_percent": 100 * compared.bounds[each.fleet],
        "busiest_percent": 100 * each.busiest,
        **times,
    }


def replay_words(about: ReplaySubject, compared: Compared) -> str:
    """Returns the results of a replayed trace as text: the facts of the trace, a table with a row for each fleet of
    servers, and the answer.
    """
    trace, speed = about.trace, compared.speed
    stretched = ""
    if speed and speed.stretch != 1:
        stretched = f", replayed over {seconds(speed.stretch * trace.span_s)}"
    rows = [
        ("Trace", f"{counted(trace.requests, 'request')} in {seconds(trace.span_s)}{stretched}"),
        (
            "Prompts",
            f"{millions(trace.tokens)} tokens, {trace.tokens / trace.requests:,.0f} each, in blocks of {trace.block};"
            f" answers {millions(int(trace.outputs.sum()))}",
        ),
        (
            "Reuse",
            f"{percent(compared.ideal.cached)} of the tokens at best, {percent(compared.ideal.cached_blocks)} of the"
            " blocks: one cache without a limit",
        ),
    ]
    rows += [("Model", about.model)] if about.model else []
    rows += [("Token", f"{gib(about.token_bytes)} in the cache")] if about.token_bytes else []
    rows += [("Speed", _speed_words(about, compared))]
    table = out.table(
        [_cells(about, compared, each) for each in compared.replays.values()],
        _HEAD,
        right=(0, *range(2, len(_HEAD))),
    )
    lines = [
        out.fold(line, "  ")
        for line in answer(about, compared, recommend(compared, about.most_wait_s))
    ]
    return "\n".join([out.table(rows), "", table, "", *lines])


def _speed_words(about: ReplaySubject, compared: Compared) -> str:
    if compared.speed is None:
        return f"not known; servers are taken to be busy {percent(USUAL_LOAD, 0)} of the time"
    speed = compared.speed
    answers = "not counted"
    if isfinite(speed.decode_tok_s):
        answers = f"{predicted(speed.decode_tok_s)} tokens/s"
    where = {"given": "", "measured": " (measured here)", "predicted": " (predicted by kt plan)"}[
        about.source
    ]
    return f"prompts {predicted(speed.tok_s)} tokens/s{where}, answers {answers}"


def _cells(about: ReplaySubject, compared: Compared, each: Replayed) -> list[str]:
    fleet = each.fleet
    times = ["", "", ""]
    if compared.speed is not None:
        load = percent(each.load, 0) if isfinite(each.load) else ""
        times = [load, seconds(float(each.waits_s.mean())), seconds(_p95(each))]
    return [
        str(fleet.servers),
        fleet.rule.value if fleet.servers > 1 else "",
        size(about, fleet.memory),
        size(about, fleet.disk),
        percent(each.cached),
        percent(compared.bounds[fleet]),
        percent(each.disk_tokens / each.tokens),
        percent(each.busiest, 0),
        *times,
    ]


def answer(about: ReplaySubject, compared: Compared, found: Recommendation) -> list[str]:
    """Returns the answer of a replay as sentences: whether a router, larger cache or more servers would help, and how
    much.
    """
    lines = [_need_words(about, compared, found)]
    lines += _routing_words(about, compared)
    lines += _size_words(about, compared)
    if compared.speed is not None and not isfinite(compared.speed.decode_tok_s):
        lines.append("The time to write answers is not counted; --decode-speed TOK_S counts it.")
    return lines


def _need_words(about: ReplaySubject, compared: Compared, found: Recommendation) -> str:
    have = compared.replays[compared.choices.have]
    n = have.fleet.servers
    if found.need is Need.UNKNOWN:
        if compared.speed is not None:
            return "All requests came at the same time, so load says nothing; only the shares do."
        return "Whether servers keep up depends on their speed: name a MODEL, or use --speed TOK_S."
    now = _busy_words(about, have)
    if found.need is Need.NOTHING:
        return f"{_servers(n)} {'is' if n == 1 else 'are'} enough: {now}."
    if found.fleet is None:
        return (
            f"None of these keeps up: now {now}. {_servers(found.servers or 1)} would, at least, if all is cached that"
            " can be."
        )
    then = _busy_words(about, compared.replays[found.fleet])
    what = _NEEDED.get(found.need, "More servers are needed")
    return f"{what}: with {_with(about, found.fleet, have.fleet)}, {then}; now {now}."


def _servers(n: int) -> str:
    return f"{n} server{'' if n == 1 else 's'}"


def _busy_words(about: ReplaySubject, each: Replayed) -> str:
    whose = "the server is" if each.fleet.servers == 1 else "the busiest is"
    waits = f"{WAITING_PERCENT} % of the requests wait at most {seconds(_p95(each))}"
    return f"{whose} busy {percent(each.load, 0)} of the time, and {waits}"


def _with(about: ReplaySubject, fleet: Fleet, have: Fleet) -> str:
    """Returns what a fleet has that another does not have."""
    parts = [_servers(fleet.servers)] if fleet.servers != have.servers else []
    if fleet.servers > 1 and (fleet.rule is not have.rule or fleet.servers != have.servers):
        parts.append(_ROUTING[fleet.rule])
    tiers = (fleet.memory, have.memory, "in memory"), (fleet.disk, have.disk, "on disk")
    for blocks, before, where in tiers:
        if blocks != before:
            said = "an unlimited cache" if blocks is None else size(about, blocks)
            parts.append(f"{said} {where}")
    return ", ".join(parts)


def _routing_words(about: ReplaySubject, compared: Compared) -> list[str]:
    """Returns a sentence about routing, where several servers were compared by several rules: with the caches that
    somebody has, or the first with which routing matters."""
    choices = compared.choices
    n = choices.servers[0] if choices.servers[0] > 1 else max(choices.servers)
    if n == 1 or len(choices.rules) == 1:
        return []
    have, lines = replace(choices.have, servers=n), list[str]()
    for sizes in product(choices.memory, choices.disk):
        shares = {rule: compared.replays[Fleet(n, rule, *sizes)].cached for rule in choices.rules}
        matters = max(shares.values()) >= min(shares.values()) + _WORTH
        said = ", ".join(
            f"{percent(share)} with {_ROUTING[rule]}" for rule, share in shares.items()
        )
        caches = _with(about, Fleet(n, have.rule, *sizes), have)
        where = f" with {caches}" if caches else ""
        what = "decides how much is cached" if matters else "changes little"
        lines.append(f"Routing of {n} servers{where} {what}: {said}.")
        if matters:
            return lines[-1:]
    return lines[:1]


def _size_words(about: ReplaySubject, compared: Compared) -> list[str]:
    """Returns a sentence about larger caches: the smallest that saves nearly what the best does."""
    choices = compared.choices
    have = compared.replays[choices.have]
    others = [
        each
        for fleet, each in compared.replays.items()
        if (fleet.servers, fleet.rule) == (have.fleet.servers, have.fleet.rule)
    ]
    best = max(others, key=lambda each: each.cached)
    if len(others) == 1:
        return []
    if best.cached < have.cached + _WORTH:
        return [
            f"A larger cache saves little: {percent(best.cached)} at most, {percent(have.cached)} now."
        ]
    good = next(each for each in others if each.cached > best.cached - _WORTH / 5)
    where = _with(about, good.fleet, have.fleet)
    return [
        f"A larger cache saves work: {percent(good.cached)} are cached with {where}, {percent(have.cached)} now."
    ]


def _p95(each: Replayed) -> float:
    return float(np.percentile(each.waits_s, WAITING_PERCENT))


def size(about: ReplaySubject, blocks: int | None) -> str:
    """Returns the size of a cache of `blocks` blocks for people, in bytes if the bytes per token are known, else in
    tokens; "unlimited" for None, "none" for 0.
    """
    if not blocks:
        return "unlimited" if blocks is None else "none"
    tokens = blocks * about.trace.block
    if about.token_bytes is None:
        return f"{millions(tokens)} tokens"
    return gib(tokens * about.token_bytes)


def percent(share: float, digits: int = 1) -> str:
    """Returns a share, 0 to 1, as a percentage for people: "37.4 %"."""
    return f"{100 * share:,.{digits}f} %"


def millions(count: int) -> str:
    """Returns a count for people, in millions from a million on: "144.8M", "12,345"."""
    return f"{count / 1e6:,.1f}M" if count >= 1_000_000 else f"{count:,}"


def seconds(value: float) -> str:
    """Returns a time in seconds for people: "0.42 s", "12 s", "3.5 min", "21 h"."""
    for unit, each, below in (("s", 1, 100), ("min", 60, 6000), ("h", 3600, 3600 * 48)):
        if value < below:
            form = ".2g" if value < 100 * each else ",.0f"
            return f"{value / each:{form}} {unit}"
    return f"{value / 86_400:,.1f} days"
