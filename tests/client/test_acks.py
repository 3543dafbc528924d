from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamoth.names import sharded_channel
from dynamoth_client.machines.acks import Ack, Acks, Subject


def _subscribed(acks: Acks, *channels: bytes) -> None:
    for channel in channels:
        acks.request("subscribe", channel)


def test_a_held_acknowledgement_can_be_released_before_its_turn() -> None:
    acks = Acks()
    _subscribed(acks, b"slow", b"quick")
    acks.on_confirmed(b"quick")
    assert set(acks.held) == {Subject(b"quick")}
    assert acks.release(b"quick") == [Ack("subscribe", b"quick", 1)]
    assert acks.release(b"quick") == []
    acks.request("psubscribe", b"a")
    acks.on_confirmed(b"a", is_pattern=True)
    assert acks.release(b"a") == [], "a pattern is released by itself"
    assert acks.release(b"a", is_pattern=True) == [Ack("psubscribe", b"a", 2)]
    assert acks.on_confirmed(b"slow") == [Ack("subscribe", b"slow", 3)]


def test_after_release_all_nobody_waits_for_the_late_one() -> None:
    acks = Acks()
    _subscribed(acks, b"dead", b"a")
    acks.on_confirmed(b"a")
    assert acks.release_all() == [Ack("subscribe", b"a", 1)]
    _subscribed(acks, b"b")
    assert acks.on_confirmed(b"b") == [Ack("subscribe", b"b", 2)]
    assert acks.on_confirmed(b"dead") == [Ack("subscribe", b"dead", 3)]


def test_a_refused_channel_holds_nobody_up() -> None:
    acks = Acks()
    _subscribed(acks, b"forbidden", b"a")
    acks.on_confirmed(b"a")
    assert acks.on_failed(b"forbidden") == [Ack("subscribe", b"a", 1)]
    assert acks.count == 1


@given(st.data())
def test_every_request_is_acknowledged_once_and_counts_are_redis_s(data: st.DataObject) -> None:
    acks = Acks()
    seen: list[Ack] = []
    requests: list[tuple[str, bytes]] = []
    waiting: list[bytes] = []
    for _ in range(data.draw(st.integers(0, 30))):
        step = data.draw(st.sampled_from(["subscribe", "unsubscribe", "confirm", "release", "release_all"]))
        channel = data.draw(st.sampled_from([b"a", b"b", b"c"]))
        match step:
            case "subscribe":
                acks.request("subscribe", channel)
                requests.append((step, channel))
                waiting.append(channel)
            case "unsubscribe":
                acks.request("unsubscribe", channel)
                requests.append((step, channel))
                seen += acks.on_ended(channel)
                waiting = [other for other in waiting if other != channel]
            case "confirm" if channel in waiting:
                waiting.remove(channel)
                seen += acks.on_confirmed(channel)
            case "confirm":
                assert acks.on_confirmed(channel) == [], "a reconnection's"
            case "release":
                seen += acks.release(channel)
            case "release_all":
                seen += acks.release_all()
            case _:
                pass
    for channel in waiting:
        seen += acks.on_confirmed(channel)
    assert not acks.held
    # Per channel, in the order of its requests; overall, each exactly once.
    for channel in (b"a", b"b", b"c"):
        assert [a.kind for a in seen if a.channel == channel] == [k for k, c in requests if c == channel]
    subscribed: set[bytes | None] = set()
    for ack in seen:
        (subscribed.add if ack.kind == "subscribe" else subscribed.discard)(ack.channel)
        assert ack.count == len(subscribed)


def test_patterns_and_channels_are_counted_together_and_distinguished() -> None:
    acks = Acks()
    acks.request("subscribe", b"a")
    acks.request("psubscribe", b"a")
    assert acks.on_confirmed(b"a", is_pattern=True) == []
    assert acks.on_confirmed(b"a") == [Ack("subscribe", b"a", 1), Ack("psubscribe", b"a", 2)]
    acks.request("punsubscribe", b"a")
    assert acks.on_ended(b"a") == []
    assert acks.on_ended(b"a", is_pattern=True) == [Ack("punsubscribe", b"a", 1)]
    acks.request("psubscribe", b"b")
    assert acks.on_failed(b"b", is_pattern=True) == [] and acks.count == 1


def test_sharded_channels_are_counted_by_themselves() -> None:
    acks = Acks()
    sharded = sharded_channel(b"a")
    acks.request("subscribe", b"a")
    acks.request("ssubscribe", sharded)
    acks.request("ssubscribe", sharded_channel(b"b"))
    assert acks.on_confirmed(b"a") == [Ack("subscribe", b"a", 1)]
    assert acks.on_confirmed(sharded) == [Ack("ssubscribe", sharded, 1)]
    assert acks.on_confirmed(sharded_channel(b"b")) == [Ack("ssubscribe", sharded_channel(b"b"), 2)]
    acks.request("unsubscribe", b"a")
    assert acks.on_ended(b"a") == [Ack("unsubscribe", b"a", 0)]
    assert (acks.count, acks.is_idle) == (0, False)
    assert acks.end_nothing("sunsubscribe") == [Ack("sunsubscribe", None, 2)]
    acks.request("sunsubscribe", sharded)
    assert acks.on_ended(sharded) == [Ack("sunsubscribe", sharded, 1)]
    assert acks.on_failed(sharded_channel(b"b")) == [] and acks.is_idle


def test_what_was_cut_is_to_be_asked_for_again_unless_that_is_under_way() -> None:
    acks = Acks()
    sharded = sharded_channel(b"a")
    for kind, name in (("subscribe", b"b"), ("subscribe", b"a"), ("ssubscribe", sharded), ("subscribe", b"leaving")):
        acks.request(kind, name)
        acks.on_confirmed(name)
    acks.request("psubscribe", b"p")
    acks.on_confirmed(b"p", is_pattern=True)
    acks.request("unsubscribe", b"leaving")
    acks.request("subscribe", b"coming")
    acks.request("subscribe", b"held")
    acks.on_confirmed(b"held")
    assert acks.start_over() == [Subject(sharded), Subject(b"a"), Subject(b"b"), Subject(b"p", True)]
    assert acks.count == 0
    assert acks.on_ended(b"leaving") == [Ack("unsubscribe", b"leaving", 0)]
    acks.request("subscribe", b"a")
    assert acks.on_confirmed(b"coming") == [Ack("subscribe", b"coming", 1), Ack("subscribe", b"held", 2)]
    assert acks.end_nothing("sunsubscribe") == [] and acks.release_all() == [Ack("sunsubscribe", None, 0)]
    assert acks.on_confirmed(b"a") == [Ack("subscribe", b"a", 3)]
    assert Acks().start_over() == []
