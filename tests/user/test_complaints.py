from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamoth.edge.frames import Connect, Error
from dynamoth_user import Client, Failed, Interrupted, complaints
from dynamoth_user.complaints import REASONS_MAX, Complaints, shown
from tests.tls import make_certificates
from tests.user.scripted_broker import scripted_broker

URL = "wss://ann:secret@example.org:443/connect?token=secret"


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "dynamoth_user")
    return caplog


def test_a_reason_is_logged_once_and_others_not_all_at_once(log: pytest.LogCaptureFixture) -> None:
    now = 0.0
    made = Complaints(lambda: now)
    logged_at: list[int] = []
    for at, reason in ((0, "a"), (1, "a"), (2, "b"), (10, "a"), (11, "b"), (12, "c"), (25, "b"), (26, "c")):
        now = at
        before = len(log.messages)
        made.add(reason, URL)
        logged_at += [at] * (len(log.messages) - before)
    assert logged_at == [0, 11, 26]
    assert log.messages == [f"{reason} (wss://example.org:443/connect)" for reason in "abc"]
    made.clear()
    now = 40.0
    made.add("a", URL)
    assert len(log.messages) == 4


def test_reasons_that_are_remembered_are_bounded() -> None:
    now = 0.0
    made = Complaints(lambda: now)
    for number in range(3 * REASONS_MAX):
        now += 10.0
        made.add(str(number), URL)
    assert len(made._logged) <= REASONS_MAX  # pyright: ignore[reportPrivateUsage]


def test_secrets_of_a_url_are_not_logged() -> None:
    assert shown(URL) == "wss://example.org:443/connect"


@asynccontextmanager
async def answering(answer: bytes) -> AsyncGenerator[str]:
    """Run a server that answers everything with the same bytes; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/connect"


async def interrupted(url: str) -> Interrupted:
    """Return why a client that has no ``on_state`` of the application's cannot connect."""
    states: asyncio.Queue[object] = asyncio.Queue()
    async with Client([url], proxy=None, on_state=states.put_nowait):
        state = await states.get()
    assert isinstance(state, Interrupted)
    return state


def refusal(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status.encode(), len(body), body)


ANSWERS = {
    "origin": (
        refusal("403 Forbidden", b"Pages of this origin may not connect.\n"),
        "403 Pages of this origin may not",
    ),
    "full": (refusal("503 Service Unavailable", b"draining"), "503 draining"),
    "no body": (refusal("502 Bad Gateway", b""), "502 Bad Gateway"),
    "long": (refusal("500 Oops", b"x" * 5000), "500 " + "x" * complaints.BODY_CHARACTERS_MAX + " ("),
    "path": (refusal("404 Not Found", b"Users connect at /connect.\n"), "404 Users connect at /connect. ("),
    "port": (
        refusal("404 Not Found", b"404: Not Found"),
        "brokers serve users at `broker.port`, and the path /connect",
    ),
    "no HTTP": (b"-ERR unknown command\r\n\r\n", "is this the port of a broker"),
}


@pytest.mark.parametrize(("answer", "text"), ANSWERS.values(), ids=ANSWERS.keys())
async def test_what_a_server_answers_is_logged(answer: bytes, text: str, log: pytest.LogCaptureFixture) -> None:
    async with answering(answer) as url:
        state = await interrupted(url)
    [message] = log.messages
    assert text in message
    assert url in message
    assert state.url == url


@pytest.mark.parametrize("is_reset", [False, True])
async def test_tls_at_a_plain_port_is_logged_with_the_cure(log: pytest.LogCaptureFixture, is_reset: bool) -> None:
    """It answers no TLS, or resets the connection, as a broker without TLS does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if is_reset:
            writer.transport.abort()  # with bytes that were not read
        else:
            writer.write(b"-ERR unknown command\r\n")
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1)
    async with server:
        await interrupted(f"wss://127.0.0.1:{server.sockets[0].getsockname()[1]}/connect")
    [message] = log.messages
    assert "not to be reached by ws://?" in message


async def test_a_port_where_nobody_listens_is_logged_once(log: pytest.LogCaptureFixture) -> None:
    async with answering(b"") as url:
        pass
    states: asyncio.Queue[object] = asyncio.Queue()
    async with Client([url], proxy=None, on_state=states.put_nowait):
        for _ in range(5):
            assert isinstance(await states.get(), Interrupted)
    [message] = log.messages
    assert "does the broker run" in message
    assert url in message


async def test_a_certificate_of_an_unknown_authority_is_logged(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    certificates = make_certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates.server, certificates.server_key)
    async with scripted_broker(tls=tls) as broker:
        await interrupted(broker.url)
    [message] = log.messages
    assert "give `ssl` a context" in message


async def test_a_refused_token_is_logged_with_its_cause(log: pytest.LogCaptureFixture) -> None:
    states: asyncio.Queue[object] = asyncio.Queue()
    async with scripted_broker() as broker, Client([broker.url], proxy=None, token="t", on_state=states.put_nowait):
        peer = await broker.peer()
        await peer.read(Connect)
        await peer.send(Error("token_refused", "the token names an unknown key", "never"))
        await peer.close(4001, "token_refused")
        assert await states.get() == Failed(4001, "token_refused: the token names an unknown key")
    [message] = log.messages
    assert "the token names an unknown key" in message


async def test_a_refused_refresh_is_logged(log: pytest.LogCaptureFixture) -> None:
    logged = asyncio.Event()

    def note(_: logging.LogRecord) -> bool:
        logged.set()
        return True

    log.handler.addFilter(note)
    async with scripted_broker() as broker, Client([broker.url], proxy=None, token="t"):
        peer = await broker.peer()
        await peer.welcome()
        await peer.send(Error("token_refused", "the signature is wrong", "never"))
        await logged.wait()
    log.handler.removeFilter(note)
    [message] = log.messages
    assert message == f"a broker reports token_refused: the signature is wrong ({broker.url})"
