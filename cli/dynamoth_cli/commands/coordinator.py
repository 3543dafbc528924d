"""``dynamoth coordinator``: moves users between edge brokers, by load."""

from __future__ import annotations

import argparse

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import values_of
from dynamoth.settings.load import LoadedConfig
from dynamoth.settings.sections import HttpSettings, MigrationSettings
from dynamoth_broker.coordinator.relieve import Scheme
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from dynamoth_broker.process.coordinator import CoordinatorConfig, process_name
from dynamoth_broker.process.coordinator import run as run_coordinator
from dynamoth_cli.settings import add_settings, cluster_servers, link_options, run_daemon

CLIENT_NAME = "dynamoth-coordinator"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_settings(parser, "coordinator", ("cluster", "link", "coordinator", "log"))


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""
    return run_daemon(arguments, coordinator_config, run_coordinator)


def coordinator_config(loaded: LoadedConfig) -> CoordinatorConfig:
    """Return the configuration of a coordinator. Raises ConfigError."""
    settings = loaded.config.coordinator
    if settings.forget_s <= settings.suspect_reports * settings.report_s:
        accepted = f"more than {settings.suspect_reports * settings.report_s:g} s (suspect_reports times report_s)"
        raise loaded.fault("coordinator.forget_s", settings.forget_s, accepted)
    try:
        options = CoordinatorOptions(
            **values_of(MigrationSettings, settings),
            scheme=Scheme(settings.scheme),
            lease_s=settings.lease_s,
            forget_s=settings.forget_s,
            process=process_name(),
        )
    except ConfigError as error:  # of values that do not fit together: each has been checked
        raise ConfigError(f"coordinator.{error}") from error
    return CoordinatorConfig(
        **values_of(HttpSettings, settings),
        servers=cluster_servers(loaded),
        options=options,
        link=link_options(loaded, CLIENT_NAME),
    )
