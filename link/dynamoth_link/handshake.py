"""Opening a connection: socket, TLS, RESP3, credentials, database, and the identity of the server."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

from dynamoth.events import CommandPart, ErrorReply
from dynamoth_link import errors
from dynamoth_link.connection import Connection, OnPushes
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import ServerAddress

VERSION_MIN = (6, 2)
"""The oldest Redis that the project is tested with. RESP3 itself came with 6.0."""

DEFAULT_USER = "default"
"""The user that a password without a user name belongs to."""


async def open_connection(
    address: ServerAddress, options: LinkOptions, on_pushes: OnPushes
) -> tuple[Connection, str | None]:
    """Open a connection that is authenticated and speaks RESP3; return it with the server's run id.

    The run id is None where the server does not let us ask. Nothing stays open when this raises or is
    cancelled. Raises ``LinkError``, at the latest after ``connect_timeout_s``.
    """
    address = address.with_credentials(options.username, options.password)
    connection = Connection(address, options, on_pushes)
    try:
        async with asyncio.timeout(options.connect_timeout_s):
            await _connect_socket(address, options, connection)
            return connection, await _introduce(address, options, connection)
    except TimeoutError as error:
        connection.abort()
        raise errors.connect_timed_out(address, options.connect_timeout_s) from error
    except BaseException:
        connection.abort()
        raise


async def _connect_socket(address: ServerAddress, options: LinkOptions, connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    try:
        context = options.tls.make_context() if address.tls else None
    except (OSError, ValueError) as error:
        raise errors.unusable_tls(address, error) from error
    try:
        if address.path is not None:
            await loop.create_unix_connection(lambda: connection, address.path)
        else:  # both asyncio and uvloop set TCP_NODELAY
            await loop.create_connection(lambda: connection, address.host, address.port, ssl=context)
    except (OSError, ValueError) as error:
        raise errors.diagnose_exception(address, error) from error


async def _introduce(address: ServerAddress, options: LinkOptions, connection: Connection) -> str | None:
    (hello,) = await connection.call([_hello(address, options)])
    if isinstance(hello, ErrorReply):
        raise errors.diagnose_reply(address, address.username, str(hello))
    _check_version(address, hello)
    select: list[list[CommandPart]] = [["SELECT", address.db]] if address.db else []
    *selected, ping, info = await connection.call([*select, ["PING"], ["INFO", "server"]])
    for reply in selected:
        if isinstance(reply, ErrorReply):
            raise errors.diagnose_reply(address, address.username, str(reply))
    # A server that is loading answers HELLO and INFO, and refuses most of the rest.
    if isinstance(ping, ErrorReply) and str(ping).startswith("LOADING"):
        raise errors.diagnose_reply(address, address.username, str(ping))
    return _run_id(info)


def _hello(address: ServerAddress, options: LinkOptions) -> list[CommandPart]:
    command: list[CommandPart] = ["HELLO", 3]
    if address.has_credentials:
        command += ["AUTH", address.username or DEFAULT_USER, address.password or ""]
    if options.client_name is not None:
        command += ["SETNAME", options.client_name]
    return command


def _check_version(address: ServerAddress, hello: Any) -> None:
    """Refuse what is older than ``VERSION_MIN``; a version that cannot be read is left in peace."""
    if not isinstance(hello, dict) or b"version" not in hello:
        raise errors.violation(address, f"HELLO was answered with {hello!r:.200}")
    version = cast("dict[bytes, Any]", hello)[b"version"]
    text = version.decode(errors="replace") if isinstance(version, bytes) else str(version)
    match = re.match(r"(\d+)\.(\d+)", text)
    if match and (int(match[1]), int(match[2])) < VERSION_MIN:
        raise errors.too_old(address, text)


def _run_id(info: Any) -> str | None:
    if not isinstance(info, bytes):
        return None
    match = re.search(rb"^run_id:(\S+)", info, flags=re.MULTILINE)
    return match[1].decode(errors="replace") if match else None
