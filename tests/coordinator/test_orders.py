"""What operators have ordered outlives coordinators: it is stored at the majority of the servers, and read there."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import ErrorReply, Send
from dynamoth.names import COORDINATOR_ORDERS_KEY
from dynamoth_broker.coordinator import orders as module
from dynamoth_broker.coordinator import requests
from dynamoth_broker.coordinator.machine import Stop
from dynamoth_broker.coordinator.orders import CHECK_S, TAG, Orders, StoredOrders, pack_orders, unpack_orders
from dynamoth_broker.events import Noted
from dynamoth_sim.world.redis import out_of_memory
from tests.coordinator.sim_edge import SimEdge, acting, result_of

SERVERS = ["s1", "s2", "s3"]
OLD, NEW = Orders(4, False, frozenset({"u1"})), Orders(5, True, frozenset({"u1", "u2"}))
REFUSAL = ErrorReply("NOPERM no")


# What is stored.


@given(st.builds(Orders, st.integers(0, 2**63), st.booleans(), st.frozensets(st.text(max_size=20), max_size=5)))
def test_what_is_packed_is_read(orders: Orders) -> None:
    assert unpack_orders(pack_orders(orders)) == orders


@given(st.binary(max_size=100))
def test_nothing_but_malformed_message_comes_out(data: bytes) -> None:
    with suppress(MalformedMessage):
        assert isinstance(unpack_orders(data), Orders)


# One coordinator's part, reply by reply.


def begun() -> StoredOrders:
    """Return the part of a coordinator that has just got the lease."""
    stored = StoredOrders(SERVERS)
    for server in SERVERS:
        stored.on_up(server)
    assert [send.link for send in stored.begin_term()] == SERVERS
    return stored


def read(stored: StoredOrders, server: str, value: Any, term: int = 1) -> list[Send]:
    return stored.on_reply(server, ("read", term), value)


def writes(sends: list[Send]) -> dict[str, Orders]:
    """Return what is written, by server."""
    found: dict[str, Orders] = {}
    for send in sends:
        command, key, data = send.args
        assert (command, key, send.tag[0]) == (b"SET", COORDINATOR_ORDERS_KEY, TAG) and isinstance(data, bytes)
        found[send.link] = unpack_orders(data)
    return found


def known(stored: StoredOrders) -> bool:
    return stored.are_known


def test_it_acts_when_the_majority_was_read_and_the_newest_orders_count() -> None:
    stored = begun()
    assert read(stored, "s1", pack_orders(OLD)) == [] and not known(stored)
    sends = read(stored, "s2", pack_orders(NEW))
    assert known(stored) and stored.present == NEW
    assert writes(sends) == {"s1": NEW, "s3": NEW}, "where something else is stored, or nobody knows what"
    assert stored.places == "1 of 3 servers"
    stored.on_reply("s1", ("written", 5), b"OK")
    assert stored.is_stored


def test_where_nothing_was_ever_ordered_nothing_is_written() -> None:
    stored = begun()
    assert [read(stored, server, None) for server in SERVERS] == [[], [], []]
    assert known(stored) and stored.present == Orders()


def test_a_reply_from_before_the_lease_does_not_count() -> None:
    stored = begun()
    assert read(stored, "s1", pack_orders(OLD), 0) == [] and read(stored, "s2", pack_orders(OLD), 0) == []
    assert not known(stored)
    stored.end_term()
    stored.begin_term()
    read(stored, "s1", None, 1)
    read(stored, "s2", None, 2)
    assert not known(stored)
    read(stored, "s3", None, 2)
    assert known(stored) and stored.present == OLD, "it remembers what the servers have lost"


def test_a_server_that_lost_its_keys_gets_the_orders_again() -> None:
    stored = begun()
    for server in SERVERS:
        read(stored, server, pack_orders(NEW))
    assert stored.is_stored
    assert [send.args for send in stored.check()] == [(b"GET", COORDINATOR_ORDERS_KEY)] * 3
    assert writes(read(stored, "s2", None)) == {"s2": NEW}
    assert writes(read(stored, "s3", pack_orders(OLD))) == {"s3": NEW}
    assert read(stored, "s1", pack_orders(NEW)) == []


def test_the_one_that_acts_is_the_only_writer_and_takes_nothing_from_the_servers() -> None:
    stored = begun()
    for server in SERVERS:
        read(stored, server, pack_orders(OLD))
    assert writes(read(stored, "s1", pack_orders(NEW))) == {"s1": OLD} and stored.present == OLD


def test_one_that_does_not_act_reads_and_never_writes() -> None:
    stored = StoredOrders(SERVERS)
    for server in SERVERS:
        stored.on_up(server)
    assert read(stored, "s1", pack_orders(NEW), 0) == [] and stored.present == NEW
    assert read(stored, "s2", pack_orders(OLD), 0) == [] and stored.present == NEW
    assert not known(stored)


def test_a_refusal_does_not_count_as_read_and_is_a_problem() -> None:
    stored = begun()
    for server in ("s1", "s2"):
        assert read(stored, server, REFUSAL) == []
    read(stored, "s3", None)
    assert not known(stored) and stored.problems == {"s1": "NOPERM no", "s2": "NOPERM no"}
    read(stored, "s1", None)
    assert known(stored) and stored.problems == {"s2": "NOPERM no"}


def test_a_refused_write_is_a_problem_until_one_succeeds() -> None:
    stored = begun()
    for server in SERVERS:
        read(stored, server, None)
    assert set(writes(stored.change(True, frozenset()))) == {*SERVERS}
    stored.on_reply("s1", ("written", 1), b"OK")
    stored.on_reply("s2", ("written", 1), ErrorReply("OOM"))
    assert (stored.is_stored, stored.places, stored.problems) == (False, "1 of 3 servers", {"s2": "OOM"})
    assert writes(read(stored, "s2", None)) == {"s2": Orders(1, True)}
    assert stored.problems == {"s2": "OOM"}
    stored.on_reply("s2", ("written", 1), b"OK")
    assert stored.is_stored and stored.problems == {}


@pytest.mark.parametrize("value", [b"\xc1", b"text", ErrorReply("WRONGTYPE Operation against a key")])
def test_what_cannot_be_read_is_written_over(value: Any) -> None:
    stored = begun()
    read(stored, "s1", pack_orders(NEW))
    assert set(writes(read(stored, "s2", value))) == {"s2", "s3"} and stored.present == NEW


# Whole coordinators.


def stored_at(edge: SimEdge) -> dict[str, Orders | None]:
    values = {id_: server.execute("test", b"GET", COORDINATOR_ORDERS_KEY) for id_, server in edge.servers.items()}
    return {id_: None if value is None else unpack_orders(value) for id_, value in values.items()}


def running(coordinators: int = 1) -> SimEdge:
    edge = SimEdge(coordinators=coordinators)
    edge.until(lambda: len(edge.leaders()) == 1, "one acts")
    return edge


def test_a_pause_outlives_all_coordinators() -> None:
    edge = running()
    assert acting(edge.ask("pause", 1))["paused"] and acting(edge.ask("pin", 2, session="u0"))["pinned_users"] == 1
    assert stored_at(edge) == dict.fromkeys(SERVERS, Orders(2, True, frozenset({"u0"})))
    edge.coordinators[0].crash("crashes")
    edge.crowd()
    edge.run(5.0)
    edge.coordinators[0].start()
    edge.until(lambda: edge.leaders() == ["c1"], "it acts again")
    edge.run(3.0)
    controller = edge.coordinator().controller
    assert controller.is_paused and controller.pinned == {"u0"} and edge.users() == [12, 0]
    [note] = [each for each in edge.news if isinstance(each, Noted) and each.fields.get("paused")]
    assert note.message == "this coordinator acts now"
    assert not acting(edge.ask("resume", 3))["paused"]
    edge.until(lambda: edge.users()[1] >= 4, "users are moved")


@pytest.mark.parametrize("lost", SERVERS)
def test_one_server_that_was_out_of_reach_does_not_matter(lost: str) -> None:
    edge = running()
    edge.servers[lost].stop() if lost != "s1" else edge.servers["s3"].stop()
    assert acting(edge.ask("pause", 1))["paused"]
    edge.coordinators[0].crash("crashes")
    for server in edge.servers.values():
        server.stop()
        server.start(server.snapshot())
    edge.servers["s2"].stop() if lost != "s2" else edge.servers["s1"].stop()
    edge.coordinators[0].start()
    edge.until(lambda: edge.leaders() == ["c1"], "it acts again")
    assert edge.coordinator().controller.is_paused


def test_a_successor_knows_the_orders_although_the_servers_lose_them() -> None:
    edge = running(2)
    acting(edge.ask("pause", 1))
    edge.run(CHECK_S + 0.1)
    first = int(edge.leaders()[0][1]) - 1
    edge.coordinators[first].crash("crashes")
    for server in edge.servers.values():
        server.flush()
    edge.until(lambda: len(edge.leaders()) == 1, "another one takes over")
    edge.run(CHECK_S)
    assert edge.coordinator(1 - first).controller.is_paused
    assert stored_at(edge) == dict.fromkeys(SERVERS, Orders(1, True))


def test_an_order_that_the_majority_does_not_store_is_refused_and_stays_in_force() -> None:
    edge = running()
    for id_ in ("s1", "s2"):
        edge.servers[id_].refuse = lambda process, words: (
            out_of_memory(process, words) if COORDINATOR_ORDERS_KEY in words else None
        )
    [reply] = edge.ask("pause", 1, wait_s=requests.STORE_S_MAX + 0.2)
    assert reply.error is not None and "in force, but stored at 1 of 3 servers" in reply.error
    assert edge.coordinator().controller.is_paused and set(edge.coordinator().faults) == {"s1", "s2"}
    for server in edge.servers.values():
        server.refuse = None
    edge.run(CHECK_S + 0.1)
    assert stored_at(edge) == dict.fromkeys(SERVERS, Orders(1, True)) and edge.coordinator().faults == {}


def test_one_that_may_not_read_the_orders_does_not_act_and_says_why() -> None:
    edge = SimEdge()
    for server in edge.servers.values():
        server.refuse = lambda _, words: "NOPERM no" if COORDINATOR_ORDERS_KEY in words else None
    edge.run(3.0)
    machine = edge.coordinator()
    assert edge.leaders() == [] and machine.why_waiting == "it has not read the orders of operators at 2 of 3 servers"
    assert machine.faults == dict.fromkeys(SERVERS, "NOPERM no")
    notes = [each for each in edge.news if isinstance(each, Noted) and "begun to report" not in each.message]
    why = "the orders of operators cannot be read or stored"
    assert sorted(note.fields["server"] for note in notes) == SERVERS, "said once"
    assert {(note.message, note.cause) for note in notes} == {(why, "NOPERM no")}
    assert not result_of(edge.ask("pause", 1))["leading"] and stored_at(edge) == dict.fromkeys(SERVERS)


def test_one_that_loses_the_lease_while_it_stores_says_so() -> None:
    edge = running()
    for server in edge.servers.values():
        server.refuse = lambda process, words: (
            out_of_memory(process, words) if COORDINATOR_ORDERS_KEY in words else None
        )
    edge.world.after(0.1, edge.coordinators[0].handle, Stop())
    [reply] = edge.ask("pause", 1, wait_s=0.5)
    assert reply.error is not None and "lost its lease meanwhile" in reply.error


def test_pins_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PINS_MAX", 2)
    edge = running()
    for number in range(2):
        result_of(edge.ask("pin", number + 1, session=f"u{number}"))
    [reply] = edge.ask("pin", 3, session="u2")
    assert reply.error is not None and "2 users are pinned already" in reply.error
    assert result_of(edge.ask("pin", 7, session="u0"))["pinned_users"] == 2, "again"
    assert result_of(edge.ask("unpin", 8, session="u1"))["pinned_users"] == 1
    assert module.PINS_MAX == 1000
