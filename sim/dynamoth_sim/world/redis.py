"""A model of an unmodified Redis server: what our machines use of it, as it behaves.

One thread executes the commands of all connections in the order in which they arrive. Replies and pushes go out on each
connection in the order in which they arise. PUBLISH returns the number of subscribed connections plus matching
patterns. A connection that does not read is closed when its output buffer grows too large. Subscriptions end with their
connection, and a restart forgets everything but what was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from dynamoth.data import records, registrations
from dynamoth.edge import log, positions, presence
from dynamoth.globs import compile_glob
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.names import PLAN_KEY, PLAN_KEY_NEW
from dynamoth.protocol.fence import evaluate, unfenced
from dynamoth_dispatcher.observation import EVERYTHING, QUIET_PATTERNS
from dynamoth_sim.world import data_scripts
from dynamoth_sim.world.network import Connection, End, Line, Packet
from dynamoth_sim.world.redis_keys import KeySpace, Snapshot, UnknownCommand
from dynamoth_sim.world.world import World

MESSAGE_BYTES = 32
"""What RESP3 adds to channel and data in a push to a subscriber, roughly: for the counters and output buffers."""

PMESSAGE_BYTES = 40
"""The same in a push to a subscriber of a pattern."""

ACKNOWLEDGEMENT_BYTES = 30
COMMAND_BYTES = 30
"""What a command takes besides its last word, roughly."""

OUTPUT_BUFFER_BYTES_MAX = 8 * 1024 * 1024
"""Redis's own default soft limit for pub/sub clients; a fault profile takes a smaller one."""


Refusal = Callable[[str, list[bytes]], str | None]
"""Gets the name of a process and a command; returns the error that answers the command, or None to execute it."""

_WRITING = frozenset((b"HSET", b"HDEL", b"RENAME", b"DEL", b"SET", b"PEXPIRE"))
_TAKES_MEMORY = frozenset((b"HSET", b"SET"))


def out_of_memory(_process: str, words: list[bytes]) -> str | None:
    """Refuse the commands that need memory, as a server at its ``maxmemory`` does; PUBLISH needs none."""
    return "OOM command not allowed when used memory > 'maxmemory'." if words[0] in _TAKES_MEMORY else None


def read_only(_process: str, words: list[bytes]) -> str | None:
    """Refuse the commands that write, as a replica does; PUBLISH does not write."""
    return "READONLY You can't write against a read only replica." if words[0] in _WRITING else None


class Greeting:
    """The first output of a server on a connection: its replies to HELLO and INFO of a real driver."""

    __slots__ = ("run_id",)

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id


class Reply:
    """The reply to a command, with the tag that the command came with."""

    __slots__ = ("tag", "value")

    def __init__(self, tag: Any, value: Any) -> None:
        self.tag = tag
        self.value = value


class RedisServer:
    """One simulated Redis process, which can be stopped and started."""

    def __init__(self, world: World, id_: str, url: str) -> None:
        self._world = world
        self.id = id_
        self.url = url
        self.up = True
        self.run_id = self._new_run_id()
        self.output_buffer_bytes_max = OUTPUT_BUFFER_BYTES_MAX
        #: Returns how often a message is delivered: 0 loses it, 2 repeats it. None: each is delivered once.
        self.meddle: Callable[[str, bytes, bytes], int] | None = None
        #: A message to its own publisher comes before the reply to PUBLISH up to Redis 7.0, and behind it since 7.2.
        self.reply_before_own_push = world.random.random() < 0.5
        #: Which commands it refuses, until its next start; None executes all.
        self.refuse: Refusal | None = None
        #: How far its clock is ahead, by which keys expire.
        self.clock_ahead_s = 0.0
        #: What it sends leaves over this, if that is limited.
        self._line: Line | None = None
        self._connections: dict[int, Connection] = {}
        self._channels: dict[bytes, dict[Connection, None]] = {}
        self._patterns: dict[bytes, dict[Connection, None]] = {}
        #: The patterns that match a channel, in their order; emptied whenever there are other patterns.
        self._matching: dict[bytes, list[bytes]] = {}
        self._keys = KeySpace(self._clock, Snapshot())
        self._commands: dict[bytes, Callable[[Connection, list[bytes]], Any]] = {
            b"PUBSUB": self._pubsub,
            b"PING": self._ping,
            b"CLIENT": self._client,
            b"INFO": self._info,
            b"CONFIG": lambda connection, words: {words[2]: b""},
        }
        #: "master", or "slave" for a replica, as INFO shows it.
        self.role = "master"
        #: Another one is no standalone server.
        self.mode = "standalone"
        self._started = world.now
        self.input_bytes = 0
        #: What has left: Redis counts what the socket takes.
        self.output_bytes = 0
        self.commands = 0
        #: Messages sent to subscribers since the start, and the CPU that each costs.
        self.pushes = 0
        self.push_cpu_s = 0.0
        #: As INFO shows them; 0 for none.
        self.connections_max = 0
        self.memory_bytes_max = 0

    @property
    def observed(self) -> bool:
        """Whether an agent is subscribed to every channel."""
        return EVERYTHING in self._patterns or QUIET_PATTERNS[0] in self._patterns

    # Life.

    def stop(self, reason: str = "the server stopped", *, orderly: bool = False) -> None:
        """End the process: every connection is lost, with what is in flight from a random point on.

        ``orderly``: what was sent to clients still gets there.
        """
        self.up = False
        self._world.trace.add((self._world.now, "fault", None, self.id, None, None, reason))
        for connection in list(self._connections.values()):
            if orderly:
                self._forget(connection)
                connection.to_server.ended = True
                connection.to_client.end(reason)
            else:
                self.kill(connection, reason)
        assert not self._channels and not self._patterns

    def start(self, snapshot: Snapshot | None = None) -> None:
        """Start a new process, with what a snapshot holds, else with an empty memory."""
        assert not self.up, f"{self.id} runs already"
        self.up = True
        self.refuse = None
        self.run_id = self._new_run_id()
        self._keys = KeySpace(self._clock, snapshot or Snapshot())
        self._started = self._world.now
        self.input_bytes = self.output_bytes = self.commands = self.pushes = 0
        restored = "empty" if snapshot is None else "restored from an old snapshot"
        self._world.trace.add((self._world.now, "fault", None, self.id, None, None, f"the server starts, {restored}"))

    def flush(self) -> None:
        """Delete all keys (FLUSHALL)."""
        self._keys = KeySpace(self._clock, Snapshot())
        self._world.trace.add((self._world.now, "fault", None, self.id, None, None, "all keys are deleted"))

    def snapshot(self) -> Snapshot:
        """Return a copy of the memory, as an RDB file would hold it: values, and when they expire."""
        return self._keys.snapshot()

    def hash(self, key: bytes) -> dict[bytes, bytes]:
        """Return the fields of a hash, without being a client."""
        return self._keys.hash(key)

    def _clock(self) -> float:
        return self._world.now + self.clock_ahead_s

    def _new_run_id(self) -> str:
        return f"{self._world.random.getrandbits(160):040x}"

    # Connections.

    def limit(self, bytes_per_s: float) -> None:
        """Limit what it can send, on new connections together, but for its agent's: that is on the same machine."""
        self._line = Line(self._world, bytes_per_s, self._sent)

    def _sent(self, size: int) -> None:
        self.output_bytes += size

    def line_to(self, process: str) -> Line | None:
        """Return the line over which what it sends to a process leaves; None: nothing limits it."""
        return None if process == f"agent-{self.id}" else self._line

    def accept(self, connection: Connection) -> None:
        """Greet a new client."""
        self._connections[connection.id] = connection
        connection.to_client.send(Greeting(self.run_id), 0)

    def receive(self, connection: Connection, packet: Packet) -> None:
        """Execute what has arrived."""
        if connection.id not in self._connections:
            return
        for item in packet.items:
            if type(item) is End:
                self._forget(connection)
                connection.to_client.drop_unsent()
                connection.to_client.end("closed")
                return
            args, tag = item
            self._execute(connection, args, tag)

    def kill(self, connection: Connection, reason: str) -> None:
        """Close a connection from the server's side: nothing more is read, and some of what was sent is lost."""
        self._forget(connection)
        connection.to_server.ended = True
        connection.to_client.cut(reason, 0.0)

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection.id, None)
        for channel in connection.channels:
            self._remove(self._channels, channel, connection)
        for pattern in connection.patterns:
            self._remove(self._patterns, pattern, connection)
            self._matching.clear()
        connection.channels = {}
        connection.patterns = {}

    @staticmethod
    def _remove(table: dict[bytes, dict[Connection, None]], name: bytes, connection: Connection) -> None:
        subscribers = table[name]
        del subscribers[connection]
        if not subscribers:
            del table[name]

    def _push(self, connection: Connection, message: list[Any], size: int) -> None:
        self.pushes += 1
        if connection.to_client.line is None:
            self.output_bytes += size
        connection.unread_bytes += size
        connection.to_client.send(message, size)
        if connection.unread_bytes > self.output_buffer_bytes_max and connection.id in self._connections:
            self._world.at(self._world.now, self._overflow, connection)

    def _overflow(self, connection: Connection) -> None:
        if connection.id in self._connections:
            reason = "the client does not read: its output buffer is full"
            self._world.trace.add((self._world.now, "fault", connection.process, self.id, None, None, reason))
            self.kill(connection, reason)

    # Commands.

    def _execute(self, connection: Connection, args: Sequence[CommandPart], tag: Any) -> None:
        self.commands += 1
        self.input_bytes += COMMAND_BYTES
        words = [_to_bytes(word) for word in args]
        name = words[0] = words[0].upper()
        refusal = self._refusal(connection.process, words)
        if refusal is not None:
            self._reply(connection, tag, ErrorReply(refusal))
        elif name == b"PUBLISH":
            self._publish(connection, words, tag)
        elif name in _SUBSCRIBING:
            self._subscribe(connection, name, words[1:])
        elif name in self._commands:
            self._reply(connection, tag, self._commands[name](connection, words))
        else:
            self._reply(connection, tag, self.execute(connection.process, *words))

    def _refusal(self, process: str, words: list[bytes]) -> str | None:
        """Return the error that answers a command: what refuses a command refuses it inside a script, too."""
        if self.refuse is None:
            return None
        refusal = self.refuse(process, words)
        if refusal is not None or words[0] != b"EVAL":
            return refusal
        return self.refuse(process, [b"HSET"] if _is_of_logs(words) else [*unfenced(words)])

    def execute(self, who: str, *words: bytes) -> Any:
        """Execute a command on keys for a process, or for somebody with redis-cli; return its reply."""
        if log.is_script(words):
            return log.evaluate(words, partial(self.execute, who))
        if positions.is_script(words):
            return positions.evaluate(words, partial(self.execute, who))
        if presence.is_script(words):
            return presence.evaluate(words, partial(self.execute, who))
        if records.is_records_script(words):
            return records.evaluate(words, partial(self.execute, who))
        if registrations.is_registrations_script(words):
            return registrations.evaluate(words, partial(self.execute, who))
        if data_scripts.is_script(words):
            return data_scripts.evaluate(words, partial(self.execute, who))
        if words[0] == b"EVAL":
            return evaluate(words, partial(self.execute, who), ErrorReply)
        if words[0] == b"HSET" and words[1] in (PLAN_KEY, PLAN_KEY_NEW):
            fields = dict(zip(words[2::2], words[3::2], strict=True))
            self._world.trace.add((self._world.now, "stores plan", who, self.id, None, None, fields))
        return self._keys.execute(words)

    def _reply(self, connection: Connection, tag: Any, value: Any) -> None:
        size = _reply_bytes(value)
        if tag is None or connection.to_client.line is None:
            self.output_bytes += size
        if tag is not None:
            connection.unread_bytes += size
            connection.to_client.send(Reply(tag, value), size)

    def _publish(self, connection: Connection, words: list[bytes], tag: Any) -> None:
        _, channel, data = words
        pushes = self._pushes(channel, data)
        self._trace_publish(connection.process, channel, data, pushes)
        if self.reply_before_own_push:
            self._reply(connection, tag, len(pushes))
        self._deliver(channel, data, pushes)
        if not self.reply_before_own_push:
            self._reply(connection, tag, len(pushes))

    def inject(self, channel: bytes, data: bytes) -> int:
        """Publish without a client: a raw message, or an old control message that comes again. Return the receivers."""
        pushes = self._pushes(channel, data)
        self._trace_publish(None, channel, data, pushes)
        self._deliver(channel, data, pushes)
        return len(pushes)

    def _pushes(self, channel: bytes, data: bytes) -> list[tuple[Connection, list[Any]]]:
        message = [b"message", channel, data]
        pushes = [(connection, message) for connection in self._channels.get(channel, ())]
        matching = self._matching.get(channel)
        if matching is None:
            matching = self._matching[channel] = [each for each in self._patterns if _matches(each, channel)]
        for pattern in matching:
            message = [b"pmessage", pattern, channel, data]
            pushes += [(connection, message) for connection in self._patterns[pattern]]
        return pushes

    def _trace_publish(
        self, who: str | None, channel: bytes, data: bytes, pushes: list[tuple[Connection, list[Any]]]
    ) -> None:
        receivers = [connection for connection, _ in pushes]
        self._world.trace.add((self._world.now, "publishes", who, self.id, channel, data, receivers))

    def _deliver(self, channel: bytes, data: bytes, pushes: list[tuple[Connection, list[Any]]]) -> None:
        size = len(channel) + len(data)
        self.input_bytes += size
        for _ in range(self._copies(channel, data)):
            for receiver, message in pushes:
                self._push(receiver, message, size + (MESSAGE_BYTES if len(message) == 3 else PMESSAGE_BYTES))

    def _copies(self, channel: bytes, data: bytes) -> int:
        if self.meddle is None:
            return 1
        copies = self.meddle(self.id, channel, data)
        if copies != 1:
            note = "lost" if copies == 0 else f"delivered {copies} times"
            self._world.trace.add((self._world.now, "fault", None, self.id, channel, data, note))
        return copies

    # Subscriptions.

    def _subscribe(self, connection: Connection, command: bytes, names: list[bytes]) -> None:
        by_pattern = command.startswith(b"P")
        if by_pattern:
            self._matching.clear()
        table = self._patterns if by_pattern else self._channels
        joined = connection.patterns if by_pattern else connection.channels
        if b"UNSUBSCRIBE" in command:
            self._leave(connection, command.lower(), names, table, joined)
        else:
            self._join(connection, command.lower(), names, table, joined)

    def _join(
        self,
        connection: Connection,
        kind: bytes,
        names: list[bytes],
        table: dict[bytes, dict[Connection, None]],
        joined: dict[bytes, None],
    ) -> None:
        for name in names:
            joined[name] = None
            table.setdefault(name, {})[connection] = None
            self._acknowledge(connection, kind, name)

    def _leave(
        self,
        connection: Connection,
        kind: bytes,
        names: list[bytes],
        table: dict[bytes, dict[Connection, None]],
        joined: dict[bytes, None],
    ) -> None:
        leaving: list[bytes] = names or list(joined)
        for name in leaving:
            if name in joined:
                del joined[name]
                self._remove(table, name, connection)
            self._acknowledge(connection, kind, name)
        if not leaving:
            self._acknowledge(connection, kind, None)

    def _acknowledge(self, connection: Connection, kind: bytes, name: bytes | None) -> None:
        count = len(connection.channels) + len(connection.patterns)
        self._world.trace.add((self._world.now, kind.decode(), connection.process, self.id, name, None, None))
        self._push(connection, [kind, name, count], ACKNOWLEDGEMENT_BYTES)

    def _pubsub(self, _connection: Connection, words: list[bytes]) -> Any:
        match words[1].upper():
            case b"NUMSUB":
                return [part for name in words[2:] for part in (name, len(self._channels.get(name, ())))]
            case b"NUMPAT":
                return len(self._patterns)
            case b"CHANNELS":
                pattern = words[2] if len(words) > 2 else b"*"
                return [name for name in self._channels if _matches(pattern, name)]
            case other:
                raise UnknownCommand(f"PUBSUB {other.decode()}")

    def subscribers(self, channel: bytes) -> list[str]:
        """Return the processes that are subscribed to ``channel`` here, as the server sees it (for tests)."""
        return [connection.process for connection in self._channels.get(channel, ())]

    def channels(self) -> list[bytes]:
        """Return the channels that somebody is subscribed to here."""
        return list(self._channels)

    # The server itself.

    def _ping(self, _connection: Connection, words: list[bytes]) -> Any:
        return words[1] if len(words) > 1 else b"PONG"

    def _client(self, connection: Connection, words: list[bytes]) -> Any:
        match words[1].upper():
            case b"SETNAME":
                connection.name = words[2]
                return b"OK"
            case b"ID":
                return connection.id
            case b"LIST":
                listed = list(self._connections.values())
                if words[2:4] == [b"TYPE", b"pubsub"]:
                    listed = [c for c in listed if c.channels or c.patterns]
                return b"".join(map(_client_line, listed))
            case b"KILL":
                other = self._connections.get(int(words[3]))
                if other is not None:
                    self.kill(other, "another client has closed it")
                return int(other is not None)
            case other:
                raise UnknownCommand(f"CLIENT {other.decode()}")

    def _info(self, _connection: Connection, _words: list[bytes]) -> Any:
        uptime = self._world.now - self._started
        cpu = self.commands * 2e-6 + self.pushes * self.push_cpu_s * 3 / 4
        memory = 1_000_000 + self._keys.size_bytes
        lines = (
            "# Server",
            "redis_version:7.0.15",
            f"redis_mode:{self.mode}",
            f"run_id:{self.run_id}",
            f"uptime_in_seconds:{int(uptime)}",
            "# Clients",
            f"connected_clients:{len(self._connections)}",
            f"maxclients:{self.connections_max}",
            "client_recent_max_output_buffer:0",
            "# Memory",
            f"used_memory:{memory}",
            f"maxmemory:{self.memory_bytes_max}",
            "mem_clients_normal:0",
            "# Stats",
            f"total_commands_processed:{self.commands}",
            f"total_net_input_bytes:{self.input_bytes}",
            f"total_net_output_bytes:{self.output_bytes}",
            f"pubsub_channels:{len(self._channels)}",
            f"pubsub_patterns:{len(self._patterns)}",
            "client_output_buffer_limit_disconnections:0",
            "# Replication",
            f"role:{self.role}",
            "# CPU",
            f"used_cpu_sys:{cpu / 3:.6f}",
            f"used_cpu_user:{cpu:.6f}",
            "",
        )
        return "\r\n".join(lines).encode()


_SUBSCRIBING = frozenset((b"SUBSCRIBE", b"PSUBSCRIBE", b"UNSUBSCRIBE", b"PUNSUBSCRIBE"))


def _is_of_logs(words: Sequence[bytes]) -> bool:
    is_edge = log.is_script(words) or positions.is_script(words) or presence.is_script(words)
    is_data = records.is_records_script(words) or registrations.is_registrations_script(words)
    return is_edge or is_data or data_scripts.is_script(words)


def _to_bytes(word: CommandPart) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


def _reply_bytes(value: Any) -> int:
    """Return about what a reply takes on the wire."""
    if isinstance(value, bytes):
        return len(value) + 8
    if isinstance(value, list):
        return 5 + sum(map(_reply_bytes, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(value, dict):
        return 5 + sum(_reply_bytes(key) + _reply_bytes(part) for key, part in value.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return 5


@lru_cache(100_000)
def _matches(pattern: bytes, name: bytes) -> bool:
    return _expression(pattern).fullmatch(name) is not None


_expression = lru_cache(1000)(compile_glob)


def _client_line(connection: Connection) -> bytes:
    return b"id=%d addr=%s:%d name=%s age=0 sub=%d psub=%d omem=%d\n" % (
        connection.id,
        connection.process.encode(),
        connection.id,
        connection.name,
        len(connection.channels),
        len(connection.patterns),
        connection.unread_bytes,
    )
