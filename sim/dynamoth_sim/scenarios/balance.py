"""Scripts of how load managers are known to fail.

The clients of a script make each channel a stated part of a server's load. Times are those of short options: the
balancer waits 0.5 s between two plans, so 90 s have as many plans as an hour has by default.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dynamoth.plan.plan import Phase, single
from dynamoth_balancer.decide.cluster import Finding, Move
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_sim.load.clients import PublisherApp
from dynamoth_sim.scenarios.stage import Scenario, Stage

CAPACITY_BYTES_PER_S = 5_000_000
"""What a server can send: so much that the traffic of clients and agents with the plan is nothing beside it."""

PERIOD_S = 0.1
"""Each channel gets a message this often: four in the interval of a report."""

OVERHEAD_BYTES = 70
"""What name, envelope and protocol add to a payload, roughly."""

HIGH_RATIO = 0.8
"""``load_ratio_high``."""

FEW_S, MANY_S = 4.0, 10.0
"""Time for eight plans, and for twenty."""

BUILD_UP_S = 1.5
"""Longer than what the balancer averages over, and the interval of a report."""


class Load:
    """Publishes on channels, so that each makes a part of a server's load; one subscriber listens to all of them."""

    def __init__(self, stage: Stage, ratios: Mapping[bytes, float], publishers: int = 1, together: int = 1) -> None:
        self._stage = stage
        #: The load ratio of each channel at a server of ``CAPACITY_BYTES_PER_S``; may be changed at any time.
        self.ratios: dict[bytes, float] = {}
        self._subscriber = stage.subscriber("S", *ratios)
        self._publishers = [stage.publisher(f"P{number}", *ratios) for number in range(publishers)]
        #: How many of the publishers share each turn.
        self._together = together
        self._turn = 0
        self.ratios.update(ratios)

    def build_up(self) -> None:
        """Publish while the balancer is paused, until its averages show the whole load everywhere."""
        for command in ("pause", "resume"):
            request = self._stage.cluster.ask(command, {})
            self.run(BUILD_UP_S)
            self._stage.expect(f"the balancer does {command}", self._stage.cluster.answers.get(request, "") is None)

    def add(self, ratios: Mapping[bytes, float]) -> None:
        """Begin with further channels, all at once."""
        for channel in ratios:
            self._stage.join(self._subscriber, channel)
        self.ratios.update(ratios)

    def run(self, duration_s: float) -> None:
        """Publish for so long; the publishers take turns."""
        for _ in range(round(duration_s / PERIOD_S)):
            for _ in range(self._together):
                self._turn += 1
                self._publish(self._publishers[self._turn % len(self._publishers)])
            self._stage.run(PERIOD_S)

    def _publish(self, publisher: PublisherApp) -> None:
        for channel, ratio in self.ratios.items():
            size_bytes = round(ratio * CAPACITY_BYTES_PER_S * PERIOD_S / self._together) - OVERHEAD_BYTES
            publisher.publish(channel, size_bytes=max(0, size_bytes))


def _channels(stage: Stage, server: str, ratio: float, count: int, name: str = "c") -> dict[bytes, float]:
    """Return channels whose home is ``server``, which together make this load ratio."""
    return {stage.channel_at(server, f"{name}{number}."): ratio / count for number in range(count)}


def _moves(stage: Stage) -> list[Move]:
    return [move for record in stage.records("decides") for move in record.note.moves]


def _findings(stage: Stage) -> list[Finding]:
    return [finding for record in stage.records("decides") for finding in record.note.findings]


def _load_ratios(stage: Stage) -> dict[str, float]:
    balancer = stage.cluster.balancer.machine
    assert isinstance(balancer, BalancerMachine), "it is at work"
    ratios = {server: balancer.overview.load_ratio(server, stage.world.now) for server in stage.cluster.servers}
    return {server: ratio for server, ratio in ratios.items() if ratio is not None}


def _expect_moves(stage: Stage, most: int, least: int = 0) -> None:
    moves = [f"{move.channel.decode()} {move.source}->{move.target}" for move in _moves(stage)]
    stage.expect(f"the balancer makes {least} to {most} moves, not {len(moves)}: {moves}", least <= len(moves) <= most)


def _expect_each_moves_once(stage: Stage) -> None:
    often = [channel for channel, times in Counter(move.channel for move in _moves(stage)).items() if times > 1]
    stage.expect(f"no channel moves twice under steady load, as do {often}", not often, *often[:1])


def _expect_relief(stage: Stage, servers: Iterable[str] = ("s1", "s2", "s3")) -> None:
    """Expect that no server is overloaded any more."""
    ratios = _load_ratios(stage)
    stage.expect(f"no server is overloaded: {ratios}", all(ratios.get(each, 9.0) <= HIGH_RATIO for each in servers))


def _expect_advice(stage: Stage, server: str, text: str) -> None:
    """Expect that the balancer says of a server why it stays overloaded."""
    said = [finding.reason for finding in _findings(stage) if finding.server == server]
    stage.expect(f"it says of {server} '... {text} ...', not {said}", any(text in reason for reason in said))


def ping_pong(stage: Stage) -> None:
    """Case 76. Each of two channels of an overloaded server would overload any other: nothing moves, to and fro."""
    others = {**_channels(stage, "s2", 0.5, 1), **_channels(stage, "s3", 0.5, 1)}
    load = Load(stage, {**_channels(stage, "s1", 0.95, 2), **others})
    load.build_up()
    load.run(MANY_S)
    _expect_moves(stage, 0)
    _expect_advice(stage, "s1", "add servers")


def hotter_than_any_server(stage: Stage) -> None:
    """Case 77. A channel has more load than any server can carry: it is spread over several, once, and that is all."""
    hot = stage.channel_at("s1", "hot")
    load = Load(stage, {hot: 1.4, **_channels(stage, "s1", 0.2, 1)}, publishers=24, together=3)
    load.build_up()
    load.run(MANY_S)
    replicas = stage.entry(hot).route.assignment.servers
    stage.expect(f"the channel is spread over several servers, not {replicas}", len(replicas) > 1, hot)
    ratios = _load_ratios(stage)
    stage.expect(f"no server carries all of it: {ratios}", max(ratios.values()) < 1.3, hot)
    changes = sum(move.channel == hot for move in _moves(stage))
    stage.expect(f"it is spread once, not {changes} times", changes == 1, hot)


def all_overloaded(stage: Stage) -> None:
    """Case 78. All servers are overloaded: the balancer moves nothing, and says that servers are missing."""
    ratios = {"s1": 1.3, "s2": 1.2, "s3": 1.15}
    load = Load(stage, {c: each for s, ratio in ratios.items() for c, each in _channels(stage, s, ratio, 4).items()})
    load.build_up()
    load.run(MANY_S)
    _expect_moves(stage, 0)
    for server in ratios:
        _expect_advice(stage, server, "add servers")


def new_server(stage: Stage) -> None:
    """Case 79. One server is overloaded and no other has room: a server that is added then is filled, up to a bound."""
    ratios = {"s1": 0.9, "s2": 0.7, "s3": 0.7}
    load = Load(stage, {c: each for s, ratio in ratios.items() for c, each in _channels(stage, s, ratio, 3).items()})
    load.build_up()
    load.run(FEW_S)
    _expect_moves(stage, 0)
    stage.add_server()
    load.run(1.5 * FEW_S)
    _expect_relief(stage, stage.cluster.servers)
    taken = _load_ratios(stage).get("s4", 0.0)
    stage.expect(f"the new server takes its part, not {taken:.2f}", taken > 0.25)
    _expect_each_moves_once(stage)


def steady(stage: Stage) -> None:
    """Case 120. Loads vary around a steady mean, and a server is overloaded now and then: hardly anything moves."""
    ratios = {"s1": 0.74, "s2": 0.68, "s3": 0.62}
    means = {c: each for s, ratio in ratios.items() for c, each in _channels(stage, s, ratio, 3).items()}
    load = Load(stage, means)
    load.build_up()
    for _ in range(round(3 * MANY_S / STEADY_FOR_S)):
        load.ratios = {channel: mean * stage.world.random.uniform(0.5, 1.5) for channel, mean in means.items()}
        load.run(STEADY_FOR_S)
    _expect_moves(stage, 3)


STEADY_FOR_S = 0.3
"""Loads are the same for this time: less than a report's interval, and so they differ in each report."""


def stale_reports(stage: Stage) -> None:
    """Case 121. The agent of the emptiest server hangs while another server becomes overloaded: it gets no channel."""
    busy = _channels(stage, "s1", 0.2, 3)
    load = Load(stage, {**busy, **_channels(stage, "s2", 0.1, 2), **_channels(stage, "s3", 0.3, 2)})
    load.build_up()
    stage.cluster.agents["s2"].pause(MANY_S)
    load.run(PERIOD_S)
    load.ratios.update(dict.fromkeys(busy, 0.3))
    load.run(MANY_S)
    targets = {move.target for move in _moves(stage)}
    stage.expect(f"s1 is relieved to s3, whose load is known, not to {targets}", targets == {"s3"})
    _expect_relief(stage, ("s1", "s3"))


def different_sizes(stage: Stage) -> None:
    """Case 122. The server with the smallest load ratio is a small one: the channels go to the one with most room."""
    load = Load(stage, {**_channels(stage, "s1", 0.96, 6), **_channels(stage, "s3", 0.6, 2)})
    load.build_up()
    load.run(MANY_S)
    _expect_relief(stage)
    targets = {move.target for move in _moves(stage)}
    stage.expect(f"channels go to s3, not to {targets}", targets == {"s3"})
    _expect_each_moves_once(stage)


def herd(stage: Stage) -> None:
    """Case 123. Forty channels begin at one server in the same moment: they spread, and do not all run to another."""
    others = {**_channels(stage, "s2", 0.1, 2), **_channels(stage, "s3", 0.15, 2)}
    load = Load(stage, {**_channels(stage, "s1", 0.2, 2), **others})
    load.build_up()
    load.add(_channels(stage, "s1", 1.0, 40, "new"))
    load.run(FEW_S)
    _expect_relief(stage)
    _expect_each_moves_once(stage)


def little_gain(stage: Stage) -> None:
    """Case 124. All that could leave an overloaded server is a small channel, from 0.88 to 0.87: it is not moved."""
    small = stage.channel_at("s1", "small")
    others = {**_channels(stage, "s2", 0.5, 1), **_channels(stage, "s3", 0.5, 1)}
    load = Load(stage, {**_channels(stage, "s1", 0.87, 2), small: 0.01, **others})
    load.build_up()
    load.run(MANY_S)
    _expect_moves(stage, 0)
    stage.expect("the small channel stays", stage.entry(small).route.assignment == single("s1"), small)
    _expect_advice(stage, "s1", "not worth the moves")


FULL_BYTES_PER_S = 500_000
"""What the network of a server sends in case 125, and its capacity. Buffers of 8 MB hold what more there is."""

TURN_S = 0.2
"""How often each channel of case 125 gets a message, the channels one after the other."""

STEP_S = 1.2
"""How long the first part of the load is alone: as long as the first plan takes, so that it knows nothing of the rest.
That is ``averaging_s`` and the interval of a report."""

RELIEVED_S = 30.0
"""When subscribers have caught up after the second step.

The balancer knows the load after ``STEP_S`` and a report's interval, and plans again ``wait_s`` later: 2 s, in which up
to 2 s of sending queue up. A move is announced behind them. When it is read, as much has come again, and more until the
subscriber has left: after 7 s, 5 s of sending wait. They leave in what the server has free, at least a fifth
(``load_ratio_high`` is 0.8): 20 s later, less than a second waits.
"""

BEHIND_S_MAX = 1.0
"""A subscriber that has each message in this time is not behind."""


def full(stage: Stage) -> None:
    """Case 125. The network of s1 sends half of the demand: s1 is relieved, and its subscribers catch up.

    Two thirds of the load come first. Their moves take long, as subscribers read of them behind all that waits there.
    Nothing is lost: buffers have room for what waits, and subscribers wait for as long as they are behind.
    """
    channels = list(_channels(stage, "s1", 2.0, 20))
    options = stage.cluster.options
    patient = replace(options.client.subscriber, hold_s_max=RELIEVED_S, marker_s=RELIEVED_S)
    stage.cluster.options = replace(options, client=replace(options.client, subscriber=patient))
    for number in range(4):
        stage.subscriber(f"S{number}", *channels[number::4])
    stage.cluster.options = options
    publisher = stage.publisher("P", *channels)
    _publish_in_turn(stage, publisher, channels[:13], STEP_S)
    _publish_in_turn(stage, publisher, channels, RELIEVED_S)
    entries = [stage.entry(channel) for channel in channels]
    left = sum(each.phase is not Phase.SETTLED or each.route.assignment == single("s1") for each in entries)
    stage.expect(f"the demand makes load ratio {HIGH_RATIO}, not {left / 10}", left / 10 <= HIGH_RATIO)
    read = {(record.channel, (record.data or b"").rstrip(b"_")) for record in stage.records("DELIVERS")}
    begun = (record for record in stage.records("begins to publish") if (record.channel, record.data) not in read)
    behind_s = stage.world.now - min((record.at for record in begun), default=stage.world.now)
    stage.expect(f"no subscriber is behind by {behind_s:.1f} s", behind_s <= BEHIND_S_MAX)


def _publish_in_turn(stage: Stage, publisher: PublisherApp, channels: Sequence[bytes], duration_s: float) -> None:
    """Publish for so long; each channel makes a tenth of what a full server can send."""
    for turn in range(round(duration_s / TURN_S * len(channels))):
        publisher.publish(channels[turn % len(channels)], round(FULL_BYTES_PER_S * TURN_S / 10) - OVERHEAD_BYTES)
        stage.run(TURN_S / len(channels))


SIZES = {"s2": CAPACITY_BYTES_PER_S // 5, "s3": 2 * CAPACITY_BYTES_PER_S}

SCENARIOS: dict[str, Scenario] = {
    "76-ping-pong": Scenario(ping_pong, outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S),
    "77-hotter-than-any-server": Scenario(
        hotter_than_any_server, outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S, replicas_max=3
    ),
    "78-all-overloaded": Scenario(all_overloaded, outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S),
    "79-new-server": Scenario(new_server, outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S),
    "120-steady": Scenario(steady, outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S),
    "121-stale-reports": Scenario(stale_reports, outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S),
    "122-different-sizes": Scenario(different_sizes, outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S, capacities=SIZES),
    "123-herd": Scenario(herd, outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S),
    "124-little-gain": Scenario(little_gain, outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S),
    "125-full": Scenario(full, outgoing_bytes_per_s_max=FULL_BYTES_PER_S, network_bytes_per_s=FULL_BYTES_PER_S),
}
