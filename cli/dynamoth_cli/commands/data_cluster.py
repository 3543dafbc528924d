"""``dynamoth data-cluster``: executes standing queries on Spark."""

from __future__ import annotations

import argparse

from dynamoth.settings.declare import values_of
from dynamoth.settings.load import LoadedConfig
from dynamoth.settings.sections import DataClusterSettings
from dynamoth_analytics.cluster.process import DataClusterConfig
from dynamoth_analytics.cluster.process import run as run_data_cluster
from dynamoth_cli.settings import add_settings, cluster_servers, run_daemon
from dynamoth_link.urls import ClusterAddress, parse_server_url


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_settings(parser, "data_cluster", ("cluster", "link", "data_cluster", "log"))


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""
    return run_daemon(arguments, data_cluster_config, run_data_cluster)


def data_cluster_config(loaded: LoadedConfig) -> DataClusterConfig:
    """Return the configuration of a data cluster. Raises ConfigError."""
    servers = tuple(parse_server_url(server.url) for server in cluster_servers(loaded))
    url = ClusterAddress(servers).url()
    return DataClusterConfig(**values_of(DataClusterSettings, loaded.config.data_cluster), cluster_url=url)
