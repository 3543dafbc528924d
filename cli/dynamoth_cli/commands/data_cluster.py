"""``dynamoth data-cluster``: executes standing queries on Spark."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import values_of
from dynamoth.settings.load import LoadedConfig
from dynamoth.settings.sections import DataClusterSettings
from dynamoth_analytics.cluster.signals import noted_signals
from dynamoth_cli.settings import add_settings, cluster_url, link_options, redis_py_tls, run_daemon
from dynamoth_link.urls import InvalidUrl, parse_log_servers

if TYPE_CHECKING:  # it loads PySpark, which takes long: signals are noted before that
    from dynamoth_analytics.cluster.process import DataClusterConfig

CLIENT_NAME = "dynamoth-data-cluster"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_settings(parser, "data_cluster", ("cluster", "link", "data_cluster", "log"))


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""
    with noted_signals():
        from dynamoth_analytics.cluster.process import run as run_data_cluster

        return run_daemon(arguments, data_cluster_config, run_data_cluster)


def data_cluster_config(loaded: LoadedConfig) -> DataClusterConfig:
    """Return the configuration of a data cluster. Raises ConfigError."""
    from dynamoth_analytics.cluster.process import DataClusterConfig
    from dynamoth_analytics.cluster.servers import LogServers

    settings = loaded.config.data_cluster
    try:
        logs = parse_log_servers(settings.logs)
    except InvalidUrl as error:
        raise ConfigError(f"data_cluster.logs: {error} (from {loaded.places['data_cluster.logs']})") from error
    if not logs:
        raise ConfigError("data_cluster.logs: name the log servers of the brokers, as l1=redis://HOST:PORT")
    if not settings.folder:
        raise ConfigError("data_cluster.folder: name the folder in which archive, snapshots and checkpoints are kept")
    link = link_options(loaded, CLIENT_NAME, tuple(logs.values()))
    urls = ((id_, each.with_credentials(link.username, link.password).url()) for id_, each in logs.items())
    return DataClusterConfig(
        **values_of(DataClusterSettings, settings),
        cluster_url=cluster_url(loaded, link),
        servers=LogServers(tuple(urls), settings.log_durable, tuple(redis_py_tls(loaded).items())),
        link=link,
    )
