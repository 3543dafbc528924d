"""Standing queries at a broker: checks their parameters, and registers their interests with the data cluster.

Theory of operation
-------------------
A subscription to a query waits, before the log is read, until the interest is registered at the log's server: from then
on each execution is for it, too. So whoever is confirmed misses nothing that is executed later. A user who shares the
interest with others here need not wait.

An interest that this broker has registered is renewed before its time is over, for as long as it has users. So it is
when its log server comes back, and when its log is found to be lost: the server may have lost the interest, too. Until
the server has answered, the interest does not count as registered. Nor does one without users: nobody would notice
that its server has lost it. Nobody takes a registration back: it ends by itself, ``keep_s`` after the last renewal. So
a user who moves or reconnects, or whose broker dies, finds it as it was. As users cannot take it back either, each may
have only so many new ones registered (``NewInterests``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from dynamoth.data.queries import BadParameters, StandingQuery
from dynamoth.data.registrations import REGISTRATIONS_PER_COMMAND_MAX, register_command
from dynamoth.edge.frames import Error
from dynamoth.edge.log import LogOptions
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.machine.timers import Timers
from dynamoth_broker.definitions import UNAVAILABLE, Definitions
from dynamoth_broker.delivery import Delivery
from dynamoth_broker.events import RETRY_MS, BrokerAction, BrokerOptions, Transmit
from dynamoth_broker.interests import InterestTable, SharedInterest
from dynamoth_broker.logs import Logs
from dynamoth_broker.new_interests import NewInterests
from dynamoth_broker.sessions import Subscription

RENEW_RATIO = 0.25
"""An interest with users is renewed when this part of its ``keep_s`` has passed."""

LOOK_S = 1.0
"""A broker looks this often which interests to renew."""


class Queries:
    """The standing queries of one broker's users."""

    def __init__(
        self,
        options: BrokerOptions,
        definitions: Definitions,
        logs: Logs,
        delivery: Delivery,
        interests: InterestTable,
        timers: Timers[BrokerAction],
        counters: Counter[str],
    ) -> None:
        """Begin without any; all arguments are shared with the owner."""
        self._options = options
        self._definitions = definitions
        self._logs = logs
        self._delivery = delivery
        self._interests = interests
        self._timers = timers
        self._counters = counters
        #: By interest id, of those that are registered: when they are renewed, and for how many seconds.
        self._renew_at: dict[str, tuple[float, float]] = {}
        #: Subscriptions that wait for a registration, by interest id.
        self._waiting: dict[str, list[Subscription]] = {}
        #: Interests to register with the next flush, by query and log server, then by id; and for how many seconds.
        self._to_register: dict[tuple[str, str], dict[str, tuple[SharedInterest, float]]] = {}
        self._is_looking = False
        self._new = NewInterests(options.new_interests_per_hour_max)
        delivery.on_log_lost = self._on_log_lost

    def begin(self, subscription: Subscription, now: float) -> list[BrokerAction]:
        """Have a subscription to a query wait until its interest is registered."""
        subscription.awaits_registration = True
        found = partial(self._found, subscription)
        return self._definitions.query(subscription.interest.interest.name, found, now)

    def _found(self, subscription: Subscription, query: StandingQuery | str | None, now: float) -> list[BrokerAction]:
        if subscription.is_ended:
            return []
        if query == UNAVAILABLE:
            return self._delivery.refuse(subscription)
        if not isinstance(query, StandingQuery):
            return self._refuse(subscription, "unknown_query", "there is no such query")
        interest = subscription.interest
        values, grant = interest.interest.values, subscription.session.grant
        try:
            query.check(values)
        except BadParameters as error:
            return self._refuse(subscription, "bad_params", str(error))
        for name, _ in query.bind:
            if not grant.user or values[name] != grant.user:
                text = f"parameter {name!r} has to be the subject (claim 'sub') of the token"
                return self._refuse(subscription, "forbidden", text)
        keep_s = query.keep_s
        if subscription.position_key is not None:
            keep_s = max(keep_s, self._options.position_ttl_s)
        if interest.users == 1:
            self._renew_at.pop(interest.id, None)
        renew_at, kept_s = self._renew_at.get(interest.id, (0.0, 0.0))
        if now < renew_at and keep_s <= kept_s:
            subscription.awaits_registration = False
            return self._delivery.begin(subscription, now)
        if wait_s := self._new.wait_s(subscription.session.payer, interest.id, now):
            return self._refuse_for_now(subscription, wait_s)
        self._new.note(interest.id, now + keep_s, now)
        self._waiting.setdefault(interest.id, []).append(subscription)
        self._register(interest, keep_s)
        return []

    def _refuse(self, subscription: Subscription, code: str, text: str) -> list[BrokerAction]:
        self._counters["queries_refused"] += 1
        self._delivery.to_end.append(subscription)
        return [Transmit(subscription.session.connection, Error(code, text, ref=subscription.ref))]

    def _refuse_for_now(self, subscription: Subscription, wait_s: float) -> list[BrokerAction]:
        self._counters["interests_refused"] += 1
        self._delivery.to_end.append(subscription)
        most = self._options.new_interests_per_hour_max
        text = f"one user has {most} new interests per hour registered at most: see broker.new_interests_per_hour_max"
        retry_ms = max(RETRY_MS, math.ceil(wait_s * 1000))
        error = Error("too_many_interests", text, "later", retry_ms, subscription.ref)
        return [Transmit(subscription.session.connection, error)]

    def _register(self, interest: SharedInterest, keep_s: float) -> None:
        place = interest.interest.name, self._logs.server_of(interest.id)
        together = self._to_register.setdefault(place, {})
        _, before_s = together.get(interest.id, (interest, 0.0))
        together[interest.id] = interest, max(keep_s, before_s)

    def flush(self, now: float) -> list[BrokerAction]:
        """Register the interests of an event: one command for each query and server."""
        actions: list[BrokerAction] = []
        while self._to_register:
            (query, server), interests = self._to_register.popitem()
            items = [*interests.values()]
            for begin in range(0, len(items), REGISTRATIONS_PER_COMMAND_MAX):
                part = items[begin : begin + REGISTRATIONS_PER_COMMAND_MAX]
                command = partial(_command, query, part)
                actions += self._logs.request_at(server, command, partial(self._registered, part), now)
        return actions

    def _registered(
        self, registered: Sequence[tuple[SharedInterest, float]], reply: Any, now: float
    ) -> Sequence[BrokerAction]:
        """Go on with the subscriptions that have waited; those of a server that does not answer are refused."""
        has_failed = reply is None or isinstance(reply, ErrorReply)
        actions: list[BrokerAction] = []
        for interest, keep_s in registered:
            if not has_failed:
                self._renew_at[interest.id] = now + keep_s * RENEW_RATIO, keep_s
                self._new.note(interest.id, now + keep_s, now)
            for subscription in self._waiting.pop(interest.id, ()):
                if subscription.is_ended:
                    continue
                subscription.awaits_registration = False
                go_on = self._delivery.refuse(subscription) if has_failed else self._delivery.begin(subscription, now)
                actions += go_on
        if not self._is_looking:
            self._is_looking = True
            self._timers.add(now + LOOK_S, self._renew)
        return actions

    def on_log_up(self, server: str, now: float) -> list[BrokerAction]:
        """Register everything at a log server again: it may have lost it, as the connection was."""
        for interest_id in [each for each in self._renew_at if self._logs.server_of(each) == server]:
            interest = self._interests.by_id.get(interest_id)
            _, keep_s = self._renew_at.pop(interest_id)
            if interest is not None and interest.users:
                self._renew_at[interest_id] = now, keep_s
                self._register(interest, keep_s)
        return self.flush(now)

    def _on_log_lost(self, interest: SharedInterest) -> None:
        """Register an interest again whose log was lost: somebody may have deleted all keys of its server."""
        if interest.id in self._renew_at:
            _, keep_s = self._renew_at[interest.id]
            self._renew_at[interest.id] = 0.0, keep_s
            self._register(interest, keep_s)

    def _renew(self, now: float) -> Sequence[BrokerAction]:
        """Renew the interests whose time has come; forget those without users."""
        for interest_id in [each for each, (at, _) in self._renew_at.items() if at <= now]:
            interest = self._interests.by_id.get(interest_id)
            _, keep_s = self._renew_at.pop(interest_id)
            if interest is not None and interest.users:
                # It is tried again at the next look, unless the answer comes before.
                self._renew_at[interest_id] = now + min(LOOK_S, keep_s * RENEW_RATIO), keep_s
                self._register(interest, keep_s)
        self._is_looking = bool(self._renew_at)
        if self._is_looking:
            self._timers.add(now + LOOK_S, self._renew)
        return self.flush(now)


def _command(
    query: str, interests: Sequence[tuple[SharedInterest, float]], run_id: str, new_epoch: int, options: LogOptions
) -> tuple[CommandPart, ...]:
    return register_command(query, [(each.id, each.interest.params, keep_s) for each, keep_s in interests])
