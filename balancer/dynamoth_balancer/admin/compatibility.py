"""Changes compatibility rules for administrators, and refuses changes by which a message could be lost.

A change of rules takes effect everywhere within moments, but not at once. So it moves no channel: no home changes, and
a rule becomes plain only where all its channels are at its server already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamoth.errors import PlanError, RequestRefused
from dynamoth.names import in_quotes
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule, homes
from dynamoth.plan.plan import Phase, Plan, single
from dynamoth.plan.slots import is_slot
from dynamoth.protocol.wire import shortened

NAMED_MAX = 3
"""Bound of the channels that a refusal names."""

_ARGUMENTS = "action (add, lift, remove or list), pattern (bytes), and for add: server (text) and plain (true or false)"


def new_rules(plan: Plan, arguments: Mapping[str, Any]) -> tuple[CompatibilityRule, ...] | None:
    """Return the rules that a request asks for, None when it asks for no change.

    ``add`` puts a rule before all others, or replaces the one with the same pattern. ``lift`` takes ``plain`` away:
    from the rule with this pattern, or from a part of the channels of a wider one. ``remove`` removes a rule.

    Raises:
        RequestRefused: the arguments make no sense, or a message could be lost.

    """
    action, pattern = arguments.get("action"), arguments.get("pattern")
    if action == "list":
        return None
    if not isinstance(pattern, bytes):
        raise RequestRefused(f"compatibility takes the arguments {_ARGUMENTS}")
    old = plan.compatibility.rules
    try:
        match action:
            case "add":
                rules = _put(old, _asked_for(pattern, arguments))
            case "lift":
                rules = _put(old, CompatibilityRule(pattern, _covering(old, pattern).server, plain=False))
            case "remove":
                removed = _rule(old, pattern)
                rules = tuple(rule for rule in old if rule is not removed)
            case _:
                raise RequestRefused(f"compatibility takes the arguments {_ARGUMENTS}, not {shortened(action)}")
        new = Compatibility(plan.version + 1, rules)
    except PlanError as error:
        raise RequestRefused(str(error)) from error
    if rules == old:
        return None
    _check(plan, new)
    return rules


def describe_rules(compatibility: Compatibility) -> list[dict[str, Any]]:
    """Return rules as plain data, in the order of their priority."""
    return [{"pattern": rule.pattern, "server": rule.server, "plain": rule.plain} for rule in compatibility.rules]


def why_not_moved(plan: Plan, channel: bytes) -> str | None:
    """Return why the rules forbid to move or replicate a channel; None when they do not."""
    rule = plan.compatibility.rule_of(channel)
    if rule is None or not rule.plain:
        return None
    name = rule.pattern.decode(errors="backslashreplace")
    return (
        f"channel {in_quotes(channel)} stays at {rule.server}, as plain Redis clients may use it there (compatibility"
        f" rule {name}): when all of them are upgraded, 'dynamoth plan compatibility lift {name}' allows it"
    )


def _asked_for(pattern: bytes, arguments: Mapping[str, Any]) -> CompatibilityRule:
    server, plain = arguments.get("server"), arguments.get("plain", True)
    if not isinstance(server, str) or not isinstance(plain, bool):
        raise RequestRefused(f"compatibility takes the arguments {_ARGUMENTS}")
    return CompatibilityRule(pattern, server, plain)


def _put(rules: tuple[CompatibilityRule, ...], new: CompatibilityRule) -> tuple[CompatibilityRule, ...]:
    if any(rule.pattern == new.pattern for rule in rules):
        return tuple(new if rule.pattern == new.pattern else rule for rule in rules)
    return (new, *rules)


def _rule(rules: tuple[CompatibilityRule, ...], pattern: bytes) -> CompatibilityRule:
    found = next((rule for rule in rules if rule.pattern == pattern), None)
    if found is None:
        known = ", ".join(rule.pattern.decode(errors="backslashreplace") for rule in rules) or "none"
        name = pattern.decode(errors="backslashreplace")
        raise RequestRefused(f"there is no compatibility rule with the pattern {name:.80}; there are: {known}")
    return found


def _covering(rules: tuple[CompatibilityRule, ...], pattern: bytes) -> CompatibilityRule:
    """Return the rule with this pattern, or the one for all channels, of which a part is to be lifted."""
    covering = next((rule for rule in rules if rule.pattern == b"*"), None)
    return next((rule for rule in rules if rule.pattern == pattern), covering) or _rule(rules, pattern)


def _check(plan: Plan, new: Compatibility) -> None:
    """Refuse rules that would move a channel, or that are plain for channels at other servers."""
    unknown = sorted(new.servers.difference(plan.servers))
    if unknown:
        raise RequestRefused(f"server {unknown[0]!r:.80} is not known; known are {', '.join(plan.servers)}")
    base = () if any(map(is_slot, plan.entries)) else plan.base
    before, after = (homes(rules, base, plan.entries) for rules in (plan.compatibility.rules, new.rules))
    if before != after:
        pattern, server = next(home for home in (*after, *before) if home not in before or home not in after)
        name = pattern.decode(errors="backslashreplace")
        raise RequestRefused(
            f"channels that match {name} would have another home, and those in use would lose messages: on a cluster"
            f" that is in use, a rule may name a server only where its channels are at home already. Name channels one"
            f" by one instead: 'dynamoth plan move CHANNEL --to {server}', then add a rule for CHANNEL"
        )
    elsewhere = [
        channel
        for channel, entry in plan.entries.items()
        if (rule := new.rule_of(channel)) is not None
        and rule.plain
        and not (entry.phase is Phase.SETTLED and entry.route.assignment == single(rule.server))
    ]
    if elsewhere:
        names = ", ".join(channel.decode(errors="backslashreplace") for channel in sorted(elsewhere)[:NAMED_MAX])
        rule = new.rule_of(elsewhere[0])
        assert rule is not None
        more = f", and {len(elsewhere) - NAMED_MAX} more" if len(elsewhere) > NAMED_MAX else ""
        raise RequestRefused(
            f"plain channels are at one server, and these are elsewhere or on their way: {names}{more}; put them at"
            f" {rule.server} first ('dynamoth plan move' and 'dynamoth plan unreplicate', with --to {rule.server})"
        )
