"""Which servers get our credentials: those that our own configuration vouches for, whatever a plan says.

The plan names the servers of a cluster, and it is read from Redis. An attacker who can write it could name a server of
their own, and would receive the password of every client. So credentials (a password, what a credential provider gives,
a client certificate) go only to

- the hosts of the servers that the application, or the configuration of a daemon, names: any port of these hosts,
- and ``trusted_hosts``: host names (``redis7.example.com``), suffixes (``*.redis.example.com``), networks
  (``10.1.0.0/16``), directories of unix sockets (``/run/redis/``), or ``*`` for every host.

No name is looked up for this: a network covers addresses as the plan has them, not names. Where every configured server
has TLS, one without TLS gets nothing. Without credentials there is nothing to protect, and any server is connected to.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dynamoth.errors import ConfigError
from dynamoth_link.urls import ServerAddress

TRUSTED_HOSTS_VARIABLE = "DYNAMOTH_TRUSTED_HOSTS"
"""Hosts that are trusted, too. Daemons and tools read it with the rest of their configuration."""

TRUSTED_HOSTS_MAX = 1000

_LOOPBACK = "localhost"
"""All names and addresses of this machine's loopback count as this one."""

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.\-]*[A-Za-z0-9_])?\.?")

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Trust:
    """The servers that get our credentials. Made by :func:`trust_in`."""

    hosts: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = ()
    networks: tuple[_Network, ...] = ()
    directories: tuple[str, ...] = ()
    everything: bool = False
    #: Whether a server without TLS gets none.
    tls_only: bool = False

    def objection(self, address: ServerAddress) -> str | None:
        """Say why a server gets no credentials, and what to do if it should; None when it gets them."""
        if not self._names(address):
            place = f"host {address.host!r}" if address.path is None else f"socket {address.path!r}"
            return (
                f"its {place} was neither configured nor is it in trusted_hosts; if the server is yours, add it to"
                " trusted_hosts (argument or option of the URL, cluster.trusted_hosts of a daemon,"
                f" {TRUSTED_HOSTS_VARIABLE}); if not, somebody else writes to the stored plan"
            )
        if self.tls_only and not address.tls and address.path is None:
            return "it is named without TLS (redis://), and every server that was configured has TLS (rediss://)"
        return None

    def _names(self, address: ServerAddress) -> bool:
        if self.everything:
            return True
        if address.path is not None:
            return posixpath.dirname(posixpath.normpath(address.path)) in self.directories
        host = _normal(address.host)
        return host in self.hosts or host.endswith(self.suffixes) or self._covers(host)

    def _covers(self, host: str) -> bool:
        try:
            ip = ipaddress.ip_address("127.0.0.1" if host == _LOOPBACK else host)
        except ValueError:
            return False
        return any(ip in network for network in self.networks)


def trust_in(configured: Iterable[ServerAddress], trusted_hosts: Iterable[str] = ()) -> Trust:
    """Return the trust in the hosts of configured servers and in ``trusted_hosts``.

    Raises:
        ConfigError: an item of ``trusted_hosts`` is no host name, suffix, network or directory, or there are too many.

    """
    servers = tuple(configured)
    hosts = {_normal(server.host) for server in servers if server.path is None}
    directories = {posixpath.dirname(posixpath.normpath(server.path)) for server in servers if server.path is not None}
    suffixes: list[str] = []
    networks: list[_Network] = []
    everything = False
    items = list(trusted_hosts)
    if len(items) > TRUSTED_HOSTS_MAX:
        raise ConfigError(f"trusted_hosts has at most {TRUSTED_HOSTS_MAX} items: name a suffix or a network")
    for item in items:
        if item == "*":
            everything = True
        elif item.startswith("/"):
            directories.add(posixpath.normpath(item))
        elif item.startswith("*.") and _HOST_NAME.fullmatch(item[2:]):
            suffixes.append(_normal(item[1:]))
        elif (network := _network(item)) is not None:
            networks.append(network)
        elif _HOST_NAME.fullmatch(item):
            hosts.add(_normal(item))
        else:
            raise _unreadable(item)
    tls_only = bool(servers) and all(server.tls for server in servers)
    return Trust(frozenset(hosts), tuple(suffixes), tuple(networks), tuple(sorted(directories)), everything, tls_only)


def parse_trusted_hosts(text: str) -> tuple[str, ...]:
    """Return the items of a list in text: separated by spaces or commas."""
    return tuple(text.replace(",", " ").split())


def _normal(host: str) -> str:
    """Return one spelling for what is the same host."""
    lower = host.lower().rstrip(".")
    try:
        ip = ipaddress.ip_address(lower)
    except ValueError:
        return lower
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return _LOOPBACK if ip.is_loopback else str(ip)


def _network(item: str) -> _Network | None:
    try:
        return ipaddress.ip_network(item, strict=False)
    except ValueError:
        return None


def _unreadable(item: str) -> ConfigError:
    return ConfigError(
        f"trusted_hosts: {item!r:.100} is no host name, no suffix (*.example.com), no network (10.0.0.0/8) and no"
        " directory of unix sockets (/run/redis/): correct it"
    )
