"""The whole stack of the compose file as processes: it becomes healthy, is scraped, and each query has an answer."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

import dynamoth_client
from tests.compose.files import ALERTS, panels
from tests.compose.stack import Stack, program, until

EMPTY_WHILE_WELL = {"Problem list", "Alert list"}


def test_the_stack(tmp_path: Path) -> None:
    """One test, as all of it needs one stack, and the last part breaks that."""
    with Stack(tmp_path) as stack:
        for service in stack.services.values():
            if service.name != "prometheus":  # its image has another program to ask
                service.wait_healthy()
        until(lambda: stack.services["prometheus"].get("/-/ready"), "Prometheus is ready", stack.check)
        scraped = f"count(timestamp(up == 1) > {time.time()}) == count(up) == 6"
        until(lambda: stack.query(scraped), "all have been scraped since they are well", stack.check)
        one_balancer_leads_and_the_other_stands_by(stack)
        metrics_follow_the_rules_of_prometheus(stack)
        each_panel_has_data(stack)
        no_alert_fires_and_each_asks_for_what_exists(stack)
        an_operator_sees_a_healthy_cluster(stack)
        an_application_uses_its_channels_and_no_others(stack)
        servers_refuse_nobody_else_and_have_the_settings_that_agents_want(stack)
        the_standby_takes_over_and_alerts_see_what_is_gone(stack)


def one_balancer_leads_and_the_other_stands_by(stack: Stack) -> None:
    def roles() -> list[list[str]]:
        metrics = [service.get("/metrics") for service in stack.of_kind("balancer")]
        return sorted(
            re.findall(r"^dynamoth_balancer_(leading|standing_by) 1\.0$", text, re.MULTILINE) for text in metrics
        )

    until(lambda: roles() == [["leading"], ["standing_by"]], "one leads, and the other stands by", stack.check)


def metrics_follow_the_rules_of_prometheus(stack: Stack) -> None:
    for service in (*stack.of_kind("agent"), *stack.of_kind("balancer")):
        text = service.get("/metrics")
        done = subprocess.run(
            [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), service.name


def each_panel_has_data(stack: Stack) -> None:
    for panel, expression in panels():
        if stack.query(expression) or panel in EMPTY_WHILE_WELL:
            continue  # else it asks for a rate, or an average, and there was one scrape
        until(lambda expr=expression: stack.query(expr), f"{panel} has data: {expression}", stack.check)  # type: ignore[misc]


def no_alert_fires_and_each_asks_for_what_exists(stack: Stack) -> None:
    groups = json.loads(stack.services["prometheus"].get("/api/v1/rules"))["data"]["groups"]
    loaded = {rule["name"] for group in groups for rule in group["rules"]}
    assert loaded == {alert["alert"] for alert in ALERTS}
    for alert in ALERTS:
        until(lambda expr=alert["expr"]: not stack.query(expr), f"{alert['alert']} is silent", stack.check)  # type: ignore[misc]
        for name in set(re.findall(r"\b(?:dynamoth_(?!data_cluster)\w+|up)\b", alert["expr"])) - {
            "dynamoth_balancer_problems"
        }:
            until(lambda n=name: stack.query(n), f"{alert['alert']}: something is called {name}", stack.check)  # type: ignore[misc]


def an_operator_sees_a_healthy_cluster(stack: Stack) -> None:
    operator = stack.operator
    command = operator.command(operator.definition["command"])

    def status() -> int:
        return subprocess.run(command, env=operator.environment, capture_output=True, check=False).returncode

    until(lambda: status() == 0, "dynamoth status has nothing to show", stack.check)


def an_application_uses_its_channels_and_no_others(stack: Stack) -> None:
    password = (stack.secrets / "client").read_text()
    hosts = ",".join(f"{stack.host}:{server.port}" for server in stack.of_kind("redis"))
    with dynamoth_client.from_url(f"dynamoth://dynamoth-client:{password}@{hosts}") as client:
        pubsub = client.pubsub()
        pubsub.subscribe("news.today")
        client.publish("news.today", "hello")
        messages = (message["data"] for message in pubsub.listen() if message["type"] == "message")
        assert next(messages) == b"hello"
        pubsub.close()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.publish("elsewhere", "hello")


def servers_refuse_nobody_else_and_have_the_settings_that_agents_want(stack: Stack) -> None:
    password = (stack.secrets / "admin").read_text()
    for server in stack.of_kind("redis"):
        with redis.Redis(stack.host, server.port, username="dynamoth-admin", password=password) as client:
            admin: Any = client
            refused = {entry["username"] for entry in admin.acl_log()}
            assert refused <= {"dynamoth-client"}, "an application has no other channels than its own"
        with (
            redis.Redis(stack.host, server.port, retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            stranger.get("x")
    for agent in stack.of_kind("agent"):
        assert not [line for line in agent.child.lines if "does harm" in line]


def the_standby_takes_over_and_alerts_see_what_is_gone(stack: Stack) -> None:
    leader, standby = sorted(
        stack.of_kind("balancer"), key=lambda service: "balancer_leading 0.0" in service.get("/metrics")
    )
    leader.child.stop()
    until(lambda: "dynamoth_balancer_leading 1.0" in standby.get("/metrics"), "the standby leads", stack.check)
    stack.services["agent-3"].child.stop()
    expressions = {alert["alert"]: alert["expr"] for alert in ALERTS}
    for name in ("DynamothNoStandby", "DynamothAgentDown", "DynamothProblem"):
        until(lambda expr=expressions[name]: stack.query(expr), f"{name} has something to say", stack.check)  # type: ignore[misc]
    until(lambda: not stack.query(expressions["DynamothNoLeader"]), "somebody leads", stack.check)
