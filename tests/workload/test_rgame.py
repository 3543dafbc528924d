"""RGame: the ways of the players, and the load that they make."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth_sim.load.rgame import (
    PAYLOAD_BYTES_MIN,
    UPDATES_PER_STEP_MAX,
    GameAction,
    GameWorld,
    Join,
    Leave,
    Player,
    Tile,
    Update,
    read_update,
)

WORLD = GameWorld(tiles_per_side=4, speed_m_per_s=20.0)


def player(number: int = 1, world: GameWorld = WORLD, seed: int = 7, start_s: float = 100.0) -> Player:
    return Player(number, world, Random(f"{seed}:{number}"), start_s)


def play(of: Player, updates: int) -> list[GameAction]:
    actions: list[GameAction] = []
    for _ in range(updates):
        actions += of.step(of.deadline())
    return actions


def updates_of(actions: list[GameAction]) -> list[Update]:
    return [action for action in actions if isinstance(action, Update)]


def test_the_same_seed_gives_the_same_way_and_another_seed_another() -> None:
    assert play(player(), 300) == play(player(), 300)
    assert play(player(), 300) != play(player(seed=8), 300)
    assert play(player(), 300) != play(player(number=2), 300)


def test_nothing_is_due_before_the_deadline() -> None:
    someone = player()
    assert 100.0 <= someone.deadline() < 100.0 + 1 / 3
    assert someone.step(99.0) == []
    assert someone.step(someone.deadline() - 0.01) == []
    first = someone.step(someone.deadline())
    assert [type(action) for action in first] == [Join, Update]
    assert someone.step(someone.deadline() - 0.01) == []


def test_three_updates_per_second() -> None:
    someone = player()
    actions = [action for tenth in range(601) for action in someone.step(100.0 + tenth / 10)]
    assert len(updates_of(actions)) in (180, 181)
    assert someone.skipped == 0


@given(seed=st.integers(0, 1000), delays=st.lists(st.floats(0, 0.9), min_size=1, max_size=200))
def test_the_way_does_not_depend_on_punctuality(seed: int, delays: list[float]) -> None:
    late = player(seed=seed)
    actions: list[GameAction] = []
    for delay_s in delays:
        actions += late.step(late.deadline() + delay_s)
    assert late.skipped == 0
    assert actions == play(player(seed=seed), len(updates_of(actions)))


def test_who_is_very_late_makes_up_for_one_second_and_counts_the_rest() -> None:
    someone = player()
    actions = someone.step(someone.deadline() + 10.0)
    assert len(updates_of(actions)) == UPDATES_PER_STEP_MAX
    assert someone.skipped == 31 - UPDATES_PER_STEP_MAX
    assert next(update.sequence for update in updates_of(actions)) == 1, "what was skipped has no number"


@given(seed=st.integers(0, 10_000), hot_ratio=st.sampled_from((0.0, 0.5, 1.0)))
def test_a_player_is_subscribed_to_exactly_the_tile_it_publishes_to(seed: int, hot_ratio: float) -> None:
    world = GameWorld(tiles_per_side=4, speed_m_per_s=20.0, hot_ratio=hot_ratio, hot_spot_period_s=20.0)
    someone = player(world=world, seed=seed)
    joined: list[bytes] = []
    counts: Counter[bytes] = Counter()
    for action in play(someone, 300):
        match action:
            case Join(channel):
                assert channel not in joined
                joined.append(channel)
            case Leave(channel):
                assert joined[0] == channel, "it leaves the old tile, after it has joined the new one"
                joined.pop(0)
            case Update(channel, number, sequence, x, y):
                assert joined == [channel]
                assert channel == world.channel(world.tile(x, y))
                assert 0 <= x <= world.side_m
                assert 0 <= y <= world.side_m
                counts[channel] += 1
                assert (number, sequence) == (1, counts[channel])
    assert someone.sequences == dict(counts)


def test_players_walk_at_their_speed_and_pause() -> None:
    world = GameWorld(tiles_per_side=4, speed_m_per_s=20.0, pause_s_max=3.0)
    steps = updates_of(play(player(world=world), 1000))
    moved = [((b.x - a.x) ** 2 + (b.y - a.y) ** 2) ** 0.5 for a, b in itertools.pairwise(steps)]
    assert max(moved) == pytest.approx(20.0 / 3)
    assert sum(distance == 0 for distance in moved) > 50, "nobody ever paused"
    assert len({update.channel for update in steps}) > 8, "nobody ever went anywhere"


def test_hot_players_stay_in_the_hot_spot_which_jumps() -> None:
    world = GameWorld(tiles_per_side=8, speed_m_per_s=50.0, pause_s_max=0.1, hot_ratio=1.0, hot_spot_period_s=30.0)
    assert [world.hot_corner(second) for second in (0, 29.9, 30, 60, 90, 120)] == [
        Tile(0, 0),
        Tile(0, 0),
        Tile(6, 0),
        Tile(6, 6),
        Tile(0, 6),
        Tile(0, 0),
    ]
    someone = player(world=world)
    assert {u.channel for u in updates_of(play(someone, 89))} == set(world.hot_channels(0))
    play(someone, 20)  # the way to the next corner
    assert {u.channel for u in updates_of(play(someone, 60))} <= set(world.hot_channels(35))


def test_a_late_joiner_goes_to_where_the_hot_spot_is_by_then() -> None:
    world = GameWorld(tiles_per_side=8, hot_ratio=1.0, hot_spot_period_s=30.0)
    late = Player(1, world, Random(1), start_s=135.0, game_start_s=100.0)
    assert updates_of(play(late, 1))[0].channel in world.hot_channels(35)


@pytest.mark.parametrize("hot_ratio", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_any_range_of_players_has_its_share_of_hot_ones(hot_ratio: float) -> None:
    world = GameWorld(hot_ratio=hot_ratio)
    for first in (0, 1000, 54321):
        hot = sum(player(number, world).is_hot for number in range(first, first + 100))
        assert abs(hot - 100 * hot_ratio) <= 2


def test_a_skewed_world_loads_its_hot_spot() -> None:
    world = GameWorld(hot_ratio=0.6)
    load: Counter[bytes] = Counter()
    for number in range(100):
        load.update(update.channel for update in updates_of(play(player(number, world), 30)))
    hot = sum(load[channel] for channel in world.hot_channels(0))
    assert 0.55 < hot / load.total() < 0.75
    assert set(load) <= set(world.channels())
    assert len(world.channels()) == 64


def test_messages_carry_everything_and_are_padded() -> None:
    update = Update(b"rgame:1:2", 7, 9, 1.5, 2.5)
    message = update.payload(123_456_789_012, 200)
    assert len(message) == 200
    assert read_update(message) == (7, 9, 123_456_789_012, 1.5, 2.5)
    assert len(update.payload(1, 0)) == PAYLOAD_BYTES_MIN


@pytest.mark.parametrize("payload", [b"", b"RG", b"x" * 100, b"RG" + b"\0" * (PAYLOAD_BYTES_MIN - 3)])
def test_foreign_messages_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not an update of RGame"):
        read_update(payload)


@pytest.mark.parametrize(
    "options",
    [
        {"hot_ratio": 1.1},
        {"hot_ratio": -0.1},
        {"tile_side_m": 0},
        {"speed_m_per_s": 0},
        {"updates_per_s": 0},
        {"pause_s_max": -1},
        {"hot_spot_period_s": -1},
        {"hot_tiles_per_side": 9},
        {"tiles_per_side": 0},
    ],
)
def test_impossible_worlds_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        GameWorld(**options)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # on purpose
