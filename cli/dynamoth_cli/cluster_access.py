"""The access of a command to a cluster: which servers, and the credentials and TLS of its connections.

Commands of operators take the settings of the daemons (section ``[link]``, and the servers of ``[cluster]``) from the
same file and environment variables. ``--url`` names the cluster where there is no such file. A password comes from the
environment, the file, ``--password-file`` or ``DYNAMOTH_URL``: it need not be on a command line, where every user of
the machine can read it.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dynamoth.errors import ConfigError
from dynamoth_cli.settings import add_section, cluster_servers, link_options, load_settings, trust_of
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import ClusterAddress, parse_cluster_url, parse_server_url

URL_VARIABLE = "DYNAMOTH_URL"

CLIENT_NAME = "dynamoth-cli"

LINK_SECTION = "link"
"""Its settings have flags without the name of the section here: ``--tls-ca-file``."""


@dataclass(frozen=True, slots=True)
class Access:
    """The servers from which a command finds the cluster, and the options of its connections."""

    cluster: ClusterAddress
    link: LinkOptions = field(default_factory=LinkOptions)


URL_HELP = (
    f"the cluster: dynamoth://[user@]host:port[,host:port...] [{URL_VARIABLE}];"
    " default: the servers of the configuration"
)


def add_access(parser: ArgumentParser) -> None:
    """Add ``--url``, ``--config``, and a flag for each setting of a connection."""
    parser.add_argument("--url", metavar="URL", help=URL_HELP)
    add_section(parser, LINK_SECTION, LINK_SECTION)


def access_of(arguments: Namespace, environment: Mapping[str, str] = os.environ) -> Access:
    """Return how to reach the cluster that the command is about. Raises ConfigError.

    The cluster comes from the first of: ``--url``, the servers of ``--config``, ``DYNAMOTH_URL``, the servers of the
    environment or of the file that ``DYNAMOTH_CONFIG`` names.
    """
    loaded = load_settings(arguments, environment)
    link = link_options(loaded, CLIENT_NAME)
    url: str | None = arguments.url
    if url is None and not (arguments.config and loaded.config.cluster.servers):
        url = environment.get(URL_VARIABLE)
    if url:
        cluster = _with_password(parse_cluster_url(url), link.password)
        return Access(cluster, replace(link, trust=trust_of(loaded, *cluster.servers)))
    if not loaded.config.cluster.servers:
        raise ConfigError(
            f"which cluster? Give --url dynamoth://host:port,host:port or set {URL_VARIABLE}, or give --config with"
            " the file of the daemons"
        )
    return Access(ClusterAddress(tuple(parse_server_url(server.url) for server in cluster_servers(loaded))), link)


def _with_password(cluster: ClusterAddress, password: str | None) -> ClusterAddress:
    """Return a cluster whose URL names a user, and no password, with the password of the settings."""
    if cluster.first.username is None or cluster.first.password is not None:
        return cluster
    return replace(cluster, servers=tuple(replace(server, password=password) for server in cluster.servers))
