"""Who is present, as the broker's machine sees it: what happens to sessions, and the commands that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dynamoth.edge.frames import (
    AskMembers,
    Connect,
    Error,
    Leave,
    Members,
    Subscribe,
    Subscribed,
    SubscriptionRequest,
    Unsubscribe,
)
from dynamoth.edge.interests import Interest, channel_interest, presence_interest
from dynamoth.edge.positions import FIND_SCRIPT
from dynamoth.edge.presence import CHANGE_SCRIPT, MEMBERS_SCRIPT, member_id
from dynamoth.edge.publications import LoggedPublication, Position, unpack_publication
from dynamoth.machine.events import ErrorReply, Replied, Send
from dynamoth_broker import presence
from dynamoth_broker.events import (
    LOST,
    MOVE_FAILED,
    NORMAL,
    ChannelConfirmed,
    Closed,
    Grant,
    Opened,
    Overflowed,
    PublishMessage,
    Refreshed,
    Stop,
    Stopped,
    Transmit,
)
from dynamoth_broker.presence import CHANGES_MAX
from tests.broker.test_machine import EPOCH, LOG, NO_PINGS, Broker, frames
from tests.machines.helpers import only

# pyright: reportPrivateUsage=false

CHANNEL = channel_interest("room")
ROOM = presence_interest("room")
OPTIONS = replace(NO_PINGS, presence=("room",), presence_ttl_s=30.0, presence_grace_s=10.0)
ANN = Grant("ann", publish=("*",))
FIRST_CHANGE = 17
"""Where the changes begin in the words of a command."""


class PresentBroker(Broker):
    """A broker of the channel "room"; its user 1 is ann, and so on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(replace(OPTIONS, **options))
        self.offset = 0

    def enter(self, connection: int, *, is_answered: bool = True, **connect: Any) -> list[Any]:
        """Let a user come who is present; return what is sent to the log's server."""
        actions = self.open(connection, SubscriptionRequest(1, CHANNEL, None, is_present=True), grant=ANN, **connect)
        actions += self.tell(ChannelConfirmed(b"room"))
        if is_answered:
            self.answer_all(actions)
        return actions

    def answer(self, send: Send, *events: bytes, has_more: int = 0, rest: Sequence[Any] = ()) -> list[Any]:
        self.offset += len(events)
        reply = [b"%016x" % EPOCH, self.offset, has_more, len(events), *events, *rest]
        return self.tell(Replied(LOG, send.tag, reply))

    def answer_all(self, actions: list[Any]) -> list[Any]:
        """Answer commands until none is left; return what they have brought."""
        made: list[Any] = []
        while sends := only(Send, actions):
            actions = [action for send in sends for action in self.answer(send)]
            made += actions
        return made

    def passing(self, seconds: float) -> list[Any]:
        """Let time pass in small steps, with a server that answers; return all commands."""
        made: list[Any] = []
        for _ in range(round(seconds * 10)):
            actions = self.pass_time(0.1)
            made += [*actions, *self.answer_all(actions)]
        return made


def changes(actions: list[Any]) -> list[tuple[str, str, int]]:
    """Return what commands say: what happens, the session, and the generation."""
    names = {member_id("ann", f"session{number}"): f"session{number}" for number in range(10)}
    made: list[tuple[str, str, int]] = []
    for send in only(Send, actions):
        words = [*send.args][FIRST_CHANGE:] if send.args[1] == CHANGE_SCRIPT else []
        for kind, member, generation in zip(words[::4], words[1::4], words[2::4], strict=True):
            assert isinstance(kind, bytes) and isinstance(member, bytes)
            made.append((kind.decode(), names.get(member.decode(), member.decode()), int(generation)))
    return made


def touches(actions: list[Any]) -> int:
    return sum(send.args[1] == CHANGE_SCRIPT and len(send.args) == FIRST_CHANGE for send in only(Send, actions))


def publications(actions: list[Any]) -> list[LoggedPublication]:
    made = only(PublishMessage, actions)
    assert all(each.channel == ROOM.log_channel for each in made)
    return [unpack_publication(each.payload) for each in made]


def ask(broker: PresentBroker, connection: int, ref: int = 7, interest: Interest = ROOM) -> list[Any]:
    """Let a user ask who is present; it subscribes to the presence before, as it has to."""
    if interest.id not in broker.broker.sessions[connection].subscriptions:
        broker.subscribe(connection, interest, ref=99)
    return broker.frame(connection, AskMembers(ref, interest))


# Sessions.


def test_who_subscribes_as_present_enters_once_confirmed() -> None:
    broker = PresentBroker()
    assert (
        only(Send, broker.open(1, SubscriptionRequest(1, CHANNEL, None, is_present=True), grant=ANN, generation=5))
        == []
    )
    actions = broker.tell(ChannelConfirmed(b"room"))
    assert changes(actions) == [("enter", "session1", 5)]
    [send] = only(Send, actions)
    assert publications(broker.answer(send, b"joined")) == [LoggedPublication(EPOCH, 1, b"joined")]


def test_who_is_present_and_stored_enters_once_its_position_is_known() -> None:
    broker = PresentBroker(history=("room",))
    [find] = only(
        Send, broker.open(1, SubscriptionRequest(1, CHANNEL, None, is_stored=True, is_present=True), grant=ANN)
    )
    assert find.args[1] == FIND_SCRIPT
    [tip] = only(Send, broker.tell(ChannelConfirmed(CHANNEL.log_channel)))
    assert changes(broker.page(tip, 5)) == []
    actions = broker.tell(Replied(LOG, find.tag, [b"%016x 5" % EPOCH, 0]))
    assert frames(actions, 1)[0] == Subscribed(1, CHANNEL.id, Position(EPOCH, 5))
    assert changes(actions) == [("enter", "session1", 0)]


def test_who_is_not_present_changes_nothing() -> None:
    broker = PresentBroker()
    actions = broker.open(1, SubscriptionRequest(1, CHANNEL))
    actions += broker.tell(ChannelConfirmed(b"room"), Closed(1, NORMAL))
    assert only(Send, actions) == []


@pytest.mark.parametrize(
    ("code", "kind"), [(NORMAL, "exit"), (1001, "release"), (LOST, "release"), (4000, "release"), (MOVE_FAILED, "move")]
)
def test_the_close_code_says_what_becomes_of_a_member(code: int, kind: str) -> None:
    broker = PresentBroker()
    broker.enter(1, generation=3)
    assert changes(broker.tell(Closed(1, code))) == [(kind, "session1", 3)]


def test_a_broker_that_closes_a_connection_releases_the_member() -> None:
    broker = PresentBroker()
    broker.enter(1)
    rights = Grant("ann", channels=("other",))
    assert changes(broker.tell(Refreshed(1, rights))) == [("release", "session1", 0)]


def test_after_the_time_of_grace_a_broker_touches_the_channel() -> None:
    broker = PresentBroker()
    broker.enter(1)
    broker.answer_all(broker.tell(Closed(1, LOST)))
    before = broker.pass_time(10.0)
    assert touches(broker.pass_time(0.06)) == 1
    assert touches(before) == 0


def test_who_leaves_keeps_the_lease_and_the_end_of_the_connection_says_nothing_more() -> None:
    broker = PresentBroker()
    broker.enter(1)
    actions = broker.frame(1, Leave())
    assert changes(actions) == [("move", "session1", 0)]
    broker.answer_all(actions)
    assert changes(broker.tell(Closed(1, NORMAL))) == []


def test_who_has_left_does_not_enter_again() -> None:
    broker = PresentBroker()
    broker.enter(1)
    broker.answer_all(broker.frame(1, Leave()))
    assert changes(broker.frame(1, Subscribe(SubscriptionRequest(2, CHANNEL, None, is_present=True)))) == []


def test_a_stop_says_nothing() -> None:
    broker = PresentBroker()
    broker.enter(1)
    assert changes(broker.tell(Stop(), Closed(1, NORMAL))) == []


def test_a_broker_that_stops_does_not_wait_for_presence() -> None:
    broker = PresentBroker()
    [send] = only(Send, broker.enter(1, is_answered=False))
    broker.frame(1, Unsubscribe(CHANNEL.id))
    assert only(Stopped, broker.tell(Stop())) == [Stopped()]
    assert only(Stopped, broker.answer(send)) == []


def test_who_unsubscribes_leaves_at_once() -> None:
    broker = PresentBroker()
    broker.enter(1)
    assert changes(broker.frame(1, Unsubscribe(CHANNEL.id))) == [("exit", "session1", 0)]


def test_a_subscription_that_is_refused_for_now_is_no_leave() -> None:
    broker = PresentBroker(history=("room",), log_wait_s=3.0)
    actions = broker.open(1, SubscriptionRequest(1, CHANNEL, None, is_present=True), grant=ANN)
    [tip] = only(Send, broker.tell(ChannelConfirmed(CHANNEL.log_channel)))
    actions = broker.tell(Replied(LOG, tip.tag, [b"%016x" % EPOCH, 5, 1]))
    broker.answer_all(actions)
    far = Position(EPOCH, 1)
    broker.frame(1, Subscribe(SubscriptionRequest(2, CHANNEL, far, is_present=True)))
    actions = broker.pass_time(3.0)  # its log does not answer
    assert [each.code for each in frames(actions, 1)] == ["log_unavailable"]
    assert [kind for kind, *_ in changes(actions)] == ["release"]


def test_members_are_for_those_who_watch() -> None:
    broker = PresentBroker()
    broker.enter(1)
    [error] = frames(broker.frame(1, AskMembers(7, ROOM)), 1)
    assert (error.code, error.ref) == ("forbidden", 7)


def test_to_subscribe_again_is_no_leave_unless_it_is_not_as_present() -> None:
    broker = PresentBroker()
    broker.enter(1)
    actions = broker.frame(1, Subscribe(SubscriptionRequest(2, CHANNEL, None, is_present=True)))
    assert changes(actions) == [("enter", "session1", 0)]
    broker.answer_all(actions)
    assert changes(broker.frame(1, Subscribe(SubscriptionRequest(3, CHANNEL)))) == [("exit", "session1", 0)]


def test_a_newer_connection_of_a_session_enters_behind_the_older_one() -> None:
    broker = PresentBroker()
    broker.enter(1, session="session1", generation=1)
    actions = broker.open(
        2, SubscriptionRequest(1, CHANNEL, None, is_present=True), grant=ANN, session="session1", generation=2
    )
    actions += broker.answer_all(actions)
    assert changes(actions) == [("enter", "session1", 2)]  # what waited longer is replaced
    assert changes(broker.tell(Closed(1, NORMAL))) == []


# Commands.


def test_changes_gather_while_a_command_is_under_way() -> None:
    broker = PresentBroker()
    [first] = only(Send, broker.enter(1, is_answered=False))
    actions = [*broker.enter(2, is_answered=False), *broker.enter(3, is_answered=False)]
    actions += broker.tell(Closed(3, NORMAL))
    assert changes(actions) == []
    assert changes(broker.answer(first)) == [("enter", "session2", 0), ("exit", "session3", 0)]


def test_a_command_has_a_bound() -> None:
    broker = PresentBroker()
    [first] = only(Send, broker.enter(0, is_answered=False))
    for number in range(1, CHANGES_MAX + 4):
        broker.enter(number, is_answered=False)
    actions = broker.answer(first)
    assert len(changes(actions)) == CHANGES_MAX
    [second] = only(Send, actions)
    assert len(changes(broker.answer(second))) == 3


def test_a_broker_names_its_members_again_and_again() -> None:
    broker = PresentBroker()
    broker.enter(1)
    broker.enter(2)
    for _ in range(3):
        assert sorted(changes(broker.passing(9.0))) == [("enter", "session1", 0), ("enter", "session2", 0)]


def test_a_channel_that_is_only_watched_is_touched_and_forgotten_when_nobody_watches() -> None:
    broker = PresentBroker()
    broker.open(1, SubscriptionRequest(1, ROOM), grant=ANN)
    [read] = only(Send, broker.tell(ChannelConfirmed(ROOM.log_channel)))
    broker.page(read, 0)
    assert touches(broker.passing(9.0)) == 1
    broker.tell(Closed(1, NORMAL))
    broker.passing(20.0)
    assert broker.broker.presence._channels == {}
    assert touches(broker.passing(20.0)) == 0


def test_a_change_that_was_not_answered_is_made_again() -> None:
    broker = PresentBroker()
    [send] = only(Send, broker.enter(1, is_answered=False))
    assert changes(broker.tell(Replied(LOG, send.tag, ErrorReply("ERR")))) == []
    assert broker.broker.counters["presence_failed"] == 1
    assert changes(broker.passing(9.0)) == [("enter", "session1", 0)]
    broker.down(LOG)
    assert changes(broker.tell(Closed(1, NORMAL))) == []
    assert changes(broker.up(LOG)) == [("exit", "session1", 0)]


def test_an_exit_is_not_tried_for_longer_than_a_lease() -> None:
    broker = PresentBroker()
    broker.enter(1)
    broker.down(LOG)
    broker.tell(Closed(1, NORMAL))
    broker.passing(50.0)
    assert changes(broker.up(LOG)) == []
    assert broker.broker.presence._channels == {}


def test_a_server_that_is_up_again_gets_all_members_at_once() -> None:
    broker = PresentBroker()
    broker.enter(1)
    broker.enter(2)
    broker.down(LOG)
    assert sorted(changes(broker.up(LOG))) == [("enter", "session1", 0), ("enter", "session2", 0)]


def test_an_answer_that_comes_too_late_is_ignored() -> None:
    broker = PresentBroker()
    [send] = only(Send, broker.enter(1, is_answered=False))
    assert changes(broker.pass_time(6.0)) == []  # log_wait_s
    assert broker.answer(send, b"joined") == []
    assert changes(broker.passing(4.0)) == [("enter", "session1", 0)]


def test_a_server_with_more_to_end_is_touched_again() -> None:
    broker = PresentBroker()
    [send] = only(Send, broker.enter(1, is_answered=False))
    actions = broker.answer(send, b"a", b"b", has_more=1)
    assert [each.offset for each in publications(actions)] == [1, 2]
    assert touches(actions) == 1


# Members.


def test_members_are_those_of_the_position() -> None:
    broker = PresentBroker()
    broker.open(1, grant=ANN)
    [send] = only(Send, ask(broker, 1))
    assert send.args[1] == MEMBERS_SCRIPT
    row = b"m" * 22, b'"bob"'
    actions = broker.answer(send, b"left", rest=(1, *row))
    assert publications(actions) == [LoggedPublication(EPOCH, 1, b"left")]
    assert frames(actions, 1) == [Members(7, (("m" * 22, "bob"),), 1, Position(EPOCH, 1))]


def test_who_asks_while_members_are_read_gets_later_ones_and_all_of_them_get_the_same() -> None:
    broker = PresentBroker()
    for number in (1, 2, 3):
        broker.open(number, grant=ANN)
    [first] = only(Send, ask(broker, 1))
    assert [*ask(broker, 2, 8), *ask(broker, 3, 9), *ask(broker, 3, 10)] == []
    actions = broker.answer(first, rest=(0,))
    assert [frames(actions, number) for number in (1, 2, 3)] == [[Members(7, (), 0, Position(EPOCH, 0))], [], []]
    [second] = only(Send, actions)
    actions = broker.answer(second, b"joined", rest=(0,))
    assert frames(actions, 2) == [Members(8, (), 0, Position(EPOCH, 1))]
    assert frames(actions, 3) == [Members(10, (), 0, Position(EPOCH, 1))]


def test_long_lists_are_not_sent_to_everybody_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "NAMES_AT_ONCE", 2)
    broker = PresentBroker()
    for number in range(6):
        broker.open(number, grant=ANN)
    [first] = only(Send, ask(broker, 0))
    for number in range(1, 6):
        ask(broker, number)
    [second] = only(Send, broker.answer(first, rest=(0,)))
    broker.tell(Closed(4))
    row = b"m" * 22, b'"bob"'
    answered = [only(Transmit, broker.answer(second, rest=(1, *row)))]
    answered += [only(Transmit, broker.pass_time(presence.ANSWER_INTERVAL_S + 0.001)) for _ in range(3)]
    assert [[each.connection for each in some] for some in answered] == [[1, 2], [3], [5], []]


def test_members_that_cannot_be_read_are_an_error() -> None:
    broker = PresentBroker()
    broker.open(1, grant=ANN)
    [send] = only(Send, ask(broker, 1))
    for actions in (broker.tell(Replied(LOG, send.tag, b"nonsense")), [*broker.down(LOG), *ask(broker, 1)]):
        [error] = frames(actions, 1)
        assert (error.code, error.retry, error.ref) == ("log_unavailable", "later", 7)


def test_who_does_not_read_gets_no_list() -> None:
    broker = PresentBroker()
    broker.open(1, grant=ANN)
    [send] = only(Send, ask(broker, 1))
    broker.tell(Overflowed(1))
    [error] = frames(broker.answer(send, rest=(0,)), 1)
    assert (error.code, error.retry) == ("unavailable", "later")


def test_who_has_gone_gets_no_answer() -> None:
    broker = PresentBroker()
    broker.open(1, grant=ANN)
    [send] = only(Send, ask(broker, 1))
    broker.tell(Closed(1))
    assert broker.answer(send, rest=(0,)) == []


# Rights.


@pytest.mark.parametrize(
    "wanted",
    [
        SubscriptionRequest(1, channel_interest("hall"), None, is_present=True),
        SubscriptionRequest(1, presence_interest("hall")),
        SubscriptionRequest(1, presence_interest("q:hall")),
        SubscriptionRequest(1, ROOM, None, is_present=True),
    ],
)
def test_only_listed_channels_have_a_presence(wanted: SubscriptionRequest) -> None:
    broker = PresentBroker(presence=("room", "q:*"))
    actions = broker.open(1, wanted, grant=ANN)
    [error] = [frame for frame in frames(actions, 1) if isinstance(frame, Error)]
    assert (error.code, error.ref) == ("forbidden", 1)


def test_the_right_to_watch_is_that_of_the_channel() -> None:
    broker = PresentBroker()
    rights = Grant("ann", channels=("other",), queries=("*",))
    opened = broker.tell(Opened(1, connect=_connect(SubscriptionRequest(1, ROOM)), grant=rights))
    assert [frame.code for frame in frames(opened, 1) if isinstance(frame, Error)] == ["forbidden"]
    assert [frame.code for frame in frames(ask(broker, 1), 1)] == ["forbidden"]
    assert [frame.code for frame in frames(ask(broker, 1, interest=presence_interest("hall")), 1)] == ["forbidden"]


def test_a_presence_is_logged() -> None:
    broker = PresentBroker()
    broker.open(1, SubscriptionRequest(1, ROOM), grant=ANN)
    [read] = only(Send, broker.tell(ChannelConfirmed(ROOM.log_channel)))
    assert frames(broker.page(read, 4), 1)[0] == Subscribed(1, ROOM.id, Position(EPOCH, 4))


def _connect(*subs: SubscriptionRequest) -> Connect:
    return Connect("session1", subs=subs)
