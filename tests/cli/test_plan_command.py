"""``dynamoth plan`` and ``dynamoth status``: what is asked of the balancer, and what people are shown."""

from __future__ import annotations

import argparse
from types import MappingProxyType
from typing import Any

import pytest
from rich.console import Console

from dynamoth.plan.compatibility import CompatibilityRule
from dynamoth.plan.plan import Assignment, Entry, Mode, Phase, Plan, Route, Server, single
from dynamoth_cli.commands import plan
from dynamoth_cli.commands.plan import (
    change_arguments,
    channel_as_json,
    channel_as_text,
    describe_result,
    plan_as_json,
    plan_as_text,
)
from dynamoth_cli.commands.status import (
    DECISIONS_SHOWN_MAX,
    MOVES_SHOWN_MAX,
    REPLICATED_SHOWN_MAX,
    describe_balancer,
    describe_leader,
    describe_recorders,
    merged,
    show,
    table_of,
)

BASE = Plan.initial(Server(id_, f"redis://{id_}") for id_ in ("s1", "s2", "s3"))


def moved(entries: dict[bytes, Entry]) -> Plan:
    """Return version 9 of a plan, with these entries."""
    return Plan(9, BASE.servers, BASE.base, MappingProxyType(entries))


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    plan.configure(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("move", "c", "--to", "s1"), {"channel": b"c", "to": "s1"}),
        (
            ("replicate", "c", "--mode", "all-publishers", "--servers", "s1, s2,s3"),
            {"channel": b"c", "mode": "all-publishers", "servers": ["s1", "s2", "s3"]},
        ),
        (
            ("replicate", "c\udcff", "--mode", "all-subscribers", "--count", "4"),
            {"channel": b"c\xff", "mode": "all-subscribers", "count": 4},
        ),
        (("unreplicate", "c"), {"channel": b"c"}),
        (("unreplicate", "c", "--to", "s2"), {"channel": b"c", "to": "s2"}),
    ],
)
def test_the_balancer_gets_the_arguments(arguments: tuple[str, ...], wanted: dict[str, Any]) -> None:
    given = parsed(*arguments, "--timeout", "45", "--json")
    assert given.json
    assert change_arguments(given) == {"timeout_s": 45.0, **wanted}


def test_the_result_names_the_servers_and_the_note() -> None:
    result = {"mode": "single", "servers": ["s1"], "version": 7, "note": ""}
    assert describe_result("c", result) == "c is at s1, settled (plan version 7)\n"
    result = {"mode": "all-publishers", "servers": ["s1", "s2"], "version": 7, "note": "2 servers instead of 3"}
    assert describe_result("c", result) == (
        "c is at s1, s2, all-publishers, settled (plan version 7)\nnote: 2 servers instead of 3\n"
    )


def test_the_plan_shows_mode_and_all_servers_also_of_what_is_in_transition() -> None:
    subscribers = Route(5, Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2", "s3")))
    publishers = Route(9, Assignment(Mode.ALL_PUBLISHERS, ("s3", "s1")))
    shown = moved(
        {
            b"hot": Entry(subscribers, Phase.SETTLED),
            b"moved": Entry(Route(2, single("s2")), Phase.SETTLED),
            b"turning": Entry(publishers, Phase.ACTIVE, (Route(2, single("s2")), subscribers)),
        }
    )
    text = plan_as_text(shown)
    assert "3 channels were moved or replicated, 2 of them are replicated now" in text
    assert "  hot      s1,s2,s3  all-subscribers  settled  since version 5\n" in text
    assert "  moved    s2  single  settled  since version 2\n" in text
    previous = "from s1,s2,s3 all-subscribers and s2 single"
    assert f"  turning  s3,s1  all-publishers  active  {previous}  since version 9\n" in text
    [hot, _, turning] = plan_as_json(shown)["channels"]
    assert (hot["mode"], hot["servers"]) == ("ALL_SUBSCRIBERS", ["s1", "s2", "s3"])
    assert [route["servers"] for route in turning["previous"]] == [["s2"], ["s1", "s2", "s3"]]


def test_one_channel_shows_where_it_is_and_under_which_names() -> None:
    publishers = Route(9, Assignment(Mode.ALL_PUBLISHERS, ("s3", "s1")))
    shown = moved({b"turning": Entry(publishers, Phase.ACTIVE, (Route(2, single("s2")),))})
    [home] = shown.home_route(b"turning").assignment.servers
    assert channel_as_text(shown, b"turning") == (
        f"turning  s3,s1  all-publishers  active  from s2 single  since version 9  not at its home {home}\n"
        "  at s3 as __dynamoth__:r:00000009:turning\n"
        "  at s1 as __dynamoth__:r:00000009:turning\n"
        "  at s2 as turning\n"
    )
    shown_as = channel_as_json(shown, b"turning")
    assert (shown_as["version"], shown_as["home"], shown_as["moved"], shown_as["phase"]) == (9, home, True, "ACTIVE")
    assert (shown_as["mode"], shown_as["servers"], shown_as["epoch"]) == ("ALL_PUBLISHERS", ["s3", "s1"], 9)
    assert shown_as["previous"] == [{"mode": "SINGLE", "servers": ["s2"], "epoch": 2}]
    assert shown_as["locations"][0] == {"server": "s3", "name": "__dynamoth__:r:00000009:turning"}
    [at] = shown.home_route(b"other").assignment.servers
    at_home = f"other  {at}  single  settled  since version 0  at home\n  at {at} as other\n"
    assert channel_as_text(shown, b"other") == at_home
    assert channel_as_json(shown, b"other")["moved"] is False


def test_one_channel_shows_its_compatibility_rule() -> None:
    ruled = BASE.with_compatibility([CompatibilityRule(b"n*", "s2")])
    assert "  at s2 as news\n  compatibility: n* at s2, plain\n" in channel_as_text(ruled, b"news")
    assert channel_as_json(ruled, b"news")["compatibility"] == "n*"


def test_one_of_a_thing_is_one() -> None:
    shown = Plan(2, BASE.servers, BASE.base, {b"moved": Entry(Route(2, single("s2")), Phase.SETTLED)})
    assert "\n1 channel was moved or replicated; all others" in plan_as_text(shown)
    server = {"draining": True, "channels_left": 1}
    lines = describe_balancer(2, _balancer(servers={"s1": server}))
    assert "draining: s1; 1 channel is left there" in lines


def _balancer(**others: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"stage": "leading", "paused": False, "moves_settled": 4, "in_transition": 1}
    return {**state, "decisions": [], "servers": {}, **others}


def _replicated(number: int, **others: Any) -> dict[str, Any]:
    entry = {"channel": b"c%d" % number, "mode": "all-publishers", "servers": ["s1", "s2"], "settled": True}
    return {**entry, "phase": "settled", **others}


def test_status_shows_replicated_channels() -> None:
    channels = [_replicated(0), _replicated(1, settled=False, phase="active")]
    lines = describe_balancer(7, _balancer(replicated=2, replicated_channels=channels, paused=True))
    assert lines == [
        "plan version 7; balancer: leading, paused, 4 moves settled, 1 channel in transition",
        "replicated: c0 at s1, s2, all-publishers",
        "replicated: c1 at s1, s2, all-publishers, active",
    ]
    many = [_replicated(number) for number in range(100)]
    lines = describe_balancer(7, _balancer(replicated=250, replicated_channels=many))
    assert len(lines) == 1 + REPLICATED_SHOWN_MAX + 1
    assert lines[-1] == f"replicated: {250 - REPLICATED_SHOWN_MAX} more, see 'dynamoth plan show'"


def test_status_shows_who_leads_since_when_and_whether_there_is_a_standby() -> None:
    leader = _balancer(incarnation=7, process="process 12 on h", leading_s=300.0)
    assert (
        describe_leader(leader, 2) == "led by process 12 on h (incarnation 7) for 5 min; 1 standby balancer connected"
    )
    assert describe_leader(leader, 1).endswith(
        "no standby: start a second 'dynamoth balancer', which takes over when this one dies"
    )
    assert (
        describe_leader(_balancer(incarnation=7), 3)
        == "led by a balancer (incarnation 7); 2 standby balancers connected"
    )
    waiting = _balancer(stage="contending", incarnation=8)
    assert describe_leader(waiting, 1) == "no balancer that leads has answered; 1 balancer connected"


def test_status_shows_which_servers_are_being_drained_and_what_is_left_there() -> None:
    left = {"s1": None, "s2": 12, "s3": 0}
    servers: dict[str, Any] = {id_: {"draining": True, "channels_left": count} for id_, count in left.items()}
    servers["s4"] = {"draining": False, "channels_left": None}
    servers["s5"] = {"draining": True, "channels_left": None, "channels_named": 2, "slots_left": 3}
    servers["s6"] = {"draining": True, "channels_left": 0, "slots_left": 1}
    assert describe_balancer(7, _balancer(servers=servers))[1:] == [
        "draining: s1; the plan has no channel there; its agent does not report what else is left",
        "draining: s2; 12 channels are left there",
        "draining: s3; nothing is left there",
        "draining: s5; the plan has 2 channels and 3 slots there; its agent does not report what else is left",
        "draining: s6; 1 slot is left there",
    ]


def test_an_agent_that_redis_disconnects_again_and_again_is_not_called_missing() -> None:
    missing = {"kind": "agent_silent", "subject": "s1", "reason": "it has no agent", "age_s": None}
    blind = {"kind": "agent_blind", "subject": "s1", "reason": "it sees nothing", "age_s": 3.0}
    assert merged([blind], [missing]) == [blind]
    assert merged([], [missing]) == [missing]
    assert merged([{**blind, "subject": "s2"}], [missing])[-1] == missing


def test_status_shows_the_latest_decisions_with_reason_and_load() -> None:
    move = {
        "channel": b"hot",
        "mode_before": "single",
        "mode_after": "all-subscribers",
        "from": "s1",
        "to": "s1,s2",
        "reason": "much",
        "load_ratios": {"s1": [0.9, 0.45], "s2": [0.0, 0.45]},
    }
    finding = {"server": "s3", "load_ratio": 0.91, "reason": "add servers", "channel": None}
    old = {"number": 1, "age_s": 900.0, "moves": 0, "first_moves": [], "findings": [{**finding, "reason": "too old"}]}
    decision = {"number": 2, "age_s": 12.4, "moves": 30, "first_moves": [move] * 20, "findings": [finding]}
    lines = describe_balancer(7, _balancer(decisions=[old, *[decision] * DECISIONS_SHOWN_MAX]))[1:]
    assert lines[0] == "12 s ago: hot from s1 to s1,s2 all-subscribers: much (s1 0.90 -> 0.45, s2 0.00 -> 0.45)"
    assert lines[MOVES_SHOWN_MAX] == f"12 s ago: {30 - MOVES_SHOWN_MAX} more moves"
    assert lines[-1] == "12 s ago: s3 was left at load ratio 0.91: add servers"
    assert not any("too old" in line for line in lines)


def _server(url: str) -> dict[str, Any]:
    load = {"load_ratio": 0.5, "outgoing_bytes_per_s": 62.5e6, "messages_per_s": 740_000, "channels": 12_000}
    return {"url": url, "agents": 1, "recorders": 0, "stored_version": 12_345, "load": {**load, "cpu_ratio": 0.99}}


def test_status_shows_how_many_recorders_listen() -> None:
    servers = {id_: {"recorders": count} for id_, count in (("s1", 2), ("s2", 1), ("s3", None))}
    assert describe_recorders(servers) == ["recorded by 2 recorders, only 1 at s2"]
    assert describe_recorders({"s1": {"recorders": 0}, "s2": {"recorders": None}}) == []


def test_the_table_of_servers_fits_80_columns_without_cutting_urls() -> None:
    long = "rediss://" + "redis-master.dynamoth.svc.cluster.local." * 3 + ":6380"
    servers = {"s1": _server("redis://10.0.0.1:6379"), "server-2": _server(long)}
    lines = table_of(servers, 80)
    assert [line.strip() for line in lines[2::2]] == ["redis://10.0.0.1:6379", long]
    assert max(len(line) for line in lines if long not in line) <= 80
    wide = table_of(servers, 300)
    assert len(wide) == 3, "in a wide terminal each server has one line"
    assert wide[2].endswith(f"  {long}") and wide[2].startswith("server-2       1  12345  0.50     62.50      740000")


def test_the_status_is_printed_without_cutting_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    long = "rediss://" + "redis-master.dynamoth.svc.cluster.local." * 3 + ":6380"
    reason = f"{long} [Errno 111] " + "words " * 30
    problem = {"severity": "error", "kind": "server_unreachable", "subject": "s1", "reason": reason, "age_s": 12.3}
    show({"servers": {"s1": _server(long)}, "balancer": None, "version": 1, "problems": [problem]}, Console(width=80))
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].strip() == long
    assert shown[3] == f"! s1: {reason} (for 12 s)"


def test_a_long_channel_name_does_not_widen_the_table() -> None:
    text = plan_as_text(moved({b"a" * 70: Entry(Route(5, single("s1")), Phase.SETTLED)}))
    assert max(map(len, text.splitlines())) <= 80
    assert "  " + "a" * 70 + "\n" + " " * 26 + "  s1  single  settled  since version 5\n" in text
