"""redis-py's own publish/subscribe tests, run against the drop-in client on a whole cluster.

``make conformance``, or ``python -m tests.conformance [ARGUMENT OF PYTEST ...]`` for some of them (``-k reconnect``).
The tests are those of the pinned version of redis-py, taken from its source distribution each time; nothing of them is
kept. Some need Redis 7, and are skipped visibly with the Redis 6.2 that comes with the project: put a newer
``redis-server`` on the PATH. Those for Redis Cluster (``onlycluster``) are left out. Exits with 1 when a test failed
that ``excused.toml`` does not excuse, or one passed that it does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from dynamoth_cli.local.child import interrupted_by_signals
from dynamoth_cli.local.cluster import HOST, LocalCluster

SERVERS = 3
DATABASE = 9
"""Where the tests keep their keys. They flush their database after each test; the plan is in database 0."""

RUN_S_MAX = 900.0
"""Bound of the tests together: asyncio's take half a minute, a test that hangs is ended after half a minute."""

PORTS_VARIABLE = "DYNAMOTH_CONFORMANCE_PORTS"
"""What tells the plugin the ports of the servers."""

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE.parents[1] / "requirements"

ASYNCIO_TESTS = "tests/test_asyncio/test_pubsub.py"
SYNC_TESTS = "tests/test_pubsub.py"


def main() -> int:
    """Run; return the status to exit with, which is pytest's."""
    with tempfile.TemporaryDirectory(prefix="dynamoth-conformance-") as folder, interrupted_by_signals():
        unpacked, packages = Path(folder, "redis-py"), Path(folder, "packages")
        _unpack_tests(_pinned_version(), unpacked)
        _pip("install", "--no-deps", "--requirement", str(REQUIREMENTS / "conformance.txt"), "--target", str(packages))
        with LocalCluster(SERVERS) as cluster:
            return _run_pytest(cluster, unpacked, packages)


def _pinned_version() -> str:
    match = re.search(r"^redis==(\S+)", (REQUIREMENTS / "dev.txt").read_text(), re.MULTILINE)
    assert match is not None, "requirements/dev.txt pins redis"
    return match[1]


def _unpack_tests(version: str, target: Path) -> None:
    """Put the folder ``tests`` of a version of redis-py into ``target``, and nothing else of it.

    Its ``redis`` must not be there: it would be imported instead of the one that is installed.
    """
    with tempfile.TemporaryDirectory(prefix="dynamoth-sdist-") as folder:
        _pip("download", "--no-binary", "redis", "--no-deps", f"redis=={version}", "--dest", folder)
        [archive] = Path(folder).glob("redis-*.tar.gz")
        with tarfile.open(archive) as tar:
            top = f"redis-{version}/"
            members = [member for member in tar.getmembers() if member.name.startswith(f"{top}tests/")]
            assert members, "the source distribution ships its tests"
            for member in members:
                member.name = member.name.removeprefix(top)
            tar.extractall(target, members, filter="data")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True)


def _run_pytest(cluster: LocalCluster, unpacked: Path, packages: Path) -> int:
    ports = [server.port for server in cluster.redis.values()]
    path = [str(HERE), str(packages), *(os.path.abspath(each) for each in sys.path if each)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), PORTS_VARIABLE: ",".join(map(str, ports))}
    command = [sys.executable, "-P", "-m", "pytest", "-c", str(HERE / "pytest.ini"), "--rootdir", str(unpacked)]
    command += ["-p", "swapped_client", "--redis-url", f"redis://{HOST}:{ports[0]}/{DATABASE}", *sys.argv[1:]]
    command += [ASYNCIO_TESTS, SYNC_TESTS]
    try:
        return subprocess.run(command, cwd=unpacked, env=environment, timeout=RUN_S_MAX).returncode
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"conformance: a test that cannot be ended was killed after {RUN_S_MAX:g} s\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
