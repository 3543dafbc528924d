"""Scripts about components that die, hang or come back: what replaces them, and what they may still do.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from dynamoth.plan.plan import Assignment, Mode, Phase, single
from dynamoth_balancer.install.leadership import Stage as BalancerStage
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_sim.cluster import SERVER_DEAD_S
from dynamoth_sim.load.clients import PublisherApp, SubscriberApp
from dynamoth_sim.load.flood import Flood
from dynamoth_sim.scenarios.stage import HOLD_S_MAX, Scenario, Stage
from dynamoth_sim.world.process import Process
from dynamoth_sim.world.redis import out_of_memory

TAKEOVER_S_MAX = 2.2
"""How long nobody leads: the lease of 0.9 s, four renewals of 0.3 s, and 0.1 s for the rest."""

LONG_LEASE_S = 3.0

HOUR_S = 3600.0

TAKEN_OVER_S_MAX = 1.0
"""How long it takes until others have the channels of a dead server: twice the look of each part, and some commands."""

REPLICATED = Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s3"))

CLOCKS_TAKEOVER_S_MAX = 6.0
"""As ``TAKEOVER_S_MAX``, and at each of two servers: the lease and a renewal pass before it gets an expiry again."""

LONG_NAME = "x" * 100_000
SLOW_BYTES_PER_S = 40_000
RENEWED_S_MAX = 1.5
"""A copy with a channel of this name takes a server 2.5 s at this rate. A term begins in a fraction of that."""

HELD_UP = 8
"""How often a balancer is held up in a row."""

REPLACED_S_MAX = 4.0
"""How soon a second agent replaces one that hangs: five reports that do not come, and what it does after that."""

SERVES_S_MAX = 1.0
"""And how soon after that a new client is confirmed there, which looks for its server first."""


def stale_write(stage: Stage) -> None:
    """Case 90. A write of a balancer is on its way to s1 while the balancer is paused for longer than its lease.

    A standby takes over and moves the same channel elsewhere. Then the write arrives: s1 refuses it.
    """
    _start_standby(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    balancer, rival = stage.cluster.balancer, stage.cluster.rival
    with stage.held("balancer", "s1", to_server=True):
        stage.cluster.change(channel, single("s2"))
        stage.wait("the change is stored at s2", lambda: stage.entry(channel, "s2").phase is Phase.PREPARED)
        balancer.pause()
        stage.wait("the standby leads", lambda: _leads(rival))
        stage.wait_settled(channel)
        stage.move(channel, "s3")
        stage.publish(publisher, channel)
        version = _version(stage, "s1")
    stage.run(0.02)
    stage.expect(
        f"s1 stores {_version(stage, 's1')}, not less than {version}", _version(stage, "s1") >= version, channel
    )
    stage.expect("the channel is at s3", stage.entry(channel).route.assignment == single("s3"), channel)
    balancer.resume()
    stage.run(1.0)
    stage.expect("the standby leads still, and alone", _leads(rival) and not _leads(balancer))
    stage.publish(publisher, channel)


def leader_fails(fail: Callable[[Process], None], stage: Stage) -> None:
    """Case 91. The balancer dies, or is paused, in the middle of a move. A standby leads soon, and ends the move."""
    _start_standby(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    stage.run(2.0)
    with stage.deaf_agent("s2"):
        stage.cluster.change(channel, single("s2"))
        stage.wait("the change is stored", lambda: stage.entry(channel, "s2").phase is Phase.PREPARED)
        fail(stage.cluster.balancer)
    rival = stage.cluster.rival
    stage.wait(f"the standby leads within {TAKEOVER_S_MAX} s", lambda: _leads(rival), TAKEOVER_S_MAX)
    stage.wait("the move settles", partial(stage.is_at, channel, "s2", Phase.SETTLED))
    stage.publish(publisher, channel)


def renews_late(stage: Stage) -> None:
    """Case 128. The balancer renews its lease too late. Servers send so little that a copy of the plan takes long.

    Nobody else has led meanwhile. So it reads no copy again, but goes on in its term, and leads soon. s3 has missed the
    latest change, and gets no more than that.
    """
    long, channel = (stage.channel_at("s1", name) for name in (LONG_NAME, "c"))
    stage.move(long, "s2")
    subscriber = stage.subscriber("S", channel)
    publisher = stage.publisher("P", channel)
    cluster, balancer = stage.cluster, stage.cluster.balancer
    for id_, server in cluster.servers.items():
        server.limit(SLOW_BYTES_PER_S)
        stage.cut("balancer", id_)
    stage.run(1.0)
    stage.expect("it leads over slow links", _leads(balancer))
    with stage.held("balancer", "s3", to_server=True):
        cluster.change(channel, single("s2"))
        stage.wait("the change is stored", lambda: stage.entry(channel, "s2").phase is Phase.PREPARED)
        balancer.pause()
        stage.cut("balancer", "s3")
    stage.expect("s3 does not store it", _version(stage, "s3") < _version(stage, "s2"))
    stage.run(2 * cluster.options.balancer.lease_s)
    resumed_at = stage.world.now
    balancer.resume()
    stage.wait("it has lost its lease", lambda: not _leads(balancer))
    stage.wait("it leads again", lambda: _leads(balancer), RENEWED_S_MAX)
    stage.expect("its term goes on", _terms(balancer) == 1)
    stage.wait("s3 has the plan", lambda: _version(stage, "s3") == _version(stage, "s2"), RENEWED_S_MAX)
    stored = [record.note for record in stage.records("stores plan", since=resumed_at, who="balancer")]
    stage.expect("it stores changes only", bool(stored) and not any(b"c:" + long in fields for fields in stored))
    stage.wait("the move settles", partial(stage.is_at, channel, "s2", Phase.SETTLED))
    stage.publish(publisher, channel)
    stage.expect("S hears P", bool(stage.records("DELIVERS", who=subscriber.name)))
    stage.expect_gaps(0, channel)


def is_held_up(stage: Stage) -> None:
    """Case 130. The balancer is held up again and again for longer than its lease, by little. A standby waits.

    It takes the lease again before the standby may, and its term goes on: what it has begun settles.
    """
    _start_standby(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    balancer, options = stage.cluster.balancer, stage.cluster.options.balancer
    stage.cluster.change(channel, single("s2"))
    stage.wait("the move is active", partial(stage.is_at, channel, "s2", Phase.ACTIVE))
    for _ in range(HELD_UP):
        balancer.pause()
        stage.run(options.lease_s)
        balancer.resume()
        stage.run(options.lease_renew_s)
    stage.expect("the standby has never led", not _terms(stage.cluster.rival))
    stage.expect("it leads, and its term goes on", _leads(balancer) and _terms(balancer) == 1)
    stage.expect("the move has settled", stage.is_at(channel, "s2", Phase.SETTLED))
    stage.publish(publisher, channel)


def clocks_jump(stage: Stage) -> None:
    """Case 92. The clocks of all servers jump ahead while the balancer is paused, so that its lease expires early.

    When it goes on, it believes that it leads, and so does the standby. But it can write nothing, and its term ends.
    """
    options = stage.cluster.options
    stage.cluster.options = replace(options, balancer=replace(options.balancer, lease_s=LONG_LEASE_S))
    stage.open()
    _start_standby(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    balancer, rival = stage.cluster.balancer, stage.cluster.rival
    stage.run(1.0)
    balancer.pause()
    _set_clocks(stage, HOUR_S)
    stage.wait("the standby leads", lambda: _leads(rival), 3 * LONG_LEASE_S / 4)
    stage.move(channel, "s2")
    machine = balancer.machine
    assert isinstance(machine, BalancerMachine)
    resumed_at = stage.world.now
    balancer.resume()
    stage.wait("the balancer ends its term", lambda: machine.stage is BalancerStage.CONTENDING, LONG_LEASE_S / 4)
    stage.run(1.0)
    stored = stage.records("stores plan", since=resumed_at, who="balancer")
    stage.expect(f"servers store {len(stored)} of its writes, not 0", not stored, channel)
    stage.expect("the standby leads still", _leads(rival))
    stage.publish(publisher, channel)


def server_fails(how: str, stage: Stage) -> None:
    """Case 93. A server dies, or stands still, for so long that others get its channels. Then it is back.

    Everybody goes on at the other servers in time, and nobody does anything for that. When the server is back, as it
    was or empty, clients that are still there leave it.
    """
    moved, at_home, slot = stage.channel_at("s2", "m"), stage.channel_at("s1"), stage.channel_at("s1", "d")
    stage.move(moved, "s1")
    channels = (moved, at_home, slot)
    subscribers = [stage.subscriber("S", *channels), stage.subscriber("T", *channels)]
    publisher = stage.publisher("P", *channels)
    stage.run(0.1)
    failed_at = stage.world.now
    back = _fail_server(stage, how)
    _wait_taken_over(stage, channels)
    stage.cluster.begin_at("s2")
    late = stage.client("N", 1).subscribers[0]
    for channel in channels:
        late.subscribe(channel)
    stage.wait(
        "a new subscriber is confirmed",
        lambda: all(stage.cluster.audit.is_open(late.name, channel) for channel in channels),
        SERVES_S_MAX,
    )
    _serve(stage, publisher, [*subscribers, late], channels, since=failed_at)
    back()
    _wait_taken_back(stage)
    stage.cluster.audit.calm()
    for channel in channels:
        stage.publish(publisher, channel, times=2)


def cut_off(to_added: bool, stage: Stage) -> None:
    """Case 94. A server is cut off from the balancer, the other agents and some clients. Others go on using it.

    What they say does not reach the others, and they do not hear those, which use the new servers. Each publisher ends
    before the server is back, so that no number shows what was missed. But everybody learns that something was.

    Case 127, ``to_added``: a server is added meanwhile, and the channels move there. The agent of the server that was
    cut off learns of both at once.
    """
    moved, at_home = stage.channel_at("s2", "m"), stage.channel_at("s1")
    stage.move(moved, "s1")
    channels = (moved, at_home)
    inside, outside = stage.subscriber("S", *channels), stage.subscriber("T", *channels)
    publishers = [stage.publisher("P", *channels), stage.publisher("Q", *channels)]
    stage.run(0.1)
    added = stage.cluster.add_server() if to_added else ""
    everybody = [stage.cluster.balancer, stage.cluster.administrator]
    everybody += [agent for server, agent in stage.cluster.agents.items() if server != "s1"]
    everybody += [process for client in stage.cluster.clients if client.name in "TQ" for process in client.processes]
    heal = stage.cluster.network.part([process.name for process in everybody], ["s1"])
    _wait_taken_over(stage, channels)
    stage.run(SERVES_S_MAX)
    if to_added:
        stage.change_server("add", added)
        stage.run(stage.cluster.options.balancer.join_s)
        for channel in channels:
            stage.cluster.change(channel, single(added))
        stage.wait("they have moved", lambda: all(_servers(stage, each, "s2") == {added} for each in channels))
    parted_at = stage.world.now
    for publisher in publishers:
        for channel in channels:
            stage.publish(publisher, channel)
    stage.run(0.1)
    for app in (inside, outside):
        got = len(stage.records("DELIVERS", since=parted_at, who=app.name))
        stage.expect(f"{app.name} gets one message on each channel, not {got} on both", got == len(channels))
    for client in stage.cluster.clients:
        if client.name in "PQ":
            client.crash()
    heal()
    _wait_taken_back(stage)
    stage.cluster.audit.calm()
    late = stage.publisher("R", *channels)
    for channel in channels:
        stage.publish(late, channel)


def fails_during_a_move(phase: Phase, stage: Stage) -> None:
    """Case 95. A server dies while one channel moves there and another one leaves it. Both end up at living servers."""
    coming, leaving = stage.channel_at("s2"), stage.channel_at("s1", "l")
    subscriber = stage.subscriber("S", coming, leaving)
    publisher = stage.publisher("P", coming, leaving)
    stage.run(0.1)
    if phase is Phase.PREPARED:
        with stage.deaf_agent("s1"):
            _begin_to_move(stage, coming, "s1", phase)
            _begin_to_move(stage, leaving, "s2", phase)
            back = _fail_server(stage, "dies")
    else:
        stage.cluster.clients[0].pause(0.5)  # so that it has not moved
        _begin_to_move(stage, coming, "s1", phase)
        _begin_to_move(stage, leaving, "s2", phase)
        back = _fail_server(stage, "dies")
    failed_at = stage.world.now
    _wait_taken_over(stage, (coming, leaving))
    _serve(stage, publisher, [subscriber], (coming, leaving), since=failed_at + SERVER_DEAD_S)
    back()
    _wait_taken_back(stage)
    stage.cluster.audit.calm()
    for channel in (coming, leaving):
        stage.publish(publisher, channel, times=2)


def _begin_to_move(stage: Stage, channel: bytes, to: str, phase: Phase) -> None:
    stage.cluster.change(channel, single(to))
    stage.wait(f"the move to {to} is {phase.name}", lambda: stage.entry(channel, to).phase is phase)


def paused_and_pinned(stage: Stage) -> None:
    """Case 96. The server of a pinned channel dies while the balancer is paused. The channel returns when both end."""
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    for command, arguments in (("pin", {"channel": channel, "to": "s1"}), ("pause", {})):
        request = stage.cluster.ask(command, arguments)
        stage.wait(f"the balancer has done {command}", partial(stage.cluster.answers.__contains__, request))
    back = _fail_server(stage, "dies")
    _wait_taken_over(stage, (channel,))
    stage.run(SERVES_S_MAX)
    stage.publish(publisher, channel)
    back()
    _wait_taken_back(stage)
    stage.expect("a paused balancer leaves the channel there", not stage.is_at(channel, "s1", Phase.PREPARED), channel)
    stage.cluster.audit.calm()
    stage.cluster.ask("resume", {})
    stage.wait("the channel is back where it is pinned", partial(stage.is_at, channel, "s1", Phase.SETTLED))
    stage.publish(publisher, channel)


def most_servers_die(stage: Stage) -> None:
    """Case 96. Two of three servers die for good. The third one serves its channels, and nothing else changes.

    An operator has a balancer take over: then the third one has all channels. Others that come back count again.
    """
    kept, lost = stage.channel_at("s1"), stage.channel_at("s2", "l")
    channels = (kept, lost)
    subscriber = stage.subscriber("S", *channels)
    publisher = stage.publisher("P", *channels)
    stage.run(0.1)
    for server in ("s2", "s3"):
        stage.cluster.servers[server].stop()
    balancer = stage.cluster.balancer
    stage.run(SERVER_DEAD_S + TAKEN_OVER_S_MAX)
    stage.expect("nobody leads", not _leads(balancer))
    version = _version(stage, "s1")
    stage.run(SERVER_DEAD_S)
    stage.publish(publisher, kept)
    stage.expect("the plan has not changed", _version(stage, "s1") == version)
    balancer.crash()
    options = stage.cluster.options
    stage.cluster.options = replace(options, balancer=replace(options.balancer, take_over=True))
    taken_over_at = stage.world.now
    balancer.start()
    stage.wait("the third server has everything", lambda: _servers(stage, lost, "s1") == {"s1"})
    _serve(stage, publisher, [subscriber], channels, since=taken_over_at)
    for server in ("s2", "s3"):
        stage.cluster.servers[server].start()
    machine = balancer.machine
    assert isinstance(machine, BalancerMachine)
    stage.wait("all servers count again", lambda: not machine.health.problems)
    stage.wait("all servers have the plan", lambda: len({_version(stage, id_) for id_ in ("s1", "s2", "s3")}) == 1)
    stage.run(2.0)
    stage.cluster.audit.calm()
    for channel in channels:
        stage.publish(publisher, channel)


def agent_fails(
    fail: Callable[[Stage], Callable[[], None]], before: Assignment, stage: Stage, slow: str = "s2"
) -> None:
    """Case 97. The agent of s2 fails while a channel moves there. The move is undone, and none begins until it is back.

    ``before`` is where the channel is. Everything goes on there meanwhile, and nothing is lost. The agent of ``slow``
    does not hear of the move.
    """
    channel = stage.channel_with_subscriber("s1")
    if before.mode is not Mode.SINGLE:
        stage.change(channel, before)
    publisher = stage.publisher("P", channel)
    stage.run(2.0)
    after = single("s2") if before.mode is Mode.SINGLE else Assignment(before.mode, ("s1", "s2"))
    with stage.deaf_agent(slow):
        stage.cluster.change(channel, after)
        stage.wait("the change is stored", lambda: stage.entry(channel, "s2").route.assignment == after)
        back = fail(stage)
        stage.wait("the move is undone", partial(stage.holds, channel, before, Phase.SETTLED))
    stage.publish(publisher, channel)
    refused = sum(stage.cluster.moves.refused.values())
    stage.cluster.change(channel, after)
    stage.wait("no other one begins", lambda: sum(stage.cluster.moves.refused.values()) > refused)
    stage.expect("it is where it was", stage.holds(channel, before, Phase.SETTLED), channel)
    back()
    balancer = stage.cluster.balancer.machine
    assert isinstance(balancer, BalancerMachine)
    stage.wait("the agent is well again", lambda: not balancer.health.errors)
    stage.change(channel, after)
    stage.publish(publisher, channel)


def refuses_the_plan(full: str, stage: Stage) -> None:
    """Case 97. A server cannot store the plan while a channel moves from s1 to s2: its memory is full, or its disk.

    The move is undone, and no other one begins there until the server takes writes again. The channel can go
    elsewhere meanwhile, unless its own server is the one. Messages go on, and nothing is lost.
    """
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    stage.run(2.0)
    model, other = stage.cluster.servers[full], "s1" if full == "s2" else "s2"
    model.refuse = out_of_memory
    stage.cluster.change(channel, single("s2"))
    stage.wait("the change is stored", lambda: stage.entry(channel, other).phase is Phase.PREPARED)
    stage.publish(publisher, channel)

    def is_settled_at(server: str) -> bool:
        entry = stage.entry(channel, other)
        return entry.phase is Phase.SETTLED and entry.route.assignment == single(server)

    stage.wait("the move is undone", lambda: is_settled_at("s1"))
    refused = sum(stage.cluster.moves.refused.values())
    stage.cluster.change(channel, single("s2"))
    stage.wait("no other one begins", lambda: sum(stage.cluster.moves.refused.values()) > refused)
    stage.expect("it is where it was", is_settled_at("s1"), channel)
    balancer = stage.cluster.balancer.machine
    assert isinstance(balancer, BalancerMachine)
    problems = {(each.kind, each.subject) for each in balancer.health.errors}
    stage.expect(f"the status names the server: {problems}", ("plan_refused", full) in problems)
    if full == "s2":
        stage.change_server("drain", full)
        stage.cluster.change(channel, single("s3"))
        stage.wait("it goes elsewhere", lambda: is_settled_at("s3"))
        stage.change_server("undrain", full)
    stage.publish(publisher, channel)
    model.refuse = None
    stage.wait("the server is well again", lambda: not balancer.health.errors)
    stage.change(channel, single("s2"))
    stage.publish(publisher, channel)
    stage.expect_gaps(0, channel)


def hung_agent_is_replaced(stage: Stage) -> None:
    """Case 97. The agent of s2 hangs, and a second one takes its place. The first ends when it goes on.

    Channels move to s2 again as soon as the second one is at work, and nothing is lost.
    """
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    stage.run(2.0)
    cluster = stage.cluster
    cluster.agents["s2"].pause()
    stage.run(0.5)
    hung = cluster.replace_agent("s2")
    balancer = cluster.balancer.machine
    assert isinstance(balancer, BalancerMachine)
    first = balancer.overview.agents.incarnation("s2")
    stage.wait(
        "the second agent is at work", lambda: balancer.overview.agents.incarnation("s2") != first, REPLACED_S_MAX
    )
    for server in ("s2", "s3", "s2"):
        stage.move(channel, server)
        stage.publish(publisher, channel)
    hung.resume()
    stage.wait("the one that hung ends", lambda: not hung.alive)
    stage.expect("the second one is still at work", cluster.agents["s2"].alive)
    stage.move(channel, "s1")
    stage.publish(publisher, channel)


def data_centres_part(stage: Stage) -> None:
    """Case 98. The balancer and s1 are cut off from everything else, where a standby is. Clients are on both sides.

    The balancer leads no longer and changes nothing. The standby leads, and serves s1's channels elsewhere. On the side
    of s1 its own channels go on. When the split ends, both sides hear each other again, and know what they have missed.
    """
    _start_standby(stage)
    here, there = stage.channel_at("s1"), stage.channel_at("s2", "t")
    channels = (here, there)
    west, east = stage.subscriber("S", *channels), stage.subscriber("T", *channels)
    publishers = {"P": stage.publisher("P", *channels), "Q": stage.publisher("Q", *channels)}
    stage.run(2.0)
    cluster, balancer, rival = stage.cluster, stage.cluster.balancer, stage.cluster.rival
    sides: list[list[Process]] = [[balancer, cluster.agents["s1"]], [rival, cluster.agents["s2"], cluster.agents["s3"]]]
    for side, names in zip(sides, ("SP", "TQ"), strict=True):
        side += [process for client in cluster.clients if client.name in names for process in client.processes]
    parted_at = stage.world.now
    heals = [
        cluster.network.part([process.name for process in sides[0]], ["s2", "s3"]),
        cluster.network.part([process.name for process in sides[1]], ["s1"]),
    ]
    stage.wait("the standby leads", lambda: _leads(rival) and not _leads(balancer))
    version = _version(stage, "s1")
    stage.wait("others have everything", lambda: all("s1" not in _servers(stage, each, "s2") for each in channels))
    _serve(stage, publishers["Q"], [east], channels, since=stage.world.now)
    stage.publish(publishers["P"], here)
    stage.run(0.1)
    heard = stage.records("DELIVERS", since=parted_at, who=west.name)
    stage.expect("S hears P on the channel of s1", here in {record.channel for record in heard})
    stage.expect("nothing has changed at s1", _version(stage, "s1") == version)
    stage.expect("the balancer does not lead", not _leads(balancer))
    for heal in heals:
        heal()
    _wait_taken_back(stage)
    stage.expect("one balancer leads", _leads(rival) and not _leads(balancer))
    stage.cluster.audit.calm()
    for publisher in publishers.values():
        for channel in channels:
            stage.publish(publisher, channel)


def clocks_are_set_back(stage: Stage) -> None:
    """Case 99. The clocks of all servers are set back while the balancer leads, and again as it dies.

    The first changes nothing. After the second the dead balancer's lease stays: the standby sees that nobody renews it.
    """
    _start_standby(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    balancer, rival = stage.cluster.balancer, stage.cluster.rival
    _set_clocks(stage, -HOUR_S)
    stage.move(channel, "s2")
    stage.run(1.0)
    stage.expect("the balancer leads still", _leads(balancer) and not _leads(rival))
    balancer.crash()
    _set_clocks(stage, -2 * HOUR_S)
    stage.wait("the standby leads", lambda: _leads(rival), CLOCKS_TAKEOVER_S_MAX)
    stage.move(channel, "s3")
    stage.publish(publisher, channel)


def _set_clocks(stage: Stage, ahead_s: float) -> None:
    for server in stage.cluster.servers.values():
        server.clock_ahead_s = ahead_s


def _agent_dies(stage: Stage) -> Callable[[], None]:
    stage.cluster.agents["s2"].crash()
    return stage.cluster.agents["s2"].start


def _agent_hangs(stage: Stage) -> Callable[[], None]:
    stage.cluster.agents["s2"].pause()
    return stage.cluster.agents["s2"].resume


def _agent_falls_behind(stage: Stage) -> Callable[[], None]:
    flood = Flood(stage.cluster, "s2")
    flood.start()
    return flood.stop


def _wait_taken_over(stage: Stage, channels: Sequence[bytes]) -> None:
    """Wait until others have the channels of s1, which has just died; this must be soon."""
    stage.wait(
        "others have everything",
        lambda: all("s1" not in _servers(stage, channel, "s2") for channel in channels),
        SERVER_DEAD_S + TAKEN_OVER_S_MAX,
    )


def _wait_taken_back(stage: Stage) -> None:
    """Wait until s1 has the present plan again, and clients that were still there have left it."""
    stage.run(0.5)
    stage.wait("the server has the plan", lambda: _version(stage, "s1") == _version(stage, "s2"))
    stage.run(2.0)


def _serve(
    stage: Stage, publisher: PublisherApp, subscribers: Sequence[SubscriberApp], channels: Sequence[bytes], since: float
) -> None:
    """Publish until every subscriber has got a message on every channel, which must be soon.

    What comes behind a lost message is held for its usual time before.
    """

    def is_served(name: str) -> bool:
        return {record.channel for record in stage.records("DELIVERS", since=since, who=name)} >= {*channels}

    within_s = SERVES_S_MAX + HOLD_S_MAX
    until = stage.world.now + within_s
    while stage.world.now < until and not all(is_served(app.name) for app in subscribers):
        for channel in channels:
            publisher.publish(channel)
        stage.run(0.2)
    for app in subscribers:
        stage.expect(f"{app.name} gets messages on all channels within {within_s} s", is_served(app.name))


def _fail_server(stage: Stage, how: str) -> Callable[[], None]:
    """Make s1 fail; return what brings it back."""
    if how == "freezes":
        return stage.cluster.network.freeze("s1")
    stage.cluster.servers["s1"].stop()
    return stage.cluster.servers["s1"].start


def _servers(stage: Stage, channel: bytes, server: str) -> set[str]:
    """Return the servers of all routes of a channel, by the plan stored at a server."""
    return {each for route in stage.entry(channel, server).live_routes for each in route.assignment.servers}


def _start_standby(stage: Stage) -> None:
    stage.cluster.rival_stands_by = True
    stage.cluster.rival.start()
    stage.run(0.5)


def _leads(process: Process) -> bool:
    return isinstance(process.machine, BalancerMachine) and process.machine.stage is BalancerStage.LEADING


def _terms(process: Process) -> int:
    """Return how many terms a balancer has begun."""
    assert isinstance(process.machine, BalancerMachine)
    return process.machine.leadership.term


def _version(stage: Stage, server: str) -> int:
    plan = stage.cluster.stored_plan(server)
    return -1 if plan is None else plan.version


SCENARIOS: dict[str, Scenario] = {
    "90-stale-write": Scenario(stale_write),
    "91-balancer-dies": Scenario(partial(leader_fails, Process.crash)),
    "91-balancer-pauses": Scenario(partial(leader_fails, Process.pause)),
    "128-renews-late": Scenario(renews_late),
    "130-is-held-up": Scenario(is_held_up),
    "92-clocks-jump": Scenario(clocks_jump, opened=False),
    "93-server-dies": Scenario(partial(server_fails, "dies"), losses_allowed=True),
    "93-server-freezes": Scenario(partial(server_fails, "freezes"), losses_allowed=True),
    "94-cut-off": Scenario(partial(cut_off, False), losses_allowed=True),
    "127-cut-off-while-added": Scenario(partial(cut_off, True), losses_allowed=True),
    "95-dies-before-a-move": Scenario(partial(fails_during_a_move, Phase.PREPARED), losses_allowed=True),
    "95-dies-in-a-move": Scenario(partial(fails_during_a_move, Phase.ACTIVE), losses_allowed=True),
    "96-most-servers-die": Scenario(most_servers_die, losses_allowed=True),
    "96-paused": Scenario(paused_and_pinned, losses_allowed=True),
    "97-agent-dies": Scenario(partial(agent_fails, _agent_dies, single("s1"))),
    "97-agent-hangs": Scenario(partial(agent_fails, _agent_hangs, single("s1"))),
    "97-agent-falls-behind": Scenario(partial(agent_fails, _agent_falls_behind, single("s1"), slow="s1")),
    "97-agent-of-a-replica-dies": Scenario(partial(agent_fails, _agent_dies, REPLICATED)),
    "97-server-refuses-the-plan": Scenario(partial(refuses_the_plan, "s2")),
    "97-old-server-refuses-the-plan": Scenario(partial(refuses_the_plan, "s1")),
    "97-hung-agent-is-replaced": Scenario(hung_agent_is_replaced),
    "98-data-centres-part": Scenario(data_centres_part, losses_allowed=True),
    "99-clocks-are-set-back": Scenario(clocks_are_set_back),
}
