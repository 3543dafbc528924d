"""``dynamoth record``: records what happens in a cluster."""

from __future__ import annotations

import argparse
from dataclasses import replace

from dynamoth.plan.plan import Server
from dynamoth.settings.declare import values_of
from dynamoth.settings.load import LoadedConfig
from dynamoth.settings.sections import RecorderSettings
from dynamoth_cli.admin import read_header
from dynamoth_cli.cluster_access import URL_HELP, access_of
from dynamoth_cli.settings import add_settings, run_daemon
from dynamoth_link.urls import InvalidUrl, parse_server_url
from dynamoth_recorder.process.runtime import RecorderConfig
from dynamoth_recorder.process.runtime import run as run_recorder

CLIENT_NAME = "dynamoth-recorder"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--url", metavar="URL", help=URL_HELP)
    add_settings(parser, "recorder", ("cluster", "link", "recorder", "log"))


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""
    return run_daemon(arguments, lambda loaded: recorder_config(loaded, arguments), run_recorder)


def recorder_config(loaded: LoadedConfig, arguments: argparse.Namespace) -> RecorderConfig:
    """Return the configuration of a recorder. Raises ConfigError."""
    access = access_of(arguments)
    cluster, link = access.cluster, replace(access.link, client_name=CLIENT_NAME)

    async def find_servers() -> tuple[Server, ...]:
        plan = await read_header(cluster, link)
        return tuple(Server(server.id, with_credentials(server.url)) for server in plan.servers.values())

    def with_credentials(url: str) -> str:
        try:
            return cluster.merge(parse_server_url(url)).url()
        except InvalidUrl:  # from a damaged plan: the link says so
            return url

    settings = values_of(RecorderSettings, loaded.config.recorder)
    return RecorderConfig(**settings, find_servers=find_servers, link=link)
