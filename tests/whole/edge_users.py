"""End users over raw WebSockets, for tests of brokers: they follow ``move``, and note every frame of data."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

ANSWER_S_MAX = 10.0


@dataclass
class RawUser:
    """One user. ``url`` is where it is served, or None."""

    session: str
    channels: list[str]
    url: str | None = None
    #: Numbers that came, by channel and publisher.
    numbers: dict[tuple[str, str], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    moves: int = 0
    #: Connections that ended without ``bye``.
    losses: list[str] = field(default_factory=list)
    generation: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    connection: ClientConnection | None = None
    arrived_at: float = 0.0

    async def start(self, url: str) -> None:
        """Connect, and wait until every subscription is confirmed."""
        self.connection = await self._open(url)
        self.url = url

    async def _open(self, url: str) -> ClientConnection:
        connection = await connect(url, subprotocols=[Subprotocol("dynamoth.v1.json")], compression=None)
        self.generation += 1
        subs = [{"ref": ref, "channel": channel} for ref, channel in enumerate(self.channels, 1)]
        first = {"type": "connect", "v": 1, "session": self.session, "generation": self.generation, "subs": subs}
        await connection.send(json.dumps(first))
        names: dict[str, str] = {}
        async with asyncio.timeout(ANSWER_S_MAX):
            while (frame := json.loads(await connection.recv()))["type"] != "moved_in":
                self._take(names, frame)
        task = asyncio.get_running_loop().create_task(self._read(connection, names))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return connection

    def _take(self, names: dict[str, str], frame: dict[str, Any]) -> None:
        match frame["type"]:
            case "subscribed":
                names[frame["s"]] = self.channels[frame["ref"] - 1]
            case "data":
                publisher, number = frame["p"]
                self.numbers[names[frame["s"]], publisher][number] += 1
                self.arrived_at = time.monotonic()
            case "error" | "gap":
                self.losses.append(json.dumps(frame))
            case _:
                pass

    async def _read(self, connection: ClientConnection, names: dict[str, str]) -> None:
        try:
            while True:
                frame = json.loads(await connection.recv())
                if frame["type"] == "ping":
                    await connection.send('{"type": "pong"}')
                elif frame["type"] == "move":
                    task = asyncio.get_running_loop().create_task(self._move(connection, frame["to"]))
                    self.tasks.add(task)
                    task.add_done_callback(self.tasks.discard)
                elif frame["type"] == "bye":
                    await connection.close()
                    return
                else:
                    self._take(names, frame)
        except ConnectionClosed as closed:
            if connection is self.connection:
                self.url = None
                self.losses.append(str(closed))

    async def _move(self, former: ClientConnection, to: list[str]) -> None:
        url = to[0]
        self.connection, self.url = await self._open(url), url
        self.moves += 1
        await former.send('{"type": "leave"}')

    async def close(self) -> None:
        """End."""
        connection, self.connection = self.connection, None
        if connection is not None:
            await connection.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def missing(self) -> list[str]:
        """Return which numbers did not come, of those between the first and the last one of a publisher."""
        return [
            f"{self.session}: {channel} of {publisher}: {sorted(absent)[:5]}"
            for (channel, publisher), numbers in self.numbers.items()
            if (absent := set(range(min(numbers), max(numbers) + 1)) - numbers.keys())
        ]
