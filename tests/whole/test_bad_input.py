"""What must not harm a running cluster: second daemons, wrong passwords, and whatever bytes anybody publishes."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import msgpack
import pytest

from dynamoth.names import (
    AGENT_CHANNEL,
    ANNOUNCE_CHANNEL,
    BALANCER_CHANNEL,
    CLIENTS_CHANNEL,
    OPERATOR_CHANNEL,
    forward_channel,
    replica_channel,
)
from dynamoth.plan.plan import PlanDelta, Route, single
from dynamoth.protocol.control import (
    ForwardRequest,
    Marker,
    PlanAck,
    PlanChange,
    RouteNotice,
    pack_control,
    seal_control,
)
from dynamoth.protocol.envelope import seal
from dynamoth_cli.local.child import dynamoth_command
from dynamoth_cli.local.cluster import LocalCluster
from tests.whole.harness import PATIENCE_S, Traffic, channels_at, move, until

PASSWORD = "right password"
JUNK_PER_CHANNEL = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2, password=PASSWORD, settings={"balancer.lease_s": 3.0}) as running:
        yield running


@contextmanager
def daemon(cluster: LocalCluster, *arguments: str, password: str = PASSWORD) -> Generator[subprocess.Popen[str]]:
    """Start one more daemon of the cluster, as an operator does."""
    process = subprocess.Popen(
        dynamoth_command(arguments[0], "--config", str(cluster.config_file), *arguments[1:]),
        env={**os.environ, "DYNAMOTH_LINK_PASSWORD": password},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def last_words(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a daemon; return its status and its errors."""
    _, log = process.communicate(timeout=PATIENCE_S)
    lines = [json.loads(line) for line in log.splitlines()]
    return process.returncode, " ".join(
        f"{line['message']}: {line['cause']}" for line in lines if line["level"] == "error"
    )


def test_second_daemons_end_with_2_and_say_what_to_do(cluster: LocalCluster) -> None:
    [channel] = channels_at("s1", 1)

    def believed() -> int | None:
        agent = cluster.ask_balancer("status")["servers"]["s1"]
        return agent["agent_incarnation"] if agent["agent"] == "alive" else None

    first = until(believed, "the balancer hears the agent")
    with daemon(cluster, "agent", "--server", "s1") as agent, daemon(cluster, "balancer") as balancer:
        status, told = last_words(agent)
        assert status == 2
        assert "another agent of server 's1' is at work already" in told
        assert "stop the other first if this one shall replace it" in told
        status, told = last_words(balancer)
        assert status == 2
        assert "another balancer (incarnation " in told
        assert "stop that one first, or start this one with --standby" in told
    cluster.check()
    cluster.wait_ready()
    until(lambda: believed() == first, "the balancer believes the first agent again")
    move(cluster, channel, "s2")
    move(cluster, channel, "s1")


@pytest.mark.parametrize("arguments", [("agent", "--server", "s1"), ("balancer",)])
def test_a_daemon_with_a_wrong_password_says_so_and_what_to_check(
    cluster: LocalCluster, arguments: tuple[str, ...]
) -> None:
    with daemon(cluster, *arguments, password="wrong secret") as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "wrong password" in line)
        process.terminate()
        _, rest = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert json.loads(line)["level"] == "warning"
    assert "wrong password for the default user, or the user is off: check both (ACL LIST)" in line
    assert "secret" not in line + rest


def hostile(channels: list[bytes], seed: int) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Give PUBLISH commands that nobody should send: malformed on our channels, misleading on users' channels."""
    chance = random.Random(seed)
    valid = [
        pack_control(message)
        for message in (
            PlanAck("s1", 2**62, 10**6),
            PlanChange(PlanDelta(0, 1, {})),
            RouteNotice(b"c", Route(9, single("s2"))),
            ForwardRequest((("s2", seal(1, 2, 3, b"x")),)),
        )
    ]
    own = (AGENT_CHANNEL, BALANCER_CHANNEL, OPERATOR_CHANNEL, CLIENTS_CHANNEL, ANNOUNCE_CHANNEL)
    for channel in (*own, forward_channel(replica_channel(b"c", 1))):
        for _ in range(JUNK_PER_CHANNEL):
            whole = chance.choice(valid)
            cut = whole[: chance.randrange(len(whole))]
            nonsense = msgpack.packb([chance.randrange(1000, 2000), {"a": [None]}, chance.randbytes(5)])
            yield b"PUBLISH", channel, chance.choice([cut, nonsense, chance.randbytes(chance.randrange(200))])
    for channel in channels:
        for number in range(JUNK_PER_CHANNEL):
            sealed = seal(chance.getrandbits(64), number, chance.randrange(10), b"junk")
            routes = [Route(2**31, single("s9")), Route(2**31, single("s2")), Route(2**31, single("s1"))]
            notice = seal_control(RouteNotice(channel, chance.choice(routes)))
            marker = seal_control(Marker(channel, "s1", number))
            broken = sealed[: chance.randrange(1, len(sealed))] if number % 2 else sealed[:1] + chance.randbytes(60)
            yield b"PUBLISH", channel, chance.choice([broken, notice, marker])


def test_hostile_bytes_disturb_nobody() -> None:
    channels = [*channels_at("s1", 2), *channels_at("s2", 2)]
    with LocalCluster(2) as cluster, Traffic(cluster, channels) as traffic:
        for server in cluster.server_ids:
            for commands in (list(hostile(channels, seed)) for seed in range(2)):
                cluster.ask(server, *commands)
        traffic.flows()
        for channel in channels:
            move(cluster, channel, "s1" if channel in channels[2:] else "s2")
        traffic.flows()
        malformed = until(lambda: cluster.ask_balancer("status")["counters"].get("malformed"), "it is counted")
        assert malformed > JUNK_PER_CHANNEL
        cluster.check()
        assert traffic.finish().gaps == 0, traffic.gaps
