"""Pipes keep their order, whatever the delays; what is lost is lost from one point on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth_sim.world.network import CALM, SILENCE_S_MAX, Delays, End, Line, Network, Packet, Pipe
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World

WILD = Delays(base_s=0.001, jitter_s=0.1, spike_s=1.0, spike_ratio=0.2)


class Sink:
    """Takes what comes out of a pipe."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.items: list[Any] = []
        self.times: list[float] = []
        self.packets = 0
        self.end: str | None = None

    def __call__(self, packet: Packet) -> None:
        self.packets += 1
        for item in packet.items:
            if isinstance(item, End):
                self.end = item.reason
            else:
                assert self.end is None, "nothing comes after the end"
                self.items.append(item)
                self.times.append(self._world.now)


@pytest.fixture
def world() -> World:
    return World(1)


@pytest.fixture
def sink(world: World) -> Sink:
    return Sink(world)


@given(st.integers(0, 10_000))
def test_a_pipe_keeps_its_order_and_delays_everything(seed: int) -> None:
    world = World(seed)
    sink = Sink(world)
    pipe = Pipe(world, WILD, sink)
    sent: list[float] = []
    for number in range(50):
        pipe.send(number, 10)
        sent.append(world.now)
        world.run_until(world.now + 0.05 * world.random.random())
    world.run_until(world.now + 3.0)
    assert sink.items == list(range(50))
    assert all(at - began >= WILD.base_s for at, began in zip(sink.times, sent, strict=True))
    assert sink.packets < 50


def test_a_slow_line_takes_its_time(world: World, sink: Sink) -> None:
    pipe = Pipe(world, Delays(base_s=0.1, jitter_s=0.0, bytes_per_s=1000.0), sink)
    for number in range(3):
        pipe.send(number, 500)
    world.run_until(5.0)
    assert sink.times == pytest.approx([0.6, 1.1, 1.6])


def test_a_held_pipe_delivers_what_is_due_when_it_is_released(world: World, sink: Sink) -> None:
    pipe = Pipe(world, CALM, sink)
    pipe.hold()
    pipe.hold()
    pipe.send(1, 1)
    world.run_until(1.0)
    pipe.send(2, 1)
    pipe.release()
    assert sink.items == []
    pipe.release()
    assert sink.items == [1]
    world.run_until(2.0)
    assert sink.items == [1, 2]


def test_the_end_comes_after_what_is_in_flight(world: World, sink: Sink) -> None:
    pipe = Pipe(world, WILD, sink)
    for number in range(10):
        pipe.send(number, 1)
    pipe.end("enough", notice_s=0.5)
    pipe.send("too late", 1)
    pipe.end("once more")
    world.run_until(5.0)
    assert (sink.items, sink.end) == (list(range(10)), "enough")


@given(st.integers(0, 1000), st.booleans())
def test_a_cut_pipe_loses_everything_from_one_point_on(seed: int, lose_all: bool) -> None:
    world = World(seed)
    sink = Sink(world)
    pipe = Pipe(world, WILD, sink)
    for number in range(10):
        pipe.send(number, 1)
        world.run_until(world.now + 0.01)
    arrived = len(sink.items)
    lost = pipe.cut("broken", 0.1, lose_all=lose_all)
    world.run_until(10.0)
    assert sink.items == list(range(10 - lost))
    assert sink.end == "broken"
    assert pipe.cut("again", 0.0) == 0
    if lose_all:
        assert len(sink.items) == arrived


def test_pipes_share_a_line_by_turns(world: World) -> None:
    sent: list[int] = []
    line = Line(world, 1000.0, sent.append)
    behind, idle = Sink(world), Sink(world)
    full, other = (Pipe(world, Delays(base_s=0.1, jitter_s=0.0), sink, line) for sink in (behind, idle))
    for number in range(3):
        full.send(number, 2000)
    other.send("small", 100)
    other.send("as small", 100)
    world.run_until(2.15)
    assert behind.times == pytest.approx([2.1])
    assert idle.times == []
    assert sum(sent) == 2000
    world.run_until(20.0)
    assert behind.times == pytest.approx([2.1, 4.3, 6.3])
    assert idle.times == pytest.approx([2.3, 2.3])
    assert sum(sent) == 6200


def test_what_waits_for_a_line_is_lost_with_its_pipe(world: World) -> None:
    sent: list[int] = []
    line = Line(world, 1000.0, sent.append)
    sinks = [Sink(world) for _ in range(3)]
    cut, dropped, ended = (Pipe(world, CALM, sink, line) for sink in sinks)
    for pipe in (cut, dropped, ended):
        pipe.send(1, 1000)
        pipe.send(2, 1000)
    world.run_until(0.5)
    assert cut.cut("broken", 0.0) == 2
    assert dropped.drop_unsent() == 2
    ended.end("enough")
    world.run_until(10.0)
    assert [(sink.items, sink.end) for sink in sinks] == [([], "broken"), ([], None), ([1, 2], "enough")]
    assert sum(sent) == 2000


class Place:
    """A network with one server, and a process that connects to it."""

    def __init__(self) -> None:
        self.world = World(1)
        self.network = Network(self.world, lambda process, server: CALM)
        self.server = RedisServer(self.world, "s1", "redis://s1")
        self.network.add_server(self.server.url, self.server)
        self.got: list[Any] = []
        self.failures: list[str] = []

    def connect(self) -> None:
        """Let ``p`` open a connection; what it gets goes to ``got``."""
        self.network.open("p", self.server.url, lambda _, packet: self.got.extend(packet.items), self.failures.append)


@pytest.fixture
def place() -> Place:
    return Place()


def test_a_server_that_is_parted_can_neither_be_reached_nor_heard(place: Place) -> None:
    place.connect()
    place.world.run_until(0.1)
    (connection,) = place.network.connections("p")
    heal = place.network.part(["p"], ["s1"])
    connection.to_server.send(((b"PING",), "tag"), 10)
    place.connect()
    place.world.run_until(0.1 + 0.9 * SILENCE_S_MAX)
    assert (len(place.got), place.failures) == (1, [])
    heal()
    place.world.run_until(3.0)
    assert (len(place.got), place.failures) == (2, ["timed out"])


def test_a_connection_that_is_held_for_long_is_given_up_and_the_server_learns_of_it_later(place: Place) -> None:
    """What was sent before takes effect when the server goes on; what it answered is lost."""
    world, got = place.world, place.got
    place.connect()
    world.run_until(0.1)
    (connection,) = place.network.connections("p")
    connection.to_server.send(((b"SUBSCRIBE", b"c"), "tag"), 10)
    world.run_until(0.2)
    place.server.inject(b"c", b"lost")
    go_on = place.network.freeze("s1")
    world.run_until(0.2 + 0.9 * SILENCE_S_MAX)
    assert End not in map(type, got)
    world.run_until(0.2 + 1.1 * SILENCE_S_MAX)
    assert isinstance(got[-1], End) and "nothing came" in got[-1].reason
    seen = len(got)
    connection.to_server.send(((b"PUBLISH", b"c", b"late"), "tag"), 10)
    connection.to_server.end("closed by the client")
    assert place.server.subscribers(b"c"), "it has not heard of that"
    go_on()
    world.run_until(3.0)
    assert not place.server.subscribers(b"c")
    assert len(got) == seen


def test_a_connection_that_is_made_while_parted_works_when_that_is_over(place: Place) -> None:
    place.connect()
    first, second = place.network.part(["p"], ["s1"]), place.network.part(["p", "q"], ["s1"])
    place.world.run_until(0.9 * SILENCE_S_MAX)
    assert place.got == [] and len(place.network.connections("p")) == 1
    first()
    assert place.got == []
    place.network.break_connection(place.network.connections("p")[0], lose_all=True)
    place.world.run_until(2.0)
    second()
    assert [type(item) for item in place.got] == [End]
