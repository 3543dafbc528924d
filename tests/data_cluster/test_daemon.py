"""``dynamoth data-cluster`` as a process: killed, without a log server, without Java, and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dynamoth.edge.log import log_keys
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import environment_without_settings
from dynamoth_daemon.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED
from tests.data_cluster.world import POLL_S, World, reports

TIMEOUT_S = 180.0
"""A machine with much else to do starts Spark slowly."""

TYPES = [f"type {number}" for number in range(30)]


def config_file(world: World, **settings: str) -> Path:
    file = world.folder.parent / "dynamoth.toml"
    values = {"logs": world.logs, "folder": str(world.folder), "master": "local[2]", **settings}
    lines = [f'{name} = "{value}"' for name, value in values.items()]
    servers = f'[[cluster.servers]]\nid = "s1"\nurl = "{world.server_url}"\n'
    file.write_text("\n".join([servers, "[data_cluster]", "http_port = 0", *lines, ""]))
    return file


@contextmanager
def daemon(world: World) -> Generator[Child]:
    command = dynamoth_command("data-cluster", "--config", str(config_file(world)))
    child = Child("data-cluster", command, environment=environment_without_settings())
    child.start()
    try:
        yield child
    finally:
        child.kill()


def until(child: Child, holds: Callable[[], Any]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        if child.ended_by_itself:
            raise child.failure()
        assert time.monotonic() < end, "\n".join(["it does not hold; the log:", *child.lines])
        time.sleep(POLL_S)


def said(child: Child, text: str) -> Callable[[], bool]:
    return lambda: any(text in line for line in child.lines)


def java_of(child: Child) -> int:
    """Return the process id of a daemon's Java."""
    found = subprocess.run(["pgrep", "-P", str(child.pid), "java"], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[0])


def listens_elsewhere(pid: int) -> list[str]:
    """Return the addresses at which a process listens for other machines, as /proc has them."""
    sockets = set[str]()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it is closed meanwhile
            sockets.add(os.readlink(each).removeprefix("socket:[").rstrip("]"))
    tables = (Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table]
    own = [line[1] for line in lines if line[3] == "0A" and line[9] in sockets]
    assert own, "Java listens for Python"
    return [address for address in own if not address.partition(":")[0].endswith("0100007F")]


def test_a_data_cluster_that_is_killed_again_and_again_publishes_each_execution_once(world: World) -> None:
    dataset = world.set_dataset()
    world.set_query()
    interests = {each: world.register("of_type", {"type": each}) for each in TYPES}
    one, last = interests[TYPES[0]], interests[TYPES[-1]]
    spoiled = log_keys(last)[0]
    down = world.redis[1]
    down.pause()
    with daemon(world) as child:
        # A log server does not answer: the daemon waits, and says so.
        until(child, said(child, "log server l2"))
        down.resume()
        until(child, lambda: world.status("of_type") is not None)
        until(child, (world.folder / "checkpoints" / "of_type" / "base.json").exists)
        world.append(dataset, *(report for each in TYPES for report in reports(each, f"{each} a")))
        until(child, lambda: all(world.ids(each) for each in interests.values()))
        # Killed while an execution is published: one log refuses it.
        tail = world.log(last)
        world.servers.run(world.server_of(last), (b"RENAME", spoiled, b"aside"))
        world.servers.run(world.server_of(last), (b"SET", spoiled, b"no hash"))
        world.append(dataset, *(report for each in TYPES for report in reports(each, f"{each} b")))
        until(child, lambda: any(f"{each} b" in world.ids(interests[each]) for each in TYPES))
        child.kill()
    world.servers.run(world.server_of(last), (b"RENAME", b"aside", spoiled))
    assert world.log(last) == tail
    assert not _is_done(world)
    with daemon(world) as child:
        until(child, lambda: all(len(world.ids(interests[each])) == 2 for each in TYPES))
        java = Path(f"/proc/{java_of(child)}")
        assert listens_elsewhere(java_of(child)) == []
        assert "\nUmask:\t0077\n" in (java / "status").read_text(), "nobody else reads its temporary files"
        assert b"\0PYTHONSAFEPATH=1\0" in b"\0" + (java / "environ").read_bytes(), "nobody else's code is imported"
        # Its Java dies: the daemon ends, so that it is started again.
        until(child, lambda: _is_done(world))
        os.kill(java_of(child), signal.SIGKILL)
        assert child.wait(TIMEOUT_S)
        assert child.stop() == EXIT_FAILED
        ending = next(number for number, line in enumerate(child.lines) if "the data cluster ends" in line)
        # PySpark may print a traceback of its own server.
        ours = [line for line in child.lines[ending:] if line.lstrip().startswith('File "') and "dynamoth_" in line]
        assert ours == [], "no traceback of ours behind it"
    world.append(dataset, *(report for each in TYPES for report in reports(each, f"{each} c")))
    with daemon(world) as child:
        until(child, lambda: all(len(world.ids(interests[each])) == 3 for each in TYPES))
        assert child.stop(TIMEOUT_S) == EXIT_DONE
        assert said(child, "the data-cluster has ended")()
    for each, interest in interests.items():
        assert world.ids(interest) == [f"{each} a", f"{each} b", f"{each} c"]
        executions = [payload["execution"] for payload in world.log(interest)]
        assert executions == sorted(set(executions)), "each execution once"
    windows = {each["execution"]: (each["start"], each["end"]) for each in world.executions("of_type")}
    assert [*windows] == [*range(1, len(windows) + 1)]
    for number in range(2, len(windows) + 1):
        assert windows[number][0] == windows[number - 1][1], "windows follow each other"
    assert len(world.log(one)) <= len(windows)


def _is_done(world: World) -> bool:
    progress = world.progress("of_type")
    return progress is not None and progress.is_done


def refused(world: World, environment: dict[str, str] | None = None, **settings: str) -> str:
    """Return what a data cluster says that cannot begin."""
    done = subprocess.run(
        dynamoth_command("data-cluster", "--config", str(config_file(world, **settings))),
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
        env={**environment_without_settings(), **(environment or {})},
    )  # fmt: skip
    assert done.returncode == EXIT_REFUSED, done.stderr
    return done.stderr


def test_what_is_missing_is_named_with_its_cure(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(world, folder=str(tmp_path / "file" / "folder"))
    text = refused(world, {"JAVA_HOME": str(tmp_path)})
    assert "Spark needs Java" in text
    assert "install Java 17" in text
    assert "name the log servers" in refused(world, logs="")
