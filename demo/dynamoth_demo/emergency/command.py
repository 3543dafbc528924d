"""``dynamoth demo-emergency``: users get emergency reports near them, while an audit looks on.

Three Redis servers with agents and balancer, two log servers, five brokers with a coordinator, the data cluster on
Spark, and the emergency application of ``examples/emergency``: 400 users who walk through a town, eight reporters and a
page. The data cluster is killed twice, once in the middle of an execution; a broker is drained; and one query has a
period that is shorter than its executions. At the end the audit recomputes every result set from the archive.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dynamoth_demo
from dynamoth.errors import ConfigError
from dynamoth_analytics.session import check_java
from dynamoth_cli.local.child import Child, interrupted_by_signals
from dynamoth_cli.local.embedded import keep_port
from dynamoth_cli.numbers import count_up_to
from dynamoth_daemon.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from dynamoth_demo.emergency.play import Play, advice, say
from dynamoth_demo.emergency.servers import END_TIMEOUT_S, DemoFailed, Servers, TooSlow, application_environment

USERS, USERS_MAX = 400, 20_000
BROKERS, BROKERS_MAX = 5, 20
MINUTES = 2.0
USERS_PER_PROCESS = 100

HURRIED = Path(__file__).with_name("hurried.toml")
HURRIED_QUERY = "report_counts_hurried"

QUIET_S = 7.0
"""Users have got everything when nothing has come for this time: brokers have compared the ends of logs by then."""

ARRIVAL_TIMEOUT_S = 60.0

INTERRUPTED = (
    "interrupted: ending users, reporters and page, the data cluster, the coordinator, brokers and Redis servers; this"
    " takes up to a minute"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--users", type=count_up_to(USERS_MAX), default=USERS, metavar="N", help="number of users (default %(default)s)"
    )
    parser.add_argument(
        "--brokers", type=count_up_to(BROKERS_MAX), default=BROKERS, metavar="N", help="(default %(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        metavar="M",
        help="how long it goes on (default %(default)g), and longer on a slow machine",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the town and of all that happens")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep archive, journals and logs in this new folder"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what the audit has found to this file")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo. Returns 0 when the audit is clean and everything has happened."""
    check_java()
    if arguments.brokers < 2:
        raise ConfigError("--brokers: two are needed, as one is drained")
    with interrupted_by_signals():
        try:
            with ExitStack() as stack:
                if arguments.keep is None:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamoth-demo-")))
                else:
                    folder = arguments.keep.resolve()
                    folder.mkdir(parents=True)
                try:
                    return _Demo(arguments, stack, folder).run()
                except KeyboardInterrupt:
                    say(INTERRUPTED)
                    raise
                except TooSlow as error:
                    log = str(folder / "logs" / "data-cluster.log") if arguments.keep else None
                    raise TooSlow(f"{error}; {advice(log)}") from error
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


def examples_folder() -> Path:
    """Return the folder that has the application: of the repository, or of the installed package."""
    own = Path(dynamoth_demo.__file__).parent
    for folder in (own.parents[1] / "examples", own / "examples"):
        if (folder / "emergency" / "citizens.py").exists():
            return folder
    raise ConfigError("the folder examples/emergency is not installed: run the demo in a checkout")


class _Citizens:
    """A process of users, and what it said last."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.stats: dict[str, Any] = {}

    def read(self) -> None:
        """Read its lines to the end."""
        for line in self.child.stdout:
            self.stats = json.loads(line)


class _Demo:
    """One run of the demo."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack, folder: Path) -> None:
        self._arguments = arguments
        self._stack = stack
        self._folder = folder
        self._examples = examples_folder()
        self._definitions = [self._examples / "emergency" / "emergency.toml", HURRIED]
        read = [tomllib.loads(file.read_text()) for file in self._definitions]
        self._queries = [name for each in read for name in each["queries"]]
        self._partitions = {"reports": int(read[0]["datasets"]["reports"]["partitions"])}
        self._journals = folder / "journals"
        self._journals.mkdir()
        self._keys = folder / "keys.json"
        self._shelters = folder / "shelters.jsonl"
        self._prepare()
        self._page_port = keep_port(stack)
        self._servers = Servers(stack, folder, self._keys, arguments.brokers, f"http://127.0.0.1:{self._page_port}")
        self._citizens: list[_Citizens] = []
        self._begin_s = 0.0
        middle = [HURRIED_QUERY, "reports_of_type"]
        self._play = Play(self._servers, self._queries, self._partitions, middle, self._show)

    def _prepare(self) -> None:
        """Make keys and shelters."""
        command = [sys.executable, "-P", "-m", "emergency.prepare", "--seed", str(self._arguments.seed)]
        command += ["--keys", str(self._keys), "--shelters", str(self._shelters)]
        subprocess.run(command, env=application_environment(self._examples), check=True)

    def _application(self, name: str, *arguments: str) -> Child:
        """Return a process of the application, which ends with the demo."""
        child = Child(
            name,
            [sys.executable, "-P", "-m", *arguments, "--seed", str(self._arguments.seed)],
            environment=application_environment(self._examples),
            pipes=True,
        )
        self._stack.callback(child.kill)
        return child

    # The run.

    def run(self) -> int:
        """Play it, and judge."""
        standing = len(self._queries) - 1
        say(f"starting servers, brokers and Spark; {standing} standing queries, and {HURRIED_QUERY}:")
        say(f"one of the {standing} once more, with a period that is shorter than its executions")
        self._servers.start(self._definitions, self._shelters)
        self._start_page()
        reporters = self._start_application()
        self._play.run(self._length_s)
        self._end(reporters, "the reporters")
        self._play.catch_up()
        self._wait_quiet()
        moved = self._sum("moved")
        for each in self._citizens:
            self._end(each.child, each.child.name)
        self._servers.data_cluster.stop(END_TIMEOUT_S)
        return self._judge(moved)

    def _start_page(self) -> None:
        page = self._application(
            "page", "emergency.serve", "--port", str(self._page_port), "--keys", str(self._keys),
            "--shelters", str(self._shelters), "--brokers", *self._servers.broker_urls,
        )  # fmt: skip
        page.start()
        url = page.stdout.readline().decode().strip()
        if not url:
            raise page.failure()
        say(f"to be one of the users, open in a browser:\n  {url}")

    def _start_application(self) -> Child:
        arguments, length_s = self._arguments, self._length_s
        self._begin_s = time.monotonic()
        begin = time.time()
        for first in range(0, arguments.users, USERS_PER_PROCESS):
            end = min(first + USERS_PER_PROCESS, arguments.users)
            child = self._application(
                f"users {first} to {end - 1}",
                *("emergency.citizens", "--brokers", *self._servers.broker_urls, "--keys", str(self._keys)),
                *("--journal", str(self._journals / f"citizens{first}.jsonl"), "--users", f"{first}:{end}"),
                *("--seconds", str(length_s), "--begin", str(begin), "--hurried"),
            )
            child.start()
            citizens = _Citizens(child)
            threading.Thread(target=citizens.read, daemon=True).start()
            self._citizens.append(citizens)
        reporters = self._application(
            "reporters",
            *("emergency.reporters", "--brokers", *self._servers.post_urls, "--keys", str(self._keys)),
            *("--journal", str(self._journals / "reporters.jsonl")),
        )
        reporters.start()
        return reporters

    @property
    def _length_s(self) -> float:
        return 60.0 * float(self._arguments.minutes)

    def _show(self) -> None:
        self._servers.check()
        for each in self._citizens:
            if each.child.ended_by_itself:
                raise each.child.failure()
        where: Counter[str] = Counter()
        for each in self._citizens:
            where.update(each.stats.get("where", {}))
        # Those that are at no broker are away for a while, as their plan says, or connect again.
        places = ", ".join(
            f"{broker or 'away'} {where[broker]}" for broker in sorted(where, key=lambda id_: (not id_, id_))
        )
        done = f"delivered {self._sum('delivered'):,}; moved {self._sum('moved')}; gaps {self._sum('gaps')}"
        say(f"{time.monotonic() - self._begin_s:5.0f} s  users: {places}; {done}")

    def _sum(self, name: str) -> int:
        return sum(each.stats.get(name, 0) for each in self._citizens)

    # The end.

    def _end(self, child: Child, name: str) -> None:
        """End a process of the application, which has to end well."""
        if status := child.stop(END_TIMEOUT_S):
            raise DemoFailed(f"{name} ended with status {status}: {' '.join(child.lines[-5:])}")

    def _wait_quiet(self) -> None:
        """Wait until users have got everything."""
        end = time.monotonic() + ARRIVAL_TIMEOUT_S
        delivered, since = self._sum("delivered"), time.monotonic()
        while time.monotonic() < min(since + QUIET_S, end):
            time.sleep(1.0)
            if self._sum("delivered") != delivered:
                delivered, since = self._sum("delivered"), time.monotonic()

    def _judge(self, moved: int) -> int:
        """Run the audit."""
        result = self._arguments.json or self._folder / "audit.json"
        command = [sys.executable, "-P", "-m", "emergency.audit", "--folder", str(self._servers.folder)]
        command += ["--logs", *(f"{id_}={url}" for id_, url in self._servers.logs.items())]
        command += ["--shelters", str(self._shelters), "--journals", str(self._journals), "--json", str(result)]
        command += ["--definitions", *map(str, self._definitions)]
        command += ["--outages", *(f"{begin}:{end}" for begin, end in self._play.outages)]
        status = subprocess.run(command, env=application_environment(self._examples), check=False).returncode
        if not result.exists():
            return EXIT_FAILED
        found = json.loads(result.read_text())
        found["moved"] = moved
        result.write_text(json.dumps(found))
        missing = [
            text
            for text, has_happened in (
                ("no user was moved", moved > 0),
                ("no query was overrun", found["overruns"][HURRIED_QUERY] > 0),
                ("no user got anything", found["delivered"] > 0),
            )
            if not has_happened
        ]
        for text in missing:
            say(text)
        return EXIT_FAILED if status or missing else EXIT_DONE
