from __future__ import annotations

from typing import Any

from dynamoth.machine.timers import Timers


def test_calls_come_in_the_order_of_their_times_and_then_of_the_wishes() -> None:
    timers: Timers[Any] = Timers()
    for at, name in ((3.0, "d"), (1.0, "a"), (2.0, "b"), (2.0, "c"), (9.0, "e")):
        timers.add(at, lambda said, now: [(said, now)], name)
    assert (timers.next_at, len(timers)) == (1.0, 5)
    assert timers.run_due(0.5) == []
    assert timers.run_due(4.0) == [("a", 4.0), ("b", 4.0), ("c", 4.0), ("d", 4.0)]
    assert (timers.next_at, len(timers)) == (9.0, 1)
    assert timers.run_due(9.0) == [("e", 9.0)]
    assert (timers.next_at, len(timers)) == (None, 0)
    assert timers.run_due(100.0) == []


def test_what_is_wished_for_meanwhile_is_done_as_well_if_its_time_has_come() -> None:
    timers: Timers[Any] = Timers()

    def again(times: int, now: float) -> list[Any]:
        if times:
            timers.add(now, again, times - 1)
        timers.add(now + 1.0, again, 0)
        return [times]

    timers.add(1.0, again, 2)
    assert timers.run_due(5.0) == [2, 1, 0]
    assert (timers.next_at, len(timers)) == (6.0, 3)
