"""``dynamoth balancer``: the balancer of a cluster."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

from dynamoth.settings.sections import BalancerSettings, LoadedConfig
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
    """Return what the balancer is told. Raises ConfigError."""
    settings = loaded.config.balancer
    draining = frozenset(server.id for server in loaded.config.cluster.servers if server.draining)
    return BalancerConfig(
        servers=cluster_servers(loaded),
        options=replace(balancer_options(settings), draining=draining, compatibility=compatibility_rules(loaded)),
        http_host=settings.http_host,
        http_port=settings.http_port,
        link=link_options(loaded, CLIENT_NAME),
        metrics_file=Path(settings.metrics_file) if settings.metrics_file else None,
    )


def balancer_options(settings: BalancerSettings) -> BalancerOptions:
    """Return the options that have the names of settings; the others keep their defaults. Raises ConfigError."""
    given = {option.name for option in fields(BalancerOptions)} & {setting.name for setting in fields(settings)}
    return BalancerOptions(**{name: getattr(settings, name) for name in given})
