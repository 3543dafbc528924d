"""What administrators decide and the plan keeps: pauses and pins, also after a restart of the balancer."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from dynamoth.names import in_quotes
from dynamoth.plan.administration import PINS_MAX, Administration
from dynamoth.plan.plan import Mode, Plan, Server, single
from dynamoth.plan.slots import slot_of
from dynamoth_balancer.decide.pins import pinned_names
from dynamoth_balancer.install.leadership import Stage
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import Balancer, SimCluster, started
from tests.balancer.traffic import CAPACITY

QUICK = BalancerOptions(wait_s=1.0, averaging_s=3.0, channel_rest_s=2.0)
CHANNEL = b"news"


def overload(cluster: SimCluster, balancer: Balancer, *ratios: float, server: str = "s1") -> list[bytes]:
    channels = balancer.at_home(server, len(ratios))
    cluster.follow.update({name: round(ratio * CAPACITY) for name, ratio in zip(channels, ratios, strict=True)})
    return channels


def restarted(cluster: SimCluster, balancer: Balancer, options: BalancerOptions = QUICK) -> Balancer:
    successor = cluster.succeed(balancer, options)
    cluster.run_until(lambda: successor.machine.stage is Stage.LEADING)
    return successor


def pin(cluster: SimCluster, channel: bytes, to: str) -> dict[str, Any]:
    reply = cluster.ask("pin", {"channel": channel, "to": to})
    assert reply.error is None, reply.error
    return dict(reply.result)


# Pause.


def test_a_paused_balancer_is_paused_after_a_restart_until_it_is_resumed() -> None:
    cluster, balancer = started(options=QUICK)
    cluster.ask("pause")
    channels = overload(cluster, balancer, 0.5, 0.4)
    successor = restarted(cluster, balancer)
    cluster.run(20)
    assert cluster.ask("status").result["paused"] and not successor.decided
    cluster.ask("resume")
    cluster.run(20)
    assert successor.decided[0].decision.moves[0].channel in channels
    assert not restarted(cluster, successor).machine.overview.paused


def test_a_pause_stops_drains_too() -> None:
    cluster, balancer = started(3, QUICK)
    overload(cluster, balancer, 0.1)
    cluster.ask("pause")
    assert cluster.ask("server", {"action": "drain", "server": "s1"}).error is None
    successor = restarted(cluster, balancer)
    cluster.run(20)
    assert not successor.decided and cluster.ask("status").result["servers"]["s1"]["draining"]
    cluster.ask("resume")
    cluster.run(20)
    assert {move.goal for move in successor.decided[0].decision.moves} == {"drain"}


def test_a_pause_that_too_few_servers_store_says_so() -> None:
    cluster, balancer = started(3)
    for server in ("s2", "s3"):
        cluster.part(balancer, server)
    cluster.admin("s1", "pause", request=4711)
    cluster.run(1)
    assert not cluster.servers["s1"].replies, "it is not stored yet"
    cluster.heal(balancer, "s2")
    cluster.run(3)
    [reply] = cluster.servers["s1"].replies
    assert reply.error is None and reply.result["paused"]


# Pins.


def test_a_pin_moves_a_channel_and_keeps_it_there_also_after_a_restart() -> None:
    cluster, balancer = started(options=QUICK)
    [channel, other] = overload(cluster, balancer, 0.5, 0.4, server="s2")
    result = pin(cluster, channel, "s1")
    assert (result["from"], result["to"]) == ("s2", "s1")
    successor = restarted(cluster, balancer)
    cluster.follow[channel] = round(0.95 * CAPACITY)
    cluster.run(30)
    assert successor.plan.entry(channel).route.assignment == single("s1")
    [finding] = successor.decided[-1].decision.findings
    assert "is pinned: 'dynamoth unpin' lets the balancer move it" in finding.reason
    assert cluster.ask("status").result["pinned_channels"] == [{"channel": channel, "servers": ["s1"]}]
    explained = cluster.ask("explain", {"name": channel}).result
    assert explained["pinned_to"] == ["s1"] and "has pinned it" in explained["stays"][0]
    assert explained["next_move"] is None
    cluster.follow |= {channel: round(0.7 * CAPACITY), **dict.fromkeys(successor.at_home("s1", 2), 200_000)}
    cluster.ask("unpin", {"channel": channel})
    cluster.run(30)
    assert restarted(cluster, successor).plan.administration.pins == {} and other in cluster.follow


def test_a_pinned_channel_stays_while_others_relieve_its_server() -> None:
    cluster, balancer = started(options=QUICK)
    [busiest, other] = overload(cluster, balancer, 0.5, 0.4)
    note = pin(cluster, busiest, "s1")["note"]
    assert note == "" and busiest not in balancer.plan.entries, "it was there, and is pinned now"
    cluster.run(20)
    [move] = balancer.decided[0].decision.moves
    assert (move.channel, move.after) == (other, single("s2"))
    assert pin(cluster, busiest, "s1")["note"] == "it was there already"


def test_the_slot_that_a_pinned_channel_follows_is_pinned_with_it() -> None:
    plan = Plan.initial([Server("s1", "redis://s1"), Server("s2", "redis://s2")])
    home = plan.entry(CHANNEL).route.assignment
    pinned = plan.administered(Administration(pins=MappingProxyType({CHANNEL: home})))
    assert pinned_names(pinned) == {CHANNEL: home, slot_of(CHANNEL): home}
    [other] = {"s1", "s2"} - {*home.servers}
    elsewhere = plan.administered(Administration(pins=MappingProxyType({CHANNEL: single(other)})))
    assert pinned_names(elsewhere) == {CHANNEL: single(other)}, "it must leave the slot"
    assert pinned_names(plan) == {}


def test_a_server_with_a_pinned_channel_is_drained_when_that_is_not_pinned_any_more() -> None:
    cluster, balancer = started(options=QUICK)
    [channel] = balancer.at_home("s1")
    pin(cluster, channel, "s1")
    drain = {"action": "drain", "server": "s1"}
    refusal = cluster.refusal("server", drain)
    assert f"cannot be drained, as channels are pinned there ({in_quotes(channel)}): unpin them" in refusal
    explained = cluster.ask("explain", {"name": slot_of(channel)}).result
    assert "a channel of this slot is pinned" in explained["stays"][0]
    cluster.ask("unpin", {"channel": channel})
    assert cluster.ask("server", drain).error is None
    cluster.run(120)
    assert balancer.machine.overview.slots_left("s1") == 0


def test_a_pin_puts_a_replicated_channel_at_one_server() -> None:
    cluster, balancer = started(3, QUICK)
    wanted = {"channel": CHANNEL, "mode": "all-publishers", "servers": ["s1", "s2"]}
    assert cluster.ask("replicate", wanted).error is None
    assert pin(cluster, CHANNEL, "s3")["mode"] == "single"
    assert balancer.plan.entry(CHANNEL).route.assignment == single("s3")
    assert "is pinned to s3: 'dynamoth unpin' ends that" in cluster.refusal("replicate", wanted)


def test_a_stray_goes_back_when_its_server_takes_part_again() -> None:
    cluster, balancer = started(3, QUICK)
    [channel] = overload(cluster, balancer, 0.2)
    pin(cluster, channel, "s1")
    administration = balancer.plan.administration
    cluster.ask("unpin", {"channel": channel})
    cluster.ask("move", {"channel": channel, "to": "s2"})
    cluster.kill(balancer)
    stray = balancer.plan.administered(administration)
    for server in cluster.servers.values():
        server.put_plan(stray)
    cluster.agents["s1"].alive = False
    successor = cluster.start(QUICK)
    cluster.run_until(lambda: bool(successor.decided))
    assert "is pinned to s1 and is at s2" in successor.decided[0].decision.findings[0].reason
    cluster.agents["s1"].alive = True
    cluster.run_until(lambda: successor.plan.entry(channel).route.assignment == single("s1"))
    [move] = next(each.decision.moves for each in successor.decided if each.decision.moves)
    assert (move.goal, move.reason) == ("pin", "it is pinned to s1")


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("pin", {"channel": CHANNEL, "to": "s9"}, "server 's9' is not known; known are s1, s2, s3: name one of them"),
        ("pin", {"channel": CHANNEL, "to": "s3"}, "server s3 is being drained, and no channel can be pinned to it"),
        ("pin", {"channel": CHANNEL}, "pin takes the arguments channel (bytes) and to"),
        ("pin", {"channel": "text", "to": "s1"}, "pin takes the arguments channel (bytes) and to"),
        ("pin", {"channel": b"__dynamoth__:agent", "to": "s1"}, "is not an application's"),
        ("pin", {"channel": slot_of(CHANNEL), "to": "s1"}, "is not an application's"),
        ("unpin", {"channel": CHANNEL}, "channel 'news' is not pinned: 'dynamoth status' shows those that are"),
        ("unpin", {}, "unpin takes the argument channel"),
    ],
)
def test_orders_that_make_no_sense_are_refused_and_change_nothing(
    command: str, arguments: dict[str, Any], words: str
) -> None:
    cluster = SimCluster(3)
    balancer = cluster.started(replace(QUICK, draining=frozenset({"s3"}), load_ratio_high=1000.0))
    cluster.ask("pause")
    version = balancer.plan.version
    assert words in cluster.refusal(command, arguments)
    assert balancer.plan.version == version


def test_a_pinned_channel_is_not_moved_by_administrators_either() -> None:
    cluster, balancer = started(options=QUICK)
    pin(cluster, CHANNEL, "s1")
    version = balancer.plan.version
    assert "channel 'news' is pinned to s1" in cluster.refusal("move", {"channel": CHANNEL, "to": "s2"})
    assert balancer.plan.version == version
    pin(cluster, CHANNEL, "s2")
    assert balancer.plan.administration.pins == {CHANNEL: single("s2")}


def test_a_pin_too_many_is_refused() -> None:
    cluster, balancer = started(options=QUICK)
    full = {b"c%d" % number: single("s1") for number in range(PINS_MAX)}
    cluster.kill(balancer)
    plan = balancer.plan.administered(Administration(pins=MappingProxyType(full)))
    for server in cluster.servers.values():
        server.put_plan(plan)
    successor = cluster.started(replace(QUICK, load_ratio_high=1000.0))
    cluster.ask("pause")
    assert "1000 channels are pinned, and that is the most" in cluster.refusal("pin", {"channel": CHANNEL, "to": "s1"})
    assert successor.plan.administration.pins == full
    assert all(pin.mode is Mode.SINGLE for pin in full.values())
