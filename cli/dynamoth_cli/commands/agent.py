"""``dynamoth agent``: the agent of one Redis server."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace

from dynamoth.errors import ClusterUnavailable, ConfigError
from dynamoth.settings.declare import values_of
from dynamoth.settings.load import LoadedConfig
from dynamoth.settings.sections import AgentSettings
from dynamoth_agent.process import standby
from dynamoth_agent.process.runtime import AgentConfig
from dynamoth_agent.process.runtime import run as run_agent
from dynamoth_cli.admin import read_header
from dynamoth_cli.settings import add_settings, cluster_servers, link_options, run_daemon
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import ClusterAddress, InvalidUrl, parse_server_url


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
    """Return the configuration of an agent.

    A server that was added to the plan need not be in the file: its URL is read from the plan then.

    Raises:
        ConfigError: something cannot be used, or neither the file nor the plan has the server.
        ClusterUnavailable: the plan has to be read, and cannot be.

    """
    agent, cluster = loaded.config.agent, loaded.config.cluster
    ids = ", ".join(server.id for server in cluster_servers(loaded))
    if not agent.server:
        raise ConfigError(f"agent.server: which server is this the agent of? Give --server, one of {ids}")
    link = link_options(loaded)  # the agent gives its connection a name itself
    own = next((server for server in cluster.servers if server.id == agent.server), None)
    if own is not None:
        url, limit = own.url, own.outgoing_bytes_per_s_max
    else:
        url, limit = _url_in_plan(loaded, ids, link), cluster.outgoing_bytes_per_s_max
    return AgentConfig(**values_of(AgentSettings, agent), url=url, outgoing_bytes_per_s_max=limit, link=link)


def _url_in_plan(loaded: LoadedConfig, ids: str, link: LinkOptions) -> str:
    """Return the URL that the plan has for our server, which the file does not have."""
    id_ = loaded.config.agent.server
    servers = tuple(parse_server_url(server.url) for server in cluster_servers(loaded))
    try:
        plan = asyncio.run(read_header(ClusterAddress(servers), link))
    except ClusterUnavailable as error:
        raise ClusterUnavailable(
            f"agent.server: {id_!r} is none of the servers of the configuration ({ids}), and whether the plan has it is"
            f" not known: {error}"
        ) from error
    if id_ not in plan.servers:
        known = ", ".join(plan.servers)
        accepted = f"the id of a server of the configuration ({ids}), or of the plan ({known}),"
        raise loaded.fault("agent.server", id_, accepted)
    return plan.servers[id_].url
