"""Learning the plan's header, servers and ring, from the servers that the application named."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any

import redis.exceptions
from redis.exceptions import RedisError

from dynamoth import stored_plan
from dynamoth.errors import MalformedMessage
from dynamoth.events import ErrorReply
from dynamoth.plan import Plan
from dynamoth.stored_plan import StoredHeader
from dynamoth_client import _errors
from dynamoth_client._settings import Settings
from dynamoth_link.errors import LinkError
from dynamoth_link.query import query
from dynamoth_link.urls import ServerAddress

NEWER_WAIT_S = 0.1
"""How long the first answer waits for a newer one of another seed. A client with an older header is not wrong, only
slower: it learns of new servers when a dispatcher first names one."""

_RUN_ID = re.compile(rb"^run_id:(\S+)", re.MULTILINE)


async def read_plan_header(settings: Settings) -> Plan:
    """Return the newest plan header, without entries, that the seeds store. All seeds are asked at once.

    A seed that is down does not matter as long as another one answers.

    Raises:
        redis.exceptions.AuthenticationError: no seed gave a plan, and one refused the credentials.
        redis.exceptions.ConnectionError: no seed gave a plan. The text has the reason of each.

    """
    tasks = [asyncio.create_task(_ask(seed, settings), name=f"ask {seed.redacted()}") for seed in settings.seeds]
    pending = set(tasks)
    try:
        while pending and not _found(set(tasks) - pending):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=NEWER_WAIT_S)
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
    answers = _found(set(tasks) - pending)
    if answers:
        return max(answers, key=lambda header: (header.believed, header.version)).plan
    raise _errors.joined(
        [error for task in tasks if isinstance(error := task.result(), RedisError)],
        "no server of the cluster gave a plan:",
    )


def _found(tasks: Iterable[asyncio.Task[StoredHeader | RedisError]]) -> list[StoredHeader]:
    return [answer for task in tasks if isinstance(answer := task.result(), StoredHeader)]


async def _ask(seed: ServerAddress, settings: Settings) -> StoredHeader | RedisError:
    """Return what one seed stores, or why it gave nothing."""
    timeout_s = settings.link_options.connect_timeout_s
    try:
        header, info = await query(
            seed, stored_plan.READ_HEADER, ("INFO", "server"), options=settings.link_options, timeout_s=timeout_s
        )
    except LinkError as error:
        return _errors.from_link(error)
    return _read(seed, header, info)


def _read(seed: ServerAddress, header: Any, info: Any) -> StoredHeader | RedisError:
    name = seed.redacted()
    if isinstance(header, ErrorReply):
        error = _errors.from_reply(str(header))
        return type(error)(
            f"{name}: the plan cannot be read: {header}: grant the client the commands, keys and channels"
            " of Dynamoth (ACL SETUSER ... ~__dynamoth__:* &__dynamoth__:*)"
        )
    match = _RUN_ID.search(info) if isinstance(info, bytes) else None
    try:
        stored = stored_plan.parse_header(header, match[1].decode() if match else None)
    except MalformedMessage as error:
        return redis.exceptions.ConnectionError(f"{name}: {error}: let the balancer write it again (delete the key)")
    if stored is None:
        return redis.exceptions.ConnectionError(
            f"{name}: no plan is stored there: start `dynamoth balancer` for this cluster, or check that this is one of"
            " its servers"
        )
    return stored
