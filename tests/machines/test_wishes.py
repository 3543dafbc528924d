from __future__ import annotations

from typing import Any

from dynamoth_client.wishes import Wishes


def test_calls_come_in_the_order_of_their_times_and_then_of_the_wishes() -> None:
    wishes = Wishes()
    for at, name in ((3.0, "d"), (1.0, "a"), (2.0, "b"), (2.0, "c"), (9.0, "e")):
        wishes.add(at, lambda said, now: [(said, now)], name)
    assert (wishes.next_at, len(wishes)) == (1.0, 5)
    assert wishes.fulfil(0.5) == []
    assert wishes.fulfil(4.0) == [("a", 4.0), ("b", 4.0), ("c", 4.0), ("d", 4.0)]
    assert (wishes.next_at, len(wishes)) == (9.0, 1)
    assert wishes.fulfil(9.0) == [("e", 9.0)]
    assert (wishes.next_at, len(wishes)) == (None, 0)
    assert wishes.fulfil(100.0) == []


def test_what_is_wished_for_meanwhile_is_done_as_well_if_its_time_has_come() -> None:
    wishes = Wishes()

    def again(times: int, now: float) -> list[Any]:
        if times:
            wishes.add(now, again, times - 1)
        wishes.add(now + 1.0, again, 0)
        return [times]

    wishes.add(1.0, again, 2)
    assert wishes.fulfil(5.0) == [2, 1, 0]
    assert (wishes.next_at, len(wishes)) == (6.0, 3)
