from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace

import pytest

from dynamoth_broker.process.transport import prepare
from tests.broker.transport_users import (
    CLOSE,
    OPTIONS,
    PATIENCE_S,
    SHORT,
    TEXT,
    Run,
    raw_user,
    request,
    run,
    serving,
    until,
    user,
)
from tests.tls import Certificates, make_certificates

__all__ = ["run"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def server_tls(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server, certificates.server_key)
    return context


@pytest.fixture
def client_tls(certificates: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificates.authority)


def test_messages_and_closes(run: Run, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext) -> None:
    async def main() -> None:
        async with serving(OPTIONS, server_tls) as (server, recorder):
            async with user(server.port, tls=client_tls) as raw:
                raw.send(TEXT, b'{"a":"' + b"x" * 60_000 + b'"}')
                await recorder.until("received")
                recorder.connections[0].send(prepare({}, b"y" * 300_000))
                assert len((await raw.frame())[1]) == 300_008
                raw.send(CLOSE, (1000).to_bytes(2, "big"))
                assert (await raw.close_frame())[0] == 1000
                await raw.end()
                await recorder.until("closed")
            async with user(server.port, tls=client_tls) as raw:
                raw.write(bytes([0x81, 0xFF]) + (10**8).to_bytes(8, "big") + b"\0" * 4 + b"x" * 100_000)
                assert (await raw.close_frame())[0] == 1009
                raw.writer.close()
                await recorder.until("closed", 2)

    run(main())


def test_slow_readers(run: Run, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext) -> None:
    async def main() -> None:
        options = replace(SHORT, unsent_bytes_max=512 * 1024, handshake_timeout_s=PATIENCE_S)
        async with serving(options, server_tls) as (server, recorder), user(server.port, tls=client_tls):
            await recorder.until("opened")
            (conn,) = recorder.connections
            async with asyncio.timeout(PATIENCE_S):
                while "overflowed" not in recorder.kinds:
                    conn.send(prepare({"d": "x" * 16_000}))
                    await asyncio.sleep(0)
            conn.close(4003)
            await recorder.until("closed")
            assert recorder.kinds == ["opened", "overflowed", "closed"]

    run(main())


def test_slow_and_wrong_handshakes(run: Run, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext) -> None:
    async def main() -> None:
        async with serving(SHORT, server_tls) as (server, recorder), raw_user(server.port) as silent:
            async with raw_user(server.port) as plain:
                plain.write(request())
                await plain.end()
            async with raw_user(server.port, tls=client_tls) as slow:
                slow.write(request()[:-2])
                await slow.end()
            await silent.end()
            await until(lambda: server.failed_handshakes == 2)
            assert recorder.events == []

    run(main())


def test_closing_the_server_ends_handshakes(run: Run, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext) -> None:
    async def main() -> None:
        async with (
            serving(OPTIONS, server_tls) as (server, recorder),
            raw_user(server.port) as silent,
            user(server.port, tls=client_tls) as raw,
        ):
            await recorder.until("opened")
            async with asyncio.timeout(PATIENCE_S):
                await server.close()
            await asyncio.gather(silent.end(), raw.end())
            assert recorder.kinds == ["opened", "closed"]

    run(main())
