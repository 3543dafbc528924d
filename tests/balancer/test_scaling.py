"""The fleet in a balancer that leads a simulated cluster: what it shows, and what administrators can do to it."""

from __future__ import annotations

from typing import Any

from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.process.metrics import make_registry
from dynamoth_balancer.provision.fleet import StartServer
from dynamoth_balancer.provision.options import FleetOptions
from dynamoth_cli.commands.status import describe_balancer
from dynamoth_sim.cluster import JOIN_S
from dynamoth_sim.load.provisioner import Manner
from dynamoth_sim.scenarios.stage import Scenario, Stage
from dynamoth_sim.world.world import World

THREE = FleetOptions(servers_min=3, servers_max=4, retry_s=0.3, retry_s_max=0.3, release_delay_s=1.0, join_timeout_s=7)
"""A fleet that grows by one whatever the load is."""


def staged(fleet: FleetOptions | None = THREE, manner: Manner = Manner.WORKS) -> Stage:
    """Return a cluster of two servers that has just begun."""
    stage = Stage(World(1), Scenario(lambda _: None, servers=2, fleet=fleet))
    stage.cluster.provisioner.manner = manner
    stage.open()
    return stage


def balancer(stage: Stage) -> BalancerMachine:
    machine = stage.cluster.balancer.machine
    assert isinstance(machine, BalancerMachine)
    return machine


def status(stage: Stage) -> dict[str, Any]:
    return dict(balancer(stage).overview.status(stage.world.now))


def ask(stage: Stage, command: str, **arguments: Any) -> str | None:
    """Ask the balancer for something; return why it was refused."""
    request = stage.cluster.ask(command, arguments)
    stage.wait("an answer", lambda: request in stage.cluster.answers)
    return stage.cluster.answers[request]


def grown(stage: Stage) -> str:
    """Wait until a server has been added, and return it."""
    stage.wait("a server takes part", lambda: "active" in str(status(stage)["fleet"]))
    [server] = status(stage)["fleet"]["servers"]
    return str(server)


def test_status_and_metrics_show_the_fleet() -> None:
    stage = staged()
    server = grown(stage)
    fleet = status(stage)["fleet"]

    assert (fleet["servers_min"], fleet["servers_max"]) == (3, 4)
    assert fleet["servers"][server]["life"] == "active"
    assert fleet["servers"][server]["url"] == f"redis://{server}:6379"
    assert 2 * 0.5 < fleet["server_seconds"] < 3 * stage.world.now
    [line] = [each for each in describe_balancer(1, status(stage)) if each.startswith("fleet: ")]
    assert line.startswith("fleet: 3 to 4 servers, ") and line.endswith(f" server-seconds; {server} is active")
    registry = make_registry(balancer(stage), lambda: stage.world.now)
    assert registry.get_sample_value("dynamoth_balancer_fleet_active") == 1
    assert registry.get_sample_value("dynamoth_balancer_fleet_starting") == 0
    assert registry.get_sample_value("dynamoth_balancer_fleet_server_seconds") == fleet["server_seconds"]
    assert registry.get_sample_value("dynamoth_balancer_servers_started_total") == 1


def test_without_a_provisioner_there_is_no_fleet() -> None:
    stage = staged(fleet=None)

    assert status(stage)["fleet"] is None
    assert stage.cluster.provisioner.requests == []


def test_a_provisioner_that_fails_is_a_warning_and_the_balancer_stays_ready() -> None:
    stage = staged(manner=Manner.FAILS)
    stage.wait("a problem", lambda: any(p["kind"] == "provisioner_failed" for p in status(stage)["problems"]))
    [problem] = status(stage)["problems"]

    assert problem["severity"] == "warning"
    assert problem["reason"] == "auto-0-1 cannot be started: no credit left"
    assert balancer(stage).health.errors == []


def problem(stage: Stage, server: str) -> tuple[str, str] | None:
    """Return severity and reason of what is shown about the agent of a server."""
    problems = status(stage)["problems"]
    silent = [each for each in problems if (each["kind"], each["subject"]) == ("agent_silent", server)]
    return (silent[0]["severity"], silent[0]["reason"]) if silent else None


def test_a_server_that_joins_says_that_it_waits_for_its_agent() -> None:
    stage = staged(manner=Manner.HALF)
    stage.wait("a server is in the plan", lambda: "auto-0-1" in status(stage)["servers"])
    text = "it joins, and waits for its agent: if that does not report its load within 7 s, the server is given up"
    stage.wait("that is shown", lambda: problem(stage, "auto-0-1") == ("warning", text))

    assert balancer(stage).health.errors == []
    stage.cluster.agents["auto-0-1"].start()
    grown(stage)
    assert status(stage)["problems"] == []


def test_a_server_that_an_operator_adds_says_who_starts_its_agent() -> None:
    stage = staged(fleet=None)
    added = stage.cluster.add_server()
    stage.cluster.agents[added].crash()
    stage.cluster.change_server("add", added)
    text = f"start 'dynamoth agent --server {added}'"
    joins = ("warning", f"it joins, and waits for its agent: {text}, unless it runs")
    stage.wait("that is shown", lambda: problem(stage, added) == joins)

    stage.run(JOIN_S)
    assert problem(stage, added) == ("error", f"it has no agent: {text}")


def test_an_agent_that_is_gone_is_shown_with_what_is_done_about_it() -> None:
    stage = staged()
    server = grown(stage)
    assert problem(stage, server) is None
    stage.cluster.provisioner.manner = Manner.HANGS
    stage.cluster.agents[server].crash()
    unasked = ("error", f"it has no agent: start 'dynamoth agent --server {server}'")
    stage.wait("it is shown", lambda: problem(stage, server) == unasked)
    asked = ("error", "it has no agent: the provisioner has been asked to start it again")
    stage.wait("the provisioner is asked", lambda: problem(stage, server) == asked)
    [said] = [record.note for record in stage.records("says") if "asked to start" in str(record.note)]

    assert "the provisioner is asked to start a server again" in said
    assert "its agent is gone" in said and server in said


def test_a_paused_balancer_asks_for_no_server() -> None:
    stage = staged(manner=Manner.FAILS)
    assert ask(stage, "pause") is None
    stage.run(1.0)
    before = len(stage.cluster.provisioner.requests)
    stage.run(3.0)
    assert len(stage.cluster.provisioner.requests) == before
    stage.cluster.provisioner.manner = Manner.WORKS

    assert ask(stage, "resume") is None
    grown(stage)
    assert len(stage.cluster.provisioner.times(StartServer)) > 1


def test_nobody_puts_a_channel_at_a_server_that_is_released() -> None:
    stage = staged(fleet=None)
    installer = balancer(stage).leadership.leading_installer()
    installer.close(frozenset({"s2"}), frozenset())

    text = "server s2 takes no channels, as the load is low and it is being released: name another one"
    assert ask(stage, "move", channel=stage.channel_at("s1"), to="s2") == text
    assert status(stage)["servers"]["s2"]["slots_left"] > 0
    assert status(stage)["servers"]["s1"]["slots_left"] is None
