"""Says when a server of a router fails and when it is used again, once each, however often the router finds it so."""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.server.router.smg import Worker

_DRAINING = "draining"


class HealthLog:
    """Compares a router's report on its servers with the report before."""

    def __init__(self) -> None:
        self._well: dict[str, bool] = {}

    def changes(self, workers: Sequence[Worker]) -> list[str]:
        """Returns a sentence for each server whose health has changed; a new healthy one is no change."""
        said = []
        for each in workers:
            if each.status == _DRAINING:  # it was removed
                continue
            before = self._well.get(each.url, True)
            if before and not each.is_healthy:
                said.append(f"{each.url} does not answer; its requests go to the other servers")
            elif each.is_healthy and not before:
                said.append(f"{each.url} answers again and is used")
            self._well[each.url] = each.is_healthy
        gone = self._well.keys() - {each.url for each in workers}
        for url in gone:
            del self._well[url]
        return said
