"""Frames of stored subscriptions on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.edge.frames import EXACT_MAX, Ack, Connect, Subscribe, SubscriptionRequest, read_user_frame, to_wire
from dynamoth.edge.interests import channel_interest, presence_interest, query_interest
from dynamoth.edge.publications import Position
from dynamoth.errors import MalformedMessage

NEWS, NEAR = channel_interest("news"), query_interest("near", {"km": 1})
HERE = Position(0xA, 7)
HERE_ON_WIRE = {"epoch": "000000000000000a", "offset": 7}


@pytest.mark.parametrize("interest", [NEWS, NEAR])
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("since", [None, HERE])
@pytest.mark.parametrize("is_present", [False, True])
def test_what_is_written_is_read_again(
    interest: Any, is_stored: bool, since: Position | None, is_present: bool
) -> None:
    wanted = SubscriptionRequest(3, interest, since, is_stored, is_present)
    for frame in (Subscribe(wanted), Connect("me", subs=(wanted,))):
        assert read_user_frame(to_wire(frame)) == frame
    ack = Ack({interest.id: HERE})
    assert read_user_frame(to_wire(ack)) == ack
    assert to_wire(ack) == {"type": "ack", "p": {interest.id: HERE_ON_WIRE}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SubscriptionRequest(1, NEWS)),
        ({"since": "new"}, SubscriptionRequest(1, NEWS)),
        ({"since": "new", "stored": False}, SubscriptionRequest(1, NEWS)),
        ({"since": "stored"}, SubscriptionRequest(1, NEWS, None, is_stored=True)),
        ({"stored": True}, SubscriptionRequest(1, NEWS, None, is_stored=True)),
        ({"since": HERE_ON_WIRE, "stored": True}, SubscriptionRequest(1, NEWS, HERE, is_stored=True)),
        ({"since": HERE_ON_WIRE}, SubscriptionRequest(1, NEWS, HERE)),
    ],
)
def test_how_a_stored_subscription_is_asked_for(fields: dict[str, Any], expected: SubscriptionRequest) -> None:
    assert read_user_frame({"type": "subscribe", "ref": 1, "channel": "news", **fields}) == Subscribe(expected)


@pytest.mark.parametrize("fields", [{"since": "new", "stored": True}, {"since": "yesterday"}, {"since": 7}])
def test_a_beginning_that_means_nothing_is_malformed(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        read_user_frame({"type": "subscribe", "ref": 1, "channel": "news", **fields})


@pytest.mark.parametrize("fields", [{"since": "stored"}, {"stored": True}, {"since": HERE_ON_WIRE, "stored": True}])
def test_no_position_of_a_presence_is_stored(fields: dict[str, Any]) -> None:
    frame = {"type": "subscribe", "ref": 1, "presence": "news"}
    assert read_user_frame({**frame, "stored": False}) == Subscribe(SubscriptionRequest(1, presence_interest("news")))
    with pytest.raises(MalformedMessage, match="not for the presence"):
        read_user_frame({**frame, **fields})


@pytest.mark.parametrize(
    "p",
    [
        None,
        {"x": HERE_ON_WIRE},
        {NEWS.id: 7},
        {NEWS.id: {**HERE_ON_WIRE, "offset": -1}},
        {NEWS.id: {**HERE_ON_WIRE, "offset": True}},
        {NEWS.id: {"offset": 7}},
        {f"{number:022d}": HERE_ON_WIRE for number in range(1001)},
    ],
)
def test_an_acknowledgement_of_something_else_is_malformed(p: Any) -> None:
    with pytest.raises(MalformedMessage):
        read_user_frame({"type": "ack", "p": p})


def test_a_position_leaves_room_for_the_publication_that_follows() -> None:
    wire: dict[str, Any] = {
        "type": "subscribe",
        "ref": 1,
        "channel": "news",
        "since": {"epoch": "0" * 16, "offset": EXACT_MAX - 1},
    }
    read_user_frame(wire)
    wire["since"] = {"epoch": "0" * 16, "offset": EXACT_MAX}
    with pytest.raises(MalformedMessage):
        read_user_frame(wire)


@pytest.mark.parametrize("name", ["q:x", "__dynamoth__:x", "__keyspace@0__:x", "__keyevent@0__:set"])
def test_names_on_which_servers_publish_are_reserved(name: str) -> None:
    assert channel_interest(name).is_reserved
    assert not channel_interest(f"x{name}").is_reserved
