"""Processes die and come back under load, on a cluster of real processes (G4, G5, G6)."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack
from typing import Any

import pytest

from dynamoth.errors import ClusterUnavailable, RequestRefused
from dynamoth.names import AGENT_CHANNEL
from dynamoth.plan.plan import Phase, single
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import PubSub, from_url
from tests.whole.harness import (
    PATIENCE_S,
    PlainListener,
    Traffic,
    begin_move,
    channels_at,
    logged,
    move,
    stored_entry,
    until,
    until_phase,
    waits,
)

QUICK = {"balancer.lease_s": 3.0, "balancer.agent_stale_s": 60.0}
"""An agent that hangs holds a move for the whole test, which would be undone otherwise."""


def held_in(phase: Phase, cluster: LocalCluster, channel: bytes, cleanup: ExitStack) -> tuple[Any, str]:
    """Make a move from s1 to s2 wait in a phase; return what lets it go on, and what the balancer waits for."""
    if phase is Phase.PREPARED:
        agent = cluster.agents["s2"].pid
        os.kill(agent, signal.SIGSTOP)
        cleanup.callback(os.kill, agent, signal.SIGCONT)
        return lambda: os.kill(agent, signal.SIGCONT), "the agent of s2 to acknowledge"
    listener = cleanup.enter_context(PlainListener(cluster, "s1", [channel]))
    return listener.leave, "subscribers to leave s1"


@pytest.mark.parametrize("phase", [Phase.PREPARED, Phase.ACTIVE])
def test_a_balancer_that_is_killed_in_the_middle_of_an_installation_is_followed_by_one_that_ends_it(
    phase: Phase,
) -> None:
    [channel] = channels_at("s1", 1)
    with LocalCluster(2, settings=QUICK) as cluster, Traffic(cluster, [channel]) as traffic, ExitStack() as cleanup:
        go_on, waited_for = held_in(phase, cluster, channel, cleanup)
        begin_move(cluster, channel, "s2", request=1)
        until_phase(cluster, [channel], phase, at="s2")
        until(lambda: waits(cluster, channel) == [waited_for], f"the status says {waited_for!r}")
        cluster.balancer.kill()
        traffic.flows()
        with pytest.raises(ClusterUnavailable, match="start 'dynamoth balancer'; until then everything goes on"):
            cluster.ask_balancer("status")
        go_on()
        traffic.flows()
        until_phase(cluster, [channel], phase, at="s2")  # nobody but a balancer brings it on
        cluster.balancer.start()
        until_phase(cluster, [channel], Phase.SETTLED, at="s2")
        cluster.wait_ready()
        [leading] = logged(cluster.balancer, "leading")
        assert leading["transitions"] == 1
        traffic.flows()
        move(cluster, channel, "s1")
        traffic.flows()
        assert traffic.finish().gaps == 0, traffic.gaps


def test_a_server_that_restarts_empty_is_taken_back_and_gaps_are_notified_there_only() -> None:
    stays, [moved, *at_s2] = channels_at("s1", 1), channels_at("s2", 3)
    with LocalCluster(2) as cluster:
        move(cluster, stays[0], "s2")
        move(cluster, stays[0], "s1")
        move(cluster, moved, "s1")
        kept = [*stays, moved]
        with Traffic(cluster, [*kept, *at_s2], losses_allowed=True) as traffic:
            until_phase(cluster, kept, Phase.SETTLED, at="s1")
            before = {channel: stored_entry(cluster, "s2", channel) for channel in kept}
            agent, balancer = cluster.agents["s2"].pid, cluster.balancer.pid
            cluster.restart_redis("s2")
            cluster.wait_ready()
            assert (cluster.agents["s2"].pid, cluster.balancer.pid) == (agent, balancer)
            assert {channel: stored_entry(cluster, "s2", channel) for channel in kept} == before
            traffic.flows()
            expected = {(name, channel) for name in ("r0", "r1") for channel in at_s2}
            until(lambda: expected == {(name, gap.channel) for name, gap in traffic.gaps if "s2" in gap.reason}, "gaps")
            assert {gap.channel for _, gap in traffic.gaps} == set(at_s2), traffic.gaps
            traffic.calm()
            for channel in (moved, at_s2[0]):
                there = "s2" if channel == moved else "s1"
                move(cluster, channel, there)
                traffic.flows()
            traffic.finish()
        lost, *_ = logged(cluster.agents["s2"], "no connection; trying again")
        assert (lost["link"], lost["level"]) == ("local", "warning")
        assert "the connection was closed by the server" in lost["cause"]
        assert "look in its log" in lost["cause"]
        assert len([line for line in logged(cluster.agents["s2"], "connected") if line["link"] == "local"]) == 2
        unreachable, *_ = logged(cluster.balancer, "a server cannot be reached")
        assert unreachable["server"] == "s2"


def test_agents_that_are_killed_and_restarted_in_the_middle_of_moves_lose_nothing_silently() -> None:
    channels = channels_at("s1", 6)
    with (
        LocalCluster(2) as cluster,
        Traffic(cluster, channels, plain=["s1"], losses_allowed=True) as traffic,
        PlainListener(cluster, "s1", channels) as listener,  # so that none of them settles before we are done
    ):
        for request, channel in enumerate(channels, 1):
            begin_move(cluster, channel, "s2", request)

        def active() -> bool:
            entries = [stored_entry(cluster, "s2", channel) for channel in channels]
            return all(entry is not None and entry.phase is Phase.ACTIVE for entry in entries)

        until(active, "all moves are active: others would be undone")
        for agent in cluster.agents.values():
            agent.kill()
        traffic.publishes(10)
        for agent in cluster.agents.values():
            agent.start()
        cluster.wait_ready()
        until_phase(cluster, channels, Phase.ACTIVE, at="s2")
        question = (b"PUBSUB", b"NUMSUB", *channels)
        until(lambda: set(cluster.ask("s1", question)[0][1::2]) == {1}, "all but the plain listener have left s1")
        traffic.flows()

        cluster.agents["s1"].kill()
        traffic.add_publisher("late")  # goes to s1, where it should not, and nobody forwards
        traffic.publishes(10)
        gaps = len(traffic.gaps)
        cluster.agents["s1"].start()
        cluster.wait_ready()
        traffic.flows()
        expected = {(name, channel) for name in ("r0", "r1") for channel in channels}
        until(lambda: expected == {(name, gap.channel) for name, gap in traffic.gaps[gaps:]}, "gaps")
        listener.leave()
        until_phase(cluster, channels, Phase.SETTLED, at="s2")
        traffic.flows()
        traffic.calm()
        for channel in channels[:2]:
            move(cluster, channel, "s1")
        traffic.flows()
        assert traffic.finish().covered_losses >= 2 * 10 * len(channels), "of the plain publisher, at least"
        restarted = [line["server"] for line in logged(cluster.balancer, "an agent has restarted")]
        assert sorted(restarted) == ["s1", "s1", "s2"]


@pytest.mark.parametrize("hangs", [False, True], ids=["killed", "hangs"])
def test_a_move_is_undone_when_an_agent_that_it_needs_fails(hangs: bool) -> None:
    [channel] = channels_at("s1", 1)
    with LocalCluster(2) as cluster, Traffic(cluster, [channel]) as traffic, ExitStack() as cleanup:
        agent = cluster.agents["s2"]
        os.kill(agent.pid, signal.SIGSTOP)
        cleanup.callback(agent.kill)
        begin_move(cluster, channel, "s2", request=1)
        until_phase(cluster, [channel], Phase.PREPARED, at="s2")
        if not hangs:
            agent.kill()
        until_phase(cluster, [channel], Phase.SETTLED, at="s1")
        traffic.flows()
        with pytest.raises(RequestRefused, match="the agent of server s2 is not heard; start `dynamoth agent` for it"):
            move(cluster, channel, "s2")
        problems = {(each["kind"], each["subject"]) for each in cluster.ask_balancer("status")["problems"]}
        assert ("agent_silent", "s2") in problems
        if hangs:
            os.kill(agent.pid, signal.SIGCONT)
        else:
            agent.start()
        cluster.wait_ready()
        until(lambda: not cluster.ask_balancer("status")["problems"], "the agent is well again")
        move(cluster, channel, "s2")
        traffic.flows()
        assert traffic.finish().lost == 0


def test_a_move_is_undone_when_a_server_that_it_needs_refuses_to_store_it() -> None:
    [channel] = channels_at("s1", 1, servers=3)
    with LocalCluster(3) as cluster, Traffic(cluster, [channel]) as traffic:
        cluster.ask("s2", (b"CONFIG", b"SET", b"maxmemory", b"1"))
        begin_move(cluster, channel, "s2", request=1)
        for server in ("s1", "s3"):
            until(lambda s=server: stored_entry(cluster, s, channel), f"{server} stores the move")  # type: ignore[misc]
        until(lambda: not cluster.ask_balancer("status")["in_transition"], "the move is undone")
        entry = stored_entry(cluster, "s1", channel)
        assert entry is not None and entry.route.assignment == single("s1")
        with pytest.raises(RequestRefused, match="server s2 does not keep the plan: OOM"):
            move(cluster, channel, "s2")
        problems = {(each["kind"], each["subject"]) for each in cluster.ask_balancer("status")["problems"]}
        assert ("plan_refused", "s2") in problems
        cluster.ask("s2", (b"CONFIG", b"SET", b"maxmemory", b"0"))
        until(lambda: not cluster.ask_balancer("status")["problems"], "the server stores the plan again")
        move(cluster, channel, "s2")
        traffic.flows()
        assert traffic.finish().lost == 0


def test_a_second_agent_takes_the_place_of_one_that_hangs() -> None:
    [channel] = channels_at("s1", 1)
    with LocalCluster(2) as cluster, Traffic(cluster, [channel]) as traffic, ExitStack() as cleanup:
        hung, second = cluster.agents["s2"], cluster.another_agent("s2")
        os.kill(hung.pid, signal.SIGSTOP)
        cleanup.callback(hung.kill)
        second.start()
        cleanup.callback(second.stop)
        until(lambda: logged(second, "another agent hung, and this one has replaced it"), "the second one takes over")
        until(lambda: cluster.ask("s2", (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL)) == [[AGENT_CHANNEL, 1]], "one listens")
        until(lambda: not cluster.ask_balancer("status")["problems"], "the balancer has no problem with it")
        move(cluster, channel, "s2")
        traffic.flows()
        os.kill(hung.pid, signal.SIGCONT)
        until(lambda: not hung.running, "the first one ends")
        assert "status 2" in str(hung.failure())
        [refused] = logged(hung, "another agent is at work")
        assert "another agent of server 's2' is at work already" in refused["cause"]
        cluster.agents["s2"] = second
        cluster.wait_ready()
        move(cluster, channel, "s1")
        traffic.flows()
        assert traffic.finish().lost == 0


def test_what_a_publisher_sends_to_the_wrong_server_while_its_agent_is_dead_is_not_lost() -> None:
    """A new client follows the ring to a server that nobody watches: it finds the right one in the stored plan."""
    channels = channels_at("s1", 2)
    with LocalCluster(2) as cluster, Traffic(cluster, channels, losses_allowed=True) as traffic:
        for channel in channels:
            move(cluster, channel, "s2")
        traffic.flows()
        cluster.agents["s1"].kill()
        traffic.flows()  # those who know better are not concerned
        traffic.add_publisher("late")
        traffic.flows()
        cluster.agents["s1"].start()
        traffic.flows()
        assert traffic.gaps == []
        traffic.calm()
        traffic.flows()
        assert traffic.finish().covered_losses == 0


async def use_everything(url: str, channels: list[bytes]) -> None:
    """Connect again, subscribe, publish, unsubscribe: all of it works, and the receivers are counted right (G7)."""

    async def next_of(pubsub: PubSub) -> dict[str, Any]:
        while (message := await pubsub.get_message(timeout=None)) is None:
            pass
        return message

    async with asyncio.timeout(PATIENCE_S), from_url(url) as client, client.pubsub(gaps=True) as pubsub:
        for channel in channels:
            assert await client.publish(channel, "nobody") == 0
        await pubsub.subscribe(*channels)
        assert {(await next_of(pubsub))["channel"] for _ in channels} == set(channels)
        for channel in channels:
            assert await client.publish(channel, "somebody") == 1
            message = await next_of(pubsub)
            assert (message["type"], message["channel"], message["data"]) == ("message", channel, b"somebody")
        await pubsub.unsubscribe(*channels)
        assert {(await next_of(pubsub))["type"] for _ in channels} == {"unsubscribe"}
        for channel in channels:
            assert await client.publish(channel, "nobody") == 0


def test_without_a_balancer_and_without_a_dispatcher_everything_at_rest_goes_on() -> None:
    at_s1, at_s2 = channels_at("s1", 4), channels_at("s2", 3)
    busy, new, moved = [at_s1[0], at_s2[0]], [at_s1[1], at_s2[1]], at_s1[2]
    with (
        LocalCluster(2, settings={**QUICK, "agent.report_interval_s": 0.2, "balancer.agent_stale_s": 2.0}) as cluster,
        Traffic(cluster, [*busy, moved]) as traffic,
    ):
        move(cluster, moved, "s2")
        cluster.balancer.kill()
        traffic.flows()
        asyncio.run(use_everything(cluster.url, [*new, at_s1[3]]))
        cluster.balancer.start()
        cluster.wait_ready()
        cluster.agents["s1"].kill()
        traffic.flows()
        asyncio.run(use_everything(cluster.url, new))
        until(lambda: logged(cluster.balancer, "an agent is not heard any more: see whether it runs"), "it is missed")
        for channel, to in ((at_s2[0], "s1"), (at_s1[0], "s2")):
            with pytest.raises(
                RequestRefused, match="the agent of server s1 is not heard; start `dynamoth agent` for it"
            ):
                move(cluster, channel, to)
        traffic.flows()
        cluster.agents["s1"].start()
        cluster.wait_ready()
        until(lambda: cluster.ask_balancer("status")["servers"]["s1"]["agent"] == "alive", "the agent is heard", 0.05)
        move(cluster, at_s1[0], "s2")
        traffic.flows()
        assert traffic.finish().gaps == 0, traffic.gaps
