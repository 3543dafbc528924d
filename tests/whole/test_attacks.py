"""Attacks on a whole cluster, with the rights that ``dynamoth acl`` gives: by clients, operators, and as an agent.

What no ACL can forbid, as the sender may use the channel, must do no harm either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import product
from typing import Any

import msgpack
import pytest
import redis
import redis.exceptions

from dynamoth import names
from dynamoth.errors import RequestRefused
from dynamoth.plan.plan import PlanDelta, Route, single
from dynamoth.protocol.control import (
    AdminRequest,
    Announcement,
    ForwardRequest,
    Marker,
    PlanAck,
    PlanChange,
    RouteNotice,
    Vacated,
    pack_control,
    seal_control,
)
from dynamoth.protocol.envelope import FIRST, HEARTBEAT, open_envelope, seal
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import from_url
from tests.whole.acl_cluster import USERS, Rules, acl_cluster, all_rules, plain_client
from tests.whole.harness import Traffic, move, until

SECRET = b"secret"
"""A channel that clients must not touch."""
NEWS = b"news.x"
MIXED = b"secret:news.x"
"""Another one, which ends like a channel that they may use."""

REPLICA = names.replica_channel(NEWS, 7)
SECRET_REPLICAS = tuple(names.replica_channel(name, 7) for name in (SECRET, MIXED, names.sharded_channel(MIXED)))


@pytest.fixture(scope="module", params=all_rules(), ids=str)
def rules(request: pytest.FixtureRequest) -> Rules:
    rules: Rules = request.param
    return rules


@pytest.fixture(scope="module")
def cluster(rules: Rules, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with acl_cluster(rules, tmp_path_factory.mktemp("attacks")) as cluster:
        yield cluster


def move_and_back(cluster: LocalCluster, channel: bytes = b"news.moved") -> None:
    """See that the cluster does its work."""
    for server in ("s1", "s2"):
        assert cluster.ask_balancer("move", {"channel": channel, "to": server})["to"] == server
    cluster.check()


def problems(cluster: LocalCluster) -> set[tuple[str, str]]:
    """Return what the balancer says is wrong: kinds and subjects."""
    return {(problem["kind"], problem["subject"]) for problem in cluster.ask_balancer("status")["problems"]}


def refused(client: Any, *command: Any) -> None:
    with pytest.raises(
        (redis.exceptions.NoPermissionError, redis.exceptions.ResponseError), match=r"permission|NOPERM"
    ):
        client.execute_command(*command)


WRITES = (
    ("HSET", names.PLAN_KEY, "@version", "9"),
    ("DEL", names.PLAN_KEY),
    ("RENAME", names.PLAN_KEY, "x"),
    ("SET", names.PLAN_KEY, "x"),
    ("SET", names.BALANCER_LEASE_KEY, "9"),
    ("DEL", names.BALANCER_LEASE_KEY),
    ("PEXPIRE", names.BALANCER_LEASE_KEY, "1"),
    ("FLUSHALL",),
    ("EVAL", "return 1", "0"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("CLIENT", "KILL", "TYPE", "pubsub"),
    ("CLIENT", "PAUSE", "1000"),
    ("ACL", "SETUSER", "dynamoth-client", "allchannels"),
    ("SHUTDOWN", "NOSAVE"),
    ("REPLICAOF", "NO", "ONE"),
    ("MONITOR",),
)

NOT_A_CLIENT_S = (
    names.AGENT_CHANNEL,
    names.BALANCER_CHANNEL,
    names.OPERATOR_CHANNEL,
    names.operator_inbox(7),
    names.relay_channel(NEWS),
    names.relay_channel(SECRET),
    names.relay_channel(names.BALANCER_CHANNEL),
    SECRET,
    MIXED,
    names.sharded_channel(SECRET),
    *SECRET_REPLICAS,
    *map(names.forward_channel, SECRET_REPLICAS),
    names.PATTERN_PREFIX + b"*",
)


@pytest.mark.parametrize("role", ["client", "operator"])
def test_neither_clients_nor_operators_write_a_key_or_rule_a_server(cluster: LocalCluster, role: str) -> None:
    with plain_client(cluster, "s1", role) as client:
        for command in WRITES:
            refused(client, *command)


def test_a_client_speaks_as_nobody_else_and_hears_nobody_else(cluster: LocalCluster) -> None:
    with plain_client(cluster, "s1", "client") as client:
        for channel in NOT_A_CLIENT_S:
            refused(client, "PUBLISH", channel, b"x")
            refused(client, "SUBSCRIBE", channel)
        for pattern in (b"*", b"__dynamoth__:*", b"secret*", b"news.*x", b"[n]ews.*"):
            refused(client, "PSUBSCRIBE", pattern)


def test_an_operator_uses_no_channel_of_an_application_or_an_agent(cluster: LocalCluster) -> None:
    with plain_client(cluster, "s1", "operator") as operator:
        for channel in (NEWS, SECRET, REPLICA, names.BALANCER_CHANNEL, names.AGENT_CHANNEL, names.inbox(7)):
            refused(operator, "PUBLISH", channel, b"x")
            refused(operator, "SUBSCRIBE", channel)


def test_where_redis_can_tell_a_client_writes_into_no_inbox_and_hears_no_announcement(
    cluster: LocalCluster, rules: Rules
) -> None:
    """What remains possible on Redis 6.2 is in docs/security.md: this test says so when that changes."""
    with plain_client(cluster, "s1", "client") as client:
        for channel in (names.inbox(7), names.CLIENTS_CHANNEL):
            if rules.redis == "6.2":
                client.publish(channel, b"x")
            else:
                refused(client, "PUBLISH", channel, b"x")
        for command in (("SUBSCRIBE", names.ANNOUNCE_CHANNEL), ("PSUBSCRIBE", names.INBOX_PREFIX + b"*")):
            if rules.redis == "6.2":
                with client.pubsub() as pubsub:
                    pubsub.execute_command(*command)
                    assert pubsub.parse_response(timeout=5)[1:] == [command[1], 1]
            else:
                refused(client, *command)


def test_an_agent_forwards_to_the_channel_on_whose_name_it_was_asked_and_to_no_other(cluster: LocalCluster) -> None:
    """A request that names the channel itself would let its sender publish anywhere."""
    plain: Any = redis.Redis(port=cluster.redis["s2"].port)  # redis-py is typed in part
    spy = plain.pubsub()
    spy.subscribe(REPLICA, SECRET, *SECRET_REPLICAS)
    request = pack_control(ForwardRequest((("s2", seal(1, 1, 7, b"mine")),)))
    with plain_client(cluster, "s1", "client") as client:
        for channel in map(names.forward_channel, SECRET_REPLICAS):
            refused(client, "PUBLISH", channel, request)
        client.publish(names.forward_channel(REPLICA), request)

    def heard() -> Any:
        message = spy.get_message(timeout=0.1)
        return message if message is not None and message["type"] == "message" else None

    assert until(heard, "the message that was forwarded")["channel"] == REPLICA
    spy.close()
    plain.close()


def hostile() -> list[bytes]:
    """Return what nobody should send."""
    nested = b"\x91" * 1000 + b"\x90"
    deep_maps = b"\x81\xa1a" * 300 + b"\xc0"
    servers = tuple(f"s{number}" for number in range(500))
    channels = tuple(b"news.%d" % number for number in range(500))
    return [
        nested,
        b"\x9c" + nested,
        b"\x95\x0c" + nested,
        b"\x95\x0c" + nested * 4,  # this one terminated a balancer, as whole as it is
        deep_maps,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        msgpack.packb([12, nested, deep_maps]),
        pack_control(Announcement(7, 1, channels, channels, servers)),
        pack_control(ForwardRequest(tuple((server, b"x") for server in servers))),
        pack_control(Marker(NEWS, "s1", 2**62)),
        *(seal_control(RouteNotice(channel, Route(2**31, single("s9")))) for channel in channels[:4]),
        *(seal_control(Marker(channel, "s1", 7)) for channel in channels[:4]),
        pack_control(PlanChange(PlanDelta(0, 1, {}))),
        *(whole[: len(whole) // 2] for whole in (seal(1, 2, 3, b""), pack_control(PlanAck("s1", 2**62, 10**6)))),
        seal(1, 2**47, 7, b"x"),
        seal(2**64 - 1, 1, 2**32 - 1, b"x"),
        b"",
    ]


def test_hostile_bytes_on_all_channels_that_the_sender_may_use_disturb_nobody(cluster: LocalCluster) -> None:
    """All messages of clients arrive, while others of the same rights do what they can and while channels move."""
    busy = [b"news.%d" % number for number in range(4)]
    channels = {
        "client": (NEWS, *busy, REPLICA, names.ANNOUNCE_CHANNEL, names.forward_channel(REPLICA)),
        "operator": (names.OPERATOR_CHANNEL,),
        "agent": (
            *(names.BALANCER_CHANNEL, names.AGENT_CHANNEL, names.CLIENTS_CHANNEL, names.OPERATOR_CHANNEL),
            *(names.relay_channel(NEWS), names.relay_channel(names.relay_channel(NEWS) * 200)),
        ),
    }
    with Traffic(cluster, busy) as traffic:
        for server, (role, own) in product(cluster.server_ids, channels.items()):
            with plain_client(cluster, server, role) as client:
                for channel, data in product(own, hostile()):
                    client.publish(channel, data)
        traffic.flows()
        for channel in busy:
            move(cluster, channel, "s1")
            move(cluster, channel, "s2")
        traffic.flows()
        assert cluster.ask_balancer("status")["counters"]["malformed"] > 0, "it is counted"
        assert traffic.finish().gaps == 0, traffic.gaps
    cluster.check()
    until(lambda: not problems(cluster), "everything is well")


def test_requests_of_operators_are_obeyed_on_their_channel_only(cluster: LocalCluster) -> None:
    with plain_client(cluster, "s1", "agent") as agent:
        agent.publish(names.BALANCER_CHANNEL, pack_control(AdminRequest(77, "pause")))
    with plain_client(cluster, "s1", "operator") as operator:
        operator.publish(names.OPERATOR_CHANNEL, pack_control(PlanAck("s1", 5, 2**31)))
    status = cluster.ask_balancer("status")
    assert not status["paused"]
    assert status["version"] < 10**6 and ("version_refused", "s1") not in problems(cluster)


def test_who_forges_an_agent_s_words_is_shown_and_not_obeyed(cluster: LocalCluster) -> None:
    """With the credentials of an agent: a misconfigured one, or one that was taken over."""
    version = cluster.ask_balancer("status")["version"]
    with plain_client(cluster, "s1", "agent") as forger:

        def forge() -> bool:
            forger.publish(names.BALANCER_CHANNEL, pack_control(PlanAck("s1", 99, 2**32 - 1)))
            forger.publish(names.BALANCER_CHANNEL, pack_control(PlanAck("s1", 99, 2**31)))
            forger.publish(names.BALANCER_CHANNEL, pack_control(Vacated("s1", ((NEWS, 1),), 99)))
            return ("agents_in_conflict", "s1") in problems(cluster)

        until(forge, "the conflict is shown", every_s=0.2)
        assert cluster.ask_balancer("status")["version"] == version
    until(lambda: ("agents_in_conflict", "s1") not in problems(cluster), "the forger is forgotten")
    move_and_back(cluster)
    assert cluster.ask_balancer("status")["version"] < version + 1000


def test_an_agent_with_too_few_rights_is_not_ready_and_acknowledges_nothing(cluster: LocalCluster) -> None:
    """Rights for Dynamoth's own channels are not enough: it must observe the application's."""
    user, _ = USERS["agent"]
    cluster.ask("s1", ("ACL", "SETUSER", user, "resetchannels", "&__dynamoth__:*"))
    try:
        until(lambda: ("agent_cannot_observe", "s1") in problems(cluster), "the agent says that it cannot observe")
        with pytest.raises(RequestRefused, match=r"does not observe it: .*NOPERM"):
            cluster.ask_balancer("move", {"channel": b"news.lost", "to": "s1"})
            cluster.ask_balancer("move", {"channel": b"news.lost", "to": "s2"})
        cluster.check()
    finally:
        cluster.ask("s1", ("ACL", "SETUSER", user, "allchannels"))
    until(lambda: not problems(cluster), "it observes again, without a restart")
    move_and_back(cluster)


def test_who_copies_a_publisher_s_id_does_not_silence_it(cluster: LocalCluster) -> None:
    """With numbers far ahead: what the publisher sends afterwards would look like duplicates."""
    channel = b"news.copied"

    async def test() -> None:
        async with from_url(cluster.url) as client, client.pubsub(gaps=True) as pubsub:
            await pubsub.subscribe(channel)
            with (
                plain_client(cluster, "s1", "client") as one,
                plain_client(cluster, "s2", "client") as other,
                one.pubsub() as first,
                other.pubsub() as second,
            ):
                for spy in (first, second):
                    spy.subscribe(channel)
                    spy.parse_response(timeout=5)
                await client.publish(channel, b"0")
                seen = first.get_message(timeout=1) or second.get_message(timeout=1)
                envelope = open_envelope(seen["data"])
                for flags in (FIRST, HEARTBEAT, 0):
                    forged = seal(envelope.publisher, 2**47, envelope.epoch, b"forged", flags)
                    for attacker in (one, other):
                        attacker.publish(channel, forged)
            found: set[bytes] = set()
            gaps = 0
            number = 0
            async with asyncio.timeout(30):
                while b"%d" % number not in found or number < 20:
                    number += 1
                    await client.publish(channel, b"%d" % number)
                    while (message := await pubsub.get_message(timeout=0.05)) is not None:
                        gaps += message["type"] == "gap"
                        found |= {message["data"]} if message["type"] == "message" else set()
            missing = {b"%d" % each for each in range(number + 1)} - found
            assert not missing or gaps, f"lost in silence: {missing}"

    asyncio.run(test())
