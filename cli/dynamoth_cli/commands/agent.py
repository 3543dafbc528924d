"""``dynamoth agent``: the agent of one Redis server."""

from __future__ import annotations

import argparse
from dataclasses import replace

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import values_of
from dynamoth.settings.load import LoadedConfig
from dynamoth.settings.sections import AgentSettings
from dynamoth_agent.process import standby
from dynamoth_agent.process.runtime import AgentConfig
from dynamoth_agent.process.runtime import run as run_agent
from dynamoth_cli.settings import add_settings, cluster_servers, link_options, run_daemon
from dynamoth_link.urls import InvalidUrl, parse_server_url


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_settings(parser, "agent", ("cluster", "link", "agent", "log"))


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""
    return run_daemon(arguments, _config, _run)


def _config(loaded: LoadedConfig) -> AgentConfig:
    return standby_config(loaded) if loaded.config.agent.standby else agent_config(loaded)


def _run(config: AgentConfig) -> int:
    if not config.standby:
        return run_agent(config)
    return standby.run(config.standby, lambda id_: replace(config, server=id_))


def standby_config(loaded: LoadedConfig) -> AgentConfig:
    """Return the configuration of the agent of a standby server, which has no id yet. Raises ConfigError."""
    agent, cluster = loaded.config.agent, loaded.config.cluster
    if agent.server:
        raise loaded.fault("agent.server", agent.server, "nothing, as agent.standby is given,")
    try:
        address = parse_server_url(agent.standby)
    except InvalidUrl as error:
        raise ConfigError(f"agent.standby: {error} (from {loaded.places['agent.standby']})") from error
    return AgentConfig(
        **values_of(AgentSettings, agent),
        url=agent.standby,
        outgoing_bytes_per_s_max=cluster.outgoing_bytes_per_s_max,
        link=link_options(loaded, also=(address,)),
    )


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
