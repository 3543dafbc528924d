"""How a broker speaks with coordinators and operators: events in, actions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dynamoth.edge.control import (
    BrokerReport,
    CandidatesOffer,
    CandidatesRequest,
    EdgeMessage,
    MoveEnd,
    MovesEnded,
    MovesRequest,
    OpenBrokers,
    Stamp,
    pack_edge,
    unpack_edge,
)
from dynamoth.edge.frames import Connect as ConnectFrame
from dynamoth.edge.frames import Connected, Error, Leave, Move, SubscriptionRequest
from dynamoth.edge.interests import channel_interest
from dynamoth.edge.tickets import KEY_BYTES, make_ticket
from dynamoth.machine.events import Connect, ErrorReply, LinkDown, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.names import (
    BROKERS_CHANNEL,
    COORDINATOR_CHANNEL,
    OPERATOR_EDGE_CHANNEL,
    broker_channel,
    operator_inbox,
)
from dynamoth.protocol.control import AdminReply, AdminRequest, pack_control, unpack_control
from dynamoth_broker.control import OPEN_BROKERS_S
from dynamoth_broker.edge_links import RESUBSCRIBE_S, SUBSCRIBE, TAG
from dynamoth_broker.events import (
    BrokerAction,
    BrokerEvent,
    BrokerOptions,
    ChannelConfirmed,
    Closed,
    ControlLinkChanged,
    Grant,
    MoveSession,
    Noted,
    Opened,
    Publications,
    Received,
    ResourcesMeasured,
    Stop,
    Transmit,
)
from dynamoth_broker.machine import BrokerMachine

SERVERS = {"s1": "redis://s1", "s2": "redis://s2", "s3": "redis://s3"}
LINKS = [f"control:{id_}" for id_ in SERVERS]
HERE = "wss://b1/connect"
THERE = "wss://b2/connect"
ELSEWHERE = "wss://b9/connect"

OPTIONS = BrokerOptions(
    id="b1",
    url=HERE,
    control=SERVERS,
    alternates=(ELSEWHERE,),
    capacity_bytes_per_s=10_000,
    move_timeout_s=5.0,
    ping_s=1000.0,
)


class Harness:
    """A broker whose links are all up, in virtual time."""

    def __init__(self, options: BrokerOptions = OPTIONS) -> None:
        self.machine = BrokerMachine(options, 99)
        self.now = 0.0
        self.frames: list[tuple[Any, Any]] = []
        #: What it told coordinators, by link, and operators.
        self.told: list[tuple[str, Stamp, EdgeMessage]] = []
        self.replies: list[AdminReply] = []
        self._number = 0
        self.started = self.do(Start())
        for link in LINKS:
            if options.control:
                self.do(LinkUp(link))

    def do(self, event: BrokerEvent) -> list[BrokerAction]:
        actions = self.machine.handle(event, self.now)
        self.machine.check()
        for action in actions:
            match action:
                case Transmit(connection, frame):
                    self.frames.append((connection, frame))
                case Send(link, (b"PUBLISH", channel, data)) if channel == COORDINATOR_CHANNEL:
                    assert isinstance(data, bytes)
                    self.told.append((link, *unpack_edge(data)))
                case Send(_, (b"PUBLISH", channel, data)):
                    assert isinstance(data, bytes)
                    reply = unpack_control(data)
                    assert isinstance(reply, AdminReply) and channel == operator_inbox(reply.request)
                    self.replies.append(reply)
                case _:
                    pass
        return actions

    def run(self, duration_s: float) -> None:
        end = self.now + duration_s
        while (deadline := self.machine.deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.do(Tick())
        self.now = end

    def open(self, name: str, channels: Sequence[str] = (), user: str = "") -> None:
        subs = tuple(SubscriptionRequest(ref, channel_interest(channel)) for ref, channel in enumerate(channels, 1))
        self.do(Opened(name, ConnectFrame(name, subs=subs), Grant(user=user)))
        for channel in channels:
            self.do(ChannelConfirmed(channel.encode()))

    def coordinator(self, message: EdgeMessage, link: str = LINKS[0], stamp: Stamp | None = None) -> Stamp:
        if stamp is None:
            self._number += 1
            stamp = Stamp(5, self._number)
        channel = BROKERS_CHANNEL if isinstance(message, OpenBrokers) else broker_channel("b1")
        self.do(Pushed(link, [[b"message", channel, pack_edge(stamp, message)]]))
        return stamp

    def operator(self, command: str, target: str = "b1", number: int | None = None, **arguments: Any) -> AdminReply:
        self._number += 1
        request = AdminRequest(number or self._number, command, {"target": target, **arguments})
        before = len(self.replies)
        self.do(Pushed(LINKS[1], [[b"message", OPERATOR_EDGE_CHANNEL, pack_control(request)]]))
        assert len(self.replies) == before + 1, "one answer"
        return self.replies[-1]

    def asked_to_move(self) -> dict[Any, tuple[str, ...]]:
        return {connection: frame.to for connection, frame in self.frames if isinstance(frame, Move)}

    def ends(self) -> dict[str, MoveEnd]:
        self.run(0.3)
        return {user: end for _, _, told in self.told if isinstance(told, MovesEnded) for user, end in told.ends}

    def reports(self) -> list[BrokerReport]:
        return [told for _, _, told in self.told if isinstance(told, BrokerReport)]


@pytest.fixture
def broker() -> Harness:
    return Harness()


def result_of(reply: AdminReply) -> Mapping[str, Any]:
    assert reply.error is None, reply.error
    return reply.result


def test_it_connects_to_all_servers_and_listens_there(broker: Harness) -> None:
    assert [action for action in broker.started if isinstance(action, Connect)] == [
        Connect(link, url) for link, url in zip(LINKS, SERVERS.values(), strict=True)
    ]
    channels = (broker_channel("b1"), BROKERS_CHANNEL, OPERATOR_EDGE_CHANNEL)
    actions = broker.do(LinkUp(LINKS[0]))
    assert actions == [ControlLinkChanged(LINKS[0], None), Send(LINKS[0], (b"SUBSCRIBE", *channels), (TAG, SUBSCRIBE))]


def test_without_servers_nothing_is_said_and_all_else_goes_on() -> None:
    alone = Harness(BrokerOptions(id="b1", alternates=(ELSEWHERE,)))
    alone.open("u1", ["news"])
    alone.run(30.0)
    assert alone.started == [] and alone.told == []
    assert [frame.alternates for _, frame in alone.frames if isinstance(frame, Connected)] == [(ELSEWHERE,)]


def test_a_report_goes_through_two_servers_and_others_each_time(broker: Harness) -> None:
    broker.run(3.05)
    by_stamp: dict[Stamp, set[str]] = {}
    for link, stamp, told in broker.told:
        assert isinstance(told, BrokerReport) and told.broker == "b1" and told.url == HERE
        by_stamp.setdefault(stamp, set()).add(link)
    assert [stamp.number for stamp in by_stamp] == [1, 2, 3]
    assert all(len(links) == 2 for links in by_stamp.values())
    assert len({frozenset(links) for links in by_stamp.values()}) == 3


def test_a_report_goes_through_the_servers_that_are_up(broker: Harness) -> None:
    assert broker.do(LinkDown(LINKS[0], "gone")) == [ControlLinkChanged(LINKS[0], "gone")]
    assert broker.do(LinkDown(LINKS[0], "gone")) == [], "said once"
    broker.do(LinkDown(LINKS[1], "gone"))
    broker.run(2.05)
    assert [link for link, _, _ in broker.told] == [LINKS[2], LINKS[2]]
    assert broker.machine.control.faults == {"s1": "gone", "s2": "gone"}


def test_a_server_that_refuses_is_asked_again(broker: Harness) -> None:
    refusal = Replied(LINKS[0], (TAG, SUBSCRIBE), ErrorReply("NOPERM no"))
    assert broker.do(refusal) == [ControlLinkChanged(LINKS[0], "NOPERM no")]
    broker.now += RESUBSCRIBE_S
    again = [action for action in broker.do(Tick()) if isinstance(action, Send) and action.args[0] == b"SUBSCRIBE"]
    assert [action.link for action in again] == [LINKS[0]]
    confirmed = broker.do(Pushed(LINKS[0], [[b"subscribe", BROKERS_CHANNEL, 1]]))
    assert confirmed == [ControlLinkChanged(LINKS[0], None)] and broker.machine.control.faults == {}


def test_a_report_has_the_rates_and_loads(broker: Harness) -> None:
    for number in range(4):
        broker.open(f"u{number}", ["news", "idle"])
    broker.open("v", ["quiet"])
    for _ in range(100):
        broker.do(Publications([(b"news", b"x" * 50), (b"quiet", b"y" * 10), (b"unknown", b"z")]))
        broker.run(0.1)
    report = broker.reports()[-1]
    news, quiet = channel_interest("news").id, channel_interest("quiet").id
    assert report.users == 5
    assert report.interests.ids == (news, quiet), "the busiest first, none without a rate"
    assert report.interests.users == (4, 1)
    assert report.interests.rates == pytest.approx((500.0, 100.0), rel=0.02)
    assert report.inbound_bytes_per_s == pytest.approx(600.0, rel=0.02)
    assert report.load_bytes_per_s == pytest.approx(500 * 5 + 100 * 2, rel=0.02)
    assert sum(report.user_loads) == 5 and report.user_loads[9] == 4, "four between 256 and 512 bytes/s"


def test_a_rate_is_right_from_the_first_second_and_ends_by_itself(broker: Harness) -> None:
    broker.open("u", ["news"])
    for _ in range(10):
        broker.do(Publications([(b"news", b"x" * 100)]))
        broker.run(0.1)
    broker.run(0.05)
    assert broker.reports()[-1].interests.rates == pytest.approx((1000.0,), rel=0.01)
    broker.run(10.0)
    assert broker.reports()[-1].interests.rates[0] < 700
    broker.run(200.0)
    assert broker.reports()[-1].interests.ids == ()


def test_the_tightest_resource_is_reported(broker: Harness) -> None:
    broker.do(ResourcesMeasured(0.7))
    broker.run(1.05)
    assert broker.reports()[-1].other_ratio_max == 0.7


def test_a_report_says_where_the_broker_is_how_often_it_reports_and_hashes_of_its_settings() -> None:
    def settings(**changed: Any) -> BrokerReport:
        logs = {"l1": "redis://ann:secret@10.0.0.1:6379", "l2": "redis://10.0.0.2:6379"}
        values: dict[str, Any] = {"logs": logs, "history": ("news.*", "orders.*"), **changed}
        broker = Harness(replace(OPTIONS, location=(48.2, 16.4), report_s=0.5, **values))
        return broker.machine.control.report()

    report = settings()
    assert (report.location, report.report_s, len(report.logs_hash)) == ((48.2, 16.4), 0.5, 8)
    same = settings(logs={"l2": "redis://10.0.0.2:6379", "l1": "redis://10.0.0.1:6379"}, history=("orders.*", "news.*"))
    assert (same.logs_hash, same.history_hash) == (report.logs_hash, report.history_hash), "order, credentials"
    other_log = settings(logs={"l1": "redis://10.0.0.1:6379"})
    assert other_log.logs_hash != report.logs_hash and other_log.history_hash == report.history_hash
    assert settings(history=("news.*",)).history_hash != report.history_hash


def test_a_broker_without_a_url_or_about_to_end_admits_nobody(broker: Harness) -> None:
    nowhere = Harness(BrokerOptions(id="b1", control=SERVERS))
    nowhere.run(1.05)
    assert not nowhere.reports()[-1].is_admitting
    broker.run(1.05)
    assert broker.reports()[-1].is_admitting
    broker.do(Stop())
    broker.run(1.05)
    assert not broker.reports()[-1].is_admitting


# Candidates and moves.


def offers(broker: Harness) -> list[CandidatesOffer]:
    return [told for _, _, told in broker.told if isinstance(told, CandidatesOffer)]


def test_candidates_are_those_who_have_been_here_for_long_and_do_not_move(broker: Harness) -> None:
    for name in ("a", "b", "c"):
        broker.open(name, ["news"], user="ann" if name == "c" else "")
    broker.run(10.0)
    broker.open("new", ["news"])
    broker.coordinator(MovesRequest(((THERE,),), (("a", 0),)))
    broker.coordinator(CandidatesRequest(7, 1e9, 10, 5.0))
    offer = offers(broker)[0]
    assert offer.request == 7 and offer.candidates.broker == "b1"
    assert {candidate.user for candidate in offer.candidates.users} == {"b", "c@ann"}
    assert offer.candidates.interests.ids == (channel_interest("news").id,)
    assert offer.candidates.interests.users == (4,)


def test_a_copy_of_a_request_is_answered_once(broker: Harness) -> None:
    broker.open("a", ["news"])
    stamp = broker.coordinator(CandidatesRequest(7, 1e9, 10, 0.0))
    told = len(broker.told)
    broker.coordinator(CandidatesRequest(7, 1e9, 10, 0.0), LINKS[2], stamp)
    assert len(broker.told) == told == 2, "two copies of one answer"


def test_an_answer_is_bounded_in_bytes() -> None:
    broker = Harness(BrokerOptions(id="b1", url=HERE, control=SERVERS))
    for number in range(4000):
        broker.open(f"u{number}", [], user="x" * 400)
    broker.coordinator(CandidatesRequest(1, 1e9, 10_000, 0.0))
    assert 100 < len(offers(broker)[0].candidates.users) < 4000


def test_how_moves_end_is_reported_together(broker: Harness) -> None:
    for name in ("leaves", "dies", "stays", "twice"):
        broker.open(name, ["news"], user="ann" if name == "leaves" else "")
    broker.do(Closed("unrelated"))
    moves = (("leaves@ann", 0), ("dies", 0), ("stays", 1), ("twice", 0), ("twice", 0), ("nobody", 0), ("leaves", 0))
    broker.coordinator(MovesRequest(((THERE,), (ELSEWHERE, THERE)), moves))
    assert broker.asked_to_move() == {
        "leaves": (THERE,),
        "dies": (THERE,),
        "stays": (ELSEWHERE, THERE),
        "twice": (THERE,),
    }
    broker.do(Received("leaves", Leave()))
    broker.do(Closed("dies"))
    early = broker.ends()
    assert early == {
        "leaves@ann": MoveEnd.LEFT,
        "dies": MoveEnd.GONE,
        "twice": MoveEnd.REFUSED,
        "nobody": MoveEnd.GONE,
        "leaves": MoveEnd.GONE,
    }
    broker.run(5.0)
    assert broker.ends()["stays"] is MoveEnd.DEADLINE


def test_a_user_whom_a_drain_asks_again_gets_the_new_time(broker: Harness) -> None:
    broker.open("u", [])
    broker.coordinator(MovesRequest(((THERE,),), (("u", 0),)))
    broker.run(3.0)
    broker.operator("drain")
    broker.run(2.5)
    assert broker.ends() == {}
    broker.do(Received("u", Leave()))
    assert broker.ends() == {"u": MoveEnd.LEFT}


# Where users go.


def test_a_coordinator_s_word_replaces_the_alternates_for_a_while(broker: Harness) -> None:
    broker.coordinator(OpenBrokers((HERE, THERE)))
    broker.open("a")
    broker.run(OPEN_BROKERS_S + 0.1)
    broker.open("b")
    assert [frame.alternates for _, frame in broker.frames if isinstance(frame, Connected)] == [(THERE,), (ELSEWHERE,)]


def test_a_coordinator_that_knows_nobody_else_does_not_hide_the_alternates(broker: Harness) -> None:
    broker.coordinator(OpenBrokers((HERE,)))
    broker.open("a")
    assert [frame.alternates for _, frame in broker.frames if isinstance(frame, Connected)] == [(ELSEWHERE,)]


# Admission.


def codes(broker: Harness, name: str) -> list[str]:
    return [frame.code for connection, frame in broker.frames if connection == name and isinstance(frame, Error)]


def make_busy(broker: Harness) -> None:
    """Give it more traffic than its capacity."""
    broker.open("first", ["news"])
    for _ in range(5):
        broker.do(Publications([(b"news", bytes(20_000))]))
        broker.run(1.0)
    assert broker.machine.control.traffic_ratio > 1


def test_a_broker_with_too_much_traffic_takes_only_users_who_were_moved_there(broker: Harness) -> None:
    keys = [bytes([number]) * KEY_BYTES for number in range(3)]
    make_busy(broker)
    broker.open("newcomer")
    assert codes(broker, "newcomer") == ["full"]
    for key in keys:
        broker.coordinator(OpenBrokers((HERE, THERE), key))
    for name, ticket in (
        ("moved", make_ticket(keys[2], "", "moved")),
        ("late", make_ticket(keys[1], "", "late")),
        ("too-late", make_ticket(keys[0], "", "too-late")),
        ("thief", make_ticket(keys[2], "", "moved")),
    ):
        broker.do(Opened(name, ConnectFrame(name, ticket=ticket), Grant()))
    assert [codes(broker, name) for name in ("moved", "late", "too-late", "thief")] == [[], [], ["full"], ["full"]]


def test_a_key_that_is_announced_again_is_one_key(broker: Harness) -> None:
    keys = [bytes([number]) * KEY_BYTES for number in range(2)]
    make_busy(broker)
    for key in (keys[0], keys[1], keys[1], keys[1]):
        broker.coordinator(OpenBrokers((THERE,), key))
    broker.do(Opened("late", ConnectFrame("late", ticket=make_ticket(keys[0], "", "late")), Grant()))
    assert codes(broker, "late") == []


def test_who_is_asked_to_move_gets_a_ticket_of_the_latest_key(broker: Harness) -> None:
    broker.open("a", user="ada")
    broker.do(MoveSession("a", (THERE,)))
    keys = [bytes([number]) * KEY_BYTES for number in range(2)]
    for key in keys:
        broker.coordinator(OpenBrokers((THERE,), key))
    broker.do(MoveSession("a", (THERE,)))
    tickets = [frame.ticket for _, frame in broker.frames if isinstance(frame, Move)]
    assert tickets == [None, make_ticket(keys[1], "ada", "a")]


# Operators.


def test_status_shows_what_the_broker_is(broker: Harness) -> None:
    broker.open("a", ["news"])
    status = result_of(broker.operator("status", "*"))
    expected = {"role": "broker", "broker": "b1", "url": HERE, "sessions": 1, "interests": 1, "draining": False}
    assert expected.items() <= status.items()
    assert (status["coordinated"], status["alternates"], status["unreachable"]) == (False, [ELSEWHERE], {})
    assert status["unusable_logs"] == {}, "there are none"


def test_drain_and_undrain(broker: Harness) -> None:
    for number in range(20):
        broker.open(f"u{number}")
    assert result_of(broker.operator("drain", rate=10.0))["draining"]
    broker.run(1.05)
    assert 9 <= len(broker.asked_to_move()) <= 11 and set(broker.asked_to_move().values()) == {(ELSEWHERE,)}
    assert not result_of(broker.operator("undrain"))["draining"]
    asked = len(broker.asked_to_move())
    broker.run(5.0)
    assert len(broker.asked_to_move()) == asked


def test_a_drain_to_nowhere_is_refused() -> None:
    broker = Harness(BrokerOptions(id="b1", url=HERE, control=SERVERS))
    broker.open("u")
    reply = broker.operator("drain")
    assert reply.error is not None and "there is no other broker" in reply.error
    assert not broker.machine.is_draining
    assert result_of(broker.operator("drain", force=True))["draining"]
    broker.run(2.0)
    assert broker.asked_to_move() == {} and len(broker.machine.sessions) == 1


def test_what_operators_ask_for_is_noted_once_for_the_log(broker: Harness) -> None:
    broker.open("u")
    notes: list[Noted] = []
    for number, command, arguments in (
        (50, "drain", {"rate": 10.0}),
        (50, "drain", {"rate": 10.0}),
        (51, "undrain", {}),
        (52, "move", {"session": "u", "to": [THERE]}),
        (53, "status", {}),
        (54, "move", {"session": "nobody", "to": [THERE]}),
    ):
        request = AdminRequest(number, command, {"target": "b1", **arguments})
        actions = broker.do(Pushed(LINKS[1], [[b"message", OPERATOR_EDGE_CHANNEL, pack_control(request)]]))
        notes += [action for action in actions if isinstance(action, Noted)]
    assert notes == [
        Noted("an operator drains this broker", fields={"users": 1, "rate": 10.0, "forced": False}),
        Noted("an operator lets this broker take users again"),
        Noted("an operator moves a user", fields={"session": "u", "to": [THERE]}),
    ]


def test_a_user_is_moved_once_for_a_request_that_comes_twice(broker: Harness) -> None:
    broker.open("u")
    first = broker.operator("move", "*", 50, session="u", to=[THERE])
    assert result_of(first)["here"]
    broker.do(Received("u", Leave()))
    assert broker.operator("move", "*", 50, session="u", to=[THERE]) == first
    assert len(broker.asked_to_move()) == 1
    assert not result_of(broker.operator("move", "*", session="nobody", to=[THERE]))["here"]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("fly", {}),
        ("drain", {"rate": 0}),
        ("drain", {"rate": True}),
        ("drain", {"rate": float("nan")}),
        ("move", {"session": 5, "to": [THERE]}),
        ("move", {"session": "u", "to": THERE}),
        ("move", {"session": "u", "to": [HERE]}),
        ("move", {"session": "u", "to": []}),
    ],
)
def test_a_wrong_request_is_refused(broker: Harness, command: str, arguments: dict[str, Any]) -> None:
    broker.open("u")
    reply = broker.operator(command, **arguments)
    assert reply.error is not None and reply.error.startswith("b1: ")
    assert broker.asked_to_move() == {} and not broker.machine.is_draining


def test_what_is_for_others_or_for_nobody_is_ignored(broker: Harness) -> None:
    broker.open("u")
    told = len(broker.told)
    request = pack_control(AdminRequest(3, "drain", {"target": "b2"}))
    for channel, data in (
        (OPERATOR_EDGE_CHANNEL, request),
        (OPERATOR_EDGE_CHANNEL, b"\x00"),
        (BROKERS_CHANNEL, b"\xc1"),
        (broker_channel("b1"), pack_edge(Stamp(1, 1), MovesEnded("b2", ()))),
    ):
        broker.do(Pushed(LINKS[0], [[b"message", channel, data], [b"subscribe", channel, 1]]))
    assert (broker.replies, len(broker.told), broker.machine.is_draining) == ([], told, False)
    assert broker.machine.counters["malformed"] == 3
