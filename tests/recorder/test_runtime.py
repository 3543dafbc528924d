"""The process of a recorder, without a cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamoth.errors import DynamothError
from dynamoth.plan.plan import Server
from dynamoth_recorder.process import runtime
from dynamoth_recorder.process.runtime import RecorderConfig, run_recorder

SERVERS = (Server("s1", "redis://127.0.0.1:1"),)
"""Nobody listens there."""


def test_each_reason_why_the_servers_cannot_be_read_is_logged_once_and_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SEARCH_S", "REFRESH_S"):
        monkeypatch.setattr(runtime, name, 0.001)
    caplog.set_level(logging.INFO, "dynamoth.recorder")

    def answers(stop: asyncio.Event) -> Iterator[tuple[Server, ...] | str]:
        yield from ("no plan", "no plan")
        yield SERVERS
        yield from ("no route", "no route", "no rights")
        yield from (SERVERS, SERVERS)
        stop.set()
        while True:
            yield SERVERS

    async def record() -> int:
        stop = asyncio.Event()
        answer = answers(stop)

        async def find_servers() -> tuple[Server, ...]:
            found = next(answer)
            if isinstance(found, str):
                raise DynamothError(found)
            return found

        return await run_recorder(RecorderConfig(find_servers=find_servers, out=str(tmp_path)), stop)

    assert asyncio.run(record()) == 0
    about = [
        (each.levelname, each.getMessage(), vars(each)["cause"]) for each in caplog.records if "cluster" in each.message
    ]
    unreadable = "the servers of the cluster cannot be read; recording at those known before"
    assert about == [
        ("WARNING", "waiting for the cluster", "no plan"),
        ("WARNING", unreadable, "no route"),
        ("WARNING", unreadable, "no rights"),
        ("INFO", "the servers of the cluster are read again", None),
    ]
