"""What administrators ask, and what anybody may send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.machine.events import Pushed
from dynamoth.names import BALANCER_CHANNEL
from dynamoth.plan.plan import Phase
from dynamoth.protocol.control import AdminRequest, PlanAck, Vacated, pack_control
from dynamoth.protocol.reports import pack_report
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import NO_DECISIONS, Balancer, SimCluster, started

CHANNEL = b"news"


def _other(cluster: SimCluster, balancer: Balancer, channel: bytes = CHANNEL) -> str:
    return cluster.others(balancer.home(channel))[0]


def test_a_move_is_answered_when_it_has_settled() -> None:
    cluster, balancer = started()
    source, target = balancer.home(CHANNEL), _other(cluster, balancer)
    cluster.agents[source].listened.add(CHANNEL)
    cluster.admin("s1", "move", {"channel": CHANNEL, "to": target})
    cluster.run(3)
    assert balancer.plan.entry(CHANNEL).phase is Phase.ACTIVE and not cluster.servers["s1"].replies
    cluster.agents[source].listened.clear()
    cluster.run(2)
    [reply] = cluster.servers["s1"].replies
    assert reply.error is None
    expected = {"channel": CHANNEL, "from": source, "to": target, "epoch": 1, "version": 3}
    assert {name: reply.result[name] for name in expected} == expected
    assert 3 <= reply.result["duration_s"] <= 5


def test_a_repeated_request_is_carried_out_once_and_answered_again() -> None:
    cluster, balancer = started()
    target = _other(cluster, balancer)
    for _ in range(3):
        cluster.admin("s1", "move", {"channel": CHANNEL, "to": target}, request=5)
    cluster.run(3)
    assert [reply.request for reply in cluster.servers["s1"].replies] == [5]
    version = balancer.plan.version
    cluster.admin("s2", "move", {"channel": CHANNEL, "to": target}, request=5)
    cluster.run(3)
    assert cluster.servers["s2"].replies == cluster.servers["s1"].replies
    assert balancer.plan.version == version


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"channel": CHANNEL, "to": "s9"}, "server 's9' is not known; known are s1, s2"),
        ({"channel": CHANNEL}, "takes the arguments"),
        ({"channel": "text", "to": "s1"}, "takes the arguments"),
        ({"channel": CHANNEL, "to": 3}, "takes the arguments"),
        ({"channel": b"__dynamoth__:agent", "to": "s1"}, "not an application's"),
        ({"channel": b"__dynamoth__:r:5:x", "to": "s1"}, "not an application's"),
        ({"channel": b"__keyspace@0__:x", "to": "s1"}, "not an application's"),
        ({"channel": b"", "to": "s1"}, "the name of the channel is empty: name one"),
    ],
)
def test_moves_that_make_no_sense_are_refused(arguments: dict[str, Any], words: str) -> None:
    cluster, balancer = started()
    assert words in cluster.refusal("move", arguments)
    assert balancer.plan.version == 0


@pytest.mark.parametrize(
    ("options", "arguments", "timeout_s"),
    [
        (BalancerOptions(load_ratio_high=1000.0, move_timeout_s=5.0), {}, 5),
        (NO_DECISIONS, {"timeout_s": 45}, 45),  # not the default of 30 s
    ],
)
def test_a_move_that_takes_too_long_is_answered_with_what_it_waits_for(
    options: BalancerOptions, arguments: dict[str, Any], timeout_s: int
) -> None:
    cluster, balancer = started(options=options)
    source, target = balancer.home(CHANNEL), _other(cluster, balancer)
    cluster.agents[source].listened.add(CHANNEL)
    cluster.admin("s1", "move", {"channel": CHANNEL, "to": target, **arguments})
    cluster.run(timeout_s - 1)
    assert not cluster.servers["s1"].replies
    cluster.run(2)
    [reply] = cluster.servers["s1"].replies
    assert reply.error is not None and f"not settled after {timeout_s} s, but it goes on" in reply.error
    assert f"subscribers to leave {source} (a plain Redis client" in reply.error
    cluster.agents[source].listened.clear()
    cluster.run(3)
    assert balancer.plan.entry(CHANNEL).phase is Phase.SETTLED, "it goes on"


@pytest.mark.parametrize("timeout_s", [0, -1, "5", True, float("inf"), float("nan"), 1e9])
def test_a_timeout_that_makes_no_sense_is_refused(timeout_s: Any) -> None:
    cluster, balancer = started()
    assert "timeout_s must be a number above 0" in cluster.refusal(
        "move", {"channel": CHANNEL, "to": _other(cluster, balancer), "timeout_s": timeout_s}
    )
    assert balancer.plan.version == 0


def test_too_many_transitions_are_refused() -> None:
    cluster, balancer = started(options=BalancerOptions(load_ratio_high=1000.0, transitions_max=1))
    cluster.agents["s1"].mute = True
    cluster.admin("s1", "move", {"channel": CHANNEL, "to": _other(cluster, balancer)})
    cluster.run()
    assert "at most 1 may be" in cluster.refusal("move", {"channel": b"c2", "to": _other(cluster, balancer, b"c2")})


def test_status_says_how_everything_is() -> None:
    cluster, balancer = started()
    cluster.agents["s1"].loads[b"busy"] = 250_000
    cluster.agents["s2"].alive = False
    cluster.run(20)
    cluster.agents["s1"].listened.add(CHANNEL)
    reply = cluster.ask("status")
    status = reply.result
    assert (status["stage"], status["paused"], status["version"]) == ("leading", False, 0)
    assert status["incarnation"] == balancer.machine.incarnation
    first, second = status["servers"]["s1"], status["servers"]["s2"]
    assert first["load_ratio"] == pytest.approx(0.25) and first["agent"] == "alive" and first["link"] == "up"
    assert second["agent"] == "silent" and second["load_ratio"] is None
    assert first["stored_version"] == first["acknowledged_version"] == 0
    assert first["outgoing_bytes_per_s_max"] == 1_000_000


def test_status_shows_transitions_and_decisions() -> None:
    cluster, balancer = started(options=BalancerOptions(wait_s=0.0, averaging_s=2.0))
    channels = balancer.at_home("s1", 4)
    cluster.follow.update(dict.fromkeys(channels, 220_000))
    cluster.agents["s1"].listened.update(channels)
    cluster.run_until(lambda: bool(balancer.decided))
    cluster.run(1)
    status = cluster.ask("status").result
    assert status["in_transition"] == status["moves_begun"] == len(status["transitions"]) > 0
    transition = status["transitions"][0]
    assert (transition["phase"], transition["from"], transition["to"]) == ("active", ["s1"], ["s2"])
    assert transition["waiting_for"] == ["subscribers to leave s1"]
    [decision] = status["decisions"]
    assert "above 0.80" in decision["first_moves"][0]["reason"]
    assert decision["first_moves"][0]["load_ratio_from_before"] > decision["first_moves"][0]["load_ratio_from_after"]


def test_pause_and_resume() -> None:
    cluster, balancer = started(options=BalancerOptions(wait_s=0.0, averaging_s=2.0))
    assert cluster.ask("pause").result == {"paused": True, "note": "", "version": 1}
    channels = balancer.at_home("s1", 4)
    cluster.follow.update(dict.fromkeys(channels, 220_000))
    cluster.run(20)
    assert not balancer.decided and cluster.ask("status").result["paused"]
    assert cluster.ask("move", {"channel": CHANNEL, "to": _other(cluster, balancer)}).error is None
    assert not cluster.ask("resume").result["paused"]
    assert cluster.ask("resume").result["note"] == "it was so already"
    cluster.run(5)
    assert balancer.decided


def test_the_plan_is_sent_in_pages() -> None:
    cluster, balancer = started()
    names = [b"c%d" % number for number in range(7)]
    for number, name in enumerate(names):
        cluster.admin("s1", "move", {"channel": name, "to": _other(cluster, balancer, name)}, request=number)
    cluster.run_until(lambda: len(cluster.servers["s1"].replies) == len(names))
    found: list[bytes] = []
    after = None
    for _ in range(4):
        page = cluster.ask("plan", {"limit": 2, "after": after}).result
        found += [entry["channel"] for entry in page["entries"]]
        after = page["next"]
    assert found == names and after is None
    one = cluster.ask("plan", {"channel": b"never moved"}).result["entries"]
    assert one[0]["servers"] == [balancer.plan.ring.home(b"never moved")] and one[0]["settled"]


@pytest.mark.parametrize("arguments", [{"limit": 0}, {"limit": 5000}, {"limit": "x"}, {"after": 3}, {"channel": "x"}])
def test_plan_refuses_what_it_does_not_understand(arguments: dict[str, Any]) -> None:
    cluster, _ = started(1)
    assert cluster.ask("plan", arguments).error is not None


def test_an_unknown_command_is_answered_with_the_known_ones() -> None:
    cluster, _ = started(1)
    reply = cluster.ask("explode")
    known = "compatibility, explain, move, pause, pin, plan, rebalance, replicate, resume, server, status, unpin"
    known += ", unreplicate"
    assert reply.error == f"command 'explode' is not known; known are {known}"


def test_answers_that_are_remembered_are_bounded() -> None:
    cluster, balancer = started(1, BalancerOptions(requests_max=3))
    for request in range(10):
        cluster.admin("s1", "status", request=request)
    cluster.run()
    for request in (0, 9):
        cluster.admin("s1", "status", request=request)
    cluster.run()
    counters = balancer.machine.overview.all_counters()
    assert (counters["requests"], counters["requests_repeated"]) == (11, 1)


def test_an_agent_at_a_wrong_server_is_reported_and_ignored() -> None:
    cluster, balancer = started()
    cluster.say("s1", PlanAck("s2", 5, 0))
    cluster.run()
    assert balancer.machine.counters["wrong_server"] == 1
    assert any(note.details.get("agent_of") == "s2" for note in balancer.notes)


def test_reports_that_nobody_measured_are_counted_and_ignored() -> None:
    cluster, balancer = started(1)
    report = cluster.agents["s1"].report()
    wrong: list[dict[str, Any]] = [{"interval_s": 1e-300}, {"interval_s": 1e300}, {"outgoing_bytes_per_s": 1e300}]
    for fields in wrong:
        cluster.say("s1", pack_report(replace(report, **fields)))
    cluster.run()
    assert balancer.machine.overview.all_counters()["reports_implausible"] == 3


_scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | st.text()
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)


def _sealed(server: str) -> st.SearchStrategy[bytes]:
    names = st.sampled_from([server, "s2", "nobody", ""])
    numbers = st.integers(0, 2**64 - 1)
    pairs = st.lists(st.tuples(st.binary(max_size=3) | st.just(CHANNEL), numbers), max_size=4).map(tuple)
    return st.one_of(
        st.binary(max_size=80),
        _values.map(msgpack.packb),
        st.lists(_values, max_size=8).map(lambda fields: msgpack.packb([12, *fields])),
        st.builds(PlanAck, names, numbers, numbers).map(pack_control),
        st.builds(Vacated, names, pairs, numbers).map(pack_control),
        st.builds(
            AdminRequest,
            st.integers(2**32, 2**64 - 1),  # not a number of the test's own requests: that would be answered alike
            st.sampled_from(["status", "move", "replicate", "unreplicate", "plan", "pause", "x"]),
            st.dictionaries(
                st.sampled_from(["channel", "to", "limit", "after", "mode", "servers", "count"]),
                _values | st.sampled_from([CHANNEL, "s1", ["s1", "s2"], "all-publishers", 2]),
                max_size=4,
            ),
        ).map(pack_control),
    )


@given(st.lists(_sealed("s1"), min_size=1, max_size=30))
def test_nothing_that_anybody_sends_stops_the_balancer(messages: list[bytes]) -> None:
    cluster, balancer = started()
    before = sum(balancer.machine.overview.all_counters().values())
    for message in messages:
        balancer.process.handle(Pushed("s1", [[b"message", BALANCER_CHANNEL, message]]))
    assert sum(balancer.machine.overview.all_counters().values()) >= before
    cluster.run(3)
    assert cluster.ask("status", server="s2").error is None
