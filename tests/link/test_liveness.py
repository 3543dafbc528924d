"""When a silent connection is checked and given up: decided purely, and on connections that are cut silently."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.link import Link
from dynamoth_link.liveness import ANSWER_GRACE_S, LOOKS_PER_TIMEOUT, Liveness, Verdict
from dynamoth_link.options import LinkOptions
from tests.link.harness import HASTY, Recorder, measured_lag, up
from tests.tcp_proxy import proxied

INTERVAL_S, TIMEOUT_S = 10.0, 20.0


def pinged(sent: int = 0, taken: int = 0) -> Liveness:
    """Return one that has asked for a PING at its interval."""
    liveness = Liveness(INTERVAL_S, TIMEOUT_S, 0.0)
    assert liveness.look(INTERVAL_S, sent, taken)[0] is Verdict.PING
    return liveness


def lost_at(liveness: Liveness, now: float, sent: int, taken: int) -> float:
    """Look when it asks for it, until it gives up; return when that is."""
    while now < 10_000:
        verdict, after_s = liveness.look(now, sent, taken)
        if verdict is Verdict.LOST:
            return now
        now += after_s
    raise AssertionError("it never gives up")


def test_a_ping_is_due_after_the_interval() -> None:
    liveness = Liveness(INTERVAL_S, TIMEOUT_S, 100.0)
    assert liveness.look(103.0, 0, 0) == (Verdict.WAIT, INTERVAL_S - 3)
    liveness.heard_at = 109.0
    assert liveness.look(110.0, 0, 0) == (Verdict.WAIT, INTERVAL_S - 1)
    assert liveness.look(119.0, 0, 0) == (Verdict.PING, INTERVAL_S)


def test_an_idle_connection_is_pinged_at_each_interval_so_that_a_cut_is_found_in_time() -> None:
    liveness, now, pings = Liveness(INTERVAL_S, TIMEOUT_S, 0.0), 0.0, list[float]()
    while len(pings) < 5:
        verdict, after_s = liveness.look(now, 0, 0)
        if verdict is Verdict.PING:
            pings.append(now)
            liveness.heard_at = now
        now += after_s
    assert pings == [INTERVAL_S * number for number in range(1, 6)]
    assert lost_at(liveness, now, 0, 0) == pings[-1] + INTERVAL_S + TIMEOUT_S + ANSWER_GRACE_S


def test_anything_that_comes_is_an_answer() -> None:
    liveness = pinged()
    liveness.heard_at = INTERVAL_S + TIMEOUT_S
    assert liveness.look(INTERVAL_S + TIMEOUT_S, 14, 14) == (Verdict.WAIT, INTERVAL_S)


def test_sending_the_ping_is_no_progress() -> None:
    """Nor is what is sent behind it: a busy publisher sends all the time."""
    liveness, now = pinged(sent=1000, taken=1000), INTERVAL_S
    for sent in range(1014, 10_000, 100):
        verdict, _ = liveness.look(now, sent, sent)
        if verdict is Verdict.LOST:
            break
        now += 1.0
    assert now <= INTERVAL_S + TIMEOUT_S + 2.0


def test_bytes_ahead_of_the_ping_are_progress() -> None:
    """However many commands are sent behind it meanwhile."""
    liveness, now, ahead = pinged(sent=1_000_000), INTERVAL_S, 1_000_000
    for taken in range(0, ahead, 1000):
        verdict, after_s = liveness.look(now, ahead + 10 * taken, taken)
        assert (verdict, after_s) == (Verdict.WAIT, TIMEOUT_S / LOOKS_PER_TIMEOUT)
        now += after_s
    ends_at = lost_at(liveness, now, ahead + 14, ahead + 14)
    assert now + TIMEOUT_S <= ends_at <= now + TIMEOUT_S + TIMEOUT_S / LOOKS_PER_TIMEOUT + ANSWER_GRACE_S


def test_progress_that_ends_is_no_progress_any_more() -> None:
    liveness = pinged(sent=1000)
    assert liveness.look(INTERVAL_S + 1, 1014, 500)[0] is Verdict.WAIT
    ends_at = lost_at(liveness, INTERVAL_S + 2, 1014, 500)
    assert ends_at == pytest.approx(INTERVAL_S + 1 + TIMEOUT_S + ANSWER_GRACE_S)  # pyright: ignore[reportUnknownMemberType]


def test_the_defaults_find_a_cut_within_5_s_and_outlive_a_command_of_3_s() -> None:
    options = LinkOptions()
    assert options.ping_interval_s + options.ping_timeout_s + ANSWER_GRACE_S <= 5.0
    assert options.ping_timeout_s > 3.0


LOST_S_MAX = 0.2 + 0.4 + ANSWER_GRACE_S + 0.1
"""Within this a link of :func:`quick_to_lose` is lost: silence, timeout, grace, and a tenth of a second for timers."""


def quick_to_lose(port: int) -> AbstractAsyncContextManager[tuple[Link, Recorder]]:
    return up(f"redis://127.0.0.1:{port}", replace(HASTY, ping_interval_s=0.2, ping_timeout_s=0.4))


@pytest.mark.parametrize("command", [None, ["PUBLISH", "c", "unanswered"], ["PUBLISH", "c", b"x" * 3_000_000]])
async def test_a_cut_connection_is_lost_in_time(command: list[str | bytes] | None, redis: EmbeddedRedis) -> None:
    """Whether commands wait for an answer or not, and whether they have left or not."""
    async with proxied(redis.port) as proxy, quick_to_lose(proxy.port) as (link, calls), measured_lag() as lag_s:
        proxy.cut()
        cut_at = asyncio.get_running_loop().time()
        if command is not None:
            link.send(command, calls.record("reply"))
        assert "not even the answer to a PING" in (await calls.count("down", 1))[0]
        silent_s = asyncio.get_running_loop().time() - cut_at
        assert calls.of("reply") == []
        # The proxy takes what its buffers hold, which is progress when it is seen at the first look.
        late_s = 0.0 if command is None or len(command[2]) < 1000 else 0.4 / LOOKS_PER_TIMEOUT
        assert silent_s - lag_s() < LOST_S_MAX + late_s
        proxy.mend()
        await calls.count("up", 2)


async def test_a_large_message_under_way_is_no_silence(redis: EmbeddedRedis) -> None:
    """It takes several times as long as interval and timeout, most of it in buffers of the operating system."""
    loop = asyncio.get_running_loop()
    options = replace(HASTY, ping_interval_s=0.1, ping_timeout_s=0.4)
    async with (
        proxied(redis.port, bytes_per_s=1_500_000) as proxy,
        up(f"redis://127.0.0.1:{proxy.port}", options) as (link, calls),
    ):
        began_at = loop.time()
        link.send(["PUBLISH", "c", b"x" * 2_000_000], calls.record("reply"))
        while not calls.of("reply"):
            link.send(["PING"])  # so that more waits with each look
            await asyncio.sleep(0.01)
            assert calls.of("down") == []
            assert loop.time() - began_at < 20
        assert loop.time() - began_at > 2 * (0.1 + 0.4), "too quick to prove anything"


async def test_a_large_message_that_comes_is_no_silence(redis: EmbeddedRedis) -> None:
    options = replace(HASTY, ping_interval_s=0.1, ping_timeout_s=0.4)
    async with (
        up(redis.url) as (direct, replies),
        proxied(redis.port, bytes_per_s=1_500_000) as proxy,
        up(f"redis://127.0.0.1:{proxy.port}", options) as (link, calls),
    ):
        link.send(["SUBSCRIBE", "c"])
        await calls.count("pushes", 1)
        direct.send(["PUBLISH", "c", b"x" * 2_000_000], replies.record("reply"))
        await calls.count("pushes", 2)
        assert calls.of("down") == []


async def test_a_server_that_is_busy_for_less_than_the_timeout_is_not_lost(redis: EmbeddedRedis) -> None:
    """It answers nothing meanwhile; the kernel of its machine takes what is sent."""
    options = replace(HASTY, ping_interval_s=0.1, ping_timeout_s=5.0)
    async with up(redis.url, options) as (link, calls), up(redis.url, LinkOptions()) as (other, _):
        other.send(["DEBUG", "SLEEP", "0.6"])
        await asyncio.sleep(0)
        for _ in range(5):
            link.send(["PUBLISH", "c", b"x" * 1000], calls.record("reply"))
            await asyncio.sleep(0.05)
        await calls.count("reply", 5)
        assert calls.of("down") == []
