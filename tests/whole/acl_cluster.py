"""Whole clusters in which every process has the rights that ``dynamoth acl`` gives to its role, and no more."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from dynamoth_cli.commands.acl import ROLES, make_user, to_lines
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import bundled_redis_server, find_redis_server

CHANNELS = ("news.*", "raw?*")
"""What clients may use."""

USERS = {role: (f"dynamoth-{role}", f"{role}'s password") for role in ROLES}


@dataclass(frozen=True, slots=True)
class Rules:
    """A server to run, and the version that the rules are for."""

    binary: Path
    redis: str

    def __str__(self) -> str:
        return f"rules-{self.redis}-on-{'.'.join(map(str, version_of(self.binary)))}"


def version_of(binary: Path) -> tuple[int, ...]:
    """Return the version of a ``redis-server``."""
    got = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", got)
    assert match, got
    return tuple(map(int, match.groups()))


def all_rules() -> list[Rules]:
    """Return what is tested: the bundled server everywhere, and the one that ``find_redis_server`` finds, too."""
    bundled, found = bundled_redis_server(), find_redis_server()
    binaries = dict.fromkeys(binary for binary in (bundled, found) if binary is not None)
    return [Rules(binary, _rules_for(version_of(binary))) for binary in binaries]


def _rules_for(version: tuple[int, ...]) -> str:
    return "6.2" if version < (7, 0) else "7" if version < (7, 2) else "7.2"


@contextmanager
def acl_cluster(
    rules: Rules,
    folder: Path,
    *,
    servers: int = 2,
    settings: Mapping[str, Any] | None = None,
    record: Path | None = None,
) -> Generator[LocalCluster]:
    """Run a cluster under the rules. The default user may do everything: it is the test's own."""
    users = [make_user(role, [pattern.encode() for pattern in CHANNELS], rules.redis) for role in ROLES]
    lines = to_lines(users, {role: password for role, (_, password) in USERS.items()}, aclfile=True)
    aclfile = folder / "users.acl"
    aclfile.write_text("\n".join([*lines, "user default on nopass ~* &* +@all", ""]))
    with LocalCluster(
        servers,
        settings=settings or {},
        redis_options={"aclfile": str(aclfile)},
        users=USERS,
        record=record,
        redis_binary=rules.binary,
    ) as cluster:
        yield cluster


def plain_client(cluster: LocalCluster, server: str, role: str) -> Any:
    """Return a redis-py client of one server with the credentials of a role."""
    name, password = USERS[role]
    return redis.Redis(port=cluster.redis[server].port, username=name, password=password)


def acl_log(cluster: LocalCluster) -> list[Any]:
    """Return what the servers refused to whom."""
    found: list[Any] = []
    for server in cluster.server_ids:
        [entries] = cluster.ask(server, (b"ACL", b"LOG"))
        assert type(entries) is list, entries
        found += entries
    return found
