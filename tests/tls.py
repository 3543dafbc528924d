"""TLS for tests with real servers: a small authority, and TLS in front of any server, however it was built."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 65536


@dataclass(frozen=True)
class Certificates:
    """Files: an authority, a server's certificate for ``localhost`` and for no address, and a client's."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make them with ``openssl``."""
    authority, authority_key = folder / "authority.crt", folder / "authority.key"
    key_usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    _openssl("req", "-x509", *_new_key(authority_key), "-subj", "/CN=authority", *key_usage, "-out", str(authority))
    for name, extension in (("server", "subjectAltName=DNS:localhost"), ("client", "extendedKeyUsage=clientAuth")):
        request = ["-subj", f"/CN={name}", "-addext", extension, "-out", str(folder / f"{name}.crt")]
        signed_by = ["-CA", str(authority), "-CAkey", str(authority_key)]
        _openssl("req", "-x509", *_new_key(folder / f"{name}.key"), *signed_by, *_NO_AUTHORITY, *request)
    return Certificates(
        authority, *(folder / name for name in ("server.crt", "server.key", "client.crt", "client.key"))
    )


_NO_AUTHORITY = ("-addext", "basicConstraints=critical,CA:FALSE")


def _new_key(path: Path) -> list[str]:
    return ["-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", str(path)]


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@contextmanager
def tls_in_front_of(port: int, certificates: Certificates, *, asks_for_client: bool = False) -> Generator[int]:
    """Listen with TLS on localhost, hand everything on to a server's port, and give the own port.

    ``asks_for_client`` refuses clients without a certificate of the authority.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server, certificates.server_key)
    if asks_for_client:
        context.load_verify_locations(certificates.authority)
        context.verify_mode = ssl.CERT_REQUIRED
    front = _Front(port, context)
    thread = threading.Thread(target=lambda: asyncio.run(front.run()), name="TLS", daemon=True)
    thread.start()
    front.is_ready.wait()
    try:
        yield front.port
    finally:
        front.end()
        thread.join()


class _Front:
    def __init__(self, server_port: int, context: ssl.SSLContext) -> None:
        self._server_port = server_port
        self._context = context
        self.port = 0
        self.is_ready = threading.Event()

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda _loop, _context: None)  # handshakes that fail are what is tested
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, ("127.0.0.1",), 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self.is_ready.set()
        await self._ended.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        ways = [asyncio.create_task(_copy(*way)) for way in ((reader, redis_writer), (redis_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for each in (writer, redis_writer):
                each.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
