"""The fleet: when servers are added and freed, and a provisioner that fails, lies or does not answer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamoth.errors import ConfigError
from dynamoth_balancer.provision.fleet import (
    AGENT_GONE,
    AGENT_GONE_S,
    FREED_AT_ONCE_MAX,
    PROVISIONER,
    UNHEARD_S,
    AddServer,
    Fleet,
    FleetAction,
    FleetView,
    FreeServer,
    Life,
    Member,
    RemoveServer,
    StartServer,
)
from dynamoth_balancer.provision.options import FleetOptions

OPTIONS = FleetOptions(
    servers_max=6, grow_delay_s=3, release_delay_s=20, answer_timeout_s=30, join_timeout_s=15, retry_s=2, retry_s_max=16
)


@dataclass
class World:
    """A cluster with a load that all its open servers share equally, and a provisioner."""

    #: The load of all servers, in servers.
    load: float = 0.5
    options: FleetOptions = OPTIONS
    servers: dict[str, Member] = field(default_factory=lambda: {"s1": Member(0.0)})
    now: float = 0.0
    version: int = 1
    #: What the provisioner does: ``works``, ``fails``, ``hangs`` or ``lies``: announces servers that do not run.
    provisioner: str = "works"
    #: The servers that it runs.
    running: set[str] = field(default_factory=set[str])
    actions: list[tuple[float, FleetAction]] = field(default_factory=list[tuple[float, FleetAction]])
    short: bool = False

    def __post_init__(self) -> None:
        self.fleet = Fleet(self.options)

    @property
    def members(self) -> dict[str, Member]:
        """The servers with their share of the load."""
        closed = self.fleet.closed
        open_ = [id_ for id_, each in self.servers.items() if each.load_ratio is not None and id_ not in closed]
        share = self.load / max(1, len(open_))
        return {
            id_: Member(
                None if each.load_ratio is None else share if id_ in open_ else 0.0,
                each.url,
                each.agent_gone,
                provisioned=each.provisioned,
                drained=each.drained,
                unused=each.unused or id_ in closed,
            )
            for id_, each in self.servers.items()
        }

    @property
    def view(self) -> FleetView:
        return FleetView(self.members, (), self.short, self.version)

    def run(self, seconds: float) -> list[FleetAction]:
        """Let time pass, a second at a time; return what was asked for."""
        known = len(self.actions)
        for _ in range(int(seconds)):
            self.now += 1
            before = self.load
            for action in self.fleet.look(self.view, self.now):
                self.actions.append((self.now, action))
                self.execute(action)
            assert self.load == before
            self.fleet.check()
        return [action for _, action in self.actions[known:]]

    def execute(self, action: FleetAction) -> None:
        fleet, now = self.fleet, self.now
        match action:
            case StartServer(id_):
                if self.provisioner in ("works", "lies"):
                    if self.provisioner == "works":
                        self.running.add(id_)
                        if id_ in self.servers:
                            self.servers[id_] = replace(self.servers[id_], load_ratio=0.0, agent_gone=False)
                    fleet.on_started(id_, f"redis://{id_}", now)
                elif self.provisioner == "fails":
                    fleet.on_start_failed(id_, "no credit left", now)
            case AddServer(id_, url):
                assert url == f"redis://{id_}"
                self.version += 1
                self.servers[id_] = Member(0.0 if id_ in self.running else None, url, provisioned=True)
            case RemoveServer(id_):
                assert self.servers[id_].provisioned
                assert self.members[id_].unused, "nothing that is used is removed"
                self.version += 1
                del self.servers[id_]
            case FreeServer(id_):
                assert id_ not in self.servers, "a server leaves the plan before it is freed"
                if self.provisioner == "fails":
                    fleet.on_free_failed(id_, "no credit left", now)
                elif self.provisioner != "hangs":
                    self.running.discard(id_)
                    fleet.on_freed(id_)

    def lose_agents(self) -> int:
        """Have all agents of the provisioner die; return how many that are."""
        lost = self.running & self.servers.keys()
        for id_ in lost:
            self.servers[id_] = replace(self.servers[id_], load_ratio=None, agent_gone=True)
        return len(lost)

    def times(self, kind: type[FleetAction]) -> list[float]:
        """When such actions were made."""
        return [at for at, action in self.actions if isinstance(action, kind)]


# Growing.


def test_a_fleet_with_room_stays_as_it_is() -> None:
    world = World(load=0.5)

    assert world.run(1000) == []


def test_a_server_is_added_when_the_load_has_been_high_for_the_delay() -> None:
    world = World(load=0.7)

    assert world.run(3) == []
    assert world.run(2) == [StartServer("auto-1-1"), AddServer("auto-1-1", "redis://auto-1-1")]
    world.run(2)
    assert world.fleet.lives == {"auto-1-1": Life.ACTIVE}


def test_a_short_peak_adds_nothing() -> None:
    world = World(load=0.7)
    world.run(3)
    world.load = 0.5
    world.run(2)
    world.load = 0.7

    assert world.run(3) == []


def test_as_many_servers_are_added_at_once_as_the_load_needs() -> None:
    world = World(load=2.3)
    world.run(10)

    assert len(world.times(StartServer)) == 3, "4 servers have a load ratio of 0.575"
    assert len(set(world.times(StartServer))) == 1


def test_a_server_is_added_when_balancing_alone_cannot_relieve_one() -> None:
    world = World(load=0.5, short=True)
    world.run(4)

    assert len(world.times(StartServer)) == 1


def test_there_are_never_more_servers_than_the_maximum() -> None:
    world = World(load=50)
    world.run(100)

    assert len(world.servers) == OPTIONS.servers_max


def test_the_minimum_is_kept_whatever_the_load_is() -> None:
    world = World(load=0.0, options=FleetOptions(servers_min=3))
    world.run(500)

    assert len(world.servers) == 3


def test_servers_that_have_just_begun_to_be_watched_count_although_they_are_not_measured() -> None:
    options = FleetOptions(servers_min=2, servers_max=3)
    world = World(options=options, servers={"s1": Member(0.0), "s2": Member(None)})

    assert world.run(UNHEARD_S) == []
    world.run(2)
    assert len(world.times(StartServer)) == 1, "s2 is dead"


def test_servers_of_different_sizes_count_by_what_they_can_send() -> None:
    fleet = Fleet(OPTIONS)
    view = FleetView({"large": Member(0.5, capacity=10), "small": Member(0.9, capacity=1)}, version=7)

    assert [fleet.look(view, float(now)) for now in range(10)] == [[]] * 10


# Shrinking.


def grown(load: float = 2.0) -> World:
    """Return a cluster that has grown under load."""
    world = World(load=load)
    world.run(30)
    assert len(world.servers) == 4
    world.actions.clear()
    return world


def test_servers_are_freed_one_after_another_after_low_load() -> None:
    world = grown()
    world.load, began = 0.5, world.now
    world.run(300)

    assert len(world.servers) == 2, "one server alone would have a load ratio of 0.5, above release_ratio"
    assert world.running == set(world.servers) - {"s1"}
    assert len(world.times(FreeServer)) == 2
    first, second = world.times(RemoveServer)
    assert first >= began + OPTIONS.release_delay_s
    assert second >= first + OPTIONS.release_delay_s


def test_low_load_that_does_not_last_frees_nothing() -> None:
    world = grown()
    for _ in range(20):
        world.load = 0.5
        world.run(OPTIONS.release_delay_s - 1)
        world.load = 2.0
        world.run(2)

    assert world.actions == []


def test_a_server_that_is_needed_is_not_removed() -> None:
    fleet = Fleet(OPTIONS)
    view = FleetView({"s1": Member(0.1), "auto-1-1": Member(0.1, provisioned=True)}, version=9)
    asked = [action for now in range(1000) for action in fleet.look(view, float(now))]

    assert fleet.lives == {"auto-1-1": Life.DRAINING}
    assert asked == []


def test_a_release_is_abandoned_when_the_load_rises() -> None:
    fleet = Fleet(OPTIONS)
    low = {"s1": Member(0.1), "auto-1-1": Member(0.1, provisioned=True)}
    for now in range(30):
        fleet.look(FleetView(low), float(now))
    assert fleet.releasing == "auto-1-1"
    high = {"s1": Member(0.5), "auto-1-1": Member(0.15, provisioned=True)}

    assert fleet.look(FleetView(high), 30.0) == []
    assert fleet.lives == {"auto-1-1": Life.ACTIVE}
    assert fleet.counters["releases_abandoned"] == 1


def test_servers_that_no_provisioner_started_are_never_released() -> None:
    world = World(load=0.0, servers={"s1": Member(0.0), "s2": Member(0.0)})

    assert world.run(1000) == []
    assert world.fleet.closed == frozenset()


def test_a_server_that_an_administrator_drains_is_left_to_them() -> None:
    fleet = Fleet(OPTIONS)
    members = {"s1": Member(0.1), "auto-1-1": Member(0.1, provisioned=True)}
    for now in range(30):
        fleet.look(FleetView(members), float(now))
    assert fleet.releasing == "auto-1-1"
    members["auto-1-1"] = Member(0.0, provisioned=True, drained=True, unused=True)

    assert [fleet.look(FleetView(members), float(now)) for now in range(30, 100)] == [[]] * 70


def test_a_server_with_pinned_channels_is_not_released() -> None:
    fleet = Fleet(OPTIONS)
    members = {"s1": Member(0.1), "auto-1-1": Member(0.1, provisioned=True, pinned=True)}
    asked = [fleet.look(FleetView(members), float(now)) for now in range(1000)]

    assert asked == [[]] * 1000
    assert fleet.lives == {"auto-1-1": Life.ACTIVE}


def test_a_release_ends_when_a_channel_is_pinned_there() -> None:
    fleet = Fleet(OPTIONS)
    members = {"s1": Member(0.1), "auto-1-1": Member(0.1, provisioned=True)}
    for now in range(30):
        fleet.look(FleetView(members), float(now))
    assert fleet.releasing == "auto-1-1"
    members["auto-1-1"] = Member(0.0, provisioned=True, pinned=True, unused=True)

    assert fleet.look(FleetView(members), 30.0) == []
    assert fleet.lives == {"auto-1-1": Life.ACTIVE}


def test_a_server_that_has_left_the_plan_is_freed_when_nobody_listens_there_any_more() -> None:
    fleet = Fleet(OPTIONS)
    fleet.look(FleetView({"s1": Member(0.1), "auto-1-1": Member(0.1, provisioned=True)}), 0.0)
    alone = {"s1": Member(0.1)}

    assert fleet.look(FleetView(alone, leaving=["auto-1-1"]), 1.0) == []
    assert fleet.look(FleetView(alone), 2.0) == [FreeServer("auto-1-1")]


def test_a_provisioned_server_that_an_administrator_removes_is_freed() -> None:
    world = grown()
    removed = next(iter(world.running))
    del world.servers[removed]

    assert FreeServer(removed) in world.run(2)


def test_a_dead_server_is_removed_and_freed_once_nothing_needs_it() -> None:
    world = grown()
    dead = min(world.running)
    world.servers[dead] = Member(None, provisioned=True)
    world.run(100)
    assert dead in world.servers, "its channels are not elsewhere yet"
    world.servers[dead] = Member(None, provisioned=True, unused=True)
    world.run(2)

    assert dead not in world.servers
    assert dead not in world.running


def test_a_paused_balancer_begins_nothing() -> None:
    fleet = Fleet(OPTIONS)
    view = FleetView({"s1": Member(0.9)})

    assert all(fleet.look(view, float(now), acts=False) == [] for now in range(100))
    assert fleet.look(view, 100.0) == [], "the delay begins when it goes on"


# Provisioners that do not do what they should.


@pytest.mark.parametrize("fault", ["fails", "hangs", "lies"])
def test_a_provisioner_with_a_fault_is_asked_again_ever_more_slowly(fault: str) -> None:
    world = World(load=0.7, provisioner=fault)
    world.run(1000)
    asked = world.times(StartServer)
    pauses = [later - sooner for sooner, later in itertools.pairwise(asked)]

    assert len(asked) > 10
    assert pauses[:4] == sorted(pauses[:4])
    lost_s = {"fails": 0, "hangs": OPTIONS.answer_timeout_s, "lies": OPTIONS.join_timeout_s}[fault]
    assert max(pauses) <= lost_s + OPTIONS.retry_s_max + 2
    assert list(world.fleet.problems()) == [PROVISIONER]
    assert world.fleet.counters["provisioner_failures"] >= len(asked) - 1
    assert list(world.servers) == ["s1"] or fault == "lies"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("fails", "auto-1-1 cannot be started: no credit left"),
        ("hangs", "auto-1-1 cannot be started: the provisioner has not answered for 30 s"),
        ("lies", "auto-1-1 was started at redis://auto-1-1, but its agent does not report after 15 s"),
    ],
)
def test_the_problem_says_what_the_provisioner_did(fault: str, text: str) -> None:
    world = World(load=0.7, provisioner=fault)
    world.run(35)

    assert world.fleet.problems() == {PROVISIONER: text}


@pytest.mark.parametrize("fault", ["fails", "hangs", "lies"])
def test_all_is_well_again_when_the_provisioner_is(fault: str) -> None:
    world = World(load=0.7, provisioner=fault)
    world.run(100)
    world.provisioner = "works"
    world.run(100)

    assert world.fleet.problems() == {}
    assert len(world.servers) == 2
    assert world.running == set(world.servers) - {"s1"}


def test_a_server_that_cannot_be_freed_is_reported_and_tried_again_while_the_fleet_grows() -> None:
    world = grown()
    world.load, world.provisioner = 0.5, "fails"
    world.run(30)
    (stuck,) = world.fleet.problems()
    assert world.fleet.problems() == {stuck: "it cannot be freed: no credit left"}
    world.load, world.provisioner = 3.0, "works"
    world.run(30)

    assert world.fleet.problems() == {}
    assert stuck not in world.running
    assert len(world.servers) >= 5


def test_a_late_answer_counts_and_starts_no_second_server() -> None:
    world = World(load=0.7, provisioner="hangs")
    world.run(40)
    (id_,) = world.fleet.lives
    world.running.add(id_)
    world.fleet.on_started(id_, f"redis://{id_}", world.now)
    world.run(5)

    assert world.fleet.lives == {id_: Life.ACTIVE}


def test_an_answer_that_nobody_waits_for_frees_the_server() -> None:
    world = World(load=0.5)
    world.running.add("auto-0-1")
    world.fleet.on_started("auto-0-1", "redis://auto-0-1", world.now)

    assert world.run(2) == [FreeServer("auto-0-1")]
    assert world.fleet.lives == {}


def test_a_request_that_may_have_started_a_server_is_called_off_by_freeing_it() -> None:
    world = World(load=0.7, provisioner="fails")
    world.run(6)
    world.load, world.provisioner = 0.3, "works"

    assert world.run(3) == [FreeServer("auto-1-1")]
    assert list(world.fleet.problems()) == [PROVISIONER]
    world.run(OPTIONS.retry_s_max + 5)
    assert world.fleet.problems() == {}, "the provisioner is not needed now"


def test_a_server_that_the_plan_does_not_take_is_freed_and_the_reason_shown() -> None:
    fleet = Fleet(OPTIONS)
    view = FleetView({"s1": Member(0.9)}, version=3)
    for now in range(5):
        fleet.look(view, float(now))
    fleet.on_started("auto-3-1", "redis://wrong", 5.0)
    assert fleet.look(view, 5.0) == [AddServer("auto-3-1", "redis://wrong")]
    fleet.on_refused("auto-3-1", "it is a replica", 5.0)

    assert FreeServer("auto-3-1") in fleet.look(view, 6.0)
    assert fleet.problems()[PROVISIONER] == "auto-3-1 at redis://wrong cannot be added: it is a replica"


def test_why_the_plan_does_not_take_a_server_yet_is_reported() -> None:
    fleet = Fleet(OPTIONS)
    view = FleetView({"s1": Member(0.9)})
    for now in range(5):
        fleet.look(view, float(now))
    fleet.on_started("auto-0-1", "redis://a", 5.0)
    assert fleet.look(view, 5.0) == [AddServer("auto-0-1", "redis://a")]
    fleet.on_delayed("auto-0-1", "another change is under way")
    assert fleet.problems() == {"auto-0-1": "another change is under way"}

    assert fleet.look(view, 7.0) == [AddServer("auto-0-1", "redis://a")]
    fleet.look(view, 5.0 + OPTIONS.join_timeout_s)
    text = "auto-0-1 was started at redis://a, but it is not in the plan after 15 s (another change is under way)"
    assert fleet.problems() == {PROVISIONER: text}


def test_what_a_dead_balancer_has_started_is_used_or_freed() -> None:
    fleet = Fleet(OPTIONS)
    view = FleetView({"s1": Member(0.5), "auto-1-1": Member(0.5, provisioned=True)}, version=3)
    fleet.on_running(["auto-1-1", "auto-2-1", "of-others"], view, 0.0)

    assert fleet.look(view, 0.0) == [FreeServer("auto-2-1")]
    assert fleet.lives["auto-1-1"] is Life.ACTIVE


def test_what_nobody_knows_is_freed_a_few_at_a_time() -> None:
    fleet = Fleet(OPTIONS)
    view = FleetView({"s1": Member(0.5)})
    fleet.on_running([f"auto-9-{number}" for number in range(3 * FREED_AT_ONCE_MAX)], view, 0.0)

    freed = fleet.look(view, 0.0)
    assert len(freed) == FREED_AT_ONCE_MAX
    assert fleet.look(view, 1.0) == []
    fleet.on_freed("auto-9-0")
    assert fleet.look(view, 2.0) == [FreeServer(f"auto-9-{FREED_AT_ONCE_MAX}")]


# Agents that are gone.

NEW = "auto-1-1"
URL = f"redis://{NEW}"
PRESENT = Member(0.3, URL, provisioned=True)
GONE = Member(None, URL, agent_gone=True, provisioned=True)
AGAIN = StartServer(NEW, AGENT_GONE)


@dataclass
class Watched:
    """A fleet that watches one server whose agent comes and goes."""

    fleet: Fleet = field(default_factory=lambda: Fleet(OPTIONS))
    now: float = 0.0

    def see(self, member: Member, seconds: float = 1.0) -> list[tuple[float, FleetAction]]:
        """Let time pass, a second at a time; return when something was asked for that concerns the server, and what."""
        asked: list[tuple[float, FleetAction]] = []
        for _ in range(int(seconds)):
            self.now += 1.0
            actions = self.fleet.look(FleetView({"s1": Member(0.2), NEW: member}), self.now)
            asked += [(self.now, action) for action in actions if action.id == NEW]
            self.fleet.check()
        return asked


def agent_lost(member: Member = GONE) -> Watched:
    """Return a fleet that has just asked for a server again."""
    watched = Watched()
    watched.see(PRESENT)
    assert watched.see(member, AGENT_GONE_S) == []
    assert [action for _, action in watched.see(member)] == [AGAIN]
    return watched


def test_a_server_whose_agent_is_gone_is_started_again_once() -> None:
    watched = agent_lost()
    assert watched.fleet.started_again == {NEW}
    assert watched.see(GONE, OPTIONS.answer_timeout_s - 2) == [], "the provisioner may need that long"
    watched.fleet.on_started(NEW, URL, watched.now)
    assert watched.see(GONE, OPTIONS.join_timeout_s - 2) == [], "the agent may need that long"
    assert watched.see(PRESENT, 100) == []
    assert watched.fleet.started_again == frozenset()
    assert watched.fleet.problems() == {}
    assert watched.fleet.lives == {NEW: Life.ACTIVE}
    assert watched.fleet.counters == {"agents_started_again": 1}


def test_an_agent_that_comes_back_in_time_is_not_started() -> None:
    watched = Watched()
    watched.see(PRESENT)
    for _ in range(10):
        assert watched.see(GONE, AGENT_GONE_S) == []
        assert watched.see(PRESENT) == []


@pytest.mark.parametrize("member", [Member(None, "redis://s2", agent_gone=True), Member(None, URL, provisioned=True)])
def test_no_other_server_is_started_again(member: Member) -> None:
    """The provisioner has not started it, or it does not answer: it may be dead."""
    watched = Watched()
    watched.see(replace(member, load_ratio=0.5, agent_gone=False))

    assert watched.see(member, 100) == []


def test_a_server_that_is_being_emptied_needs_its_agent() -> None:
    watched = Watched()
    watched.see(replace(PRESENT, releasing=True))
    assert watched.fleet.lives == {NEW: Life.DRAINING}

    assert [action for _, action in watched.see(GONE, AGENT_GONE_S + 1)] == [AGAIN]


def test_a_server_that_its_operator_has_emptied_needs_no_agent() -> None:
    agent_lost(replace(GONE, drained=True))
    watched = Watched()
    watched.see(PRESENT)

    assert watched.see(replace(GONE, drained=True, unused=True), 100) == []


@pytest.mark.parametrize(
    ("fault", "lost_s", "text"),
    [
        ("fails", 0, "no credit left"),
        ("hangs", OPTIONS.answer_timeout_s, "the provisioner has not answered for 30 s"),
        ("lies", OPTIONS.join_timeout_s, "the provisioner has started it, but it does not report after 15 s"),
        ("elsewhere", 0, f"the provisioner has {NEW} at redis://other, and the plan has it at {URL}"),
    ],
)
def test_an_agent_that_cannot_be_started_is_reported_and_tried_ever_more_rarely(
    fault: str, lost_s: float, text: str
) -> None:
    watched = agent_lost()
    asked = [watched.now]
    while len(asked) < 7:
        answers = {
            "fails": lambda: watched.fleet.on_start_failed(NEW, "no credit left", watched.now),
            "lies": lambda: watched.fleet.on_started(NEW, URL, watched.now),
            "elsewhere": lambda: watched.fleet.on_started(NEW, "redis://other", watched.now),
        }
        answers.get(fault, lambda: None)()
        while not (again := watched.see(GONE)):
            pass
        asked += [at for at, _ in again]
    pauses = [later - sooner for sooner, later in itertools.pairwise(asked)]

    assert pauses == [lost_s + pause for pause in (2, 4, 8, 16, 16, 16)]
    assert watched.fleet.problems() == {NEW: f"its agent is gone, and cannot be started again: {text}"}
    assert watched.fleet.counters["provisioner_failures"] == 6
    watched.see(PRESENT)
    assert watched.fleet.problems() == {}


def test_an_agent_that_dies_again_and_again_is_started_ever_more_rarely() -> None:
    watched = agent_lost()
    asked = [watched.now]
    while len(asked) < 6:
        watched.fleet.on_started(NEW, URL, watched.now)
        watched.see(PRESENT)
        while not (again := watched.see(GONE)):
            pass
        asked += [at for at, _ in again]
    assert [later - sooner for sooner, later in itertools.pairwise(asked)] == [4, 4, 8, 16, 16]
    watched.fleet.on_started(NEW, URL, watched.now)
    watched.see(PRESENT, OPTIONS.retry_s_max + 1)

    assert watched.see(GONE, AGENT_GONE_S + 1) == [(watched.now, AGAIN)], "it had become steady"


def test_nothing_is_freed_while_it_is_being_started() -> None:
    watched = agent_lost()
    alone = FleetView({"s1": Member(0.5)})
    assert [watched.fleet.look(alone, watched.now + second) for second in range(1, 20)] == [[]] * 19
    watched.fleet.on_started(NEW, URL, watched.now + 20)

    assert watched.fleet.look(alone, watched.now + 20) == [FreeServer(NEW)]
    assert watched.fleet.started_again == frozenset()


def test_a_provisioner_that_does_not_answer_keeps_no_server_from_being_freed_for_long() -> None:
    watched = agent_lost()
    alone = FleetView({"s1": Member(0.5)})
    until = watched.now + OPTIONS.answer_timeout_s
    watched.fleet.look(alone, until - 1)

    assert watched.fleet.look(alone, until) == [FreeServer(NEW)]
    assert watched.fleet.problems() == {}


def test_a_paused_balancer_starts_no_agent() -> None:
    watched = Watched()
    watched.see(PRESENT)
    view = FleetView({"s1": Member(0.5), NEW: GONE})

    assert [watched.fleet.look(view, float(now), acts=False) for now in range(2, 50)] == [[]] * 48
    assert watched.fleet.look(view, 50.0) == [AGAIN]


def test_another_balancer_looks_after_the_agents_too() -> None:
    watched = Watched()

    assert [action for _, action in watched.see(GONE, AGENT_GONE_S + 1)] == [AGAIN]
    watched.fleet.begin_term()
    watched.fleet.on_start_failed(NEW, "no credit left", watched.now)
    assert [action for _, action in watched.see(GONE, AGENT_GONE_S + 1)] == [AGAIN]


# Server-seconds.


def test_server_seconds_count_all_servers_also_those_that_come_and_go() -> None:
    world = World(load=0.5, servers={"s1": Member(0.0), "s2": Member(0.0)})
    world.run(101)
    assert world.fleet.server_seconds == 200

    world.load, world.provisioner = 1.5, "hangs"
    world.run(100)
    assert world.fleet.server_seconds == pytest.approx(200 + 100 * 3, abs=10)


# Settings.


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"servers_min": 3, "servers_max": 2}, r"servers_max must be at least servers_min \(3\), not 2"),
        ({"release_ratio": 0.6}, r"release_ratio must be below grow_ratio \(0.6\), not 0.6"),
        ({"retry_s": 9, "retry_s_max": 3}, r"retry_s_max must be at least retry_s \(9\), not 3"),
        ({"servers_min": 0}, "servers_min must be a number from 1, not 0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(values: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FleetOptions(**values)


# All of it.


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40),
            st.floats(0, 5),
            st.sampled_from(["works", "fails", "hangs", "lies"]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=15,
    )
)
def test_whatever_happens_the_fleet_stays_within_its_bounds_and_comes_to_rest(
    steps: list[tuple[int, float, str, bool, bool]],
) -> None:
    world, lost = World(), 0
    for seconds, world.load, world.provisioner, world.short, agents_die in steps:
        lost += world.lose_agents() if agents_die else 0
        world.run(seconds)
        bound = OPTIONS.servers_max + 1 + lost
        assert len(world.servers) <= bound, "but for one that has lied and is being removed, and those that come back"
        assert "s1" in world.servers
    world.load, world.provisioner, world.short = 1.0, "works", False
    world.run(600)

    assert world.fleet.problems() == {}
    assert world.running == set(world.servers) - {"s1"}, "nothing runs that is not used"
    assert 2 <= len(world.servers) <= 3
    assert world.run(200) == []
