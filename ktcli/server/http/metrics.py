"""Counts the work of a server, under vLLM's names with kt's prefix, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ktcli.engine.request import Finish, Stats

if TYPE_CHECKING:
    from ktcli.server.models.residency import Residency

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The counters of one server.

    Attributes:
        registry: the registry of Prometheus that `/metrics` shows.
    """

    def __init__(self, residency: Residency) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Now(residency))
        self._prompt = self._counter("prompt_tokens", "Prompt tokens.")
        self._said = self._counter("generation_tokens", "Generated tokens.")
        self._queries = self._counter("prefix_cache_queries", "Tokens looked up in the cache.")
        self._hits = self._counter("prefix_cache_hits", "Tokens found in the cache.")
        self._tier_hits = self._counter(
            "prefix_cache_tier_hits", "Tokens found in the cache, by where they were.", ["tier"]
        )
        self._first_queries = self._counter(
            "first_prompt_cache_queries",
            "Tokens of prompts that begin a conversation, looked up in the cache.",
        )
        self._first_hits = self._counter(
            "first_prompt_cache_hits", "Tokens of these prompts found in the cache."
        )
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = self._counter(
            "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."
        )
        self._ended = self._counter("request_success", "Finished requests.", ["finished_reason"])
        self._by_key = self._counter("key_requests", "Requests with an API key.", ["key"])
        self._prompt_by_key = self._counter(
            "key_prompt_tokens", "Prompt tokens of requests with an API key.", ["key"]
        )
        self._said_by_key = self._counter(
            "key_generation_tokens", "Generated tokens of requests with an API key.", ["key"]
        )
        self.first_token = self._times(
            "time_to_first_token", "Time from the request to its first token."
        )
        self.gap = self._times("inter_token_latency", "Time between two tokens of an answer.")
        self._whole = self._times("e2e_request_latency", "Time from the request to its end.")
        self._queued = self._times("request_queue_time", "Time from the request to its first step.")

    def asked(self, entry: Mapping[str, Any]) -> None:
        """Counts a request, given its log entry, for its API key."""
        if (key := entry.get("key")) is not None:
            self._by_key.labels(key).inc()
            self._prompt_by_key.labels(key).inc(entry.get("prompt_tokens", 0))
            self._said_by_key.labels(key).inc(entry.get("tokens", 0))

    def ended(self, stats: Stats, finish: Finish, seconds: float) -> None:
        """Counts an answer that has ended."""
        self._prompt.inc(stats.prompt_tokens)
        self._said.inc(stats.tokens)
        self._queries.inc(stats.prompt_tokens)
        self._hits.inc(stats.reused_tokens)
        for tier, tokens in stats.reused_by_tier.items():
            self._tier_hits.labels(tier).inc(tokens)
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        self._ended.labels(finish.value).inc()
        self._whole.observe(seconds)
        self._queued.observe(stats.queued_s)

    def began(self, stats: Stats) -> None:
        """Counts the cached tokens that the first answer of a conversation reused, shared prefixes included."""
        self._first_queries.inc(stats.prompt_tokens)
        self._first_hits.inc(stats.reused_tokens)

    def embedded(self, tokens: int, reused: int, seconds: float) -> None:
        """Counts a request for embeddings that has ended.

        Args:
            tokens, reused: of all texts, and those of them that were in the cache.
        """
        self._prompt.inc(tokens)
        self._queries.inc(tokens)
        self._hits.inc(reused)
        self._ended.labels(Finish.STOP.value).inc()
        self._whole.observe(seconds)

    def _counter(self, name: str, what: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"kt_{name}", what, labels, registry=self.registry)

    def _times(self, name: str, what: str) -> Histogram:
        return Histogram(f"kt_{name}_seconds", what, buckets=_SECONDS, registry=self.registry)


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
