"""A second balancer replaces the first one, which can change nothing afterwards: on real processes and real Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import pytest

from dynamoth.errors import DynamothError
from dynamoth.machine.events import ErrorReply
from dynamoth.names import BALANCER_LEASE_KEY, PLAN_KEY, PLAN_KEY_NEW, TERM_KEY
from dynamoth.protocol.fence import claim, evaluate, fenced
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_sim.world.redis_keys import KeySpace, Snapshot
from tests.whole.harness import Traffic, channels_at, logged, move, stored_entry, until

TAKEOVER_S_MAX = 5.0
"""The bound with the usual lease. A machine that is busy with other tests keeps it with a shorter one."""
SHORTER = {"balancer.lease_s": 2.0}

CLIENT_S_MAX = 15.0
"""Until an operator acts, messages for lost servers wait for the client's timeout (10 s)."""


def _fail(balancer: Child, number: int) -> None:
    if number == signal.SIGKILL:
        balancer.kill()
    else:
        os.kill(balancer.pid, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_second_balancer_leads_within_5_s(number: int) -> None:
    [channel] = channels_at("s1", 1, servers=3)
    with LocalCluster(3, settings=SHORTER) as cluster, Traffic(cluster, [channel]) as traffic:
        first = cluster.balancer
        standby = cluster.another_balancer("standby")
        standby.start()
        try:
            until(lambda: logged(standby, "waiting for the lease"), "the second balancer stands by")
            assert f"led by process {first.pid} on " in _status(cluster) and "1 standby balancer" in _status(cluster)
            _fail(first, number)
            failed_at = time.monotonic()
            until(lambda: logged(standby, "leading"), "the standby leads")
            took_s = time.monotonic() - failed_at
            assert took_s < TAKEOVER_S_MAX, f"{took_s:.1f} s"
            assert f"led by process {standby.pid} on " in _status(cluster)
            assert ("no standby" in _status(cluster)) == (number == signal.SIGKILL), "one that hangs is connected"
            move(cluster, channel, "s2")
            if number == signal.SIGSTOP:
                os.kill(first.pid, signal.SIGCONT)
                until(lambda: logged(first, "lost the lease"), "the first balancer steps down")
            move(cluster, channel, "s3")
            entry = stored_entry(cluster, "s1", channel)
            assert entry is not None and entry.route.assignment.servers == ("s3",)
            traffic.flows()
            assert traffic.finish().gaps == 0, traffic.gaps
        finally:
            standby.stop()


def test_the_lease_of_a_dead_balancer_ends_though_the_clocks_were_set_back() -> None:
    """Redis keeps it for an hour more, as it does when the clocks of the machines are set back by an hour."""
    [channel] = channels_at("s1", 1)
    with LocalCluster(2, settings=SHORTER) as cluster:
        standby = cluster.another_balancer("standby")
        standby.start()
        try:
            until(lambda: logged(standby, "waiting for the lease"), "the second balancer stands by")
            cluster.balancer.kill()
            for server in cluster.server_ids:
                assert cluster.ask(server, (b"PEXPIRE", BALANCER_LEASE_KEY, 3_600_000)) == [1]
            until(lambda: logged(standby, "leading"), "the standby leads")
            move(cluster, channel, "s2")
        finally:
            standby.stop()


def test_an_operator_has_a_balancer_take_over_when_most_servers_are_lost() -> None:
    [kept], [lost] = channels_at("s1", 1, servers=3), channels_at("s2", 1, servers=3)
    with (
        LocalCluster(3, settings=SHORTER) as cluster,
        Traffic(cluster, [kept, lost], losses_allowed=True, interval_s=0.05, publish_s_max=CLIENT_S_MAX) as traffic,
    ):
        for server in ("s2", "s3"):
            cluster.lose(server)
        until(lambda: "--take-over" in _why_not_leading(cluster), "the balancer says what an operator can do")
        traffic.flows([kept])
        cluster.balancer.stop()
        other = cluster.another_balancer("takes over", "--take-over")
        other.start()
        try:
            until(lambda: logged(other, "leading"), "it leads")
            traffic.flows()
            for server in ("s2", "s3"):
                for action in ("drain", "remove"):
                    cluster.ask_balancer("server", {"action": action, "server": server})
            assert set(cluster.ask_balancer("status")["servers"]) == {"s1"}
        finally:
            other.stop()
        cluster.balancer.start()
        until(lambda: logged(cluster.balancer, "leading"), "a balancer leads without taking over")
        traffic.calm()
        traffic.flows()
        assert traffic.finish().lost == 0


def _status(cluster: LocalCluster) -> str:
    command = dynamoth_command("status", "--config", str(cluster.config_file))
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout


def _why_not_leading(cluster: LocalCluster) -> str:
    problems = cluster.ask_balancer("status")["problems"]
    return "".join(each["reason"] for each in problems if each["kind"] == "not_leading")


def test_taking_over_is_refused_while_most_servers_can_be_reached() -> None:
    with LocalCluster(3) as cluster:
        cluster.lose("s3")
        other = cluster.another_balancer("takes over", "--take-over")
        other.start()
        try:
            until(lambda: not other.running, "it ends")
            assert "status 2" in str(other.failure())
            [line] = logged(other, "the balancer must not run")
            assert "--take-over is refused, as 2 of 3 servers can be reached" in line["cause"]
        finally:
            other.stop()
        assert cluster.ask_balancer("status")["stage"] == "leading"


def test_redis_does_with_the_scripts_what_the_model_does() -> None:
    many = [part for number in range(5000) for part in (b"c:%d" % number, b"entry")]
    commands: list[Any] = [
        claim(2000),
        claim(2000),
        fenced(2000, (b"HSET", PLAN_KEY, b"@version", b"2000")),
        fenced(1999, (b"HSET", PLAN_KEY, b"@version", b"1")),
        (b"HMGET", PLAN_KEY, b"@version"),
        claim(3000),
        fenced(2000, (b"HSET", PLAN_KEY, b"@version", b"2001")),
        fenced(3000, (b"DEL", PLAN_KEY_NEW)),
        fenced(3000, (b"HSET", PLAN_KEY_NEW, b"@version", b"3000", *many)),
        fenced(2999, (b"RENAME", PLAN_KEY_NEW, PLAN_KEY)),
        fenced(3001, (b"RENAME", PLAN_KEY_NEW, PLAN_KEY)),
        (b"HLEN", PLAN_KEY),
        fenced(3001, (b"RENAME", PLAN_KEY_NEW, PLAN_KEY)),
        (b"GET", TERM_KEY),
        (b"SET", TERM_KEY, b"9999999999"),
        claim(1000),
        (b"SET", TERM_KEY, b"nan"),
        fenced(1, (b"HSET", PLAN_KEY, b"@version", b"1")),
    ]
    model = KeySpace(time.monotonic, Snapshot())

    def of_model(*words: bytes) -> Any:
        reply = evaluate(words, of_model, ErrorReply) if words[0] == b"EVAL" else model.execute(words)
        return _comparable(reply)

    with LocalCluster(1) as cluster:
        cluster.balancer.stop()
        cluster.ask("s1", (b"DEL", PLAN_KEY, PLAN_KEY_NEW, TERM_KEY))
        for command in commands:
            [reply] = cluster.ask("s1", command)
            assert _comparable(reply) == of_model(*command), command[:2]


def _comparable(reply: Any) -> Any:
    if isinstance(reply, (DynamothError, Exception)):
        return "error", str(reply).removeprefix("ERR ").partition(" ")[0]
    return reply
