"""Provisioners: the operator's command and what it may do wrong, the pool, and processes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamoth.errors import ConfigError
from dynamoth_balancer.process.provisioners import (
    ANSWER_BYTES_MAX,
    CommandProvisioner,
    PoolProvisioner,
    ProvisionerFailed,
)
from dynamoth_daemon import event_loop

CLOUD = """\
import json, os, sys
request, folder = json.load(sys.stdin), sys.argv[1]
answer = {}
if request["action"] == "start":
    open(os.path.join(folder, request["id"]), "w").close()
    answer = {"url": "redis://" + request["id"] + ":6379", "price": 3}
elif request["action"] == "free":
    path = os.path.join(folder, request["id"])
    if os.path.exists(path):
        os.remove(path)
else:
    answer = {"ids": sorted(os.listdir(folder))}
json.dump(answer, sys.stdout)
"""
"""A cloud whose servers are files."""


def command(script: str, *arguments: str) -> CommandProvisioner:
    """Return a provisioner that runs a Python script."""
    return CommandProvisioner([sys.executable, "-c", script, *arguments])


# The command.


async def test_a_command_starts_lists_and_frees_servers(tmp_path: Path) -> None:
    provisioner = command(CLOUD, str(tmp_path))

    assert await provisioner.start("auto-7-1") == "redis://auto-7-1:6379"
    assert await provisioner.start("auto-7-1") == "redis://auto-7-1:6379", "requests may be repeated"
    assert await provisioner.running() == ["auto-7-1"]
    await provisioner.free("auto-7-1")
    await provisioner.free("auto-7-1")
    assert await provisioner.running() == []


def test_a_command_can_be_run_in_the_event_loop_of_a_balancer(tmp_path: Path) -> None:
    provisioner = command(CLOUD, str(tmp_path))
    assert event_loop.run(provisioner.start("auto-7-1")) == "redis://auto-7-1:6379"
    assert event_loop.run(provisioner.running()) == ["auto-7-1"]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("", "must write one JSON object to stdout, not: nothing"),
        ("print('starting ...')", "must write one JSON object to stdout, not: starting ..."),
        ("print('[1, 2]')", r"must write one JSON object to stdout, not: \[1, 2\]"),
        ("print('{}' * 2)", "must write one JSON object to stdout, not: {}{}"),
        ("import sys; sys.stdout.buffer.write(bytes(range(128, 256)))", "must write one JSON object to stdout, not: "),
        ("print('{}')", "answers without a url: {}"),
        ("print('{\"url\": 6379}')", 'answers without a url: {"url": 6379}'),
        ('print(\'{"url": "http://x"}\')', "answers with a url that cannot be used: "),
        ("import sys; sys.exit('no credit left')", "ends with status 1: no credit left"),
        ("import sys; print('quota'); sys.exit(3)", "ends with status 3: quota"),
        ("import sys; sys.exit(3)", "ends with status 3: it writes nothing"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL: it writes nothing"),
        ("import os; os.kill(os.getpid(), 35)", "was killed by signal 35: it writes nothing"),
        ("print('[' * 100000)", r"must write one JSON object to stdout, not: \["),
        (r"""print('{"url": "redis://\\ud800:x@a"}')""", r"a url that cannot be used: 'redis://\\ud800:x@a'"),
        ("print('{\"url\": \"redis://' + 'a' * 5000 + '\"}')", r"a url that cannot be used: 'redis://a+ \.\.\.$"),
        ("print('x' * 10000)", r"not: x{200} \.\.\.$"),
        (f"print('x' * {2 * ANSWER_BYTES_MAX})", f"writes more than {ANSWER_BYTES_MAX} bytes"),
        ("while True: print('x' * 10000)", f"writes more than {ANSWER_BYTES_MAX} bytes"),
    ],
)
async def test_what_a_command_does_wrong_is_said_in_words(script: str, text: str) -> None:
    with pytest.raises(ProvisionerFailed, match=text):
        await command(script).start("auto-7-1")


async def test_a_list_of_something_else_than_ids_is_refused() -> None:
    with pytest.raises(ProvisionerFailed, match="answers without a list of ids"):
        await command("print('{\"ids\": [7]}')").running()
    with pytest.raises(ProvisionerFailed, match=r"answers with an id that no server has: 'auto-\\ud800'"):
        await command(r"""print('{"ids": ["auto-1-1", "auto-\\ud800"]}')""").running()
    many = "import json; print(json.dumps({'ids': [f'auto-{n}-1' for n in range(2000)]}))"
    with pytest.raises(ProvisionerFailed, match="answers with 2000 ids, and may list at most 1000"):
        await command(many).running()


async def test_a_command_that_does_not_exist_is_said_so() -> None:
    with pytest.raises(ProvisionerFailed, match="the command /nowhere/rent cannot be run: No such file or directory"):
        await CommandProvisioner(["/nowhere/rent"]).start("auto-7-1")


@pytest.mark.parametrize("obstinate", [False, True])
async def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path, obstinate: bool) -> None:
    ignore = "trap '' TERM; " if obstinate else ""
    script = f"{ignore}sleep 1000 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/pid; wait"
    request = asyncio.create_task(CommandProvisioner(["/bin/sh", "-c", script]).start("auto-7-1"))
    await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    pids = [int((tmp_path / name).read_text()) for name in ("pid", "child")]
    await until(lambda: not any(map(runs, pids)))


@pytest.mark.parametrize("turns", range(12))
async def test_a_command_that_is_cancelled_while_it_starts_leaves_nothing(tmp_path: Path, turns: int) -> None:
    children = tmp_path / "children"
    children.touch()
    script = f"sleep 1000 & echo $! >> {children}; wait"
    request = asyncio.create_task(CommandProvisioner(["/bin/sh", "-c", script]).start("auto-7-1"))
    for _ in range(turns):
        await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request

    await until(lambda: not any(runs(int(pid)) for pid in children.read_text().split()))


async def test_a_command_may_start_a_server_that_keeps_its_stdout_open(tmp_path: Path) -> None:
    script = f'sleep 1000 & echo $! > {tmp_path}/child; echo \'{{"url": "redis://new"}}\''

    assert await CommandProvisioner(["/bin/sh", "-c", script]).start("auto-7-1") == "redis://new"
    child = int((tmp_path / "child").read_text())
    assert runs(child), "it is the server"
    os.kill(child, signal.SIGKILL)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the test's own timeout bounds that."""
    while not condition():  # noqa: ASYNC110 - no event tells of other processes
        await asyncio.sleep(0.01)


def runs(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set fleet\.command to a program"):
        CommandProvisioner([])


# The pool.


async def test_a_pool_gives_each_server_once_and_takes_it_back() -> None:
    pool = PoolProvisioner(["redis://a", "redis://b"])

    assert await pool.start("auto-1-1") == "redis://a"
    assert await pool.start("auto-1-1") == "redis://a"
    assert await pool.start("auto-1-2") == "redis://b"
    with pytest.raises(ProvisionerFailed, match=r"all 2 servers of the pool are in use: add some to fleet\.pool, or"):
        await pool.start("auto-3-1")
    await pool.free("auto-1-1")
    await pool.free("auto-1-1")
    assert await pool.start("auto-3-1") == "redis://a"
    assert await pool.running() == ["auto-1-2", "auto-3-1"]


async def test_a_pool_tries_another_server_than_the_one_that_was_just_put_back() -> None:
    pool = PoolProvisioner(["redis://down", "redis://up"])

    assert await pool.start("auto-1-1") == "redis://down"
    await pool.free("auto-1-1")
    assert await pool.start("auto-1-2") == "redis://up"


async def test_a_pool_does_not_give_what_the_plan_uses() -> None:
    pool = PoolProvisioner(["redis://a", "redis://b"])
    pool.adopt({"auto-1-1": "redis://a", "s1": "redis://c"})

    assert await pool.running() == ["auto-1-1"]
    assert await pool.start("auto-3-1") == "redis://b"


async def test_a_pool_says_who_starts_the_agent_of_a_server_in_use() -> None:
    pool = PoolProvisioner(["redis://a", "redis://b"])
    assert await pool.start("auto-1-1") == "redis://a"
    pool.adopt({"auto-1-1": "redis://a", "auto-1-2": "redis://was-taken-out"})

    for id_, url in (("auto-1-1", "redis://a"), ("auto-1-2", "redis://was-taken-out")):
        with pytest.raises(ProvisionerFailed, match=f"are yours: start 'dynamoth agent --standby {url}' again"):
            await pool.start(id_)
    assert await pool.running() == ["auto-1-1"]


@pytest.mark.parametrize(
    ("urls", "text"),
    [
        ([], "needs standby servers: name their URLs in fleet.pool"),
        (["redis://a", "redis://a"], "fleet.pool names servers twice: redis://a"),
        (["http://a"], "http://a"),
    ],
)
def test_a_pool_that_cannot_work_is_refused(urls: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PoolProvisioner(urls)
