"""Real processes: a server is added, another one is drained and stopped, while subscribers of many channels wait."""

from __future__ import annotations

from bench.slots import Load, grow_and_shrink
from bench.slots_clients import Seen
from dynamoth.plan.slots import SLOTS

CHANNELS = 3000
SETTINGS = {"balancer.wait_s": 2.0, "balancer.averaging_s": 5.0}
"""A server takes part in decisions after three reports, one per second: with ``averaging_s`` of 2 s it seldom did."""


def test_idle_subscribers_of_many_channels_lose_nothing_when_servers_come_and_go() -> None:
    result = grow_and_shrink(Load(CHANNELS, 100.0, 2, 0.5, is_patient=True), SETTINGS)
    assert result.broken == 0, result
    assert result.old.delivered == result.old.published > CHANNELS
    assert result.new == Seen(CHANNELS, CHANNELS), "new clients find every channel"
    assert result.slots.keys() == {"s2", "s3", "s4"} and sum(result.slots.values()) == SLOTS
    assert result.slots["s4"] > SLOTS / 5
