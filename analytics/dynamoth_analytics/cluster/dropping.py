"""Ends queries that were dropped: their users get a last publication, ``{"dropped": true}``.

It is numbered as an execution is, so it is appended once, also where a data cluster dies meanwhile. Interests stay
registered until their time is over: whoever registers the query again finds them, and goes on with larger numbers.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import replace

from dynamoth.data.progress import QueryStatus, WindowEnd, give_up
from dynamoth.data.queries import StandingQuery
from dynamoth.data.registrations import registration_keys
from dynamoth.data.results import dropped_payload
from dynamoth_analytics.cluster.context import ClusterContext

SCAN_COUNT = b"1000"

RETAINED_MAX = 10**7
"""The largest ``retained_min`` of a query: nobody knows its own any more, and the last publication trims no log."""

_log = logging.getLogger("dynamoth.data-cluster")


def end_dropped(context: ClusterContext, name: str) -> None:
    """Publish to the interests of a dropped query that it was dropped, unless that is done.

    Raises LogServerFailed and OSError; call it again then. Raises TakenOver, too.
    """
    progress = context.progress(name)
    if progress is not None and progress.is_dropped:
        return
    interests = _interests(context, name)
    status = context.status(name) or QueryStatus()
    now_ms = int(time.time() * 1000)
    end: WindowEnd = progress.window.end if progress else {"tick_ms": 0, "offsets": {}}
    last = replace(give_up(progress, None, end, now_ms), is_dropped=True)
    query = StandingQuery(name, "", "", 0, version=status.version, retained_min=RETAINED_MAX)
    payload = dropped_payload(name, status.version, last.execution, now_ms)
    context.publisher(query, last.execution, 0).publish_payloads((each, payload) for each in interests)
    context.store_progress(name, last, follows=False)
    context.checkpoint(name).remove()
    for kind in ("interests", "windows"):
        shutil.rmtree(context.folder / kind / str(context.term) / name, ignore_errors=True)
    status.state, status.reason, status.since_ms = "dropped", "", now_ms
    context.store_status(name, status)
    _log.info("query %s was dropped: %d interests know", name, len(interests))


def _interests(context: ClusterContext, name: str) -> list[str]:
    """Return the ids of all interests of a query."""
    key, found = registration_keys(name)[0], list[str]()
    for id_ in context.servers.ids:
        cursor = b"0"
        while True:
            cursor, pairs = context.servers.run(id_, (b"HSCAN", key, cursor, b"COUNT", SCAN_COUNT))
            found += [each.decode() for each in pairs[::2]]  # fields and values take turns
            if int(cursor) == 0:
                break
    return [*dict.fromkeys(found)]  # a scan may give one twice
