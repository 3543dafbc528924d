"""What a signal ends in a daemon."""

from __future__ import annotations

import asyncio
import os
import signal

from dynamoth_daemon.process import set_by_signals

TIMEOUT_S = 10.0


def test_a_signal_sets_the_events_around_and_those_that_begin_later() -> None:
    async def run() -> None:
        outer, inner, later = asyncio.Event(), asyncio.Event(), asyncio.Event()
        with set_by_signals(outer):
            with set_by_signals(inner):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(inner.wait(), TIMEOUT_S)
            assert outer.is_set()
            with set_by_signals(later):
                assert later.is_set(), "the signal came a moment ago"

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(run())
    assert signal.getsignal(signal.SIGTERM) == before == signal.SIG_DFL
