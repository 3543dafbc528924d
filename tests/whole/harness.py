"""What the tests of whole clusters share: audited traffic that never pauses, and looks into a cluster's state.

The traffic runs in a thread of its own, so that a test may kill, pause and start processes, and wait, in plain words.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import redis
import redis.asyncio
import redis.exceptions

from dynamoth.errors import RequestRefused
from dynamoth.names import OPERATOR_CHANNEL
from dynamoth.plan.plan import Entry, Phase, Plan, Server
from dynamoth.protocol.control import AdminRequest, pack_control
from dynamoth.protocol.stored_plan import parse_entry, read_entry
from dynamoth_cli.local.child import Child
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import GapInfo, PubSub, Redis, from_url
from dynamoth_sim.audit import Audit, Totals
from tests.loop_thread import LoopThread

PATIENCE_S = 60.0
"""Bound of everything that is waited for: a machine that is busy with everything else gets this long."""

ARRIVAL_TIMEOUT_S = 20.0
"""What has not come so long after the last publish is judged as lost."""

PUBLISH_S_MAX = 8.0
"""No publish may take longer (G4): below the client's own timeout, far above what a busy machine needs."""

TAG = b"audited"

_T = TypeVar("_T")


def until(condition: Callable[[], _T], what: str, every_s: float = 0.01) -> _T:
    """Wait until a condition, which is looked at every so many seconds, holds; return what it returned."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(every_s)
    return result


def channels_at(server: str, count: int, servers: int = 2, prefix: bytes = b"channel-") -> list[bytes]:
    """Return names of channels that are at home at a server of a cluster of so many."""
    ring = Plan.initial(Server(f"s{index + 1}", "redis://x") for index in range(servers)).ring
    names = (prefix + b"%d" % number for number in range(100_000))
    return [name for name, _ in zip((name for name in names if ring.home(name) == server), range(count), strict=False)]


def stored_entry(cluster: LocalCluster, server: str, channel: bytes) -> Entry | None:
    """Return what the plan stored at a server says of a channel; None when it does not name it, or there is none."""
    [reply] = cluster.ask(server, read_entry(channel))
    stored = parse_entry(reply, None)
    return None if stored is None else stored.own


def until_phase(cluster: LocalCluster, channels: Iterable[bytes], phase: Phase, at: str) -> None:
    """Wait until every server stores that these channels are in a phase of their move to ``at``."""

    def reached(server: str, channel: bytes) -> bool:
        entry = stored_entry(cluster, server, channel)
        return entry is not None and entry.phase is phase and entry.route.assignment.servers == (at,)

    for channel in channels:
        for server in cluster.server_ids:
            until(lambda s=server, c=channel: reached(s, c), f"{channel!r} {phase.name} at {at}, as {server} stores it")  # type: ignore[misc]


def move(cluster: LocalCluster, channel: bytes, to: str) -> None:
    """Move a channel, and return when the move has settled."""
    assert cluster.ask_balancer("move", {"channel": channel, "to": to})["to"] == to


def move_when_agents_are_heard(cluster: LocalCluster, channel: bytes, to: str) -> None:
    """Move a channel after an outage: until the balancer hears all agents again, it refuses to."""

    def moves() -> bool:
        try:
            move(cluster, channel, to)
        except RequestRefused as refusal:
            assert "is not heard" in str(refusal), refusal
            return False
        return True

    until(moves, f"{channel!r} moves to {to}", every_s=0.5)


def begin_move(cluster: LocalCluster, channel: bytes, to: str, request: int) -> None:
    """Ask for a move once, and do not wait for the answer."""
    message = pack_control(AdminRequest(request, "move", {"channel": channel, "to": to}))
    [heard] = cluster.ask(cluster.server_ids[0], (b"PUBLISH", OPERATOR_CHANNEL, message))
    assert heard == 2, "the balancer hears it, and the agent"


def waits(cluster: LocalCluster, channel: bytes) -> list[str]:
    """Return what a move waits for, as the balancer tells people."""
    transitions: list[dict[str, Any]] = cluster.ask_balancer("status")["transitions"]
    return [reason for each in transitions if each["channel"] == channel for reason in each["waiting_for"]]


def logged(child: Child, message: str) -> list[dict[str, Any]]:
    """Return the lines of a daemon's log that begin with a message."""
    lines = [json.loads(line) for line in child.lines if line.startswith("{")]
    return [line for line in lines if line["message"].startswith(message)]


class PlainListener:
    """A plain redis-py subscriber at one server. It knows of no moves: while it stays, none of its channels settles."""

    def __init__(self, cluster: LocalCluster, server: str, channels: Sequence[bytes]) -> None:
        client: Any = redis.Redis(port=cluster.redis[server].port)  # redis-py is typed in part
        self._client, self._pubsub = client, client.pubsub()
        self._channels = channels

    def __enter__(self) -> Self:
        self._pubsub.subscribe(*self._channels)
        for _ in self._channels:
            until(self._confirmed, "a plain subscription")
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def _confirmed(self) -> bool:
        return self._pubsub.get_message(timeout=1.0) is not None

    def leave(self) -> None:
        """End its subscriptions, by closing its connection."""
        self._pubsub.close()
        self._client.close()


class Traffic:
    """Publishers and subscribers of the drop-in client, each with connections of its own, audited all the time.

    As a context manager it flows on entry, and everything is closed on exit. ``finish`` gives the judgement. Gap events
    are taken to be about any publisher: the audit knows publishers by name, the client by number.

    Args:
        cluster: that is ready.
        channels: every publisher publishes to each, every subscriber is subscribed to each.
        publishers: how many.
        subscribers: how many.
        plain: servers at which a plain redis-py client publishes too. Nothing but G1 is promised for these.
        interval_s: between two messages of a publisher on a channel.
        payload_bytes: least size of a message.
        losses_allowed: whether what a gap event covers may be lost, until ``calm`` is called.
        publish_s_max: the bound of each publish.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        channels: Sequence[bytes],
        *,
        publishers: int = 2,
        subscribers: int = 2,
        plain: Sequence[str] = (),
        interval_s: float = 0.02,
        payload_bytes: int = 0,
        losses_allowed: bool = False,
        publish_s_max: float = PUBLISH_S_MAX,
    ) -> None:
        self.channels = channels
        self._url = cluster.url
        self._publishers = [f"p{number}" for number in range(publishers)]
        self._subscribers = [f"r{number}" for number in range(subscribers)]
        self._plain = {f"plain@{server}": cluster.redis[server].port for server in plain}
        self._interval_s = interval_s
        self._payload_bytes = payload_bytes
        self._audit = Audit(
            losses_allowed=losses_allowed,
            publish_s_max=publish_s_max,
            ordered=lambda publisher: publisher not in self._plain,
        )
        #: The gaps that each subscriber got.
        self.gaps: list[tuple[str, GapInfo]] = []
        #: The number of the latest message begun, by publisher and channel; and delivered, by subscriber besides.
        self._begun: dict[tuple[str, bytes], int] = {}
        self._latest: dict[tuple[str, str, bytes], int] = {}
        self._loop = LoopThread("traffic")
        self._stopping = asyncio.Event()
        self._clients: list[Any] = []
        self._publishing: list[asyncio.Task[None]] = []
        self._reading: list[asyncio.Task[None]] = []

    def __enter__(self) -> Self:
        try:
            self._loop.call(self._start())
            self.flows()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def flows(self, channels: Sequence[bytes] | None = None) -> None:
        """Wait until every subscriber has got what every publisher began to publish on each channel after this call."""
        names = [*self._publishers, *self._plain]
        wanted = {
            (name, channel): self._begun.get((name, channel), 0) + 1
            for name in names
            for channel in channels or self.channels
        }
        until(lambda: self._arrived(wanted), "messages flow from everybody to everybody")

    def publishes(self, count: int) -> None:
        """Wait until every publisher has begun, on every channel, so many messages more."""
        wanted = {key: number + count for key, number in self._begun.items()}
        until(lambda: self._alive() and all(self._begun[key] >= wanted[key] for key in wanted), "publishers publish")

    def add_publisher(self, name: str) -> None:
        """Let one more publisher begin. Its client knows nothing yet: it follows the ring until it learns better."""
        self._loop.call(self._add(name))

    def calm(self) -> None:
        """From now on nothing fails any more: nothing may be lost."""

        async def calm() -> None:
            self._audit.calm()

        self._loop.call(calm())

    def finish(self) -> Totals:
        """Stop publishing, wait for what is under way, and judge. Raises AssertionError when a guarantee was broken."""
        violations = self._loop.call(self._finish())
        got = "".join(f"\n  {name}: gap on {gap.channel!r}: {gap.reason}" for name, gap in self.gaps[:10])
        assert not violations, "\n".join(map(str, violations[:10])) + got
        totals = self._audit.totals
        assert totals.lost == totals.duplicated == totals.reordered == 0
        return totals

    # In the thread of the traffic.

    async def _start(self) -> None:
        for name in self._subscribers:
            client = self._client()
            pubsub = client.pubsub(gaps=True)
            await pubsub.subscribe(*self.channels)
            self._reading.append(asyncio.create_task(self._read(name, pubsub)))
        async with asyncio.timeout(PATIENCE_S):
            wanted = len(self.channels) * len(self._subscribers)
            while sum(map(self._audit.open_count, self.channels)) < wanted and self._alive():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        senders: dict[str, Any] = {name: self._client() for name in self._publishers}
        for name, port in self._plain.items():
            senders[name] = redis.asyncio.Redis(port=port)
            self._clients.append(senders[name])
        for name, client in senders.items():
            self._begin(name, client)

    async def _add(self, name: str) -> None:
        self._begin(name, self._client())
        self._publishers.append(name)

    def _begin(self, name: str, client: Any) -> None:
        self._begun |= {(name, channel): 0 for channel in self.channels}
        self._publishing += [asyncio.create_task(self._publish(name, client, channel)) for channel in self.channels]

    def _client(self) -> Redis:
        client = from_url(self._url)
        self._clients.append(client)
        return client

    async def _publish(self, name: str, client: Any, channel: bytes) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            self._begun[name, channel] = number
            payload = b"%b %b %d " % (TAG, name.encode(), number)
            self._audit.published(name, channel, number, time.monotonic())
            failed = False
            try:
                await client.publish(channel, payload.ljust(self._payload_bytes, b"."))
            except redis.exceptions.RedisError:
                failed = True
            self._audit.publish_ended(name, channel, number, time.monotonic(), failed=failed)
            await asyncio.sleep(self._interval_s)

    async def _read(self, name: str, pubsub: PubSub) -> None:
        async for message in pubsub.listen():
            kind, channel, data, now = message["type"], message["channel"], message["data"], time.monotonic()
            if kind == "subscribe":
                self._audit.confirmed(name, channel, now)
            elif kind == "gap":
                self.gaps.append((name, data))
                self._audit.gap(name, channel, None, None, now)
            elif data.startswith(TAG):
                _, publisher, number = data.split()[:3]
                self._latest[name, publisher.decode(), channel] = int(number)
                self._audit.delivered(name, channel, publisher.decode(), int(number), now)

    async def _finish(self) -> list[Any]:
        self._stopping.set()
        await asyncio.gather(*self._publishing)
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while not self._arrived(self._begun) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return self._audit.finish(time.monotonic())

    def _arrived(self, wanted: dict[tuple[str, bytes], int]) -> bool:
        return self._alive() and all(
            self._latest.get((name, *key), 0) >= number for key, number in wanted.items() for name in self._subscribers
        )

    def _alive(self) -> bool:
        """Raise what ended a publisher or a subscriber before its time."""
        for task in (*self._publishing, *self._reading):
            if task.done() and not self._stopping.is_set():
                task.result()
                raise AssertionError(f"{task} has ended")
        return True

    async def _end(self) -> None:
        self._stopping.set()
        tasks = [*self._publishing, *self._reading]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients:
            await client.aclose()

    def _close(self) -> None:
        try:
            self._loop.call(self._end())
        finally:
            self._loop.close()
