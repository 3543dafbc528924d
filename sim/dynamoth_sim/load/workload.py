"""What simulated applications do: publish, one after the other or all at once, come and go, play a game; and moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from dynamoth.plan.plan import Assignment, Mode, single
from dynamoth.plan.slots import slot_of
from dynamoth_sim.cluster import Cluster
from dynamoth_sim.load.clients import Client, PatternSubscriberApp, PublisherApp, SubscriberApp
from dynamoth_sim.load.plain import RawPublisherApp
from dynamoth_sim.load.rgame import GameWorld, Join, Leave, Player
from dynamoth_sim.load.upgrade import Upgrade


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """How much a workload does. "Moves" are all changes of a channel's assignment, replication included."""

    channels: int = 3
    #: A server that leaves in the end: no channel is at home there, and half of the moves lead there.
    leaver: str = ""
    publishers: int = 3
    #: Clients that subscribe, each with one or two PubSubs.
    subscribers: int = 3
    #: Clients that subscribe to patterns, each with one or two PubSubs.
    pattern_subscribers: int = 1
    raw_publishers: int = 0
    #: The share of publishers that publish once and are idle until the end.
    idle_ratio: float = 0.0
    #: How often a new client comes, publishes a few messages on one channel, and dies or stays idle: 0 for never.
    visit_interval_s: float = 0.0
    #: Plain Redis clients that listen while channels are plain, of a fleet that is upgraded and goes back.
    plain_listeners: int = 0
    #: Players of RGame, who publish and subscribe, on channels of their own.
    players: int = 0
    #: The longest time between two publishes of one publisher.
    think_s_max: float = 0.08
    #: How often a subscriber joins or leaves a channel: 0 for never.
    churn_interval_s: float = 0.4
    #: The longest time between two moves; 0 for none.
    move_interval_s: float = 0.3
    #: The share of moves that take all channels at once.
    storm_ratio: float = 0.0
    #: The share of moves that replicate the channel, in either mode, over two servers or more.
    replicated_ratio: float = 0.5
    #: The shares of moves that move the channel's slot instead; each run draws one of them.
    slot_ratios: tuple[float, ...] = (0.0, 0.5, 1.0)
    #: How many publishes a publisher may begin before the first has ended, where it does not wait for them.
    burst_max: int = 5


VISITOR_MESSAGES_MAX = 3

PATTERNS = (b"*", b"ch*", b"ch[02]", b"*1", b"[^a-f]?*", b"rgame:?:1")
"""What pattern subscribers subscribe to. No name matches two of the names of one at a server, or one that two of them
share: so a publish counts each as one receiver."""

LATE_PATTERN = b"c*"
"""The pattern that is subscribed to at the end of a run in which a server has gone."""

NAMES_MAX = 50
"""The number of names to choose channels from."""

DEFAULT_WORKLOAD = WorkloadOptions()


@dataclass(slots=True)
class _Player:
    """A player of RGame, and the client that it plays through."""

    player: Player
    publisher: PublisherApp
    subscriber: SubscriberApp


@dataclass(slots=True)
class Workload:
    """Drives the applications of a cluster from time 0 until :meth:`stop`."""

    cluster: Cluster
    options: WorkloadOptions
    channels: list[bytes] = field(init=False)
    stopped: bool = False
    _upgrade: Upgrade | None = None
    _slot_ratio: float = 0.0

    def __post_init__(self) -> None:
        """Name the channels; so few that they often share a server."""
        names = [b"ch%d" % number for number in range(NAMES_MAX)]
        self.channels = names[: self.options.channels]
        self._slot_ratio = self._random.choice(self.options.slot_ratios)

    @property
    def _random(self) -> Random:
        return self.cluster.world.random

    def start(self) -> None:
        """Add the clients and start them within the first moments."""
        options = self.options
        for number in range(options.publishers):
            self._start(self.cluster.add_client(f"p{number}", 0), self._publisher_ready)
        for number in range(options.subscribers):
            client = self.cluster.add_client(f"c{number}", self._random.randint(1, 2))
            self._start(client, self._subscriber_ready)
        for number in range(options.pattern_subscribers):
            client = self.cluster.add_client(f"t{number}", 0, self._random.randint(1, 2))
            self._start(client, self._pattern_subscriber_ready)
        game = GameWorld(tiles_per_side=2, speed_m_per_s=30.0, pause_s_max=0.2, updates_per_s=15.0)
        for number in range(options.players):
            client = self.cluster.add_client(f"g{number}", 1)
            self._start(client, partial(self._player_ready, number, game))
        for number in range(options.raw_publishers):
            url = self._random.choice([server.url for server in self.cluster.servers.values()])
            self._start_raw(f"raw{number}", url)
        if options.visit_interval_s:
            self.cluster.world.after(0.5, self._visit, 0)
        if options.plain_listeners:
            self._upgrade = Upgrade(self.cluster, self.channels, options.plain_listeners, lambda: self.stopped)
            self.cluster.world.after(0.3 * self._random.random(), self._upgrade.start)
        if options.move_interval_s:
            self.cluster.world.after(0.2 + 0.3 * self._random.random(), self._move)
        if options.players:
            self.channels += game.channels()

    def _start(self, client: Client, ready: Callable[[Client], None]) -> None:
        client.on_ready = ready
        self.cluster.world.after(0.3 * self._random.random(), client.start)

    def stop(self) -> None:
        """Stop all applications: they do nothing more by themselves."""
        self.stopped = True

    # Publishers.

    def _publisher_ready(self, client: Client) -> None:
        app = client.publisher
        assert app is not None
        favourites = self._random.sample(self.channels[: self.options.channels], self._random.randint(1, 2))
        if self.options.idle_ratio and self._random.random() < self.options.idle_ratio:
            app.publish_all(favourites)
        elif self._random.random() < 0.7:
            app.on_ended = lambda channel, number, receivers: self._think(app, favourites)
            self._think(app, favourites)
        else:
            self._burst(app, favourites)

    def _think(self, app: PublisherApp, channels: list[bytes]) -> None:
        if not self.stopped:
            self.cluster.world.after(self.options.think_s_max * self._random.random(), self._publish, app, channels)

    def _publish(self, app: PublisherApp, channels: list[bytes]) -> None:
        if not self.stopped and app.process.alive:
            app.publish(self._random.choice(channels))

    def _burst(self, app: PublisherApp, channels: list[bytes]) -> None:
        """Publish several together, without waiting for what has begun."""
        if self.stopped or not app.process.alive:
            return
        count = self._random.randint(1, self.options.burst_max)
        app.publish_all([self._random.choice(channels) for _ in range(count)])
        self.cluster.world.after(count * self.options.think_s_max * self._random.random(), self._burst, app, channels)

    def _start_raw(self, name: str, url: str) -> None:
        app = RawPublisherApp(self.cluster, name, url, self._random.choice(self.channels[: self.options.channels]))

        def publish() -> None:
            if not self.cluster.is_observed(url):  # nothing is promised of what no agent has ever seen
                self.cluster.world.after(self.options.think_s_max, publish)
            elif not self.stopped:
                app.publish()

        app.on_ended = lambda: self.cluster.world.after(2 * self.options.think_s_max * self._random.random(), publish)
        app.process.start()

    # Visitors.

    def _visit(self, number: int) -> None:
        if not self.stopped:
            self._start(self.cluster.add_client(f"v{number}", 0), self._visitor_ready)
            delay = 2 * self.options.visit_interval_s * self._random.random()
            self.cluster.world.after(delay, self._visit, number + 1)

    def _visitor_ready(self, client: Client) -> None:
        app = client.publisher
        assert app is not None
        channel = self._random.choice(self.channels[: self.options.channels])
        count = self._random.randint(1, VISITOR_MESSAGES_MAX)
        dies = self._random.random() < 0.6

        def leave() -> None:
            if client.publisher is app and not self.stopped:
                client.crash()

        def ended(*_: Any) -> None:
            if dies and not app.pending(channel):
                self.cluster.world.after(0.1 * self._random.random(), leave)

        app.on_ended = ended
        if self._random.random() < 0.5:
            app.publish_all([channel] * count)
        else:
            for index in range(count):
                self.cluster.world.after(0.01 * index, self._publish, app, [channel])

    # Subscribers.

    def _subscriber_ready(self, client: Client) -> None:
        for app in client.subscribers:
            joined: dict[bytes, None] = {}
            for channel in self.channels[: self.options.channels]:
                if self._random.random() < 0.7:
                    self.cluster.world.after(0.4 * self._random.random(), self._join, app, joined, channel)
            if self.options.churn_interval_s and self._random.random() < 0.5:
                self._churn_later(app, joined)

    def _join(self, app: SubscriberApp, joined: dict[bytes, None], channel: bytes) -> None:
        if app.process.alive and channel not in joined:
            joined[channel] = None
            app.subscribe(channel)

    def _churn_later(self, app: SubscriberApp, joined: dict[bytes, None]) -> None:
        delay = 2 * self.options.churn_interval_s * self._random.random()
        self.cluster.world.after(delay, self._churn, app, joined)

    def _churn(self, app: SubscriberApp, joined: dict[bytes, None]) -> None:
        if self.stopped or not app.process.alive:
            return
        channel = self._random.choice(self.channels[: self.options.channels])
        if channel in joined:
            del joined[channel]
            app.unsubscribe(channel)
        else:
            self._join(app, joined, channel)
        self._churn_later(app, joined)

    def _pattern_subscriber_ready(self, client: Client) -> None:
        for app in client.pattern_subscribers:
            patterns = self._random.sample(PATTERNS, self._random.randint(1, 2))
            for pattern in patterns:
                self.cluster.world.after(0.4 * self._random.random(), app.subscribe, pattern)
            if self.options.churn_interval_s and self._random.random() < 0.5:
                self._churn_pattern_later(app, patterns[0], subscribed=True)

    def _churn_pattern_later(self, app: PatternSubscriberApp, pattern: bytes, *, subscribed: bool) -> None:
        delay = 0.4 + 2 * self.options.churn_interval_s * self._random.random()
        self.cluster.world.after(delay, self._churn_pattern, app, pattern, subscribed)

    def _churn_pattern(self, app: PatternSubscriberApp, pattern: bytes, subscribed: bool) -> None:
        if self.stopped or not app.process.alive:
            return
        if subscribed:
            app.unsubscribe(pattern)
        else:
            app.subscribe(pattern)
        self._churn_pattern_later(app, pattern, subscribed=not subscribed)

    # Players.

    def _player_ready(self, number: int, game: GameWorld, client: Client) -> None:
        assert client.publisher is not None
        player = Player(number, game, Random(self._random.getrandbits(32)), self.cluster.world.now)
        self._play_later(_Player(player, client.publisher, client.subscribers[0]))

    def _play_later(self, it: _Player) -> None:
        self.cluster.world.at(it.player.deadline(), self._play, it)

    def _play(self, it: _Player) -> None:
        if self.stopped or not it.publisher.process.alive:
            return
        for action in it.player.step(self.cluster.world.now):
            match action:
                case Join(channel):
                    it.subscriber.subscribe(channel)
                case Leave(channel):
                    it.subscriber.unsubscribe(channel)
                case _:
                    it.publisher.publish(action.channel)
        self._play_later(it)

    # Moves.

    def _move(self) -> None:
        if self.stopped:
            return
        storm = self._random.random() < self.options.storm_ratio
        kept = self._upgrade.channels if self._upgrade is not None and self._upgrade.is_returning else ()
        for channel in self.channels if storm else [self._random.choice(self.channels)]:
            if channel in kept:
                continue
            if self._random.random() < self._slot_ratio:
                self.cluster.change(slot_of(channel), single(self._draw_server()))
            else:
                self.cluster.change(channel, self._draw_assignment())
        self.cluster.world.after(self.options.move_interval_s * self._random.random(), self._move)

    def _draw_server(self) -> str:
        servers, leaver = self.cluster.present, self.options.leaver
        return leaver if leaver in servers and self._random.random() < 0.5 else self._random.choice(servers)

    def _draw_assignment(self) -> Assignment:
        servers, leaver = self.cluster.present, self.options.leaver
        if leaver in servers and self._random.random() < 0.5:
            return single(leaver)
        if len(servers) == 1 or self._random.random() >= self.options.replicated_ratio:
            return single(self._random.choice(servers))
        mode = self._random.choice((Mode.ALL_SUBSCRIBERS, Mode.ALL_PUBLISHERS))
        return Assignment(mode, tuple(self._random.sample(servers, self._random.randint(2, len(servers)))))

    # The end.

    def subscribe_late(self) -> None:
        """Subscribe to one more pattern: with every subscriber to patterns, and with a client that is new.

        That also subscribes to every channel, and publishes there.
        """
        for client in self.cluster.clients:
            for app in client.pattern_subscribers:
                app.subscribe(LATE_PATTERN)
        late = self.cluster.add_client("late", 1, 1)

        def ready(client: Client) -> None:
            assert client.publisher is not None
            client.pattern_subscribers[0].subscribe(LATE_PATTERN)
            for channel in self.channels:
                client.subscribers[0].subscribe(channel)
                client.publisher.publish(channel)

        late.on_ready = ready
        late.start()

    def unconfirmed(self) -> list[str]:
        """Return the clients of :meth:`subscribe_late` that have a subscriber which was not confirmed."""
        late = self.cluster.clients[-1]
        waiting = [
            f"{app.name} on {channel.decode()}"
            for app in late.subscribers
            for channel in self.channels
            if not self.cluster.audit.is_open(app.name, channel)
        ]
        return waiting + [
            client.name
            for client in self.cluster.clients
            if (client.pattern_subscribers or not client.ready)
            and not all(app.is_confirmed(LATE_PATTERN) for app in client.pattern_subscribers)
        ]

    def unended(self) -> list[tuple[PublisherApp, bytes]]:
        """Return who waits for the end of a publish, and on which channel."""
        return [
            (client.publisher, channel)
            for client in self.cluster.clients
            if client.publisher is not None
            for channel in self.channels
            if client.publisher.pending(channel)
        ]

    def publish_everywhere(self) -> Iterable[tuple[PublisherApp, bytes, int]]:
        """Publish once more from every publisher on each channel that it has used; return what was published."""
        return [
            (client.publisher, channel, client.publisher.publish(channel))
            for client in self.cluster.clients
            if client.publisher is not None
            for channel in client.publisher.channels
        ]
