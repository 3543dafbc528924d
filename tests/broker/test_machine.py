"""The machine of a broker: events in, actions out."""

from __future__ import annotations

import gc
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
    Subscribe,
    Subscribed,
    SubscriptionRequest,
    Unsubscribe,
    Unsubscribed,
)
from dynamoth.edge.interests import Interest, channel_interest, query_interest
from dynamoth.edge.log import SERVERS_KEY, log_keys
from dynamoth.edge.publications import LoggedPublication, Position, pack_publication
from dynamoth.machine.events import ErrorReply, Replied, Send, Start
from dynamoth_broker import unlogged
from dynamoth_broker.delivery import BURST_S
from dynamoth_broker.events import (
    FULL,
    GOING_AWAY,
    NORMAL,
    RESTARTING,
    TAKEN_OVER,
    TOKEN_EXPIRED,
    TOO_SLOW,
    BarrierPassed,
    Broadcast,
    BrokerOptions,
    ChannelConfirmed,
    ChannelEnded,
    ChannelFailed,
    ChannelGap,
    CloseConnection,
    Closed,
    Drain,
    EndDrain,
    Grant,
    MessagePublished,
    MoveSession,
    Noted,
    Opened,
    Overflowed,
    Publications,
    PublishMessage,
    RaiseBarrier,
    Received,
    Refreshed,
    Stop,
    SubscribeChannel,
    Transmit,
    UnsubscribeChannel,
    Writable,
)
from dynamoth_broker.interests import FRAME_BYTES, Phase
from dynamoth_broker.machine import BrokerMachine
from dynamoth_broker.sessions import Session, Stage
from dynamoth_broker.unlogged import WARN_S
from tests.machines.helpers import Subject, only

EPOCH, LATER_EPOCH = 0xE, 0xF
LOG = "log:l1"
LIVE = channel_interest("news")
LOGGED = channel_interest("log.news")
EVERYTHING = Grant(publish=("*",))

OPTIONS = BrokerOptions(
    id="b1",
    logs={"l1": "redis://l1:6379"},
    history=("log.*",),
    alternates=("wss://b2", "wss://b3"),
    tip_check_s=1000.0,
    recent_entries_max=4,
    page_entries=3,
)

NO_PINGS = replace(OPTIONS, ping_s=1e6)


class Broker(Subject):
    """A broker whose log server answers when the test says so."""

    def __init__(self, options: BrokerOptions = NO_PINGS) -> None:
        super().__init__(BrokerMachine(options, 7))
        self.tell(Start())
        self.up(LOG)

    @property
    def broker(self) -> BrokerMachine:
        assert isinstance(self.machine, BrokerMachine)
        return self.machine

    def open(
        self, connection: int, *wanted: SubscriptionRequest, grant: Grant = EVERYTHING, **connect: Any
    ) -> list[Any]:
        """Open a connection; its session has the connection's number unless the test names it."""
        session = connect.pop("session", f"session{connection}")
        return self.tell(Opened(connection, Connect(session, subs=wanted, **connect), grant))

    def frame(self, connection: int, frame: Any) -> list[Any]:
        return self.tell(Received(connection, frame))

    def subscribe(self, connection: int, interest: Interest, since: Position | None = None, ref: int = 1) -> list[Any]:
        return self.frame(connection, Subscribe(SubscriptionRequest(ref, interest, since)))

    def page(self, send: Send, tip: int, *entries: int, first: int = 1, epoch: int = EPOCH) -> list[Any]:
        """Let the log answer a read with these offsets."""
        rows = [part for offset in entries for part in (offset, b"m%d" % offset)]
        return self.tell(Replied(LOG, send.tag, [b"%016x" % epoch, tip, first, *rows]))

    def joined(self, connection: int, interest: Interest = LOGGED, tip: int = 0) -> None:
        """Subscribe a connection to an interest that nobody has yet."""
        self.subscribe(connection, interest)
        actions = self.tell(ChannelConfirmed(self.channel(interest)))
        if interest is not LIVE:
            self.page(reads(actions)[0], tip)
        assert self.broker.interests.by_id[interest.id].phase is Phase.OPEN

    def channel(self, interest: Interest) -> bytes:
        is_live = interest.kind == "channel" and not interest.name.startswith("log.")
        return interest.name.encode() if is_live else interest.log_channel

    def publish(self, *offsets: int, epoch: int = EPOCH, interest: Interest = LOGGED) -> list[Any]:
        """Let publications come on the channel of an interest."""
        packed = [pack_publication(LoggedPublication(epoch, offset, b"m%d" % offset)) for offset in offsets]
        return self.tell(Publications([(interest.log_channel, data) for data in packed]))


def reads(actions: list[Any]) -> list[Send]:
    """Return the commands to the log, but for what every new connection begins with."""
    return [send for send in only(Send, actions) if send.args[1] != SERVERS_KEY]


def frames(actions: list[Any], connection: int) -> list[Any]:
    """Return the frames for a connection, in order."""

    def receivers(action: Any) -> Any:
        return (action.connection,) if isinstance(action, Transmit) else action.connections

    sent = [action for action in actions if isinstance(action, (Transmit, Broadcast))]
    return [action.frame for action in sent if connection in receivers(action)]


def offsets(actions: list[Any], connection: int) -> list[int | None]:
    return [frame.o for frame in frames(actions, connection) if isinstance(frame, Data)]


def data(offset: int) -> Data:
    return Data(LOGGED.id, b"m%d" % offset, offset)


# Interests are shared.


def test_identical_subscriptions_are_one_and_1_is_1_0() -> None:
    broker = Broker()
    queries = [query_interest("near", {"km": value}) for value in (1, 1.0)]
    other = query_interest("near", {"km": "1"})
    broker.open(1)
    broker.open(2)
    assert only(SubscribeChannel, broker.subscribe(1, queries[0])) == [SubscribeChannel(queries[0].log_channel)]
    assert only(SubscribeChannel, broker.subscribe(2, queries[1])) == []
    assert only(SubscribeChannel, broker.subscribe(2, other, ref=2)) == [SubscribeChannel(other.log_channel)]


def test_all_who_wait_for_a_channel_are_answered_together_after_one_read() -> None:
    broker = Broker()
    for number in (1, 2):
        broker.open(number)
        assert frames(broker.subscribe(number, LOGGED), number) == []
    [read] = reads(broker.tell(ChannelConfirmed(LOGGED.log_channel)))
    actions = broker.page(read, 5)
    for number in (1, 2):
        assert frames(actions, number) == [Subscribed(1, LOGGED.id, Position(EPOCH, 5))]
    assert broker.publish(6) == [Broadcast([1, 2], data(6))]


def test_an_interest_lingers_and_who_comes_back_in_time_finds_it_open() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, tip=2)
    assert frames(broker.frame(1, Unsubscribe(LOGGED.id)), 1) == [Unsubscribed(LOGGED.id)]
    assert only(UnsubscribeChannel, broker.pass_time(OPTIONS.linger_s - 1.0)) == []
    assert frames(broker.subscribe(1, LOGGED, ref=2), 1) == [Subscribed(2, LOGGED.id, Position(EPOCH, 2))]
    assert only(UnsubscribeChannel, broker.pass_time(3 * OPTIONS.linger_s)) == []
    broker.tell(Closed(1))
    left = [UnsubscribeChannel(LOGGED.log_channel), UnsubscribeChannel(LOGGED.name.encode())]
    assert only(UnsubscribeChannel, broker.pass_time(OPTIONS.linger_s)) == left
    broker.tell(ChannelEnded(LOGGED.log_channel))
    assert len(broker.broker.interests) == 0


def test_who_subscribes_while_a_channel_is_being_left_joins_it_again() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1)
    broker.frame(1, Unsubscribe(LOGGED.id))
    broker.pass_time(OPTIONS.linger_s)
    joined = [SubscribeChannel(LOGGED.log_channel), SubscribeChannel(LOGGED.name.encode())]
    assert only(SubscribeChannel, broker.subscribe(1, LOGGED)) == joined
    assert broker.tell(ChannelEnded(LOGGED.log_channel)) == []
    [read] = reads(broker.tell(ChannelConfirmed(LOGGED.log_channel)))
    assert frames(broker.page(read, 4), 1) == [Subscribed(1, LOGGED.id, Position(EPOCH, 4))]


def test_an_answer_for_an_interest_that_was_left_does_not_stop_the_one_that_follows() -> None:
    broker = Broker(replace(NO_PINGS, linger_s=1.0))
    broker.open(1)
    broker.joined(1)
    [old] = reads(broker.tell(ChannelGap(LOGGED.log_channel, None, "lost")))
    broker.frame(1, Unsubscribe(LOGGED.id))
    broker.pass_time(1.0)
    broker.subscribe(1, LOGGED)
    [new] = reads(broker.tell(ChannelConfirmed(LOGGED.log_channel)))
    assert broker.page(old, 2, 1, 2) == []
    assert frames(broker.page(new, 3), 1) == [Subscribed(1, LOGGED.id, Position(EPOCH, 3))]


def test_a_refused_channel_refuses_its_users_and_does_not_end_a_later_subscription() -> None:
    broker = Broker()
    broker.open(1)
    broker.subscribe(1, LIVE)
    [error] = frames(broker.tell(ChannelFailed(b"news", "NOPERM")), 1)
    assert (error.code, error.retry, error.ref) == ("unavailable", "later", 1)
    broker.joined(1, LIVE)
    assert only(UnsubscribeChannel, broker.pass_time(2 * OPTIONS.linger_s)) == []


def test_a_channel_that_is_refused_later_closes_the_connections_of_its_users() -> None:
    """They take the subscription for confirmed; when they connect again, it is refused."""
    broker = Broker()
    broker.open(1)
    broker.open(2)
    broker.joined(1, LIVE)
    assert [each.connection for each in only(CloseConnection, broker.tell(ChannelFailed(b"news", "NOPERM")))] == [1]


# Where delivery begins.


def test_publications_wait_for_the_tip_and_those_up_to_it_are_not_sent() -> None:
    broker = Broker()
    broker.open(1)
    broker.subscribe(1, LOGGED)
    [read] = reads(broker.tell(ChannelConfirmed(LOGGED.log_channel)))
    assert broker.publish(5, 6, 7) == []
    actions = broker.page(read, 6)
    assert frames(actions, 1) == [Subscribed(1, LOGGED.id, Position(EPOCH, 6)), data(7)]


def test_who_has_missed_little_gets_it_without_a_read() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1)
    broker.publish(1, 2, 3)
    broker.open(2)
    since = Position(EPOCH, 1)
    actions = broker.subscribe(2, LOGGED, since)
    assert frames(actions, 2) == [Subscribed(1, LOGGED.id, since), data(2), data(3)]
    assert reads(actions) == []


def test_recent_frames_of_all_interests_have_one_bound_and_those_of_the_quietest_interest_go_first() -> None:
    broker = Broker(replace(NO_PINGS, recent_bytes_all_max=3 * (FRAME_BYTES + 2)))
    busy, quiet = LOGGED, channel_interest("log.quiet")
    broker.open(1)
    broker.joined(1, quiet)
    broker.joined(1, busy)
    broker.publish(1, interest=quiet)
    broker.publish(1)
    broker.publish(2, interest=quiet)
    broker.publish(2)
    recent = {interest: len(broker.broker.interests.by_id[interest.id].recent) for interest in (quiet, busy)}
    assert recent == {quiet: 0, busy: 2}
    broker.open(2)
    assert frames(broker.subscribe(2, busy, Position(EPOCH, 0)), 2)[1:] == [data(1), data(2)]
    [read] = reads(broker.subscribe(2, quiet, Position(EPOCH, 0), ref=2))
    assert offsets(broker.page(read, 2, 1, 2), 2) == [1, 2]


def test_who_has_missed_much_catches_up_by_pages_and_is_live_at_the_tip() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, tip=7)
    broker.open(2)
    [read] = reads(broker.subscribe(2, LOGGED, Position(EPOCH, 1)))
    actions = broker.page(read, 7, 2, 3, 4)
    assert offsets(actions, 2) == [2, 3, 4]
    assert frames(broker.publish(8), 2) == []  # it has not caught up
    [read] = reads(actions)
    actions = broker.page(read, 8, 5, 6, 7)
    assert offsets(actions, 2) == [5, 6, 7, 8]  # the last one is remembered
    assert broker.publish(9) == [Broadcast([1, 2], data(9))]


def test_what_a_page_shows_beyond_the_tip_goes_to_everybody() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, tip=2)
    broker.open(2)
    [read] = reads(broker.subscribe(2, LOGGED, Position(EPOCH, 1)))
    actions = broker.page(read, 4, 2, 3, 4)
    assert offsets(actions, 1) == [3, 4]
    assert offsets(actions, 2) == [2, 3, 4]


def test_a_page_that_several_wait_for_is_read_once() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, tip=9)
    broker.open(2)
    broker.open(3)
    since = Position(EPOCH, 7)
    [read] = reads(broker.subscribe(2, LOGGED, since))
    assert reads(broker.subscribe(3, LOGGED, since)) == []
    actions = broker.page(read, 9, 8, 9)
    assert offsets(actions, 2) == offsets(actions, 3) == [8, 9]


def test_what_the_log_has_dropped_is_a_gap() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, tip=9)
    broker.open(2)
    [read] = reads(broker.subscribe(2, LOGGED, Position(EPOCH, 2)))
    place = Position(EPOCH, 6)
    assert frames(broker.page(read, 9, 7, 8, 9, first=7), 2)[:2] == [
        Subscribed(1, LOGGED.id, place, recovered=False),
        Gap(LOGGED.id, "retention", 3, 6, place),
    ]


@pytest.mark.parametrize("since", [Position(LATER_EPOCH, 1), Position(EPOCH, 50)])
def test_a_position_of_another_life_of_the_log_is_a_gap(since: Position) -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, tip=3)
    broker.open(2)
    [read] = reads(broker.subscribe(2, LOGGED, since))
    begins = Position(EPOCH, 0)
    found = frames(broker.page(read, 3), 2)
    assert found[:2] == [
        Subscribed(1, LOGGED.id, begins, recovered=False),
        Gap(LOGGED.id, "log_lost", since.offset + 1, None, begins),
    ]


def test_a_log_that_does_not_answer_refuses_for_now() -> None:
    broker = Broker()
    broker.open(1)
    broker.subscribe(1, LOGGED)
    broker.tell(ChannelConfirmed(LOGGED.log_channel))
    [error] = frames(broker.pass_time(OPTIONS.log_wait_s), 1)
    assert (error.code, error.retry, error.ref) == ("log_unavailable", "later", 1)
    [read] = reads(broker.subscribe(1, LOGGED, ref=2))
    assert frames(broker.page(read, 0), 1) == [Subscribed(2, LOGGED.id, Position(EPOCH, 0))]


# What comes.


def test_a_hole_waits_for_the_log_and_copies_are_dropped() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1)
    assert offsets(broker.publish(1, 1), 1) == [1]
    actions = broker.publish(4)
    assert frames(actions, 1) == []
    [read] = reads(actions)
    assert offsets(broker.page(read, 4, 2, 3, 4), 1) == [2, 3, 4]
    assert broker.publish(2, 3, 4) == []


def test_what_was_published_and_is_not_in_the_log_does_not_make_the_broker_read_without_pause() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1)
    [read] = reads(broker.publish(9))
    assert reads(broker.page(read, 0)) == []
    [read] = reads(broker.publish(8))
    assert reads(broker.page(read, 0)) == []
    [read] = reads(broker.pass_time(1.0))
    assert reads(broker.page(read, 0)) == []
    [read] = reads(broker.pass_time(1.0))
    assert offsets(broker.page(read, 9, *range(1, 8)), 1) == list(range(1, 10))
    assert reads(broker.pass_time(5.0)) == []


def test_a_gap_while_the_log_is_read_makes_it_read_again() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1)
    [first] = reads(broker.tell(ChannelGap(LOGGED.log_channel, None, "a link was lost")))
    assert reads(broker.tell(ChannelGap(LOGGED.log_channel, None, "a link was lost again"))) == []
    [second] = reads(broker.page(first, 0))
    assert reads(broker.page(second, 1, 1)) == []
    assert broker.broker.interests.by_id[LOGGED.id].tip == 1


def test_each_user_is_given_the_alternates_in_another_order() -> None:
    broker = Broker()
    sent = [action.frame for connection in (1, 2) for action in only(Transmit, broker.open(connection))]
    first, second = (frame.alternates for frame in sent if isinstance(frame, Connected))
    assert sorted(first) == sorted(second) == ["wss://b2", "wss://b3"]
    assert first != second


def test_another_epoch_is_a_gap_for_everybody() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, tip=3)
    [read] = reads(broker.publish(1, epoch=LATER_EPOCH))
    actions = broker.page(read, 1, 1, epoch=LATER_EPOCH)
    assert frames(actions, 1) == [Gap(LOGGED.id, "log_lost", 4, None, Position(LATER_EPOCH, 0)), data(1)]
    assert frames(broker.publish(4), 1) == []  # of the former life
    assert offsets(broker.publish(2, epoch=LATER_EPOCH), 1) == [2]


def test_a_gap_of_a_logged_channel_is_read_and_one_of_a_live_channel_is_passed_on() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1)
    broker.joined(1, LIVE)
    [read] = reads(broker.tell(ChannelGap(LOGGED.log_channel, 2, "lost")))
    assert offsets(broker.page(read, 2, 1, 2), 1) == [1, 2]
    assert frames(broker.tell(ChannelGap(b"news", 2, "lost")), 1) == [Gap(LIVE.id, "lost", count=2)]


def test_tips_are_compared_now_and_then() -> None:
    broker = Broker(replace(NO_PINGS, tip_check_s=5.0))
    broker.open(1)
    broker.joined(1)
    [tips] = reads(broker.pass_time(5.0))
    [read] = reads(broker.tell(Replied(LOG, tips.tag, [b"%016x" % EPOCH, 1])))
    assert offsets(broker.page(read, 1, 1), 1) == [1]
    [tips] = reads(broker.pass_time(5.0))
    assert broker.tell(Replied(LOG, tips.tag, [b"%016x" % EPOCH, 1])) == []
    [tips] = reads(broker.pass_time(5.0))
    [read] = reads(broker.tell(Replied(LOG, tips.tag, [b"", 0])))  # the log is lost
    assert frames(broker.page(read, 0, epoch=EPOCH + 1), 1) == [
        Gap(LOGGED.id, "log_lost", 2, None, Position(EPOCH + 1, 0))
    ]


@pytest.mark.parametrize("reply", [[b"%016x" % EPOCH], [b"x", 1], ErrorReply("ERR no"), 7])
def test_tips_that_cannot_be_read_are_compared_in_the_next_round(reply: Any) -> None:
    broker = Broker(replace(NO_PINGS, tip_check_s=5.0))
    broker.open(1)
    broker.joined(1)
    [tips] = reads(broker.pass_time(5.0))
    assert broker.tell(Replied(LOG, tips.tag, reply)) == []
    assert len(reads(broker.pass_time(5.0))) == 1


def test_tips_of_many_interests_are_compared_in_portions() -> None:
    broker = Broker(replace(NO_PINGS, tip_check_s=10.0, subscriptions_per_session_max=250))
    interests = [channel_interest(f"log.{number}") for number in range(250)]
    broker.open(1)
    for ref, interest in enumerate(interests, 1):
        broker.subscribe(1, interest, ref=ref)
        [read] = reads(broker.tell(ChannelConfirmed(interest.log_channel)))
        broker.page(read, 0)
    portions = [reads(broker.pass_time(seconds)) for seconds in (10.0, 3.34, 3.34)]
    assert [int(tips.args[2]) // 2 for portion in portions for tips in portion] == [84, 84, 82]
    compared = {key for portion in portions for tips in portion for key in tips.args[3:-2]}
    assert compared == {key for interest in interests for key in log_keys(interest.id)}


def test_bad_bytes_on_a_channel_are_counted() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1)
    assert broker.tell(Publications([(LOGGED.log_channel, b"\xc1")])) == []
    assert broker.broker.counters["malformed"] == 1


# Slow users.


def test_a_slow_user_falls_behind_and_catches_up_and_others_do_not_wait() -> None:
    broker = Broker()
    for number in (1, 2):
        broker.open(number)
    broker.joined(1)
    broker.subscribe(2, LOGGED)
    broker.tell(Overflowed(2))
    actions = broker.publish(*range(1, 11))
    assert (offsets(actions, 1), offsets(actions, 2)) == (list(range(1, 11)), [])
    [read] = reads(broker.tell(Writable(2)))
    actions = broker.page(read, 10, 1, 2, 3)
    [read] = reads(actions)
    assert offsets(actions, 2) == [1, 2, 3]
    actions = broker.page(read, 10, 4, 5, 6)
    assert offsets(actions, 2) == list(range(4, 11))
    assert broker.publish(11) == [Broadcast([1, 2], data(11))]


def test_a_slow_user_of_a_live_interest_gets_a_gap() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, LIVE)
    broker.tell(Overflowed(1))
    assert broker.tell(Publications([(b"news", b"x")])) == []
    assert frames(broker.tell(Writable(1)), 1) == [Gap(LIVE.id, "slow", count=1)]
    assert frames(broker.tell(Publications([(b"news", b"y")])), 1) == [Data(LIVE.id, b"y")]


def test_a_slow_user_of_a_live_interest_who_has_missed_nothing_gets_no_gap() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, LIVE)
    broker.tell(Publications([(b"news", b"x")]))
    broker.tell(Overflowed(1))
    assert broker.tell(Writable(1)) == []
    assert frames(broker.tell(Publications([(b"news", b"y")])), 1) == [Data(LIVE.id, b"y")]


def test_a_slow_user_does_not_know_how_much_of_a_live_interest_is_missing_after_a_gap_of_its_channel() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, LIVE)
    broker.tell(Overflowed(1))
    broker.tell(ChannelGap(b"news", 3, "lost"))
    broker.tell(Publications([(b"news", b"x")]))
    assert frames(broker.tell(Writable(1)), 1) == [Gap(LIVE.id, "slow")]


def test_a_gap_that_came_before_bye_does_not_come_again() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, LIVE)
    broker.tell(Overflowed(1))
    broker.tell(Publications([(b"news", b"x")]))
    broker.frame(1, Leave())
    assert frames(broker.tell(BarrierPassed(b"news")), 1) == [Gap(LIVE.id, "slow", count=1), Bye({})]
    assert frames(broker.tell(Writable(1)), 1) == []


def test_a_position_to_what_has_no_log_here_is_a_gap() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, LIVE)
    broker.open(2)
    answer = frames(broker.subscribe(2, LIVE, Position(EPOCH, 5)), 2)
    assert answer == [Subscribed(1, LIVE.id), Gap(LIVE.id, "not_logged")]
    assert frames(broker.tell(Publications([(b"news", b"x")])), 2) == [Data(LIVE.id, b"x")]


def test_who_knows_more_than_the_broker_makes_it_read_the_log() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, tip=3)
    broker.open(2)
    [read] = reads(broker.subscribe(2, LOGGED, Position(EPOCH, 4)))
    actions = broker.page(read, 4)
    assert offsets(actions, 2) == []
    [read] = reads(actions)
    assert offsets(broker.page(read, 4, 4), 1) == [4]
    assert broker.publish(5) == [Broadcast([1, 2], data(5))]


def test_a_slow_user_of_a_conflated_channel_gets_the_latest_publication() -> None:
    broker = Broker(replace(NO_PINGS, conflate=("n*",)))
    broker.open(1)
    broker.joined(1, LIVE)
    broker.tell(Overflowed(1))
    broker.tell(Publications([(b"news", b"x"), (b"news", b"y")]))
    assert frames(broker.tell(Writable(1)), 1) == [Data(LIVE.id, b"y")]
    assert broker.broker.counters["conflated"] == 1
    broker.tell(Overflowed(1))
    assert broker.tell(Writable(1)) == []


def test_of_too_many_slow_users_the_one_who_is_for_longest_is_closed() -> None:
    broker = Broker(replace(NO_PINGS, slow_sessions_max=2))
    for number in (1, 2, 3, 4):
        broker.open(number)
    broker.tell(Overflowed(1), Overflowed(2))
    broker.tell(Writable(1))
    broker.tell(Overflowed(1))
    [closed] = only(CloseConnection, broker.tell(Overflowed(3)))
    assert (closed.connection, closed.code) == (2, TOO_SLOW)
    broker.tell(Closed(1))
    assert broker.tell(Overflowed(4)) == []


def test_a_gap_of_a_conflated_channel_is_reported() -> None:
    broker = Broker(replace(NO_PINGS, conflate=("n*",)))
    broker.open(1)
    broker.joined(1, LIVE)
    broker.tell(Overflowed(1))
    broker.tell(Publications([(b"news", b"x")]))
    broker.tell(ChannelGap(b"news", 3, "lost"))
    assert frames(broker.tell(Writable(1)), 1) == [Gap(LIVE.id, "slow")]


@pytest.mark.parametrize("interest", [LIVE, LOGGED])
def test_a_slow_user_who_subscribes_does_not_become_live(interest: Interest) -> None:
    broker = Broker()
    for number in (1, 2):
        broker.open(number)
    broker.joined(1, interest)
    broker.tell(Overflowed(2))
    broker.subscribe(2, interest)
    assert frames(broker.tell(Publications([(b"news", b"x")])), 2) == []
    assert frames(broker.publish(1), 2) == []


def test_a_slow_user_does_not_become_live_by_a_page_that_comes_late() -> None:
    broker = Broker()
    for number in (1, 2):
        broker.open(number)
    broker.joined(1, tip=9)
    [read] = reads(broker.subscribe(2, LOGGED, Position(EPOCH, 7)))
    broker.tell(Overflowed(2))
    assert offsets(broker.page(read, 9, 8, 9), 2) == []
    assert frames(broker.publish(10), 2) == []
    [read] = reads(broker.tell(Writable(2)))
    assert offsets(broker.page(read, 10, 8, 9, 10), 2) == [8, 9, 10]
    assert broker.publish(11) == [Broadcast([1, 2], data(11))]


def test_a_user_who_is_behind_is_sent_a_burst_at_a_time() -> None:
    size = FRAME_BYTES + len(b"m1")
    broker = Broker(replace(NO_PINGS, burst_bytes=4 * size, recent_entries_max=100, page_entries=3))
    for number in (1, 2):
        broker.open(number)
    broker.joined(1, tip=20)
    [read] = reads(broker.subscribe(2, LOGGED, Position(EPOCH, 10)))
    actions = broker.page(read, 20, 11, 12, 13)
    assert offsets(actions, 2) == [11, 12, 13]
    [read] = reads(actions)
    actions = broker.page(read, 20, 14, 15, 16)
    assert offsets(actions, 2) == [14]
    assert reads(actions) == []
    [read] = reads(broker.pass_time(BURST_S))
    actions = broker.page(read, 20, 15, 16, 17)
    assert offsets(actions, 2) == [15, 16, 17]
    [read] = reads(actions)
    broker.tell(Overflowed(2))
    assert reads(broker.pass_time(1.0)) == []
    assert reads(broker.tell(Writable(2))) == []  # one read at a time
    assert offsets(broker.page(read, 20, 18, 19, 20), 2) == [18, 19, 20]
    assert broker.publish(21) == [Broadcast([1, 2], data(21))]


def test_bursts_are_shared_by_the_subscriptions_of_a_session() -> None:
    size = FRAME_BYTES + len(b"m1")
    broker = Broker(replace(NO_PINGS, burst_bytes=2 * size, recent_entries_max=100))
    other = channel_interest("log.other")
    for number in (1, 2):
        broker.open(number)
    broker.joined(1)
    broker.joined(1, other)
    broker.publish(1, 2, 3)
    broker.publish(1, 2, 3, interest=other)
    actions = broker.subscribe(2, LOGGED, Position(EPOCH, 0)) + broker.subscribe(2, other, Position(EPOCH, 0))
    assert offsets(actions, 2) == [1, 2, 3]  # those that are kept are sent at once
    assert [type(each) for each in frames(actions, 2)] == [Subscribed, Data, Data, Data, Subscribed]
    assert offsets(broker.pass_time(BURST_S), 2) == [1, 2, 3]


def test_who_reads_nothing_for_long_is_disconnected() -> None:
    broker = Broker(replace(OPTIONS, ping_s=5.0, slow_s_max=12.0, pong_timeout_s=100.0))
    broker.open(1)
    broker.tell(Overflowed(1))
    assert only(CloseConnection, broker.pass_time(11.0)) == []
    assert [each.code for each in only(CloseConnection, broker.pass_time(6.0))] == [TOO_SLOW]


# Connections.


def test_who_answers_pings_stays_and_who_does_not_goes() -> None:
    broker = Broker(replace(OPTIONS, ping_s=5.0, pong_timeout_s=2.0))
    broker.open(1)
    broker.open(2)
    assert only(Ping, frames(broker.pass_time(6.0), 1)) == [Ping()]
    broker.frame(1, Pong())
    broker.frame(2, Pong())
    broker.pass_time(4.5)
    broker.frame(1, Pong())
    assert only(CloseConnection, broker.pass_time(2.0)) == []
    assert only(CloseConnection, broker.pass_time(1.5)) == [CloseConnection(2, GOING_AWAY, "no answer to a ping")]


def test_the_newer_connection_of_a_session_stays() -> None:
    broker = Broker()
    broker.open(1, session="me", generation=1)
    assert only(CloseConnection, broker.open(2, session="me", generation=2)) == [
        CloseConnection(1, TAKEN_OVER, "a newer connection of this session is here")
    ]
    [close] = only(CloseConnection, broker.open(3, session="me", generation=1))
    assert (close.connection, close.code) == (3, TAKEN_OVER)
    assert only(CloseConnection, broker.open(4, session="me", generation=1, grant=Grant("somebody else"))) == []


def test_moved_in_follows_the_last_answer() -> None:
    broker = Broker()
    assert frames(broker.open(1), 1)[-1] == MovedIn()
    wanted = (
        SubscriptionRequest(1, LIVE),
        SubscriptionRequest(2, LOGGED),
        SubscriptionRequest(3, channel_interest("__dynamoth__:x")),
    )
    found = frames(broker.open(2, *wanted), 2)
    assert [type(each) for each in found] == [Connected, Error]
    assert frames(broker.tell(ChannelConfirmed(b"news")), 2) == [Subscribed(1, LIVE.id)]
    [read] = reads(broker.tell(ChannelConfirmed(LOGGED.log_channel)))
    assert frames(broker.page(read, 0), 2) == [Subscribed(2, LOGGED.id, Position(EPOCH, 0)), MovedIn()]


def test_moved_in_waits_for_nothing_that_was_asked_for_twice_or_given_up() -> None:
    broker = Broker()
    broker.open(1, SubscriptionRequest(1, LIVE), SubscriptionRequest(2, LIVE))
    assert frames(broker.tell(ChannelConfirmed(b"news")), 1) == [Subscribed(2, LIVE.id), MovedIn()]
    broker.open(2, SubscriptionRequest(1, LOGGED))
    assert frames(broker.frame(2, Unsubscribe(LOGGED.id)), 2) == [Unsubscribed(LOGGED.id), MovedIn()]


@pytest.mark.parametrize(
    ("interest", "grant", "why"),
    [
        (channel_interest("__dynamoth__:plan"), EVERYTHING, "the name '__dynamoth__:plan' is reserved"),
        (channel_interest(LOGGED.log_channel.decode()), EVERYTHING, "is reserved: use another one"),
        (channel_interest("d:reports"), EVERYTHING, "'d:reports' is where records of a dataset are published: subscr"),
        (query_interest("near", {"user": True}), Grant(bound={"near": {"user": 1}}), "parameter 'user' of this query"),
        (
            query_interest("near", {}),
            Grant(bound={"near": {"user": None}}),
            "'user', which this subscription does not have",
        ),
        (
            channel_interest("secret"),
            Grant(channels=("news.*",)),
            "channel 'secret' needs a token whose claim 'channels'",
        ),
        (
            query_interest("near", {"a": 1, "b": "2"}),
            Grant(bound={"near": {"a": 1, "b": "1"}}),
            "parameter 'b' of this",
        ),
        (query_interest("near", {}), Grant(queries=("other",)), "query 'near' needs a token whose claim 'queries'"),
    ],
)
def test_what_a_token_does_not_allow_is_refused(interest: Interest, grant: Grant, why: str) -> None:
    broker = Broker()
    broker.open(1, grant=grant)
    actions = broker.subscribe(1, interest, ref=5)
    [error] = frames(actions, 1)
    assert (error.code, error.retry, error.ref) == ("forbidden", "never", 5)
    assert why in error.message
    assert only(SubscribeChannel, actions) == []
    assert len(broker.broker.interests) == 0


def test_nobody_publishes_on_the_channel_of_a_log() -> None:
    broker = Broker()
    broker.open(1)
    [error] = frames(broker.frame(1, PublishRequest(5, channel_interest(LOGGED.log_channel.decode()), b"forged")), 1)
    assert (error.code, error.ref) == ("forbidden", 5)
    assert "is reserved" in error.message


def test_a_new_token_of_another_user_or_with_fewer_rights_counts() -> None:
    broker = Broker()
    broker.open(1, grant=Grant("ann"))
    broker.joined(1)
    [error] = frames(broker.tell(Refreshed(1, Grant("bob"))), 1)
    assert error.code == "token_refused"
    assert only(CloseConnection, broker.tell(Refreshed(1, Grant("ann", channels=("log.*",))))) == []
    [closed] = only(CloseConnection, broker.tell(Refreshed(1, Grant("ann", channels=("other",)))))
    assert closed.code == GOING_AWAY


def test_there_is_a_bound_of_subscriptions_and_one_of_sessions() -> None:
    broker = Broker(replace(OPTIONS, subscriptions_per_session_max=1, sessions_max=1))
    broker.open(1)
    broker.subscribe(1, LIVE)
    assert frames(broker.subscribe(1, LOGGED, ref=2), 1)[0].code == "too_many"
    assert not only(Error, frames(broker.subscribe(1, LIVE, ref=3), 1))
    actions = broker.open(2)
    assert frames(actions, 2)[0].code == "full"
    assert [each.code for each in only(CloseConnection, actions)] == [FULL]


def test_without_log_servers_logged_interests_are_refused() -> None:
    broker = Subject(BrokerMachine(replace(OPTIONS, logs={}), 7))
    broker.tell(Start(), Opened(1, Connect("me"), EVERYTHING))
    subscribe, publish = Subscribe(SubscriptionRequest(1, LOGGED)), PublishRequest(2, LOGGED, b"x")
    codes = [each.code for each in frames(broker.tell(Received(1, subscribe), Received(1, publish)), 1)]
    assert codes == ["log_unavailable", "log_unavailable"]


def test_a_token_ends_and_a_new_one_lasts() -> None:
    broker = Broker()
    for number in (1, 2):
        broker.open(number, grant=Grant("me", expires_at=broker.now + 10.0), session=f"s{number}")
    broker.tell(Refreshed(1, Grant("me", expires_at=broker.now + 100.0)))
    broker.tell(Refreshed(2, Grant("somebody else", expires_at=broker.now + 100.0)))
    assert [(each.connection, each.code) for each in only(CloseConnection, broker.pass_time(20.0))] == [
        (2, TOKEN_EXPIRED)
    ]


def test_a_token_that_outlives_many_pings_ends_in_time() -> None:
    broker = Broker(replace(OPTIONS, ping_s=5.0))
    expires_at = broker.now + 42.0
    broker.open(1, grant=Grant("me", expires_at=expires_at))
    for _ in range(41):
        assert only(CloseConnection, broker.pass_time(1.0)) == []
        broker.frame(1, Pong())
    assert [each.code for each in only(CloseConnection, broker.pass_time(1.1))] == [TOKEN_EXPIRED]


def test_a_connection_that_has_ended_does_not_stay_in_memory_until_its_token_expires() -> None:
    broker = Broker(replace(OPTIONS, ping_s=5.0))
    for number in range(100):
        broker.open(number, grant=Grant("me", expires_at=broker.now + 3600.0))
        broker.tell(Closed(number))
    broker.pass_time(20.0)
    gc.collect()
    known = broker.broker.sessions
    assert [each for each in gc.get_objects() if isinstance(each, Session) and each.grant.user == "me"] == []
    assert not known


def test_who_is_refused_takes_no_room() -> None:
    broker = Broker(replace(NO_PINGS, sessions_max=1))
    broker.open(1)
    assert [each.code for each in only(CloseConnection, broker.open(2))] == [FULL]
    broker.tell(Closed(1))
    assert only(CloseConnection, broker.open(3)) == []  # although the connection of 2 is being closed


def test_a_stop_closes_everything_and_admits_nobody() -> None:
    broker = Broker()
    broker.open(1)
    assert [each.code for each in only(CloseConnection, broker.tell(Stop()))] == [RESTARTING]
    assert [each.code for each in only(CloseConnection, broker.open(2))] == [GOING_AWAY]
    assert broker.frame(1, Ack({})) == []


# Publications that are in no log.


def test_what_comes_on_the_plain_name_of_a_logged_channel_is_noted_now_and_then() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1)
    plain = Publications([(LOGGED.name.encode(), b"lost")])
    [noted] = broker.tell(plain)
    assert isinstance(noted, Noted)
    assert noted.fields == {"channel": LOGGED.name}
    assert "LogPublisher" in noted.cause
    assert broker.tell(plain, plain) == []
    assert broker.broker.counters["unlogged"] == 3
    broker.pass_time(WARN_S)
    assert len(only(Noted, broker.tell(plain))) == 1
    broker.tell(Publications([(b"never heard of", b"x")]))
    assert broker.broker.counters["unlogged"] == 4


def test_the_plain_name_is_watched_although_a_query_of_that_name_is_left() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1)
    query = query_interest(LOGGED.name, {})
    broker.subscribe(1, query)
    broker.frame(1, Unsubscribe(query.id))
    assert only(UnsubscribeChannel, broker.pass_time(OPTIONS.linger_s)) == [UnsubscribeChannel(query.log_channel)]
    assert len(only(Noted, broker.tell(Publications([(LOGGED.name.encode(), b"lost")])))) == 1


def test_the_plain_name_that_cannot_be_subscribed_to_refuses_nobody() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1)
    assert broker.tell(ChannelConfirmed(LOGGED.name.encode())) == []
    assert broker.tell(ChannelFailed(LOGGED.name.encode(), "NOPERM")) == []
    assert offsets(broker.publish(1), 1) == [1]


def test_the_names_that_a_broker_listens_to_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlogged, "WATCHED_MAX", 1)
    broker = Broker()
    broker.open(1)
    assert len(only(SubscribeChannel, broker.subscribe(1, LOGGED))) == 2
    other = channel_interest("log.other")
    assert only(SubscribeChannel, broker.subscribe(1, other, ref=2)) == [SubscribeChannel(other.log_channel)]
    refused = broker.tell(ChannelFailed(LOGGED.log_channel, "NOPERM"))
    assert only(UnsubscribeChannel, refused) == [UnsubscribeChannel(LOGGED.name.encode())]


# Publishing.


def test_a_logged_publication_is_appended_first_and_published_with_its_place() -> None:
    broker = Broker()
    broker.open(1)
    actions = broker.frame(1, PublishRequest(3, LOGGED, b"m8"))
    [append] = reads(actions)
    assert only(PublishMessage, actions) == []
    actions = broker.tell(Replied(LOG, append.tag, [b"%016x" % EPOCH, 8, 1]))
    assert actions == [
        PublishMessage(LOGGED.log_channel, pack_publication(LoggedPublication(EPOCH, 8, b"m8"))),
        Transmit(1, Published(3, Position(EPOCH, 8))),
    ]


def test_a_log_server_is_told_which_log_servers_there_are() -> None:
    broker = Broker(replace(NO_PINGS, logs={"l2": "redis://l2", "l1": "redis://l1:6379"}))
    broker.down(LOG)
    [names] = only(Send, broker.up(LOG))
    assert (names.link, names.args) == (LOG, (b"SET", SERVERS_KEY, b"l1 l2"))
    assert broker.tell(Replied(LOG, names.tag, "OK")) == []


@pytest.mark.parametrize("prefix", ["", "ERR "])
def test_a_channel_of_a_fenced_writer_is_published_on_by_nobody_else(prefix: str) -> None:
    broker = Broker()
    broker.open(1)
    [append] = reads(broker.frame(1, PublishRequest(3, LOGGED, b"x")))
    [error] = frames(broker.tell(Replied(LOG, append.tag, ErrorReply(f"{prefix}FENCED by a newer writer, term 3"))), 1)
    assert (error.code, error.retry, error.ref) == ("forbidden", "never", 3)
    assert broker.broker.counters["log_errors"] == 0


def test_nobody_knows_the_outcome_of_an_append_whose_answer_cannot_be_read() -> None:
    broker = Broker()
    broker.open(1)
    [append] = reads(broker.frame(1, PublishRequest(3, LOGGED, b"x")))
    assert [each.code for each in frames(broker.tell(Replied(LOG, append.tag, [7])), 1)] == ["unknown_outcome"]


def test_nobody_knows_the_outcome_of_an_append_whose_connection_of_an_append_whose_connection_was_lost() -> None:
    broker = Broker()
    broker.open(1)
    broker.frame(1, PublishRequest(3, LOGGED, b"x"))
    assert [each.code for each in frames(broker.down(LOG), 1)] == ["unknown_outcome"]
    assert [each.code for each in frames(broker.frame(1, PublishRequest(4, LOGGED, b"x")), 1)] == ["log_unavailable"]
    assert reads(broker.up(LOG)) == []  # it is not appended again


def test_an_append_that_the_log_refuses_is_not_published() -> None:
    broker = Broker()
    broker.open(1)
    [append] = reads(broker.frame(1, PublishRequest(3, LOGGED, b"x")))
    actions = broker.tell(Replied(LOG, append.tag, ErrorReply("OOM")))
    assert only(PublishMessage, actions) == []
    assert [each.code for each in frames(actions, 1)] == ["log_unavailable"]


def test_a_read_that_a_lost_connection_has_interrupted_is_sent_again() -> None:
    broker = Broker()
    broker.open(1)
    broker.subscribe(1, LOGGED)
    broker.tell(ChannelConfirmed(LOGGED.log_channel))
    broker.down(LOG)
    [read] = reads(broker.up(LOG))
    assert frames(broker.page(read, 0), 1) == [Subscribed(1, LOGGED.id, Position(EPOCH, 0))]


def test_a_live_publication_is_answered_when_it_was_published() -> None:
    broker = Broker()
    broker.open(1, grant=Grant(publish=("news",)))
    [publish] = only(PublishMessage, broker.frame(1, PublishRequest(3, LIVE, b"x")))
    assert (publish.channel, publish.payload) == (b"news", b"x")
    assert frames(broker.tell(MessagePublished(publish.token)), 1) == [Published(3)]
    [error] = frames(broker.frame(1, PublishRequest(4, LOGGED, b"x")), 1)
    assert (error.code, error.ref) == ("forbidden", 4)
    assert error.message == f"publishing on {LOGGED.name!r} needs a token whose claim 'publish' allows it"


# Migration and drain.


def test_bye_waits_for_the_barriers_of_live_interests_and_names_offsets() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, LIVE)
    broker.joined(1, tip=4)
    assert [type(each) for each in frames(broker.tell(MoveSession(1, ("wss://b2",))), 1)] == [Move]
    actions = broker.frame(1, Leave())
    assert only(RaiseBarrier, actions) == [RaiseBarrier(b"news")]
    assert frames(actions, 1) == []
    assert frames(broker.tell(Publications([(b"news", b"x")])), 1) == [Data(LIVE.id, b"x")]
    assert frames(broker.tell(BarrierPassed(b"news")), 1) == [Bye({LOGGED.id: 4})]
    assert offsets(broker.publish(5), 1) == [5]  # until it closes
    assert only(CloseConnection, broker.pass_time(OPTIONS.grace_s)) == [CloseConnection(1, NORMAL, "moved")]


def test_who_leaves_while_a_barrier_is_under_way_waits_for_the_next_one() -> None:
    broker = Broker()
    for number in (1, 2, 3):
        broker.open(number)
    broker.joined(1, LIVE)
    broker.subscribe(2, LIVE)
    broker.subscribe(3, LIVE)
    broker.frame(1, Leave())
    assert only(RaiseBarrier, [*broker.frame(2, Leave()), *broker.frame(3, Leave())]) == []
    broker.tell(Closed(3))
    actions = broker.tell(BarrierPassed(b"news"))
    assert (frames(actions, 1), frames(actions, 2)) == ([Bye({})], [])
    assert only(RaiseBarrier, actions) == [RaiseBarrier(b"news")]
    actions = broker.tell(BarrierPassed(b"news"))
    assert [each.connection for each in only(Transmit, actions)] == [2]


def test_who_has_nothing_live_gets_bye_at_once_and_only_once() -> None:
    broker = Broker()
    broker.open(1)
    assert frames(broker.frame(1, Leave()), 1) == [Bye({})]
    assert frames(broker.frame(1, Leave()), 1) == []
    assert broker.tell(MoveSession(1, ("wss://b2",))) == []


def moves(actions: list[Any]) -> list[Any]:
    return [action.connection for action in only(Transmit, actions) if isinstance(action.frame, Move)]


@pytest.mark.parametrize(
    ("rate", "after_s", "asked"), [(10.0, 1.0, 10), (10.0, 2.0, 20), (0.5, 2.5, 1), (1000.0, 1.0, 30)]
)
def test_a_drain_asks_at_its_rate(rate: float, after_s: float, asked: int) -> None:
    broker = Broker()
    for number in range(30):
        broker.open(number)
    broker.tell(Drain(rate))
    assert len(set(moves(broker.pass_time(after_s + 0.05)))) == asked


def test_a_drain_that_begins_again_at_once_has_its_own_rate() -> None:
    broker = Broker()
    for number in range(30):
        broker.open(number)
    broker.tell(Drain(10.0))
    broker.tell(EndDrain())
    broker.tell(Drain(10.0))
    assert len(set(moves(broker.pass_time(1.05)))) == 10


def test_a_slow_user_of_a_live_interest_who_leaves_gets_the_gap_before_bye() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1, LIVE)
    broker.tell(Overflowed(1))
    broker.frame(1, Leave())
    broker.tell(Publications([(b"news", b"x")]))
    assert frames(broker.tell(BarrierPassed(b"news")), 1) == [Gap(LIVE.id, "slow", count=1), Bye({})]


def test_a_drain_spreads_users_admits_nobody_and_asks_again() -> None:
    broker = Broker()
    for number in (1, 2):
        broker.open(number)
    broker.tell(Drain(100.0))
    actions = broker.pass_time(1.0)
    assert moves(actions) == [1, 2]
    targets = [action.frame.to for action in only(Transmit, actions) if isinstance(action.frame, Move)]
    assert targets[0][0] != targets[1][0]
    assert [each.code for each in only(CloseConnection, broker.open(3))] == [GOING_AWAY]
    broker.tell(Closed(3))
    broker.frame(1, Leave())
    assert moves(broker.pass_time(OPTIONS.move_timeout_s)) == [2]
    broker.tell(EndDrain())
    assert moves(broker.pass_time(2 * OPTIONS.move_timeout_s)) == []
    assert only(CloseConnection, broker.open(4)) == []


def test_invariants_are_checked() -> None:
    broker = Broker()
    broker.open(1)
    broker.joined(1)
    shared = broker.broker.interests.by_id[LOGGED.id]
    [subscription] = shared.live.values()
    subscription.stage = Stage.CATCHING
    with pytest.raises(AssertionError):
        broker.publish(1)
