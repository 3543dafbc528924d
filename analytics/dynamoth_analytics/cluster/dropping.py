"""Ends queries that were dropped: their users get a last publication, ``{"dropped": true}``.

It is numbered as an execution is, so it is appended once, also where a data cluster dies meanwhile. The number is
stored at the log servers before anything is published: a log that has it takes no execution of the same number, so the
query has to go on with larger ones, even where it is registered again before all logs have their last publication.
Interests stay registered until their time is over: whoever registers the query again finds them.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import replace

from dynamoth.data.progress import Progress, QueryStatus, WindowEnd, give_up
from dynamoth.data.queries import StandingQuery
from dynamoth.data.registrations import registration_keys
from dynamoth.data.results import dropped_payload
from dynamoth_analytics.cluster.context import ClusterContext

SCAN_COUNT = b"1000"

RETAINED_MAX = 10**7
"""The largest ``retained_min`` of a query: nobody knows its own any more, and the last publication trims no log."""

_log = logging.getLogger("dynamoth.data-cluster")


def end_dropped(context: ClusterContext, name: str, dropped_version: int) -> None:
    """Publish to the interests of a dropped query that it was dropped, unless that is done.

    ``dropped_version`` is that of the catalog's entry: a query that was registered again meanwhile, and dropped before
    its first execution, has two of them.

    Raises LogServerFailed and OSError; call it again then. Raises TakenOver, too.
    """
    progress = context.progress(name)
    is_stored = progress is not None and progress.dropped_version >= dropped_version
    if progress is not None and is_stored and progress.is_done:
        return
    now_ms = int(time.time() * 1000)
    if progress is None or not is_stored:
        end: WindowEnd = progress.window.end if progress else {"tick_ms": 0, "offsets": {}}
        progress = replace(give_up(progress, None, end, now_ms), is_done=False, dropped_version=dropped_version)
        context.store_progress(name, progress, follows=False)
    status = context.status(name) or QueryStatus()
    _publish(context, name, progress)
    context.checkpoint(name).remove()
    for kind in ("interests", "windows"):
        shutil.rmtree(context.folder / kind / str(context.term) / name, ignore_errors=True)
    status.state, status.reason, status.since_ms = "dropped", "", now_ms
    context.store_status(name, status)


def finish_dropping(context: ClusterContext, name: str) -> None:
    """Publish what ``end_dropped`` has not, where a query is registered again before that has ended.

    Raises as ``end_dropped``.
    """
    progress = context.progress(name)
    if progress is not None and progress.is_dropped and not progress.is_done:
        _publish(context, name, progress)


def _publish(context: ClusterContext, name: str, progress: Progress) -> None:
    """Publish that a query was dropped to all of its interests, and store that this is done."""
    interests, execution, version = _interests(context, name), progress.execution, progress.dropped_version - 1
    query = StandingQuery(name, "", "", 0, version=version, retained_min=RETAINED_MAX)
    payload = dropped_payload(name, version, execution, int(time.time() * 1000))
    context.publisher(query, execution, 0).publish_payloads((each, payload) for each in interests)
    context.store_progress(name, replace(progress, is_done=True), follows=False)
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
