"""Ends interests that no longer fit a query, as it has changed: their users get a last result set with an error.

It is numbered as an execution is, and it is the last publication of the interest's log until the query changes again.
So it is appended once, also where a data cluster dies meanwhile, or begins again later and looks at the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dynamoth.data.results import changed_payload, says_the_same
from dynamoth.edge.log import log_keys, log_server
from dynamoth_analytics.cluster.interest_table import InterestTable
from dynamoth_analytics.cluster.publishing import ResultPublisher
from dynamoth_analytics.cluster.servers import LogServers

BROKERS_KNOW_S = 10.0
"""Nothing is published sooner after a change or a drop: brokers may take users by the former definition for a while."""

LOGS_PER_COMMAND = 16
"""Logs whose last result set is read together: each may be large."""

_log = logging.getLogger("dynamoth.data-cluster")


class OutdatedInterests:
    """The interests of one version of a query that have their last result set. Made when its executions begin."""

    def __init__(self) -> None:
        self._begun_at = time.monotonic()
        self._ended: set[str] = set()

    def end(self, publisher: ResultPublisher, table: InterestTable) -> None:
        """Publish to the interests that do not fit, in an execution, unless that is done.

        Raises LogServerFailed and TakenOver; call it again then, with the same execution or a later one.
        """
        unfit = table.unfit()
        self._ended &= unfit.keys()  # one that was forgotten and comes back is ended again
        new = {each: reason for each, reason in unfit.items() if each not in self._ended}
        if not new or time.monotonic() < self._begun_at + BROKERS_KNOW_S or not _is_latest(publisher):
            return
        head = publisher.query, publisher.version, publisher.execution, publisher.tick_ms
        payloads = {each: changed_payload(*head, new[each]) for each in new}
        last = _last_payloads(publisher.servers, [*payloads])
        waiting = {each: payload for each, payload in payloads.items() if not _is_said(last.get(each), payload)}
        publisher.publish_payloads(waiting.items())
        self._ended |= new.keys()
        if waiting:
            text = "query %s has changed: %d interests do not fit it any more, and know"
            _log.warning(text, publisher.query, len(waiting))


def _is_said(last: bytes | None, payload: bytes) -> bool:
    return last is not None and says_the_same(last, payload)


def _is_latest(publisher: ResultPublisher) -> bool:
    """Return whether this is the latest version: else interests may fit that one, and brokers may know it already."""
    query = publisher.servers.catalog().queries.get(publisher.query)
    return query is not None and query.version == publisher.version


def _last_payloads(servers: LogServers, interests: Sequence[str]) -> Mapping[str, bytes]:
    """Return the last publication in the log of each interest that has one."""
    by_server: dict[str, list[str]] = {}
    for each in interests:
        by_server.setdefault(log_server(each, servers.ids), []).append(each)
    found: dict[str, bytes] = {}
    for server, own in by_server.items():
        for begin in range(0, len(own), LOGS_PER_COMMAND):
            part = own[begin : begin + LOGS_PER_COMMAND]
            commands = [(b"XREVRANGE", log_keys(each)[1], b"+", b"-", b"COUNT", b"1") for each in part]
            replies: list[Any] = servers.run_all(server, commands)
            found |= {each: reply[0][1][1] for each, reply in zip(part, replies, strict=True) if reply}
    return found
