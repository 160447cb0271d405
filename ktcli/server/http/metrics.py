"""Counts the work of a server, under vLLM's names with kt's prefix, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ktcli.engine.request import Finish, Stats

if TYPE_CHECKING:
    from ktcli.server.models.residency import Residency

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


# Names, descriptions and labels.
_COUNTERS = (
    ("prompt_tokens", "Prompt tokens."),
    ("generation_tokens", "Generated tokens."),
    ("prefix_cache_queries", "Tokens looked up in the cache."),
    ("prefix_cache_hits", "Tokens found in the cache."),
    ("prefix_cache_tier_hits", "Tokens found in the cache, by where they were.", "tier"),
    (
        "first_prompt_cache_queries",
        "Tokens of prompts that begin a conversation, looked up in the cache.",
    ),
    ("first_prompt_cache_hits", "Tokens of these prompts found in the cache."),
    ("spec_decode_num_draft_tokens", "Drafted tokens."),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."),
    ("request_success", "Finished requests.", "finished_reason"),
    ("key_requests", "Requests with an API key.", "key"),
    ("key_prompt_tokens", "Prompt tokens of requests with an API key.", "key"),
    ("key_generation_tokens", "Generated tokens of requests with an API key.", "key"),
)
_TIMES = (
    ("time_to_first_token", "Time from the request to its first token."),
    ("inter_token_latency", "Time between two tokens of an answer."),
    ("e2e_request_latency", "Time from the request to its end."),
    ("request_queue_time", "Time from the request to its first step."),
)


class Metrics:
    """The counters of one server.

    Attributes:
        registry: the registry of Prometheus that `/metrics` shows.
        times: the histograms of times in seconds, by the names in `_TIMES`.
    """

    def __init__(self, residency: Residency) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Now(residency))
        self._counters = {
            name: Counter(f"kt_{name}", what, labels, registry=self.registry)
            for name, what, *labels in _COUNTERS
        }
        self.times = {
            name: Histogram(f"kt_{name}_seconds", what, buckets=_SECONDS, registry=self.registry)
            for name, what in _TIMES
        }

    def asked(self, entry: Mapping[str, Any]) -> None:
        """Adds an ended request and its tokens to the counters of its API key, given its log entry; does nothing if the
        entry has no key."""
        if (key := entry.get("key")) is not None:
            self._counters["key_requests"].labels(key).inc()
            self._counters["key_prompt_tokens"].labels(key).inc(entry.get("prompt_tokens", 0))
            self._counters["key_generation_tokens"].labels(key).inc(entry.get("tokens", 0))

    def ended(self, stats: Stats, finish: Finish, seconds: float) -> None:
        """Adds an answer that has ended to the counters of tokens, cache hits, drafts and finish reasons, and to the
        histograms of times; `seconds` is its time from the request to its end."""
        self._counters["prompt_tokens"].inc(stats.prompt_tokens)
        self._counters["generation_tokens"].inc(stats.tokens)
        self._counters["prefix_cache_queries"].inc(stats.prompt_tokens)
        self._counters["prefix_cache_hits"].inc(stats.reused_tokens)
        for tier, tokens in stats.reused_by_tier.items():
            self._counters["prefix_cache_tier_hits"].labels(tier).inc(tokens)
        self._counters["spec_decode_num_draft_tokens"].inc(stats.drafted)
        self._counters["spec_decode_num_accepted_tokens"].inc(stats.accepted)
        self._counters["request_success"].labels(finish.value).inc()
        self.times["e2e_request_latency"].observe(seconds)
        self.times["request_queue_time"].observe(stats.queued_s)

    def began(self, stats: Stats) -> None:
        """Adds the first prompt of a conversation to the counters of its tokens and of those found in the cache, shared
        prefixes included."""
        self._counters["first_prompt_cache_queries"].inc(stats.prompt_tokens)
        self._counters["first_prompt_cache_hits"].inc(stats.reused_tokens)

    def embedded(self, tokens: int, reused: int, seconds: float) -> None:
        """Adds a request for embeddings that has ended to the counters, and its `seconds` to the histogram of times.

        Args:
            tokens, reused: the tokens of all texts, and how many of them were in the cache.
        """
        self._counters["prompt_tokens"].inc(tokens)
        self._counters["prefix_cache_queries"].inc(tokens)
        self._counters["prefix_cache_hits"].inc(reused)
        self._counters["request_success"].labels(Finish.STOP.value).inc()
        self.times["e2e_request_latency"].observe(seconds)


class _Now(Collector):
    """Collects the gauges: requests, pages and memory at the moment of a scrape."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def collect(self) -> Iterator[GaugeMetricFamily]:
        residency = self._residency
        count = residency.counts()
        pools = [each.model.backend.engine.pools.pages for each in residency.loaded]
        pages, free = sum(each.count for each in pools), sum(each.available for each in pools)
        yield GaugeMetricFamily(
            "kt_num_requests_running", "Requests being processed.", count.running
        )
        yield GaugeMetricFamily("kt_num_requests_waiting", "Waiting requests.", count.waiting)
        used = 1 - free / pages if pages else 0.0
        yield GaugeMetricFamily("kt_kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", used)
        sizes = GaugeMetricFamily(
            "kt_model_memory_bytes", "Memory used by loaded models.", labels=["model"]
        )
        for each in residency.loaded:
            sizes.add_metric([each.model.name], each.fit.taken_bytes)
        yield sizes
        yield from self._speeds()

    def _speeds(self) -> Iterator[GaugeMetricFamily]:
        """Yields the measured speeds by which it is decided whether pages are read or computed."""
        prompts = GaugeMetricFamily(
            "kt_prompt_tokens_per_second",
            "Measured speed of computing prompts.",
            labels=["model"],
        )
        reads = GaugeMetricFamily(
            "kt_prefix_cache_tier_read_bytes_per_second",
            "Measured speed of reading pages, by where they were.",
            labels=["model", "tier"],
        )
        for each in self._residency.loaded:
            if (tier := each.model.backend.engine.pools.tier) is None:
                continue
            if tier.prompt_tok_s is not None:
                prompts.add_metric([each.model.name], tier.prompt_tok_s)
            for name, bps in tier.read_bps.items():
                reads.add_metric([each.model.name, name], bps)
        yield prompts
        yield reads
