"""Mutations for the scenarios of fleets that are upgraded gradually. See ``mutations``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import dynamoth_balancer.admin.compatibility
import dynamoth_balancer.install.installer
import dynamoth_balancer.install.takeover
from dynamoth.plan.compatibility import Compatibility
from dynamoth_balancer.install.installer import Installer
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.sequences import Sequences
from dynamoth_dispatcher.machine import DispatcherMachine
from dynamoth_sim.mutations.mutation import Check, no_actions, nothing, replaced, returning


def envelopes_for_everybody() -> AbstractContextManager[None]:
    """Publishers do not follow compatibility rules."""
    return replaced(LocalPlan, plain_route=nothing)


def plain_channels_move() -> AbstractContextManager[None]:
    """The balancer lets administrators move plain channels."""
    return replaced(dynamoth_balancer.install.installer, why_not_moved=nothing)


def plain_messages_are_numbered() -> AbstractContextManager[None]:
    """Dispatchers put plain messages that they forward into envelopes, whoever listens."""
    return replaced(DispatcherMachine, _is_plain=returning(False))


def rules_die_with_the_balancer() -> AbstractContextManager[None]:
    """A balancer that takes over does not take over the compatibility rules."""
    recover = dynamoth_balancer.install.takeover.__dict__["recover"]

    def forgetful(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        plan, *rest = recover(*arguments, **options)
        return (replace(plan, compatibility=Compatibility(plan.version)) if plan.version else plan, *rest)

    return replaced(dynamoth_balancer.install.takeover, recover=forgetful)


def no_rest_after_rules() -> AbstractContextManager[None]:
    """Channels may move as soon as rules have changed."""
    return replaced(Installer, rules_rest=returning(0.0))


def rules_are_not_announced() -> AbstractContextManager[None]:
    """Dispatchers do not tell publishers that rules have changed."""
    return replaced(DispatcherMachine, _announce_rules=no_actions)


def rules_for_channels_elsewhere() -> AbstractContextManager[None]:
    """The balancer takes any rule, wherever the channels are."""
    return replaced(dynamoth_balancer.admin.compatibility, _check=nothing)


def plain_at_once() -> AbstractContextManager[None]:
    """Subscribers deliver plain messages as they come, whatever waits."""

    def deliver(self: Sequences, payload: bytes, now: float) -> list[Any]:
        return [payload]

    return replaced(Sequences, arrive_plain=deliver)


CHECKS: tuple[Check, ...] = (
    Check("44-plain-fleet", envelopes_for_everybody, "plain"),
    Check("44-plain-fleet", plain_channels_move, "G1"),
    Check("44-plain-fleet", plain_messages_are_numbered, "plain"),
    Check("44-plain-fleet", rules_die_with_the_balancer, "expected"),
    Check("45-plain-lifted", no_rest_after_rules, "G2"),
    Check("45-plain-lifted", rules_are_not_announced, "expected"),
    Check("46-plain-again", rules_are_not_announced, "expected"),
    Check("46-plain-again", rules_for_channels_elsewhere, "expected"),
    Check("68-plain-behind-numbered", plain_at_once, "G3"),
)
