"""``dynamoth broker status`` and the other commands of operators: what they print, and when they are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamoth.errors import RequestRefused
from dynamoth.protocol.control import AdminReply
from dynamoth_cli.commands import broker_orders
from dynamoth_cli.commands.broker_orders import describe_explanation, describe_status
from dynamoth_cli.edge_admin import EdgeAnswers
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


NO_TROUBLE: dict[str, Any] = {"ambiguous": [], "differing": {}}


def test_a_status_for_people() -> None:
    draining = {
        **BROKER,
        "draining": True,
        "url": "",
        "unreachable": {"s2": "refused"},
        "unusable_logs": {"l1": "full"},
    }
    paused = {**COORDINATOR, "paused": True, "unreachable": {"s1": "gone"}}
    brokers = {"b1": BROKER, "longer": draining}
    status = {"brokers": brokers, "coordinators": [paused], "coordinator": paused, "silent": 1, **NO_TROUBLE}
    assert list(describe_status(status)) == [
        "b1      2 users, 1 interest, load ratio 0.250, open  wss://b1",
        "longer  2 users, 1 interest, load ratio 0.250, draining  no URL: set broker.url",
        "        cannot use server s2: refused",
        "        cannot use log server l1: full",
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
    status |= NO_TROUBLE
    assert list(describe_status(status))[-1] == last


class Cluster:
    """Brokers and coordinators that answer in place of real ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.brokers: list[dict[str, Any]] = []
        self.coordinators: list[dict[str, Any]] = []
        #: Commands but ``status``, with their targets.
        self.asked: list[tuple[str, str, Mapping[str, Any]]] = []
        self._capsys = capsys
        monkeypatch.setattr(broker_orders, "ask_edge", self._ask)

    def add(self, id_: str, **fields: Any) -> None:
        self.brokers.append({**BROKER, "role": "broker", "broker": id_, **fields})

    async def _ask(
        self, cluster: Any, link: Any, command: str, target: str = "*", wanted: Mapping[str, Any] | None = None
    ) -> EdgeAnswers:
        if command != "status":
            self.asked.append((command, target, wanted or {}))
        found = [each for each in self.brokers if target in ("*", each["broker"])]
        answers = [*found, *(self.coordinators if target in ("*", "coordinator") else [])]
        return EdgeAnswers(tuple(AdminReply(1, each) for each in answers), len(answers))

    def run(self, *command: str) -> tuple[int, str, str]:
        code = main(["broker", *command, "--url", "dynamoth://127.0.0.1:1"])
        output, error = self._capsys.readouterr()
        return code, output, error


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cluster:
    return Cluster(monkeypatch, capsys)


@pytest.mark.parametrize("command", ["drain", "undrain"])
def test_an_id_of_two_brokers_is_refused_with_cause_and_cure(cluster: Cluster, command: str) -> None:
    cluster.add("b1", url="wss://one")
    cluster.add("b1", url="")
    cluster.add("b2")
    code, _, error = cluster.run(command, "b1")
    assert code == 1 and cluster.asked == []
    assert "2 brokers have the id b1 (no URL, wss://one): give each one of its own (--id, or broker.id)" in error


def test_two_answers_of_one_id_that_status_has_not_shown_are_no_traceback() -> None:
    with pytest.raises(RequestRefused, match="2 brokers have the id b1"):
        broker_orders._check_one("b1", [BROKER, BROKER])  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("other", [{"admitting": False}, {"url": ""}, None])
def test_the_last_broker_that_takes_users_is_drained_by_force_only(
    cluster: Cluster, other: dict[str, Any] | None
) -> None:
    cluster.add("b1")
    if other is not None:
        cluster.add("b2", **other)
    code, output, error = cluster.run("drain", "b1")
    assert (code, output, cluster.asked) == (1, "", [])
    assert "no other broker takes users: those of b1 stay there" in error and "--force" in error
    code, output, error = cluster.run("drain", "b1", "--force", "--json")
    assert code == 0 and "no other broker takes users" in error
    assert "no other broker takes users" in json.loads(output)["warnings"][0]
    assert cluster.asked == [("drain", "b1", {"rate": 500.0, "force": True})]


def test_a_broker_is_drained_to_another_one_that_takes_users(cluster: Cluster) -> None:
    cluster.add("b1")
    cluster.add("b2")
    code, output, error = cluster.run("drain", "b1", "--json")
    assert (code, error, json.loads(output)["warnings"]) == (0, "", [])


def test_status_warns_of_ids_and_settings_that_are_wrong(cluster: Cluster) -> None:
    for id_, history in (("b1", "aa"), ("b2", "bb"), ("b2", "bb"), ("old", None)):
        cluster.add(id_, logs_hash="ll", **({} if history is None else {"history_hash": history}))
    code, output, _ = cluster.run("status", "--json")
    status = json.loads(output)
    assert code == 0 and status["ambiguous"] == ["b2"]
    assert status["differing"] == {"history": {"aa": ["b1"], "bb": ["b2", "b2"]}}
    code, output, _ = cluster.run("status")
    assert output.splitlines()[-2:] == [
        "warning: several brokers have the id b2: give each one of its own (--id, or broker.id)",
        "warning: brokers differ in broker.history: b1 | b2, b2. All need the same, or users miss publications",
    ]


@pytest.mark.parametrize("command", [("pause",), ("resume",), ("pin", "u"), ("unpin", "u")])
def test_an_order_needs_a_coordinator_that_acts(cluster: Cluster, command: tuple[str, ...]) -> None:
    cluster.coordinators = [{**COORDINATOR, "role": "coordinator", "leading": False}]
    code, _, error = cluster.run(*command)
    assert code == 1 and "no coordinator acts now, so nothing was changed" in error
    cluster.coordinators.append({**COORDINATOR, "role": "coordinator"})
    assert cluster.run(*command)[0] == 0


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (("--prot", "80"), "--prot"),
        (("--prot=80", "--id", "b1"), "--prot=80"),
        (("--id", "b1", "--prot", "80", "--check"), "--prot"),
        (("drain", "b1", "--fource"), "--fource"),
    ],
)
def test_a_misspelt_flag_is_named(capsys: pytest.CaptureFixture[str], command: tuple[str, ...], flag: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["broker", *command])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"unrecognized arguments: {flag.partition('=')[0]}" in error and "invalid choice" not in error


def test_an_unknown_action_is_still_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["broker", "fly"])
    assert "invalid choice: 'fly'" in capsys.readouterr().err


@pytest.mark.parametrize("location", ["north", "91,0"])
def test_a_wrong_location_of_a_broker_is_refused(capsys: pytest.CaptureFixture[str], location: str) -> None:
    common = ("--id", "b1", "--anonymous", "on", "--servers", "s1=redis://127.0.0.1:1", "--check")
    assert main(["broker", *common, "--location", "48.2,16.4"]) == 0
    assert main(["broker", *common, "--location", location]) == 2
    assert "broker.location: " in capsys.readouterr().err


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


def test_a_file_that_is_given_before_the_command_names_the_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dynamoth.toml"
    file.write_text('[[cluster.servers]]\nid = "s1"\nurl = "redis://127.0.0.1:1"\n')
    assert main(["broker", "--config", str(file), "status"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
