"""Random and damaged bytes, cut anywhere: whatever users send, the others are served and nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.broker.transport_users import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    SHORT,
    TEXT,
    RawUser,
    Run,
    masked,
    raw_user,
    request,
    run,
    serving,
    until,
    user,
)

__all__ = ["run"]

USERS = 200
OPCODES = [CONTINUATION, TEXT, TEXT, BINARY, CLOSE, PING, PONG]
PAYLOADS = [b"", b"{}", b'{"a":1}', b"\x03\xe8", b"\xff" * 50, b'{"a":"' + b"x" * 5000 + b'"}']


def some_bytes(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.3:
        return rng.randbytes(rng.randrange(1, 300))
    if kind < 0.5:
        return masked(TEXT, b"{}")[: rng.randrange(1, 8)]
    frame = bytearray(masked(rng.choice(OPCODES), rng.choice(PAYLOADS), fin=rng.random() < 0.7))
    if rng.random() < 0.3:
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return bytes(frame)


async def misbehave(raw: RawUser, rng: random.Random) -> None:
    if rng.random() < 0.9:
        raw.write(request())
        await raw.head()
    for _ in range(rng.randrange(1, 8)):
        raw.write(some_bytes(rng))
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    if rng.random() < 0.3:
        raw.writer.write_eof()


@pytest.mark.parametrize("seed", range(2))
def test_random_bytes(run: Run, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        async with serving(replace(SHORT, accepts_per_s=1e6)) as (server, recorder), user(server.port) as good:
            await recorder.until("opened")
            for number in range(USERS):
                async with raw_user(server.port) as raw:
                    # uvloop raises RuntimeError where asyncio raises OSError, once the server has closed
                    with suppress(OSError, RuntimeError, asyncio.IncompleteReadError):
                        await misbehave(raw, rng)
                    if number % 10 == 0:
                        good.send(TEXT, b'{"good":%d}' % number)
                        await until(lambda number=number: {"good": number} in recorder.received_frames)  # type: ignore[misc]
            await until(lambda: len(server.connections) == 1)

    with caplog.at_level(logging.ERROR):
        run(main())
    assert not caplog.records
