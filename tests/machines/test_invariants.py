"""The invariants of the client's machines: each check notices a broken record, and shows the latest events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from dynamoth.machine.events import LinkDown, Pushed
from dynamoth.machine.outbox import Outbox
from dynamoth.plan.plan import Location
from dynamoth_client.machines.patterns.subscription import PatternSubscription
from dynamoth_client.machines.publisher.channels import PublishedChannel
from dynamoth_client.machines.publisher.records import PublisherServer
from dynamoth_client.machines.publisher.waiting import Waiting
from dynamoth_client.machines.register import State
from dynamoth_client.machines.subscriber.listening import Listening
from dynamoth_client.machines.subscriber.subscription import Place, Subscription
from dynamoth_sim.world.invariants import Checker
from tests.machines.helpers import C, message
from tests.machines.listener import Listener
from tests.machines.publisher import Publisher
from tests.machines.test_patterns import Matcher, P


def subscribed() -> tuple[Any, Subscription]:
    listener = Listener().confirmed()
    machine = cast("Any", listener.subscriber)
    return machine, machine._register.current[C]


def target(subscription: Subscription) -> Place:
    return next(iter(subscription.targets.values()))


BROKEN_SUBSCRIBERS: tuple[Callable[[Any, Subscription], object], ...] = (
    lambda machine, each: setattr(each, "state", State.JOINING),
    lambda machine, each: setattr(each, "state", State.ENDING),
    lambda machine, each: setattr(each, "subscribe_acks_pending", 1),
    lambda machine, each: each.targets.clear(),
    lambda machine, each: setattr(target(each), "verified_epoch", -1),
    lambda machine, each: setattr(target(each), "location", Location("s2", C)),
    lambda machine, each: each.join(Location("s3", C)),
    lambda machine, each: setattr(each, "leaving", dict(each.targets)),
    lambda machine, each: setattr(each, "early", [b"x"]),
    lambda machine, each: machine._listening.links["s1"].places.clear(),
    lambda machine, each: setattr(machine._listening.links["s1"], "up", False),
    lambda machine, each: machine._listening.unannounced.update({"s1": ({}, [])}),
    lambda machine, each: machine._plan.unpin(C, 100.0),
    lambda machine, each: setattr(machine._messages._held, "size_bytes", 1),
)


@pytest.mark.parametrize("break_it", BROKEN_SUBSCRIBERS)
def test_a_broken_subscriber_is_noticed(break_it: Callable[[Any, Subscription], object]) -> None:
    machine, subscription = subscribed()
    machine.check()
    break_it(machine, subscription)
    with pytest.raises(AssertionError):
        machine.check()


def test_a_wrong_count_of_held_bytes_is_noticed() -> None:
    machine, subscription = subscribed()
    for number in (1, 3):
        machine.handle(_pushed(number), 100.0)
    machine.check()
    stream = subscription.sequences.streams[7]
    assert stream.held
    stream.held_bytes += 1
    with pytest.raises(AssertionError, match="wrong bytes"):
        machine.check()


def _pushed(number: int) -> Pushed:
    return Pushed("s1", [[b"message", C, message(number)]])


# Patterns.


def matching() -> tuple[Any, PatternSubscription]:
    machine = cast("Any", Matcher().confirmed().patterns)
    return machine, machine._register.current[P]


BROKEN_PATTERNS: tuple[Callable[[Any, PatternSubscription], object], ...] = (
    lambda machine, each: each.places.pop("s2"),
    lambda machine, each: each.places["s1"].missing.add(each.names[0]),
    lambda machine, each: setattr(each, "names_bytes", 1),
    lambda machine, each: setattr(machine._links["s1"], "up", False),
    lambda machine, each: setattr(machine, "_idle_since", 100.0),
    lambda machine, each: machine._to_read.update({"s1": None}),
    lambda machine, each: machine._messages.remove(each),
)


@pytest.mark.parametrize("break_it", BROKEN_PATTERNS)
def test_a_broken_pattern_is_noticed(break_it: Callable[[Any, PatternSubscription], object]) -> None:
    machine, subscription = matching()
    machine.check()
    break_it(machine, subscription)
    with pytest.raises((AssertionError, KeyError)):
        machine.check()


# The publisher.


def publishing() -> tuple[Any, PublishedChannel, PublisherServer]:
    """Return a publisher of a confirmed channel, with one message that is not answered."""
    publisher = Publisher()
    publisher.publish()
    publisher.answer(publisher.up("s1"))
    publisher.publish()
    machine = cast("Any", publisher.publisher)
    return machine, machine._channels.by_name[C], machine._servers["s1"]


def _first(server: PublisherServer) -> Waiting:
    waiting = server.waiting[0]
    assert isinstance(waiting, Waiting)
    return waiting


def _forget_sent(outbox: Outbox) -> None:
    cast("Any", outbox)._sent = 5


BROKEN_PUBLISHERS: tuple[Callable[[PublishedChannel, PublisherServer], object], ...] = (
    lambda channel, server: setattr(channel, "floor", 9),
    lambda channel, server: setattr(channel, "plain", True),
    lambda channel, server: setattr(channel, "physical", b"other"),
    lambda channel, server: setattr(channel, "left", ("s1",) * 9),
    lambda channel, server: setattr(server, "up", False),
    lambda channel, server: server.waiting.clear(),
    lambda channel, server: server.commands.append((b"PUBLISH", C, b"x")),
    lambda channel, server: setattr(_first(server), "due_at", 1e9),
    lambda channel, server: _first(server).request(-1),
    lambda channel, server: _forget_sent(server.outbox),
)


@pytest.mark.parametrize("break_it", BROKEN_PUBLISHERS)
def test_a_broken_publisher_is_noticed(break_it: Callable[[PublishedChannel, PublisherServer], object]) -> None:
    machine, channel, server = publishing()
    machine.check()
    assert channel.direct_server is server and server.waiting, "what is broken below is in use"
    break_it(channel, server)
    with pytest.raises(AssertionError):
        machine.check()


# Who checks.


def test_code_that_forgets_a_place_fails_its_test_with_the_latest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Listening, subscription: Subscription, place: Place, now: float) -> None:
        subscription.leave(place.location)  # and the link still lists it

    monkeypatch.setattr(Listening, "forget", forget)
    listener = Listener()
    listener.subscribe()
    with pytest.raises(AssertionError, match=r"an invariant is broken: .*\n(.*\n)*.*Unsubscribe"):
        listener.unsubscribe()


def test_an_invariant_is_checked_after_every_so_many_events() -> None:
    class Broken:
        def check(self) -> None:
            raise AssertionError("of course")

    seldom, never = Checker(Broken(), every=3), Checker(Broken(), every=0)
    for _ in range(2):
        seldom.after(LinkDown("s1", "gone"))
        never.after(LinkDown("s1", "gone"))
    with pytest.raises(AssertionError, match="of course"):
        seldom.after(LinkDown("s1", "gone"))
    never.after(LinkDown("s1", "gone"))
