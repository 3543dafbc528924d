"""``dynamoth up``: a whole cluster on this machine, in the foreground, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import sys
import time

from dynamoth.settings.sections import GIGABIT_BYTES_PER_S
from dynamoth_cli.local.beside import add_record
from dynamoth_cli.local.child import interrupted_by_signals
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.numbers import count_up_to
from dynamoth_link.urls import parse_cluster_url

LOOK_INTERVAL_S = 0.2
"""How often we look whether all processes are alive."""

SERVERS_MAX = 64


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--servers",
        type=count_up_to(SERVERS_MAX),
        default=3,
        metavar="M",
        help="number of Redis servers (default %(default)s)",
    )
    parser.add_argument(
        "--port-base",
        type=count_up_to(65535 - SERVERS_MAX),
        metavar="P",
        help="port of the first server, the others follow (default: free ports)",
    )
    parser.add_argument(
        "--outgoing-bytes-per-s-max",
        type=int,
        default=GIGABIT_BYTES_PER_S,
        metavar="N",
        help="capacity of each server, which is load ratio 1 (default %(default)s)",
    )
    parser.add_argument(
        "--servers-max",
        type=count_up_to(SERVERS_MAX),
        metavar="N",
        help="let the balancer start further servers under load, and end them later: up to N servers in all",
    )
    parser.add_argument("--json", action="store_true", help="print the URLs of the cluster and its servers as JSON")
    add_record(parser)
    parser.add_argument("--verbose", action="store_true", help="show the logs of agents and balancer")


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM. Raises ChildEnded or RedisServerFailed when a process has ended by itself."""
    cluster = LocalCluster(
        arguments.servers,
        port_base=arguments.port_base,
        outgoing_bytes_per_s_max=arguments.outgoing_bytes_per_s_max,
        record=arguments.record,
        servers_max=arguments.servers_max,
        on_line=_show if arguments.verbose else None,
    )
    with interrupted_by_signals():
        try:
            with cluster:
                sys.stdout.write(_described(cluster) if arguments.json else f"{cluster.url}\n")
                sys.stdout.flush()
                sys.stderr.write("dynamoth: ready; Ctrl-C stops everything\n")
                while True:
                    cluster.check()
                    time.sleep(LOOK_INTERVAL_S)
        except KeyboardInterrupt:
            sys.stderr.write("dynamoth: stopped\n")
            return 0


def _described(cluster: LocalCluster) -> str:
    """Return the cluster as one line of JSON."""
    servers = parse_cluster_url(cluster.url).servers
    urls = dict(zip(cluster.server_ids, (server.url() for server in servers), strict=True))
    return json.dumps({"url": cluster.url, "servers": urls}) + "\n"


def _show(name: str, line: str) -> None:
    sys.stderr.write(f"[{name}] {line}\n")
