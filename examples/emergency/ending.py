"""When a process of the application ends: at SIGTERM, or with the process that has started it."""

from __future__ import annotations

import asyncio
import signal
import sys


async def await_end(ended: asyncio.Event) -> None:
    """Set ``ended`` at SIGTERM, or at the end of the standard input."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1000):
        pass
    ended.set()
