"""Compatibility rules: channels that plain Redis clients share with clients of Dynamoth, by pattern.

A rule gives the channels that match its pattern, and that the plan does not name, a home: the ``server`` that plain
clients know, instead of the one that the ring gives. If it is ``plain``, the payloads of all matching channels carry no
envelope, so that everybody can read them, and the balancer leaves these channels at that server. Of several rules that
match, the first one holds.

So place and format are two things. A fleet begins with plain rules. When all of its clients are upgraded, ``plain`` is
taken away, and no channel moves by that. The balancer moves the channels later, one by one.

Channels under the reserved prefix, which sharded channels are, match no rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from dynamoth.errors import PlanError
from dynamoth.globs import compile_glob
from dynamoth.names import RESERVED_PREFIX

RULES_MAX = 64
"""Most rules of a plan. All of them are in the reply to each verification of a subscription."""

PATTERN_BYTES_MAX = 256
"""Longest pattern of a rule."""

_SPECIAL = frozenset(b"*?[\\")


@dataclass(frozen=True, slots=True)
class CompatibilityRule:
    """Gives the channels that match ``pattern`` their home at ``server``; with ``plain``, they have no envelopes."""

    pattern: bytes
    server: str
    plain: bool = True

    def __post_init__(self) -> None:
        """Refuse a rule that no plan can carry."""
        if not 0 < len(self.pattern) <= PATTERN_BYTES_MAX:
            raise PlanError(f"the pattern of a compatibility rule has 1 to {PATTERN_BYTES_MAX} bytes")
        if not self.server:
            raise PlanError("a compatibility rule names a server")

    @property
    def channel(self) -> bytes | None:
        """The one channel that the pattern matches, if nothing in it is special to patterns."""
        return None if _SPECIAL.intersection(self.pattern) else self.pattern


@dataclass(frozen=True)
class Compatibility:
    """The rules of a plan, in the order of their priority, since plan version ``version``; 0: from its beginning.

    Raises:
        PlanError: there are too many rules, or two with the same pattern.

    """

    version: int = 0
    rules: tuple[CompatibilityRule, ...] = ()

    def __post_init__(self) -> None:
        """Refuse rules that no plan can carry."""
        if len(self.rules) > RULES_MAX:
            raise PlanError(f"a plan has at most {RULES_MAX} compatibility rules, not {len(self.rules)}")
        if len({rule.pattern for rule in self.rules}) != len(self.rules):
            raise PlanError("two compatibility rules have the same pattern, and the second would never hold")

    @cached_property
    def _compiled(self) -> list[tuple[re.Pattern[bytes], CompatibilityRule]]:
        return [(compile_glob(rule.pattern), rule) for rule in self.rules]

    def rule_of(self, channel: bytes) -> CompatibilityRule | None:
        """Return the rule that holds for a channel, None for most. Takes about a microsecond for each rule."""
        if not self.rules or channel.startswith(RESERVED_PREFIX):
            return None
        return next((rule for expression, rule in self._compiled if expression.fullmatch(channel)), None)

    def is_plain(self, channel: bytes) -> bool:
        """Tell whether messages on a channel carry no envelopes."""
        rule = self.rule_of(channel)
        return rule is not None and rule.plain

    @property
    def servers(self) -> frozenset[str]:
        """The servers that rules name."""
        return frozenset(rule.server for rule in self.rules)


NO_COMPATIBILITY = Compatibility()
"""No rules, as in most plans."""


def proves(rules: Iterable[CompatibilityRule], base: tuple[str, ...], pattern: bytes, server: str) -> bool:
    """Return whether all channels that match ``pattern`` surely have their home at ``server``.

    ``rules`` hold, and where none matches the ring over ``base``. False where the answer depends on the channel, or
    does not follow from the patterns alone.
    """
    for rule in rules:
        if rule.server != server:
            return False
        if rule.pattern in (b"*", pattern):
            return True
    return base == (server,)


def homes(
    rules: tuple[CompatibilityRule, ...], base: tuple[str, ...], named: Iterable[bytes] = ()
) -> list[tuple[bytes, str]]:
    """Return the homes that the rules give, without rules that change none: equal lists give equal homes.

    ``named`` are channels that the plan names: their home does not matter.
    """
    kept: list[CompatibilityRule] = []
    names = frozenset(named)
    for rule in reversed(rules):
        if rule.channel not in names and not proves(kept, base, rule.pattern, rule.server):
            kept.insert(0, rule)
    return [(rule.pattern, rule.server) for rule in kept]
