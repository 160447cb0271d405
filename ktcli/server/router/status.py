"""What a router has done: requests, hits, health and spills, from its own counters and those of its servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ktcli.server.router.address import address_of
from ktcli.server.router.asking import counters_of, with_counters
from ktcli.server.router.counters import Counters, cached_share
from ktcli.server.router.plan import RoutingPlan, plan_for
from ktcli.server.router.smg import Worker
from ktcli.server.router.supervision import RouterSupervisor
from ktcli.threadpool import Threads

_ASK_S = 2.0  # in which a server gives its counters
_AT_ONCE = 16
ABSENT, UNUSED = "not used", "unknown"


class RoutedServer(msgspec.Struct):
    """The counts of requests that a router has sent to one server.

    Attributes:
        state: "ready", "unhealthy", "draining" or a word of smg's.
        requests: since the router was started; `share` is their part of all, 0 to 1.
        running: the requests that it answers for the router now.
        cached: the share of its prompts that was in its cache since it was started, 0 to 1; None: it does not say.
        failures: the times that the router stopped asking it because requests failed.
    """

    url: str
    state: str
    requests: int = 0
    share: float = 0.0
    running: int = 0
    cached: float | None = None
    failures: int = 0


class RouterStatus(msgspec.Struct):
    """The state of a router, and its counts since it was started.

    Attributes:
        since: seconds since 1970.
        restarts: after crashes.
        requests: that were answered or failed.
        failed: those that no server could answer.
        retries: the times that a request went to another server.
        matched: requests that went where their prompt had been before; `spilled`: those that did not, because that
            server had too many.
        mean_match: the mean share of a prompt that the router had seen before, 0 to 1; None: no request yet.
        suggested: the threshold that a router would be started with now.
    """

    model: str
    address: str
    metrics: str
    version: str
    pid: int
    since: int
    restarts: int
    threshold: float
    suggested: float
    spill: int
    timeout_s: int
    requests: int
    failed: int
    retries: int
    matched: int
    spilled: int
    mean_match: float | None
    servers: list[RoutedServer]


def status_of_router(router: RouterSupervisor) -> RouterStatus:
    """Returns the state and the counts of a running router, with those of the servers that it routes to.

    Raises:
        KtError: the router does not answer.
    """
    counters = router.client.counters()
    workers = {each.url: each for each in router.client.workers()}
    servers = [each.url for each in router.servers]
    with Threads(min(_AT_ONCE, len(servers)), "kt-status") as team:
        key = router.settings.keys.first
        found = team.map(lambda url: counters_of(address_of(url), key, _ASK_S), servers)
        theirs = dict(zip(servers, found, strict=True))
    routed = [*routed_servers(servers, workers, counters, theirs)]
    routed += [RoutedServer(each, ABSENT) for each in router.absent]
    count = _whole(counters.by("smg_cache_aware_policy_branch_total", "branch"))
    matches = counters.total("smg_cache_aware_match_ratio_count") or 0
    settings, plan = router.settings, router.settings.plan
    return RouterStatus(
        settings.model,
        settings.place.url,
        f"http://127.0.0.1:{settings.place.metrics_port}/metrics",
        settings.engine.label,
        router.pid,
        router.since,
        router.restarts,
        plan.threshold,
        suggested(router, theirs).threshold,
        plan.spill,
        plan.timeout_s,
        sum(each.requests for each in routed),
        int(counters.total("smg_worker_retries_exhausted_total") or 0),
        int(counters.total("smg_worker_retries_total") or 0),
        count.get("tree_match", 0),
        count.get("spill", 0),
        (counters.total("smg_cache_aware_match_ratio_sum") or 0) / matches if matches else None,
        routed,
    )


def routed_servers(
    urls: Sequence[str],
    workers: Mapping[str, Worker],
    router: Counters,
    theirs: Mapping[str, Counters],
) -> list[RoutedServer]:
    """Returns the state of each server, and the counts of requests that the router has sent there, in the order of
    `urls`.

    Args:
        workers: the router's entry for each server, by the server's address.
        router: the router's own counters.
        theirs: each server's own counters, by its address.
    """
    requests = _whole(router.by("smg_worker_requests_total", "worker"))
    active = _whole(router.by("smg_worker_requests_active", "worker"))
    opened = {
        dict(labels)["worker"]: int(value)
        for (name, labels), value in router.values.items()
        if name == "smg_worker_cb_transitions_total" and dict(labels).get("to") == "open"
    }
    total = sum(requests.get(url, 0) for url in urls)
    return [
        RoutedServer(
            url,
            _state(workers.get(url)),
            requests.get(url, 0),
            requests.get(url, 0) / total if total else 0.0,
            active.get(url, 0),
            cached_share(theirs.get(url, Counters({})), 1),
            opened.get(url, 0),
        )
        for url in urls
    ]


def suggested(router: RouterSupervisor, theirs: Mapping[str, Counters]) -> RoutingPlan:
    """Returns the numbers (threshold, spill, timeout) with which a router of these servers would be started now.

    Args:
        theirs: the counters of its servers, by their addresses.
    """
    unknown = Counters({})  # of a server that has come meanwhile
    return plan_for([with_counters(e, theirs.get(e.url, unknown)) for e in router.servers])


def _state(worker: Worker | None) -> str:
    if worker is None:
        return UNUSED
    return worker.status if worker.is_healthy or worker.status != "ready" else "unhealthy"


def _whole(values: Mapping[str, float]) -> dict[str, int]:
    return {key: int(value) for key, value in values.items()}
