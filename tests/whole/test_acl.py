"""Everything works with the rights that ``dynamoth acl`` prints, and no server refuses anything to anybody."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from dynamoth.edge.interests import channel_interest
from dynamoth.edge.log import LogOptions, append_command
from dynamoth.edge.positions import find_command, position_key, store_command
from dynamoth.edge.publications import Position
from dynamoth.machine.events import ErrorReply
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import reserve_port
from dynamoth_cli.main import main
from dynamoth_client.asyncio import PubSub, from_url
from dynamoth_dispatcher.observation import QUIET_PATTERNS
from dynamoth_link.query import query
from dynamoth_link.urls import ServerAddress
from tests.loop_thread import LoopThread
from tests.whole.acl_cluster import USERS, Rules, acl_cluster, acl_log, all_rules
from tests.whole.edge_users import RawUser
from tests.whole.harness import logged, until

PATIENCE_S = 30.0

CHANNELS = (b"news.a", b"raw1", b"__dynamoth__:s:news.s")


@pytest.fixture(scope="module", params=all_rules(), ids=str)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    rules: Rules = request.param
    with acl_cluster(rules, tmp_path_factory.mktemp("acl")) as cluster:
        yield cluster


async def _next(pubsub: PubSub) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        async for message in pubsub.listen():
            return message
    raise AssertionError("the subscription has ended")


async def _subscribed(pubsub: PubSub, count: int) -> None:
    for _ in range(count):
        message = await _next(pubsub)
        assert message["type"] in ("subscribe", "psubscribe", "ssubscribe"), message


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("move", {"to": "s1"}),
    ("move", {"to": "s2"}),
    ("replicate", {"mode": "all-publishers", "servers": ["s1", "s2"]}),
    ("replicate", {"mode": "all-subscribers", "servers": ["s1", "s2"]}),
    ("unreplicate", {"to": "s1"}),
]


def test_everything_works_under_the_rules(cluster: LocalCluster) -> None:
    """Channels, patterns, sharded channels, moves and replication, seen by subscribers of all kinds."""
    number = iter(range(1000))

    async def test() -> None:
        async with from_url(cluster.url) as client, client.pubsub() as pubsub, client.pubsub() as patterns:
            await pubsub.subscribe("news.a", "raw1")
            await pubsub.ssubscribe("news.s")
            await _subscribed(pubsub, 3)
            await patterns.psubscribe("news.*")
            await _subscribed(patterns, 1)

            async def flows() -> None:
                for channel, publish in ((b"news.a", client.publish), (b"raw1", client.publish), (b"news.s", spublish)):
                    data = b"%d" % next(number)
                    await publish(channel, data)
                    message = await _next(pubsub)
                    assert (message["channel"], message["data"]) == (channel, data), message
                    if channel == b"news.a":
                        message = await _next(patterns)
                        assert (message["channel"], message["data"]) == (channel, data), message

            async def spublish(channel: bytes, data: bytes) -> None:
                await client.spublish(channel, data)

            await flows()
            for command, arguments in CHANGES:
                requests = [{"channel": channel, **arguments} for channel in CHANNELS]
                await asyncio.gather(*(asyncio.to_thread(cluster.ask_balancer, command, each) for each in requests))
                await flows()
            assert await client.pubsub_numsub("news.a") == [(b"news.a", 1)]
            assert await client.pubsub_numpat() == 1
            assert b"news.a" in await client.pubsub_channels()
            await patterns.punsubscribe("news.*")
            await pubsub.unsubscribe("raw1")

    asyncio.run(test())
    assert acl_log(cluster) == []


def test_agents_and_the_balancer_start_again_under_the_rules(cluster: LocalCluster) -> None:
    channel = b"news.restart"
    for daemon in (cluster.agents["s1"], cluster.balancer):
        daemon.stop()
        daemon.start()
    cluster.wait_ready()

    def all_are_heard() -> bool:
        return {server["agent"] for server in cluster.ask_balancer("status")["servers"].values()} == {"alive"}

    until(all_are_heard, "the new balancer hears all agents", 0.05)
    cluster.ask_balancer("move", {"channel": channel, "to": "s1"})
    cluster.ask_balancer("move", {"channel": channel, "to": "s2"})
    cluster.check()
    assert acl_log(cluster) == []


def test_agents_read_the_settings_and_leave_keyspace_notifications_out(cluster: LocalCluster) -> None:
    def count(command: bytes, *arguments: bytes) -> int:
        [number] = cluster.ask("s1", (command, *arguments))
        assert isinstance(number, int)
        return number

    cluster.ask("s1", (b"CONFIG", b"SET", b"notify-keyspace-events", b"KEA"))
    try:

        def leaves_them_out() -> bool:
            cluster.ask("s1", (b"SET", b"key", b"value"))
            return count(b"PUBSUB", b"NUMPAT") == len(QUIET_PATTERNS)

        until(leaves_them_out, "the agent leaves the notifications out", 0.05)
        names = (b"news.x", b"__key", b"__keyspace:x", b"__keyspace@0__:key", b"__keyevent@0__:set")
        assert [count(b"PUBLISH", name, b"x") for name in names] == [1, 1, 1, 0, 0]
    finally:
        cluster.ask("s1", (b"CONFIG", b"SET", b"notify-keyspace-events", b""))
    for agent in cluster.agents.values():
        # The output buffer is Redis' own default.
        until(lambda a=agent: logged(a, "a setting of the server does harm"), "the agent's advice")  # type: ignore[misc]
        assert not logged(agent, "the server's settings are not known")
    assert acl_log(cluster) == []


def test_operators_see_and_change_everything_from_the_command_line(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    url = cluster.url_of("operator")
    assert main(["status", "--url", url]) == 0, capsys.readouterr()
    assert main(["plan", "show", "--url", url]) == 0
    assert main(["plan", "move", "news.cli", "--to", "s2", "--url", url]) == 0
    assert "news.cli" in capsys.readouterr().out
    assert acl_log(cluster) == []


def test_brokers_and_a_coordinator_work_under_the_rules(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = f"l1=redis://127.0.0.1:{cluster.redis['s1'].port}"
    user = RawUser("u1", ["news.live", "news.logged"])
    with ExitStack() as stack:
        port = stack.enter_context(reserve_port()).getsockname()[1]
        flags = ("--id", "b1", "--port", str(port), "--anonymous", "on", "--logs", logs, "--history", "news.logged")
        broker = cluster.beside("b1", "broker", *flags)
        coordinator = cluster.beside("coordinator", "coordinator")
        users = LoopThread("users")
        for close in (users.close, broker.stop, coordinator.stop, lambda: users.call(user.close())):
            stack.callback(close)
        broker.start()
        coordinator.start()

        def status() -> dict[str, Any]:
            code = main(["broker", "status", "--json", "--url", cluster.url_of("operator")])
            output: dict[str, Any] = json.loads(capsys.readouterr().out) if code == 0 else {}
            return output

        def is_complete() -> bool:
            found = status()
            leading: dict[str, Any] = found.get("coordinator") or {"brokers": []}
            return leading["brokers"] == ["b1"] and found["brokers"]["b1"]["coordinated"] is True

        until(is_complete, f"the coordinator hears the broker {coordinator.lines[-5:]} {broker.lines[-5:]}", 0.1)
        users.call(user.start(f"ws://127.0.0.1:{port}/connect"))
        [run_id] = re.findall(r"run_id:(\w+)", cluster.ask("s1", (b"INFO", b"server"))[0].decode())
        interest = channel_interest("news.logged")
        append = append_command(interest.id, b"hello", run_id, 7, LogOptions())
        server = ServerAddress("127.0.0.1", cluster.redis["s1"].port, None, *USERS["broker"])
        key = position_key(interest.id, "ann", "phone")
        find = find_command(interest.id, key, run_id, 7, LogOptions(), 60.0)
        store = store_command([(interest.id, key, Position(7, 1))], run_id, LogOptions(), 60.0)
        for reply in asyncio.run(query(server, append, find, store, timeout_s=PATIENCE_S)):
            assert not isinstance(reply, ErrorReply), reply
        main(["broker", "drain", "b1", "--url", cluster.url_of("operator")])
        capsys.readouterr()
        assert user.losses == [] and status()["brokers"]["b1"]["sessions"] == 1
    assert acl_log(cluster) == []
