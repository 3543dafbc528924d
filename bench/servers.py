"""Helpers with Redis servers for benchmarks: buffers without limits, a stored plan, and raw publications."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import cast

import hiredis

from dynamoth.machine.events import CommandPart
from dynamoth.plan.plan import Plan, Server
from dynamoth.protocol.stored_plan import write_whole
from dynamoth_cli.local.embedded import EmbeddedRedis

pack = cast("Callable[[tuple[CommandPart, ...]], bytes]", hiredis.pack_command)  # its own types are wrong


def unlimited_redis() -> EmbeddedRedis:
    """Return a server that never disconnects a subscriber that falls behind."""
    return EmbeddedRedis(options={"client-output-buffer-limit": "pubsub 0 0 0"})


def store_plan(server: EmbeddedRedis) -> None:
    """Make the server a cluster of one, as the balancer does."""
    plan = Plan.initial([Server("s1", server.url)])
    for command in write_whole(plan, None):
        send_packed(server.port, [pack(command)], 1)


def send_packed(port: int, batches: Iterable[bytes], commands_per_batch: int) -> None:
    """Send packed commands, one batch after the replies to the one before."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        reader = hiredis.Reader(notEnoughData=None)
        for batch in batches:
            connection.sendall(batch)
            replies = 0
            while replies < commands_per_batch:
                reader.feed(connection.recv(65536))
                while reader.gets() is not None:
                    replies += 1
