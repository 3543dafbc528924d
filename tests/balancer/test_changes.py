"""Administrators spread channels over several servers, and fold them back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamoth.plan.plan import Assignment, Mode, Phase, single
from dynamoth.protocol.control import AdminReply
from tests.balancer.cluster import NO_DECISIONS, Balancer, SimCluster
from tests.balancer.traffic import CAPACITY

CHANNEL = b"news"


def _started(servers: int = 3) -> tuple[SimCluster, Balancer, str]:
    """Return a cluster, its balancer, and where the channel is at home."""
    cluster = SimCluster(servers)
    balancer = cluster.started(replace(NO_DECISIONS, server_dead_s=60.0))
    return cluster, balancer, balancer.plan.ring.home(CHANNEL)


def _replicate(cluster: SimCluster, through: str = "s1", **arguments: Any) -> AdminReply:
    return cluster.ask("replicate", {"channel": CHANNEL, "mode": "all-subscribers", **arguments}, through)


def _assignment(balancer: Balancer) -> Assignment:
    return balancer.plan.entry(CHANNEL).route.assignment


@pytest.mark.parametrize(
    ("name", "mode"), [("all-subscribers", Mode.ALL_SUBSCRIBERS), ("all-publishers", Mode.ALL_PUBLISHERS)]
)
def test_a_channel_is_replicated_over_named_servers_and_folded_back(name: str, mode: Mode) -> None:
    cluster, balancer, home = _started()
    servers = ["s3", "s1"]
    reply = _replicate(cluster, mode=name, servers=servers)
    assert reply.error is None
    assert (reply.result["mode"], reply.result["servers"], reply.result["note"]) == (name, servers, "")
    assert (reply.result["from"], reply.result["epoch"], reply.result["version"]) == (home, 1, 3)
    entry = balancer.plan.entry(CHANNEL)
    assert (entry.route.assignment, entry.phase) == (Assignment(mode, ("s3", "s1")), Phase.SETTLED)
    reply = cluster.ask("unreplicate", {"channel": CHANNEL, "to": "s2"})
    assert reply.error is None
    assert (reply.result["mode"], reply.result["servers"], reply.result["to"]) == ("single", ["s2"], "s2")
    assert "from" not in reply.result
    assert _assignment(balancer) == single("s2")


def test_a_count_takes_the_present_servers_and_then_the_least_loaded() -> None:
    cluster, balancer, home = _started(4)
    first, second, third = cluster.others(home)
    for id_, ratio in ((home, 0.9), (first, 0.5), (second, 0.1), (third, 0.3)):
        cluster.agents[id_].loads[b"load of " + id_.encode()] = round(ratio * CAPACITY)
    cluster.run(12)
    assert _replicate(cluster, count=2).result["servers"] == [home, second]
    assert _replicate(cluster, count=3).result["servers"] == [second, home, third], "the least loaded first"
    assert _replicate(cluster, count=2).result["servers"] == [second, third], "the busiest is freed"
    assert _assignment(balancer) == Assignment(Mode.ALL_SUBSCRIBERS, (second, third))


def test_with_fewer_servers_than_asked_for_those_that_are_there_are_used_and_it_is_said() -> None:
    cluster, _, home = _started()
    gone = cluster.others(home)[0]
    cluster.agents[gone].alive = False
    cluster.run(6)
    reply = _replicate(cluster, count=5)
    assert reply.error is None and sorted(reply.result["servers"]) == sorted({*cluster.servers} - {gone})
    assert reply.result["note"].startswith("2 servers instead of 5")
    assert f"the agent of server {gone} is not heard; start `dynamoth agent` for it" in reply.result["note"]


def test_servers_that_are_down_are_no_replicas_and_fewer_than_two_are_none() -> None:
    cluster, balancer, home = _started()
    first, second = cluster.others(home)
    cluster.agents[first].alive = False
    cluster.stop_server(second)
    cluster.run(6)
    agent_down, server_down = f"the agent of server {first} is not heard", f"server {second} is not connected"
    for servers, words in (
        ({"count": 2}, ("at least 2 servers, and 1 can take part", agent_down, server_down)),
        ({"servers": [home, first]}, (agent_down,)),
        ({"servers": [home, second]}, (server_down,)),
    ):
        error = _replicate(cluster, home, **servers).error
        assert error is not None and all(each in error for each in words), error
    assert balancer.plan.version == 0


def test_unreplicate_takes_the_least_loaded_replica() -> None:
    cluster, _, _ = _started()
    assert _replicate(cluster, servers=["s1", "s2", "s3"]).error is None
    for id_, ratio in (("s1", 0.4), ("s2", 0.2), ("s3", 0.3)):
        cluster.agents[id_].loads[b"load of " + id_.encode()] = round(ratio * CAPACITY)
    cluster.run(12)
    assert cluster.ask("unreplicate", {"channel": CHANNEL}).result["to"] == "s2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"servers": ["s1", "s9"]}, "server 's9' is not known; known are s1, s2, s3"),
        ({"servers": ["s1", "s2", "s1"]}, "server 's1' is named twice"),
        ({"servers": ["s1"]}, "at least two servers, not 1; 'dynamoth plan move' puts a channel at one"),
        ({"count": 1}, "at least two servers, not 1; 'dynamoth plan move' puts a channel at one"),
        ({"count": -3}, "at least two servers"),
        ({"count": True}, "a whole number"),
        ({"count": 2.5}, "a whole number"),
        ({"servers": []}, "a list of ids"),
        ({"servers": "s1,s2"}, "a list of ids"),
        ({"servers": ["s1", 2]}, "a list of ids"),
        ({"servers": [["s1"] * 9]}, "a list of ids"),
        ({}, "either servers"),
        ({"servers": ["s1", "s2"], "count": 2}, "either servers"),
        ({"servers": ["s1", "s2"], "mode": "single"}, "these are all-subscribers, all-publishers"),
        ({"servers": ["s1", "s2"], "mode": "ALL_SUBSCRIBERS"}, "these are all-subscribers, all-publishers"),
        ({"servers": ["s1", "s2"], "mode": 2}, "these are all-subscribers, all-publishers"),
        ({"servers": ["s1", "s2"], "channel": "text"}, "takes the arguments channel (bytes), mode"),
        ({"servers": ["s1", "s2"], "channel": b"__dynamoth__:agent"}, "not an application's"),
        ({"servers": ["s1", "s2"], "channel": b"__dynamoth__:r:5:x"}, "not an application's"),
    ],
)
def test_replications_that_make_no_sense_are_refused(arguments: dict[str, Any], words: str) -> None:
    cluster, balancer, _ = _started()
    reply = _replicate(cluster, **arguments)
    assert reply.error is not None and words in reply.error
    assert balancer.plan.version == 0


def test_what_is_there_already_succeeds_whatever_the_order_of_the_servers() -> None:
    cluster, balancer, _ = _started()
    assert _replicate(cluster, servers=["s1", "s2"]).error is None
    version = balancer.plan.version
    for reply in (_replicate(cluster, servers=["s2", "s1"]), _replicate(cluster, count=2)):
        assert (reply.error, reply.result["note"]) == (None, "it was there already")
        assert balancer.plan.version == version


def test_a_channel_in_transition_is_refused_unless_it_goes_to_the_same() -> None:
    cluster, _, home = _started()
    cluster.agents[home].listened.add(CHANNEL)
    for request, count in ((5, 2), (6, 2)):
        wanted = {"channel": CHANNEL, "mode": "all-publishers", "count": count}
        cluster.admin(home, "replicate", wanted, request=request)
    cluster.run(1)
    requests: list[tuple[str, dict[str, Any]]] = [
        ("replicate", {"channel": CHANNEL, "mode": "all-subscribers", "count": 2}),
        ("move", {"channel": CHANNEL, "to": home}),
        ("unreplicate", {"channel": CHANNEL}),
    ]
    for command, arguments in requests:
        reply = cluster.ask(command, arguments)
        assert reply.error is not None and "is in transition" in reply.error
    cluster.agents[home].listened.clear()
    cluster.run(3)
    answered = {reply.request: reply for reply in cluster.servers[home].replies}
    assert answered[5].error is None and answered[6].error is None
    assert answered[5].result["epoch"] == answered[6].result["epoch"] == 1


def test_a_successor_answers_what_its_predecessor_began() -> None:
    cluster, balancer, _ = _started()
    assert _replicate(cluster, servers=["s1", "s2"]).error is None
    for id_ in ("s1", "s2"):
        cluster.agents[id_].listened.add(CHANNEL)
    cluster.admin("s1", "unreplicate", {"channel": CHANNEL}, request=5)
    cluster.run(3)
    successor = cluster.succeed(balancer, NO_DECISIONS)
    cluster.admin("s1", "unreplicate", {"channel": CHANNEL}, request=5)
    cluster.run(1)
    for agent in cluster.agents.values():
        agent.listened.clear()
    cluster.run(3)
    reply = next(reply for reply in cluster.servers["s1"].replies if reply.request == 5)
    assert reply.error is None and _assignment(successor) == single(reply.result["to"])


def test_a_replicated_channel_is_not_moved_and_one_at_one_server_not_unreplicated() -> None:
    cluster, _, home = _started()
    for arguments in ({}, {"to": home}):
        reply = cluster.ask("unreplicate", {"channel": CHANNEL, **arguments})
        assert (reply.error, reply.result["note"]) == (None, "it was there already")
    other = cluster.others(home)[0]
    assert f"is not replicated: it is at {home}, and 'dynamoth plan move'" in cluster.refusal(
        "unreplicate", {"channel": CHANNEL, "to": other}
    )
    assert cluster.ask("unreplicate", {"channel": CHANNEL, "to": 5}).error is not None
    assert _replicate(cluster, servers=["s1", "s2"]).error is None
    error = cluster.refusal("move", {"channel": CHANNEL, "to": "s3"})
    assert "is replicated over s1, s2" in error and "unreplicate CHANNEL --to SERVER" in error
