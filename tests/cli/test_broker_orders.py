"""``dynamoth broker status`` and the other commands of operators: what they print, and when they are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth_cli.commands.broker_orders import describe_explanation, describe_status
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_cli.main import main

BROKER: dict[str, Any] = {
    "sessions": 2,
    "interests": 1,
    "load_ratio": 0.25,
    "draining": False,
    "admitting": True,
    "url": "wss://b1",
    "unreachable": {},
}
COORDINATOR: dict[str, Any] = {
    "process": "host, process 1",
    "leading": True,
    "paused": False,
    "moves_done": 1,
    "unreachable": {},
}


def test_a_status_for_people() -> None:
    draining = {**BROKER, "draining": True, "url": "", "unreachable": {"s2": "refused"}}
    paused = {**COORDINATOR, "paused": True, "unreachable": {"s1": "gone"}}
    brokers = {"b1": BROKER, "longer": draining}
    status = {"brokers": brokers, "coordinators": [paused], "coordinator": paused, "silent": 1}
    assert list(describe_status(status)) == [
        "b1      2 users, 1 interest, load ratio 0.250, open  wss://b1",
        "longer  2 users, 1 interest, load ratio 0.250, draining  no URL: set broker.url",
        "        cannot use server s2: refused",
        "coordinator host, process 1 acts, paused: 1 user moved",
        "  cannot use server s1: gone",
        "1 more did not answer",
    ]


@pytest.mark.parametrize(
    ("coordinators", "last"),
    [
        ([], "no coordinator runs: nobody is moved by load, and users are sent to the configured alternates"),
        ([{**COORDINATOR, "leading": False}], "no coordinator has the lease: nobody is moved by load"),
    ],
)
def test_a_status_says_why_nobody_is_moved(coordinators: list[dict[str, Any]], last: str) -> None:
    status: dict[str, Any] = {"brokers": {}, "coordinators": coordinators, "coordinator": None, "silent": 0}
    assert list(describe_status(status))[-1] == last


def test_an_explanation_for_people() -> None:
    latest = {
        **{"number": 3, "kind": "relieve", "reason": "cov 0.5", "outcome": "even", "moved": 1, "failed": 0},
        "moves": [{"from": "b1", "to": "b2", "users": 1}],
    }
    explanation = {
        "brokers": {"b1": {"load_ratio": 0.5, "standing": "open"}},
        "loads": {"cov": 0.0, "ratio_mean": 0.5, "ratio_max": 0.5},
        "due": "",
        "obstacles": ["decisions are paused"],
        "latest": latest,
    }
    assert list(describe_explanation(False, explanation)) == [
        "this coordinator does not act: it has not the lease",
        "b1  load ratio 0.500, open",
        "cov 0.000, mean 0.500, largest 0.500",
        "due: nothing",
        "  decisions are paused",
        "latest decision, 3: relieve, as cov 0.5",
        "  1 user b1 -> b2",
        "  1 moved, 0 did not; even",
    ]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("status",), "no edge broker and no coordinator is running"),
        (("drain", "b1"), "no edge broker and no coordinator is running"),
        (("pause",), "no coordinator is running"),
        (("explain",), "no coordinator is running"),
    ],
)
def test_where_nobody_runs(
    redis_server: EmbeddedRedis, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], why: str
) -> None:
    assert main(["broker", *command, "--url", f"dynamoth://127.0.0.1:{redis_server.port}"]) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("command", [("drain",), ("move", "u1"), ("drain", "b1", "--rate", "0"), ("fly",)])
def test_wrong_use(command: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["broker", *command])
    assert caught.value.code == 2


def test_without_a_command_the_daemon_runs(capsys: pytest.CaptureFixture[str]) -> None:
    servers = ("--servers", "s1=redis://127.0.0.1:1")
    assert main(["broker", "--id", "b1", "--anonymous", "on", *servers, "--check"]) == 0
    assert main(["coordinator", *servers, "--check"]) == 0
    assert main(["coordinator", *servers, "--forget-s", "1", "--check"]) == 2
    assert main(["coordinator", *servers, "--cov-target", "0.9", "--check"]) == 2
    refusals = capsys.readouterr().err
    assert "coordinator.forget_s: more than 3 s" in refusals and "cov_target must be at most cov_max" in refusals
