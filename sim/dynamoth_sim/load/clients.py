"""Simulated applications: each runs the machines of one client, and tells the audit what an application sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dynamoth.globs import compile_glob
from dynamoth.machine.events import Connect, Disconnect, LinkDown, LinkUp, Replied, Send, Start, Tick
from dynamoth.names import NOTIFICATION_PREFIXES
from dynamoth.plan.plan import Plan
from dynamoth.protocol import stored_plan
from dynamoth_client.machines import standalone
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.patterns.events import (
    DeliverMatched,
    PatternGapDetected,
    PatternOptions,
    SubscribePatterns,
    UnsubscribePatterns,
)
from dynamoth_client.machines.patterns.machine import PatternMachine
from dynamoth_client.machines.publisher.events import (
    Publish,
    PublishAll,
    Published,
    PublishedAll,
    PublisherOptions,
    PublishFailed,
)
from dynamoth_client.machines.publisher.machine import PublisherMachine
from dynamoth_client.machines.subscriber.events import (
    Deliver,
    GapDetected,
    Subscribe,
    SubscriberOptions,
    SubscriptionConfirmed,
    SubscriptionEnded,
    Unsubscribe,
)
from dynamoth_client.machines.subscriber.machine import SubscriberMachine
from dynamoth_sim.audit import Audit
from dynamoth_sim.load.readers import SlowReader
from dynamoth_sim.world.network import Network
from dynamoth_sim.world.process import Process
from dynamoth_sim.world.world import World

HEADER_RETRY_S = 0.05
"""How soon a client that found no plan asks again."""

PATTERN_MARK = "~"
"""Between the name of a pattern subscriber and its pattern, in the names that the audit knows."""


def make_payload(publisher: str, number: int) -> bytes:
    """Return the payload of a message that names itself."""
    return b"%s:%d." % (publisher.encode(), number)


def read_payload(payload: bytes) -> tuple[str, int]:
    """Return publisher and number of a payload."""
    publisher, _, number = payload.rpartition(b".")[0].rpartition(b":")
    return publisher.decode(), int(number)


@dataclass(slots=True)
class HeaderRead:
    """Action: the plan's header was read."""

    plan: Plan


class HeaderReader:
    """Reads the header of the stored plan from one server, as a client does before anything else.

    As real clients do where one server is all that they are given, it takes a server that stores no plan, and where
    nobody of Dynamoth is at work, for one that stands for itself.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._run_id: str | None = None
        self._retry_at: float | None = None
        self._began_at: float | None = None
        self._info: Any = None

    def handle(self, event: Any, now: float) -> list[Any]:
        """Handle one event; return the actions to execute, in order."""
        self._retry_at = None
        match event:
            case Start():
                return [Connect("seed", self._url)]
            case LinkUp(_, run_id):
                self._run_id = run_id
                self._began_at = now
                return self._ask()
            case Tick():
                return self._ask()
            case Replied(_, "info", value):
                self._info = value
            case Replied(_, "presence", value):
                assert self._began_at is not None, "a reply comes over a link that is up"
                if standalone.read_look(value, self._info).is_alone(now - self._began_at):
                    return [Disconnect("seed"), HeaderRead(standalone.plan_of(self._url))]
                self._retry_at = now + HEADER_RETRY_S
            case Replied(_, _, value):
                stored = stored_plan.parse_header(value, self._run_id)
                if stored is not None and stored.believed:
                    return [Disconnect("seed"), HeaderRead(stored.plan)]
                if stored is None:
                    return [
                        Send("seed", (b"INFO", b"server"), "info"),
                        Send("seed", standalone.READ_PRESENCE, "presence"),
                    ]
                self._retry_at = now + HEADER_RETRY_S
            case LinkDown():
                pass
            case _:
                raise AssertionError(f"not an event of a header reader: {event!r}")
        return []

    @staticmethod
    def _ask() -> list[Any]:
        return [Send("seed", stored_plan.READ_HEADER, "header")]

    def deadline(self) -> float | None:
        """Return when the header is asked for again."""
        return self._retry_at


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of the simulated clients."""

    publisher: PublisherOptions
    subscriber: SubscriberOptions
    patterns: PatternOptions
    #: After this time without use a client forgets where a channel is.
    entry_idle_s: float


class Client:
    """One application process: one publisher machine and some subscriber machines that share a local plan.

    It can be paused and crashed as a whole. A restart makes a new application, with a new name and new numbers.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        audit: Audit,
        name: str,
        seed_urls: list[str],
        options: ClientOptions,
        names: dict[int, str],
        subscribers: int = 1,
        pattern_subscribers: int = 0,
    ) -> None:
        self.world = world
        self.network = network
        self.audit = audit
        self.name = name
        self._seed_urls = seed_urls
        self.options = options
        self._subscribers_count = subscribers
        self._pattern_subscribers_count = pattern_subscribers
        self._generation = 0
        self._reader: Process | None = None
        self.local_plan: LocalPlan | None = None
        self.publisher: PublisherApp | None = None
        self.subscribers: list[SubscriberApp] = []
        self.pattern_subscribers: list[PatternSubscriberApp] = []
        #: Called each time the client has become ready to work.
        self.on_ready: Callable[[Client], None] = lambda client: None
        #: Publisher id on the wire to the name that the audit knows, of all clients.
        self.names = names

    @property
    def ready(self) -> bool:
        """Whether it has read the plan and can publish and subscribe."""
        return self.publisher is not None

    @property
    def processes(self) -> list[Process]:
        """Everything that runs in this client now."""
        running = [] if self._reader is None else [self._reader]
        if self.publisher is not None:
            running.append(self.publisher.process)
        running += [subscriber.process for subscriber in self.subscribers]
        return [*running, *(subscriber.process for subscriber in self.pattern_subscribers)]

    def start(self) -> None:
        """Begin by reading the plan."""
        self._generation += 1
        url = self.world.random.choice(self._seed_urls)
        self._reader = Process(
            self.world, self.network, f"{self.name}.reader", lambda _: HeaderReader(url), self._header_read
        )
        self._reader.start()

    def _header_read(self, action: HeaderRead) -> None:
        assert self._reader is not None
        reader, self._reader = self._reader, None
        reader.crash("has read the plan")
        plan = self.local_plan = LocalPlan(action.plan, self.options.entry_idle_s)
        name = self.name if self._generation == 1 else f"{self.name}_{self._generation}"
        self.publisher = PublisherApp(self, name, plan)
        self.subscribers = [SubscriberApp(self, f"{name}.s{i}", plan) for i in range(self._subscribers_count)]
        count = self._pattern_subscribers_count
        self.pattern_subscribers = [PatternSubscriberApp(self, f"{name}.t{i}", plan) for i in range(count)]
        for process in self.processes:
            process.start()
        self.on_ready(self)

    def pause(self, duration_s: float) -> None:
        """Pause all processes of the client."""
        for process in self.processes:
            process.pause(duration_s)

    def crash(self, connections_linger: bool = False) -> None:
        """Crash all processes of the client."""
        for process in self.processes:
            process.crash("crashes", connections_linger)
        if self.publisher is not None:
            self.audit.publisher_died(self.publisher.name, self.world.now)
        for subscriber in self.subscribers:
            self.audit.subscriber_died(subscriber.name, self.world.now)
        for app in self.pattern_subscribers:
            for pattern in app.patterns:
                self.audit.subscriber_died(app.audited(pattern), self.world.now)
        self._reader = self.publisher = self.local_plan = None
        self.subscribers = []
        self.pattern_subscribers = []


class _App:
    """Base of the applications of a client."""

    def __init__(self, client: Client, name: str, plan: LocalPlan) -> None:
        self.name = name
        self._client = client
        self._world = client.world
        self._audit = client.audit
        self._plan = plan


class PublisherApp(_App):
    """Publishes numbered messages."""

    def __init__(self, client: Client, name: str, plan: LocalPlan) -> None:
        super().__init__(client, name, plan)
        self._numbers: dict[bytes, int] = {}
        self._unended: dict[tuple[bytes, int], None] = {}
        #: Called with channel, number and receivers (None: it failed) when a publish has ended.
        self.on_ended: Callable[[bytes, int, int | None], None] = lambda channel, number, receivers: None
        self.process = Process(client.world, client.network, f"{name}.p", self._machine, self._acted)

    def _machine(self, incarnation: int) -> PublisherMachine:
        client_id = incarnation
        self._client.names[client_id] = self.name
        return PublisherMachine(client_id, self._plan, self._client.options.publisher)

    @property
    def channels(self) -> list[bytes]:
        """The channels that it has published to."""
        return list(self._numbers)

    def pending(self, channel: bytes) -> int:
        """Return how many publishes on ``channel`` have not ended."""
        return sum(pending == channel for pending, _ in self._unended)

    def publish(self, channel: bytes, size_bytes: int = 0) -> int:
        """Publish the next message on ``channel``, padded to ``size_bytes``; return its number."""
        number, payload = self._begin(channel)
        self.process.handle(Publish((channel, number), channel, payload.ljust(size_bytes, b"_")))
        return number

    def publish_all(self, channels: Iterable[bytes]) -> None:
        """Publish the next message on each of these channels, together."""
        begun = [(channel, *self._begin(channel)) for channel in channels]
        self.process.handle(PublishAll([((channel, number), channel, payload) for channel, number, payload in begun]))

    def _begin(self, channel: bytes) -> tuple[int, bytes]:
        """Begin the next message on ``channel``; return its number and its payload."""
        number = self._numbers[channel] = self._numbers.get(channel, 0) + 1
        self._unended[channel, number] = None
        now = self._world.now
        self._audit.published(self.name, channel, number, now)
        payload = make_payload(self.name, number)
        self._world.trace.add((now, "begins to publish", self.name, None, channel, payload, None))
        return number, payload

    def _acted(self, action: Any) -> None:
        if type(action) is PublishedAll:
            for outcome in zip(action.tokens, action.receivers, strict=True):
                self._acted(Published(*outcome))
            return
        channel, number = action.token
        del self._unended[channel, number]
        receivers = action.receivers if type(action) is Published else None
        now = self._world.now
        note = action.reason if type(action) is PublishFailed else action
        self._world.trace.add((now, "has published", self.name, None, channel, make_payload(self.name, number), note))
        self._audit.publish_ended(self.name, channel, number, now, failed=receivers is None)
        self.on_ended(channel, number, receivers)


class SubscriberApp(_App):
    """One PubSub: subscribes, and listens."""

    def __init__(self, client: Client, name: str, plan: LocalPlan) -> None:
        super().__init__(client, name, plan)
        self.process = Process(
            client.world, client.network, name, self._machine, self._acted, on_pushes=self._take_expected
        )
        #: The queue of an application that reads slowly.
        self._reader: SlowReader | None = None

    def _machine(self, incarnation: int) -> SubscriberMachine:
        return SubscriberMachine(incarnation, self._plan, self._client.options.subscriber)

    def _take_expected(self, link: str, pushes: list[list[Any]]) -> int:
        """Deliver expected messages without an event, as the client's feed does."""
        machine = self.process.machine
        assert isinstance(machine, SubscriberMachine), "it was made by _machine"
        return machine.take_expected(link, pushes, lambda message: self._acted(Deliver([message])))

    def subscribe(self, channel: bytes) -> None:
        """Ask for a subscription."""
        self._note("subscribes to", channel)
        self.process.handle(Subscribe((channel,)))

    def unsubscribe(self, channel: bytes) -> None:
        """End a subscription."""
        self._note("unsubscribes from", channel)
        self._audit.ending(self.name, channel)
        self.process.handle(Unsubscribe((channel,)))

    def read_slowly(self, take_s: float) -> None:
        """Take no more than one message each ``take_s``, until ``read_all``."""
        if self._reader is None and self.process.alive:
            self._world.trace.add((self._world.now, "fault", self.name, None, None, None, "reads slowly"))
            self._reader = SlowReader(self._world, self.process, take_s, self._read)

    def read_all(self) -> None:
        """Read what waits, and be quick again."""
        if self._reader is not None:
            self._reader.read_all()
            self._reader = None

    def _acted(self, action: Any) -> None:
        if self._reader is not None:
            self._reader.put(action)
        else:
            self._read(action)

    def _read(self, action: Any) -> None:
        now = self._world.now
        match action:
            case Deliver(messages):
                for channel, payload in messages:
                    publisher, number = read_payload(payload)
                    self._world.trace.add((now, "DELIVERS", self.name, None, channel, payload, None))
                    self._audit.delivered(self.name, channel, publisher, number, now)
            case SubscriptionConfirmed(channel):
                self._note("is confirmed", channel)
                self._audit.confirmed(self.name, channel, now)
            case SubscriptionEnded(channel):
                self._note("has ended", channel)
                self._audit.ended(self.name, channel, now)
            case GapDetected(channel, publisher, count, reason):
                self._note(
                    f"GAP of {publisher if publisher is None else format(publisher, 'x')}, {count}: {reason}", channel
                )
                name = None if publisher is None else self._client.names.get(publisher)
                self._audit.gap(self.name, channel, name, count if name is not None else None, now, reason)
            case _:
                raise AssertionError(f"not an action of a subscriber: {action!r}")

    def _note(self, kind: str, channel: bytes) -> None:
        self._world.trace.add((self._world.now, kind, self.name, None, channel, None, None))


class PatternSubscriberApp(_App):
    """One PubSub that subscribes to patterns."""

    def __init__(self, client: Client, name: str, plan: LocalPlan) -> None:
        super().__init__(client, name, plan)
        #: The patterns that it has ever asked for.
        self.patterns: dict[bytes, None] = {}
        self.process = Process(client.world, client.network, name, self._machine, self._acted)

    def _machine(self, _: int) -> PatternMachine:
        return PatternMachine(self._plan, self._client.options.patterns)

    def audited(self, pattern: bytes) -> str:
        """Return the name under which the audit knows the subscription to a pattern."""
        return f"{self.name}{PATTERN_MARK}{pattern.decode()}"

    def subscribe(self, pattern: bytes) -> None:
        """Ask for a subscription."""
        self.patterns[pattern] = None
        self._note("subscribes to", pattern)
        self.process.handle(SubscribePatterns((pattern,)))

    def unsubscribe(self, pattern: bytes) -> None:
        """End a subscription."""
        self._note("unsubscribes from", pattern)
        self._audit.pattern_ending(self.audited(pattern))
        self.process.handle(UnsubscribePatterns((pattern,)))

    def is_confirmed(self, pattern: bytes) -> bool:
        """Tell whether a subscription is confirmed and not ended."""
        return self._audit.is_open_pattern(self.audited(pattern))

    def _acted(self, action: Any) -> None:
        now = self._world.now
        match action:
            case DeliverMatched(messages):
                for message in messages:
                    if message.channel.startswith(NOTIFICATION_PREFIXES):
                        continue  # no application has published it
                    publisher, number = read_payload(message.payload)
                    self._world.trace.add((now, "DELIVERS", self.name, None, message.channel, message.payload, None))
                    self._audit.delivered(self.audited(message.pattern), message.channel, publisher, number, now)
            case SubscriptionConfirmed(pattern):
                self._note("is confirmed", pattern)
                self._audit.pattern_confirmed(self.audited(pattern), _matcher(pattern), now)
            case SubscriptionEnded(pattern):
                self._note("has ended", pattern)
                self._audit.pattern_ended(self.audited(pattern), now)
            case PatternGapDetected(pattern, channel, publisher, count, reason):
                self._note(f"GAP of {channel!r}, {count}: {reason}", pattern)
                if channel is None:
                    self._audit.pattern_gap(self.audited(pattern), now)
                    return
                name = None if publisher is None else self._client.names.get(publisher)
                self._audit.gap(self.audited(pattern), channel, name, count if name is not None else None, now, reason)
            case _:
                raise AssertionError(f"not an action of a pattern subscriber: {action!r}")

    def _note(self, kind: str, pattern: bytes) -> None:
        self._world.trace.add((self._world.now, "fault", self.name, None, pattern, None, kind))


def _matcher(pattern: bytes) -> Callable[[bytes], bool]:
    expression = compile_glob(pattern)
    return lambda channel: expression.fullmatch(channel) is not None
