"""The links that brokers and coordinators share: what is sent where, what refusals do, and answers to operators."""

from __future__ import annotations

from collections import Counter

from dynamoth.edge.control import OpenBrokers, Stamp, pack_edge
from dynamoth.machine.events import Connect, ErrorReply, Send
from dynamoth.machine.timers import Timers
from dynamoth.names import operator_inbox
from dynamoth.protocol.control import AdminReply, AdminRequest, pack_control
from dynamoth_broker.edge_links import (
    NOT_REACHED,
    PUBLISH,
    RESUBSCRIBE_S,
    SUBSCRIBE,
    TAG,
    EdgeLinkAction,
    EdgeLinks,
    OperatorAnswers,
)
from dynamoth_broker.events import ControlLinkChanged

SERVERS = {"s1": "redis://s1", "s2": "redis://s2", "s3": "redis://s3"}
NOPERM = ErrorReply("NOPERM no")
LISTEN = Send("s1", (b"SUBSCRIBE", b"one", b"two"), (TAG, SUBSCRIBE))


class Owner:
    """The links of somebody, with its timers."""

    def __init__(self) -> None:
        self.timers: Timers[EdgeLinkAction] = Timers()
        self.counters: Counter[str] = Counter()
        self.links = EdgeLinks(SERVERS, (b"one", b"two"), 7, self.timers, self.counters, 10)

    def up(self, *links: str) -> None:
        for link in links or SERVERS:
            self.links.on_up(link)


def test_it_connects_and_listens_everywhere() -> None:
    owner = Owner()
    assert owner.links.connect() == [Connect(link, url) for link, url in SERVERS.items()]
    assert owner.links.faults == dict.fromkeys(SERVERS, NOT_REACHED)
    assert owner.links.on_up("s1") == [ControlLinkChanged("s1", None), LISTEN]
    assert owner.links.faults == dict.fromkeys(["s2", "s3"], NOT_REACHED)
    assert "s1" in owner.links and "s4" not in owner.links and len(owner.links) == 3


def test_a_lost_server_is_said_once() -> None:
    owner = Owner()
    owner.up()
    assert owner.links.on_down("s1", "gone") == [ControlLinkChanged("s1", "gone")]
    assert owner.links.on_down("s1", "gone") == []
    assert owner.links.on_down("s1", "still") == [ControlLinkChanged("s1", "still")]
    assert not owner.links.is_up("s1") and owner.links.is_up("s2")


def test_a_refused_subscription_is_asked_for_again_until_it_is_confirmed() -> None:
    owner = Owner()
    owner.up()
    assert owner.links.on_reply("s1", SUBSCRIBE, NOPERM, 0.0) == [ControlLinkChanged("s1", "NOPERM no")]
    assert owner.timers.run_due(RESUBSCRIBE_S - 0.1) == []
    assert owner.timers.run_due(RESUBSCRIBE_S) == [LISTEN]
    assert owner.links.faults == {"s1": "NOPERM no"}, "until the server says something else"
    assert owner.links.on_reply("s1", SUBSCRIBE, NOPERM, RESUBSCRIBE_S) == [], "said once"
    assert owner.timers.run_due(2 * RESUBSCRIBE_S) == [LISTEN]
    assert owner.links.on_subscribed("s1") == [ControlLinkChanged("s1", None)]
    assert owner.links.on_subscribed("s1") == [] and owner.links.faults == {}
    assert owner.counters["control_refused"] == 2


def test_a_server_that_refuses_and_is_lost_is_asked_once_at_a_time() -> None:
    owner = Owner()
    owner.up()
    for at in (0.0, 1.0, 2.0):
        owner.links.on_reply("s1", SUBSCRIBE, NOPERM, at)
        owner.links.on_down("s1", "gone")
        owner.links.on_up("s1")
    assert len(owner.timers) == 1
    owner.links.on_down("s1", "gone")
    assert owner.timers.run_due(RESUBSCRIBE_S) == [] and len(owner.timers) == 0


def test_a_refused_message_is_a_fault_until_one_is_taken() -> None:
    owner = Owner()
    owner.up()
    assert owner.links.on_reply("s2", PUBLISH, NOPERM, 0.0) == [ControlLinkChanged("s2", "NOPERM no")]
    assert owner.links.on_subscribed("s2") == [], "that it listens says nothing about what it may say"
    assert owner.links.on_reply("s2", PUBLISH, 1, 0.0) == [ControlLinkChanged("s2", None)]
    assert len(owner.timers) == 0


def test_a_message_goes_through_two_servers_that_are_up_and_has_a_number() -> None:
    owner = Owner()
    assert owner.links.publish(b"c", OpenBrokers(())) == []
    owner.up("s1", "s3")
    sends = owner.links.publish(b"c", OpenBrokers(()))
    data = pack_edge(Stamp(7, 1), OpenBrokers(()))
    assert sends == [Send(link, (b"PUBLISH", b"c", data), (TAG, PUBLISH)) for link in ("s1", "s3")]
    owner.links.on_down("s1", "gone")
    data = pack_edge(Stamp(7, 2), OpenBrokers(()))
    assert owner.links.publish(b"c", OpenBrokers(())) == [Send("s3", (b"PUBLISH", b"c", data), (TAG, PUBLISH))]


def test_copies_are_dropped_and_what_cannot_be_read_is_counted() -> None:
    owner = Owner()
    data = pack_edge(Stamp(1, 1), OpenBrokers(("wss://b1",)))
    assert owner.links.read(data) == (Stamp(1, 1), OpenBrokers(("wss://b1",)))
    assert owner.links.read(data) is None and owner.links.read(b"\xc1") is None
    assert owner.counters["malformed"] == 1


# Operators.


def asked(request: AdminRequest) -> bytes:
    return pack_control(request)


def test_a_request_is_carried_out_once_and_answered_as_often_as_it_comes() -> None:
    answers, executed = OperatorAnswers(Counter()), list[AdminRequest]()
    request = AdminRequest(5, "status", {"target": "b1"})

    def execute(found: AdminRequest) -> tuple[AdminReply, list[str]]:
        executed.append(found)
        return AdminReply(found.request, {"n": len(executed)}), ["acted"]

    answer = (b"PUBLISH", operator_inbox(5), pack_control(AdminReply(5, {"n": 1})))
    assert answers.on_request("s1", asked(request), ("b1",), execute) == ["acted", Send("s1", answer, (TAG, PUBLISH))]
    assert answers.on_request("s2", asked(request), ("b1",), execute) == [Send("s2", answer, (TAG, PUBLISH))]
    assert executed == [request]
    assert answers.on_request("s1", asked(request), ("b2",), execute) == [], "it is for another one"


def test_a_request_whose_answer_is_to_come_is_not_carried_out_again() -> None:
    answers, executed = OperatorAnswers(Counter()), list[AdminRequest]()
    request = AdminRequest(5, "pause", {"target": "*"})

    def execute(found: AdminRequest) -> tuple[None, list[str]]:
        executed.append(found)
        return None, []

    for _ in range(2):
        assert answers.on_request("s1", asked(request), ("*",), execute) == []
    reply = AdminReply(5, {"done": True})
    late = answers.answer("s1", reply)
    assert answers.on_request("s1", asked(request), ("*",), execute) == [late] and executed == [request]
