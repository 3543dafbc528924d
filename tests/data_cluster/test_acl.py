"""The data cluster, writers, brokers and operators have the rights that they need: real servers, without Spark."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, Entry, entry_of, put_command
from dynamoth.data.progress import (
    Progress,
    QueryStatus,
    Window,
    restart_key,
    store_progress_command,
    store_status_command,
)
from dynamoth.data.records import append_records_command, partition_keys, state_command
from dynamoth.data.registrations import register_command, registration_keys
from dynamoth.data.terms import TERM_KEY, claim_command, trim_command
from dynamoth.edge.interests import query_interest
from dynamoth.edge.log import SERVERS_KEY, log_keys, servers_value
from dynamoth_analytics.cluster.ingest import Ingest
from dynamoth_analytics.cluster.interest_table import expire_interests
from dynamoth_analytics.cluster.publishing import ResultPublisher, close_publishers
from dynamoth_analytics.cluster.servers import LogServerFailed, LogServers, read_servers
from dynamoth_analytics.cluster.storage.archive import Archiver
from dynamoth_cli.commands.acl import ROLES, make_user, to_lines
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_cli.main import main
from dynamoth_client.asyncio import from_url as connect
from dynamoth_client.datasets import DatasetWriter
from dynamoth_link.urls import ClusterAddress, parse_server_url
from tests.whole.acl_cluster import Rules, all_rules

TIMEOUT_S = 60.0
POLL_S = 0.02

DEFINITIONS = """
[datasets.reports]
kind = "append"
id = "id"
partitions = 1
fields = { id = "string", n = "int" }

[datasets.shelters]
kind = "static"
fields = { id = "string" }

[queries.of_number]
on = "reports"
period_s = 1
parameters = { n = "int" }
sql = "SELECT r.id FROM reports r WHERE r.n = :n"
"""


@dataclass
class Guarded:
    """One server, which is log server and cluster, under the rules."""

    redis: EmbeddedRedis
    redis_version: str

    def url(self, role: str) -> str:
        return f"redis://dynamoth-{role}:{role}-secret@127.0.0.1:{self.redis.port}"

    def logs(self, role: str) -> str:
        return f"l1={self.url(role)}"

    def servers(self, role: str) -> LogServers:
        return read_servers(self.logs(role))

    def cluster_url(self, role: str) -> str:
        return ClusterAddress((parse_server_url(self.url(role)),)).url()

    def own(self, *command: Any) -> Any:
        """Execute a command as the default user, which is the test's own."""
        client: Any = redis.Redis(port=self.redis.port)
        with client:
            return client.execute_command(*command)

    def refused(self) -> list[Any]:
        """Return what was refused, but for CLIENT MAINT_NOTIFICATIONS: redis-py goes on without that."""
        return [entry for entry in self.own("ACL", "LOG") if entry[b"object"] != b"client"]


@pytest.fixture(params=all_rules(), ids=str)
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guarded]:
    rules: Rules = request.param
    users = [make_user(role, [b"d:*"], rules.redis) for role in ROLES]
    lines = to_lines(users, {role: f"{role}-secret" for role in ROLES}, aclfile=True)
    aclfile = tmp_path / "users.acl"
    aclfile.write_text("\n".join([*lines, "user default on nopass ~* &* +@all", ""]))
    with EmbeddedRedis(binary=rules.binary, options={"aclfile": str(aclfile)}) as server:
        yield Guarded(server, rules.redis)
    close_publishers()


def operate(guarded: Guarded, *words: str) -> None:
    assert main([*words, "--logs", guarded.logs("data-operator")]) == 0


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if holds():
                return
            await asyncio.sleep(POLL_S)


def test_everybody_can_do_what_the_role_is_for(
    guarded: Guarded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    definitions, shelters = tmp_path / "definitions.toml", tmp_path / "shelters.jsonl"
    definitions.write_text(DEFINITIONS)
    shelters.write_text('{"id": "s1"}\n')
    broker = guarded.servers("broker")
    broker.run("l1", (b"SET", SERVERS_KEY, servers_value(["l1"])))

    # Operators.
    operate(guarded, "dataset", "set", str(definitions))
    operate(guarded, "dataset", "load", "shelters", str(shelters))
    operate(guarded, "dataset", "load", "shelters", str(shelters))
    for words in (("dataset", "show"), ("dataset", "tail"), ("dataset", "dead")):
        operate(guarded, *words, "reports")
    operate(guarded, "dataset", "list")
    operate(guarded, "query", "list")
    operate(guarded, "query", "show", "of_number")
    operate(guarded, "query", "restart", "of_number")

    # Writers: a backend, a broker for its users, and an application through the ingest.
    asyncio.run(_write(guarded))
    reports = broker.catalog().datasets["reports"]
    broker.run("l1", append_records_command(reports, 0, [(b'{"id":"b","n":1}', "b")], broker.run_id("l1")))
    asyncio.run(_ingest(guarded))

    # Interests and executions.
    interest = query_interest("of_number", {"n": 1})
    broker.run("l1", register_command("of_number", [(interest.id, interest.params, 0.0)]))
    _execute(guarded, interest.id, tmp_path)
    definitions.write_text(DEFINITIONS.replace("period_s = ", "period_s = 1"))
    operate(guarded, "query", "set", str(definitions))  # it compares the interests
    assert guarded.own(b"XLEN", partition_keys("reports/0")[1]) == 3
    assert guarded.own(b"EXISTS", *log_keys(interest.id)) == 0, "its time was over"
    operate(guarded, "query", "drop", "of_number")
    operate(guarded, "dataset", "drop", "reports")
    assert guarded.refused() == []
    assert "right" not in capsys.readouterr().err


async def _write(guarded: Guarded) -> None:
    async with DatasetWriter({"l1": guarded.url("data-writer")}) as writer:
        results = await writer.append_many("reports", [{"id": "a", "n": 1}, {"id": "a", "n": 1}, {"id": "x"}])
        assert [each.outcome for each in results] == ["stored", "duplicate", "refused"]


async def _ingest(guarded: Guarded) -> None:
    ingest = Ingest(guarded.cluster_url("data-cluster"), dict(guarded.servers("data-cluster").urls))
    task = asyncio.create_task(ingest.run())
    async with connect(guarded.cluster_url("client")) as client:
        await until(lambda: ingest.subscribed)
        await client.publish("d:reports", json.dumps({"id": "c", "n": 1}))
        await until(lambda: ingest.counts["stored"] == 1)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert ingest.faults == {}


def _execute(guarded: Guarded, interest: str, folder: Path) -> None:
    """Do what a data cluster does with log servers and the cluster."""
    servers = guarded.servers("data-cluster")
    catalog = servers.catalog()
    term = servers.take_term("dc1")
    assert servers.claim_term(term, "dc1") is None
    assert servers.run("l1", (b"MGET", restart_key("of_number")))[0]
    servers.run("l1", (b"DEL", restart_key("of_number")))
    assert servers.tips({"reports": 1})["reports/0"] > 0
    assert servers.now_ms() > 0
    archiver = Archiver(servers, folder / "archive", hot_records=100)
    assert archiver.archive(catalog) == 4  # with a dead letter
    assert servers.run("l1", trim_command("reports/0", 0, term)) == 0
    hash_, _, changes = registration_keys("of_number")
    for command in ((b"HSCAN", hash_, b"0"), (b"HGETALL", hash_), (b"XRANGE", changes, b"-", b"+"), (b"XLEN", changes)):
        assert servers.run("l1", command)
    servers.run("l1", (b"XREVRANGE", changes, b"+", b"-", b"COUNT", b"1"))
    window = Window({"tick_ms": 0, "offsets": {}}, {"tick_ms": 1, "offsets": {}})
    servers.run("l1", store_progress_command("of_number", Progress(1, window, is_done=True), term))
    servers.run("l1", store_status_command("of_number", QueryStatus(), term))
    publisher = ResultPublisher(
        servers, guarded.cluster_url("data-cluster"), "of_number", 1, 1, 1, term,
        inline_bytes_max=1000, result_bytes_max=1000, retained_min=10, ttl_s=60.0, fence=TERM_KEY,
    )  # fmt: skip
    counts = publisher.publish_payloads([(interest, b"{}")])
    assert (counts["result_sets"], counts["unpublished"]) == (1, 0)
    end = time.monotonic() + TIMEOUT_S
    while not expire_interests(servers, "of_number"):
        assert time.monotonic() < end
    for name, dataset in catalog.datasets.items():
        servers.run("l1", put_command(DATASETS_KEY, name, entry_of(dataset)))


def test_nobody_else_changes_definitions_or_what_was_executed(guarded: Guarded) -> None:
    drop = put_command(DATASETS_KEY, "reports", Entry(99, None))
    begin = claim_command(99, "x")
    plan = (b"SET", b"__dynamoth__:plan", b"x")
    refusals = [("data-operator", plan), ("data-writer", begin), ("broker", begin)]
    refusals += [("data-writer", register_command("q", [("i", "{}", 1.0)])), ("client", state_command("reports/0"))]
    if guarded.redis_version != "6.2":  # there a right to read a key is one to write it
        refusals += [
            ("data-writer", drop),
            ("data-cluster", plan),
            ("broker", put_command(QUERIES_KEY, "q", Entry(99, None))),
        ]
    for role, command in refusals:
        with pytest.raises(LogServerFailed, match=r"(?i)noperm|permission"):
            guarded.servers(role).run("l1", command)
