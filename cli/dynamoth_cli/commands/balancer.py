"""``dynamoth balancer``: the balancer of a cluster."""

from __future__ import annotations

import argparse

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import values_of
from dynamoth.settings.load import LoadedConfig
from dynamoth.settings.sections import HttpSettings, PlanningSettings
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.process.runtime import BalancerConfig
from dynamoth_balancer.process.runtime import run as run_balancer
from dynamoth_cli.local.beside import add_record, recorder_beside
from dynamoth_cli.provisioning import fleet_options, provisioner_of
from dynamoth_cli.settings import (
    add_settings,
    cluster_servers,
    compatibility_rules,
    config_file_of,
    link_options,
    run_daemon,
)

CLIENT_NAME = "dynamoth-balancer"

TAKE_OVER = (
    "lead though half of the servers or more are lost for good: count only the servers that can be reached. Make sure"
    " that no other balancer can reach the others: two balancers that lead at the same time, each at its own servers,"
    " give different meanings to one epoch of a channel, and messages are lost without a gap event. Refused where more"
    " than half of the servers can be reached"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--take-over", action="store_true", help=TAKE_OVER)
    add_record(parser)
    add_settings(parser, "balancer", ("cluster", "link", "balancer", "fleet", "log"))


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""

    def daemon(config: BalancerConfig) -> int:
        with recorder_beside(arguments):
            return run_balancer(config)

    def make_config(loaded: LoadedConfig) -> BalancerConfig:
        return balancer_config(loaded, config_file_of(arguments), take_over=arguments.take_over)

    return run_daemon(arguments, make_config, daemon)


def balancer_config(loaded: LoadedConfig, config_file: str | None = None, *, take_over: bool = False) -> BalancerConfig:
    """Return the configuration of a balancer; ``config_file`` is the TOML file, if any. Raises ConfigError."""
    settings = loaded.config.balancer
    rules = compatibility_rules(loaded)
    try:
        options = BalancerOptions(
            **values_of(PlanningSettings, settings),
            draining=frozenset(server.id for server in loaded.config.cluster.servers if server.draining),
            compatibility=rules,
            take_over=take_over,
        )
    except ConfigError as error:  # of lease_s: all others have been checked
        place = loaded.places.get("balancer.lease_s", "the default")
        raise ConfigError(f"balancer.{error} (from {place})") from error
    return BalancerConfig(
        **values_of(HttpSettings, settings),
        servers=cluster_servers(loaded),
        options=options,
        fleet=fleet_options(loaded),
        provisioner=provisioner_of(loaded, config_file),
        link=link_options(loaded, CLIENT_NAME),
    )
