"""The invariants of the client's machines: each check notices a broken record, and shows the latest events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from dynamoth.machine.events import LinkDown, LinkUp, Pushed, Replied, Send, Start
from dynamoth.machine.outbox import Outbox
from dynamoth.plan.plan import Location
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.patterns.events import SubscribePatterns
from dynamoth_client.machines.patterns.machine import PatternMachine
from dynamoth_client.machines.patterns.subscription import PatternSubscription
from dynamoth_client.machines.publisher.channels import PublishedChannel
from dynamoth_client.machines.publisher.events import Publish
from dynamoth_client.machines.publisher.machine import PublisherMachine
from dynamoth_client.machines.publisher.records import PublisherServer
from dynamoth_client.machines.publisher.waiting import Waiting
from dynamoth_client.machines.register import State
from dynamoth_client.machines.subscriber.listening import Listening
from dynamoth_client.machines.subscriber.subscription import Place, Subscription
from dynamoth_sim.world.checker import Checker
from tests.machines.helpers import PLAN_0, RUN, C, Subject, entry_reply, header_reply, message, tagged
from tests.machines.listener import Listener

P = b"news.*"


def subscribed() -> tuple[Any, Subscription]:
    listener = Listener().confirmed()
    machine = cast("Any", listener.subscriber)
    return machine, machine._register.current[C]


def target(subscription: Subscription) -> Place:
    return next(iter(subscription.targets.values()))


def _join_elsewhere(subscription: Subscription) -> None:
    subscription.join(Location("s3", C))


def _leave_and_stay(subscription: Subscription) -> None:
    subscription.leaving = dict(subscription.targets)


def _keep_one(subscription: Subscription) -> None:
    subscription.early = [b"x"]


BROKEN_SUBSCRIPTIONS: tuple[Callable[[Subscription], None], ...] = (
    lambda each: setattr(each, "state", State.JOINING),
    lambda each: setattr(each, "state", State.ENDING),
    lambda each: setattr(each, "subscribe_acks_pending", 1),
    lambda each: each.targets.clear(),
    lambda each: setattr(target(each), "verified_epoch", -1),
    lambda each: setattr(target(each), "location", Location("s2", C)),
    _join_elsewhere,
    _leave_and_stay,
    _keep_one,
)


@pytest.mark.parametrize("break_it", BROKEN_SUBSCRIPTIONS)
def test_a_broken_subscription_is_noticed(break_it: Callable[[Subscription], None]) -> None:
    machine, subscription = subscribed()
    machine.check()
    break_it(subscription)
    with pytest.raises(AssertionError):
        machine.check()


def _forget_place(machine: Any) -> None:
    machine._listening.links["s1"].places.clear()


def _link_is_down(machine: Any) -> None:
    machine._listening.links["s1"].up = False


def _announce_late(machine: Any) -> None:
    machine._listening.unannounced["s1"] = ({}, [])


def _unpin(machine: Any) -> None:
    machine._plan.unpin(C, 100.0)


def _hold_more(machine: Any) -> None:
    machine._messages._held.size_bytes += 1


@pytest.mark.parametrize("break_it", [_forget_place, _link_is_down, _announce_late, _unpin, _hold_more])
def test_a_broken_subscriber_is_noticed(break_it: Callable[[Any], None]) -> None:
    machine, _ = subscribed()
    break_it(machine)
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
    subject = Subject(PatternMachine(LocalPlan(PLAN_0)))
    actions = subject.tell(Start(), SubscribePatterns((P,)), *(LinkUp(server, RUN) for server in ("s1", "s2", "s3")))
    machine = cast("Any", subject.machine)
    subscription: PatternSubscription = machine._register.current[P]
    for send in tagged(actions, "header"):
        for name in subscription.names:
            machine.handle(_confirmed(send.link, name), 100.0)
        machine.handle(Replied(send.link, send.tag, header_reply(PLAN_0)), 100.0)
    assert subscription.state is State.LISTENING
    return machine, subscription


def _confirmed(link: str, name: bytes) -> Pushed:
    return Pushed(link, [[b"psubscribe", name, 1]])


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
    subject = Subject(PublisherMachine(7, LocalPlan(PLAN_0)))
    actions = subject.tell(Start(), Publish(0, C, b"x"), LinkUp("s1", RUN))
    for send in actions:
        if isinstance(send, Send) and send.tag is not None:
            read = [b"agents", 1] if send.args[0] == b"PUBSUB" else entry_reply(PLAN_0, C)
            subject.tell(Replied("s1", send.tag, 2 if send.args[0] == b"PUBLISH" else read))
    subject.tell(Publish(1, C, b"y"))
    machine = cast("Any", subject.machine)
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
