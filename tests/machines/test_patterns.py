"""The pattern machine: at every server, confirmed when nothing can be missed any more, each message once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dynamoth.machine.events import Connect, Disconnect, ErrorReply, Pushed, Replied, Send, Start
from dynamoth.names import PATTERN_PREFIX, inbox, replica_channel, replica_pattern
from dynamoth.plan.plan import JOIN_S, Plan
from dynamoth.protocol.control import LossNotice
from dynamoth.protocol.envelope import FIRST, FORWARDED, HEARTBEAT, QUIET_MS_MAX, RAW, ROUTE_CHANGED, seal
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.patterns.events import (
    DeliverMatched,
    PatternGapDetected,
    PatternMessage,
    PatternOptions,
    SubscribePatterns,
    UnsubscribePatterns,
)
from dynamoth_client.machines.patterns.machine import PatternMachine
from dynamoth_client.machines.subscriber.events import SubscriptionConfirmed, SubscriptionEnded, SubscriptionFailed
from tests.machines.helpers import (
    GROWN,
    PLAN_0,
    RUN,
    SERVERS,
    URLS,
    Subject,
    commands,
    control,
    header_reply,
    message,
    only,
    over,
)

OPTIONS = PatternOptions(header_interval_s=1000.0)
P = b"news.*"
R = replica_pattern(P)
NEWS = b"news.x"


class Matcher(Subject):
    """A pattern subscriber, with servers that answer when the test says so."""

    def __init__(self, options: PatternOptions = OPTIONS, header: Plan = PLAN_0) -> None:
        self.plan = LocalPlan(header)
        self.patterns = PatternMachine(self.plan, options)
        super().__init__(self.patterns)
        self.tell(Start())

    def subscribe(self, *patterns: bytes) -> list[Any]:
        return self.tell(SubscribePatterns(patterns or (P,)))

    def unsubscribe(self, *patterns: bytes) -> list[Any]:
        return self.tell(UnsubscribePatterns(patterns or (P,)))

    def answer(self, actions: Iterable[Any], plan: Plan | None = PLAN_0) -> list[Any]:
        """Answer as servers that store ``plan``: acknowledge subscriptions and ends, and give the header."""
        got: list[Any] = []
        for send in only(Send, actions):
            got += self.answer_one(send, plan)
        return got

    def answer_one(self, send: Send, plan: Plan | None = PLAN_0) -> list[Any]:
        name = send.args[0]
        if name in (b"PSUBSCRIBE", b"PUNSUBSCRIBE", b"SUBSCRIBE", b"UNSUBSCRIBE"):
            assert isinstance(name, bytes)
            return self.tell(Pushed(send.link, [[name.lower(), pattern, 1] for pattern in send.args[1:]]))
        assert name == b"HMGET"
        value = [None, None, None] if plan is None else header_reply(plan)
        return self.tell(Replied(send.link, send.tag, value))

    def all_up(self, plan: Plan = PLAN_0) -> list[Any]:
        """Let every server be connected and answer."""
        return [action for server in plan.servers for action in self.answer(self.up(server), plan)]

    def confirmed(self, *patterns: bytes) -> Matcher:
        self.subscribe(*patterns)
        got = self.all_up()
        assert only(SubscriptionConfirmed, got) == [SubscriptionConfirmed(pattern) for pattern in patterns or (P,)]
        return self

    def matched(self, link: str, *datas: bytes, channel: bytes = NEWS, pattern: bytes = P) -> list[Any]:
        return self.tell(Pushed(link, [[b"pmessage", pattern, channel, data] for data in datas]))


def joining(*servers: str, options: PatternOptions = OPTIONS) -> Matcher:
    """Return a subscriber that has asked for the pattern, and has the answers of some servers."""
    matcher = Matcher(options)
    matcher.subscribe()
    for server in servers:
        matcher.answer(matcher.up(server))
    return matcher


def delivered(actions: Iterable[Any]) -> list[bytes]:
    return [each.payload for action in only(DeliverMatched, actions) for each in action.messages]


def essential(actions: Iterable[Any]) -> list[Send]:
    """Return the commands without those about channels that are named after patterns."""
    return [send for send in only(Send, actions) if send.args[0] not in (b"SUBSCRIBE", b"UNSUBSCRIBE")]


def quiet(number: int, quiet_ms: int, flags: int = 0) -> bytes:
    """Message ``number`` of publisher 7, so long after its previous one."""
    return seal(7, number, 0, b"m%d" % number, flags, quiet_ms)


# Confirmation.


def test_a_pattern_is_subscribed_to_at_every_server_and_the_header_is_read_behind_that() -> None:
    matcher = Matcher()
    assert matcher.subscribe() == [Connect(server, url) for server, url in URLS.items()]
    for server in ("s1", "s2"):
        asked = matcher.up(server)
        assert [send.args[0] for send in only(Send, asked)] == [b"PSUBSCRIBE", b"SUBSCRIBE", b"HMGET"]
        assert commands(asked, b"PSUBSCRIBE", server) == [(P, R)]
        assert commands(asked, b"SUBSCRIBE", server) == [(PATTERN_PREFIX + P,)]
        assert matcher.answer(asked) == []
    assert matcher.answer(matcher.up("s3")) == [SubscriptionConfirmed(P)]


def test_a_header_that_was_asked_for_before_the_subscription_does_not_confirm() -> None:
    matcher = Matcher(replace(OPTIONS, header_interval_s=1.0)).confirmed(b"other")
    earlier = only(Send, matcher.pass_time(1.0))
    asked = only(Send, matcher.subscribe())
    for send in asked:
        if send.args[0] == b"PSUBSCRIBE":
            assert matcher.answer_one(send) == []
    assert [matcher.answer_one(send) for send in earlier] == [[], [], []]
    headers = [send for send in asked if send.args[0] == b"HMGET"]
    assert matcher.answer(headers) == [SubscriptionConfirmed(P)]


def test_a_server_without_a_plan_is_asked_again_and_after_a_while_it_will_do() -> None:
    matcher = joining("s1", "s2", options=replace(OPTIONS, retry_s=0.5, failover_s=2.0))
    assert matcher.answer(matcher.up("s3", run_id="another than " + RUN)) == [], "a plan of an earlier process"
    assert matcher.patterns.counters["no_plan_at_server"] == 1
    for _ in range(3):
        assert matcher.answer(matcher.pass_time(0.5), None) == []
    assert matcher.answer(matcher.pass_time(0.5), None) == [SubscriptionConfirmed(P)]
    assert matcher.pass_time(1.0) == []


def test_a_server_that_is_away_for_long_is_done_without_and_that_is_reported() -> None:
    matcher = joining("s1", "s2")
    assert matcher.pass_time(OPTIONS.failover_s - 0.1) == []
    reason = "subscribed without what is published at s3, which cannot be reached"
    assert matcher.pass_time(0.1) == [SubscriptionConfirmed(P), PatternGapDetected(P, None, None, None, reason)]
    back = PatternGapDetected(P, None, None, None, "server s3 could not be reached")
    assert matcher.answer(matcher.up("s3")) == [back]


def test_a_reserved_pattern_and_one_that_the_server_refuses_are_gone() -> None:
    matcher = joining()
    assert [type(action) for action in matcher.subscribe(b"__dynamoth__:*")] == [SubscriptionFailed]
    [subscribe, header] = essential(matcher.up("s1"))
    refusal = ErrorReply("NOPERM this user has no permissions to access one of the channels used as arguments")
    got = matcher.tell(Replied("s1", subscribe.tag, refusal))
    assert got[-1] == SubscriptionFailed(P, str(refusal))
    assert matcher.answer_one(header) == []
    assert matcher.up("s2") == []


def test_a_plan_that_may_not_be_read_fails_the_pattern() -> None:
    matcher = joining()
    subscribe, header = essential(matcher.up("s1"))
    matcher.answer_one(subscribe)
    got = matcher.tell(Replied("s1", header.tag, ErrorReply("NOPERM no access")))
    assert only(SubscriptionFailed, got) == [SubscriptionFailed(P, "the stored plan cannot be read: NOPERM no access")]


def test_a_server_that_is_busy_is_asked_again() -> None:
    matcher = joining("s1", "s2")
    subscribe, header = essential(matcher.up("s3"))
    assert matcher.tell(Replied("s3", subscribe.tag, ErrorReply("BUSY running a script"))) == []
    assert matcher.answer_one(header) == []
    assert matcher.pass_time(OPTIONS.retry_s - 0.01) == []
    assert matcher.answer(matcher.pass_time(0.01)) == [SubscriptionConfirmed(P)]


# Messages.


def test_messages_come_with_pattern_and_channel() -> None:
    matcher = Matcher().confirmed()
    got = matcher.matched("s1", message(1, flags=FIRST), message(2))
    got += matcher.matched("s2", message(1, publisher=8, flags=FIRST), channel=b"news.y")
    seen = [each for action in only(DeliverMatched, got) for each in action.messages]
    assert seen == [PatternMessage(P, NEWS, b"m1"), PatternMessage(P, NEWS, b"m2"), PatternMessage(P, b"news.y", b"m1")]


def test_replicas_are_the_channel_and_copies_are_dropped() -> None:
    matcher = Matcher().confirmed()
    physical = replica_channel(NEWS, 77)
    got = matcher.matched("s1", message(1, flags=FIRST), channel=physical, pattern=R)
    assert got == [DeliverMatched([PatternMessage(P, NEWS, b"m1")])]
    assert matcher.matched("s2", message(1, flags=FIRST), channel=physical, pattern=R) == []
    assert matcher.matched("s3", message(1, flags=FORWARDED)) == []
    assert delivered(matcher.matched("s3", message(2, flags=ROUTE_CHANGED))) == [b"m2"]
    other = replica_channel(b"old:news.x", 77)
    assert matcher.matched("s1", message(1), channel=other, pattern=R) == [], "another channel that ends alike"


def test_an_early_message_waits_for_the_one_before_it() -> None:
    matcher = Matcher().confirmed()
    assert delivered(matcher.matched("s1", message(1, flags=FIRST))) == [b"m1"]
    assert matcher.matched("s2", message(3)) == []
    assert delivered(matcher.matched("s1", message(2))) == [b"m2", b"m3"]


def test_what_never_comes_is_reported() -> None:
    matcher = Matcher().confirmed()
    matcher.matched("s1", message(1, flags=FIRST))
    matcher.matched("s2", message(4))
    gap, released = matcher.pass_time(OPTIONS.hold_s_max)
    assert gap == PatternGapDetected(P, NEWS, 7, 2, "not arrived in time")
    assert released == DeliverMatched([PatternMessage(P, NEWS, b"m4")])


def test_an_unknown_publisher_s_message_waits_for_a_predecessor_that_is_missing_only() -> None:
    matcher = Matcher().confirmed()
    assert delivered(matcher.matched("s2", quiet(6, 500), channel=b"news.y")) == [b"m6"], "before the confirmation"
    matcher.now += 10.0
    assert matcher.matched("s2", quiet(6, 500)) == [], "number 5 came after the confirmation"
    assert delivered(matcher.matched("s1", quiet(5, 20_000))) == [b"m5", b"m6"]
    matcher.now += 90.0
    long_ago = quiet(6, QUIET_MS_MAX)
    assert delivered(matcher.matched("s2", long_ago, channel=b"news.z")) == [b"m6"], "it would have come"


def test_raw_messages_are_delivered_where_they_were_published() -> None:
    matcher = Matcher().confirmed()
    assert delivered(matcher.matched("s2", b"raw", b"raw")) == [b"raw", b"raw"]
    assert matcher.matched("s1", message(1, b"raw", flags=RAW | FORWARDED, publisher=99)) == []


def test_neither_control_messages_nor_reserved_channels_are_for_patterns() -> None:
    matcher = Matcher().confirmed()
    assert matcher.matched("s1", control(LossNotice(NEWS, 3))) == []
    for reserved in (inbox(7), b"__keyspace@0__:news.x"):
        assert matcher.matched("s1", b"raw", channel=reserved) == []


def test_a_heartbeat_reveals_a_lost_tail_of_a_known_publisher_only() -> None:
    matcher = Matcher().confirmed()
    heartbeat = message(3, b"", flags=HEARTBEAT)
    assert matcher.matched("s1", heartbeat) == []
    assert matcher.pass_time(1.0) == []
    assert delivered(matcher.matched("s1", quiet(2, 5000))) == [b"m2"]
    assert matcher.matched("s2", heartbeat) == []
    assert matcher.pass_time(OPTIONS.hold_s_max) == [PatternGapDetected(P, NEWS, 7, 1, "not arrived in time")]


def test_a_message_that_matches_two_names_of_a_pattern_comes_once() -> None:
    matcher = Matcher().confirmed(b"*x*")
    names = [b"x*", b"[^\\_]*x*"]
    got = matcher.tell(Pushed("s1", [[b"pmessage", name, b"xx", b"raw"] for name in names]))
    assert delivered(got) == [b"raw"]
    for channel, name in ((b"yx", names[1]), (b"__dynamoth__yx", b"__dynamoth__[^\\:]*x*")):
        assert delivered(matcher.matched("s1", b"one name only", channel=channel, pattern=name)) == [b"one name only"]


def test_two_patterns_may_share_a_name() -> None:
    matcher = Matcher().confirmed(b"*", b"[^_]*")
    shared = b"[^\\_]*"
    got = matcher.matched("s1", b"raw", pattern=shared)
    got += matcher.matched("s1", b"raw", pattern=b"[^_]*")
    assert [m.pattern for action in only(DeliverMatched, got) for m in action.messages] == [b"*", b"[^_]*"]


def test_what_comes_before_the_confirmation_is_delivered_behind_it() -> None:
    matcher = joining("s1", "s2")
    assert matcher.matched("s1", message(1, flags=FIRST)) == []
    subscribe, header = essential(matcher.up("s3"))
    matcher.answer_one(subscribe)  # from here on nothing is missed; what came before is forgotten
    assert matcher.matched("s1", message(3)) == []
    got = matcher.answer_one(header)
    assert got == [SubscriptionConfirmed(P), DeliverMatched([PatternMessage(P, NEWS, b"m3")])]
    assert matcher.matched("s2", message(2)) == []


def test_channels_past_the_bound_are_forgotten_the_longest_idle_first() -> None:
    matcher = Matcher(replace(OPTIONS, channels_max=4)).confirmed()
    for number in range(4):
        matcher.now += 1.0
        matcher.matched("s1", message(1, flags=FIRST), channel=b"news.%d" % number)
    matcher.matched("s1", message(1, flags=FIRST), channel=b"news.4")
    assert matcher.matched("s2", message(1), channel=b"news.1") == [], "still known"
    assert delivered(matcher.matched("s1", quiet(2, 4000), channel=b"news.0")) == [b"m2"], "no wait for what was seen"


# Connections.


def test_a_lost_connection_is_a_gap_reported_when_the_server_has_taken_the_subscription_again() -> None:
    matcher = Matcher().confirmed()
    matcher.matched("s1", message(1, flags=FIRST))
    assert matcher.down("s1") == []
    subscribe, header = essential(matcher.up("s1"))
    reason = "the connection to server s1 was lost: reset by peer"
    acknowledgements = [[b"psubscribe", P, 1], [b"psubscribe", R, 2]]
    got = matcher.tell(Pushed("s1", [*acknowledgements, [b"pmessage", P, NEWS, message(2)]]))
    assert got == [PatternGapDetected(P, None, None, None, reason), DeliverMatched([PatternMessage(P, NEWS, b"m2")])]
    assert matcher.answer_one(header) == []
    assert subscribe.args == (b"PSUBSCRIBE", P, R)


def test_a_server_that_may_be_gone_for_good_is_a_gap_after_a_while_and_another_when_it_is_back() -> None:
    matcher = Matcher().confirmed()
    matcher.pass_time(1.0)
    matcher.down("s1")
    gap = PatternGapDetected(P, None, None, None, "the connection to server s1 was lost: reset by peer")
    assert matcher.pass_time(OPTIONS.failover_s - 0.1) == []
    assert matcher.pass_time(0.1) == [gap]
    assert matcher.pass_time(10 * OPTIONS.failover_s) == []
    assert matcher.answer(matcher.up("s1")) == [gap]


def test_a_connection_lost_before_the_confirmation_is_no_gap() -> None:
    matcher = joining("s1", "s2")
    matcher.down("s1")
    assert matcher.answer(matcher.up("s3")) == []
    assert matcher.answer(matcher.up("s1")) == [SubscriptionConfirmed(P)]


LOOKING = replace(OPTIONS, header_interval_s=3.0)
SHRUNK = replace(Plan.initial(SERVERS[:2], virtual_nodes=8), version=5)
S4_UNKNOWN = PatternGapDetected(P, None, None, None, "server s4 was not known before")


def test_servers_that_come_later_are_joined_before_they_carry_channels_or_are_a_gap() -> None:
    for joins_after_s, gaps in ((JOIN_S - 3.1, []), (JOIN_S - 2.9, [S4_UNKNOWN])):
        matcher = Matcher(LOOKING).confirmed()
        asked = matcher.pass_time(3.0)
        assert [send.link for send in only(Send, asked)] == ["s1", "s2", "s3"]
        assert matcher.answer(asked, GROWN) == [Connect("s4", "redis://s4:6379")]
        matcher.now += joins_after_s
        assert matcher.answer(matcher.up("s4"), GROWN) == gaps


def test_a_server_that_is_never_joined_is_a_gap_when_it_may_carry_channels() -> None:
    matcher = Matcher(LOOKING).confirmed()
    matcher.answer(matcher.pass_time(3.0), GROWN)
    assert only(PatternGapDetected, matcher.pass_time(JOIN_S - 3.1)) == []
    assert only(PatternGapDetected, matcher.pass_time(0.2)) == [S4_UNKNOWN]
    assert matcher.answer(matcher.up("s4"), GROWN) == [S4_UNKNOWN]


def test_a_server_that_leaves_the_plan_is_left_and_is_no_gap() -> None:
    matcher = Matcher(LOOKING).confirmed()
    got = matcher.answer([matcher.pass_time(3.0)[0]], SHRUNK)
    assert got == [Disconnect("s3")]
    assert [send.link for send in only(Send, matcher.pass_time(3.0))] == ["s1", "s2"], "it looks again and again"


def test_a_server_whose_own_header_does_not_list_it_is_left_and_not_waited_for() -> None:
    matcher = joining("s1", "s2")
    assert matcher.answer(matcher.up("s3"), SHRUNK) == [Disconnect("s3"), SubscriptionConfirmed(P)]


def test_a_server_that_leaves_while_it_is_away_is_a_gap() -> None:
    matcher = Matcher(LOOKING).confirmed()
    matcher.down("s3")
    got = matcher.answer([matcher.pass_time(3.0)[0]], SHRUNK)
    reason = "the connection to server s3 was lost: reset by peer"
    assert got == [Disconnect("s3"), PatternGapDetected(P, None, None, None, reason)]


def test_servers_that_leave_may_be_the_last_that_an_ending_pattern_waits_for() -> None:
    shrunk = replace(Plan.initial(SERVERS[:1], virtual_nodes=8), version=5)
    matcher = Matcher(LOOKING).confirmed(P, b"other")
    ends = essential(matcher.unsubscribe())
    matcher.subscribe()
    matcher.answer(ends[:1])
    matcher.down("s3")
    got = matcher.answer([matcher.pass_time(3.0)[0]], shrunk)
    assert [action for action in got if not isinstance(action, Send)][:2] == [Disconnect("s2"), SubscriptionEnded(P)]
    assert only(Disconnect, got) == [Disconnect("s2"), Disconnect("s3")]
    assert matcher.answer(over("s1", got), shrunk) == [SubscriptionConfirmed(P)]


# Ends.


def test_a_pattern_that_ends_while_a_server_is_away_reports_the_gap() -> None:
    matcher = Matcher().confirmed()
    matcher.down("s1")
    reason = "the connection to server s1 was lost: reset by peer"
    assert matcher.unsubscribe()[0] == PatternGapDetected(P, None, None, None, reason)


def test_a_pattern_has_ended_when_every_server_has_said_so() -> None:
    matcher = Matcher().confirmed()
    got = matcher.unsubscribe()
    assert only(PatternGapDetected, got) == []
    ends = essential(got)
    assert [(send.link, send.args) for send in ends] == [(id_, (b"PUNSUBSCRIBE", P, R)) for id_ in URLS]
    assert delivered(matcher.matched("s3", message(1, flags=FIRST))) == [b"m1"], "it was on its way"
    assert matcher.answer(ends[:2]) == []
    on_its_way = [b"pmessage", P, NEWS, message(2)]
    got = matcher.tell(Pushed("s3", [on_its_way, *([b"punsubscribe", name, 0] for name in (P, R))]))
    assert got == [DeliverMatched([PatternMessage(P, NEWS, b"m2")]), SubscriptionEnded(P)]
    assert matcher.matched("s3", message(3)) == []


def test_the_end_of_a_pattern_leaves_another_one_its_names() -> None:
    matcher = Matcher().confirmed(b"*", b"_")
    ends = matcher.unsubscribe(b"*")
    assert all(b"_" not in names for names in commands(ends, b"PUNSUBSCRIBE"))
    assert matcher.answer(ends) == [SubscriptionEnded(b"*")]
    got = matcher.matched("s1", b"raw", channel=b"_", pattern=b"_")
    assert got == [DeliverMatched([PatternMessage(b"_", b"_", b"raw")])]


def test_never_subscribed_and_not_yet_confirmed_patterns_end_at_once() -> None:
    matcher = Matcher()
    assert matcher.unsubscribe() == [SubscriptionEnded(P)]
    matcher.subscribe()
    matcher.answer(matcher.up("s1"))
    got = matcher.unsubscribe()
    assert got[-1] == SubscriptionEnded(P)
    assert commands(got, b"PUNSUBSCRIBE", "s1") == [(P, R)]


def test_a_new_subscription_waits_for_the_end_of_the_old_one_and_repeats_nothing() -> None:
    matcher = Matcher().confirmed()
    matcher.matched("s1", message(1, flags=FIRST))
    ends = matcher.unsubscribe()
    assert matcher.subscribe() == []
    again = matcher.answer(ends)
    assert again[0] == SubscriptionEnded(P)
    assert matcher.answer(again[1:]) == [SubscriptionConfirmed(P)]
    assert matcher.matched("s2", message(1, flags=FORWARDED)) == []
    assert delivered(matcher.matched("s2", quiet(2, 10))) == [b"m2"]


def test_links_are_closed_a_while_after_the_last_pattern_unless_another_comes_in_time() -> None:
    matcher = Matcher().confirmed()
    matcher.answer(matcher.unsubscribe())
    matcher.pass_time(OPTIONS.link_idle_s / 2)
    assert matcher.answer(matcher.subscribe()) == [SubscriptionConfirmed(P)]
    assert matcher.pass_time(OPTIONS.link_idle_s) == []
    matcher.answer(matcher.unsubscribe())
    assert matcher.pass_time(OPTIONS.link_idle_s) == [Disconnect(server) for server in URLS]
    assert matcher.subscribe() == [Connect(server, url) for server, url in URLS.items()]
    assert matcher.all_up() == [SubscriptionConfirmed(P)]
