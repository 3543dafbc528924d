"""Appends to the logs of interests over one link per log server, for backends."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, TypedDict

from dynamoth.edge.frames import EXACT_MAX
from dynamoth.edge.interests import Interest
from dynamoth.edge.log import TTL_S, Appended, LogOptions, append_command, is_fenced, log_server, parse_appended
from dynamoth.errors import ConfigError, MalformedMessage
from dynamoth.machine.events import ErrorReply
from dynamoth_client.redis_py.pools import Pool
from dynamoth_client.runtime.log_links import (
    LOST,
    Fenced,
    LogError,
    LogLinks,
    LogServerLink,
    LogUnavailable,
    UnknownOutcome,
    unavailable,
    unknown,
)
from dynamoth_link.options import LinkOptions

__all__ = ["Fenced", "LogArguments", "LogError", "LogUnavailable", "LogWriter", "UnknownOutcome"]

TIMEOUT_S = 5.0
"""How long a publication waits for its log server by default."""

RETAINED_MIN = LogOptions().retained_min
"""Publications that a log keeps at least, by default."""

EPOCH_BITS = 64


class LogArguments(TypedDict, total=False):
    """The optional arguments of a publisher."""

    retained_min: int
    ttl_s: float
    durable: bool
    timeout_s: float
    options: LinkOptions | None


class LogWriter:
    """Appends to logs. Belongs to the event loop on which it is opened. Raises ConfigError."""

    def __init__(
        self,
        logs: Mapping[str, str],
        *,
        retained_min: int = RETAINED_MIN,
        ttl_s: float = TTL_S,
        durable: bool = False,
        timeout_s: float = TIMEOUT_S,
        options: LinkOptions | None = None,
    ) -> None:
        """Keep what is needed to begin; arguments as those of ``LogPublisher``."""
        self._links = LogLinks(logs, options, durable=durable)
        if retained_min < 1 or ttl_s <= 0 or timeout_s <= 0:
            raise ConfigError("retained_min, ttl_s and timeout_s are more than 0")
        self._log_options = LogOptions(retained_min, ttl_s, durable)
        self._timeout_s = timeout_s

    def open(self, pool: Pool) -> None:
        """Begin to connect; the options of the links are those of ``pool`` where none were given."""
        self._links.open(pool)

    async def close(self) -> None:
        """End the links. What waits for them raises. Closing twice does nothing."""
        await self._links.close()

    async def append(self, interest: Interest, data: bytes, execution: int | None, term: int) -> Appended:
        """Append; with an execution, again and again until the time is over."""
        if execution is not None and (type(execution) is not int or not 1 <= execution <= EXACT_MAX):
            raise ValueError(f"executions are numbered 1, 2, 3 ..., not {execution!r}")
        if type(term) is not int or not 0 <= term <= EXACT_MAX:
            raise ValueError(
                f"a term is a number from 0 to 2^53 - 1, not {term!r}: Redis cannot tell larger ones apart"
            )
        if interest.is_reserved:
            raise ValueError(f"{interest.name!r} is a reserved name: no user gets what is published there")
        server = self._links.server(log_server(interest.id, self._links.ids))
        is_sent = False
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    run_id = await self._links.wait_up(server, is_sent=is_sent)
                    epoch = secrets.randbits(EPOCH_BITS)
                    command = append_command(interest.id, data, run_id, epoch, self._log_options, term, execution or 0)
                    answer = self._links.send(server, command)
                    if answer is None:
                        continue
                    is_sent = True
                    try:
                        reply = await answer
                    finally:
                        server.answers.discard(answer)
                    if reply is not LOST:
                        return _appended(reply, server)
                    if not execution:
                        raise unknown(server)
        except TimeoutError:
            if is_sent:
                raise unknown(server) from None
            raise unavailable(server, server.fault) from None


def _appended(reply: Any, server: LogServerLink) -> Appended:
    if isinstance(reply, ErrorReply):
        text = str(reply)
        if is_fenced(text):
            raise Fenced(f"log server {server.id} refuses this writer: {text}")
        raise unavailable(server, text)
    try:
        return parse_appended(reply)
    except MalformedMessage as error:
        raise UnknownOutcome(f"log server {server.id} answers with something else: {error}") from error
