"""Runs the agent of a standby server: one that belongs to a cluster only while the plan lists its URL.

Which id such a server has is decided when it is taken from the pool, another one each time. The plan that the balancer
stores at the server says it. So this process reads that plan now and then, runs an agent under the id that it names,
and ends the agent when the server has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from dynamoth.errors import MalformedMessage
from dynamoth.protocol.stored_plan import READ_HEADER, parse_header
from dynamoth_agent.process.runtime import AgentConfig, collect_rarely, run_agent
from dynamoth_daemon import event_loop
from dynamoth_daemon.exit_codes import EXIT_DONE
from dynamoth_daemon.process import set_by_signals
from dynamoth_link.errors import LinkError
from dynamoth_link.handshake import run_id_in
from dynamoth_link.options import LinkOptions
from dynamoth_link.query import query

LOOK_S = 1.0
"""Time between two looks at the stored plan."""

LEAVE_S = 5.0
"""An agent ends this long after its server has left the plan, when clients have left, too."""

_LOG = logging.getLogger("dynamoth.agent")


def run(url: str, config_of: Callable[[str], AgentConfig]) -> int:
    """Run agents of the server at ``url`` until SIGTERM or SIGINT; return the exit code of the process.

    ``config_of``: returns the configuration of an agent with this id, whose ``url`` is the same.

    An agent that ends by itself ends the process with its exit code.
    """
    collect_rarely()
    return event_loop.run(_run(url, config_of))


async def _run(url: str, config_of: Callable[[str], AgentConfig]) -> int:
    stop = asyncio.Event()
    link = config_of("").link
    with set_by_signals(stop):
        while (id_ := await _listed_id(url, link, stop)) is not None:
            _LOG.info("the standby server is in use", extra={"server": id_})
            left = asyncio.Event()
            agent_stop = asyncio.Event()
            watch = _watch(url, link, id_, left, agent_stop)
            watching = asyncio.create_task(watch, name=f"watch whether {id_} has left")
            try:
                code = await run_agent(config_of(id_), agent_stop)
            finally:
                watching.cancel()
            if not left.is_set():
                return code
            _LOG.info("the standby server has left the plan", extra={"server": id_})
    return EXIT_DONE


async def _listed_id(url: str, link: LinkOptions, stop: asyncio.Event) -> str | None:
    """Wait until the plan lists the server, and return its id; None after a signal."""
    while not stop.is_set():
        if (ids := await _ids(url, link)) and len(ids) == 1:
            return ids[0]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)
    return None


async def _watch(url: str, link: LinkOptions, id_: str, left: asyncio.Event, agent_stop: asyncio.Event) -> None:
    """End the agent when the plan does not list its server under its id any more."""
    while True:
        await asyncio.sleep(LOOK_S)
        ids = await _ids(url, link)
        if ids is not None and id_ not in ids:
            await asyncio.sleep(LEAVE_S)
            left.set()
            agent_stop.set()
            return


async def _ids(url: str, link: LinkOptions) -> list[str] | None:
    """Return the ids of the servers with this URL in the plan stored there; None where no plan can be read."""
    try:
        header, info = await query(url, READ_HEADER, (b"INFO", b"server"), options=link)
        stored = parse_header(header, run_id_in(info))
    except (LinkError, MalformedMessage):
        return None
    if stored is None or not stored.believed:
        return None
    return [server.id for server in stored.plan.servers.values() if server.url == url]
