"""The machine of an end user's client: events in, actions out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamoth.edge.frames import (
    Ack,
    Bye,
    Connect,
    Connected,
    Data,
    Error,
    Gap,
    Leave,
    Move,
    MovedIn,
    Ping,
    Pong,
    Published,
    PublishRequest,
    Refresh,
    Subscribe,
    Subscribed,
    SubscriptionRequest,
    Unsubscribe,
)
from dynamoth.edge.interests import Interest, channel_interest
from dynamoth.edge.publications import Position
from dynamoth.machine.events import Start
from dynamoth_user.machine.events import (
    AddSubscription,
    Close,
    CloseConnection,
    Confirmed,
    ConnectionClosed,
    ConnectionOpened,
    Deliver,
    DeliverGap,
    Failed,
    FrameReceived,
    Handled,
    Interrupted,
    NeedToken,
    OpenConnection,
    PublishEnded,
    PublishMessage,
    Refused,
    RemoveSubscription,
    SendFrame,
    Served,
    TokenReady,
    UserOptions,
)
from dynamoth_user.machine.machine import FINAL_CODES, UserMachine
from dynamoth_user.machine.migration import MOVE_FAILED, NORMAL
from tests.machines.helpers import Subject, only

EPOCH, LATER_EPOCH, LAST_EPOCH = 0xA, 0xB, 0xC
BEGINNING = Position(EPOCH, 0)
LOGGED = channel_interest("log.news")
LIVE = channel_interest("news")
URLS = ("wss://b1", "wss://b2")
P, Q = 1, 2
"""Publishers of LIVE."""

OPTIONS = UserOptions(urls=URLS, session="me", generation=100)
UP = Connected("me", "b1", ("wss://b2", "wss://b3"), 25.0, 1.0)


class User(Subject):
    """A user's machine, with brokers that answer when the test says so."""

    def __init__(self, options: UserOptions = OPTIONS, incarnation: int = 7) -> None:
        super().__init__(UserMachine(options, incarnation))

    @property
    def user(self) -> UserMachine:
        assert isinstance(self.machine, UserMachine)
        return self.machine

    def frame(self, number: int, *frames: Any) -> list[Any]:
        return self.tell(*(FrameReceived(number, frame) for frame in frames))

    def answer(self, connect: Connect, number: int, at: Position = BEGINNING) -> list[Any]:
        """Let a broker confirm what it was asked for: from where the user wants it, or ``at``."""
        actions = self.frame(number, UP)
        for wanted in connect.subs:
            position = None if wanted.interest == LIVE else wanted.since or at
            actions += self.frame(number, Subscribed(wanted.ref, wanted.interest.id, position))
        return actions

    def served(self, *interests: Interest, at: Position = BEGINNING, is_stored: bool = False) -> User:
        """Start, and be served over connection 1."""
        self.tell(Start(), *(AddSubscription(interest, None, is_stored) for interest in interests))
        self.answer(connect_in(self.tell(ConnectionOpened(1))), 1, at)
        return self

    def moving(self) -> list[Any]:
        """Let the serving broker ask for a move, and let the candidate, connection 2, confirm everything."""
        self.frame(1, Move(("wss://b2",), 0, 15_000))
        self.pass_time(0.001)
        return self.answer(connect_in(self.tell(ConnectionOpened(2))), 2)

    def data(self, number: int, *offsets: int) -> list[Any]:
        return self.frame(number, *(Data(LOGGED.id, b"m%d" % offset, offset) for offset in offsets))

    def live(self, number: int, *places: tuple[int, int]) -> list[Any]:
        return self.frame(number, *(Data(LIVE.id, b"%d:%d" % place, None, place) for place in places))

    @property
    def received(self) -> Position | None:
        return self.user.subscriptions[LOGGED.id].received


def connect_in(actions: list[Any]) -> Connect:
    [connect] = [each.frame for each in only(SendFrame, actions) if isinstance(each.frame, Connect)]
    return connect


def sent(actions: list[Any]) -> list[tuple[int, Any]]:
    return [(each.number, each.frame) for each in only(SendFrame, actions)]


def offsets(actions: list[Any]) -> list[int]:
    return [each.position.offset for each in only(Deliver, actions) if each.position is not None]


def payloads(actions: list[Any]) -> list[bytes]:
    return [each.payload for each in only(Deliver, actions)]


# Delivery.


def test_offsets_are_delivered_in_order_and_copies_are_dropped() -> None:
    user = User().served(LOGGED, at=Position(EPOCH, 4))
    assert user.data(1, 5, 6) == [
        Deliver(LOGGED, b"m5", Position(EPOCH, 5)),
        Deliver(LOGGED, b"m6", Position(EPOCH, 6)),
    ]
    assert user.data(1, 6, 5, 4) == []


def test_a_hole_is_asked_for_again_and_nothing_is_delivered_until_the_answer() -> None:
    user = User().served(LOGGED)
    user.data(1, 1)
    [(number, frame)] = sent(user.data(1, 3))
    assert (number, frame.request.since) == (1, Position(EPOCH, 1))
    assert user.data(1, 2, 3, 4) == []
    user.frame(1, Subscribed(frame.request.ref, LOGGED.id, Position(EPOCH, 1)))
    assert offsets(user.data(1, 2, 3)) == [2, 3]
    assert user.user.counters["offsets_missing"] == 1


def test_a_gap_moves_on_and_an_old_one_does_not_move_back() -> None:
    user = User().served(LOGGED)
    user.data(1, 1, 2)
    gap = Gap(LOGGED.id, "retention", 3, 6, Position(EPOCH, 6))
    assert user.frame(1, gap) == [DeliverGap(LOGGED, "retention", 3, 6, position=Position(EPOCH, 6))]
    assert user.frame(1, gap, replace(gap, position=Position(EPOCH, 4))) == []
    assert offsets(user.data(1, 6, 7)) == [7]


def test_a_new_life_of_the_log_is_a_gap_and_a_former_one_does_not_come_back() -> None:
    user = User().served(LOGGED)
    user.data(1, 1, 2)
    lost = Gap(LOGGED.id, "log_lost", 3, None, Position(LATER_EPOCH, 0))
    assert user.frame(1, lost) == [DeliverGap(LOGGED, "log_lost", 3, None, position=Position(LATER_EPOCH, 0))]
    assert offsets(user.data(1, 1)) == [1]
    assert user.frame(1, replace(lost, position=Position(EPOCH, 0))) == []
    assert user.data(1, 1, 2) == []  # of the former life
    assert user.received == Position(LATER_EPOCH, 1)


def test_data_before_the_confirmation_or_after_the_end_are_dropped() -> None:
    user = User().served(LIVE)
    assert user.data(1, 1) == []
    user.tell(AddSubscription(LOGGED))
    assert user.data(1, 1) == []
    assert sent(user.tell(RemoveSubscription(LIVE))) == [(1, Unsubscribe(LIVE.id))]
    assert user.live(1, (P, 1)) == []
    assert user.tell(RemoveSubscription(LIVE)) == []


def test_live_copies_are_dropped_by_publisher() -> None:
    user = User().served(LIVE)
    assert payloads(user.live(1, (P, 5), (P, 5), (Q, 1), (P, 4), (P, 6))) == [b"1:5", b"2:1", b"1:6"]
    assert payloads(user.frame(1, Data(LIVE.id, b"raw"), Data(LIVE.id, b"raw"))) == [b"raw", b"raw"]


def test_few_publishers_are_remembered() -> None:
    user = User(replace(OPTIONS, publishers_max=2)).served(LIVE)
    user.live(1, (1, 1), (2, 1), (1, 2), (3, 1))
    assert list(user.user.subscriptions[LIVE.id].numbers) == [1, 3]


# Positions.


def test_a_position_follows_the_handler_and_what_was_received_is_where_a_connection_goes_on() -> None:
    user = User().served(LOGGED)
    user.data(1, 1, 2, 3)
    assert user.user.positions() == {LOGGED.id: Position(EPOCH, 0)}
    user.tell(Handled(LOGGED, Position(EPOCH, 2)))
    assert user.user.positions() == {LOGGED.id: Position(EPOCH, 2)}
    user.tell(ConnectionClosed(1, 1006, "lost"))
    assert len(only(OpenConnection, user.pass_time(OPTIONS.backoff_s_min))) == 1
    [wanted] = connect_in(user.tell(ConnectionOpened(2))).subs
    assert wanted.since == Position(EPOCH, 3)


def test_acknowledgements_are_of_what_was_handled_and_come_together() -> None:
    user = User().served(LOGGED, is_stored=True)
    user.data(1, 1, 2, 3)
    assert sent(user.pass_time(2.0)) == []
    for offset in (1, 2):
        assert user.tell(Handled(LOGGED, Position(EPOCH, offset))) == []
    assert sent(user.pass_time(1.0)) == [(1, Ack({LOGGED.id: Position(EPOCH, 2)}))]
    user.tell(Handled(LOGGED, Position(EPOCH, 2)))
    assert sent(user.pass_time(1.0)) == []  # it was acknowledged


def test_only_stored_subscriptions_are_acknowledged() -> None:
    user = User().served(LOGGED)
    user.data(1, 1)
    user.tell(Handled(LOGGED, Position(EPOCH, 1)))
    assert sent(user.pass_time(2.0)) == []


def test_a_stored_subscription_begins_where_the_brokers_say_and_goes_on_from_what_was_received() -> None:
    user = User()
    user.tell(Start(), AddSubscription(LOGGED, None, True))
    first = connect_in(user.tell(ConnectionOpened(1)))
    assert first.subs == (SubscriptionRequest(1, LOGGED, None, is_stored=True),)
    user.answer(first, 1, Position(EPOCH, 4))
    user.data(1, 5)
    user.tell(ConnectionClosed(1, 1006, "lost"))
    user.pass_time(OPTIONS.backoff_s_min)
    [wanted] = connect_in(user.tell(ConnectionOpened(2))).subs
    assert (wanted.since, wanted.is_stored) == (Position(EPOCH, 5), True)


def test_what_was_handled_is_acknowledged_before_the_subscription_ends() -> None:
    user = User().served(LOGGED, is_stored=True)
    user.data(1, 1)
    user.tell(Handled(LOGGED, Position(EPOCH, 1)))
    ending = sent(user.tell(RemoveSubscription(LOGGED)))
    assert ending == [(1, Ack({LOGGED.id: Position(EPOCH, 1)})), (1, Unsubscribe(LOGGED.id))]


def test_a_stored_subscription_of_which_something_is_lost_begins_with_a_gap() -> None:
    user = User()
    user.tell(Start(), AddSubscription(LOGGED, None, True))
    lost = Gap(LOGGED.id, "retention", 5, 7, Position(EPOCH, 7))
    for number in (1, 2):  # the first connection is lost before the gap has come
        [wanted] = connect_in(user.tell(ConnectionOpened(number))).subs
        assert wanted.since is None
        user.frame(number, UP, Subscribed(wanted.ref, LOGGED.id, Position(EPOCH, 7), recovered=False))
        if number == 1:
            user.tell(ConnectionClosed(1, 1006, "lost"))
            user.pass_time(OPTIONS.backoff_s_min)
    assert user.frame(2, lost) == [DeliverGap(LOGGED, "retention", 5, 7, position=Position(EPOCH, 7))]
    assert user.frame(2, lost) == []
    assert [each.payload for each in only(Deliver, user.data(2, 8))] == [b"m8"]


def test_the_next_broker_is_told_what_the_former_one_may_not_have_stored() -> None:
    user = User().served(LOGGED, is_stored=True)
    user.data(1, 1)
    user.tell(Handled(LOGGED, Position(EPOCH, 1)))
    assert sent(user.pass_time(1.0)) == [(1, Ack({LOGGED.id: Position(EPOCH, 1)}))]
    user.tell(ConnectionClosed(1, 1006, "lost"))
    user.pass_time(OPTIONS.backoff_s_min)
    user.answer(connect_in(user.tell(ConnectionOpened(2))), 2)
    assert sent(user.pass_time(1.0)) == [(2, Ack({LOGGED.id: Position(EPOCH, 1)}))]
    assert sent(user.pass_time(2.0)) == []


def test_a_broker_that_the_user_moves_to_is_told_what_was_handled() -> None:
    user = User().served(LOGGED, is_stored=True)
    user.data(1, 1)
    user.tell(Handled(LOGGED, Position(EPOCH, 1)))
    user.moving()
    acks = [(number, frame) for number, frame in sent(user.pass_time(1.0)) if isinstance(frame, Ack)]
    assert acks == [(1, Ack({LOGGED.id: Position(EPOCH, 1)}))]
    user.frame(2, MovedIn())
    user.frame(1, Bye({}))
    assert sent(user.pass_time(1.0)) == [(2, Ack({LOGGED.id: Position(EPOCH, 1)}))]


def test_a_stored_position_is_where_a_new_client_begins() -> None:
    user = User()
    user.tell(Start(), AddSubscription(LOGGED, Position(EPOCH, 41)), AddSubscription(LIVE))
    connect = connect_in(user.tell(ConnectionOpened(1)))
    assert [(each.interest, each.since) for each in connect.subs] == [(LOGGED, Position(EPOCH, 41)), (LIVE, None)]
    actions = user.answer(connect, 1)
    assert only(Confirmed, actions) == [Confirmed(LOGGED, Position(EPOCH, 41)), Confirmed(LIVE, None)]


# Connections.


def test_generations_increase_with_each_connection() -> None:
    user = User()
    user.tell(Start())
    first = connect_in(user.tell(ConnectionOpened(1)))
    user.tell(ConnectionClosed(1, 1006, "lost"))
    user.pass_time(OPTIONS.backoff_s_min)
    second = connect_in(user.tell(ConnectionOpened(2)))
    assert (first.session, first.generation, second.generation) == ("me", 101, 102)


def test_attempts_are_ever_rarer_and_spread() -> None:
    waits: list[list[float]] = []
    for incarnation in (1, 2):
        user = User(incarnation=incarnation)
        user.tell(Start())
        waits.append([])
        for number in range(1, 12):
            [lost] = only(Interrupted, user.tell(ConnectionClosed(number, 1006, "refused")))
            waits[-1].append(lost.retry_s)
            user.pass_time(lost.retry_s)
    bounds = [min(OPTIONS.backoff_s_max, OPTIONS.backoff_s_min * 2.0**attempt) for attempt in range(11)]
    for each in waits:
        assert all(0 <= wait <= bound for wait, bound in zip(each, bounds, strict=True))
        assert len(set(each)) == len(each)
    assert waits[0] != waits[1]
    assert max(map(max, waits)) > OPTIONS.backoff_s_max / 2


def test_alternates_come_before_the_urls_that_were_given() -> None:
    user = User().served()
    user.tell(ConnectionClosed(1, 1001, "goes away"))
    opened: list[str] = []
    for number in (2, 3, 4, 5):
        [connection] = only(OpenConnection, user.pass_time(OPTIONS.connect_timeout_s - 1.0))
        opened.append(connection.url)
        user.tell(ConnectionClosed(number, 1006, "refused"))
    assert opened == ["wss://b2", "wss://b3", "wss://b1", "wss://b2"]


def test_a_full_broker_says_how_long_to_wait_at_least() -> None:
    user = User()
    user.tell(Start(), ConnectionOpened(1))
    user.frame(1, Error("full", "full", "elsewhere", 30_000))
    [lost] = only(Interrupted, user.tell(ConnectionClosed(1, 1013, "full")))
    assert lost.retry_s == 30.0
    assert only(OpenConnection, user.pass_time(29.0)) == []
    assert len(only(OpenConnection, user.pass_time(1.0))) == 1


@pytest.mark.parametrize("code", sorted(FINAL_CODES))
def test_some_close_codes_are_final_and_nothing_wakes_the_client_again(code: int) -> None:
    user = User().served(LOGGED)
    assert only(Failed, user.tell(ConnectionClosed(1, code, "why"))) == [Failed(code, "why")]
    assert user.machine.deadline() is None
    assert user.tell(Start(), AddSubscription(LIVE), PublishMessage("t", LIVE, b"x")) == []


def test_close_ends_what_waits() -> None:
    user = User()
    user.tell(Start(), PublishMessage("t", LIVE, b"x"))
    actions = user.tell(Close())
    assert only(CloseConnection, actions) == [CloseConnection(1, NORMAL, "closed by the application")]
    assert [(each.token, each.code) for each in only(PublishEnded, actions)] == [("t", "closed")]


def test_silence_is_the_end_of_a_connection_and_any_frame_is_a_sign_of_life() -> None:
    user = User().served()
    for _ in range(4):
        assert only(CloseConnection, user.pass_time(25.0)) == []
        assert sent(user.frame(1, Ping())) == [(1, Pong())]
    actions = user.pass_time(36.0)
    assert [each.number for each in only(CloseConnection, actions)] == [1]
    assert len(only(Interrupted, actions)) == 1


def test_an_attempt_has_its_time() -> None:
    user = User()
    user.tell(Start())
    actions = user.pass_time(OPTIONS.connect_timeout_s)
    assert [each.number for each in only(CloseConnection, actions)] == [1]


def test_a_token_is_asked_for_each_connection_and_refreshed_in_time() -> None:
    user = User(replace(OPTIONS, has_token=True))
    user.tell(Start())
    assert user.tell(ConnectionOpened(1)) == [NeedToken(1)]
    assert connect_in(user.tell(TokenReady(1, "secret"))).token == "secret"
    user.frame(1, replace(UP, expires_in_s=30.0))
    assert only(NeedToken, user.pass_time(4.0)) == []
    assert only(NeedToken, user.pass_time(1.5)) == [NeedToken(1)]
    assert sent(user.tell(TokenReady(1, "newer"))) == [(1, Refresh("newer"))]


def test_a_live_interest_has_a_gap_when_it_is_confirmed_again() -> None:
    user = User().served(LIVE)
    user.tell(ConnectionClosed(1, 1006, "lost"))
    user.pass_time(OPTIONS.backoff_s_min)
    actions = user.answer(connect_in(user.tell(ConnectionOpened(2))), 2)
    assert [each.interest for each in only(DeliverGap, actions)] == [LIVE]
    assert only(Confirmed, actions) == []


# What is refused.


def test_a_refusal_for_good_ends_a_subscription() -> None:
    user = User().served()
    [(_, frame)] = sent(user.tell(AddSubscription(LOGGED)))
    assert user.frame(1, Error("forbidden", "no", "never", None, frame.request.ref)) == [
        Refused(LOGGED, "forbidden", "no")
    ]
    assert user.user.subscriptions == {}


@pytest.mark.parametrize("retry_after_ms", [None, 7000])
def test_a_refusal_for_now_is_asked_again_in_time(retry_after_ms: int | None) -> None:
    user = User().served()
    [(_, frame)] = sent(user.tell(AddSubscription(LOGGED)))
    user.frame(1, Error("log_unavailable", "later", "later", retry_after_ms, frame.request.ref))
    least_s = 7.0 if retry_after_ms else 0.5 * OPTIONS.retry_s
    assert sent(user.pass_time(least_s - 0.01)) == []
    [(number, again)] = sent(user.pass_time(OPTIONS.retry_s + 0.02))
    assert number == 1
    assert isinstance(again, Subscribe)
    assert (again.request.interest, again.request.ref != frame.request.ref) == (LOGGED, True)


# Publishing.


def test_publications_wait_for_a_broker_and_have_one_outcome() -> None:
    user = User()
    assert sent(user.tell(Start(), PublishMessage("t", LOGGED, b"x"))) == []
    user.tell(ConnectionOpened(1))
    [(_, request)] = sent(user.frame(1, UP))
    assert (request.channel, request.payload) == (LOGGED, b"x")
    answer = Published(request.ref, Position(EPOCH, 9))
    assert user.frame(1, answer) == [PublishEnded("t", Position(EPOCH, 9))]
    assert user.frame(1, answer) == []


def test_nobody_knows_the_outcome_of_what_was_unanswered_when_the_connection_was_lost() -> None:
    user = User().served()
    user.tell(PublishMessage("t", LOGGED, b"x"))
    [ended] = only(PublishEnded, user.tell(ConnectionClosed(1, 1006, "lost")))
    assert (ended.token, ended.code) == ("t", "unknown_outcome")
    user.pass_time(OPTIONS.backoff_s_min)
    user.tell(ConnectionOpened(2))
    assert sent(user.frame(2, UP)) == []  # it is not sent again


# Migration.


def test_a_user_leaves_only_when_the_new_broker_has_confirmed_everything() -> None:
    user = User().served(LOGGED)
    user.data(1, 1)
    user.frame(1, Move(("wss://b2",), 500, 15_000, "ticket"))
    opened = only(OpenConnection, user.pass_time(0.5))
    assert opened == [OpenConnection(2, "wss://b2")]
    connect = connect_in(user.tell(ConnectionOpened(2)))
    assert (connect.ticket, connect.generation, connect.subs[0].since) == ("ticket", 102, Position(EPOCH, 1))
    assert offsets(user.data(1, 2)) == [2]
    assert sent(user.answer(connect, 2)) == []
    assert offsets(user.data(2, 2, 3)) == [3]
    actions = user.frame(2, MovedIn())
    assert sent(actions) == [(1, Leave())]
    assert only(Served, actions) == [Served("b1", "wss://b2", moved=True)]
    assert offsets(user.data(1, 3, 4)) == [4]
    assert user.frame(1, Bye({LOGGED.id: 4})) == [CloseConnection(1, NORMAL, "moved")]
    assert user.tell(ConnectionClosed(1, NORMAL, "moved")) == []
    assert offsets(user.data(2, 4, 5)) == [5]


def test_a_subscription_that_is_added_during_a_move_is_asked_for_at_both() -> None:
    user = User().served(LIVE)
    user.moving()
    requests = sent(user.tell(AddSubscription(LOGGED)))
    assert [number for number, _ in requests] == [1, 2]
    assert sent(user.frame(2, MovedIn())) == []
    [_, (_, frame)] = requests
    assert sent(user.frame(2, Subscribed(frame.request.ref, LOGGED.id, Position(EPOCH, 0)))) == [(1, Leave())]


def test_live_publications_of_the_new_broker_are_held_until_their_turn() -> None:
    user = User().served(LIVE)
    user.live(1, (P, 1))
    user.moving()
    assert payloads(user.live(2, (P, 2))) == [b"1:2"]  # the next one of its publisher
    assert payloads(user.live(2, (P, 4), (Q, 1), (P, 5))) == []
    assert payloads(user.live(1, (P, 2), (P, 3))) == [b"1:3"]
    user.frame(2, MovedIn())
    actions = user.frame(1, Bye({}))
    assert payloads(actions) == [b"1:4", b"2:1", b"1:5"]
    assert only(DeliverGap, actions) == []
    assert only(CloseConnection, actions) == [CloseConnection(1, NORMAL, "moved")]


def test_what_does_not_come_before_bye_is_awaited_for_a_while_and_a_gap_then() -> None:
    user = User().served(LIVE)
    user.live(1, (P, 1))
    user.moving()
    user.live(2, (P, 3))
    user.frame(2, MovedIn())
    assert user.frame(1, Bye({})) == []
    actions = user.pass_time(OPTIONS.hold_s)
    assert [type(each) for each in actions] == [DeliverGap, Deliver, CloseConnection]


def test_few_publications_are_held() -> None:
    user = User(replace(OPTIONS, held_max=2)).served(LIVE)
    user.moving()
    assert user.live(2, (P, 2), (P, 3)) == []
    actions = user.live(2, (P, 5))
    assert payloads(actions) == [b"1:2", b"1:3", b"1:5"]
    assert len(only(DeliverGap, actions)) == 1


def test_the_old_connection_stays_until_publications_are_answered() -> None:
    user = User().served()
    [(_, request)] = sent(user.tell(PublishMessage("t", LOGGED, b"x")))
    assert isinstance(request, PublishRequest)
    user.moving()
    user.frame(2, MovedIn())
    assert user.frame(1, Bye({})) == []
    assert user.frame(1, Published(request.ref)) == [PublishEnded("t", None), CloseConnection(1, NORMAL, "moved")]


def test_a_candidate_that_refuses_is_left_and_the_next_one_tried() -> None:
    user = User().served(LOGGED)
    user.frame(1, Move(("wss://b2", "wss://b3"), 0, 15_000))
    user.pass_time(0.001)
    [wanted] = connect_in(user.tell(ConnectionOpened(2))).subs
    actions = user.frame(2, Error("log_unavailable", "later", "later", 1000, wanted.ref))
    assert only(CloseConnection, actions) == [CloseConnection(2, MOVE_FAILED, "the move failed")]
    assert only(OpenConnection, actions) == [OpenConnection(3, "wss://b3")]
    assert user.tell(ConnectionClosed(3, 1013, "full")) == []  # it stays where it is
    assert offsets(user.data(1, 1)) == [1]
    assert user.user.serving is user.user.connections[1]


def test_a_move_has_its_deadline_and_what_was_held_comes_from_the_old_broker() -> None:
    user = User().served(LIVE)
    user.live(1, (P, 1))
    user.moving()
    user.live(2, (P, 3))
    user.pass_time(14.0)
    user.frame(2, Ping())
    assert only(CloseConnection, user.pass_time(1.0)) == [CloseConnection(2, MOVE_FAILED, "the move failed")]
    assert payloads(user.live(1, (P, 2), (P, 3))) == [b"1:2", b"1:3"]
    user.frame(1, Move(("wss://b3",), 0, 15_000))
    assert only(OpenConnection, user.pass_time(0.001)) == [OpenConnection(3, "wss://b3")]


def test_one_move_at_a_time() -> None:
    user = User().served()
    user.moving()
    assert user.frame(1, Move(("wss://b3",), 0, 15_000)) == []
    assert only(OpenConnection, user.pass_time(1.0)) == []


def test_the_loss_of_the_old_broker_before_bye_is_a_gap_of_live_interests_only() -> None:
    user = User().served(LIVE, LOGGED)
    user.moving()
    user.live(2, (P, 3))
    user.frame(2, MovedIn())
    actions = user.tell(ConnectionClosed(1, 1006, "lost"))
    assert {each.interest for each in only(DeliverGap, actions)} == {LIVE}
    assert payloads(actions) == [b"1:3"]
    assert only(Interrupted, actions) == []


def test_the_candidate_serves_when_the_old_broker_is_lost_before_moved_in() -> None:
    user = User().served(LIVE, LOGGED)
    user.moving()
    actions = user.tell(ConnectionClosed(1, 1006, "lost"))
    assert only(Served, actions) == [Served("b1", "wss://b2", moved=False)]
    assert {each.interest for each in only(DeliverGap, actions)} == {LIVE}
    assert sent(user.frame(2, MovedIn())) == []
    assert offsets(user.data(2, 1)) == [1]


def test_an_epoch_that_only_the_new_broker_knows_comes_with_its_gap() -> None:
    user = User().served(LOGGED)
    user.data(1, 1)
    user.frame(1, Move(("wss://b2",), 0, 15_000))
    user.pass_time(0.001)
    [wanted] = connect_in(user.tell(ConnectionOpened(2))).subs
    begins = Position(LAST_EPOCH, 0)
    user.frame(2, UP, Subscribed(wanted.ref, LOGGED.id, begins, recovered=False))
    assert user.data(2, 1) == []  # not before the gap
    assert user.frame(2, Gap(LOGGED.id, "log_lost", 2, None, begins)) == [
        DeliverGap(LOGGED, "log_lost", 2, None, position=begins)
    ]
    assert user.data(1, 2) == []  # the old broker has not found out yet
    assert offsets(user.data(2, 1)) == [1]


def test_a_log_that_lost_its_end_within_its_epoch_is_a_gap_and_goes_on_from_there() -> None:
    user = User().served(LOGGED)
    for offset in (1, 2, 3):
        user.data(1, offset)
    user.tell(ConnectionClosed(1, 1006, "lost"))
    user.pass_time(30.0)
    number = next(iter(user.user.connections))
    [asked] = connect_in(user.tell(ConnectionOpened(number))).subs
    assert asked.since == Position(EPOCH, 3)
    begins = Position(EPOCH, 0)
    user.frame(number, UP, Subscribed(asked.ref, LOGGED.id, begins, recovered=False))
    gap = Gap(LOGGED.id, "log_lost", 4, None, begins)
    assert user.frame(number, gap) == [DeliverGap(LOGGED, "log_lost", 4, None, position=begins)]
    assert offsets(user.data(number, 1)) == [1]
    assert user.frame(number, gap) == []  # the rule is for the one gap of the confirmation


def test_a_subscription_that_has_no_log_at_another_broker_keeps_its_position() -> None:
    user = User().served(LOGGED)
    user.data(1, 1)
    user.tell(ConnectionClosed(1, 1006, "lost"))
    user.pass_time(30.0)
    number = next(iter(user.user.connections))
    [asked] = connect_in(user.tell(ConnectionOpened(number))).subs
    actions = user.frame(number, UP, Subscribed(asked.ref, LOGGED.id), Gap(LOGGED.id, "not_logged"))
    assert only(DeliverGap, actions) == [DeliverGap(LOGGED, "not_logged")]
    assert user.user.subscriptions[LOGGED.id].received == Position(EPOCH, 1)


def test_a_request_names_what_was_received() -> None:
    user = User().served(LOGGED)
    user.data(1, 1)
    assert user.user.subscriptions[LOGGED.id].request(9) == SubscriptionRequest(9, LOGGED, Position(EPOCH, 1))
