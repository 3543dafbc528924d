"""How a change gets through its phases, whatever happens to balancer, agents, servers and messages on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamoth.names import PLAN_KEY
from dynamoth.plan.plan import Assignment, Entry, Mode, Phase, Plan, Route, single
from dynamoth.plan.slots import slot_of
from dynamoth.protocol.control import PlanAck, PlanChange, PlanQuery, Vacated
from dynamoth.protocol.stored_plan import VERSION_FIELD
from dynamoth_balancer.install.leadership import Stage
from tests.balancer.cluster import NO_DECISIONS, Balancer, SimCluster, refusing, started

CHANNEL = b"news"


def places(cluster: SimCluster, balancer: Balancer) -> tuple[str, str]:
    """Return where the channel is, and another server."""
    source = balancer.home(CHANNEL)
    return source, cluster.others(source)[0]


def lose_acknowledgements(cluster: SimCluster, server: str, *, lost: bool = True) -> None:
    cluster.agents[server].lose = lambda message: lost and isinstance(message, PlanAck)


def say_vacated(cluster: SimCluster, server: str, *channels: tuple[bytes, int]) -> None:
    """Let the agent of a server say that nobody listens at old locations of channels of these epochs."""
    cluster.say(server, Vacated(server, channels, cluster.agents[server].incarnation))


def phase_of(balancer: Balancer) -> Phase:
    return balancer.plan.entry(CHANNEL).phase


def begin(cluster: SimCluster, balancer: Balancer, *, listened: bool = False) -> tuple[str, str]:
    """Ask for a move; ``listened``: subscribers stay at the old location until the test lets them go."""
    source, target = places(cluster, balancer)
    if listened:
        cluster.agents[source].listened.add(CHANNEL)
    cluster.admin(source, "move", {"channel": CHANNEL, "to": target})
    return source, target


def move(cluster: SimCluster, balancer: Balancer) -> str:
    """Move the channel; return where it is then."""
    _, target = begin(cluster, balancer)
    cluster.run_until(lambda: is_settled(cluster, balancer, target))
    return target


def is_settled(cluster: SimCluster, balancer: Balancer, target: str) -> bool:
    entry = balancer.plan.entry(CHANNEL)
    return entry.phase is Phase.SETTLED and entry.route.assignment.servers == (target,) and cluster.is_quiet(balancer)


def test_a_new_cluster_gets_plan_0_at_every_server_and_a_move_goes_through_all_phases() -> None:
    cluster, balancer = started(3)
    assert balancer.plan.version == 0
    assert balancer.plan.base == ("s1", "s2", "s3")
    assert [server.plan_or_fail().version for server in cluster.servers.values()] == [0, 0, 0]
    move(cluster, balancer)
    assert [plan.entries[CHANNEL].phase for plan in balancer.plans()[1:]] == list(Phase)
    assert balancer.plan.version == 3
    assert balancer.plan.entry(CHANNEL).route.epoch == 1


def test_an_agent_hears_of_a_phase_only_after_its_server_has_stored_it() -> None:
    cluster, balancer = started()

    for id_, agent in cluster.agents.items():

        def stored_here(message: Any, id_: str = id_) -> bool:
            if isinstance(message, PlanChange):
                assert cluster.servers[id_].plan_or_fail().version >= message.delta.version
            return False

        agent.lose = stored_here
    move(cluster, balancer)


@pytest.mark.parametrize("lost", [PlanChange, PlanAck, PlanQuery, Vacated])
def test_any_control_message_may_get_lost(lost: type[Any]) -> None:
    cluster, balancer = started()
    # An agent is asked only when something else was lost.
    losses = dict.fromkeys(cluster.servers, 2 if lost is PlanQuery else 1)

    for id_, agent in cluster.agents.items():

        def lose(message: Any, id_: str = id_) -> bool:
            hit = isinstance(message, lost) or (lost is PlanQuery and isinstance(message, PlanChange))
            if hit and losses[id_]:
                losses[id_] -= 1
                return True
            return False

        agent.lose = lose
    source, target = begin(cluster, balancer)
    cluster.run_until(lambda: is_settled(cluster, balancer, target))
    assert losses[source] == 0


def test_a_report_says_what_a_lost_acknowledgement_said() -> None:
    cluster, balancer = started()
    for agent in cluster.agents.values():
        agent.lose = lambda message: isinstance(message, PlanAck)
        agent.reports_version = True
    move(cluster, balancer)


def test_agents_that_send_no_reports_are_asked_for_a_sign_of_life() -> None:
    cluster, balancer = started()
    for agent in cluster.agents.values():
        agent.reports = False
    cluster.run(60)
    move(cluster, balancer)


def test_repeated_and_old_messages_change_nothing() -> None:
    cluster, balancer = started()
    source, target = begin(cluster, balancer, listened=True)
    cluster.run_until(lambda: phase_of(balancer) is Phase.ACTIVE)
    epoch = balancer.plan.entry(CHANNEL).route.epoch
    agent = cluster.agents[source]
    for version in (0, epoch, epoch):
        cluster.say(source, PlanAck(source, agent.incarnation, version))
    say_vacated(cluster, source, (CHANNEL, epoch - 1), (CHANNEL, epoch + 1), (b"another", epoch))
    say_vacated(cluster, source)
    say_vacated(cluster, target, (CHANNEL, epoch))  # true, and of no importance: the new server
    cluster.run(10)
    assert phase_of(balancer) is Phase.ACTIVE
    cluster.agents[source].listened.clear()
    for _ in range(3):
        say_vacated(cluster, source, (CHANNEL, epoch))
    cluster.run_until(lambda: is_settled(cluster, balancer, target))
    version = balancer.plan.version
    say_vacated(cluster, source, (CHANNEL, epoch))
    cluster.run(5)
    assert balancer.plan.version == version


def test_vacated_counts_only_once_the_transition_is_active() -> None:
    cluster, balancer = started()
    source, target = places(cluster, balancer)
    lose_acknowledgements(cluster, target)
    begin(cluster, balancer, listened=True)
    cluster.run(3)
    say_vacated(cluster, source, (CHANNEL, balancer.plan.entry(CHANNEL).route.epoch))
    cluster.run()
    cluster.agents[target].lose = lambda message: False
    cluster.run(20)
    assert phase_of(balancer) is Phase.ACTIVE


def test_an_agent_that_restarts_before_activation_must_acknowledge_again() -> None:
    cluster, balancer = started()
    source, target = places(cluster, balancer)
    agent = cluster.agents[source]
    lose_acknowledgements(cluster, target)
    begin(cluster, balancer)
    cluster.run(2)  # the agent of the source has acknowledged, that of the target has not been heard
    old = agent.incarnation
    agent.restart()
    cluster.agents[source].lose = lambda message: isinstance(message, PlanQuery)
    cluster.run(3)  # its reports tell that it is another process
    cluster.say(source, PlanAck(source, old, balancer.plan.version))  # late, from the process that is no more
    cluster.agents[target].lose = lambda message: False
    cluster.run(10)
    assert phase_of(balancer) is Phase.PREPARED
    assert balancer.machine.counters["contested_messages"] >= 1
    cluster.agents[source].lose = lambda message: False
    cluster.run_until(lambda: is_settled(cluster, balancer, target))
    assert agent.plan is not None


def test_a_move_is_undone_when_an_agent_dies_after_its_acknowledgement() -> None:
    cluster, balancer = started()
    source, target = places(cluster, balancer)
    lose_acknowledgements(cluster, target)
    before = balancer.plan.entry(CHANNEL).route
    begin(cluster, balancer)
    prepared = balancer.plan.entry(CHANNEL).route
    cluster.run(2)
    cluster.agents[source].alive = False
    cluster.run(6)
    cluster.agents[target].lose = lambda message: False
    cluster.run(10)
    entry = balancer.plan.entry(CHANNEL)
    assert (entry.phase, entry.route.assignment) == (Phase.SETTLED, before.assignment)
    assert entry.route.epoch > prepared.epoch
    assert balancer.machine.counters["moves_rolled_back"] == 1
    cluster.agents[source].restart()
    cluster.run(6)
    assert cluster.ask("move", {"channel": CHANNEL, "to": target}).error is None
    assert is_settled(cluster, balancer, target)


def test_the_move_of_a_slot_is_undone_with_all_its_channels() -> None:
    cluster, balancer = started()
    source, target = places(cluster, balancer)
    slot = slot_of(CHANNEL)
    lose_acknowledgements(cluster, target)
    cluster.admin(source, "move", {"channel": slot, "to": target})
    cluster.run()
    assert phase_of(balancer) is Phase.PREPARED
    cluster.agents[target].alive = False
    cluster.run_until(lambda: is_settled(cluster, balancer, source))
    assert slot in balancer.plan.entries and CHANNEL not in balancer.plan.entries
    cluster.agents[target].restart()
    cluster.agents[target].lose = lambda message: False
    cluster.run(6)
    assert cluster.ask("move", {"channel": slot, "to": target}).error is None
    assert is_settled(cluster, balancer, target)


def test_a_move_of_an_earlier_balancer_waits_for_its_agents() -> None:
    """It may be active at a server that the new balancer cannot read."""
    cluster, balancer = started()
    source, target = places(cluster, balancer)
    lose_acknowledgements(cluster, target)
    begin(cluster, balancer)
    cluster.run()
    cluster.agents[source].alive = False
    later = cluster.succeed(balancer, NO_DECISIONS)
    cluster.agents[target].lose = lambda message: False
    cluster.run(20)
    assert phase_of(later) is Phase.PREPARED
    cluster.agents[source].restart()
    cluster.run_until(lambda: is_settled(cluster, later, target))


def test_a_superseded_agent_is_believed_again_when_the_later_one_is_gone() -> None:
    cluster, balancer = started()
    first = cluster.agents["s1"].incarnation
    cluster.say("s1", PlanAck("s1", 5, 0))  # a second agent, which ends at once
    cluster.run(20)
    move(cluster, balancer)
    assert cluster.agents["s1"].incarnation == first


def test_what_an_unreadable_server_holds_is_taken_in_later_and_its_epochs_are_never_given_again() -> None:
    cluster, balancer = started(3)
    _, target = places(cluster, balancer)
    server = cluster.servers[target]
    # The predecessor's last change has reached one server only, which is down when the successor comes.
    stray = balancer.plan.begin({b"stray": single(cluster.others(balancer.home(b"stray"))[0])})
    server.put_plan(stray)
    cluster.kill(balancer)
    successor = cluster.start(NO_DECISIONS)
    cluster.cut(successor, target)
    cluster.run_until(lambda: successor.machine.stage is Stage.LEADING)
    assert successor.plan.version > stray.version
    assert [note.details["not_read"] for note in successor.notes if "not_read" in note.details] == [[target]]
    cluster.heal(successor, target)
    cluster.run_until(lambda: cluster.is_quiet(successor))
    assert successor.plan.entries[b"stray"].route == stray.entries[b"stray"].route
    phases = [plan.entries[b"stray"].phase for plan in successor.plans() if b"stray" in plan.entries]
    assert list(dict.fromkeys(phases)) == list(Phase)


def test_a_server_that_is_down_is_not_chosen_and_a_transition_waits_for_it() -> None:
    cluster, balancer = started()
    source, target = places(cluster, balancer)
    cluster.cut(balancer, target)
    cluster.run()
    # The lease needs both of two servers; it still holds for a while.
    move = {"channel": CHANNEL, "to": target}
    assert f"server {target} is not connected" in cluster.refusal("move", move, source)
    cluster.heal(balancer, target)
    cluster.run_until(lambda: balancer.machine.overview.status(cluster.now)["servers"][target]["link"] == "up")
    begin(cluster, balancer, listened=True)
    cluster.run_until(lambda: phase_of(balancer) is Phase.ACTIVE)
    cluster.cut(balancer, target)
    cluster.agents[source].listened.clear()
    cluster.run(2)
    assert phase_of(balancer) is Phase.ACTIVE, "the new server has perhaps not stored that it is right"
    cluster.heal(balancer, target)
    cluster.run_until(lambda: is_settled(cluster, balancer, target))


def test_a_restarted_server_gets_the_whole_plan_and_its_old_one_is_not_trusted() -> None:
    cluster, balancer = started(3)
    move(cluster, balancer)
    for snapshot in (None, cluster.servers["s2"].snapshot()):
        cluster.stop_server("s2")
        cluster.run(1)
        cluster.servers["s2"].executed.clear()
        cluster.start_server("s2", snapshot)
        with pytest.raises(AssertionError, match="stores no plan"):  # none that was written to this process
            cluster.servers["s2"].plan_or_fail()
        cluster.run(1)
        assert cluster.servers["s2"].plan == balancer.plan
        assert any(args[0] == b"RENAME" for args in cluster.servers["s2"].executed)


@pytest.mark.parametrize("version", [b"0", b"77", b"4294967295", b"9999999999"])
def test_a_server_with_an_unexpected_version_is_written_as_a_whole(version: bytes) -> None:
    cluster, balancer = started()
    move(cluster, balancer)
    cluster.servers["s1"].put(PLAN_KEY, {VERSION_FIELD: version}, keep=True)
    cluster.servers["s1"].executed.clear()
    cluster.run(10)
    notes = [note.message for note in balancer.notes if note.level == "error"]
    assert notes
    if version == b"4294967295":  # nothing can be above it, so none of ours has it
        assert any("cannot be ours" in note for note in notes)
        assert balancer.machine.overview.all_counters()["copies_conflicting"] == 1
    assert cluster.servers["s1"].plan == cluster.servers["s2"].plan == balancer.plan
    assert any(args[0] == b"RENAME" for args in cluster.servers["s1"].executed)


def test_a_server_that_misses_changes_is_sent_them_together() -> None:
    cluster, balancer = started(3)
    source, target = places(cluster, balancer)
    [other] = cluster.others(source, target)
    cluster.cut(balancer, other)
    begin(cluster, balancer)
    cluster.run_until(lambda: phase_of(balancer) is Phase.SETTLED and balancer.plan.version == 3)
    [second] = balancer.at_home(source)
    cluster.admin(source, "move", {"channel": second, "to": target}, request=8)
    cluster.run_until(lambda: balancer.plan.version == 6)
    cluster.servers[other].executed.clear()
    cluster.heal(balancer, other)
    cluster.run(1)
    assert cluster.servers[other].plan == balancer.plan
    written = [args for args in cluster.servers[other].executed if args[0] in (b"HSET", b"RENAME")]
    assert [args[1] for args in written] == [PLAN_KEY], "one HSET, not the whole plan"


@pytest.mark.parametrize("command", [b"HSET", b"RENAME", b"HMGET"])
def test_a_server_that_refuses_is_reported_and_tried_again(command: bytes) -> None:
    cluster, balancer = started()
    source, target = places(cluster, balancer)
    server = cluster.servers[target]
    attempts = 0

    def refuse(process: str, words: list[bytes]) -> str | None:
        nonlocal attempts
        refusal = refusing("OOM command not allowed", command)(process, words)
        attempts += refusal is not None
        return refusal

    server.refuse = refuse
    if command == b"RENAME":
        server.delete(PLAN_KEY)
    begin(cluster, balancer)
    cluster.run(10)
    refused = [note for note in balancer.notes if "refuses to keep the plan" in note.message]
    assert phase_of(balancer) is Phase.SETTLED
    is_there = balancer.plan.entry(CHANNEL).route.assignment == single(target)
    assert is_there == (command == b"HMGET"), "where nothing can be stored the move is undone, or has not begun"
    assert len(refused) == 1, "said once, not with every attempt"
    assert 5 <= attempts <= 12, "about one per second"
    assert refused[0].details["reply"] == "OOM command not allowed"
    server.refuse = None
    cluster.run(5)
    if not is_there:
        cluster.ask("move", {"channel": CHANNEL, "to": target}, server=source)
    cluster.run_until(lambda: is_settled(cluster, balancer, target))


@pytest.mark.parametrize("stored", [{b"@version": b"many", b"@cluster": b"\xc1", b"c:x": b"?"}, b"a string"])
@pytest.mark.parametrize("late", [False, True])
def test_a_plan_that_cannot_be_read_is_reported_and_replaced(stored: Any, *, late: bool) -> None:
    cluster = SimCluster(2)
    if late:
        balancer = cluster.started()
        cluster.servers["s1"].put(PLAN_KEY, stored)
        cluster.run(6)
    else:
        cluster.servers["s1"].put(PLAN_KEY, stored)
        balancer = cluster.started()
    assert cluster.servers["s1"].plan == balancer.plan
    assert any("cannot be read" in note.message for note in balancer.notes)


def test_an_agent_that_holds_a_version_that_is_stored_nowhere_is_overtaken() -> None:
    cluster = SimCluster(2)
    for agent in cluster.agents.values():
        agent.plan = Plan(50, {server.id: server for server in cluster.configured()}, ("s1", "s2"))
    balancer = cluster.start()
    cluster.run_until(lambda: balancer.machine.plan is not None and cluster.is_quiet(balancer))
    assert balancer.plan.version > 50


def test_many_channels_share_versions() -> None:
    cluster, balancer = started()
    channels = [b"c%d" % number for number in range(50)]
    for number, channel in enumerate(channels):
        [target] = cluster.others(balancer.home(channel))
        cluster.admin("s1", "move", {"channel": channel, "to": target}, request=number)
    cluster.run_until(lambda: len(cluster.servers["s1"].replies) == len(channels))
    assert all(reply.error is None for reply in cluster.servers["s1"].replies)
    assert balancer.plan.version < len(channels) + 20, "50 begun one by one; activated and settled together"


def test_versions_that_advance_changes_are_an_interval_apart() -> None:
    cluster, balancer = started(options=replace(NO_DECISIONS, step_interval_s=4.0))
    _, target = begin(cluster, balancer)
    cluster.run_until(lambda: phase_of(balancer) is Phase.ACTIVE)
    activated_at = cluster.now
    cluster.run_until(lambda: is_settled(cluster, balancer, target))
    assert cluster.now - activated_at >= 3.9


def test_a_stored_plan_with_previous_routes_waits_for_every_old_server() -> None:
    """For replicated assignments, which later balancers make: every server of every previous route must be vacated."""
    cluster = SimCluster(3)
    old = Route(1, Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2")))
    older = Route(0, single("s1"))
    entry = Entry(Route(2, single("s3")), Phase.ACTIVE, (older, old))
    plan = Plan.initial(cluster.configured()).with_entries({CHANNEL: entry}, 9)
    for server in cluster.servers.values():
        server.put_plan(plan)
    cluster.agents["s2"].listened.add(CHANNEL)
    balancer = cluster.start(NO_DECISIONS)
    cluster.run(10)
    assert phase_of(balancer) is Phase.ACTIVE
    cluster.agents["s2"].listened.clear()
    cluster.run_until(lambda: is_settled(cluster, balancer, "s3"))
