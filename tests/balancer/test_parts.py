"""Parts of the balancer on their own, where the order of replies matters more than the simulator can vary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import pytest

from dynamoth.machine.events import ErrorReply, Send
from dynamoth.machine.lease import TAG, Lease
from dynamoth.names import BALANCER_LEASE_KEY, PLAN_KEY
from dynamoth.plan.plan import Plan, Server
from dynamoth_balancer.install.book import PlanBook
from dynamoth_balancer.install.copies import PlanCopy
from dynamoth_balancer.machine import LEASE
from tests.balancer.cluster import BALANCER, SimCluster

SERVERS = ["s1", "s2", "s3", "s4"]


class Contender:
    """A balancer that wants the lease, with commands on their way to servers of which it reaches some sooner."""

    def __init__(self, cluster: SimCluster, incarnation: int, nearest_first: list[str]) -> None:
        self.lease = Lease(LEASE, SERVERS, incarnation, 5.0, 1.0)
        #: How many balancers are connected.
        self.balancers = 2
        self._cluster = cluster
        self._nearest_first = nearest_first
        self._sends: dict[str, list[Send]] = {id_: [] for id_ in SERVERS}

    @property
    def holds_the_lease(self) -> bool:
        return self.lease.is_held(self._cluster.now)

    def connect(self, servers: list[str]) -> None:
        for id_ in servers:
            self._take(self.lease.link_up(id_, self._cluster.now))

    def tick(self) -> None:
        self._take(self.lease.tick(self._cluster.now))

    def _take(self, sends: list[Send]) -> None:
        for send in sends:
            self._sends[send.link].append(send)

    def deliver(self) -> list[Any]:
        """Return functions that each execute what was sent to one server, and take its replies; nearest first."""
        return [partial(self._deliver, id_) for id_ in self._nearest_first if self._sends[id_]]

    def _deliver(self, server: str) -> None:
        sends, self._sends[server] = self._sends[server], []
        for tag, value in [(send.tag, self._execute(server, send.args)) for send in sends]:
            if tag is not None:
                assert tag[0] == TAG
                self._take(self.lease.on_reply(server, tag[1], value, self._cluster.now))

    def _execute(self, server: str, args: Sequence[Any]) -> Any:
        if args[0] == b"PUBSUB":
            return [args[2], self.balancers]
        words = [part if isinstance(part, bytes) else b"%d" % part for part in args]
        return self._cluster.servers[server].execute(BALANCER, *words)


def _run(cluster: SimCluster, contenders: list[Contender], duration_s: float) -> None:
    """Let all go on, their commands taking effect in turns."""
    end = cluster.now + duration_s
    while cluster.now < end:
        for contender in contenders:
            contender.tick()
        for _ in range(20):
            for turn in zip_longest(*(contender.deliver() for contender in contenders)):
                for step in turn:
                    if step is not None:
                        step()
            assert sum(contender.holds_the_lease for contender in contenders) <= 1
        cluster.run(0.25)


def _two(nearest_first: list[str] = SERVERS) -> tuple[SimCluster, Contender, Contender]:
    cluster = SimCluster(len(SERVERS))
    return cluster, Contender(cluster, 1, SERVERS), Contender(cluster, 2, nearest_first)


@pytest.mark.parametrize("forged", [{b"a": b"1"}, b"x", b""], ids=["another type", "text", "empty"])
def test_a_value_that_is_no_lease_expires_and_one_balancer_wins(forged: Any) -> None:
    """Nobody may hold two leases meanwhile: ``_run`` looks after each command."""
    cluster, one, other = _two(SERVERS[::-1])
    for server in cluster.servers.values():
        server.put(BALANCER_LEASE_KEY, forged)
    one.connect(SERVERS)
    other.connect(SERVERS)
    _run(cluster, [one], 1.0)
    assert one.lease.others() == {}, "it is nobody's: a balancer that sees another one at work ends"
    assert one.lease.problems()
    _run(cluster, [one, other], 20.0)
    assert one.holds_the_lease or other.holds_the_lease


def test_the_lease_of_another_balancer_is_left_alone() -> None:
    cluster, one, _ = _two()
    for server in cluster.servers.values():
        server.put(BALANCER_LEASE_KEY, b"77")
    one.connect(SERVERS)
    _run(cluster, [one], 20.0)
    assert not any(args[0] == b"PEXPIRE" for server in cluster.servers.values() for args in server.executed)


def test_of_two_that_reach_different_servers_first_one_wins() -> None:
    cluster, one, other = _two(SERVERS[::-1])
    one.connect(SERVERS)
    other.connect(SERVERS)
    _run(cluster, [one, other], 20.0)
    assert one.holds_the_lease or other.holds_the_lease


def test_a_balancer_that_was_stopped_asks_for_others_before_it_takes_a_lease_that_was_deleted() -> None:
    cluster, one, other = _two()
    one.balancers = 1
    one.connect(SERVERS)
    _run(cluster, [one], 3.0)
    assert one.holds_the_lease
    cluster.run(6.0)  # it is stopped for longer than its lease
    other.connect(SERVERS)
    _run(cluster, [other], 20.0)
    assert other.holds_the_lease
    for server in cluster.servers.values():
        server.delete(BALANCER_LEASE_KEY)
    one.balancers = 2
    _run(cluster, [one], 1.0)
    assert [each.holds_the_lease for each in (one, other)] == [False, True]
    _run(cluster, [one, other], 20.0)
    assert other.holds_the_lease


def test_of_two_that_hold_half_of_the_servers_each_one_wins() -> None:
    cluster, one, other = _two()
    one.connect(SERVERS[:2])
    other.connect(SERVERS[2:])
    _run(cluster, [one, other], 3.0)
    assert not one.holds_the_lease and not other.holds_the_lease
    one.connect(SERVERS[2:])
    other.connect(SERVERS[:2])
    _run(cluster, [one, other], 20.0)
    assert one.holds_the_lease or other.holds_the_lease


def test_replies_to_a_plan_that_was_given_up_do_not_count_for_the_next_attempt() -> None:
    book = PlanBook(Plan.initial([Server("s1", "redis://s1")]), {})
    copy = PlanCopy("s1", 1, retry_s=1.0, verify_interval_s=5.0, counters=Counter())
    copy.link_up("run")

    def reply(send: Any, value: Any) -> list[Any]:
        assert isinstance(send, Send)
        return list(copy.on_reply(send.tag, value, book, now))

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
    assert b"RENAME" in place.args and place.args[5] == PLAN_KEY
    assert not copy.is_kept and copy.problem == "OOM"
    reply(place, b"OK")
    assert (copy.version, copy.problem) == (0, "")
