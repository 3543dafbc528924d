"""One plain Redis and nothing else: what works there, when that is believed, and how a plan is followed that comes."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import redis as redis_py

import dynamoth_client
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL
from dynamoth.plan.plan import Plan, Server
from dynamoth_cli.local.cluster import HOST, LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client.machines import standalone
from dynamoth_client.machines.publisher import standalone as publisher_standalone
from dynamoth_client.machines.standalone import FRESH_S
from dynamoth_client.runtime import bootstrap
from tests.client.both_clients import Connect
from tests.client.conftest import ClusterFactory
from tests.client.sync_helpers import Running, confirmed, next_of, until


def test_everything_works_with_one_plain_redis(redis_server: EmbeddedRedis, connect: Connect) -> None:
    with connect([redis_server.url]) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        pubsub.psubscribe("c*")
        pubsub.ssubscribe("s")
        assert {next_of(pubsub)["type"] for _ in range(2)} == {"psubscribe", "ssubscribe"}
        assert client.publish("c", "x") == 2
        assert {next_of(pubsub)["type"] for _ in range(2)} == {"message", "pmessage"}
        assert client.spublish("s", "x") == 1
        assert next_of(pubsub)["type"] == "smessage"
        assert client.pubsub_channels() == [b"c"]
        assert client.pubsub_numsub("c") == [(b"c", 1)]
        assert client.pubsub_numpat() == 1
        for number in range(100):
            assert client.publish("only here", number) == 0
        pubsub.unsubscribe("c")
        assert next_of(pubsub)["type"] == "unsubscribe"
        redis_server.restart()  # subscriptions come back, as nobody else is there
        while client.publish("s", "x") or not client.spublish("s", "again"):
            time.sleep(0.05)
        pubsub.close()


# When it is not believed.


def test_where_somebody_of_dynamoth_is_at_work_the_plan_is_waited_for(redis_server: EmbeddedRedis) -> None:
    plain: Any = redis_py.Redis(port=redis_server.port)
    until(lambda: plain.info("server")["uptime_in_seconds"] >= FRESH_S, "the server is not fresh")
    with plain, plain.pubsub() as somebody, dynamoth_client.from_url(redis_server.url, retry=None) as client:
        for channel, text in ((AGENT_CHANNEL, "an agent is at work"), (BALANCER_CHANNEL, "the balancer is at work")):
            somebody.subscribe(channel)
            assert next_of(somebody)["type"] == "subscribe"
            with pytest.raises(redis_py.ConnectionError, match=text):
                client.publish("c", "x")


def test_several_servers_without_a_plan_are_not_alone(cluster_factory: ClusterFactory, connect: Connect) -> None:
    words = "(?s)start `dynamoth balancer`.*must be the only one named"
    hosts = cluster_factory(stored=False).hosts
    with connect(hosts, retry=None) as client, pytest.raises(redis_py.ConnectionError, match=words):
        client.publish("c", "x")


def test_a_server_that_has_just_started_is_watched_first(
    cluster_factory: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be one of a cluster that has lost its data: then the plan comes soon."""
    for module in (standalone, bootstrap):
        monkeypatch.setattr(module, "FRESH_S", 3600.0)
    cluster = cluster_factory(servers=1, stored=False)
    with dynamoth_client.Redis(servers=cluster.hosts) as client:
        publishing = Running(client.publish, "c", "x")
        publishing.join(FRESH_S / 3)
        assert publishing.is_alive()
        cluster.store()
        assert publishing.result() == 0
        assert client.plan("c").servers == ("s1",)


# When a plan comes.


@pytest.mark.usefixtures("patient_subscribers")
def test_the_plan_is_followed_that_comes_with_agents_and_a_balancer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of three grows from the one server that is used, and no message of those who used it is lost."""
    monkeypatch.setattr(publisher_standalone, "OVERLAP_S", 60.0)  # a busy machine may stop the listener for 2 s
    cluster = LocalCluster(3)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.stop)
        for server in cluster.redis.values():
            server.start()
        url = f"redis://{HOST}:{cluster.redis['s1'].port}"
        ring = Plan.initial(Server(id_, "redis://x") for id_ in cluster.redis).ring
        channels = [next(f"c{n}" for n in range(1000) if ring.home(b"c%d" % n) == id_) for id_ in cluster.redis]
        with dynamoth_client.from_url(url) as publisher, dynamoth_client.from_url(url) as listener:
            gaps: list[Any] = []
            pubsub = listener.pubsub(on_gap=gaps.append)
            confirmed(pubsub, *channels)
            heard: dict[bytes, list[int]] = {channel.encode(): [] for channel in channels}
            ended = threading.Event()

            def listen() -> None:
                for message in pubsub.listen():
                    if message["type"] == "message":
                        heard[message["channel"]].append(int(message["data"]))

            listening = Running(listen)

            def publish() -> int:
                number = 0
                while not ended.is_set():
                    for channel in channels:
                        publisher.publish(channel, number)
                    number += 1
                    time.sleep(0.002)
                return number

            publishing = Running(publish)
            until(lambda: all(len(numbers) > 50 for numbers in heard.values()), "messages arrive")
            assert publisher.plan("c").servers == ("(alone)",)
            cluster.start()
            cluster.wait_ready()
            until(lambda: publisher.plan("c").servers != ("(alone)",), "the publisher follows the plan")
            before = {channel: len(numbers) for channel, numbers in heard.items()}
            until(lambda: all(len(heard[channel]) > before[channel] + 50 for channel in before), "messages arrive")
            ended.set()
            count = publishing.result()
            until(lambda: all(numbers[-1] == count - 1 for numbers in heard.values()), "the last message arrives")
            assert heard == {channel: list(range(count)) for channel in heard}, f"each once, and in order; gaps: {gaps}"
            moved = {channel.encode() for channel in channels[1:]}
            # While publishers send to both places, a listener that is still at the old one has every message, too.
            until(lambda: {gap.channel for gap in gaps} == moved, "the gaps of those that moved are reported")
            at_home = [[id_] for id_ in cluster.redis]
            until(lambda: [_listening(cluster, channel) for channel in channels] == at_home, "they listen at home only")
            pubsub.close()
            listening.result()


def _listening(cluster: LocalCluster, channel: str) -> list[str]:
    return [id_ for id_ in cluster.redis if cluster.ask(id_, ("PUBSUB", "NUMSUB", channel))[0][1]]
