"""What goes wrong in a run: what a profile allows, at random times, until it is over."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.names import (
    AGENT_CHANNEL,
    ANNOUNCE_CHANNEL,
    BALANCER_CHANNEL,
    CLIENTS_CHANNEL,
    INBOX_PREFIX,
    NOTIFICATION_PREFIXES,
    OPERATOR_CHANNEL,
    OPERATOR_INBOX_PREFIX,
)
from dynamoth.plan.plan import Phase, single
from dynamoth.protocol.control import Marker, RouteNotice, unpack_control
from dynamoth.protocol.envelope import CONTROL, is_enveloped, open_envelope
from dynamoth_sim.cluster import Cluster
from dynamoth_sim.faults.profiles import LEAVER, SERVERS_MIN, Profile
from dynamoth_sim.load.clients import Client, PublisherApp
from dynamoth_sim.load.flood import Flood
from dynamoth_sim.world.network import SILENCE_S_MAX
from dynamoth_sim.world.process import Process
from dynamoth_sim.world.redis import OUTPUT_BUFFER_BYTES_MAX, out_of_memory, read_only

CONTROL_LOST_RATIO = 0.15
CONTROL_REPEATED_RATIO = 0.15
"""Shares of control messages that are lost, and that come twice."""

CONTROL_LATE_RATIO = 0.05
"""Share of control messages that come once more, much later."""

PAUSE_S_MAX = 0.3
"""Shorter than any hold: a pause alone must cost nothing."""

HANG_S_MAX = 4.0
"""Longer than any hold: what an agent forwards after that may come too late."""

DOWN_S_MAX = 0.4

TAKE_S_MAX = 0.5

FREEZE_S_MAX = 3 * SILENCE_S_MAX

SERVERS_MAX = 5
"""Most servers that a cluster grows to."""

LOOK_S = 0.2
"""How often an operator looks whether a server is empty."""

STOP_S = 0.3
"""How soon after that, at most, the server is stopped."""

KILL_AT_S_MAX = 2.0
"""Longest wait for a channel to come to the server that dies."""
LAST_RELAYS_S = 1.0
"""Within this, other agents have made known the last messages that the agent of a dead server had to relay."""

FLOOD_S_MAX = 3.0

NOTIFICATION = NOTIFICATION_PREFIXES[0] + b"0__:key"

REFUSE_S_MAX = 2.0
"""Longer than a lease."""

SETTLED_S_MAX = 2.0
"""Longest wait for a move to settle."""

POLL_S = 0.01

LEASE_LOST_S = 2.6
"""How long a balancer hangs so that another one takes over: longer than its lease lasts and the other one then
waits."""


class Chaos:
    """Injects the faults of a profile into a cluster, from :meth:`start` until :meth:`stop`."""

    def __init__(self, cluster: Cluster, profile: Profile) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._random = cluster.world.random
        self._profile = profile
        self._stopped = False
        #: What must be undone in the end, if it has not been by then.
        self._undo: dict[int, Callable[[], None]] = {}
        self._undo_number = 0
        faults: dict[str, Callable[[], None]] = {
            "pause agent": self._pause_agent,
            "pause balancer": self._pause_balancer,
            "pause client": self._pause_client,
            "stall server": self._stall_server,
            "crash balancer": self._crash_balancer,
            "cut balancer": self._cut_balancer,
            "rival balancer": self._rival_balancer,
            "add server": self._add_server,
            "drain server": partial(self._empty_server, LEAVER),
            "remove server": self._remove_server,
            "kill server": self._kill_server,
            "cut client": self._cut_client,
            "cut agent": self._cut_agent,
            "restart server": self._restart_server,
            "restore server": self._restore_server,
            "crash agent": self._crash_agent,
            "hang agent": self._hang_agent,
            "lag agent": self._lag_agent,
            "crash client": self._crash_client,
            "part agent": self._part_agent,
            "part client": self._part_client,
            "slow reader": self._slow_reader,
            "freeze server": self._freeze_server,
            "overflow": self._overflow,
            "flood agent": self._flood_agent,
            "notify": self._notify,
            "flush server": self._flush_server,
            "refuse writes": self._refuse_writes,
            "standby balancer": self._standby_balancer,
            "last words": self._last_words,
        }
        #: When a server was last killed.
        self._killed_at = -math.inf
        #: The servers that are to come or to go, and what is missing, in words.
        self._unfinished: dict[str, str] = {}
        #: What may happen next; "meddle" happens all the time.
        self._faults = [faults[name] for name in profile.faults if name != "meddle"]
        self._once = [faults[name] for name in profile.once]

    def start(self) -> None:
        """Start to inject faults."""
        if "meddle" in self._profile.faults:
            for server in self._cluster.servers.values():
                server.meddle = self._meddle
        if self._faults:
            self._later()
        for fault in self._once:
            self._world.after(self._random.random(), fault)

    def unfinished(self) -> list[str]:
        """Return, in words, what was begun and is not done."""
        return [f"{server} {text}" for server, text in self._unfinished.items()]

    def stop(self) -> None:
        """Stop: repair everything that is broken, start everything that is down, and make the network quick."""
        self._stopped = True
        for undo in list(self._undo.values()):
            undo()
        for server in self._cluster.servers.values():
            server.meddle = None
        self._cluster.network.calm()

    def _later(self) -> None:
        self._world.after(2 * self._profile.interval_s * self._random.random(), self._strike)

    def _strike(self) -> None:
        if self._stopped:
            return
        self._random.choice(self._faults)()
        self._later()

    def _until(self, duration_s: float, undo: Callable[[], None]) -> None:
        """Call ``undo`` after ``duration_s``, or when the chaos stops if that is earlier; once."""
        self._undo_number += 1
        number = self._undo_number

        def once() -> None:
            if self._undo.pop(number, None) is not None:
                undo()

        self._undo[number] = once
        self._world.after(duration_s, once)

    # Nothing may be lost by these.

    def _pause_agent(self) -> None:
        agent = self._random.choice(list(self._cluster.agents.values()))
        agent.pause(PAUSE_S_MAX * self._random.random())

    def _pause_balancer(self) -> None:
        self._cluster.balancer.pause(PAUSE_S_MAX * self._random.random())

    def _pause_client(self) -> None:
        self._random.choice(self._cluster.clients).pause(PAUSE_S_MAX * self._random.random())

    def _stall_server(self) -> None:
        """A server reads nothing for a while, as if a long command blocked it."""
        server = self._random.choice(list(self._cluster.servers))
        connections = self._cluster.network.connections(server=server)
        for connection in connections:
            connection.to_server.hold()

        def go_on() -> None:
            for connection in connections:
                connection.to_server.release()

        self._note(server, "stalls")
        self._until(PAUSE_S_MAX * self._random.random(), go_on)

    def _crash_balancer(self) -> None:
        balancer = self._cluster.balancer
        if balancer.alive:
            balancer.crash(connections_linger=self._random.random() < 0.3)
            self._until(DOWN_S_MAX * self._random.random(), balancer.start)

    def _cut_balancer(self) -> None:
        self._cut(self._cluster.balancer.name)

    def _rival_balancer(self) -> None:
        """The balancer hangs until it has lost its lease and another one has taken over; then it goes on."""
        rival = self._cluster.rival
        if not rival.alive:
            rival.start()
            self._cluster.balancer.pause(LEASE_LOST_S)
            self._until(LEASE_LOST_S + DOWN_S_MAX * self._random.random(), lambda: self._end(rival))

    def _add_server(self) -> None:
        """An operator starts a server, and adds it."""
        cluster = self._cluster
        if len(cluster.servers) >= SERVERS_MAX or self._unfinished:
            return
        added = cluster.add_server()
        if "meddle" in self._profile.faults:
            cluster.servers[added].meddle = self._meddle
        self._unfinished[added] = "is not added"
        self._operate("add", added, partial(self._unfinished.pop, added))

    def _remove_server(self) -> None:
        """An operator removes some server."""
        present = self._cluster.present
        if len(present) > SERVERS_MIN and not self._unfinished:
            self._empty_server(self._random.choice(present))

    def _empty_server(self, server: str) -> None:
        """An operator has a server drained. When it is empty he removes it and stops it for good, in either order."""
        self._unfinished[server] = "is not empty, removed and stopped"
        done = partial(self._unfinished.pop, server)
        if self._random.random() < 0.5:
            go_on = partial(self._operate, "remove", server, partial(self._stop_soon, server, done))
        else:
            stop = partial(self._stop_soon, server, partial(self._operate, "remove", server, done))
            go_on = partial(self._when, lambda: self._cluster.left_at(server) == 0, stop)
        self._operate("drain", server, go_on)

    def _operate(self, action: str, server: str, go_on: Callable[[], Any]) -> None:
        """Ask for a change of a server until it is made, as an operator does, and go on then."""
        cluster = self._cluster
        request = cluster.change_server(action, server)

        def answered() -> None:
            if cluster.is_done(request):
                go_on()
            else:
                self._operate(action, server, go_on)

        self._when(lambda: request in cluster.answers, answered)

    def _when(self, condition: Callable[[], bool], go_on: Callable[[], Any]) -> None:
        """Look now and then whether a condition holds, and go on then."""
        self._world.after(LOOK_S, lambda: go_on() if condition() else self._when(condition, go_on))

    def _stop_soon(self, server: str, go_on: Callable[[], Any]) -> None:
        def stop() -> None:
            self._cluster.stop_for_good(server, orderly=True)
            go_on()

        self._world.after(STOP_S * self._random.random(), stop)

    @staticmethod
    def _end(process: Process) -> None:
        if process.alive:
            process.crash()

    def _meddle(self, server: str, channel: bytes, data: bytes) -> int:
        if not _may_get_lost(channel, data):
            return 1
        draw = self._random.random()
        if draw < CONTROL_LATE_RATIO:
            self._world.after(self._random.random(), self._repeat, server, channel, data)
            return 1
        draw -= CONTROL_LATE_RATIO
        if draw < CONTROL_LOST_RATIO:
            return 0
        return 2 if draw < CONTROL_LOST_RATIO + CONTROL_REPEATED_RATIO else 1

    def _repeat(self, server: str, channel: bytes, data: bytes) -> None:
        model = self._cluster.servers[server]
        if not self._stopped and model.up:
            self._note(server, f"an old message on {channel.decode()} comes again")
            model.inject(channel, data)

    def _notify(self) -> None:
        """A server publishes keyspace notifications."""
        server = self._random.choice(list(self._cluster.servers.values()))
        if server.up:
            self._note(server.id, "publishes keyspace notifications")
            server.inject(NOTIFICATION, b"set")

    def _flush_server(self) -> None:
        """Somebody deletes all keys of a server, or of all."""
        servers = [server for server in self._cluster.servers.values() if server.up]
        for server in servers if self._random.random() < 0.3 else servers and [self._random.choice(servers)]:
            server.flush()

    def _refuse_writes(self) -> None:
        """A server has no memory left, or has become a replica: it keeps what it stores, and publishes."""
        server = self._random.choice(list(self._cluster.servers.values()))
        if not server.up or server.refuse is not None:
            return
        server.refuse = self._random.choice((out_of_memory, read_only))
        self._note(server.id, f"refuses writes: {server.refuse.__name__}")

        def accept() -> None:
            server.refuse = None
            self._note(server.id, "takes writes again")

        self._until(REFUSE_S_MAX * self._random.random(), accept)

    def _standby_balancer(self) -> None:
        """A standby runs beside the first balancer until the end, and leads whenever that has no lease."""
        rival = self._cluster.rival
        self._cluster.rival_stands_by = True
        rival.start()
        self._until(float("inf"), lambda: self._end(rival))

    # Something may be lost by these, but not silently.

    def _last_words(self) -> None:
        """An agent hangs when a channel has just left its server; then somebody with the old route publishes, and ends.

        That is later than publishers take what they know for certain.
        """
        plan = self._cluster.newest_plan()
        moving = [] if plan is None else [(c, e) for c, e in plan.entries.items() if e.phase is not Phase.SETTLED]
        if not moving:
            return
        channel, entry = self._random.choice(moving)
        old = {server for route in entry.previous for server in route.assignment.servers}
        left = sorted(old.difference(entry.route.assignment.servers))
        if left:
            self._hang_when_settled(
                channel, entry.route.epoch, self._random.choice(left), self._world.now + SETTLED_S_MAX
            )

    def _hang_when_settled(self, channel: bytes, epoch: int, left: str, until: float) -> None:
        plan, agent = self._cluster.stored_plan(left), self._cluster.agents[left]
        if self._stopped or plan is None or plan.entry(channel).route.epoch != epoch or self._world.now > until:
            return
        if plan.entry(channel).phase is not Phase.SETTLED:
            self._world.after(POLL_S, self._hang_when_settled, channel, epoch, left, until)
            return
        self._hang(agent)
        known_s = self._cluster.options.client.publisher.observers_interval_s
        users = [c for c in self._cluster.clients if c.publisher is not None and channel in c.publisher.channels]
        if users:
            self._world.after(
                known_s * (1.0 + self._random.random()), self._end_with, self._random.choice(users), channel
            )

    def _end_with(self, client: Client, channel: bytes) -> None:
        """Publish once more on a channel from a client; return when the publish has ended."""
        app = client.publisher
        if self._stopped or app is None or not app.process.alive:
            return
        number = app.publish(channel)
        self._note(client.name, f"publishes {number} on {channel.decode()} as its last")
        self._end_when_published(client, app, channel)

    def _end_when_published(self, client: Client, app: PublisherApp, channel: bytes) -> None:
        if client.publisher is not app or not app.process.alive:
            return
        if app.pending(channel):
            self._world.after(POLL_S, self._end_when_published, client, app, channel)
        else:
            client.crash()

    def _cut(self, process: str) -> None:
        connections = self._cluster.network.connections(process)
        if connections:
            self._cluster.network.break_connection(self._random.choice(connections))

    def _cut_client(self) -> None:
        processes = self._random.choice(self._cluster.clients).processes
        if processes:
            self._cut(self._random.choice(processes).name)

    def _cut_agent(self) -> None:
        self._cut(self._random.choice(list(self._cluster.agents.values())).name)

    def _restart_server(self) -> None:
        self._stop_server(restored=False)

    def _restore_server(self) -> None:
        self._stop_server(restored=True)

    def _stop_server(self, restored: bool) -> None:
        """Stop a server; it comes back empty, or with what it had stored some time ago."""
        server = self._random.choice(list(self._cluster.servers.values()))
        if not server.up:
            return
        snapshot = server.snapshot() if restored else None

        def stop() -> None:
            if server.up:
                server.stop()
                self._until(
                    DOWN_S_MAX * self._random.random(),
                    lambda: None if server.id in self._cluster.gone else server.start(snapshot),
                )

        self._world.after(0.5 * self._random.random() if restored else 0.0, lambda: None if self._stopped else stop())

    def _crash_agent(self) -> None:
        agent = self._random.choice(list(self._cluster.agents.values()))
        if agent.alive:
            agent.crash(connections_linger=self._random.random() < 0.3)
            self._until(DOWN_S_MAX * self._random.random(), agent.start)

    def _hang_agent(self) -> None:
        """An agent hangs until somebody kills it: the messages that it has not read are lost.

        No other one hangs while the agent of a server that dies takes its last relays with it: nobody may be left then
        who knows the last message of a publisher that ends (``docs/guarantees.md``).
        """
        if self._world.now - self._killed_at < LAST_RELAYS_S:
            return
        self._hang(self._random.choice(list(self._cluster.agents.values())))

    def _hang(self, agent: Process) -> None:
        if not agent.alive:
            return
        agent.pause(HANG_S_MAX)

        def kill() -> None:
            if agent.alive and agent.paused:
                agent.crash("is killed", connections_linger=self._random.random() < 0.3)
                self._until(DOWN_S_MAX * self._random.random(), agent.start)

        self._until(HANG_S_MAX * self._random.random(), kill)

    def _lag_agent(self) -> None:
        """An agent forwards nothing for longer than subscribers hold messages; then it does."""
        self._random.choice(list(self._cluster.agents.values())).pause(HANG_S_MAX * self._random.random())

    def _crash_client(self) -> None:
        client = self._random.choice(self._cluster.clients)
        if client.ready:
            client.crash(connections_linger=self._random.random() < 0.3)
            self._until(DOWN_S_MAX * self._random.random(), client.start)

    def _kill_server(self) -> None:
        """A server dies for good, if possible with a channel; some of its connections deliver nothing before that."""
        plan = self._cluster.newest_plan()
        is_used = plan is not None and any(
            entry.live_routes == (entry.route,) and entry.route.assignment == single(LEAVER)
            for entry in plan.entries.values()
        )
        if not is_used and not self._stopped and self._world.now < KILL_AT_S_MAX:
            self._world.after(LOOK_S, self._kill_server)
            return
        pipes = [c.to_client for c in self._cluster.network.connections(server=LEAVER) if self._random.random() < 0.5]
        for pipe in pipes:
            pipe.hold()

        self._unfinished[LEAVER] = "is to be killed"

        def die() -> None:
            if any(agent.alive and agent.paused for agent in self._cluster.agents.values()):
                self._world.after(LOOK_S, die)
                return
            del self._unfinished[LEAVER]
            self._killed_at = self._world.now
            self._cluster.stop_for_good(LEAVER, orderly=False)
            for pipe in pipes:
                pipe.release()

        self._world.after(PAUSE_S_MAX * self._random.random(), die)

    def _part_agent(self) -> None:
        self._part([self._random.choice(list(self._cluster.agents.values())).name])

    def _part_client(self) -> None:
        self._part([process.name for process in self._random.choice(self._cluster.clients).processes])

    def _part(self, processes: list[str]) -> None:
        """Cut some processes off a server; the connections of some of them do not survive it."""
        server = self._random.choice(list(self._cluster.servers))
        self._note(server, f"cannot be reached by {', '.join(processes)}")
        heal = self._cluster.network.part(processes, [server])
        for process in processes:
            for connection in self._cluster.network.connections(process, server):
                if self._random.random() < 0.5:
                    self._cluster.network.break_connection(connection)
        self._until(DOWN_S_MAX * self._random.random(), heal)

    def _slow_reader(self) -> None:
        """An application reads slowly, or not at all, until all moves have settled without it."""
        apps = [app for client in self._cluster.clients for app in client.subscribers]
        if apps:
            self._random.choice(apps).read_slowly(TAKE_S_MAX * self._random.random())

    def _freeze_server(self) -> None:
        """A server stands still, mostly until connections are given up. Then what was sent to it takes effect late."""
        server = self._random.choice(list(self._cluster.servers))
        self._note(server, "freezes")
        self._until(FREEZE_S_MAX * self._random.random(), self._cluster.network.freeze(server))

    def _overflow(self) -> None:
        """Output buffers are small for a while: servers disconnect clients that do not read."""
        server = self._random.choice(list(self._cluster.servers.values()))
        server.output_buffer_bytes_max = 500

        def restore() -> None:
            server.output_buffer_bytes_max = OUTPUT_BUFFER_BYTES_MAX  # not what it was: this may happen twice at once

        self._note(server.id, "has small output buffers")
        self._until(0.1 * self._random.random(), restore)

    def _flood_agent(self) -> None:
        """More is published at a server than its agent reads: Redis disconnects the agent, again and again."""
        flood = Flood(self._cluster, self._random.choice(list(self._cluster.servers)))
        flood.start()
        self._until(FLOOD_S_MAX * self._random.random(), flood.stop)

    def _note(self, server: str, text: str) -> None:
        self._world.trace.add((self._world.now, "fault", None, server, None, None, text))


def _may_get_lost(channel: bytes, data: bytes) -> bool:
    """Tell whether a message is one that its sender repeats until it is answered, or that is only a hint."""
    if channel in (AGENT_CHANNEL, ANNOUNCE_CHANNEL, BALANCER_CHANNEL, OPERATOR_CHANNEL):
        return True
    if channel.startswith((INBOX_PREFIX, OPERATOR_INBOX_PREFIX)) and channel != CLIENTS_CHANNEL:
        return True
    if not is_enveloped(data):
        return False
    try:
        envelope = open_envelope(data)
        return bool(envelope.flags & CONTROL) and isinstance(unpack_control(envelope.payload), RouteNotice | Marker)
    except MalformedMessage:
        return False
