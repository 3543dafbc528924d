"""Reads the plan's header, servers and ring, from the servers that the application named.

One plain Redis, without agents and balancer, needs no plan: see ``machines/standalone.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis.exceptions
from redis.exceptions import RedisError

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import ErrorReply
from dynamoth.names import PLAN_KEY
from dynamoth.plan.plan import Plan
from dynamoth.protocol import stored_plan
from dynamoth.protocol.stored_plan import StoredHeader
from dynamoth_client.machines.standalone import FRESH_S, READ_PRESENCE, Look, plan_of, read_look
from dynamoth_client.redis_py import errors
from dynamoth_client.redis_py.settings import Settings
from dynamoth_link.errors import LinkError
from dynamoth_link.handshake import run_id_in
from dynamoth_link.query import query
from dynamoth_link.urls import InvalidUrl, ServerAddress, parse_server_url

NEWER_WAIT_S = 0.1
"""How long the first answer waits for a newer one of another seed. A client with an older header is not wrong, only
slower: it learns of new servers when a dispatcher first names one."""

LOOK_PAUSE_S = 0.05
"""Between two looks at servers that store no plan."""

OTHERS_MAX = 8
"""How many of the servers that the pool knows are asked at once. They are drawn, as some may be dead as well."""

RESTORED_S_MAX = 1.0
"""How long a client waits for a plan where agents or a balancer are at work. They restore it within 0.2 s."""


@dataclass(frozen=True, slots=True)
class _NoPlan:
    """A seed that answered and stores no plan."""

    seed: ServerAddress
    look: Look


_Answer = StoredHeader | _NoPlan | RedisError


async def read_plan(settings: Settings, since: float) -> Plan:
    """Return the newest plan, without entries, that the seeds store; or the one that stands for a server alone.

    A seed that is down does not matter as long as another one stores a plan. If all are down, other servers are asked,
    which an earlier client of the same pool has read in the plan. The next client of that pool asks them at once, so
    that seeds that hang cost it no time. A single seed that stores none is a server alone if
    no agent and no balancer is at work there, and it has been up for ``FRESH_S``. Where one is at work, this waits for
    the plan, for ``RESTORED_S_MAX``. ``since`` is when the first attempt began, on the clock of the event loop: all
    attempts together wait no longer.

    Raises:
        redis.exceptions.AuthenticationError: no seed gave a plan, and one refused the credentials.
        redis.exceptions.ConnectionError: no seed gave a plan. The text has the reason of each.

    """
    clock, pool = asyncio.get_running_loop().time, settings.pool
    while True:
        others = _others(settings) if pool.seeds_are_silent else ()
        given = await _ask_all(settings, [*settings.seeds, *others])
        pool.seeds_are_silent = all(isinstance(given.get(seed), RedisError | None) for seed in settings.seeds)
        if not others and pool.seeds_are_silent:
            given = {**given, **await _ask_all(settings, _others(settings))}
        answers = list(given.values())
        headers = [answer for answer in answers if isinstance(answer, StoredHeader)]
        if headers:
            plan = max(headers, key=lambda header: (header.believed, header.version)).plan
            pool.plan = plan
            return plan
        looks = [answer.look for answer in answers if isinstance(answer, _NoPlan)]
        watched_s = clock() - since
        is_occupied = any(look.is_occupied for look in looks)
        if len(answers) == len(looks) == 1 and looks[0].is_alone(watched_s):
            return plan_of(settings.seeds[0].url())
        wait_s = RESTORED_S_MAX if is_occupied else FRESH_S if len(settings.seeds) == 1 else 0.0
        if len(looks) < len(answers) or watched_s >= wait_s:
            raise errors.joined([_error(answer) for answer in answers], "no server of the cluster gave a plan:")
        await asyncio.sleep(LOOK_PAUSE_S)


def _others(settings: Settings) -> Sequence[ServerAddress]:
    """Return some servers besides the seeds, as far as the pool knows any."""
    known = () if settings.pool.plan is None else settings.pool.plan.servers.values()
    seeds = {(seed.host, seed.port, seed.path) for seed in settings.seeds}
    others: list[ServerAddress] = []
    for server in known:
        with contextlib.suppress(InvalidUrl):  # somebody else may have written to the plan
            address = parse_server_url(server.url)
            if (address.host, address.port, address.path) not in seeds:
                others.append(address)
    return random.sample(others, min(len(others), OTHERS_MAX))


async def _ask_all(settings: Settings, servers: Sequence[ServerAddress]) -> Mapping[ServerAddress, _Answer]:
    """Ask all servers at once; return their answers, without those that come long after a plan."""
    tasks = [asyncio.create_task(_ask(server, settings), name=f"ask {server.redacted()}") for server in servers]
    pending = set(tasks)
    try:
        while pending and not any(isinstance(task.result(), StoredHeader) for task in set(tasks) - pending):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=NEWER_WAIT_S)
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
    return {server: task.result() for server, task in zip(servers, tasks, strict=True) if task not in pending}


async def _ask(seed: ServerAddress, settings: Settings) -> _Answer:
    """Return what one seed stores, or why it gave nothing."""
    options = settings.link_options
    commands = (stored_plan.READ_HEADER, ("INFO", "server"), READ_PRESENCE)
    try:
        header, info, presence = await query(
            seed, *commands, options=options, timeout_s=options.connect_timeout_s, keep=True
        )
    except LinkError as error:
        return errors.from_link(error)
    return _read(seed, header, info, presence)


def _read(seed: ServerAddress, header: Any, info: Any, presence: Any) -> _Answer:
    name = seed.redacted()
    if isinstance(header, ErrorReply):
        error = errors.from_reply(str(header))
        return type(error)(
            f"{name}: the plan cannot be read: {header}: give the client's user the rights that 'dynamoth acl' prints"
        )
    try:
        stored = stored_plan.parse_header(header, run_id_in(info))
    except MalformedMessage as error:
        return redis.exceptions.ConnectionError(
            f"{name}: {error}: delete the key (DEL {PLAN_KEY.decode()}): a balancer that is running writes it again"
        )
    return stored or _NoPlan(seed, read_look(presence, info))


def _error(answer: _Answer) -> RedisError:
    """Return why a seed gave no plan."""
    if not isinstance(answer, _NoPlan):
        assert isinstance(answer, RedisError), "asked for where no seed has a plan"
        return answer
    name, look = answer.seed.redacted(), answer.look
    if look.agents is None:
        why = (
            "no plan is stored there, and the server does not tell whether a cluster is at work: grant the client"
            " PUBSUB NUMSUB, or start `dynamoth balancer`"
        )
    elif look.balancers:
        why = (
            "the plan that was stored there is gone (FLUSHALL, DEL, or a restart without data), and the balancer is at"
            " work and will write it again: try again; if it stays so, see `dynamoth status`"
        )
    elif look.agents:
        why = (
            "an agent is at work there, and no plan is stored: a client waits for the plan where there is an agent;"
            " start `dynamoth balancer` for this cluster"
        )
    else:
        why = (
            "no plan is stored there: start `dynamoth balancer` for this cluster, or check that this is one of its"
            " servers; a server that is to stand for itself, without a cluster, must be the only one named"
        )
    return redis.exceptions.ConnectionError(f"{name}: {why}")
