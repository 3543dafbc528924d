"""One balancer at a time, and what a new one finds: leases, recovery, configurations that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamoth.errors import AlreadyRunning, ConfigError
from dynamoth.machine.events import Tick
from dynamoth.names import BALANCER_LEASE_KEY, PLAN_KEY, TERM_KEY
from dynamoth.plan.plan import JOIN_S, Plan, single
from dynamoth_balancer.events import Shutdown, Stopped
from dynamoth_balancer.install.contention import HEADERS_INTERVAL_S
from dynamoth_balancer.install.leadership import Stage
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import Balancer, SimCluster, refusing, started, stored_hash


def _leads(balancer: Balancer) -> bool:
    return balancer.machine.stage is Stage.LEADING


def _stands_by(balancer: Balancer) -> bool:
    return balancer.machine.overview.stands_by


def _messages(balancer: Balancer, level: str) -> list[str]:
    return [note.message for note in balancer.notes if note.level == level]


def test_a_second_balancer_ends_and_says_why() -> None:
    cluster, first = started(3, BalancerOptions())
    second = cluster.start(BalancerOptions(standby=False))
    cluster.run_until(lambda: second.stopped is not None, timeout_s=5)
    assert second.stopped is not None and isinstance(second.stopped.error, AlreadyRunning)
    assert str(first.machine.incarnation) in str(second.stopped.error)
    assert "stop that one first" in str(second.stopped.error)
    assert _leads(first) and second.machine.plan is None
    assert second.machine.deadline() is None and second.machine.handle(Tick(), cluster.now) == []


def test_a_standby_waits_and_is_well_until_the_leader_is_gone() -> None:
    cluster, first = started(3, BalancerOptions())
    standby = cluster.start(BalancerOptions(standby=True))
    cluster.run(60)
    assert standby.stopped is None and _leads(first)
    assert _stands_by(standby)
    assert standby.machine.health.problems == []
    assert not _messages(standby, "warning")
    at = cluster.now
    cluster.kill(first)
    cluster.run_until(lambda: _leads(standby))
    assert cluster.now - at <= standby.machine.options.lease_s + 1.5
    assert not _stands_by(standby)
    late = cluster.start(BalancerOptions(standby=True))
    standby.process.handle(Shutdown())
    cluster.run_until(lambda: _leads(late), timeout_s=2)


def test_a_standby_with_an_old_list_of_servers_goes_by_that_of_the_plan() -> None:
    cluster, first = started(3, BalancerOptions())
    standby = cluster.start(BalancerOptions(standby=True), servers=["s1", "s2"])
    cluster.run(1)
    assert _leads(first) and _stands_by(standby)
    assert standby.machine.overview.server_figures(cluster.now)["load_ratio"].keys() == {"s1", "s2", "s3"}
    cluster.add_server("s4")
    assert cluster.ask("server", {"action": "add", "server": "s4", "url": "redis://s4"}).error is None
    cluster.run(HEADERS_INTERVAL_S + 1)
    assert "s4" in standby.machine.overview.server_figures(cluster.now)["load_ratio"]
    cluster.kill(first)
    cluster.run_until(lambda: _leads(standby))
    assert set(standby.plan.servers) == {"s1", "s2", "s3", "s4"} and standby.machine.health.errors == []


def test_a_standby_that_led_once_can_say_how_the_servers_are_that_were_added_since() -> None:
    cluster, former = started(3, BalancerOptions(standby=True))
    rival = cluster.start(BalancerOptions(standby=True))
    former.process.pause()
    cluster.run_until(lambda: _leads(rival))
    cluster.add_server("s4")
    assert cluster.ask("server", {"action": "add", "server": "s4", "url": "redis://s4"}, server="s2").error is None
    former.process.resume()
    cluster.run(HEADERS_INTERVAL_S + 1)
    assert _stands_by(former)
    assert former.machine.overview.status(cluster.now)["servers"]["s4"]["link"] == "up"


def test_a_standby_that_nobody_leads_beside_is_not_well() -> None:
    cluster = SimCluster(3)
    for server in cluster.servers.values():
        server.refuse = refusing("NOPERM no", b"SET")
    standby = cluster.start(BalancerOptions(standby=True))
    cluster.run(3)
    assert not _stands_by(standby)
    assert "not_leading" in {problem.kind for problem in standby.machine.health.errors}


def test_a_killed_balancer_is_replaced_when_its_lease_has_expired() -> None:
    cluster, first = started(options=BalancerOptions())
    cluster.kill(first)
    successor = cluster.start()
    at = cluster.now
    cluster.run(1)
    assert successor.machine.stage is Stage.CONTENDING
    cluster.run_until(lambda: _leads(successor))
    assert cluster.now - at <= successor.machine.options.lease_s + 1.5
    [note] = [note for note in successor.notes if note.message == "waiting for the lease"]
    assert "another balancer holds it at s1" in note.details["reason"]


@pytest.mark.parametrize("is_deaf", [False, True], ids=["frozen itself", "the server hangs"])
def test_what_a_waiting_balancer_has_not_heard_for_long_proves_no_other_balancer(is_deaf: bool) -> None:
    """It knew before that another one has the lease, and has had no answer since."""
    cluster, first = started(3, BalancerOptions())
    successor = cluster.start()
    cluster.run(0.5)
    cluster.kill(first)
    if is_deaf:
        cluster.part(successor, "s1")
    else:
        successor.process.pause()
    cluster.run(8)
    assert successor.stopped is None
    if is_deaf:
        cluster.heal(successor, "s1")
    else:
        successor.process.resume()
    cluster.run_until(lambda: _leads(successor) or successor.stopped is not None)
    assert successor.stopped is None


def test_a_lease_that_cannot_be_prolonged_counts_no_longer_than_its_key() -> None:
    cluster, balancer = started(3, BalancerOptions())
    cluster.run(3)
    for server in cluster.servers.values():
        server.refuse = refusing("MISCONF no disk", b"SET", b"PEXPIRE")
    end = cluster.now + 8
    while cluster.now < end:
        cluster.run(0.05)
        ours = [holder is not None for holder in cluster.lease_holders()]
        held = balancer.machine._lease.is_held(cluster.now)  # pyright: ignore[reportPrivateUsage]  # the stage follows later
        assert sum(ours) >= 2 or not held
    assert balancer.machine.stage is Stage.SUSPENDED
    for server in cluster.servers.values():
        server.refuse = None
    cluster.run_until(lambda: _leads(balancer), 4.0)


def test_a_stopped_balancer_gives_the_lease_back_at_once() -> None:
    cluster, first = started(3, BalancerOptions())
    first.process.handle(Shutdown())
    cluster.run()
    assert first.stopped is not None and first.stopped.error is None
    assert cluster.lease_holders() == [None] * 3
    successor = cluster.start()
    cluster.run(1)
    assert _leads(successor)


def test_a_balancer_stops_although_a_server_does_not_answer() -> None:
    cluster, balancer = started(options=BalancerOptions())
    cluster.part(balancer, "s2")
    balancer.process.handle(Shutdown())
    cluster.run()
    assert not balancer.taken(Stopped)
    cluster.run(2)
    assert balancer.taken(Stopped) == [Stopped(None)]


def test_a_paused_balancer_does_nothing_when_it_wakes_up_after_its_lease() -> None:
    cluster, first = started(3, BalancerOptions())
    first.process.pause()
    second = cluster.start()
    cluster.run_until(lambda: _leads(second))
    cluster.run(1)
    for server in cluster.servers.values():
        server.executed.clear()
    first.process.resume()
    cluster.run()
    assert not _leads(first)
    written = {args[0] for server in cluster.servers.values() for args in server.executed} & {b"HSET", b"RENAME"}
    assert not written
    assert any("lost the lease" in message for message in _messages(first, "error"))
    cluster.run(10)
    assert first.machine.stage is Stage.CONTENDING and _stands_by(first) and _leads(second)


def test_a_balancer_that_was_held_up_for_longer_than_its_lease_says_so() -> None:
    cluster, balancer = started(3, BalancerOptions())
    balancer.process.pause()
    cluster.run(5)
    balancer.process.resume()
    lost = next(note for note in balancer.notes if "lost the lease" in note.message)
    assert "not renewed in time" in lost.details["reason"] and "lease_s" in lost.details["reason"]
    cluster.run_until(lambda: _leads(balancer))


def test_without_the_majority_of_the_servers_nothing_is_decided() -> None:
    cluster, balancer = started(3, BalancerOptions(server_dead_s=100.0))
    change = {"channel": b"news", "mode": "all-publishers", "servers": ["s1", "s2"]}
    assert cluster.ask("replicate", change).error is None
    for id_ in ("s1", "s2"):
        cluster.stop_server(id_)
    cluster.run(10)
    plan = balancer.plan
    for server in cluster.servers.values():
        server.delete(PLAN_KEY)
    assert balancer.machine.stage is Stage.SUSPENDED
    lost = next(note for note in balancer.notes if "lost the lease" in note.message)
    assert set(lost.details["unreachable"]) == {"s1", "s2"} and lost.details["needed"] == "2 of 3 servers"
    assert balancer.stopped is None, "there is no other balancer: it goes on when the servers are back"
    cluster.start_server("s1")
    cluster.run_until(lambda: _leads(balancer))
    cluster.start_server("s2")
    cluster.run_until(lambda: cluster.is_quiet(balancer))
    assert balancer.plan.entry(b"news").route == plan.entry(b"news").route, "no server has another plan"


def test_when_a_lease_is_deleted_while_its_balancer_hangs_that_one_can_write_no_more() -> None:
    cluster, first = started(3, BalancerOptions(lease_s=10.0))
    second = cluster.start()
    cluster.run(0.5)
    first.process.pause()
    for server in cluster.servers.values():
        server.delete(BALANCER_LEASE_KEY)
    at = cluster.now
    cluster.run_until(lambda: _leads(second))
    assert cluster.now - at <= 6 * second.machine.options.lease_renew_s
    for server in cluster.servers.values():
        server.delete(PLAN_KEY)
    first.process.resume()
    assert _leads(first), "its lease has not expired, by its own clock"
    cluster.run(2)
    assert any("ends its term" in note.message or "lost the lease" in note.message for note in first.notes)
    assert _stands_by(first) and _leads(second) and cluster.is_quiet(second)


def test_a_balancer_that_does_not_lead_shows_nothing_of_the_plan_that_it_had() -> None:
    """Another one has led since: operators would read of pins and of a pause that are over."""
    cluster, first = started(3)
    cluster.ask("pin", {"channel": b"news", "to": "s2"})
    cluster.ask("pause")
    shown = first.machine.overview.status(cluster.now)
    assert shown["paused"] and [pin["channel"] for pin in shown["pinned_channels"]] == [b"news"]
    first.process.pause()
    second = cluster.start()
    cluster.run_until(lambda: _leads(second))
    first.process.resume()
    cluster.run(2)
    assert _stands_by(first) and first.plan.administration.paused
    shown = first.machine.overview.status(cluster.now)
    assert (shown["version"], shown["paused"], shown["pinned"]) == (-1, False, 0)


def test_a_refused_write_ends_the_term_and_the_next_one_is_above() -> None:
    cluster, balancer = started(3)
    newer = balancer.plan.version + 5000
    for server in cluster.servers.values():
        server.put(TERM_KEY, b"%d" % newer)
    cluster.servers["s2"].delete(PLAN_KEY)
    cluster.run(2)
    assert balancer.machine.counters["writes_fenced"] == 1
    assert any("refuses its writes" in note.details.get("reason", "") for note in balancer.notes)
    assert _leads(balancer) and balancer.plan.version > newer
    cluster.run_until(lambda: cluster.is_quiet(balancer))


def test_never_two_lead() -> None:
    """Whatever is frozen, and whenever it wakes up."""
    for pause_s in (0.5, 2.0, 4.0, 4.6, 5.1, 7.0, 20.0):
        cluster = SimCluster(3)
        first = cluster.started()
        first.process.pause()
        cluster.run(pause_s)
        second = cluster.start()
        cluster.run(0.1)
        first.process.resume()
        for _ in range(100):
            cluster.run(0.1)
            assert not (_leads(first) and _leads(second)), pause_s
        assert _leads(first) or _leads(second)


def test_one_server_that_refuses_the_lease_does_not_keep_the_others_from_granting_it() -> None:
    cluster = SimCluster(3)
    cluster.servers["s1"].refuse = refusing("WRONGTYPE", b"GET")
    balancer = cluster.start()
    cluster.run(10)
    assert _leads(balancer)


# Recovery.


def test_the_url_of_the_configuration_counts_and_a_change_is_reported() -> None:
    cluster, first = started(3)
    cluster.kill(first)
    cluster.network.add_server("redis://elsewhere", cluster.servers["s2"])
    configured = [replace(each, url="redis://elsewhere") if each.id == "s2" else each for each in cluster.configured()]
    balancer = Balancer(cluster, configured, None)
    cluster.balancers.append(balancer)
    cluster.run_until(lambda: _leads(balancer) and cluster.is_quiet(balancer))
    for server in cluster.servers.values():
        assert server.plan_or_fail().servers["s2"].url == "redis://elsewhere"
    [note] = [note for note in balancer.notes if "had another URL" in note.message]
    assert (note.level, note.details) == ("warning", {"server": "s2"})
    assert note.message.endswith("if the file is old, correct it and restart the balancer")


def test_a_server_that_is_only_configured_is_reported_until_it_is_added() -> None:
    cluster = SimCluster(3)
    first = cluster.start(servers=["s1", "s2"])
    cluster.run_until(lambda: _leads(first))
    cluster.kill(first)
    balancer = cluster.start()
    cluster.run_until(lambda: _leads(balancer))
    cluster.ask("pause")
    cluster.run(1)
    assert set(balancer.plan.servers) == {"s1", "s2"}
    [problem] = [each for each in balancer.machine.health.problems if each.kind == "server_not_listed"]
    assert problem.subject == "s3" and "type 'dynamoth server add s3 URL'" in problem.reason
    assert not cluster.network.connections(balancer.name, "s3")
    add = {"action": "add", "server": "s3", "url": "redis://s3"}
    assert cluster.ask("server", add).error is None
    cluster.run_until(lambda: cluster.is_quiet(balancer))
    assert "server_not_listed" not in {each.kind for each in balancer.machine.health.problems}
    assert set(balancer.plan.servers) == {"s1", "s2", "s3"}
    assert balancer.plan.base == ("s1", "s2"), "the ring stays"
    for _ in range(2):
        error = cluster.refusal("move", {"channel": b"c", "to": "s3"})
        assert "s3 is new" in error and "try again in" in error
        cluster.run(JOIN_S / 2)
    assert cluster.ask("move", {"channel": b"c", "to": "s3"}).error is None, "clients with patterns have had their time"
    cluster.kill(balancer)
    balancer = cluster.started()
    assert cluster.ask("move", {"channel": b"d", "to": "s3"}).error is None, "a server in use is not new"


@pytest.mark.parametrize("configured", [["s1", "s2"], ["s3"]])
def test_the_servers_come_from_the_plan_and_not_from_the_configuration(configured: list[str]) -> None:
    cluster = SimCluster(3)
    cluster.kill(cluster.started())
    balancer = cluster.start(servers=configured)
    cluster.run_until(lambda: _leads(balancer))
    assert set(balancer.plan.servers) == {"s1", "s2", "s3"}
    cluster.run_until(lambda: cluster.is_quiet(balancer))


def test_a_balancer_finds_the_servers_although_most_configured_ones_are_gone() -> None:
    cluster, balancer = started(5, BalancerOptions())
    for id_ in ("s1", "s2"):
        assert cluster.ask("server", {"action": "drain", "server": id_}, server="s3").error is None
    cluster.run_until(
        lambda: balancer.machine.overview.slots_left("s1") == balancer.machine.overview.slots_left("s2") == 0, 600
    )
    cluster.run_until(lambda: cluster.is_quiet(balancer))
    for id_ in ("s1", "s2"):
        assert cluster.ask("server", {"action": "remove", "server": id_}, server="s3").error is None
        cluster.stop_server(id_)
    cluster.kill(balancer)
    successor = cluster.start(servers=["s1", "s2", "s3"])
    cluster.run_until(lambda: _leads(successor))
    assert set(successor.plan.servers) == {"s3", "s4", "s5"}
    cluster.run(1)
    reasons = {each.subject: each.reason for each in successor.machine.health.problems}
    assert reasons["s1"] == "it was removed from the plan: take it out of the configuration, too"


def test_a_balancer_that_was_away_while_servers_changed_goes_by_the_present_ones() -> None:
    cluster, first = started(3, BalancerOptions())
    first.process.pause()
    second = cluster.start(BalancerOptions())
    cluster.run_until(lambda: _leads(second))
    cluster.run_until(lambda: cluster.is_quiet(second))
    cluster.add_server("s4")
    assert cluster.ask("server", {"action": "add", "server": "s4", "url": "redis://s4"}).error is None
    first.process.resume()
    cluster.run(1)
    cluster.kill(second)
    cluster.run_until(lambda: _leads(first))
    assert set(first.plan.servers) == {"s1", "s2", "s3", "s4"}
    cluster.run_until(lambda: cluster.is_quiet(first))


def test_no_change_of_servers_begins_before_the_plan_of_the_term_is_stored() -> None:
    cluster = SimCluster(3)
    cluster.kill(cluster.started())
    balancer = cluster.start(BalancerOptions())
    for id_ in ("s1", "s2", "s3"):
        cluster.servers[id_].refuse = refusing("OOM", b"HSET")
    cluster.run_until(lambda: _leads(balancer))
    drain = {"action": "drain", "server": "s1"}
    assert "the plan of this balancer is not stored at more than half" in cluster.refusal("server", drain)
    for server in cluster.servers.values():
        server.refuse = None
    cluster.run(2)
    assert cluster.ask("server", drain).error is None


def test_plans_of_two_clusters_are_not_mixed() -> None:
    cluster = SimCluster(2)
    servers = {server.id: server for server in cluster.configured()}
    cluster.servers["s1"].put_plan(Plan(3, servers, ("s1",)))
    cluster.servers["s2"].put_plan(Plan(4, servers, ("s2",)))
    balancer = cluster.start()
    cluster.run_until(lambda: balancer.stopped is not None)
    assert balancer.stopped is not None and "is of another cluster" in str(balancer.stopped.error)


def test_a_server_of_another_cluster_that_comes_late_is_left_alone_and_reported() -> None:
    cluster = SimCluster(3)
    balancer = cluster.start()
    cluster.cut(balancer, "s3")
    cluster.run_until(lambda: _leads(balancer))
    other = Plan(4, {server.id: server for server in cluster.configured()}, ("s3",))
    cluster.servers["s3"].put_plan(other)
    cluster.heal(balancer, "s3")
    cluster.run(5)
    assert cluster.servers["s3"].plan == other
    assert len([text for text in _messages(balancer, "error") if "is of another cluster" in text]) == 1
    [channel] = balancer.at_home("s1")
    assert "of another cluster" in cluster.refusal("move", {"channel": channel, "to": "s3"})
    cluster.servers["s3"].delete(PLAN_KEY)
    cluster.run_until(lambda: cluster.servers["s3"].plan == balancer.plan)


def test_an_old_plan_from_the_disk_of_another_cluster_is_overwritten() -> None:
    cluster = SimCluster(2)
    servers = {server.id: server for server in cluster.configured()}
    cluster.servers["s1"].put_plan(Plan(900, servers, ("s1",)), run_id="another process")
    cluster.servers["s2"].put_plan(Plan(4, servers, ("s1", "s2")))
    balancer = cluster.started()
    assert balancer.plan.base == ("s1", "s2")


def test_plans_that_redis_restored_from_disk_are_recovered_from_when_there_is_nothing_newer() -> None:
    """All servers were restarted: what their disks kept is all there is."""
    cluster = SimCluster(2)
    plan = Plan.initial(cluster.configured())
    plan = plan.begin({b"c": single("s1" if plan.ring.home(b"c") == "s2" else "s2")})
    for server in cluster.servers:
        cluster.servers[server].put_plan(plan, run_id="before the restart")
    balancer = cluster.started()
    assert balancer.plan.entries[b"c"].route == plan.entries[b"c"].route
    assert balancer.plan.version > plan.version + 100


def test_only_one_copy_of_each_version_is_read_as_a_whole() -> None:
    cluster = SimCluster(5)
    cluster.kill(cluster.started())
    cluster.run(10)
    for server in cluster.servers.values():
        server.executed.clear()
    cluster.started()
    executed = [args[0] for server in cluster.servers.values() for args in server.executed]
    assert executed.count(b"HGETALL") == 1
    assert executed.count(b"RENAME") == 0, "the copies are those of the predecessor: only the version is new"


def test_a_balancer_waits_for_slow_servers_and_not_for_ever() -> None:
    cluster = SimCluster(3)
    cluster.stop_server("s3")
    balancer = cluster.start(BalancerOptions(server_dead_s=60.0))
    cluster.run(2)
    assert balancer.machine.stage is Stage.RECOVERING
    cluster.run(2)
    assert _leads(balancer)
    assert balancer.plan.version == 1000, "an unseen predecessor may have used the versions below"


def test_configurations_that_cannot_be() -> None:
    server = SimCluster(1).configured()[0]
    for servers in ([], [server, server]):
        with pytest.raises(ConfigError):
            BalancerMachine(servers, 1)
    wrong: dict[str, Any]
    for wrong in ({"wait_s": -1.0}, {"averaging_s": 0.0}, {"lease_s": 1.0}, {"moves_per_plan_max": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            BalancerOptions(**wrong)


def test_what_newer_software_has_stored_survives_a_balancer_that_does_not_know_it() -> None:
    """A rolling upgrade goes back: an older balancer replaces a newer one, changes the plan and writes it anew."""
    cluster, first = started(3, BalancerOptions(load_ratio_high=1000.0))
    [channel] = first.at_home("s1")
    cluster.kill(first)
    for server in cluster.servers.values():
        server.put(PLAN_KEY, {b"@trees": b"unknown"}, keep=True)
    balancer = cluster.started(BalancerOptions(load_ratio_high=1000.0))
    assert cluster.ask("move", {"channel": channel, "to": "s2"}).error is None
    cluster.servers["s3"].delete(PLAN_KEY)
    cluster.run(10.0)
    assert balancer.home(channel) == "s2" and balancer.machine.counters["copies_conflicting"] == 0
    for server in cluster.servers.values():
        assert server.plan_or_fail() == balancer.plan
        assert server.plan_or_fail().others == {b"@trees": b"unknown"}


@pytest.mark.parametrize("field", [b"@format", b"@header"])
def test_a_plan_of_another_format_ends_the_balancer_and_stays_unless_few_servers_store_it(field: bytes) -> None:
    cluster, first = started(3, BalancerOptions())
    cluster.kill(first)

    def forge(id_: str) -> dict[bytes, bytes]:
        fields = {**stored_hash(first.plan, cluster.servers[id_].run_id), field: b"2"}
        if field == b"@header":
            del fields[b"@cluster"]
        cluster.servers[id_].put(PLAN_KEY, fields)
        return fields

    forge("s2")
    second = cluster.started(BalancerOptions())
    assert any("others are used" in message for message in _messages(second, "error"))
    cluster.kill(second)
    stored = {id_: forge(id_) for id_ in ("s1", "s2")}
    third = cluster.start(BalancerOptions())
    cluster.run_until(lambda: third.stopped is not None)
    assert third.stopped is not None and isinstance(third.stopped.error, ConfigError)
    assert "the plan stored at s1 cannot be continued" in str(third.stopped.error)
    for id_, fields in stored.items():
        assert cluster.servers[id_].execute("test", b"HGETALL", PLAN_KEY) == fields


def test_a_balancer_that_lost_the_lease_for_a_moment_waits_for_no_dead_server() -> None:
    """Nobody else has led meanwhile: its own plan is the newest."""
    cluster, balancer = started(4, BalancerOptions(server_dead_s=100.0))
    cluster.stop_server("s4")
    balancer.process.pause()
    cluster.run(5.0)
    balancer.process.resume()
    cluster.run_until(lambda: balancer.machine.stage is not Stage.LEADING)
    at = cluster.now
    cluster.run_until(lambda: _leads(balancer))
    assert cluster.now - at < 1.0, f"{cluster.now - at:.1f} s; it would wait {balancer.machine.options.recovery_s:g} s"
