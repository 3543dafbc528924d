"""``dynamoth data-cluster`` is asked to end: alone, with all of its processes, and before Spark has started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dynamoth_cli.local.child import Child
from dynamoth_daemon.exit_codes import EXIT_DONE
from tests.data_cluster.test_daemon import TIMEOUT_S, daemon, said, until
from tests.data_cluster.world import World, reports


def faults(child: Child) -> list[str]:
    """Return the lines of its log that an operator would take for a fault; overruns are none: machines are slow."""
    found: list[str] = []
    for line in child.lines:
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError:
            if not line.startswith("WARNING: Using incubator modules"):
                found.append(line)
        else:
            is_overrun = "took too long" in entry["message"]
            found += [line] * (entry["level"] not in {"info", "debug"} and not is_overrun)
    return found


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, and these have started."""
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    own = [int(each) for each in done.stdout.split()]
    return [*own, *(each for child in own for each in children(child))]


def terminate_all(child: Child) -> None:
    """Send SIGTERM to a process and to all that it has started, as systemd does; wait until it has ended."""
    for pid in [*children(child.pid), child.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert child.wait(TIMEOUT_S)


def test_processes_that_are_all_asked_to_end_log_no_faults(world: World) -> None:
    """As with systemd's default, ``KillMode=control-group``."""
    dataset = world.set_dataset()
    queries = [f"of_type_{number}" for number in range(4)]
    for query in queries:
        world.set_query(query, sql="SELECT r.id FROM reports r WHERE r.type = :type AND r.size < 9")
    interests = [world.register(query, {"type": "fire"}) for query in queries]
    with daemon(world) as child:
        until(child, lambda: all((world.folder / "checkpoints" / each / "base.json").exists() for each in queries))
        world.append(dataset, *reports("fire", "a"))
        until(child, lambda: all(world.ids(each) for each in interests))
        world.append(dataset, *reports("fire", "b"))
        terminate_all(child)
        assert child.stop(TIMEOUT_S) == EXIT_DONE, child.lines
        assert faults(child) == [], "\n".join(child.lines)
        assert said(child, "the data-cluster has ended")()


@pytest.mark.parametrize("sends_to_all", [False, True], ids=["alone", "all of its processes"])
def test_one_that_is_asked_to_end_before_spark_has_started_is_done(world: World, *, sends_to_all: bool) -> None:
    with daemon(world) as child:
        until(child, lambda: children(child.pid))
        if sends_to_all:
            terminate_all(child)
        assert child.stop(TIMEOUT_S) == EXIT_DONE, child.lines
        assert not said(child, "has started")()
        assert faults(child) == [], "\n".join(child.lines)


def test_one_that_is_asked_to_end_while_it_is_loaded_is_done(world: World) -> None:
    with daemon(world) as child:
        status = Path(f"/proc/{child.pid}/status")

        def catches_sigterm() -> bool:
            caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
            return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

        until(child, catches_sigterm)
        assert child.stop(TIMEOUT_S) == EXIT_DONE, child.lines
        assert not said(child, "has started")()
