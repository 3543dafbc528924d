"""The event loop of the synchronous client, and its transports, against sockets of the test's own."""

from __future__ import annotations

import asyncio
import select
import selectors
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from dynamoth_client.threads.loop import TIMERS_MIN, Loop
from tests.client.sync_helpers import PATIENCE_S, Running
from tests.tls import Certificates, make_certificates

MUCH = bytes(range(256)) * 20_000
"""More than the buffers of the operating system take."""


def _loop() -> Loop:
    return Loop()  # type: ignore[abstract]


@pytest.fixture(params=["epoll", "selector"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """One as usual, and one as under cooperative schedulers, which have no epoll."""
    if request.param == "selector":
        monkeypatch.delattr(select, "epoll")
    loop = _loop()
    yield loop
    assert not loop.is_closed()
    loop.close()
    loop.close()
    assert not loop.sockets


def _run(loop: Loop, main: Coroutine[Any, Any, Any]) -> Any:
    """Drive until a coroutine has ended; its outcome."""
    loop.enter()
    try:
        task = loop.create_task(main)
        loop.call_at(loop.time() + PATIENCE_S, task.cancel)
        try:
            loop.drive(task)
        except BaseException:
            task.cancel()
            loop.drive(task)
            raise
        return task.result()
    finally:
        loop.leave()


@contextmanager
def _server(serve: Callable[[socket.socket], Any]) -> Generator[tuple[int, Running]]:
    """Accept one connection in a thread, and do ``serve`` with it; the port, and the thread."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_S)

        def accept() -> Any:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(PATIENCE_S)
                return serve(connection)

        serving = Running(accept)
        yield listening.getsockname()[1], serving


def _read_all(connection: socket.socket) -> bytes:
    data = bytearray()
    while piece := connection.recv(1 << 20):
        data += piece
    return bytes(data)


def _echo(connection: socket.socket) -> int:
    size = 0
    while piece := connection.recv(1 << 16):
        connection.sendall(piece)
        size += len(piece)
    return size


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def _secured(certificates: Certificates, serve: Callable[[socket.socket], Any]) -> Callable[[socket.socket], Any]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server, certificates.server_key)

    def secure(connection: socket.socket) -> Any:
        with context.wrap_socket(connection, server_side=True, suppress_ragged_eofs=False) as secured:
            return serve(secured)

    return secure


async def _connect(port: int, authority: Path | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, with TLS if there is an authority."""
    if authority is None:
        return await asyncio.open_connection("127.0.0.1", port)
    return await asyncio.open_connection("localhost", port, ssl=ssl.create_default_context(cafile=str(authority)))


# Sockets.


def test_all_that_is_written_arrives_in_order_also_after_close(loop: Loop) -> None:
    async def main() -> None:
        _, writer = await _connect(port)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        for part in (MUCH[:-200], MUCH[-200:-100], MUCH[-100:]):
            writer.write(part)
        assert writer.transport.get_write_buffer_size() > 0
        begin.set()
        writer.close()
        writer.close()
        writer.write(b"too late")
        assert writer.is_closing()
        await writer.wait_closed()
        assert writer.transport.get_write_buffer_size() == 0

    begin = threading.Event()

    def serve(connection: socket.socket) -> bytes:
        assert begin.wait(PATIENCE_S)
        return _read_all(connection)

    with _server(serve) as (port, serving):
        _run(loop, main())
        assert serving.result() == MUCH


@pytest.mark.parametrize("is_secured", [False, True], ids=["plain", "TLS"])
def test_reading_while_writing_and_a_proper_end(loop: Loop, certificates: Certificates, is_secured: bool) -> None:
    async def main() -> None:
        reader, writer = await _connect(port, certificates.authority if is_secured else None)
        writer.write(MUCH)
        writer.write(b"")
        assert await reader.readexactly(len(MUCH)) == MUCH, "which pauses and resumes the transport"
        writer.close()
        await writer.wait_closed()

    with _server(_secured(certificates, _echo) if is_secured else _echo) as (port, serving):
        _run(loop, main())
        assert serving.result() == len(MUCH), "the server sees the end, not a connection that was cut"


def test_abort_drops_what_waits(loop: Loop) -> None:
    async def main() -> None:
        _, writer = await _connect(port)
        writer.write(MUCH)
        transport = cast("asyncio.Transport", writer.transport)
        transport.abort()
        transport.abort()
        transport.resume_reading()
        assert transport.get_write_buffer_size() == 0
        await writer.wait_closed()
        aborted.set()

    aborted = threading.Event()

    def serve(connection: socket.socket) -> bytes:
        assert aborted.wait(PATIENCE_S)
        return _read_all(connection)

    with _server(serve) as (port, serving):
        _run(loop, main())
        assert len(serving.result()) < len(MUCH)


def _end(connection: socket.socket) -> None:
    connection.recv(1)
    connection.sendall(b"bye")


def _reset(connection: socket.socket) -> None:
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _end_tls(connection: socket.socket) -> None:
    _end(connection)
    cast("ssl.SSLSocket", connection).unwrap()


@pytest.mark.parametrize("serve", [_end, _reset, _end_tls])
def test_the_other_side_ends(loop: Loop, certificates: Certificates, serve: Callable[[socket.socket], None]) -> None:
    async def main() -> bytes:
        reader, writer = await _connect(port, certificates.authority if serve is _end_tls else None)
        writer.write(b"x")
        try:
            return await reader.read()
        finally:
            writer.close()

    with _server(_secured(certificates, serve) if serve is _end_tls else serve) as (port, _):
        if serve is _reset:
            with pytest.raises(ConnectionResetError):
                _run(loop, main())
        else:
            assert _run(loop, main()) == b"bye"


def test_writing_to_a_connection_that_is_gone_loses_it(loop: Loop) -> None:
    async def main() -> None:
        _, writer = await _connect(port)
        cast("asyncio.Transport", writer.transport).pause_reading()
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.001)
        await writer.wait_closed()

    with _server(lambda _: None) as (port, _), pytest.raises(ConnectionError):
        _run(loop, main())


def test_connecting_fails_as_with_asyncio(loop: Loop, tmp_path: Path, free_port: int) -> None:
    async def main() -> None:
        with pytest.raises(ConnectionRefusedError):
            await _connect(free_port)
        with pytest.raises(FileNotFoundError):
            await asyncio.open_unix_connection(str(tmp_path / "nobody"))
        with pytest.raises(socket.gaierror):
            await asyncio.open_connection("no.such.host.invalid", free_port)

    before = len(loop.sockets)
    _run(loop, main())
    assert len(loop.sockets) == before


def test_each_address_of_a_host_is_tried(loop: Loop, monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    async def main() -> None:
        reader, writer = await asyncio.open_connection("host", port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        writer.close()
        await writer.wait_closed()

    def resolve(host: str, port: int, **options: Any) -> list[Any]:
        assert threading.current_thread() is not threading.main_thread(), "it may take long"
        kind = socket.SOCK_STREAM
        return [(socket.AF_INET, kind, 0, "", ("127.0.0.1", port)) for port in (free_port, port)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with _server(_echo) as (port, serving):
        _run(loop, main())
        assert serving.result() == 1


def _say_nonsense(connection: socket.socket) -> None:
    connection.recv(10)
    connection.sendall(b"-ERR what?\r\n" * 10)
    _read_all(connection)


def _hang_up(connection: socket.socket) -> None:
    connection.recv(10_000)


@pytest.mark.parametrize(
    ("serve", "error"),
    [(_say_nonsense, ssl.SSLError), (_hang_up, ConnectionResetError), (_echo, ssl.SSLCertVerificationError)],
)
def test_tls_that_fails(loop: Loop, serve: Any, error: type[Exception], certificates: Certificates) -> None:
    """The last server has TLS, and a certificate of an authority that is not trusted."""

    async def main() -> None:
        with pytest.raises(error):
            await _connect(port, certificates.client if serve is _echo else certificates.authority)
        await asyncio.sleep(0)

    before = len(loop.sockets)
    with _server(_secured(certificates, serve) if serve is _echo else serve) as (port, serving):
        _run(loop, main())
        if serve is _echo:
            with pytest.raises(ssl.SSLError, match="ALERT"):
                serving.result()
    assert len(loop.sockets) == before


@pytest.mark.parametrize("is_secured", [False, True], ids=["plain", "TLS"])
def test_one_that_is_given_up_leaves_no_socket(loop: Loop, certificates: Certificates, is_secured: bool) -> None:
    """Before it is accepted, or in the handshake."""
    heard = threading.Event()

    async def main() -> None:
        before = len(loop.sockets)
        connecting = asyncio.ensure_future(_connect(port, certificates.authority if is_secured else None))
        await (asyncio.to_thread(heard.wait, PATIENCE_S) if is_secured else asyncio.sleep(0))
        connecting.cancel()
        await asyncio.wait({connecting})
        await asyncio.sleep(0)
        assert len(loop.sockets) == before

    def serve(connection: socket.socket) -> None:
        connection.recv(1)
        heard.set()
        _read_all(connection)

    if is_secured:
        with _server(serve) as (port, serving):
            _run(loop, main())
            serving.result()
        return
    with socket.socket() as listening:  # with a full backlog: nothing answers
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            _run(loop, main())


# Callbacks, timers and threads.


def test_timers_go_off_in_order_and_cancelled_ones_are_dropped(loop: Loop) -> None:
    called: list[int] = []

    async def main() -> None:
        now = loop.time()
        for number in (3, 1, 2):
            loop.call_at(now + number / 1000, called.append, number)
        loop.call_later(0.002, called.append, 99).cancel()
        for _ in range(100 * TIMERS_MIN):
            loop.call_later(1000, called.append, 99).cancel()
        assert len(cast("Any", loop)._timers) <= 2 * TIMERS_MIN
        loop.call_soon(called.append, 99).cancel()
        loop.call_soon(called.append, 0)
        await asyncio.sleep(0.01)

    _run(loop, main())
    assert called == [0, 1, 2, 3]


def test_blocking_calls_have_threads_of_their_own(loop: Loop) -> None:
    async def main() -> None:
        barrier = threading.Barrier(3)
        await asyncio.gather(*(asyncio.to_thread(barrier.wait, PATIENCE_S) for _ in range(3)))
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    _run(loop, main())


def test_it_is_the_running_loop_in_callbacks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cooperative scheduler runs others in this thread while one waits: for sockets, or for a thread to start."""
    elsewhere: list[object] = []

    def note() -> None:
        elsewhere.append(asyncio._get_running_loop())

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            note()
            return super().select(timeout)

    class Thread(threading.Thread):
        def start(self) -> None:
            note()
            super().start()

    monkeypatch.delattr(select, "epoll")
    monkeypatch.setattr(selectors, "DefaultSelector", Selector)
    monkeypatch.setattr(threading, "Thread", Thread)
    loop = _loop()

    async def main() -> None:
        await asyncio.to_thread(note)
        assert asyncio.get_running_loop() is loop
        _, writer = await _connect(port)
        writer.close()

    with _server(_echo) as (port, _):
        _run(loop, main())
    assert len(elsewhere) > 4
    assert set(elsewhere) == {None}
    loop.close()


def test_what_a_callback_raises_is_raised_or_logged(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    """It is raised in the main thread, and logged in others."""

    def fail() -> None:
        raise ZeroDivisionError

    async def main() -> str:
        loop.call_soon(fail)
        await asyncio.sleep(0)
        return "went on"

    with pytest.raises(ZeroDivisionError):
        _run(loop, main())
    assert not caplog.records
    assert Running(_run, loop, main()).result() == "went on"
    assert "ZeroDivisionError" in caplog.text


def test_what_a_task_raises_is_raised_in_the_main_thread(loop: Loop) -> None:
    """As a signal's handler may have interrupted it."""

    async def fail() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        await asyncio.wait({asyncio.create_task(fail())})
        await asyncio.sleep(PATIENCE_S)

    with pytest.raises(ZeroDivisionError):
        _run(loop, main())


def test_a_forked_child_does_not_drive_the_loop_of_its_parent(loop: Loop) -> None:
    loop.is_inherited = True
    with pytest.raises(RuntimeError, match="parent"):
        _run(loop, asyncio.sleep(0))
    loop.is_inherited = False
    _run(loop, asyncio.sleep(0))


def test_nothing_can_be_called_on_a_closed_loop() -> None:
    loop = _loop()
    loop.close()
    for call in (loop.call_soon, loop.call_soon_threadsafe):
        with pytest.raises(RuntimeError, match="closed"):
            call(print)
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)
