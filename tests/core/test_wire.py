"""Reading msgpack from anyone costs little, whatever it is."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest

from dynamoth.errors import MalformedMessage, PlanError
from dynamoth.plan.plan import EPOCH_MAX, Plan, Route, Server, single
from dynamoth.plan.ring import RING_POINTS_MAX, VIRTUAL_NODES_MAX
from dynamoth.protocol.control import LOSS_MAX, LossNotice, RouteNotice, Vacated, pack_control, unpack_control
from dynamoth.protocol.wire import ARRAY_MAX, DEPTH_MAX, ELEMENTS_MAX, SHORT_MAX, cut, parser, shortened, unpack
from tests.core.hostile import OPENINGS, corpus, nest


@pytest.mark.parametrize("opening", OPENINGS)
def test_depth_is_bounded(opening: bytes) -> None:
    assert unpack(nest(opening, DEPTH_MAX)) is not None
    for depth in (DEPTH_MAX + 1, 500, 1024, 1025, 100_000):
        with pytest.raises(MalformedMessage):
            unpack(nest(opening, depth))


def test_a_deep_value_behind_many_flat_ones_is_found() -> None:
    flat = [[0] * 100] * 100
    packed: bytes = msgpack.packb([flat, "HOLE", flat])
    with pytest.raises(MalformedMessage, match="within each other"):
        unpack(packed.replace(b"\xa4HOLE", nest(b"\x91", DEPTH_MAX + 1)))


def test_an_array_that_claims_to_be_long_allocates_nothing() -> None:
    claims = b"\xdd\x00\x00\x3f\xff" * 300
    tracemalloc.start()
    with pytest.raises(MalformedMessage):
        unpack(claims)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300 * len(claims) * 8 * 2
    with pytest.raises(MalformedMessage, match="max_array_len"):
        unpack(b"\xdd\x00\x00\x40\x01" + b"\xc0" * ARRAY_MAX * 2)


@pytest.mark.parametrize("inner", [b"\x90", b"\x80", b"\xc0"])
def test_the_elements_of_a_large_message_are_counted(inner: bytes) -> None:
    row = b"\xdc" + ARRAY_MAX.to_bytes(2, "big") + inner * ARRAY_MAX
    fits = ELEMENTS_MAX // (2 * ARRAY_MAX)
    assert len(unpack(b"\xdc" + fits.to_bytes(2, "big") + row * fits)) == fits
    rows = ELEMENTS_MAX // ARRAY_MAX + 1
    with pytest.raises(MalformedMessage, match="elements"):
        unpack(b"\xdc" + rows.to_bytes(2, "big") + row * rows)


@pytest.mark.parametrize(
    "value",
    [
        b"x" * 10**7,
        "x" * 10**7,
        [b"x" * 10**6] * 100,
        {str(number): {str(inner): [b"y" * 1000] * 9 for inner in range(9)} for number in range(9)},
        msgpack.ExtType(5, b"x" * 10**7),
        msgpack.Timestamp(1, 2),
        2**64 - 1,
    ],
)
def test_a_shortened_value_is_short_and_cheap(value: Any) -> None:
    tracemalloc.start()
    text = shortened(value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < len(text) <= SHORT_MAX
    assert peak < 100_000


def test_a_shortened_nest_needs_no_stack() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert "..." in shortened(value)


def test_a_cut_can_be_seen() -> None:
    assert shortened([b"x" * 100] * 3).endswith("]"), "it is not so long"
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "ab…"
    long = shortened({number: ["y" * 100] * 3 for number in range(3)})
    assert len(long) == SHORT_MAX and long.endswith("…")


@pytest.mark.parametrize(
    "error", [RecursionError("deep"), MemoryError(), AssertionError("x"), KeyError("k"), PlanError("p")]
)
def test_a_parser_raises_nothing_but_malformed_message(error: Exception) -> None:
    @parser("a thing")
    def read() -> None:
        raise error

    with pytest.raises(MalformedMessage, match="a thing cannot be read") as caught:
        read()
    assert caught.value.__cause__ is error


def test_no_parser_relies_on_its_last_defence() -> None:
    """RecursionError and the like are bugs of a parser, although they are contained."""
    for data in corpus():
        try:
            unpack_control(data)
        except MalformedMessage as error:
            assert error.__cause__ is None or isinstance(
                error.__cause__, (ValueError, TypeError, IndexError, PlanError, msgpack.UnpackException)
            ), (data[:50], error.__cause__)


def test_numbers_that_cannot_be_are_refused() -> None:
    for message in (RouteNotice(b"c", Route(EPOCH_MAX + 1, single("s1"))), Vacated("s1", ((b"c", EPOCH_MAX + 1),), 7)):
        with pytest.raises(MalformedMessage):
            unpack_control(pack_control(message))


def test_a_loss_that_nobody_counts_is_unknown() -> None:
    assert unpack_control(pack_control(LossNotice(b"c", LOSS_MAX))) == LossNotice(b"c", LOSS_MAX)
    assert unpack_control(pack_control(LossNotice(b"c", 10**12))) == LossNotice(b"c", None)


def test_a_ring_that_takes_for_ever_is_refused() -> None:
    servers = [Server(f"s{number}", "redis://h") for number in range(RING_POINTS_MAX // VIRTUAL_NODES_MAX + 1)]
    with pytest.raises(PlanError, match="points"):
        Plan.initial(servers, VIRTUAL_NODES_MAX)
