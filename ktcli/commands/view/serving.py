"""Shows the performance of a server: in SGLang's format, as a document, as a line per request, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import ceil, inf, isinf
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import numpy as np

from ktcli.commands.view.picture import COLOUR, line, new_picture, step_of, words, write
from ktcli.measure.endpoint import Endpoint, StreamedAnswer
from ktcli.measure.latency import Floats, Served, by_server, latencies, percentile, tokens_of
from ktcli.measure.traffic import Driven, Traffic
from ktcli.output import table

BACKEND = "openai-chat"
_WIDTH, _LABEL = 50, 40  # columns of the block, and of what stands before its figures
_LATENCIES = (("e2e_latency", "e2e"), ("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"))
_PERCENTILES = (90, 95, 99)
# Pixels of the picture.
_PANEL, _HEIGHT, _TOP, _BOTTOM, _MARGIN, _AXIS = 340, 220, 56, 52, 16, 56


def serving_document(
    endpoint: Endpoint, traffic: Traffic, driven: Driven, served: Served, retokenized: int | None
) -> dict[str, Any]:
    """Returns the results of a load test as a document with the keys of SGLang's `bench_serving`; latencies in
    milliseconds, throughputs per second.

    Args:
        retokenized: the number of tokens of all answers, by the server's own count; None: unknown.
    """
    seconds = served.seconds
    shown: dict[str, float] = {}
    for name, attribute in _LATENCIES:
        shown |= _statistics(name, getattr(served.latencies, attribute))
    return {
        "backend": BACKEND,
        "url": endpoint.url,
        "model": endpoint.model,
        "seed": traffic.seed,
        "request_rate": None if isinf(traffic.rate) else traffic.rate,
        "max_concurrency": traffic.at_once,
        "random_input_len": traffic.input_tokens,
        "random_output_len": traffic.output_tokens,
        "num_prompts": traffic.requests,
        "completed": served.completed,
        "failed": served.failed,
        "duration": seconds,
        "total_input_tokens": served.input_tokens,
        "total_input_text_tokens": served.input_tokens,
        "total_input_vision_tokens": 0,
        "total_output_tokens": served.output_tokens,
        "total_output_tokens_retokenized": retokenized,
        "request_throughput": served.completed / seconds,
        "input_throughput": served.input_tokens / seconds,
        "output_throughput": served.output_tokens / seconds,
        "total_throughput": (served.input_tokens + served.output_tokens) / seconds,
        "concurrency": served.concurrency,
        **shown,
        "servers": servers_document(driven),
    }


def servers_document(driven: Driven) -> list[dict[str, Any]]:
    """Returns a document for each server behind a router: its requests, tokens, and median and p99 latencies in
    milliseconds; [] where no router names any.
    """
    routed = by_server(driven)
    total = sum(map(len, routed.values()))
    return [_server_document(name, answers, total) for name, answers in routed.items()]


def _server_document(name: str, answers: Sequence[StreamedAnswer], total: int) -> dict[str, Any]:
    whole = [each for each in answers if not each.error]
    times = latencies(whole)
    return {
        "server": name,
        "requests": len(answers),
        "share": len(answers) / total,
        "failed": len(answers) - len(whole),
        "input_tokens": sum(each.prompt_tokens for each in whole),
        "cached_tokens": sum(each.cached_tokens for each in whole),
        "output_tokens": sum(map(tokens_of, whole)),
        "median_ttft_ms": percentile(times.ttft, 50),
        "p99_ttft_ms": percentile(times.ttft, 99),
        "median_itl_ms": percentile(times.itl, 50),
    }


def _server_lines(servers: Sequence[dict[str, Any]]) -> list[str]:
    """The lines about servers behind a router; none where there is no router."""
    if not servers:
        return []
    head = ("SERVER", "REQUESTS", "SHARE", "FAILED", "CACHED", "TTFT P50", "TTFT P99", "ITL P50")
    rows = [
        (
            each["server"],
            f"{each['requests']:,}",
            f"{each['share']:.0%}",
            f"{each['failed']:,}",
            f"{each['cached_tokens'] / max(1, each['input_tokens']):.0%}",
            *(f"{each[name]:.1f} ms" for name in ("median_ttft_ms", "p99_ttft_ms")),
            f"{each['median_itl_ms']:.1f} ms",
        )
        for each in servers
    ]
    return ["", table(rows, head, right=tuple(range(1, len(head))))]


def serving_words(found: dict[str, Any]) -> str:
    """Returns a document of `serving_document` as the block of text that SGLang prints, with a table of servers behind
    a router.
    """
    rate, most = found["request_rate"], found["max_concurrency"]
    retokenized = found["total_output_tokens_retokenized"]
    rows: list[tuple[str, Any]] = [
        ("Backend:", found["backend"]),
        ("Traffic request rate:", inf if rate is None else rate),
        ("Max request concurrency:", "not set" if most is None else most),
        ("Successful requests:", found["completed"]),
        ("Benchmark duration (s):", found["duration"]),
        ("Total input tokens:", found["total_input_tokens"]),
        ("Total input text tokens:", found["total_input_text_tokens"]),
        ("Total input vision tokens:", found["total_input_vision_tokens"]),
        ("Total generated tokens:", found["total_output_tokens"]),
        ("Total generated tokens (retokenized):", "-" if retokenized is None else retokenized),
        ("Request throughput (req/s):", found["request_throughput"]),
        ("Input token throughput (tok/s):", found["input_throughput"]),
        ("Output token throughput (tok/s):", found["output_throughput"]),
        ("Total token throughput (tok/s):", found["total_throughput"]),
        ("Concurrency:", found["concurrency"]),
    ]
    parts = [
        f"{' Serving Benchmark Result ':=^{_WIDTH}}",
        *_rows(rows),
        *_part("End-to-End Latency", "E2E Latency", "e2e_latency", found, "mean median"),
        *_part("Time to First Token", "TTFT", "ttft", found, "mean median p99"),
        *_part("Time per Output Token (excl. 1st token)", "TPOT", "tpot", found, "mean median p99"),
        *_part("Inter-Token Latency", "ITL", "itl", found, "mean median p95 p99 max"),
        "=" * _WIDTH,
        *_server_lines(found["servers"]),
    ]
    return "\n".join(parts)


def request_lines(driven: Driven) -> str:
    """Returns a line of JSON for each request of a load test, in the order in which they were sent: times in seconds
    since the first request, tokens, server, and error.
    """
    first_s = min((each.sent_s for each in driven.answers), default=0.0)
    return "".join(
        json.dumps(_request(at, each, first_s)) + "\n" for at, each in enumerate(driven.answers)
    )


def draw_percentiles(served: Served, title: str, path: Path) -> None:
    """Draws the percentiles of two latencies of a load test, TTFT and ITL in milliseconds, into an SVG file.

    Raises:
        OSError: the file cannot be written.
    """
    panels = (("TTFT (ms)", served.latencies.ttft), ("ITL (ms)", served.latencies.itl))
    width = 2 * _MARGIN + len(panels) * (_AXIS + _PANEL + _MARGIN)
    picture = new_picture(width, _TOP + _HEIGHT + _BOTTOM)
    words(picture, title, width / 2, 24, size=14)
    for i, (name, values) in enumerate(panels):
        _panel(picture, name, values, _MARGIN + _AXIS + i * (_AXIS + _PANEL + _MARGIN))
    write(picture, path)


def _panel(picture: xml.Element, name: str, values: Floats, left: float) -> None:
    """The percentiles of values: from the least at the left to the greatest at the right."""
    bottom, top = _TOP + _HEIGHT, float(_TOP)
    step = step_of(percentile(values, 100) or 1.0)
    most = step * max(1, ceil(percentile(values, 100) / step))

    def y(value: float) -> float:
        return bottom - value / most * _HEIGHT

    line(picture, (left, bottom), (left + _PANEL, bottom))
    line(picture, (left, bottom), (left, top))
    for percent in (0, 25, 50, 75, 90, 99):
        x = left + percent / 100 * _PANEL
        line(picture, (x, bottom), (x, bottom + 4))
        words(picture, f"{percent}", x, bottom + 16, size=11)
    for tick in np.arange(0.0, most + step / 2, step):
        line(picture, (left - 4, y(tick)), (left, y(tick)))
        words(picture, f"{tick:g}", left - 8, y(tick) + 4, size=11, anchor="end")
    words(picture, f"{name} by percentile", left + _PANEL / 2, bottom + 38, size=12)
    if values.size:
        points = [(left + p / 100 * _PANEL, y(percentile(values, p))) for p in range(101)]
        said = " ".join(f"{x:.1f},{at:.1f}" for x, at in points)
        xml.SubElement(picture, "polyline", points=said, fill="none", stroke=COLOUR)


def _statistics(name: str, values: Floats) -> dict[str, float]:
    """The statistics of one latency, under SGLang's names."""
    found = {
        f"mean_{name}_ms": float(values.mean()) if values.size else 0.0,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": float(values.std()) if values.size else 0.0,
    }
    found |= {f"p{percent}_{name}_ms": percentile(values, percent) for percent in _PERCENTILES}
    return {**found, f"max_{name}_ms": percentile(values, 100)}


def _rows(rows: list[tuple[str, Any]]) -> list[str]:
    return [
        f"{label:<{_LABEL}} {f'{value:.2f}' if isinstance(value, float) and not isinf(value) else value}"
        for label, value in rows
    ]


def _part(title: str, label: str, name: str, found: dict[str, Any], statistics: str) -> list[str]:
    """The heading and the rows of one latency."""
    rows = [
        (
            f"{each.upper() if each[0] == 'p' else each.capitalize()} {label} (ms):",
            found[f"{each}_{name}_ms"],
        )
        for each in statistics.split()
    ]
    return [f"{title:-^{_WIDTH}}", *_rows(rows)]


def _request(index: int, answer: StreamedAnswer, first_s: float) -> dict[str, Any]:
    pieces = answer.pieces_s
    return {
        "request": index,
        "sent_s": answer.sent_s - first_s,
        "ttft_s": pieces[0] - answer.sent_s if pieces else None,
        "latency_s": pieces[-1] - answer.sent_s if pieces else None,
        "itl_s": [float(gap) for gap in np.diff(pieces)],
        "input_tokens": answer.prompt_tokens,
        "output_tokens": tokens_of(answer),
        "cached_tokens": answer.cached_tokens,
        "server": answer.server or None,
        "error": answer.error or None,
    }
