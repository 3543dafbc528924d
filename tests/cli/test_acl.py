"""``dynamoth acl``: the rules that it prints."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth import names
from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY
from dynamoth.data.progress import progress_key
from dynamoth.data.records import partition_keys
from dynamoth.data.registrations import registration_keys
from dynamoth.data.terms import OWNER_KEY, TERM_KEY
from dynamoth.edge.interests import channel_interest
from dynamoth.edge.log import log_keys
from dynamoth.edge.positions import position_key
from dynamoth.globs import compile_glob
from dynamoth_cli.commands.acl import ROLES, make_user, read_passwords, rights_of, to_lines
from dynamoth_cli.main import main

SECRET = b"secret:news.x"
"""A channel that a client of ``news.*`` must not touch, though a part of its name is one that it may use."""


def allowed(patterns: tuple[bytes, ...], channel: bytes) -> bool:
    return any(compile_glob(pattern).fullmatch(channel) for pattern in patterns)


def derived(channel: bytes) -> list[bytes]:
    """Return the names that are made of an application's channel."""
    sharded = names.sharded_channel(channel)
    replicas = [names.replica_channel(name, 0xA5) for name in (channel, sharded)]
    return [channel, sharded, *replicas]


def test_a_client_may_use_what_is_made_of_its_channels_and_of_no_other() -> None:
    rights = rights_of("client", [b"news.*"])
    assert all(allowed(rights.both, name) for name in derived(b"news.x"))
    assert not any(allowed(rights.both, name) for name in derived(SECRET))
    for good, bad in zip(derived(b"news.x")[2:], derived(SECRET)[2:], strict=True):
        assert allowed(rights.speaks, names.forward_channel(good))
        assert not allowed(rights.speaks, names.forward_channel(bad))


FORBIDDEN = (
    names.AGENT_CHANNEL,
    names.BALANCER_CHANNEL,
    names.OPERATOR_CHANNEL,
    names.operator_inbox(7),
    names.OPERATOR_EDGE_CHANNEL,
    names.COORDINATOR_CHANNEL,
    names.COORDINATOR_RECORD_CHANNEL,
    names.BROKERS_CHANNEL,
    names.broker_channel("b1"),
    names.relay_channel(b"news.x"),
    names.PLAN_KEY,
    DATASETS_KEY,
    TERM_KEY,
    OWNER_KEY,
)


@given(st.sampled_from([b"*", b"?*", b"[^a]*", b"_*", b"*:*", b"__dynamoth__*", b"*news*", b"news.*", b"__d*x"]))
def test_no_pattern_gives_a_client_what_is_said_between_others(pattern: bytes) -> None:
    rights = rights_of("client", [pattern])
    for channel in FORBIDDEN:
        assert not allowed((*rights.both, *rights.listens, *rights.speaks), channel)


@pytest.mark.parametrize("role", ["balancer", "coordinator", "operator"])
def test_balancer_coordinator_and_operators_use_no_channel_of_applications(role: str) -> None:
    rights = rights_of(role, [b"news.*"])
    assert not any(allowed((*rights.both, *rights.listens, *rights.speaks), name) for name in derived(b"news.x"))


def test_an_operator_cannot_speak_as_an_agent_nor_an_agent_s_channel_be_an_operator_s() -> None:
    operator, balancer = rights_of("operator", []), rights_of("balancer", [])
    assert not allowed((*operator.listens, *operator.speaks), names.BALANCER_CHANNEL)
    assert not allowed(balancer.speaks, names.BALANCER_CHANNEL)
    assert allowed(balancer.speaks, names.operator_inbox(7)) and allowed(operator.listens, names.operator_inbox(7))


def test_brokers_and_coordinators_cannot_speak_as_each_other_nor_as_operators() -> None:
    broker, coordinator = rights_of("broker", [b"news.*"]), rights_of("coordinator", [])
    said = {
        names.COORDINATOR_CHANNEL: (broker, coordinator),
        names.BROKERS_CHANNEL: (coordinator, broker),
        names.broker_channel("b1"): (coordinator, broker),
    }
    for channel, (speaker, listener) in said.items():
        assert allowed(speaker.speaks, channel) and allowed(listener.listens, channel)
        assert not allowed(listener.speaks, channel)
    for each in (broker, coordinator):
        assert allowed(each.listens, names.OPERATOR_EDGE_CHANNEL) and not allowed(
            each.speaks, names.OPERATOR_EDGE_CHANNEL
        )
        assert not allowed(each.speaks, names.OPERATOR_CHANNEL) and names.BALANCER_LEASE_KEY not in each.keys_written
    assert allowed(broker.both, b"news.x") and allowed(broker.both, channel_interest("news.x").log_channel)
    assert not allowed(broker.both, SECRET) and allowed(broker.keys_written, log_keys("x")[0])
    assert allowed(broker.keys_written, position_key("x", "ann", "phone"))


def test_a_recorder_hears_brokers_and_coordinator_and_speaks_as_neither() -> None:
    recorder, coordinator, broker = (rights_of(role, [b"news.*"]) for role in ("recorder", "coordinator", "broker"))
    for channel in (names.COORDINATOR_CHANNEL, names.COORDINATOR_RECORD_CHANNEL):
        assert allowed(recorder.listens, channel) and not allowed((*recorder.both, *recorder.speaks), channel)
        assert channel in recorder.listens, "a pattern that it subscribes to must be there literally"
    assert allowed(coordinator.speaks, names.COORDINATOR_RECORD_CHANNEL)
    assert not allowed((*broker.both, *broker.speaks), names.COORDINATOR_RECORD_CHANNEL)
    assert not allowed(coordinator.speaks, names.RECORD_CHANNEL)


def test_records_and_interests_are_written_by_those_who_have_to_and_definitions_by_operators_alone() -> None:
    writer, operator, cluster = (rights_of(f"data-{role}", []) for role in ("writer", "operator", "cluster"))
    broker, client = rights_of("broker", [b"news.*"]), rights_of("client", [b"news.*"])
    records, interests = partition_keys("reports/0"), registration_keys("near")
    assert all(allowed(each.keys_written, key) for each in (writer, operator, cluster, broker) for key in records)
    assert all(allowed(each.keys_written, key) for each in (operator, cluster, broker) for key in interests)
    for each in (writer, broker):
        assert {DATASETS_KEY, QUERIES_KEY} <= {*each.keys_read}
        for key in (DATASETS_KEY, QUERIES_KEY, TERM_KEY, OWNER_KEY, progress_key("near")):
            assert not allowed(each.keys_written, key)
    assert not any(allowed((*client.keys_read, *client.keys_written), key) for key in (*records, *interests))
    assert not allowed(writer.keys_written, interests[0])
    assert not allowed(writer.keys_written, log_keys("x")[0])
    assert not (operator.both or operator.listens or operator.speaks or writer.both or writer.speaks)
    assert allowed(cluster.both, b"d:reports")
    assert allowed(cluster.both, channel_interest("near").log_channel)
    assert not allowed((*cluster.both, *cluster.listens, *cluster.speaks), b"news.x")
    assert not allowed(cluster.keys_written, names.PLAN_KEY)


def test_redis_7_has_clients_listen_and_speak_on_different_names() -> None:
    rules = " ".join(make_user("client", [b"news.*"], "7").rules)
    listening, speaking = re.findall(r"\(-@all (.*?)\)", rules)
    assert "+subscribe" in listening and "&__dynamoth__:inbox:*" in listening
    assert "+publish" in speaking and "inbox" not in speaking and "&__dynamoth__:client:announce" in speaking
    assert "%R~__dynamoth__:plan" in rules


def test_only_digests_of_passwords_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "passwords"
    file.write_text("".join(f"{role} {role} secret\n" for role in ROLES))
    assert main(["acl", "--channels", "news.*", "--aclfile", "--passwords", str(file)]) == 0
    out = capsys.readouterr().out
    assert "secret" not in out
    assert hashlib.sha256(b"agent secret").hexdigest() in out
    assert len(out.splitlines()) == len(ROLES) and all(line.startswith("user dynamoth-") for line in out.splitlines())


def test_a_placeholder_is_nothing_that_redis_takes_for_a_password() -> None:
    [line] = to_lines([make_user("agent", [], "7")], {}, aclfile=False)
    assert "#SHA256-OF-AGENT-PASSWORD" in line and line.startswith("ACL SETUSER dynamoth-agent reset on ")


def test_passwords_come_from_the_environment_unless_a_file_has_them(tmp_path: Path) -> None:
    environment = {
        "DYNAMOTH_ACL_AGENT_PASSWORD": "a",
        "DYNAMOTH_ACL_CLIENT_PASSWORD": "c",
        "DYNAMOTH_ACL_DATA_CLUSTER_PASSWORD": "d",
    }
    file = tmp_path / "passwords"
    file.write_text("client of the file\n\n")
    assert read_passwords(file, environment) == {
        "agent": "a",
        "client": "of the file",
        "data-cluster": "d",
    }


@pytest.mark.parametrize("prefix", ["my ", "a\nuser b", 'x"', "x'"])
def test_a_prefix_that_would_break_the_rules_is_refused(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", "--role", "agent", "--prefix", prefix]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert "--prefix" in shown.err
