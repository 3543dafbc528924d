"""Servers are drained, and taken back, by command."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamoth.machine.events import Connect, LinkUp, Send, Start
from dynamoth.names import BALANCER_LEASE_KEY
from dynamoth.plan.plan import Plan, Server, single
from dynamoth.protocol.control import AdminReply
from dynamoth_balancer.install.leadership import Stage
from dynamoth_balancer.install.membership import LEAVE_TIMEOUT_S
from dynamoth_balancer.options import BalancerOptions
from dynamoth_sim.world.process import Process
from tests.balancer.cluster import SimCluster, refusing, started

OPTIONS = BalancerOptions(wait_s=4.0, averaging_s=3.0, channel_rest_s=5.0)


class Subscriber:
    """A plain client that subscribes to a channel of an application."""

    def __init__(self, url: str) -> None:
        self._url = url

    def handle(self, event: Any, now: float) -> list[Any]:
        if isinstance(event, LinkUp):
            return [Send("server", (b"SUBSCRIBE", b"news"))]
        return [Connect("server", self._url)] if isinstance(event, Start) else []

    def deadline(self) -> None:
        return None


def _server(cluster: SimCluster, action: str, server: object) -> str:
    """Ask for a change of a server; return why it was refused, or the note."""
    reply = cluster.ask("server", {"action": action, "server": server}, server="s2")
    return reply.result["note"] if reply.error is None else reply.error


def _is_empty(cluster: SimCluster, server: str) -> bool:
    status = cluster.ask("status", server="s2").result["servers"][server]
    return (status["draining"], status["channels_left"], status["slots_left"]) == (True, 0, 0)


def test_a_server_is_drained_by_command_and_a_later_balancer_goes_on() -> None:
    cluster, before = started(3, OPTIONS)
    assert _server(cluster, "drain", "s1") == ""
    stored = [server.plan_or_fail().administration.draining for server in cluster.servers.values()]
    assert sum("s1" in draining for draining in stored) >= 2, "the answer says that it is stored"
    cluster.run(10)
    balancer = cluster.succeed(before, OPTIONS)
    assert balancer.plan.administration.draining == {"s1"}
    cluster.run_until(lambda: _is_empty(cluster, "s1"), timeout_s=300)
    version = balancer.plan.version
    assert _server(cluster, "drain", "s1") == "it is being drained already" and balancer.plan.version == version
    assert _server(cluster, "undrain", "s1") == ""
    assert balancer.plan.administration.draining == frozenset()
    cluster.run_until(lambda: any(e.route.assignment == single("s1") for e in balancer.plan.entries.values()), 300)
    assert _server(cluster, "undrain", "s1") == "it is not being drained"


def test_a_replication_that_an_administrator_has_asked_for_leaves_a_server_that_is_drained() -> None:
    cluster, balancer = started(3, replace(OPTIONS, replicas_max=1, load_ratio_high=1000.0))
    assert cluster.ask("replicate", {"channel": b"c", "mode": "all-subscribers", "servers": ["s1", "s2"]}).error is None
    assert _server(cluster, "drain", "s1") == ""
    cluster.run_until(lambda: "s1" not in balancer.plan.entry(b"c").route.assignment.servers, timeout_s=300)


@pytest.mark.parametrize(
    ("action", "server", "reason"),
    [
        ("drain", "s9", "server 's9' is not known; known are s1, s2"),
        ("undrain", "s9", "server 's9' is not known; known are s1, s2"),
        ("drain", 1, "server must be the id of a server (text), not 1"),
        ("explode", "s1", "action must be add, remove, drain, undrain, not 'explode'"),
        ("drain", "s2", "server s2 cannot be drained, as all others are being drained, and its channels would have"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(action: str, server: object, reason: str) -> None:
    cluster, balancer = started(2, OPTIONS)
    assert _server(cluster, "drain", "s1") == ""
    administration = balancer.plan.administration
    assert _server(cluster, action, server).startswith(reason)
    assert balancer.plan.administration == administration


def test_the_only_server_is_not_drained() -> None:
    cluster, _ = started(1, OPTIONS)
    error = cluster.ask("server", {"action": "drain", "server": "s1"}).error
    assert error is not None and "as it is the only one" in error and "'dynamoth server add'" in error


def test_the_configuration_begins_a_cluster_and_is_not_used_after_a_command() -> None:
    configured = replace(OPTIONS, draining=frozenset({"s1"}))
    cluster, before = started(3, configured)
    assert before.plan.administration.draining == {"s1"}
    assert _server(cluster, "undrain", "s1") == ""
    balancer = cluster.succeed(before, configured)
    cluster.run(5)
    assert balancer.plan.administration.draining == frozenset()
    [note] = [note for note in balancer.notes if "draining = true is not used" in note.message]
    assert note.details == {"configured": ["s1"], "plan": []}


# The list of servers.


def _add(cluster: SimCluster, server: str, url: str = "") -> AdminReply:
    return cluster.ask("server", {"action": "add", "server": server, "url": url or f"redis://{server}"}, server="s2")


def _remove(cluster: SimCluster, server: str) -> AdminReply:
    return cluster.ask("server", {"action": "remove", "server": server}, server="s2")


def _listed(cluster: SimCluster) -> list[set[str]]:
    return [set(server.plan_or_fail().servers) for server in cluster.servers.values()]


def test_a_server_is_added_and_takes_slots() -> None:
    cluster, balancer = started(3, OPTIONS)
    cluster.add_server("s4")
    reply = _add(cluster, "s4")
    assert reply.error is None and reply.result["url"] == "redis://s4", reply
    everybody = {"s1", "s2", "s3", "s4"}
    assert sum(listed == everybody for listed in _listed(cluster)) >= 3, "the answer says that it is stored"
    assert cluster.lease_holders()[3] is not None, "the lease is held there first"
    move = {"channel": b"c", "to": "s4"}
    assert "clients with patterns connect to it first" in cluster.refusal("move", move)
    cluster.run_until(lambda: len(balancer.machine.overview.server_figures(cluster.now)["slots_left"]) == 4)
    cluster.run_until(lambda: any(e.route.assignment == single("s4") for e in balancer.plan.entries.values()), 300)
    assert balancer.machine.overview.status(cluster.now)["servers"]["s4"]["link"] == "up"
    assert _add(cluster, "s4").result["note"] == "it is in the plan already"


def test_a_server_that_is_drained_is_removed_and_learns_that_it_has_left() -> None:
    cluster, balancer = started(3, OPTIONS)
    assert "it is not being drained: type 'dynamoth server drain s1'" in (_remove(cluster, "s1").error or "")
    assert _server(cluster, "drain", "s1") == ""
    assert "channels or slots are" in (_remove(cluster, "s1").error or "")
    cluster.run_until(lambda: _is_empty(cluster, "s1"), timeout_s=300)
    cluster.run_until(lambda: cluster.is_quiet(balancer))
    reply = _remove(cluster, "s1")
    assert reply.error is None and reply.result["note"] == "", reply
    assert _listed(cluster) == [{"s2", "s3"}] * 3, "the removed server stores that, too"
    assert cluster.lease_holders()[0] is None
    cluster.run(1)
    assert not cluster.network.connections(balancer.name, "s1"), "the balancer has left it"
    assert "s1" not in balancer.machine.overview.status(cluster.now)["servers"]
    assert _remove(cluster, "s1").result["note"] == "it was removed already"
    assert "the id s1 was used before" in (_add(cluster, "s1").error or "")
    moved = cluster.ask("move", {"channel": b"c", "to": "s3"}, server="s2").error
    assert moved is None or "is there already" in moved


def test_a_removal_waits_for_listeners_and_says_who_is_left() -> None:
    cluster, _ = started(3, OPTIONS)
    assert _server(cluster, "drain", "s1") == ""
    cluster.run_until(lambda: _is_empty(cluster, "s1"), timeout_s=300)
    subscriber = Process(cluster.world, cluster.network, "plain", lambda _: Subscriber("redis://s1"), lambda _: None)
    subscriber.start()
    cluster.run(1)
    began = cluster.now
    assert _remove(cluster, "s1").result["note"].startswith("1 channels and patterns still have listeners there")
    assert cluster.now - began >= LEAVE_TIMEOUT_S


def test_a_server_that_is_down_is_removed() -> None:
    cluster, balancer = started(3, OPTIONS)
    assert _server(cluster, "drain", "s1") == ""
    cluster.run_until(lambda: _is_empty(cluster, "s1"), timeout_s=300)
    cluster.run_until(lambda: cluster.is_quiet(balancer))
    cluster.stop_server("s1")
    cluster.run(1)
    assert "it cannot be reached: clients that know no other server" in _remove(cluster, "s1").result["note"]
    assert set(balancer.plan.servers) == {"s2", "s3"}


@pytest.mark.parametrize(
    ("server", "url", "reason"),
    [
        ("s1", "redis://s9", "server s1 is in the plan with the URL redis://s1: give the new server another id"),
        ("s9", "redis://s1", "redis://s1 is the server s1: a server has one id"),
        ("", "redis://s9", "the id of a server is a name of up to 64 letters, digits, '.', '_' and '-'"),
        ("s 9", "redis://s9", "the id of a server is a name of up to 64 letters"),
        ("s9", "redis://user:secret@s9", "the URL of a server has no user and no password"),
        ("s9", "\n", "the URL of a server has 1 to 2000 characters"),
        ("s4", "redis://nowhere", "s4 cannot be reached at its URL:"),
        ("s4", "redis://same", "s4 is the server s2, by another URL"),
        ("s4", "redis://replica", "s4 is a replica, and stores nothing itself: name its master"),
        ("s4", "redis://cluster", "s4 is a node of a Redis Cluster, and Dynamoth uses standalone servers"),
        ("s4", "redis://sentinel", "s4 is a Sentinel, and Dynamoth uses standalone servers"),
        ("s4", "redis://other", "s4 stores the plan of another cluster, with the servers x1, x2"),
        ("s4", "redis://led", "s4 does not give the balancer its lease: another balancer holds it there"),
        ("s4", "redis://refuses", "s4 does not give the balancer its lease: NOPERM"),
    ],
)
def test_a_server_that_cannot_be_used_is_not_added_and_nothing_changes(server: str, url: str, reason: str) -> None:
    cluster, balancer = started(2, OPTIONS)
    cluster.run(1)
    new = cluster.add_server("s4", url if server == "s4" else "")
    match url.removeprefix("redis://"):
        case "nowhere":
            cluster.stop_server("s4")
        case "same":
            new.run_id = cluster.servers["s2"].run_id
        case "replica":
            new.role = "slave"
        case "cluster" | "sentinel" as mode:
            new.mode = mode
        case "other":
            new.put_plan(Plan.initial([Server("x1", "redis://x1"), Server("x2", "redis://x2")]))
        case "led":
            new.execute("test", b"SET", BALANCER_LEASE_KEY, b"4711")
        case "refuses":
            new.refuse = refusing("NOPERM no", b"SET")
        case _:
            pass
    version = balancer.plan.version
    error = _add(cluster, server, url).error
    assert error is not None and error.startswith(reason), error
    assert balancer.plan.version == version and set(balancer.plan.servers) == {"s1", "s2"}
    cluster.run(1)
    assert not cluster.network.connections(balancer.name, "s4")
    assert cluster.servers["s4"].execute("test", b"GET", BALANCER_LEASE_KEY) in (None, b"4711")


def test_one_change_of_servers_is_under_way_at_a_time() -> None:
    cluster, balancer = started(3, OPTIONS)
    cluster.add_server("s4")
    cluster.stop_server("s4")
    cluster.admin("s2", "server", {"action": "add", "server": "s4", "url": "redis://s4"})
    cluster.run(1)
    assert "another change of servers (add s4) is not stored" in _server(cluster, "drain", "s1")
    cluster.start_server("s4")
    cluster.run_until(lambda: "s4" in balancer.plan.servers)
    assert _server(cluster, "drain", "s1") == ""


def test_the_last_server_and_all_that_are_not_drained_stay() -> None:
    cluster, _ = started(1, OPTIONS)
    error = cluster.ask("server", {"action": "remove", "server": "s1"}).error
    assert error is not None and "as it is the only one: add another one first" in error


def test_a_balancer_that_loses_its_lease_gives_a_server_up_that_it_tries() -> None:
    cluster, balancer = started(3, OPTIONS)
    cluster.add_server("s4")
    cluster.stop_server("s4")
    cluster.admin("s1", "server", {"action": "add", "server": "s4", "url": "redis://s4"}, request=4711)
    cluster.run(1)
    for server in ("s2", "s3"):
        cluster.cut(balancer, server)
    cluster.run_until(lambda: balancer.machine.stage is Stage.SUSPENDED)
    cluster.run(1)
    [reply] = [reply for reply in cluster.servers["s1"].replies if reply.request == 4711]
    assert "the balancer has lost its lease meanwhile: ask again" in (reply.error or "")
