from __future__ import annotations

import asyncio
from base64 import urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.edge.frames import (
    EXACT_MAX,
    Connect,
    Data,
    Error,
    Gap,
    Subscribe,
    Subscribed,
    SubscriptionRequest,
    Unsubscribed,
)
from dynamoth.edge.interests import channel_interest
from dynamoth.edge.publications import Position
from dynamoth_broker.process.event_ids import HEADER_BYTES_MAX, LOGGED_MAX, StreamPositions, resumed
from dynamoth_broker.process.transport import UserConnection
from tests.broker.test_transport_sse import CONNECT, browser, event, serving

INTERESTS = [channel_interest(f"news-{number}") for number in range(LOGGED_MAX + 1)]
WANTED = tuple(SubscriptionRequest(ref, interest, None) for ref, interest in enumerate(INTERESTS[:LOGGED_MAX]))
FARTHEST = Position(2**64 - 1, EXACT_MAX - 1)


def positions_of(*positions: Position) -> StreamPositions:
    made = StreamPositions()
    for wanted, position in zip(WANTED, positions, strict=False):
        made.note(Subscribed(wanted.ref, wanted.interest.id, position))
    return made


def since_of(event_id: str | None, *subs: SubscriptionRequest) -> list[Position | None]:
    return [each.since for each in resumed(Connect("ada", 0, None, None, subs or WANTED[:3]), event_id).subs]


@given(st.lists(st.builds(Position, st.integers(0, 2**64 - 1), st.integers(0, EXACT_MAX - 1)), min_size=1, max_size=9))
def test_a_stream_resumes_where_its_last_event_was(positions: list[Position]) -> None:
    wanted = WANTED[: len(positions)]
    assert since_of(positions_of(*positions).event_id(), *reversed(wanted)) == positions[::-1]


def test_what_frames_say_of_positions() -> None:
    positions = StreamPositions()
    assert positions.event_id() is None
    first, second = WANTED[0].interest.id, WANTED[1].interest.id
    positions.note(Subscribed(0, first, Position(1, 5)))
    positions.note(Subscribed(1, second, None))  # live
    positions.note(Data(second, b"", None, (1, 1)))
    positions.note(Data(first, b"", 300, None))
    assert since_of(positions.event_id()) == [Position(1, 300), None, None]
    positions.note(Gap(first, "lost", 301, None, Position(2, 7)))
    assert since_of(positions.event_id()) == [Position(2, 7), None, None]
    positions.note(Unsubscribed(first))
    assert positions.event_id() is None


def test_the_longest_id_fits_into_a_header_and_250_usual_ones_into_little_more_than_half_of_it() -> None:
    longest = positions_of(*[FARTHEST] * LOGGED_MAX).event_id()
    assert longest is not None and len(longest) == 8002 < HEADER_BYTES_MAX
    assert since_of(longest, *WANTED) == [FARTHEST] * LOGGED_MAX
    usual = positions_of(*[Position(2**63, 10_000)] * 250).event_id()
    assert usual is not None and len(usual) == 4668


def test_the_longest_id_comes_back_in_a_header() -> None:
    longest = positions_of(*[FARTHEST] * LOGGED_MAX).event_id()
    assert longest is not None

    def event_id(_: UserConnection) -> str:
        return longest

    async def main() -> None:
        async with serving(event_id=event_id) as (server, recorder), browser(server) as user:
            async with await user.get(**{"Last-Event-ID": longest}) as response:
                await recorder.until("received")
                [conn] = recorder.connections
                assert conn.last_event_id == longest
                conn.close(1000)
                assert (await event(response))["event"] == "close"
            async with await user.get(CONNECT, **{"Last-Event-ID": "A" * (HEADER_BYTES_MAX + 1)}) as response:
                assert response.status == 431
                assert "use WebSocket" in await response.text()

    asyncio.run(main())


def forged(*parts: bytes) -> str:
    return urlsafe_b64encode(b"".join(parts)).decode()


ENTRY = bytes.fromhex("00" * 8)


@pytest.mark.parametrize(
    "event_id",
    [
        "",
        "=",
        "é",
        "not base64url!",
        "AA",
        forged(b"\x02", b"tagg", ENTRY, b"\x01"),
        forged(b"\x01", b"tagg", ENTRY),
        forged(b"\x01", b"tagg", ENTRY, b"\x80"),
        forged(b"\x01", b"tagg", ENTRY, b"\xff" * 7 + b"\x7f"),
        forged(b"\x01", b"tagg", ENTRY, b"\xff" * 8 + b"\x01"),
        forged(b"\x01", (b"tagg" + ENTRY + b"\x01") * (LOGGED_MAX + 1)),
        "A" * (HEADER_BYTES_MAX + 1),
    ],
)
def test_an_id_that_is_forged_or_cut_off_says_nothing(event_id: str) -> None:
    assert since_of(event_id, SubscriptionRequest(0, WANTED[0].interest, Position(9, 9))) == [Position(9, 9)]


def test_what_two_interests_of_one_tag_say_is_not_used() -> None:
    positions = positions_of(Position(1, 1))
    twin = WANTED[0].interest.id[:6] + WANTED[1].interest.id[6:]
    positions.note(Subscribed(1, twin, Position(2, 2)))
    assert since_of(positions.event_id()) == [None, None, None]


def test_logged_subscriptions_of_a_stream_are_bounded() -> None:
    positions = StreamPositions()
    subscribe = [Subscribe(SubscriptionRequest(ref, interest, None)) for ref, interest in enumerate(INTERESTS)]
    assert [positions.refusal(each, is_logged=True) for each in subscribe[:-1]] == [None] * LOGGED_MAX
    assert positions.refusal(subscribe[0], is_logged=True) is None  # again
    assert positions.refusal(subscribe[-1], is_logged=False) is None
    refusal = positions.refusal(subscribe[-1], is_logged=True)
    assert refusal is not None and (refusal.code, refusal.retry, refusal.ref) == ("too_many", "never", LOGGED_MAX)
    positions.note(Error("forbidden", "no", ref=5))
    assert positions.refusal(subscribe[-1], is_logged=True) is None
    assert positions.refusal(subscribe[5], is_logged=True) is not None
    positions.note(Unsubscribed(INTERESTS[-1].id))
    assert positions.refusal(subscribe[5], is_logged=True) is None
