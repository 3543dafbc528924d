"""A term belongs to one data cluster, however those that begin at once are interleaved."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.data.terms import CLAIMS_MAX, TERM_KEY, Command, NoTerm, claim_command, parse_claim, take_term
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World

IDS = ("l1", "l2", "l3")


class Servers:
    """Log servers, and who asks them."""

    def __init__(self) -> None:
        world = World(1)
        self._servers = {id_: RedisServer(world, id_, f"redis://{id_}") for id_ in IDS}

    def run(self, server: str, command: Command) -> Any:
        return self._servers[server].execute("test", *(word for word in command if isinstance(word, bytes)))

    def owns(self, term: int, owner: str) -> bool:
        return all(parse_claim(self.run(id_, claim_command(term, owner)))[1] for id_ in IDS)


def one_command_each(servers: Servers, order: Sequence[str], owner: str) -> Generator[None, None, int]:
    """Take a term, one command at a time."""
    steps, reply = take_term(order, owner), None
    while True:
        try:
            server, command = steps.send(reply)
        except StopIteration as end:
            return int(end.value)
        reply = servers.run(server, command)
        yield


@given(st.lists(st.sampled_from("abc"), max_size=60), st.permutations(IDS), st.sets(st.sampled_from(IDS)))
def test_a_term_belongs_to_one_data_cluster(turns: list[str], order: list[str], used: set[str]) -> None:
    servers = Servers()
    for number, id_ in enumerate(sorted(used), 1):
        servers.run(id_, (b"SET", TERM_KEY, b"%d" % number))
    begin = {"a": IDS, "b": order, "c": order[::-1]}
    left = {owner: one_command_each(servers, ids, owner) for owner, ids in begin.items()}
    terms: dict[str, int] = {}
    for owner in [*turns, *"abc" * 60]:
        if owner in left:
            try:
                next(left[owner])
            except StopIteration as end:
                del left[owner]
                terms[owner] = end.value
    assert len(set(terms.values())) == len(begin)
    assert min(terms.values()) > len(used)
    newest = max(terms, key=terms.__getitem__)
    assert [owner for owner, term in terms.items() if servers.owns(term, owner)] == [newest]


def test_a_term_that_a_server_has_lost_is_claimed_again_and_is_nobody_elses() -> None:
    servers = Servers()
    assert servers.owns(3, "a")
    servers.run("l1", (b"DEL", TERM_KEY))
    assert servers.owns(3, "a")
    servers.run("l1", (b"DEL", TERM_KEY))
    assert parse_claim(servers.run("l1", claim_command(3, "b"))) == (3, True), "it does not know better"
    assert parse_claim(servers.run("l1", claim_command(3, "a"))) == (3, False), "so that the other one ends"


def test_claims_have_a_bound() -> None:
    steps, reply = take_term(["l1"], "a"), None
    claims = 0
    with pytest.raises(NoTerm, match="run one of them only"):
        while True:
            _, command = steps.send(reply)
            reply = None if command[0] == b"GET" else [claims, 0]
            claims += reply is not None
    assert claims == CLAIMS_MAX
