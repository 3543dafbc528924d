"""What the alert rules and the dashboard say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.compose.stack import FOLDER, load_yaml

ALERTS: list[dict[str, Any]] = load_yaml(FOLDER / "prometheus/alerts.yml")["groups"][0]["rules"]

DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana/dynamoth.json").read_text())


def panels() -> Iterator[tuple[str, str]]:
    """Yield the title of each panel with each of its queries."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
