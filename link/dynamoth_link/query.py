"""Sends a few commands over a connection of their own and returns the replies: for bootstrap and command line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dynamoth.machine.events import CommandPart
from dynamoth_link import errors
from dynamoth_link.handshake import open_connection
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import ServerAddress, parse_server_url

_DEFAULTS = LinkOptions()


async def query(
    address: ServerAddress | str,
    *commands: Sequence[CommandPart],
    options: LinkOptions = _DEFAULTS,
    timeout_s: float = 5.0,
    keep: bool = False,
) -> list[Any]:
    """Connect, send the commands in one write, return their replies in order, and close, or keep the connection.

    A command that the server refuses has an ``ErrorReply`` as its reply; the others are not affected.
    Subscription commands have no reply and make this time out.

    Args:
        address: the server, or its URL.
        commands: each as ``Send.args``; none at all checks that the server is there and lets us in.
        options: credentials, TLS.
        timeout_s: bound of everything together, more than 0; the time that ``options.credentials`` take does not count.

        keep: put the connection among the spare ones of ``options``. Commands must leave nothing behind on it.

    Raises:
        ServerUnreachable: no connection, lost before the last reply, or ``timeout_s`` is over.
        AuthenticationFailed: the server refuses the credentials.
        ServerTooOld: the server is older than Redis 6.2.
        LinkError: any other fault of the server; base of the above.
        InvalidUrl: the URL names no server.
    """
    if isinstance(address, str):
        address = parse_server_url(address)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            connection, run_id = await open_connection(address, options, _ignore, limit=limit)
            kept = False
            try:
                replies = await connection.call(commands)
                if keep and options.spares is not None and connection.is_open:
                    logged_in = address.with_credentials(options.username, options.password)
                    options.spares.keep(logged_in, connection, run_id)
                    kept = True
                return replies
            finally:
                if not kept:
                    connection.abort()  # every reply is here, or is no longer wanted: nothing to wait for
                    await connection.wait_closed(options.close_timeout_s)
    except TimeoutError as error:
        raise errors.connect_timed_out(address, timeout_s) from error


def _ignore(pushes: list[list[Any]]) -> None:
    """Ignore pushes: nothing is subscribed to on this connection."""
