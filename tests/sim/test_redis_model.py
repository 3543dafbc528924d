"""The model behaves as Redis does, in what our machines use of it."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.machine.events import ErrorReply
from dynamoth.names import PLAN_KEY
from dynamoth_sim.world.network import CALM, Connection, End, Network, Packet
from dynamoth_sim.world.redis import Greeting, RedisServer, Refusal, Reply, out_of_memory, read_only
from dynamoth_sim.world.redis_keys import UnknownCommand
from dynamoth_sim.world.world import World


class Peer:
    """A client at the other end of a connection."""

    def __init__(self, world: World, network: Network, server: RedisServer, name: str) -> None:
        self._world = world
        self.items: list[Any] = []
        self.connection: Connection | None = None
        self._replies = 0
        network.open(name, server.url, self._receive, self.items.append)
        world.run_until(world.now + 0.1)

    def _receive(self, connection: Connection, packet: Packet) -> None:
        self.connection = connection
        self.items += packet.items

    def send(self, *args: Any) -> None:
        assert self.connection is not None
        self._replies += 1
        self.connection.to_server.send((args, self._replies), 10)

    def ask(self, *args: Any) -> Any:
        """Send a command and return its reply."""
        self.send(*args)
        self._world.run_until(self._world.now + 0.1)
        (reply,) = [item for item in self.items if isinstance(item, Reply) and item.tag == self._replies]
        return reply.value

    def pushed(self) -> list[Any]:
        """Return the pushes since the last call."""
        self._world.run_until(self._world.now + 0.1)
        pushes = [item for item in self.items if not isinstance(item, Greeting | Reply | End)]
        self.items = [item for item in self.items if isinstance(item, Greeting | Reply | End)]
        return pushes


class Place:
    """A server with some clients."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.network = Network(self.world, lambda process, server: CALM)
        self.server = RedisServer(self.world, "s1", "redis://s1")
        self.network.add_server(self.server.url, self.server)

    def peer(self, name: str, *channels: bytes) -> Peer:
        """Return a client that is subscribed to these channels, and has read the acknowledgements."""
        peer = Peer(self.world, self.network, self.server, name)
        if channels:
            peer.send(b"SUBSCRIBE", *channels)
            peer.pushed()
        return peer


@pytest.fixture
def place() -> Place:
    return Place()


def test_publish_reaches_subscribers_and_patterns_and_counts_both(place: Place) -> None:
    a, b, agent = place.peer("a"), place.peer("b"), place.peer("agent")
    a.send(b"SUBSCRIBE", b"x", b"y")
    b.send("subscribe", "x")
    agent.send(b"PSUBSCRIBE", b"*")
    agent.send(b"PSUBSCRIBE", b"x[^a-z]")
    assert a.pushed() == [[b"subscribe", b"x", 1], [b"subscribe", b"y", 2]]
    assert b.pushed() == [[b"subscribe", b"x", 1]]
    assert agent.pushed() == [[b"psubscribe", b"*", 1], [b"psubscribe", b"x[^a-z]", 2]]
    assert b.ask(b"PUBLISH", b"x", b"1") == 3
    assert b.ask(b"PUBLISH", b"x7", b"2") == 2
    assert a.pushed() == [[b"message", b"x", b"1"]]
    assert b.pushed() == [[b"message", b"x", b"1"]]
    assert agent.pushed() == [
        [b"pmessage", b"*", b"x", b"1"],
        [b"pmessage", b"*", b"x7", b"2"],
        [b"pmessage", b"x[^a-z]", b"x7", b"2"],
    ]


def test_unsubscribing_from_some_or_all(place: Place) -> None:
    a = place.peer("a", b"x", b"y", b"z")
    a.send(b"UNSUBSCRIBE", b"y")
    a.send(b"UNSUBSCRIBE")
    a.send(b"UNSUBSCRIBE")
    assert a.pushed() == [
        [b"unsubscribe", b"y", 2],
        [b"unsubscribe", b"x", 1],
        [b"unsubscribe", b"z", 0],
        [b"unsubscribe", None, 0],
    ]
    assert a.ask(b"PUBLISH", b"x", b"") == 0


def test_pubsub_questions(place: Place) -> None:
    a, b = place.peer("a"), place.peer("b")
    for peer in (a, b):
        peer.send(b"SUBSCRIBE", b"x")
        peer.send(b"SUBSCRIBE", b"x")
        assert peer.pushed() == [[b"subscribe", b"x", 1]] * 2
    a.send(b"PSUBSCRIBE", b"*")
    assert a.ask(b"PUBSUB", b"NUMSUB", b"x", b"y") == [b"x", 2, b"y", 0]
    assert a.ask(b"PUBSUB", b"NUMPAT") == 1
    assert a.ask(b"PUBSUB", b"CHANNELS") == [b"x"]
    assert a.ask(b"PUBSUB", b"CHANNELS", b"y*") == []


@pytest.mark.parametrize("seed", range(8))
def test_a_push_to_the_publisher_itself_comes_before_or_after_the_reply(seed: int) -> None:
    place = Place(seed)
    a = place.peer("a", b"x")
    assert a.ask(b"PUBLISH", b"x", b"1") == 1
    reply_first = isinstance(a.items[-2], Reply)
    assert reply_first == place.server.reply_before_own_push


def test_a_broken_connection_counts_until_the_server_notices(place: Place) -> None:
    a, b = place.peer("a", b"x"), place.peer("b")
    assert a.connection is not None
    a.connection.to_server.cut("broken", notice_s=1.0)
    a.connection.to_client.cut("broken", notice_s=0.0)
    assert b.ask(b"PUBLISH", b"x", b"1") == 1
    place.world.run_until(place.world.now + 1.0)
    assert b.ask(b"PUBLISH", b"x", b"1") == 0
    assert [type(item) for item in a.items] == [Greeting, End]


def test_who_does_not_read_is_thrown_out(place: Place) -> None:
    a, b = place.peer("a", b"x"), place.peer("b")
    place.server.output_buffer_bytes_max = 10_000
    for _ in range(20):
        b.send(b"PUBLISH", b"x", bytes(1000))
    place.world.run_until(place.world.now + 1.0)
    assert any(isinstance(item, End) for item in a.items)
    assert 0 <= len(a.pushed()) < 20
    assert b.ask(b"PUBSUB", b"NUMSUB", b"x") == [b"x", 0]


def test_hashes(place: Place) -> None:
    a = place.peer("a")
    assert a.ask(b"HSET", b"h", b"f", b"1", "g", 2) == 2
    assert a.ask(b"HSET", b"h", b"f", b"3", b"i", b"4") == 1
    assert a.ask(b"HMGET", b"h", b"f", b"g", b"none") == [b"3", b"2", None]
    assert a.ask(b"HMGET", b"none", b"f") == [None]
    assert a.ask(b"HGET", b"h", b"f") == b"3"
    assert a.ask(b"HGETALL", b"h") == {b"f": b"3", b"g": b"2", b"i": b"4"}
    assert a.ask(b"RENAME", b"h", b"k") == b"OK"
    assert isinstance(a.ask(b"RENAME", b"h", b"k"), ErrorReply)
    assert a.ask(b"HDEL", b"k", b"f", b"f") == 1
    assert a.ask(b"DEL", b"h", b"k") == 1
    assert a.ask(b"HGETALL", b"k") == {}


def test_a_command_on_a_hash_refuses_a_string(place: Place) -> None:
    peer = place.peer("a")
    peer.ask(b"SET", b"k", b"text")
    for command in ((b"HMGET", b"k", b"f"), (b"HGETALL", b"k"), (b"HLEN", b"k"), (b"HSET", b"k", b"f", b"1")):
        assert "WRONGTYPE" in str(peer.ask(*command))


@pytest.mark.parametrize(
    ("refuse", "refused"), [(out_of_memory, {b"SET", b"HSET"}), (read_only, {b"SET", b"HSET", b"DEL"})]
)
def test_writes_are_refused_until_the_next_start(place: Place, refuse: Refusal, refused: set[bytes]) -> None:
    peer = place.peer("a")
    place.server.refuse = refuse
    commands = [b"SET k 1", b"HSET h f 1", b"DEL k", b"GET k", b"PUBLISH c x"]
    replies = {command.split()[0]: peer.ask(*command.split()) for command in commands}
    assert {name for name, reply in replies.items() if isinstance(reply, ErrorReply)} == refused
    place.server.stop()
    place.server.start()
    assert place.peer("b").ask(b"SET", b"k", b"1") == b"OK"


def test_strings_that_expire(place: Place) -> None:
    a = place.peer("a")
    assert a.ask(b"SET", b"k", b"1", b"NX", b"PX", 1000) == b"OK"
    assert a.ask(b"SET", b"k", b"2", b"NX", b"PX", 1000) is None
    assert a.ask(b"PEXPIRE", b"k", 500) == 1
    assert 0 < a.ask(b"PTTL", b"k") <= 400
    assert a.ask(b"GET", b"k") == b"1"
    place.world.run_until(place.world.now + 0.5)
    assert a.ask(b"GET", b"k") is None
    assert a.ask(b"PEXPIRE", b"k", 500) == 0
    assert a.ask(b"SET", b"k", b"3", b"XX") is None
    assert a.ask(b"SET", b"k", b"3") == b"OK"
    assert a.ask(b"PTTL", b"k") == -1


def test_a_restart_forgets_everything_but_what_was_saved(place: Place) -> None:
    a = place.peer("a")
    a.ask(b"HSET", PLAN_KEY, b"f", b"old")
    a.ask(b"SET", b"lease", b"x", b"PX", 1000)
    a.send(b"SUBSCRIBE", b"x")
    a.pushed()
    saved = place.server.snapshot()
    a.ask(b"HSET", PLAN_KEY, b"f", b"new")
    run_id = place.server.run_id
    place.server.stop()
    place.server.start(saved)
    b = place.peer("b")
    assert place.server.run_id != run_id
    assert any(isinstance(item, End) for item in a.items)
    assert b.ask(b"HGET", PLAN_KEY, b"f") == b"old"
    assert b.ask(b"PUBLISH", b"x", b"1") == 0
    place.world.run_until(place.world.now + 1.0)
    assert b.ask(b"GET", b"lease") is None, "what was saved expires when it would have"
    place.server.stop()
    place.server.start()
    assert place.peer("c").ask(b"HGET", PLAN_KEY, b"f") is None


def test_control_messages_can_get_lost_or_come_twice(place: Place) -> None:
    a, b = place.peer("a", b"x"), place.peer("b")
    place.server.meddle = lambda server, channel, data: int(data)
    for copies in (0, 1, 2):
        assert b.ask(b"PUBLISH", b"x", copies) == 1
    assert [push[2] for push in a.pushed()] == [b"1", b"2", b"2"]


def test_the_server_tells_about_itself(place: Place) -> None:
    a = place.peer("a")
    assert a.ask(b"PING") == b"PONG"
    assert a.ask(b"CLIENT", b"SETNAME", b"me") == b"OK"
    assert a.connection is not None
    assert a.ask(b"CLIENT", b"ID") == a.connection.id
    assert b"name=me" in a.ask(b"CLIENT", b"LIST")
    assert a.ask(b"CLIENT", b"LIST", b"TYPE", b"pubsub") == b""
    before = a.ask(b"INFO")
    assert f"run_id:{place.server.run_id}".encode() in before
    assert b"total_net_output_bytes:" in before


def test_what_the_model_does_not_know_fails_loudly(place: Place) -> None:
    a = place.peer("a")
    a.send(b"OBJECT", b"HELP")
    with pytest.raises(UnknownCommand, match="OBJECT"):
        place.world.run_until(place.world.now + 0.1)
