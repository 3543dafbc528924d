"""``dynamoth node``: the agent of one Redis server."""

from __future__ import annotations

import argparse

from dynamoth.config import LoadedConfig
from dynamoth.errors import ConfigError
from dynamoth.logs import configure_logging
from dynamoth_cli.settings import add_settings, answer_questions, cluster_servers, link_options, load_settings
from dynamoth_node.runtime import NodeConfig
from dynamoth_node.runtime import run as run_agent


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_settings(parser, "node", ("cluster", "link", "node", "log"))


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""
    loaded = load_settings(arguments)
    config = node_config(loaded)
    if answer_questions(arguments, loaded):
        return 0
    configure_logging(loaded.config.log.level, loaded.config.log.format)
    return run_agent(config)


def node_config(loaded: LoadedConfig) -> NodeConfig:
    """Return what the agent is told. Raises ConfigError."""
    node = loaded.config.node
    servers = {server.id: server for server in cluster_servers(loaded)}
    if not node.server:
        raise ConfigError(f"node.server: which server is this the agent of? Give --server, one of {', '.join(servers)}")
    own = next(server for server in loaded.config.cluster.servers if server.id == node.server)
    return NodeConfig(
        server=own.id,
        url=own.url,
        outgoing_bytes_per_s_max=own.outgoing_bytes_per_s_max,
        report_interval_s=node.report_interval_s,
        channels_per_report_max=node.channels_per_report_max,
        http_host=node.http_host,
        http_port=node.http_port,
        link=link_options(loaded),  # the agent gives its connection a name itself
    )
