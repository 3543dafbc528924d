"""Entries that the plan need not have are folded: it stays small however many channels were ever moved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import PlanError
from dynamoth.names import PLAN_KEY
from dynamoth.plan.compatibility import CompatibilityRule
from dynamoth.plan.plan import Phase, Plan, single
from dynamoth.plan.slots import SLOTS, is_slot, slot_of
from dynamoth_balancer.decide.tidy import LOOKS_MAX, SILENT_MAX, SilentChannels
from dynamoth_balancer.install.book import merge_entries
from dynamoth_balancer.install.folding import Folding, is_folded
from dynamoth_balancer.install.installer import FOLDED_RATIO_MIN
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import BALANCER, Balancer, SimCluster, started, stored_hash
from tests.core.strategies import PLAN_0

OPTIONS = BalancerOptions(
    load_ratio_high=1000.0,
    silent_s=5.0,
    fold_interval_s=1.0,
    plain_rest_s=1.0,
    averaging_s=3.0,
    join_s=0.0,
    wait_s=1.0,
    channel_rest_s=1.0,
)
C = b"news"
SLOT = slot_of(C)
MANY = 1000


def moved(plan: Plan, to: str, *names: bytes) -> Plan:
    """Return the plan after names have moved to a server, settled."""
    changes = {name: single(to) for name in names if plan.entry(name).route.assignment != single(to)}
    return plan.begin(changes).activate(changes).settle(changes)


def channels_of(plan: Plan) -> set[bytes]:
    return {name for name in plan.entries if not is_slot(name)}


# Plans.


def test_a_channel_where_its_slot_is_folds_and_its_epoch_goes_up() -> None:
    away = next(id_ for id_ in PLAN_0.base if id_ != PLAN_0.ring.home(C))
    elsewhere = moved(PLAN_0, away, C)
    assert not elsewhere.folds(C) and not PLAN_0.folds(C)
    with pytest.raises(PlanError, match="not where its slot is"):
        elsewhere.fold([C])
    plan = moved(elsewhere, away, SLOT)
    assert not plan.begin({SLOT: single(PLAN_0.ring.home(C))}).folds(C), "its slot is about to leave"
    for before in (plan, moved(elsewhere, PLAN_0.ring.home(C), C)):
        folded = before.fold([C])
        assert folded.version == before.version + 1 and C not in folded.entries
        assert folded.entry(C).route.assignment == before.entry(C).route.assignment
        assert folded.entry(C).route.epoch > before.entry(C).route.epoch
        assert folded.entry(C).may_follow(before.entry(C)) and folded.entry(C).phase is Phase.SETTLED


steps = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"c", slot_of(b"a"), slot_of(b"b")]), st.sampled_from(PLAN_0.base)),
    max_size=12,
)


@given(steps, st.integers(0, 12), st.integers(0, 12))
def test_whatever_was_moved_no_epoch_goes_back_and_no_old_copy_revives_an_entry(
    moves: list[tuple[bytes, str]], fold_every: int, old_at: int
) -> None:
    plan = old = PLAN_0
    folding = Folding(plan)
    for number, (name, server) in enumerate(moves):
        if number == old_at:
            old = plan
        before, plan = plan, moved(plan, server, name) if plan.entry(name).route.assignment != single(server) else plan
        folding.update(plan, [name] if name in plan.entries else [])
        if fold_every and number % fold_every == 0 and folding.ready:
            ready = list(folding.ready)
            plan = plan.fold(ready)
            folding.update(plan, [*ready, *map(slot_of, ready)])
        for channel in (b"a", b"b", b"c"):
            assert plan.entry(channel).route.epoch >= before.entry(channel).route.epoch
            follows = channel not in (name,) and before.slot_above(channel) != name
            assert not follows or plan.entry(channel).route.assignment == before.entry(channel).route.assignment
    assert folding.ready == {name for name in plan.entries if plan.folds(name)}
    assert merge_entries(plan.entries, old.entries) == plan.entries


def test_a_channel_with_a_rule_of_its_own_does_not_fold_until_the_rule_goes() -> None:
    away = next(id_ for id_ in PLAN_0.base if id_ != PLAN_0.ring.home(C))
    plan = moved(moved(PLAN_0, away, C), away, SLOT)
    folding = Folding(plan)
    assert folding.ready == {C}
    ruled = plan.with_compatibility([CompatibilityRule(C, away)])
    folding.update(ruled, ())
    assert not folding.ready and not ruled.folds(C)
    folding.update(ruled.with_compatibility([]), ())
    assert folding.ready == {C}


def test_what_another_copy_has_was_folded_only_if_the_slot_has_a_later_epoch() -> None:
    away = next(id_ for id_ in PLAN_0.base if id_ != PLAN_0.ring.home(C))
    newer = moved(PLAN_0, away, C)
    assert not is_folded(C, newer.entries[C], PLAN_0.entries), "this copy is older: it has not heard of the move"
    assert not is_folded(C, newer.entries[C], newer.entries)
    folded = moved(newer, away, SLOT).fold([C])
    assert is_folded(C, newer.entries[C], folded.entries)
    assert not is_folded(SLOT, folded.entries[SLOT], {})


# A balancer.


def with_entries(cluster: SimCluster, plan: Plan) -> None:
    """Store a plan at every server, as a predecessor would."""
    for server in cluster.servers.values():
        fields = (part for field in stored_hash(plan, server.run_id).items() for part in field)
        server.execute(BALANCER, b"HSET", PLAN_KEY, *fields)


def many(cluster: SimCluster, balancer: Balancer, channels: Iterable[bytes]) -> Balancer:
    """Replace the balancer by one whose predecessor has moved channels away from home."""
    channels = list(channels)
    plan = balancer.plan
    for server in cluster.servers:
        plan = moved(plan, server, *(c for c in channels if plan.ring.home(c) != server))
    cluster.kill(balancer)
    with_entries(cluster, plan)
    successor = cluster.start(OPTIONS)
    cluster.run_until(lambda: successor.machine.plan is not None and len(successor.plan.entries) >= len(channels))
    return successor


def test_channels_that_were_moved_and_went_silent_do_not_stay_in_the_plan() -> None:
    cluster, first = started(3, OPTIONS)
    channels = [b"silent-%d" % number for number in range(MANY)]
    balancer = many(cluster, first, [b"busy", *channels])
    cluster.follow[b"busy"] = 10
    busy_at = balancer.plan.entries[b"busy"].route.assignment
    cluster.run_until(lambda: len(channels_of(balancer.plan)) < MANY / 10, timeout_s=200)
    cluster.run_until(lambda: cluster.is_quiet(balancer))
    assert balancer.plan.entries[b"busy"].route.assignment == busy_at, "reports name it"
    assert len(balancer.plan.entries) <= SLOTS * (1 + FOLDED_RATIO_MIN) + 1
    for server in cluster.servers.values():
        assert server.plan is not None and dict(server.plan.entries) == dict(balancer.plan.entries)
    assert {move.goal for decided in balancer.decided for move in decided.decision.moves} == {"tidy"}


def test_pinned_channels_and_those_that_have_moved_just_now_keep_their_entries() -> None:
    options = replace(OPTIONS, plain_rest_s=4.0, silent_s=1000.0)
    cluster, balancer = started(2, options)
    pinned, free = balancer.at_home("s1", 2)
    for channel in (pinned, free):
        assert cluster.ask("move", {"channel": channel, "to": "s2"}).error is None
        cluster.run_until(lambda: cluster.is_quiet(balancer))
        assert cluster.ask("move", {"channel": channel, "to": "s1"}).error is None
    assert cluster.ask("pin", {"channel": pinned, "to": "s1"}).error is None
    cluster.run_until(lambda: cluster.is_quiet(balancer))
    cluster.run(2.0)
    assert channels_of(balancer.plan) == {pinned, free}
    cluster.run(6.0)
    assert channels_of(balancer.plan) == {pinned}
    assert balancer.home(free) == "s1" and cluster.is_quiet(balancer)


def test_a_copy_that_was_away_does_not_bring_a_folded_channel_back() -> None:
    cluster, balancer = started(3, replace(OPTIONS, silent_s=1000.0))
    [channel] = balancer.at_home("s1")
    for server in ("s2", "s1"):
        assert cluster.ask("move", {"channel": channel, "to": server}).error is None
        cluster.run_until(lambda: cluster.is_quiet(balancer))
    cluster.cut(balancer, "s3")
    cluster.run_until(lambda: not channels_of(balancer.plan))
    old = cluster.servers["s3"].plan
    assert old is not None and channel in old.entries
    assert cluster.ask("move", {"channel": slot_of(channel), "to": "s2"}).error is None
    cluster.heal(balancer, "s3")
    cluster.run_until(lambda: cluster.is_quiet(balancer))
    assert balancer.home(channel) == "s2" and channel not in balancer.plan.entries


def test_a_takeover_does_not_bring_a_folded_channel_back() -> None:
    cluster, balancer = started(3, replace(OPTIONS, silent_s=1000.0))
    [channel] = balancer.at_home("s1")
    for server in ("s2", "s1"):
        assert cluster.ask("move", {"channel": channel, "to": server}).error is None
        cluster.run_until(lambda: cluster.is_quiet(balancer))
    cluster.cut(balancer, "s3")
    cluster.run_until(lambda: not channels_of(balancer.plan))
    successor = cluster.succeed(balancer)
    cluster.run_until(lambda: cluster.is_quiet(successor))
    assert channel not in successor.plan.entries and successor.plan.entry(channel).route.epoch > 0
    stored = cluster.servers["s3"].plan
    assert stored is not None and channel not in stored.entries


# What is silent.


def test_silent_channels_are_found_in_turns_and_their_number_is_bounded() -> None:
    away = PLAN_0.base[0]
    channels = [b"%d" % number for number in range(3 * LOOKS_MAX) if PLAN_0.ring.home(b"%d" % number) != away]
    plan = moved(PLAN_0, away, *channels)
    silent = SilentChannels(10.0)
    for _ in range(5):
        silent.look(plan, lambda server, channel: channel == channels[0], 0.0)
    assert silent.returning(plan, 5.0) == []
    found = silent.returning(plan, 10.0)
    assert channels[0] not in {stray.rate.channel for stray in found} and len(found) == 1000 < SILENT_MAX
    assert all(
        stray.present == single(away) and stray.pin == PLAN_0.entry(stray.rate.channel).route.assignment
        for stray in found
    )
