"""Slots that move in steps: to servers that have too few, and away from servers that are to leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.plan.plan import single
from dynamoth.plan.slots import SLOTS, slot_name
from dynamoth_balancer.decide.cluster import ChannelRate, Cluster, Decision, Goal, ServerLoad, decide
from dynamoth_balancer.decide.drain import DrainSlots
from dynamoth_balancer.decide.relieve import STUCK, Relieve, RelieveSlots
from dynamoth_balancer.decide.spread import BEGIN_RATIO, END_RATIO, Spread
from dynamoth_balancer.install.leadership import Stage
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import started
from tests.balancer.traffic import CAPACITY

OPTIONS = BalancerOptions()


class Slots:
    """The slots of some servers, each with its load ratio; moves are carried out at once."""

    def __init__(
        self,
        sizes: Mapping[str, float],
        places: Iterable[str],
        slot_ratio: float = 0.0,
        subscriptions: float = 0.0,
        draining: Iterable[str] = (),
    ) -> None:
        self.sizes = sizes
        self.places = {slot_name(slot): server for slot, server in enumerate(places)}
        self.load = slot_ratio * CAPACITY
        self.subscriptions = subscriptions
        self.draining = frozenset(draining)

    def cluster(self) -> Cluster:
        slots: dict[str, list[ChannelRate]] = {server: [] for server in self.sizes}
        for slot, server in self.places.items():
            slots[server].append(ChannelRate(self.load, slot))
        subscriptions = dict.fromkeys(self.places, self.subscriptions)
        return Cluster(
            {id_: ServerLoad(id_, self.load * len(slots[id_]), size * CAPACITY) for id_, size in self.sizes.items()},
            lambda server: [],
            lambda slot, server: self.places[slot] == server,
            OPTIONS,
            slots=slots,
            draining={server: slots[server] for server in self.draining},
            slot_subscriptions=lambda _: subscriptions,
        )

    def step(self, *goals: Goal) -> Decision:
        decision = decide(goals, self.cluster())
        for move in decision.moves:
            assert self.places[move.channel] == move.source
            self.places[move.channel] = move.target
        return decision

    def settle(self, *goals: Goal) -> set[bytes]:
        """Carry out all steps; return the slots that moved, each once."""
        moved: set[bytes] = set()
        for _ in range(SLOTS):
            moves = self.step(*goals).moves
            assert moved.isdisjoint(move.channel for move in moves), "no slot moves twice"
            moved |= {move.channel for move in moves}
            if not moves:
                return moved
        raise AssertionError("steps without end")

    def count(self) -> Counter[str]:
        return Counter(self.places.values())


def over(*servers: str) -> list[str]:
    return [servers[slot % len(servers)] for slot in range(SLOTS)]


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_a_new_server_takes_its_share_and_no_other_slot_moves(number: int) -> None:
    old = [f"s{each}" for each in range(number)]
    slots = Slots(dict.fromkeys([*old, "new"], 1.0), over(*old))
    moved = slots.settle(Spread())
    assert {slots.places[slot] for slot in moved} == {"new"}
    assert 0.95 * SLOTS / (number + 1) <= len(moved) <= SLOTS / (number + 1)
    assert max(slots.count()[server] for server in old) <= SLOTS / (number + 1) + number


def test_shares_follow_the_sizes_of_servers() -> None:
    slots = Slots({"s1": 1.0, "s2": 1.0, "new": 2.0}, over("s1", "s2"))
    slots.settle(Spread())
    assert slots.count()["new"] == pytest.approx(SLOTS / 2, rel=0.05)


def test_a_cluster_at_rest_stays_as_it_is() -> None:
    few = int(BEGIN_RATIO * SLOTS / 2) + 1
    slots = Slots({"s1": 1.0, "s2": 1.0}, ["s2"] * few + ["s1"] * (SLOTS - few))
    assert slots.settle(Spread()) == set()


@given(st.integers(2, 6), st.integers(1, 5), st.data())
def test_servers_that_leave_give_all_and_nothing_else_moves(number: int, leaving: int, data: st.DataObject) -> None:
    servers = [f"s{each}" for each in range(number)]
    draining = servers[: min(leaving, number - 1)]
    places = over(*servers, *data.draw(st.lists(st.sampled_from(servers), max_size=5)))
    slots = Slots(dict.fromkeys(servers, 1.0), places, draining=draining)
    there = {slot for slot, server in slots.places.items() if server in draining}
    assert slots.settle(DrainSlots()) == there
    assert not set(draining) & slots.count().keys()


def test_a_step_is_bounded_by_the_subscriptions_of_its_slots() -> None:
    slots = Slots({"s1": 1.0, "s2": 1.0, "s3": 1.0}, over("s1", "s2", "s3"), subscriptions=100.0, draining=["s1"])
    first = slots.step(DrainSlots())
    assert len(first.moves) == OPTIONS.slot_subscriptions_max // 100 and first.findings == ()
    slots.settle(DrainSlots())
    assert slots.count()["s1"] == 0


def test_a_step_is_bounded_by_the_load_of_its_slots() -> None:
    ratio = 0.3 / (SLOTS / 3)
    slots = Slots({"s1": 1.0, "s2": 1.0, "s3": 1.0}, over("s1", "s2", "s3"), slot_ratio=ratio, draining=["s1"])
    assert len(slots.step(DrainSlots()).moves) * ratio == pytest.approx(OPTIONS.slot_load_ratio_max, rel=0.01)


def test_a_slot_that_is_larger_than_a_step_moves_alone() -> None:
    slots = Slots({"s1": 1.0, "s2": 1.0}, ["s1", "s1"], slot_ratio=0.2, subscriptions=9000.0, draining=["s1"])
    assert [len(slots.step(DrainSlots()).moves) for _ in range(3)] == [1, 1, 0]


def test_slots_that_would_overload_every_other_server_stay_and_that_is_shown() -> None:
    slots = Slots({"s1": 1.0, "s2": 1.0}, ["s1", "s2"], slot_ratio=0.5, draining=["s1"])
    decision = slots.step(DrainSlots())
    assert decision.moves == () and "1 slots are in transition, or would overload" in decision.findings[0].reason
    alone = Slots({"s1": 1.0}, ["s1"], draining=["s1"])
    assert "there is no other server" in alone.step(DrainSlots()).findings[0].reason


def test_a_server_that_many_small_channels_overload_gives_slots_until_it_is_safe() -> None:
    sizes = {"s1": 1.0, "s2": 1.0, "s3": 1.0}
    slots = Slots(sizes, over(*["s1"] * 6, "s2", "s3"), slot_ratio=1.2 / SLOTS)  # 0.9, 0.15 and 0.15
    goals = Relieve(), RelieveSlots()
    first = slots.step(*goals)
    assert {(move.source, move.target, move.goal) for move in first.moves} <= {
        ("s1", id_, "relieve") for id_ in ("s2", "s3")
    }
    assert len(first.moves) * 1.2 / SLOTS == pytest.approx(OPTIONS.slot_load_ratio_max, rel=0.01)
    assert not first.findings, "slots can leave"
    for _ in range(3):  # also below the ratio at which it began
        slots.step(*goals)
    assert slots.count()["s1"] * 1.2 / SLOTS == pytest.approx(OPTIONS.load_ratio_safe, abs=0.001)
    assert not slots.step(*goals).moves


def test_slots_stay_where_no_other_server_has_room() -> None:
    slots = Slots({"s1": 1.0, "s2": 1.0}, over("s1", "s2"), slot_ratio=1.8 / SLOTS)
    decision = slots.step(Relieve(), RelieveSlots())
    assert not decision.moves and {finding.reason for finding in decision.findings} == {STUCK}


def test_channels_come_before_slots() -> None:
    slots = Slots({"s1": 1.0, "s2": 1.0}, ["s1"], slot_ratio=0.1)
    busy = [ChannelRate(0.3 * CAPACITY, b"a"), ChannelRate(0.5 * CAPACITY, b"b")]
    cluster = slots.cluster()
    cluster.servers["s1"].outgoing_bytes_per_s = 0.9 * CAPACITY

    def every(channel: bytes, server: str) -> bool:
        return server == "s1" and channel in (b"a", b"b")

    cluster.channels = {"s1": busy, "s2": []}.__getitem__
    cluster.movable = every
    assert [move.channel for move in decide([Relieve(), RelieveSlots()], cluster).moves] == [b"b"]


def test_a_server_that_cannot_take_part_for_a_while_gets_the_rest_of_its_share_later() -> None:
    slots, spread = Slots({"s1": 1.0, "s2": 1.0}, ["s1"] * SLOTS), Spread()
    assert slots.step(spread).moves
    while slots.count()["s2"] < 2 * BEGIN_RATIO * SLOTS / 2:
        assert slots.step(spread).moves, "it gets more"
    away = slots.cluster()
    del away.servers["s2"]
    assert not decide([spread], away).moves
    slots.settle(spread)
    assert slots.count()["s2"] > END_RATIO * SLOTS / 2 - 1


def test_steps_follow_each_other_without_the_pause_between_two_plans() -> None:
    options = BalancerOptions(averaging_s=3.0, transitions_max=100, join_s=0.0, wait_s=1000.0)
    cluster, before = started(3, replace(options, draining=frozenset()))
    balancer = cluster.succeed(before, replace(options, draining=frozenset({"s1"})))
    cluster.run_until(lambda: balancer.machine.stage is Stage.LEADING)
    cluster.run_until(lambda: balancer.machine.overview.slots_left("s1") == 0, timeout_s=300)
    assert len(balancer.decided) > 10, "in steps of 100"
    assert all(balancer.plan.entry(slot_name(slot)).route.assignment != single("s1") for slot in range(SLOTS))
