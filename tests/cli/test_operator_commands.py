"""``dynamoth rebalance`` and ``dynamoth explain``: what is asked of the balancer, and what people are shown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import pytest

from dynamoth.plan.slots import slot_name
from dynamoth_cli.commands import explain, rebalance
from dynamoth_cli.commands.explain import describe_channel, describe_server
from dynamoth_cli.commands.rebalance import describe
from dynamoth_cli.decisions import describe_decision, describe_moves, to_json
from dynamoth_cli.numbers import duration


class Balancer:
    """Answers in the place of a balancer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Mapping[str, Any]) -> None:
        self.asked: list[tuple[str, Mapping[str, Any], float]] = []

        async def ask(
            _cluster: Any, command: str, arguments: Mapping[str, Any], *, timeout_s: float, link: Any
        ) -> Mapping[str, Any]:
            self.asked.append((command, arguments, timeout_s))
            return answer

        for module in (explain, rebalance):
            monkeypatch.setattr(module, "ask_balancer", ask)

    def run(self, module: Any, *arguments: str) -> int:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        module.configure(parser)
        return int(module.run(parser.parse_args([*arguments, "--url", "dynamoth://localhost:1"])))


def move(channel: bytes = b"hot", **others: Any) -> dict[str, Any]:
    known = {"from": "s1", "to": "s2", "mode_before": "single", "mode_after": "single", "goal": "relieve"}
    ratios = {"s1": [0.9, 0.4], "s2": [0.1, 0.6]}
    return {"channel": channel, **known, "reason": "too much", "load_ratios": ratios, **others}


DECISION: dict[str, Any] = {
    "number": 0,
    "age_s": 0.0,
    "progress": "preview",
    "refused": "",
    "moves": 1,
    "first_moves": [move()],
    "findings": [],
    "load_ratios": {"s1": {"before": 0.9, "predicted": 0.4, "measured": None}},
    "dry_run": True,
    "obstacles": ["the balancer is paused"],
    "servers": {
        "s1": {"load_ratio_before": 0.9, "load_ratio_predicted": 0.4, "why_not": ""},
        "s3": {"load_ratio_before": None, "load_ratio_predicted": None, "why_not": "its agent is not heard"},
    },
}


# Rebalance.


def test_rebalance_asks_and_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    balancer = Balancer(monkeypatch, DECISION)
    assert balancer.run(rebalance, "--dry-run") == 0
    assert balancer.run(rebalance, "--timeout", "5", "--json") == 0
    assert balancer.asked == [
        ("rebalance", {"dry_run": True, "timeout_s": 60.0}, 61.0),
        ("rebalance", {"dry_run": False, "timeout_s": 5.0}, 6.0),
    ]
    text, _, rest = capsys.readouterr().out.partition("{")
    assert text.splitlines() == [
        "the balancer would make 1 move:",
        "  hot from s1 to s2: too much (s1 0.90 -> 0.40, s2 0.10 -> 0.60)",
        "load ratios:",
        "  s1 0.90 -> 0.40",
        "  s3 takes no part: its agent is not heard",
        "not now: the balancer is paused",
    ]
    assert json.loads("{" + rest)["first_moves"][0]["channel"] == "hot"


def test_rebalance_says_how_far_it_is_and_what_was_left() -> None:
    finding = {"server": "s1", "load_ratio": 0.95, "reason": "add servers"}
    done = {**DECISION, "dry_run": False, "number": 4, "progress": "settled", "moves": 3, "findings": [finding]}
    lines = list(describe(done))
    assert lines[0] == "3 moves, settled (decision 4):" and lines[2] == "  2 more moves"
    assert lines[3] == "  s1 was left at load ratio 0.95: add servers" and "not now" not in "".join(lines)
    assert next(describe({**DECISION, "moves": 0, "first_moves": []})) == "nothing to move"


def test_slots_that_move_together_are_one_line() -> None:
    slots = [
        move(slot_name(number), load_ratios={"s1": [0.5 - number / 10, 0.4 - number / 10], "s2": [0.0, number / 10]})
        for number in range(3)
    ]
    assert list(describe_moves([move(), *slots, move(slot_name(9), reason="other")])) == [
        "hot from s1 to s2: too much (s1 0.90 -> 0.40, s2 0.10 -> 0.60)",
        "3 slots from s1 to s2: too much (s1 0.50 -> 0.20, s2 0.00 -> 0.20)",
        "slot 9 from s1 to s2: other (s1 0.90 -> 0.40, s2 0.10 -> 0.60)",
    ]


def test_a_decision_shows_what_was_measured_and_what_was_refused() -> None:
    measured = {"s1": {"before": 0.9, "predicted": 0.4, "measured": 0.45}, "s2": {"measured": None}}
    shown = {**DECISION, "age_s": 40.0, "load_ratios": measured, "refused": "the agent of s2 is not heard"}
    assert describe_decision(shown, 5)[1:] == [
        "40 s ago: the moves could not begin: the agent of s2 is not heard",
        "40 s ago: measured afterwards: s1 0.45",
    ]


def test_bytes_that_are_no_text_are_escaped_in_json() -> None:
    assert json.loads(to_json({"channel": b"a\xff"})) == {"channel": "a\\xff"}


def test_lengths_of_time_are_short() -> None:
    times = (0.4, 119, 120, 7000, 7200, 100_000, 200_000)
    assert [duration(time) for time in times] == ["0 s", "119 s", "2 min", "117 min", "2 h", "28 h", "2 days"]


# Explain.


CHANNEL: dict[str, Any] = {
    "kind": "channel",
    "version": 12,
    "obstacles": [],
    "channel": b"news",
    "mode": "single",
    "servers": ["s2"],
    "epoch": 9,
    "phase": "settled",
    "previous": [],
    "settled": True,
    "slot": 17,
    "home": "s1",
    "placed_by": "entry",
    "why": "the plan names it",
    "since_s": 300.0,
    "waiting_for": [],
    "load": {
        "reported": True,
        "outgoing_bytes_per_s": {"s2": 2_500_000.0},
        "load_ratio": {"s2": 0.02},
        "publications_per_s": 12.0,
        "publishers": 1,
        "subscribers": 40.2,
    },
    "moves": [{**move(b"news"), "load_ratios": {}, "age_s": 300.0, "reason": "s1 has load ratio 0.90"}],
    "next_move": None,
    "stays": ["it has moved lately and rests for 4 s"],
}


def test_explain_asks_and_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    balancer = Balancer(monkeypatch, CHANNEL)
    assert balancer.run(explain, "news\udcff") == 0
    assert balancer.run(explain, "s1", "--channel", "--json") == 0
    assert balancer.run(explain, "s1", "--server", "--json") == 0
    assert [arguments for _, arguments, _ in balancer.asked] == [
        {"name": b"news\xff", "kind": None},
        {"name": b"s1", "kind": "channel"},
        {"name": b"s1", "kind": "server"},
    ]
    assert capsys.readouterr().out.startswith("news is at s2")


def test_a_channel_is_explained() -> None:
    assert list(describe_channel(CHANNEL)) == [
        "news is at s2, settled, since version 9, for 5 min",
        "  why: the plan names it (slot 17, home s1)",
        "  load: 2.500 MB/s at s2 (load ratio 0.020); 12.0 publications/s by 1 publisher to 40 subscribers",
        "  5 min ago: news from s1 to s2: s1 has load ratio 0.90 (relieve)",
        "  stays: it has moved lately and rests for 4 s",
    ]


def test_a_channel_in_transition_is_explained() -> None:
    load = {**CHANNEL["load"], "reported": False, "subscribers": None, "load_ratio": {"s2": None}}
    state = {
        "mode": "all-publishers",
        "servers": ["s2", "s3"],
        "since_s": None,
        "waiting_for": ["s1 to store the plan"],
    }
    moving = {**CHANNEL, **state, "phase": "prepared", "previous": [{"servers": ["s1"]}], "load": load, "moves": []}
    next_move = {"next_move": move(b"news"), "stays": [], "obstacles": ["the balancer is paused"]}
    assert list(describe_channel({**moving, **next_move})) == [
        "news is at s2, s3, all-publishers, prepared, since version 9",
        "  why: the plan names it (slot 17, home s1)",
        "  comes from s1",
        "  waits for s1 to store the plan",
        "  load: 2.500 MB/s at s2; agents do not name it in their reports: others are busier, or nobody uses it",
        "  next: news from s1 to s2: too much (s1 0.90 -> 0.40, s2 0.10 -> 0.60)",
        "  no plan now: the balancer is paused",
    ]


def test_a_server_is_explained() -> None:
    busiest = {"channel": b"hot", "load_ratio": 0.31, "subscribers": 1.0, "publications_per_s": 9.0}
    made = {"number": 3, "age_s": 50.0, "progress": "measured", "before": 0.9, "predicted": 0.6, "measured": 0.62}
    used = {"outgoing_bytes_per_s": 62e6, "cpu_ratio": 0.05, "connections": 10, "memory_bytes": 2_500_000}
    ratios = {"outgoing": 0.62, "cpu": 0.05, "connections": 0.001, "memory": 0.25}
    resources = {**used, "resource_ratios": ratios}
    server = {
        "server": "s1",
        "status": {"load_ratio": 0.62, "agent": "alive", "draining": False, "channels": 5, **resources},
        "why_not": "",
        "why_not_to": "it is new",
        "slots": 2048,
        "busiest": [busiest, {**busiest, "channel": b"new", "subscribers": None}],
        "findings": [{"server": "s1", "load_ratio": 0.62, "reason": "add servers"}],
        "next_moves": [move()],
        "decisions": [made],
        "obstacles": [],
    }
    lines = list(describe_server(server))
    assert lines == [
        "s1 has load ratio 0.62, 2048 slots, agent alive",
        "  outgoing: 0.620 (62.00 MB/s)",
        "  cpu: 0.050 (0.05 cores)",
        "  connections: 0.001 (10)",
        "  memory: 0.250 (2.5 MB)",
        "  gets no channels: it is new",
        "  5 active channels; the busiest:",
        "    (load ratio 0.310) hot: 9.0 publications/s to 1 subscriber",
        "    (load ratio 0.310) new",
        "  50 s ago: decision 3, measured: load ratio 0.90, predicted 0.60, measured 0.62",
        "  s1 was left at load ratio 0.62: add servers",
        "  next: hot from s1 to s2: too much (s1 0.90 -> 0.40, s2 0.10 -> 0.60)",
    ]
    silent: dict[str, Any] = {"load_ratio": None, "agent": "silent", "draining": True, "resource_ratios": {}}
    unknown = {**server, "why_not": "it is down", "status": silent}
    lines = list(describe_server(unknown))
    assert lines[0] == "s1 has unknown load, 2048 slots, agent silent, being drained"
    assert "  takes part in no change: it is down" in lines and not any("gets no" in line for line in lines)
