"""Commands of the data cluster over links to log servers: definitions, records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, Catalog, Entry, catalog_of, merged, parse_entries
from dynamoth.data.records import is_full
from dynamoth.errors import ConfigError
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth_client.runtime.log_links import LOST, LogError, LogLinks, LogServerLink, unavailable, unknown
from dynamoth_link.options import LinkOptions

TIMEOUT_S = 5.0
"""How long a command waits for its log server by default."""

DataCommand = tuple[CommandPart, ...] | Callable[[str], tuple[CommandPart, ...]]
"""A command, or what makes one of the run id of the server's process."""

_T = TypeVar("_T")


class DatasetFull(LogError):
    """Raised when too many records wait to be archived. Nothing is stored: the same call may succeed later."""


class DataLinks:
    """Links to all log servers. Belongs to the event loop on which it is opened. Raises ConfigError."""

    def __init__(
        self,
        logs: Mapping[str, str],
        options: LinkOptions | None = None,
        *,
        durable: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Keep what is needed to begin; arguments as those of ``DatasetWriter``."""
        if timeout_s <= 0:
            raise ConfigError("timeout_s is more than 0")
        self._links = LogLinks(logs, options, durable=durable)
        self._timeout_s = timeout_s
        self.ids = self._links.ids

    def open(self) -> None:
        """Begin to connect."""
        self._links.open(None)

    async def close(self) -> None:
        """End the links. What waits for them raises. Closing twice does nothing."""
        await self._links.close()

    async def catalog(self) -> Catalog:
        """Return the definitions that the log servers have. Raises LogUnavailable."""
        return catalog_of(*await self.entries())

    async def entries(self) -> tuple[dict[str, Entry], dict[str, Entry]]:
        """Return the latest entries of datasets and of queries, also of dropped ones. Raises LogUnavailable."""
        replies = await run_all([self._ask(id_) for id_ in self.ids])
        datasets = merged(parse_entries(found) for found, _ in replies)
        return datasets, merged(parse_entries(found) for _, found in replies)

    async def _ask(self, id_: str) -> tuple[Any, Any]:
        datasets = await self.command(id_, (b"HGETALL", DATASETS_KEY), repeats=True)
        return datasets, await self.command(id_, (b"HGETALL", QUERIES_KEY), repeats=True)

    async def command(self, id_: str, command: DataCommand, *, repeats: bool) -> Any:
        """Execute a command; return its reply. With ``repeats``, again after a lost connection.

        Raises LogUnavailable, DatasetFull, UnknownOutcome.
        """
        server = self._links.server(id_)
        is_sent = False
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    run_id = await self._links.wait_up(server, is_sent=is_sent and not repeats)
                    answer = self._links.send(server, command(run_id) if callable(command) else command)
                    if answer is None:
                        continue
                    is_sent = True
                    try:
                        reply = await answer
                    finally:
                        server.answers.discard(answer)
                    if reply is not LOST:
                        return _checked(reply, server)
                    if not repeats:
                        raise unknown(server)
        except TimeoutError:
            if is_sent and not repeats:
                raise unknown(server) from None
            raise unavailable(server, server.fault) from None


def _checked(reply: Any, server: LogServerLink) -> Any:
    if not isinstance(reply, ErrorReply):
        return reply
    text = str(reply)
    if is_full(text):
        raise DatasetFull(f"log server {server.id}: {text}; nothing is stored, try again later")
    raise unavailable(server, text)


async def run_all(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Do everything, and then raise the first error, if there is one."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return [each for each in results if not isinstance(each, BaseException)]
