"""The simulated driver beyond the contract of all drivers (``tests/contract``): pauses, crashes, lateness."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.machine.events import Connect, Disconnect, LinkDown, LinkUp, Pushed, Send, Start
from dynamoth_sim.world.network import CALM, Network
from dynamoth_sim.world.process import MachineFailed, Process
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World
from tests.contract.drivers import Do, Puppet


def puppet(url: str, *commands: tuple[bytes, ...]) -> Puppet:
    """Return a machine that connects to one server, and sends the same commands at each connection."""

    def answer(event: Any) -> list[Any]:
        match event:
            case Start():
                return [Connect("server", url)]
            case LinkUp():
                return [Send("server", command) for command in commands]
            case _:
                return []

    machine = Puppet()
    machine.answer = answer
    return machine


def pushes(machine: Puppet) -> list[Pushed]:
    return [event for event in machine.events if isinstance(event, Pushed)]


class Place:
    """A server and processes."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.network = Network(self.world, lambda process, server: CALM)
        self.server = RedisServer(self.world, "s1", "redis://s1")
        self.network.add_server(self.server.url, self.server)
        self.actions: list[Any] = []

    def process(self, *commands: tuple[bytes, ...]) -> tuple[Process, Puppet]:
        machine = puppet(self.server.url, *commands)
        process = Process(self.world, self.network, "p", lambda _: machine, self.actions.append)
        process.start()
        return process, machine

    def run(self, duration_s: float) -> None:
        self.world.run_until(self.world.now + duration_s)


@pytest.fixture
def place() -> Place:
    return Place()


def test_a_disconnect_while_connecting_leaves_no_connection_behind(place: Place) -> None:
    process, machine = place.process()
    process.handle(Do((Disconnect("server"),)))
    place.run(1.0)
    assert machine.events == []
    assert place.network.connections("p") == []


def test_pushes_that_arrive_together_are_one_event(place: Place) -> None:
    process, machine = place.process((b"SUBSCRIBE", b"x"))
    place.run(0.1)
    process.pause(0.5)
    for number in range(5):
        place.server.inject(b"x", b"%d" % number)
    place.run(0.4)
    assert len(pushes(machine)) == 1
    place.run(0.2)
    assert [push[2] for push in pushes(machine)[-1].messages] == [b"0", b"1", b"2", b"3", b"4"]
    assert len(pushes(machine)) == 2


def test_a_pause_keeps_the_order_of_everything_on_a_link(place: Place) -> None:
    process, machine = place.process((b"SUBSCRIBE", b"x"))
    place.run(0.1)
    process.pause(1.0)
    process.handle("from the application")
    place.server.inject(b"x", b"1")
    place.run(0.1)
    place.server.stop()
    place.run(0.1)
    place.server.start()
    place.run(0.5)
    assert len(machine.events) == 2
    place.run(1.0)
    kinds: list[type[object]] = [type(event) for event in machine.events[2:]]
    assert kinds[-1] is Pushed and kinds[-2] is LinkUp
    assert kinds.index(LinkDown) < kinds.index(LinkUp)
    assert "from the application" in machine.events


def test_a_pause_without_a_duration_lasts_until_it_is_ended(place: Place) -> None:
    process, machine = place.process((b"SUBSCRIBE", b"x"))
    place.run(0.1)
    process.pause()
    place.server.inject(b"x", b"1")
    place.run(100.0)
    assert len(pushes(machine)) == 1
    process.resume()
    assert len(pushes(machine)) == 2


def test_a_machine_that_does_not_move_its_deadline_is_found_out(place: Place) -> None:
    process, machine = place.process()
    machine.wants_tick_at = 0.1

    def want_it_again(event: Any) -> list[Any]:
        machine.wants_tick_at = 0.1
        return []

    machine.answer = want_it_again
    process.handle(Do(()))
    with pytest.raises(MachineFailed, match="does not move its deadline"):
        place.run(5.0)


def test_a_crash_ends_everything_and_a_restart_makes_a_new_machine(place: Place) -> None:
    incarnations: list[int] = []

    def make(incarnation: int) -> Puppet:
        incarnations.append(incarnation)
        return puppet(place.server.url, (b"SUBSCRIBE", b"x"))

    process = Process(place.world, place.network, "p", make, place.actions.append)
    process.start()
    place.run(0.1)
    first = process.machine
    assert isinstance(first, Puppet)
    events = len(first.events)
    process.crash()
    process.handle("lost")
    place.run(0.1)
    assert len(first.events) == events and place.server.subscribers(b"x") == []
    process.start()
    place.run(0.1)
    assert process.machine is not first and place.server.subscribers(b"x") == ["p"]
    assert len(set(incarnations)) == 2
