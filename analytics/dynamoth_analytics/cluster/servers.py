"""The log servers, for code that runs in threads: Spark's driver, its planner and its workers.

A ``LogServers`` is only a description, which Spark copies to other processes. Connections belong to the process: each
has one pool per server, which all of its tasks share.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar, cast

import redis
import redis.exceptions

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, Catalog, catalog_of, merged, parse_entries
from dynamoth.data.records import PartitionState, parse_state, partition_name, partition_server, state_command
from dynamoth.data.terms import claim_command, parse_claim, take_term
from dynamoth.errors import ConfigError, DynamothError
from dynamoth.machine.events import CommandPart
from dynamoth.refusals import with_cure
from dynamoth_link.errors import connect_timed_out, diagnose_exception, diagnose_reply, violation
from dynamoth_link.urls import InvalidUrl, parse_log_servers, parse_server_url

T = TypeVar("T")

TIMEOUT_S = 10.0
"""Of connecting, and of each reply."""

KEEPS_ALL = "noeviction"
"""The ``maxmemory-policy`` of a log server: others drop what it has."""

TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
"""Arguments of redis-py for ``rediss://`` servers, which are options of the source and of the sink, too."""


class LogServerFailed(DynamothError):
    """Raised when a log server cannot be reached, or refuses a command."""

    code = "log-server"


class TakenOver(DynamothError):
    """Raised when a newer data cluster works with the same log servers, which refuse this one: it has to end."""

    code = "taken-over"


@cache
def _connections(url: str, tls: tuple[tuple[str, str], ...]) -> redis.Redis:
    """Return the connections of this process to a server."""
    options: dict[str, Any] = dict(tls) if url.startswith("rediss://") else {}
    return redis.Redis.from_url(
        url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, health_check_interval=30, **options
    )


@dataclass(frozen=True)
class LogServers:
    """Which log servers there are: id and URL of each. Made by ``read_servers``."""

    urls: tuple[tuple[str, str], ...]
    #: Whether they lose nothing when they restart.
    durable: bool = False
    #: The ``TLS_OPTIONS`` that are given.
    tls: tuple[tuple[str, str], ...] = ()

    def options(self) -> dict[str, str]:
        """Return the options of the source and of the sink that describe these servers."""
        logs = " ".join(f"{id_}={url}" for id_, url in self.urls)
        return {"logs": logs, "durable": str(self.durable).lower(), **dict(self.tls)}

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids, in the order of the configuration."""
        return tuple(id_ for id_, _ in self.urls)

    def run(self, server: str, command: Sequence[CommandPart]) -> Any:
        """Execute one command. Raises LogServerFailed."""
        return self._try(server, lambda client: cast("Any", client).execute_command(*command))

    def run_all(self, server: str, commands: Iterable[Sequence[CommandPart]]) -> list[Any]:
        """Execute commands together, not atomically; return the replies. Raises LogServerFailed where one fails."""

        def execute(client: redis.Redis) -> list[Any]:
            with client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    cast("Any", pipeline).execute_command(*command)
                replies: list[Any] = pipeline.execute(raise_on_error=False)  # else its error quotes the whole command
            for reply in replies:
                if isinstance(reply, redis.exceptions.RedisError):
                    raise reply
            return replies

        return self._try(server, execute)

    def run_id(self, server: str) -> str:
        """Return the run id of a server's process; empty where the servers are durable. Raises LogServerFailed."""
        if self.durable:
            return ""
        return str(self._try(server, lambda client: client.info("server"))["run_id"])

    def doubts(self, server: str) -> list[str]:
        """Return how the settings of a server make it lose what it stores, with the cures. Raises LogServerFailed.

        INFO does not show ``appendfsync``.
        """
        info: Any = self._try(server, lambda client: client.info())
        found: list[str] = []
        policy = str(info.get("maxmemory_policy", KEEPS_ALL))
        if policy != KEEPS_ALL:
            text = "when its memory is full, it drops records and logs that it has acknowledged"
            found.append(f"log server {server}: maxmemory-policy is {policy}: {text}; set {KEEPS_ALL}")
        if self.durable and not info.get("aof_enabled", 1):
            found.append(
                f"log server {server} writes no append-only file, and log_durable says that it loses nothing when it"
                " restarts: set appendonly yes and appendfsync always, or log_durable = false everywhere"
            )
        return found

    def catalog(self) -> Catalog:
        """Return the latest definitions, over the copies of all servers. Raises LogServerFailed."""
        replies = [self.run_all(id_, [(b"HGETALL", DATASETS_KEY), (b"HGETALL", QUERIES_KEY)]) for id_ in self.ids]
        return catalog_of(
            merged(parse_entries(datasets) for datasets, _ in replies),
            merged(parse_entries(queries) for _, queries in replies),
        )

    def take_term(self, owner: str) -> int:
        """Return a term for the data cluster with this id: larger than all before it, and nobody else's.

        Raises LogServerFailed and NoTerm.
        """
        steps, reply = take_term(self.ids, owner), None
        while True:
            try:
                server, command = steps.send(reply)
            except StopIteration as end:
                term: int = end.value
                return term
            reply = self.run(server, command)

    def claim_term(self, term: int, owner: str, server: str | None = None) -> int | None:
        """Claim a term again at one server, or all; return the term that another data cluster has there, or None.

        Raises LogServerFailed.
        """
        servers = self.ids if server is None else (server,)
        claims = [parse_claim(self.run(id_, claim_command(term, owner))) for id_ in servers]
        return max((taken for taken, is_own in claims if not is_own), default=None)

    def now_ms(self) -> int:
        """Return the latest time of all servers, by their clocks, in ms since 1970. Raises LogServerFailed."""
        times = [self.run(id_, (b"TIME",)) for id_ in self.ids]
        return max(int(seconds) * 1000 + int(microseconds) // 1000 for seconds, microseconds in times)

    def server_of(self, partition: str) -> str:
        """Return which server has a partition."""
        return partition_server(partition, self.ids)

    def tips(self, partitions: Mapping[str, int]) -> dict[str, int]:
        """Return the last offset of each partition; 0 where there is nothing. Raises LogServerFailed.

        ``partitions`` is how many each dataset has, by its stream.
        """
        return {name: state.offset for name, state in self.states(partitions).items()}

    def states(self, partitions: Mapping[str, int]) -> dict[str, PartitionState]:
        """Return what the servers know about the offsets of each partition. Raises LogServerFailed.

        ``partitions`` is how many each dataset has, by its stream.
        """
        by_server: dict[str, list[str]] = {}
        for dataset, count in partitions.items():
            for number in range(count):
                name = partition_name(dataset, number)
                by_server.setdefault(self.server_of(name), []).append(name)
        return {
            name: parse_state(reply)
            for server, names in by_server.items()
            for name, reply in zip(names, self.run_all(server, map(state_command, names)), strict=True)
        }

    def _try(self, server: str, execute: Callable[[redis.Redis], T]) -> T:
        url = dict(self.urls)[server]
        try:
            return execute(_connections(url, self.tls))
        except redis.exceptions.RedisError as error:
            raise LogServerFailed(f"log server {server}: {_explained(url, error)}") from error


_CODES: dict[type[redis.exceptions.RedisError], str] = {
    redis.exceptions.BusyLoadingError: "LOADING",
    redis.exceptions.MasterDownError: "MASTERDOWN",
    redis.exceptions.NoPermissionError: "NOPERM",
    redis.exceptions.OutOfMemoryError: "OOM",
    redis.exceptions.ReadOnlyError: "READONLY",
}
"""What redis-py drops from the texts of its errors."""


def _explained(url: str, error: redis.exceptions.RedisError) -> str:
    """Return the reason of an error, with cause and cure where a connection was not made, as links say it."""
    address, text, before = parse_server_url(url), str(error), error.__cause__ or error.__context__
    if isinstance(error, redis.exceptions.AuthenticationError):
        return str(diagnose_reply(address, address.username, "WRONGPASS" if address.password else "NOAUTH"))
    if isinstance(error, redis.exceptions.InvalidResponse):
        return str(violation(address, text))
    if isinstance(error, redis.exceptions.TimeoutError) and "connecting" in text:
        return str(connect_timed_out(address, TIMEOUT_S))
    if isinstance(error, redis.exceptions.ConnectionError) and isinstance(before, OSError):
        return str(diagnose_exception(address, before))
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), "")
    return f"{address.redacted()}: {with_cure(f'{code} {text}'.lstrip())}"


def read_servers(text: str, *, durable: bool = False, options: Mapping[str, str] = MappingProxyType({})) -> LogServers:
    """Read a list ``ID=URL ...``, as in ``data_cluster.logs``, and the ``TLS_OPTIONS`` among options.

    Raises ConfigError.
    """
    try:
        urls = {id_: address.url() for id_, address in parse_log_servers(text).items()}
    except InvalidUrl as error:
        raise ConfigError(f"logs: {error}") from error
    if not urls:
        raise ConfigError("logs: name the log servers of the brokers, as l1=redis://HOST:PORT")
    tls = tuple((name, options[name]) for name in TLS_OPTIONS if name in options)
    return LogServers(tuple(urls.items()), durable, tls)
