"""Every scenario, by its number and name."""

from __future__ import annotations

from dynamoth_sim.scenarios import (
    balance,
    compatibility,
    delivery,
    elastic,
    failover,
    failure,
    members,
    observation,
    operator,
    patterns,
    published_protocol,
    recording,
    replication,
    rights,
    slots,
    standalone,
)
from dynamoth_sim.scenarios.stage import Scenario

SCENARIOS: dict[str, Scenario] = dict(
    sorted(
        {
            **published_protocol.SCENARIOS,
            **replication.SCENARIOS,
            **patterns.SCENARIOS,
            **failure.SCENARIOS,
            **delivery.SCENARIOS,
            **compatibility.SCENARIOS,
            **standalone.SCENARIOS,
            **rights.SCENARIOS,
            **observation.SCENARIOS,
            **recording.SCENARIOS,
            **elastic.SCENARIOS,
            **failover.SCENARIOS,
            **members.SCENARIOS,
            **operator.SCENARIOS,
            **balance.SCENARIOS,
            **slots.SCENARIOS,
        }.items()
    )
)
"""Every scenario by its number and name, in this order."""
