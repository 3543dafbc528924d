"""What an idle user costs an edge broker: memory per connection, and handshakes per second, with and without TLS.

Run with ``python -m bench.edge_memory``; ``--help`` tells the rest. Server and users are processes of their own; the
server of the library ``websockets`` is measured beside ours. What the kernel needs for sockets is not part of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.edge_processes import SYSTEMS, ServerProcess, System, UsersProcess, allow_files, certificate, wait_for

WARM_UP_USERS = 100
"""What the first ones cost is not what one costs."""


@dataclass(frozen=True)
class Measured:
    """One server with idle users."""

    system: System
    tls: bool
    users: int
    bytes_per_user: float
    accepts_per_s: float
    accepts_per_processor_s: float
    """Per second of the server's processor time: its users need some of the same machine."""


def measure(system: System, users: int, certificate: Path | None) -> Measured:
    server = ServerProcess(system, certificate)
    tls = certificate is not None
    crowds: list[UsersProcess] = []
    try:
        crowds.append(UsersProcess(server.port, WARM_UP_USERS, tls=tls))
        before = server.usage()
        crowds.append(UsersProcess(server.port, users, tls=tls))
        wait_for(lambda: server.users() == users + WARM_UP_USERS)
        after = server.usage()
        processor_s = after.user_s + after.system_s - before.user_s - before.system_s
        grown = after.resident_bytes - before.resident_bytes
        return Measured(system, tls, users, grown / users, users / crowds[-1].connect_s, users / processor_s)
    finally:
        for each in crowds:
            each.stop()
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--users-tls", type=int, default=2_000, help="users with TLS; 0: none")
    arguments = parser.parse_args()
    allow_files(max(arguments.users, arguments.users_tls) + 1000)
    results = [measure(system, arguments.users, None) for system in SYSTEMS]
    if arguments.users_tls:
        with tempfile.TemporaryDirectory() as folder, certificate(Path(folder)) as path:
            results += [measure(system, arguments.users_tls, path) for system in SYSTEMS]
    for each in results:
        sys.stdout.write(
            f"{each.system + (' with TLS' if each.tls else ''):20} {each.users:,} users:"
            f" {each.bytes_per_user / 1024:.1f} KiB each, {each.accepts_per_s:,.0f} accepts/s,"
            f" {each.accepts_per_processor_s:,.0f} per second of the server's processor time\n"
        )
    sys.stdout.write(json.dumps([asdict(each) for each in results]) + "\n")


if __name__ == "__main__":
    main()
