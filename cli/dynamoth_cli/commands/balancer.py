"""``dynamoth balancer``: the balancer of a cluster."""

from __future__ import annotations

import argparse

from dynamoth.settings.declare import values_of
from dynamoth.settings.load import LoadedConfig
from dynamoth.settings.sections import BalancerProcessSettings, PlanningSettings
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.process.runtime import BalancerConfig
from dynamoth_balancer.process.runtime import run as run_balancer
from dynamoth_cli.settings import (
    add_settings,
    answer_questions,
    cluster_servers,
    compatibility_rules,
    link_options,
    load_settings,
)
from dynamoth_daemon.logs import configure_logging

CLIENT_NAME = "dynamoth-balancer"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_settings(parser, "balancer", ("cluster", "link", "balancer", "log"))


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""
    loaded = load_settings(arguments)
    config = balancer_config(loaded)
    if answer_questions(arguments, loaded):
        return 0
    configure_logging(loaded.config.log.level, loaded.config.log.format)
    return run_balancer(config)


def balancer_config(loaded: LoadedConfig) -> BalancerConfig:
    """Return the configuration of a balancer. Raises ConfigError."""
    settings = loaded.config.balancer
    options = BalancerOptions(
        **values_of(PlanningSettings, settings),
        draining=frozenset(server.id for server in loaded.config.cluster.servers if server.draining),
        compatibility=compatibility_rules(loaded),
    )
    return BalancerConfig(
        **values_of(BalancerProcessSettings, settings),
        servers=cluster_servers(loaded),
        options=options,
        link=link_options(loaded, CLIENT_NAME),
    )
