"""``dynamoth agent``: the agent of one Redis server."""

from __future__ import annotations

import argparse

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import values_of
from dynamoth.settings.load import LoadedConfig
from dynamoth.settings.sections import AgentSettings
from dynamoth_agent.process.runtime import AgentConfig
from dynamoth_agent.process.runtime import run as run_agent
from dynamoth_cli.settings import add_settings, cluster_servers, link_options, run_daemon


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_settings(parser, "agent", ("cluster", "link", "agent", "log"))


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""
    return run_daemon(arguments, agent_config, run_agent)


def agent_config(loaded: LoadedConfig) -> AgentConfig:
    """Return the configuration of an agent. Raises ConfigError."""
    agent = loaded.config.agent
    servers = {server.id: server for server in cluster_servers(loaded)}
    if not agent.server:
        raise ConfigError(
            f"agent.server: which server is this the agent of? Give --server, one of {', '.join(servers)}"
        )
    own = next(server for server in loaded.config.cluster.servers if server.id == agent.server)
    return AgentConfig(
        **values_of(AgentSettings, agent),
        url=own.url,
        outgoing_bytes_per_s_max=own.outgoing_bytes_per_s_max,
        link=link_options(loaded),  # the agent gives its connection a name itself
    )
