"""Servers that are being released at low load: what leaves them, when that waits, and what nobody puts there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.plan.plan import Assignment, Mode, single
from dynamoth.plan.slots import slot_name
from dynamoth_balancer.decide.cluster import ChannelRate, Cluster, Decision, ServerLoad, decide
from dynamoth_balancer.decide.drain import Drain, DrainSlots
from dynamoth_balancer.decide.release import Release, ReleaseSlots
from dynamoth_balancer.decide.relieve import Relieve
from dynamoth_balancer.decide.replicate import Replicate
from dynamoth_balancer.decide.spread import Spread
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.planning import World, fill, replicated
from tests.balancer.traffic import CAPACITY

LOW = "the load is low, and s3 is not needed"


def world(
    places: dict[str, tuple[Assignment, float]], releasing: str = "s3", options: BalancerOptions | None = None
) -> World:
    """Make a world of three alike servers, out of assignment and load ratio by channel."""
    return World(
        {f"s{number}": CAPACITY for number in range(1, 4)},
        {channel.encode(): place for channel, (place, _) in places.items()},
        {channel.encode(): ratio * CAPACITY for channel, (_, ratio) in places.items()},
        options=options or BalancerOptions(),
        releasing=frozenset({releasing} if releasing else ()),
    )


def planned(cluster: World) -> Decision:
    return cluster.decide(Replicate(), Relieve(), Release(), Drain(), ReleaseSlots(), DrainSlots(), Spread())


def test_everything_leaves_a_server_that_is_released() -> None:
    s1, s3 = single("s1"), single("s3")
    cluster = world({"a": (s1, 0.2), "b": (s3, 0.1), "idle": (s3, 0.0)})
    decision = planned(cluster)

    assert [(move.channel, move.after, move.goal) for move in decision.moves] == [
        (b"b", single("s2"), "release"),
        (b"idle", single("s2"), "release"),
    ]
    assert {move.reason for move in decision.moves} == {LOW}
    assert not decision.findings, "that something stays is no problem"


def test_replicas_leave_as_well() -> None:
    cluster = world({"r": (replicated(Mode.ALL_PUBLISHERS, 1, 3), 0.2)})
    (move,) = cluster.decide(Release(), Replicate()).moves

    assert move.after == replicated(Mode.ALL_PUBLISHERS, 1, 2)
    assert move.goal == "release"


def test_slots_leave_as_well() -> None:
    slots = [slot_name(number) for number in range(3)]
    loads = [ChannelRate(0.01 * CAPACITY, slot) for slot in slots]
    cluster = Cluster(
        {id_: ServerLoad(id_, 0.1 * CAPACITY, CAPACITY) for id_ in ("s1", "s2")},
        lambda _: [],
        lambda channel, _: channel in slots,
        BalancerOptions(),
        slots={"s1": (), "s2": loads},
        releasing={"s2": loads},
    )
    decision = decide([Release(), ReleaseSlots(), Spread()], cluster)

    assert {move.channel: move.after for move in decision.moves} == dict.fromkeys(slots, single("s1"))


def test_nothing_leaves_a_server_that_is_not_released() -> None:
    assert not planned(world({"b": (single("s3"), 0.1)}, releasing="")).moves


def test_overloaded_servers_come_first() -> None:
    s1 = single("s1")
    decision = planned(world({"a": (s1, 0.5), "b": (s1, 0.4), "c": (single("s3"), 0.1)}))

    assert {move.goal for move in decision.moves} == {"relieve"}
    assert all(move.after == single("s2") for move in decision.moves)


def test_what_would_fill_another_server_too_much_stays() -> None:
    cluster = world({"a": (single("s1"), 0.5), "b": (single("s2"), 0.5), "c": (single("s3"), 0.2)})
    decision = planned(cluster)

    assert not decision.moves
    assert not decision.findings


def test_it_goes_step_by_step() -> None:
    options = BalancerOptions(moves_per_server_max=2)
    cluster = world({f"c{number}": (single("s3"), 0.01) for number in range(5)}, options=options)
    sizes: list[int] = []
    while decision := planned(cluster).moves:
        sizes.append(len(decision))
        cluster.carry_out(Decision(tuple(decision)))

    assert sizes == [2, 2, 1]
    assert not cluster.rates("s3")


def test_no_goal_puts_a_channel_there() -> None:
    cluster = world({"a": (single("s1"), 0.1), "b": (single("s2"), 0.1)})

    assert not cluster.decide(Release(), fill("s3")).moves


def test_replication_does_not_use_it() -> None:
    cluster = world({"hot": (single("s1"), 0.7)})
    cluster.hot = frozenset({b"hot"})
    (move,) = planned(cluster).moves

    assert move.goal == "replicate"
    assert set(move.after.servers) == {"s1", "s2"}


@given(st.lists(st.tuples(st.sampled_from(("s1", "s2", "s3")), st.floats(0.0, 0.1)), max_size=20))
def test_with_room_elsewhere_a_server_is_empty_in_the_end_and_nothing_comes_back(
    channels: list[tuple[str, float]],
) -> None:
    cluster = world({f"c{number}": (single(server), ratio) for number, (server, ratio) in enumerate(channels)})
    room = sum(ratio for _, ratio in channels) <= 0.9
    for _ in range(20):
        decision = planned(cluster)
        assert all("s3" not in move.after.servers for move in decision.moves)
        if not decision.moves:
            break
        cluster.carry_out(decision)
    else:
        pytest.fail("20 plans under constant load")
    assert not room or not cluster.rates("s3")
    assert all(ratio <= 0.8 for server, ratio in cluster.ratios().items() if server != "s3") or not room
