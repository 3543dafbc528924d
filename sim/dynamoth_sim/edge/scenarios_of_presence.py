"""Scripts for presence: W watches a channel from b3; U and V join it, move, and are lost. See ``scenarios``.

W's log of changes begins empty, once W knows that nobody is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dynamoth.edge.interests import Interest, presence_interest
from dynamoth.edge.log import log_server
from dynamoth.edge.presence import member_id
from dynamoth_sim.edge.stage import AT_ONCE_S, SELDOM_CHECKED, EdgeScenario, EdgeStage
from dynamoth_sim.edge.users import USER, UserApp
from dynamoth_sim.edge.world import SHORT_BROKER_OPTIONS

CHANNEL = "ch0"
ROOM = presence_interest(CHANNEL)

TTL_S = SHORT_BROKER_OPTIONS.presence_ttl_s
GRACE_S = SHORT_BROKER_OPTIONS.presence_grace_s

PRESENT = replace(SELDOM_CHECKED, presence=(CHANNEL,))
SLOW_TO_NOTICE = replace(PRESENT, broker=replace(PRESENT.broker, pong_timeout_s=3.0))
"""Brokers take a dead connection for alive for longer than users do."""
LOGS_FAIL = replace(PRESENT, logs_may_fail=True)


def _quiet_log(stage: EdgeStage) -> Interest:
    """Return a logged channel whose log is not where the room's is: a hold-up of one does not touch the other."""
    servers = tuple(stage.edge.logs)
    return next(each for each in stage.edge.logged if log_server(each.id, servers) != log_server(ROOM.id, servers))


def _watcher(stage: EdgeStage, name: str = "W") -> UserApp:
    """Start W, and wait until W knows who is there."""
    watcher = stage.user(name, ROOM, _quiet_log(stage), at="b3")
    stage.wait(f"{name} knows the members", lambda: CHANNEL in watcher.rosters)
    return watcher


def _member(stage: EdgeStage, name: str, at: str = "b1", *more: Interest) -> UserApp:
    """Let a user be present, and wait until a broker serves it."""
    user = stage.edge.add_user(name, [stage.edge.live[0], *more], at)
    user.present.add(CHANNEL)
    user.start()
    stage.wait_served(user, at)
    return user


def _end(how: Callable[[], None], user: UserApp) -> None:
    """End a user for good."""
    how()
    user.interests.clear()


def _expect(stage: EdgeStage, watcher: UserApp, *changes: tuple[str, str]) -> None:
    """Note a failure unless W has seen these changes, and no others: what happened, and the user's name."""
    seen = watcher.changes
    wanted = [(kind, member_id(USER, name)) for kind, name in changes]
    text = ", ".join(" ".join(change) for change in changes)
    stage.expect(f"{watcher.name} sees {text or 'no change'}, not {seen}", seen == wanted)


def joins_and_leaves(stage: EdgeStage) -> None:
    """U joins, unsubscribes, joins again and quits: W sees each at once, though tips are not compared."""
    watcher = _watcher(stage)
    user = _member(stage, "U")
    stage.run(AT_ONCE_S)
    _expect(stage, watcher, ("join", "U"))
    user.leave(stage.edge.live[0])
    stage.run(AT_ONCE_S)
    _expect(stage, watcher, ("join", "U"), ("leave", "U"))
    stage.join_user(user, stage.edge.live[0])
    stage.wait_served(user)
    stage.run(AT_ONCE_S)
    _end(user.quit, user)
    stage.run(AT_ONCE_S)
    _expect(stage, watcher, *2 * (("join", "U"), ("leave", "U")))


def moves(stage: EdgeStage) -> None:
    """U moves from b1 to b2, whose commands come to the log's server late: W sees nothing of that."""
    watcher = _watcher(stage)
    user = _member(stage, "U")
    stage.run(AT_ONCE_S)
    with stage.log_held("b2", ROOM, to_server=True):
        stage.ask_to_move(user, "b2")
        stage.wait_served(user, "b2")
        stage.run(AT_ONCE_S)
    stage.run(2 * TTL_S)
    _expect(stage, watcher, ("join", "U"))


def move_fails(stage: EdgeStage) -> None:
    """U is to move to b2, which confirms the room but cannot read a log of U's: U stays at b1, and W sees nothing."""
    watcher = _watcher(stage)
    quiet = _quiet_log(stage)
    user = _member(stage, "U", "b1", quiet)
    stage.run(AT_ONCE_S)
    with stage.log_held("b2", quiet, to_server=True):
        stage.ask_to_move(user, "b2")
        stage.wait("the move has failed", lambda: user.machine.counters["moves_failed"] > 0)
    stage.run(2 * TTL_S)
    stage.expect("U is at b1", stage.is_served(user, "b1"))
    _expect(stage, watcher, ("join", "U"))


def move_target_dies(stage: EdgeStage) -> None:
    """As before, but b2 dies before the move has failed: b1 takes U's member over, and W sees nothing."""
    watcher = _watcher(stage)
    quiet = _quiet_log(stage)
    user = _member(stage, "U", "b1", quiet)
    stage.run(AT_ONCE_S)
    with stage.log_held("b2", quiet, to_server=True):
        stage.ask_to_move(user, "b2")
        stage.wait("b2 names U", lambda: stage.broker("b2").machine.presence.members == 1)
        stage.run(AT_ONCE_S)
        stage.broker("b2").crash()
    stage.run(2 * TTL_S)
    stage.expect("U is at b1", stage.is_served(user, "b1"))
    _expect(stage, watcher, ("join", "U"))


def broker_dies(stage: EdgeStage) -> None:
    """b1 dies, and U with it; V goes on at another broker: W sees that U has left, after a lease, and nothing of V."""
    watcher = _watcher(stage)
    user, other = _member(stage, "U"), _member(stage, "V")
    stage.run(AT_ONCE_S)
    _end(user.crash, user)
    stage.broker("b1").crash()
    stage.wait_served(other)
    _expect(stage, watcher, ("join", "U"), ("join", "V"))
    stage.run(TTL_S + GRACE_S)
    _expect(stage, watcher, ("join", "U"), ("join", "V"), ("leave", "U"))


def connection_lost(stage: EdgeStage) -> None:
    """U's connection is lost, and U comes back: W sees nothing. Then U dies: W sees that after a while."""
    watcher = _watcher(stage)
    user = _member(stage, "U")
    stage.run(AT_ONCE_S)
    stage.lose_wire(user)
    stage.run(2 * AT_ONCE_S)
    stage.wait_served(user)
    stage.run(TTL_S)
    _expect(stage, watcher, ("join", "U"))
    _end(user.crash, user)
    stage.run(GRACE_S + AT_ONCE_S)
    _expect(stage, watcher, ("join", "U"), ("leave", "U"))


def late_exit(stage: EdgeStage) -> None:
    """U quits, and starts again at b2 before b1's word of that has come to the log's server: it does not count."""
    watcher = _watcher(stage)
    user = _member(stage, "U")
    stage.run(AT_ONCE_S)
    broker = stage.broker("b1")
    with stage.log_held("b1", ROOM, to_server=True):
        user.quit()
        stage.wait("b1 knows that U has gone", lambda: not broker.machine.sessions)
        user.prefer("wss://b2")
        user.start()
        stage.wait_served(user, "b2")
        stage.run(AT_ONCE_S)
    stage.run(AT_ONCE_S)
    _expect(stage, watcher, ("join", "U"))


def ghost(stage: EdgeStage) -> None:
    """U's connection dies, and b1 does not know; U is at another broker, and quits there: b1 cannot bring U back."""
    watcher = _watcher(stage)
    user = _member(stage, "U")
    stage.run(AT_ONCE_S)
    stage.wire(user).hold()
    options = stage.edge.options
    stage.run(options.broker.ping_s + options.user.silence_s)
    stage.wait_served(user)
    stage.expect("b1 takes U for connected", bool(stage.broker("b1").machine.sessions))
    _end(user.quit, user)
    stage.run(TTL_S)
    _expect(stage, watcher, ("join", "U"), ("leave", "U"))


def log_restarts(stage: EdgeStage) -> None:
    """The log's server loses its data: brokers name their members again, and W learns them after a gap."""
    watcher = _watcher(stage)
    _member(stage, "U")
    stage.run(AT_ONCE_S)
    stage.edge.restart_log(stage.log_of(ROOM), None)
    stage.run(3 * TTL_S)
    stage.expect("W knows U", set(watcher.rosters[CHANNEL]) == {member_id(USER, "U")})


def joins_while_asked(stage: EdgeStage) -> None:
    """V joins while X asks who is there: before the list was read, and behind it. X sees V once, either way."""
    _watcher(stage)
    _member(stage, "U")
    for name, to_server in (("V", False), ("T", True)):
        watcher = stage.edge.add_user(f"X{name}", [ROOM, _quiet_log(stage)], "b3")
        with stage.log_held("b3", ROOM, to_server=to_server):
            watcher.start()
            stage.wait_served(watcher, "b3")
            _member(stage, name)
            stage.run(AT_ONCE_S)
        stage.run(AT_ONCE_S)
        expected = {member_id(USER, each.name) for each in stage.edge.users if CHANNEL in each.present}
        stage.expect(f"X{name} knows all", set(watcher.rosters.get(CHANNEL, ())) == expected)


OF_PRESENCE: dict[str, EdgeScenario] = {
    "edge-presence-broker-dies": EdgeScenario(broker_dies, edge=PRESENT, losses_allowed=True),
    "edge-presence-connection-lost": EdgeScenario(connection_lost, edge=PRESENT, losses_allowed=True),
    "edge-presence-ghost": EdgeScenario(ghost, edge=SLOW_TO_NOTICE, losses_allowed=True),
    "edge-presence-joins-and-leaves": EdgeScenario(joins_and_leaves, edge=PRESENT),
    "edge-presence-joins-while-asked": EdgeScenario(joins_while_asked, edge=PRESENT),
    "edge-presence-late-exit": EdgeScenario(late_exit, edge=PRESENT, losses_allowed=True),
    "edge-presence-log-restarts": EdgeScenario(log_restarts, edge=LOGS_FAIL, losses_allowed=True),
    "edge-presence-move-fails": EdgeScenario(move_fails, edge=PRESENT),
    "edge-presence-move-target-dies": EdgeScenario(move_target_dies, edge=PRESENT, losses_allowed=True),
    "edge-presence-moves": EdgeScenario(moves, edge=PRESENT),
}
