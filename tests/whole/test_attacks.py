"""Attacks on a whole cluster, with the rights that ``dynamoth acl`` gives: by clients, operators, and as an agent.

What no ACL can forbid, as the sender may use the channel, must do no harm either.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import redis
import redis.exceptions

from dynamoth import names
from dynamoth.plan.plan import PlanDelta, Route, single
from dynamoth.protocol.control import (
    AdminRequest,
    Announcement,
    ForwardRequest,
    Marker,
    PlanAck,
    PlanChange,
    RouteNotice,
    pack_control,
    seal_control,
)
from dynamoth.protocol.envelope import seal
from dynamoth_cli.local.cluster import LocalCluster
from tests.core.hostile import MESSAGES, OPENINGS, nest
from tests.whole.acl_cluster import Rules, acl_cluster, all_rules, plain_client
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


NOT_AN_OPERATOR_S = (NEWS, SECRET, REPLICA, names.BALANCER_CHANNEL, names.AGENT_CHANNEL, names.inbox(7))


@pytest.mark.parametrize(("role", "channels"), [("client", NOT_A_CLIENT_S), ("operator", NOT_AN_OPERATOR_S)])
def test_who_has_not_the_right_writes_no_key_and_neither_speaks_nor_hears(
    cluster: LocalCluster, role: str, channels: tuple[bytes, ...]
) -> None:
    with plain_client(cluster, "s1", role) as client:
        for command in WRITES:
            refused(client, *command)
        for channel in channels:
            refused(client, "PUBLISH", channel, b"x")
            refused(client, "SUBSCRIBE", channel)
        for pattern in (b"*", b"__dynamoth__:*", b"secret*", b"news.*x", b"[n]ews.*"):
            refused(client, "PSUBSCRIBE", pattern)


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


FORGERS = (1, 2**64 - 1)
"""Publishers that nobody is."""


def hostile() -> list[bytes]:
    """Return what nobody should send: nests, messages that are cut off, and some that are well-formed."""
    servers = tuple(f"s{number}" for number in range(500))
    channels = tuple(b"news.%d" % number for number in range(500))
    return [
        *(nest(opening, 1000) for opening in OPENINGS),
        *(pack_control(message)[:-1] for message in MESSAGES),
        b"\x95\x0c" + nest(b"\x91", 1000) * 4,  # this one terminated a balancer, as whole as it is
        pack_control(Announcement(7, 1, channels, channels, servers)),
        pack_control(ForwardRequest(tuple((server, b"x") for server in servers))),
        *(seal_control(RouteNotice(channel, Route(2**31, single("s9")))) for channel in channels[:4]),
        *(seal_control(Marker(channel, "s1", 7)) for channel in channels[:4]),
        pack_control(PlanChange(PlanDelta(0, 1, {}))),
        seal(FORGERS[0], 2**47, 7, b"x"),
        seal(FORGERS[1], 1, 2**32 - 1, b"x"),
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
        assert traffic.finish().lost == 0
        assert {gap.publisher for _, gap in traffic.gaps} <= set(FORGERS), "nothing but a forger's own may be missing"
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
