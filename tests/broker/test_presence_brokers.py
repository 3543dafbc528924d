"""Presence on real brokers, a real cluster and a real log server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynamoth.edge.presence import member_id
from dynamoth.errors import ConfigError
from dynamoth.settings.load import ConfigText, load_config
from dynamoth_cli.commands.broker import broker_config
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_user import Client, Join, Leave
from tests.broker.edge import RawUser, encoded_connect, events_until, free_port, running_broker, token, write_keys

SETTINGS: dict[str, Any] = {"presence": ("room*",), "presence_ttl_s": 3.0, "presence_grace_s": 1.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2) as running:
        yield running


@pytest.fixture(scope="module")
def logs() -> Iterator[dict[str, str]]:
    with EmbeddedRedis() as running:
        yield {"l1": f"redis://127.0.0.1:{running.port}"}


def run(main: Any) -> None:
    asyncio.run(main)


async def watch(url: str, room: str, session: str) -> tuple[RawUser, dict[str, str]]:
    """Return a user who watches a room, and user by member."""
    user = await RawUser.open(url, {"presence": room}, session=session)
    await user.send("members", ref=7, channel=room)
    listed = await user.until("members")
    assert (listed["ref"], listed["count"]) == (7, len(listed["members"]))
    confirmed = user.answers()[0]
    assert (listed["epoch"], listed["offset"]) >= (confirmed["epoch"], confirmed["offset"])
    return user, {member: name for name, member in listed["members"]}


async def changes(user: RawUser, count: int) -> list[dict[str, Any]]:
    return [json.loads(text) for text in await user.texts(count)]


def test_members_at_several_brokers_and_what_their_ends_mean(
    cluster: LocalCluster, logs: dict[str, str], tmp_path: Path
) -> None:
    async def main() -> None:
        keys = str(write_keys(tmp_path))
        async with (
            running_broker(cluster.url, logs, "b1", token_keys_file=keys, **SETTINGS) as b1,
            running_broker(cluster.url, logs, "b2", token_keys_file=keys, **SETTINGS) as b2,
        ):
            watcher, members = await watch(b2.url, "room1", "w")
            assert members == {}
            ann = await RawUser.open(
                b1.url, {"channel": "room1", "present": True}, session="s1", token=token(sub="ann"), generation=1
            )
            member = {"user": "ann", "member": member_id("ann", "s1")}
            assert await changes(watcher, 1) == [{"join": member}]
            again = await RawUser.open(
                b2.url, {"channel": "room1", "present": True}, session="s1", token=token(sub="ann"), generation=2
            )
            ann.socket.transport.abort()
            bob = await RawUser.open(b2.url, {"channel": "room1", "present": True}, session="s2", generation=1)
            other = {"user": "", "member": member_id("", "s2")}
            await again.close()
            assert await changes(watcher, 2) == [{"join": other}, {"leave": member}]
            _, members = await watch(b1.url, "room1", "v")
            assert members == {other["member"]: ""}
            await bob.send("unsubscribe", s=(bob.answers()[0])["s"])
            assert await changes(watcher, 1) == [{"leave": other}]

    run(main())


def test_a_broker_that_is_killed(cluster: LocalCluster, logs: dict[str, str]) -> None:
    async def main() -> None:
        async with (
            running_broker(cluster.url, logs, "b1", **SETTINGS) as b1,
            running_broker(cluster.url, logs, "b2", **SETTINGS) as b2,
        ):
            watcher, _ = await watch(b2.url, "room2", "w")
            for session in ("s1", "s2"):
                await RawUser.open(b1.url, {"channel": "room2", "present": True}, session=session, generation=1)
            first, second = ({"user": "", "member": member_id("", session)} for session in ("s1", "s2"))
            assert await changes(watcher, 2) == [{"join": first}, {"join": second}]
            await b1.kill()
            await RawUser.open(b2.url, {"channel": "room2", "present": True}, session="s2", generation=2)
            assert await changes(watcher, 1) == [{"leave": first}]
            _, members = await watch(b2.url, "room2", "v")
            assert members == {second["member"]: ""}

    run(main())


def test_the_python_client_over_a_move(cluster: LocalCluster, logs: dict[str, str]) -> None:
    async def main() -> None:
        async with (
            running_broker(cluster.url, logs, "b1", **SETTINGS) as b1,
            running_broker(cluster.url, logs, "b2", alternates=(b1.url,), **SETTINGS) as b2,
            Client([b1.url], proxy=None) as watcher,
        ):
            room = await watcher.presence("room3")
            async with Client([b2.url], proxy=None) as member:
                await member.subscribe("room3", present=True)
                joined = await anext(room)
                assert isinstance(joined, Join)
                await b2.stop()  # it moves its users first
                assert (member.moved, member.broker) == (1, "b1")
                assert dict(room.members) == {joined.member: ""}
            assert await anext(room) == Leave(joined.member, "")
            assert (dict(room.members), room.count) == ({}, 0)

    run(main())


def test_server_sent_events_of_a_presence_go_on_from_the_last_one(cluster: LocalCluster, logs: dict[str, str]) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {**SETTINGS, "presence_grace_s": 10.0, "sse_port": free_port()}
        async with running_broker(cluster.url, logs, **settings) as broker, aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{broker.sse_port}/sse"
            wanted = {"ref": 1, "presence": "room4"}, {"ref": 2, "channel": "room4", "present": True}
            connect = {"connect": encoded_connect(*wanted)}
            own, other = ({"user": "", "member": member_id("", session)} for session in ("ada", "s1"))
            async with http.get(url, params=connect) as stream:
                joined = json.loads((await events_until(stream, "data"))[1]["d"])
                assert joined == {"join": own}
                user = await RawUser.open(broker.url, {"channel": "room4", "present": True}, session="s1")
                last, frame = await events_until(stream, "data")
                assert json.loads(frame["d"]) == {"join": other}
                question = {"type": "members", "ref": 3, "channel": "room4"}
                async with http.post(f"{url}/ada", json=question) as answer:
                    assert answer.status == 204
                same, listed = await events_until(stream, "members")
                assert (same, listed["offset"]) == (last, frame["o"])
                assert sorted(listed["members"]) == sorted(["", each["member"]] for each in (own, other))
            watcher, _ = await watch(broker.url, "room4", "w")
            await user.close()
            assert await changes(watcher, 1) == [{"leave": other}]
            async with http.get(url, params=connect, headers={"Last-Event-ID": last}) as stream:
                _, missed = await events_until(stream, "data")
                assert (missed["o"], json.loads(missed["d"])) == (frame["o"] + 1, {"leave": other})

    run(main())


def test_frames_of_presence_that_cannot_be_read(cluster: LocalCluster, logs: dict[str, str]) -> None:
    async def main() -> None:
        async with running_broker(cluster.url, logs, **SETTINGS) as broker:
            for frame in ({"ref": 1}, {"ref": -1, "channel": "room"}, {"ref": 1, "channel": ""}):
                user = await RawUser.open(broker.url)
                await user.send("members", **frame)
                assert (await user.until("error"))["code"] == "bad_frame"
                assert await user.close_code() == 4005
            for fields in ({"stored": True}, {"since": "stored"}):
                user = await RawUser.open(broker.url)
                await user.send("subscribe", ref=1, presence="room", **fields)
                assert "positions are stored for" in (await user.until("error"))["message"]
                assert await user.close_code() == 4005
            user = await RawUser.open(broker.url, {"presence": "elsewhere"}, {"channel": "elsewhere", "present": True})
            assert [answer["code"] for answer in user.answers().values()] == ["forbidden", "forbidden"]

    run(main())


def test_a_presence_needs_log_servers() -> None:
    servers = '[[cluster.servers]]\nid = "s1"\nurl = "redis://s1"\n'
    text = f'[broker]\nid = "b1"\nanonymous = true\npresence = "room*"\npresence_ttl_s = 6\n{servers}'
    with pytest.raises(ConfigError, match=r"broker\.presence: .* give broker\.logs"):
        broker_config(load_config(file=ConfigText("x", text)))
    with_logs = text.replace("presence =", 'logs = "l1=redis://l1"\npresence =')
    options = broker_config(load_config(file=ConfigText("x", with_logs))).options
    assert (options.presence, options.presence_ttl_s, options.presence_grace_s) == (("room*",), 6.0, 10.0)
