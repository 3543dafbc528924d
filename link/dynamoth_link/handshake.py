"""Opening a connection: socket, TLS, RESP3, credentials, database, and the identity of the server."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth_link import errors
from dynamoth_link.connection import Connection
from dynamoth_link.credentials import DEFAULT_USER, Login
from dynamoth_link.options import LinkOptions
from dynamoth_link.resp import OnPushBatch
from dynamoth_link.urls import ServerAddress

VERSION_MIN = (6, 2)
"""The oldest Redis that the project is tested with. RESP3 itself came with 6.0."""


async def open_connection(
    address: ServerAddress, options: LinkOptions, on_pushes: OnPushBatch, *, limit: asyncio.Timeout | None = None
) -> tuple[Connection, str | None]:
    """Open a connection that is authenticated and speaks RESP3, or take a spare one; return it with the run id.

    The run id, that of the server's process, is None where the server does not let us ask. Nothing stays open when this
    raises or is cancelled.

    Raises ``LinkError``: before anything is sent where ``options.trust`` objects to the server, else at the latest
    after ``connect_timeout_s``. That, and the caller's ``limit``, stand still while ``options.credentials`` are asked
    for.
    """
    address = address.with_credentials(options.username, options.password)
    if options.trust is not None and (address.has_credentials or options.has_credentials):
        objection = options.trust.objection(address)
        if objection is not None:
            raise errors.untrusted(address, objection)
    if options.spares is not None and (spare := options.spares.take(address, on_pushes)) is not None:
        return spare
    connection = Connection(address, options, on_pushes)
    try:
        async with asyncio.timeout(options.connect_timeout_s) as own_limit:
            await _connect_socket(address, options, connection)
            login = _own_login(address)
            if login is None and options.credentials is not None:
                with _stopped(own_limit, limit):
                    login = await options.credentials.get(address)
            run_id = await _introduce(address, options, connection, login)
    except TimeoutError as error:
        connection.abort()
        raise errors.connect_timed_out(address, options.connect_timeout_s) from error
    except BaseException:
        connection.abort()
        raise
    if options.credentials is not None:
        options.credentials.keep(connection)
    return connection, run_id


@contextmanager
def _stopped(*limits: asyncio.Timeout | None) -> Generator[None]:
    """Stop the clock of timeouts."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    running = [(limit, when) for limit in limits if limit is not None and (when := limit.when()) is not None]
    for limit, _ in running:
        limit.reschedule(None)
    try:
        yield
    finally:
        for limit, when in running:
            limit.reschedule(when + loop.time() - began_at)


async def _connect_socket(address: ServerAddress, options: LinkOptions, connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    try:
        context = options.tls.make_context() if address.tls else None
    except (OSError, ValueError) as error:
        raise errors.unusable_tls(address, error) from error
    try:
        if address.path is not None:
            await loop.create_unix_connection(lambda: connection, address.path)
            return
        # Both asyncio and uvloop set TCP_NODELAY.
        transport, _ = await loop.create_connection(lambda: connection, address.host, address.port, ssl=context)
    except (OSError, ValueError) as error:
        raise errors.diagnose_exception(address, error) from error
    if options.keepalive is not None:
        try:
            _keep_alive(transport.get_extra_info("socket"), options.keepalive)
        except (OSError, TypeError, ValueError) as error:
            raise errors.unusable_keepalive(address, error) from error


def _keep_alive(sock: socket.socket, options: Mapping[int, int | bytes]) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _own_login(address: ServerAddress) -> Login | None:
    return (address.username or DEFAULT_USER, address.password or "") if address.has_credentials else None


async def _introduce(
    address: ServerAddress, options: LinkOptions, connection: Connection, login: Login | None
) -> str | None:
    library = _library(options)
    select: list[list[CommandPart]] = [["SELECT", address.db]] if address.db else []
    # All in one round trip: nothing here changes anything but the connection, which is given up if we are not let in.
    username = address.username if login is None or login[0] == DEFAULT_USER else _text(login[0])
    received: list[Any] = []
    try:
        await connection.call([_hello(options, login), *library, *select, ["PING"], ["INFO", "server"]], received)
    except errors.LinkError:
        # Redis says why it does not take a connection, and closes it, before it has read anything.
        if received and isinstance(received[0], ErrorReply):
            raise errors.diagnose_reply(address, username, str(received[0])) from None
        raise
    hello, *replies = received
    if isinstance(hello, ErrorReply):
        raise errors.diagnose_reply(address, username, str(hello))
    _check_version(address, hello)
    *selected, ping, info = replies[len(library) :]  # what an older server says to the library's name does not matter
    for reply in selected:
        if isinstance(reply, ErrorReply):
            raise errors.diagnose_reply(address, username, str(reply))
    # A server that is loading answers HELLO and INFO, and refuses most of the rest.
    if isinstance(ping, ErrorReply) and str(ping).startswith("LOADING"):
        raise errors.diagnose_reply(address, username, str(ping))
    return run_id_in(info)


def _hello(options: LinkOptions, login: Login | None) -> list[CommandPart]:
    command: list[CommandPart] = ["HELLO", 3]
    if login is not None:
        command += ["AUTH", *login]
    if options.client_name is not None:
        command += ["SETNAME", options.client_name]
    return command


def _library(options: LinkOptions) -> list[list[CommandPart]]:
    names = (("LIB-NAME", options.library_name), ("LIB-VER", options.library_version))
    return [["CLIENT", "SETINFO", name, value] for name, value in names if value]


def _text(part: CommandPart) -> str:
    return part.decode(errors="replace") if isinstance(part, bytes) else str(part)


def _check_version(address: ServerAddress, hello: Any) -> None:
    """Refuse servers older than ``VERSION_MIN``; accept a version that cannot be read."""
    if not isinstance(hello, dict) or b"version" not in hello:
        raise errors.violation(address, f"HELLO was answered with {hello!r:.200}")
    version = cast("dict[bytes, Any]", hello)[b"version"]
    text = version.decode(errors="replace") if isinstance(version, bytes) else str(version)
    match = re.match(r"(\d+)\.(\d+)", text)
    if match and (int(match[1]), int(match[2])) < VERSION_MIN:
        raise errors.too_old(address, text)


def run_id_in(info: Any) -> str | None:
    """Return the run id of a server's process, out of its answer to INFO; None where that does not say."""
    if not isinstance(info, bytes):
        return None
    match = re.search(rb"^run_id:(\S+)", info, flags=re.MULTILINE)
    return match[1].decode(errors="replace") if match else None
