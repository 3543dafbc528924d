"""A term is granted by more than half of the servers, or it is not."""

from __future__ import annotations

from typing import Any

from dynamoth.machine.events import ErrorReply, Send
from dynamoth.plan.plan import EPOCH_MAX, TAKEOVER_VERSIONS
from dynamoth.protocol.fence import CLAIM_SCRIPT, TERM_MAX, claim, parse_term
from dynamoth_balancer.install.claim import RETRY_S, Claim

SERVERS = ("s1", "s2", "s3")


def _answered(*terms: int, version: int = 0) -> Claim:
    """Return a claim that knows the terms of the first servers."""
    made = Claim(SERVERS, -1, ("takeover", 1))
    for server, term in zip(SERVERS, terms, strict=False):
        made.link_up(server)
        made.on_reply(server, "term", b"%d" % term if term else None)
        made.on_reply(server, "version", [b"%d" % version])
    return made


def _is_granted(made: Claim) -> bool:
    return made.is_granted


def _claimed(sends: list[Send]) -> dict[str, Any]:
    return {send.link: send.args for send in sends}


def test_a_term_is_above_all_terms_and_versions_that_are_seen() -> None:
    made = _answered(4000, 0, version=5500)
    sends = made.look(0.0)
    assert _claimed(sends) == dict.fromkeys(("s1", "s2"), claim(5500 + TAKEOVER_VERSIONS))
    made.on_reply("s1", "claim", 0)
    assert not made.is_granted
    assert made.look(0.0) == []
    made.on_reply("s2", "claim", 0)
    assert made.term == 5500 + TAKEOVER_VERSIONS
    assert _is_granted(made)


def test_a_term_that_leaves_no_versions_counts_as_none() -> None:
    assert parse_term(b"%d" % TERM_MAX) == TERM_MAX
    assert parse_term(b"%d" % (TERM_MAX + 1)) == 0
    assert b"stored <= %d)" % TERM_MAX in CLAIM_SCRIPT


def test_nothing_is_claimed_before_more_than_half_have_answered_and_all_that_are_connected() -> None:
    assert _answered(1000).look(0.0) == []
    made = _answered(1000, 1000)
    made.link_up("s3")
    assert made.look(0.0) == []
    made.link_down("s3")
    assert len(made.look(0.0)) == 2


def test_a_refused_claim_is_followed_by_a_higher_one_everywhere() -> None:
    made = _answered(0, 0, 0)
    made.look(0.0)
    made.on_reply("s1", "claim", 0)
    made.on_reply("s2", "claim", TAKEOVER_VERSIONS)
    made.on_reply("s3", "claim", TAKEOVER_VERSIONS)
    sends = made.look(0.0)
    assert _claimed(sends) == dict.fromkeys(SERVERS, claim(2 * TAKEOVER_VERSIONS))
    assert not made.is_granted, "the grant of the first term does not count for the second"
    for server in SERVERS:
        made.on_reply(server, "claim", 0)
    assert _is_granted(made)


def test_a_server_that_refuses_the_script_is_reported_once_and_asked_again() -> None:
    made = _answered(0, 0, 0)
    made.look(0.0)
    error = ErrorReply("NOPERM this user has no permissions to run the 'eval' command")
    [note] = made.on_reply("s1", "claim", error)
    assert note.level == "error" and "dynamoth acl" in note.message
    assert made.problems() == {"s1": str(error)}
    assert [send.link for send in made.look(0.1)] == []
    assert [send.link for send in made.look(RETRY_S)] == ["s1"]
    assert made.on_reply("s1", "claim", error) == []


def test_a_term_after_which_there_are_no_more_is_reported_with_what_to_do() -> None:
    made = _answered(0, TERM_MAX, 0)
    assert set(_claimed(made.look(0.0)).values()) == {claim(TAKEOVER_VERSIONS)}
    [note] = made.on_reply("s2", "claim", TERM_MAX)
    assert note.level == "error" and "DEL __dynamoth__:balancer.term" in note.details["reply"]
    for server in ("s1", "s3"):
        made.on_reply(server, "claim", 0)
    assert _is_granted(made), "most servers have granted it"


def test_numbers_that_no_balancer_can_have_used_do_not_count() -> None:
    made = _answered(EPOCH_MAX, 0, 0)
    assert set(_claimed(made.look(0.0)).values()) == {claim(TAKEOVER_VERSIONS)}
