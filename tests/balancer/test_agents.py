"""Who is believed to be the agent of a server, and what for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from dynamoth.plan.plan import TAKEOVER_VERSIONS, Phase
from dynamoth.protocol.control import PlanAck, PlanQuery, Vacated
from dynamoth.protocol.reports import CANNOT_OBSERVE, pack_report
from dynamoth_balancer.install.agents import VOICES_MAX, Agents
from tests.balancer.cluster import NO_DECISIONS, Balancer, started
from tests.balancer.test_installation import CHANNEL, begin, is_settled, move, phase_of, places

FORGED = 99


def kinds(balancer: Balancer, server: str) -> set[str]:
    """Return the problems of a server."""
    return {problem.kind for problem in balancer.machine.health.problems if problem.subject == server}


def test_an_agent_that_has_gone_with_its_server_is_noted_when_the_server_is_back_without_it() -> None:
    agents = Agents(["s1"], stale_s=5.0)
    agents.hear("s1", 7, 0.0)
    assert [note.message for note in agents.note_changes({"s1"}, 0.0)] == ["an agent is heard"]
    assert agents.note_changes(set(), 10.0) == []
    [gone] = agents.note_changes({"s1"}, 11.0)
    assert (gone.level, gone.details) == ("warning", {"server": "s1"})
    assert agents.note_changes({"s1"}, 12.0) == []


def test_a_flood_of_processes_that_speak_for_a_server_is_a_conflict() -> None:
    """The real one is forgotten between two of its messages, so that it always seems to be new."""
    agents = Agents(["s1"], stale_s=5.0)
    for second in range(3):
        agents.hear("s1", 7, float(second))
        for forged in range(VOICES_MAX):
            agents.hear("s1", 1000 * second + FORGED + forged, second + 0.5)
    assert agents.is_in_conflict("s1", 3.0)
    assert "several processes speak as the agent of server s1" in str(agents.why_not("s1", 3.0))


def test_nothing_begins_where_two_processes_speak_for_one_server_and_its_load_is_not_believed() -> None:
    cluster, balancer = started()
    for _ in range(4):
        forged = replace(cluster.agents["s1"].report(), incarnation=FORGED, outgoing_bytes_per_s=1e9)
        cluster.say("s1", pack_report(forged))
        cluster.run(1)
    channel = next(b"%d" % n for n in range(100) if balancer.plan.ring.home(b"%d" % n) == "s2")
    move_there = {"channel": channel, "to": "s1"}
    assert "several processes speak as the agent of server s1" in cluster.refusal("move", move_there)
    assert (balancer.machine.overview.load_ratio("s1", cluster.now) or 0.0) < 1.0
    assert "agents_in_conflict" in kinds(balancer, "s1") and not kinds(balancer, "s2")
    assert balancer.machine.overview.figures(cluster.now)["agents_in_conflict"] == 1
    cluster.run(6)
    assert not kinds(balancer, "s1"), "the forger is silent"


def test_a_forged_vacated_does_not_settle_a_transition() -> None:
    cluster, balancer = started()
    source, _ = begin(cluster, balancer, listened=True)
    cluster.run_until(lambda: phase_of(balancer) is Phase.ACTIVE)
    epoch = balancer.plan.entry(CHANNEL).route.epoch
    for _ in range(5):
        cluster.say(source, Vacated(source, ((CHANNEL, epoch),), FORGED))
        cluster.run(1)
    assert phase_of(balancer) is Phase.ACTIVE


def test_a_restarted_agent_is_believed_soon() -> None:
    cluster, balancer = started()
    cluster.run(2)
    cluster.agents["s1"].restart()
    restarted_at = cluster.now
    _, target = begin(cluster, balancer)
    cluster.run_until(lambda: is_settled(cluster, balancer, target))
    assert cluster.now - restarted_at < 5.0
    assert not {"agents_in_conflict"} & (kinds(balancer, "s1") | kinds(balancer, "s2"))


def test_an_agent_that_cannot_observe_acknowledges_nothing_by_any_path() -> None:
    """Its reports name the version of the plan, and it may even send acknowledgements: it does not act on the plan."""
    cluster, balancer = started()
    source, target = places(cluster, balancer)
    cluster.agents[target].lose = lambda message: isinstance(message, PlanAck)
    begin(cluster, balancer)
    agent = cluster.agents[target]
    agent.reports = False
    for _ in range(10):
        report = replace(agent.report(), plan_version=balancer.plan.version, problems=((CANNOT_OBSERVE, "NOPERM"),))
        cluster.say(target, pack_report(report))
        cluster.say(target, PlanAck(target, agent.incarnation, balancer.plan.version))
        cluster.run(1)
        assert is_settled(cluster, balancer, source), "the move is undone"
    assert kinds(balancer, target) == {CANNOT_OBSERVE} and not kinds(balancer, source)
    assert "does not observe it: NOPERM" in cluster.refusal("move", {"channel": b"another", "to": target})
    agent.reports = True
    cluster.run(6)
    cluster.admin(source, "move", {"channel": CHANNEL, "to": target}, 8)
    cluster.run()
    assert phase_of(balancer) is Phase.PREPARED
    agent.reports = False
    for _ in range(5):
        cluster.say(target, pack_report(replace(agent.report(), plan_version=balancer.plan.version, observing=False)))
        cluster.run(1)
        assert is_settled(cluster, balancer, source), "it sees nothing now"
    agent.reports = True
    cluster.agents[target].lose = lambda message: False
    cluster.run(6)
    assert cluster.ask("move", {"channel": CHANNEL, "to": target}).error is None
    assert is_settled(cluster, balancer, target)


def test_an_agent_that_is_heard_and_has_the_plan_is_not_asked_for_its_version() -> None:
    cluster, balancer = started()
    move(cluster, balancer)
    asked: Counter[str] = Counter()

    def count(server: str, message: object) -> bool:
        asked[server] += isinstance(message, PlanQuery)
        return False

    for server, agent in cluster.agents.items():
        agent.lose = partial(count, server)
    cluster.run(20)
    assert not +asked
    cluster.agents["s1"].mute = True
    cluster.run_until(lambda: asked["s1"] > 0)
    assert not asked["s2"]


@pytest.mark.parametrize("version", [10**6, 2**31, 2**32 - 1])
def test_a_forged_version_does_not_use_up_the_versions_there_are(version: int) -> None:
    """All servers were read at the takeover, so that no balancer can have issued it."""
    cluster, first = started()
    _, target = begin(cluster, first)
    cluster.run_until(lambda: is_settled(cluster, first, target))
    cluster.kill(first)
    balancer = cluster.started(NO_DECISIONS)
    before = balancer.plan.version
    cluster.agents["s1"].reports_version = True
    cluster.say("s1", PlanAck("s1", cluster.agents["s1"].incarnation, version))
    cluster.run(0.3)
    assert "version_refused" in kinds(balancer, "s1")
    cluster.run(10)
    assert balancer.plan.version == before
    assert "version_refused" not in kinds(balancer, "s1"), "it has acknowledged the right one since"


def test_after_a_loss_of_all_plans_a_version_is_believed_up_to_a_bound() -> None:
    """No server stored a plan, so agents may hold a newer one: the plan gets above it, unless that is absurd."""
    cluster, balancer = started()
    agent = cluster.agents["s1"].incarnation
    cluster.say("s1", PlanAck("s1", agent, 2**31))
    cluster.run(2)
    assert balancer.plan.version < 10**4
    cluster.say("s1", PlanAck("s1", agent, 10**6))
    cluster.run(2)
    assert balancer.plan.version == 10**6 + 2 * TAKEOVER_VERSIONS, "above it, and in a term of its own"


def test_processes_that_are_remembered_are_bounded() -> None:
    agents = Agents(["s1"], 5.0)
    agents.hear("s1", 1, 0.0)
    for incarnation in range(2, 1000):
        agents.hear("s1", incarnation, incarnation * 0.01)
        agents.hear("s1", 1, incarnation * 0.01)
    assert len(agents["s1"].voices) <= VOICES_MAX
    assert 1 in agents["s1"].voices, "the one that always speaks is kept"
    assert agents.is_in_conflict("s1", 10.0)
    assert agents.speaks_alone("s1", 1, 13.0)
