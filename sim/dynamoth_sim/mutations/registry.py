"""Every mutation, with the scenario that must fail under it."""

from __future__ import annotations

from dynamoth_sim.mutations import (
    balance,
    compatibility,
    delivery,
    elastic,
    failover,
    members,
    observation,
    operator,
    published_protocol,
    recording,
    rights,
    slots,
    standalone,
)
from dynamoth_sim.mutations.mutation import Check

CHECKS: tuple[Check, ...] = (
    *published_protocol.CHECKS,
    *rights.CHECKS,
    *observation.CHECKS,
    *recording.CHECKS,
    *members.CHECKS,
    *operator.CHECKS,
    *balance.CHECKS,
    *standalone.CHECKS,
    *delivery.CHECKS,
    *compatibility.CHECKS,
    *elastic.CHECKS,
    *slots.CHECKS,
    *failover.CHECKS,
)
