"""Child processes: they end when they should, their last lines are kept, and they never outlive their parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from dynamoth_cli.local.child import LINES_KEPT_MAX, Child, ChildEnded, interrupted_by_signals

WAITS = "import sys; print('ready', flush=True); sys.stdin.read()"
IGNORES_SIGTERM = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); sys.stdin.read()"
)


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.kill()


def python(program: str, children: list[Child], name: str = "child") -> Child:
    child = Child(name, [sys.executable, "-c", program], environment=os.environ, pipes=True)
    children.append(child)
    child.start()
    return child


def wait_ready(child: Child) -> None:
    assert child.stdout.readline() == b"ready\n"


def test_it_runs_until_it_is_stopped(children: list[Child]) -> None:
    child = python(WAITS, children)
    wait_ready(child)
    assert (child.running, child.ended_by_itself) == (True, False)
    assert os.getpgid(child.pid) == child.pid, "a keyboard interrupt of the terminal does not reach it"
    assert child.stop() == -signal.SIGTERM
    assert (child.running, child.ended_by_itself) == (False, False)
    assert child.stop() == -signal.SIGTERM, "stopping twice does no harm"


def test_one_that_does_not_obey_is_killed(children: list[Child]) -> None:
    child = python(IGNORES_SIGTERM, children)
    wait_ready(child)
    assert child.stop(timeout_s=0.1) == -signal.SIGKILL


def test_one_that_hangs_in_sigstop_can_be_stopped(children: list[Child]) -> None:
    child = python(WAITS, children)
    wait_ready(child)
    os.kill(child.pid, signal.SIGSTOP)
    assert child.stop() == -signal.SIGTERM


def test_its_end_is_reported_with_its_last_lines(children: list[Child]) -> None:
    child = python("import sys; sys.stderr.write('no such\\nthing\\n'); sys.exit(3)", children, "agent s1")
    assert child.wait(30)
    assert child.ended_by_itself
    text = str(child.failure())
    assert text.startswith(f"agent s1 (process {child.pid}) ended with status 3; its last output:")
    assert text.endswith("\n  no such\n  thing")


def test_a_line_of_its_log_is_waited_for(children: list[Child]) -> None:
    child = python("import sys; sys.stderr.write('it has started\\n'); sys.stderr.flush(); sys.stdin.read()", children)
    child.wait_for_line("has started", 30)
    with pytest.raises(TimeoutError, match=r"child has not logged 'goes on' within 0 s(?s:.*)\n  it has started"):
        child.wait_for_line("goes on", 0)


def test_its_end_ends_the_wait_for_a_line(children: list[Child]) -> None:
    child = python("import sys; sys.exit('no such thing')", children)
    with pytest.raises(ChildEnded, match=r"ended with status 1; its last output:\n  no such thing"):
        child.wait_for_line("has started", 30)


def test_its_death_by_a_signal_is_named(children: list[Child]) -> None:
    child = python(WAITS, children)
    wait_ready(child)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(30)
    assert "was killed by SIGKILL; its last output: nothing" in str(child.failure())


def test_it_can_be_started_again(children: list[Child]) -> None:
    child = python("import sys; sys.stderr.write('once\\n')", children)
    assert child.wait(30)
    child.stop()
    assert child.lines == ["once"]
    first = child.pid
    child.start()
    assert child.pid != first
    assert child.wait(30)
    child.stop()
    assert child.lines == ["once"]


def test_each_line_is_handed_on_and_only_the_last_are_kept(children: list[Child]) -> None:
    seen: list[str] = []
    program = f"import sys\nfor i in range({LINES_KEPT_MAX + 50}): sys.stderr.write(f'{{i}}\\n')"
    child = Child("c", [sys.executable, "-c", program], environment=os.environ, on_line=seen.append)
    children.append(child)
    child.start()
    assert child.wait(30)
    child.stop()
    assert seen == [str(number) for number in range(LINES_KEPT_MAX + 50)]
    assert child.lines == seen[-LINES_KEPT_MAX:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_interrupts_and_later_ones_do_not_disturb(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    cleaned_up = False
    with interrupted_by_signals():
        try:
            os.kill(os.getpid(), number)
            threading.Event().wait(10)
        except KeyboardInterrupt:
            for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), again)
            cleaned_up = True
    assert cleaned_up
    assert signal.getsignal(number) is before
