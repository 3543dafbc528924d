"""The files of compose/, looked at one by one: against schemas, by promtool, and against each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.compose.files import ALERTS, DASHBOARD, panels
from tests.compose.stack import FOLDER, load_yaml, program, services

HERE = Path(__file__).parent
COMPOSE = load_yaml(FOLDER / "compose.yaml")


def run(*command: str | Path) -> str:
    """Run a command that must succeed; return what it wrote."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_compose_file_keeps_the_specification() -> None:
    """By the schema of the compose specification, which check-jsonschema has."""
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", FOLDER / "compose.yaml")


def test_whatever_the_compose_file_names_exists() -> None:
    for name, service in services().items():
        assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"]), name
        assert set(service.get("depends_on", [])) <= set(COMPOSE["services"]), name
        for mount in service.get("volumes", []):
            source = mount.partition(":")[0]
            assert (FOLDER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], mount
    roles = re.search(r"roles='([a-z -]+)'", (FOLDER / "make-secrets").read_text())
    assert roles is not None
    written = [*roles[1].split(), "grafana"]
    assert {Path(secret["file"]).name for secret in COMPOSE["secrets"].values()} <= {*written, "users.acl"}


def test_every_container_is_bounded_restarts_and_has_no_more_rights_than_it_needs() -> None:
    for name, service in services().items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if "profiles" not in service:
            assert service["restart"] == "unless-stopped" and "healthcheck" in service, name
            assert {"cpus", "memory"} <= service["deploy"]["resources"]["limits"].keys(), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is reached from other machines"


def test_each_server_has_its_agent_and_all_are_scraped() -> None:
    config = (FOLDER / "dynamoth.toml").read_text()
    agents = [service["command"][-1] for name, service in services().items() if name.startswith("agent-")]
    assert agents == re.findall(r'id = "(\w+)"', config)
    jobs = load_yaml(FOLDER / "prometheus/prometheus.yml")["scrape_configs"]
    targets = [target for job in jobs for target in job["static_configs"][0]["targets"]]
    listening = [f"{name}:{port}" for name, service in services().items() for port in service.get("expose", [])]
    assert sorted(targets) == sorted(target for target in listening if not target.startswith("redis-"))


def test_prometheus_takes_its_configuration_and_rules() -> None:
    run(program("promtool"), "check", "config", FOLDER / "prometheus/prometheus.yml")
    run(program("promtool"), "check", "rules", "--lint-fatal", FOLDER / "prometheus/alerts.yml")


def test_each_alert_fires_when_it_should_and_not_otherwise() -> None:
    run(program("promtool"), "test", "rules", HERE / "alerts.test.yml")
    cases = [case for test in load_yaml(HERE / "alerts.test.yml")["tests"] for case in test["alert_rule_test"]]
    tested = {(case["alertname"], bool(case["exp_alerts"])) for case in cases}
    assert tested == {(alert["alert"], fires) for alert in ALERTS for fires in (False, True)}


def test_the_dashboard_is_one_that_grafana_lays_out() -> None:
    """Ids are unique, no panel covers another one, and all ask the data source that is provisioned."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    [source] = load_yaml(FOLDER / "grafana/datasource.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    used = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if panel["type"] != "row"}
    used |= {target["datasource"]["uid"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])}
    assert used == {source["uid"]}
    [provider] = load_yaml(FOLDER / "grafana/dashboards.yml")["providers"]
    assert any(f":{provider['options']['path']}/" in mount for mount in services()["grafana"]["volumes"])
    assert len(list(panels())) > 20
