"""Parts of the balancer on their own, where the order of replies matters more than the fake cluster can vary."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import Any

import pytest

from dynamoth.machine.events import ErrorReply, Send
from dynamoth.names import BALANCER_LEASE_KEY, PLAN_KEY
from dynamoth.plan.plan import Plan, Server
from dynamoth_balancer.install.book import PlanBook
from dynamoth_balancer.install.copies import PlanCopy
from dynamoth_balancer.install.lease import TAG, Lease
from tests.balancer.fake_cluster import FakeServer

SERVERS = ["s1", "s2", "s3", "s4"]


class Contender:
    """A balancer that wants the lease, with commands on their way to servers of which it reaches some sooner."""

    def __init__(self, incarnation: int, servers: dict[str, FakeServer], nearest_first: list[str]) -> None:
        self.lease = Lease(SERVERS, incarnation, 5.0, 1.0)
        self.servers = servers
        self._nearest_first = nearest_first
        self._sends: dict[str, list[Send]] = {id_: [] for id_ in SERVERS}

    def take(self, sends: list[Send]) -> None:
        for send in sends:
            self._sends[send.link].append(send)

    def deliver(self, now: float) -> list[Any]:
        """Return functions that each execute what was sent to one server, and take its replies; nearest first."""
        return [lambda id_=id_: self._deliver(id_, now) for id_ in self._nearest_first if self._sends[id_]]

    def _deliver(self, server: str, now: float) -> None:
        sends, self._sends[server] = self._sends[server], []
        replies = [(send.tag, self.servers[server].execute(tuple(send.args), now)) for send in sends]
        for tag, value in replies:
            if tag is not None:
                assert tag[0] == TAG
                self.take(self.lease.replied(server, tag[1], value, now))


def _run(contenders: list[Contender], now: float, duration_s: float) -> float:
    """Let both go on, the commands of both taking effect in turns; return the time."""
    end = now + duration_s
    while now < end:
        for server in contenders[0].servers.values():
            server.balancers = len(contenders)
        for contender in contenders:
            contender.take(contender.lease.tick(now))
        for _ in range(20):
            turns = zip_longest(*(contender.deliver(now) for contender in contenders))
            for turn in turns:
                for step in turn:
                    if step is not None:
                        step()
            assert sum(contender.lease.is_held(now) for contender in contenders) <= 1
        now += 0.25
    return now


@pytest.mark.parametrize("forged", [{}, b"x", b""], ids=["another type", "text", "empty"])
def test_a_value_that_is_no_lease_expires_and_one_balancer_wins(forged: Any) -> None:
    """Nobody may hold two leases meanwhile: ``_run`` looks after each command."""
    servers = {id_: FakeServer(id_) for id_ in SERVERS}
    one, other = Contender(1, servers, SERVERS), Contender(2, servers, SERVERS[::-1])
    for server in servers.values():
        server.keys[BALANCER_LEASE_KEY] = forged
    for id_ in SERVERS:
        one.take(one.lease.link_up(id_, 0.0))
        other.take(other.lease.link_up(id_, 0.0))
    _run([one], 0.0, 1.0)
    assert one.lease.others() == {}, "it is nobody's: a balancer that sees another one at work ends"
    assert one.lease.problems()
    now = _run([one, other], 1.0, 20.0)
    assert one.lease.is_held(now) or other.lease.is_held(now)


def test_the_lease_of_another_balancer_is_left_alone() -> None:
    servers = {id_: FakeServer(id_) for id_ in SERVERS}
    one = Contender(1, servers, SERVERS)
    for server in servers.values():
        server.keys[BALANCER_LEASE_KEY] = b"77"
    for id_ in SERVERS:
        one.take(one.lease.link_up(id_, 0.0))
    _run([one], 0.0, 20.0)
    assert not any(args[0] == b"PEXPIRE" for server in servers.values() for args in server.executed)


def test_of_two_that_reach_different_servers_first_one_wins() -> None:
    servers = {id_: FakeServer(id_) for id_ in SERVERS}
    one, other = Contender(1, servers, SERVERS), Contender(2, servers, SERVERS[::-1])
    for id_ in SERVERS:
        one.take(one.lease.link_up(id_, 0.0))
        other.take(other.lease.link_up(id_, 0.0))
    now = _run([one, other], 0.0, 20.0)
    assert one.lease.is_held(now) or other.lease.is_held(now)


def test_of_two_that_hold_half_of_the_servers_each_one_wins() -> None:
    servers = {id_: FakeServer(id_) for id_ in SERVERS}
    one, other = Contender(1, servers, SERVERS), Contender(2, servers, SERVERS)
    for id_ in SERVERS[:2]:
        one.take(one.lease.link_up(id_, 0.0))
    for id_ in SERVERS[2:]:
        other.take(other.lease.link_up(id_, 0.0))
    now = _run([one, other], 0.0, 3.0)
    assert not one.lease.is_held(now) and not other.lease.is_held(now)
    for id_ in SERVERS[2:]:
        one.take(one.lease.link_up(id_, now))
    for id_ in SERVERS[:2]:
        other.take(other.lease.link_up(id_, now))
    now = _run([one, other], now, 20.0)
    assert one.lease.is_held(now) or other.lease.is_held(now)


def test_replies_to_a_plan_that_was_given_up_do_not_count_for_the_next_attempt() -> None:
    book = PlanBook(Plan.initial([Server("s1", "redis://s1")]), {})
    copy = PlanCopy("s1", 1, retry_s=1.0, verify_interval_s=5.0, counters=Counter())
    copy.link_up("run")

    def reply(send: Any, value: Any) -> list[Any]:
        assert isinstance(send, Send)
        return list(copy.replied(send.tag, value, book, now))

    now = 10.0
    [header] = copy.sync(book, now)
    first = reply(header, [None, None, None])  # nothing is stored: DEL and HSET of a new plan
    assert len(first) == 2
    reply(first[0], ErrorReply("OOM"))
    now = 20.0
    [header] = copy.sync(book, now)
    second = reply(header, [None, None, None])
    assert reply(first[1], 3) == [] and reply(second[0], 0) == []
    [place] = reply(second[1], 3)
    assert place.args[0] == b"RENAME" and place.args[2] == PLAN_KEY
    assert not copy.is_kept and copy.problem == "OOM"
    reply(place, b"OK")
    assert (copy.version, copy.problem) == (0, "")
