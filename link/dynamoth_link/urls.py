"""Parses and formats the URLs of Redis servers and of clusters.

===============================================  ===============================================
``redis://[user[:password]@]host[:port][/db]``   one server over TCP
``rediss://...``                                 the same over TLS
``unix://[user[:password]@]/path[?db=n]``        one server over a unix socket
``dynamoth://[user[:password]@]host[:port],host[:port]...[/db][?name=value&...]``
                                                 some servers of a cluster, to find the others from
``dynamoths://...``                              the same over TLS
===============================================  ===============================================

User and password are percent-encoded, IPv6 addresses stand in brackets, and the port is 6379 where it is not
given. No error text and no ``repr`` made here shows a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, quote, unquote, urlencode

from dynamoth.errors import ConfigError
from dynamoth.names import SERVER_ID, SERVER_ID_WORDS

DEFAULT_PORT = 6379
"""The port that every Redis server listens at by default."""

_SERVER_SCHEMES = ("redis", "rediss", "unix")
_CLUSTER_SCHEMES = ("dynamoth", "dynamoths")


class InvalidUrl(ConfigError, ValueError):
    """Raised when a URL names no server or cluster; the text says what is wrong and what it should be."""

    code = "url"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where one Redis server is, and as whom to log in.

    ``path`` is the unix socket, or None for TCP; with a path, ``host`` is empty, ``port`` 0 and ``tls``
    False. ``username`` and ``password`` are None where the URL has none. ``db`` is the number of the
    database, from 0.
    """

    host: str = "localhost"
    port: int = DEFAULT_PORT
    path: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    db: int = 0

    @property
    def has_credentials(self) -> bool:
        """Tell whether the address itself says as whom to log in."""
        return self.username is not None or self.password is not None

    def with_credentials(self, username: str | None, password: str | None) -> ServerAddress:
        """Return the address with these credentials, or unchanged when it has its own."""
        if self.has_credentials:
            return self
        return replace(self, username=username, password=password)

    def url(self) -> str:
        """Return the URL, password included: ``parse_server_url`` of it is equal to this address."""
        return self._format(_format_credentials(self.username, self.password))

    def redacted(self) -> str:
        """Return the URL for logs and error texts: with ``***`` where the password is."""
        return self._format(_format_credentials(self.username, "***" if self.password is not None else None))

    def _format(self, credentials: str) -> str:
        if self.path is not None:
            db = f"?db={self.db}" if self.db else ""
            return f"unix://{credentials}{quote(self.path)}{db}"
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}://{credentials}{_format_host(self.host, self.port)}{_format_db(self.db)}"


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Some servers of a cluster, from which a client finds the others, and what the URL says besides.

    ``servers`` has at least one address, all of them with the credentials, ``tls`` and ``db`` of the URL.
    ``options`` are the names and values after the question mark; what they mean is for the reader to say.
    """

    servers: tuple[ServerAddress, ...]
    options: tuple[tuple[str, str], ...] = ()

    @property
    def first(self) -> ServerAddress:
        """The first address: it carries what all of them share (credentials, ``tls``, ``db``)."""
        return self.servers[0]

    def merge(self, server: ServerAddress) -> ServerAddress:
        """Return the address, with the credentials of this cluster where it has none of its own."""
        return server.with_credentials(self.first.username, self.first.password)

    def url(self) -> str:
        """Return the URL, password included: ``parse_cluster_url`` of it is equal to this address."""
        return self._format(_format_credentials(self.first.username, self.first.password))

    def redacted(self) -> str:
        """Return the URL for logs and error texts: with ``***`` where the password is."""
        password = "***" if self.first.password is not None else None
        return self._format(_format_credentials(self.first.username, password))

    def _format(self, credentials: str) -> str:
        scheme = "dynamoths" if self.first.tls else "dynamoth"
        hosts = ",".join(_format_host(server.host, server.port) for server in self.servers)
        options = f"?{urlencode(self.options)}" if self.options else ""
        return f"{scheme}://{credentials}{hosts}{_format_db(self.first.db)}{options}"


def parse_server_url(url: str) -> ServerAddress:
    """Parse the URL of one server. Raises ``InvalidUrl``."""
    parts = _split(url, _SERVER_SCHEMES)
    if parts.scheme == "unix":
        return _parse_unix(parts)
    _parse_options(parts, known=())
    host, port = _parse_host(parts, parts.hosts)
    db = _parse_db(parts, parts.path[1:])
    return ServerAddress(host, port, None, parts.username, parts.password, parts.scheme == "rediss", db)


def parse_log_servers(text: str) -> dict[str, ServerAddress]:
    """Parse the list of the log servers, ``ID=URL`` separated by spaces. Raises ``InvalidUrl``."""
    found: dict[str, ServerAddress] = {}
    for word in text.split():
        id_, _, url = word.partition("=")
        if not SERVER_ID.fullmatch(id_) or not url or id_ in found:
            raise _fault(word, f"ID=URL expected, each ID once and {SERVER_ID_WORDS}")
        found[id_] = parse_server_url(url)
    return found


def parse_cluster_url(url: str) -> ClusterAddress:
    """Parse the URL of a cluster, or of one server to find it from. Raises ``InvalidUrl``."""
    if url.partition("://")[0] in _SERVER_SCHEMES:
        return ClusterAddress((parse_server_url(url),))
    parts = _split(url, _CLUSTER_SCHEMES)
    db = _parse_db(parts, parts.path[1:])
    tls = parts.scheme == "dynamoths"
    hosts = [_parse_host(parts, text) for text in parts.hosts.split(",")]
    servers = tuple(ServerAddress(host, port, None, parts.username, parts.password, tls, db) for host, port in hosts)
    return ClusterAddress(servers, _parse_options(parts, known=None))


def redact(url: str) -> str:
    """Return a URL, even a broken one, with what stands before its last ``@`` hidden."""
    return re.sub(r"^([a-z]+://)?.*@", r"\1***@", url, flags=re.DOTALL)


@dataclass(slots=True)
class _Parts:
    """A URL cut into pieces; ``hosts`` and ``path`` are still as written."""

    text: str
    scheme: str
    username: str | None
    password: str | None = field(repr=False)
    hosts: str
    path: str
    query: str

    def fault(self, what: str) -> InvalidUrl:
        return _fault(self.text, what)


def _fault(url: str, what: str) -> InvalidUrl:
    return InvalidUrl(f"{redact(url)!r}: {what}")


def _split(url: str, schemes: tuple[str, ...]) -> _Parts:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in schemes:
        raise _fault(url, f"the URL must begin with one of {', '.join(f'{name}://' for name in schemes)}")
    if "#" in rest:
        raise _fault(url, "a '#' has no meaning here: write it as %23 if it belongs to the password")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    if "@" in path and "@" not in authority and scheme != "unix":
        raise _fault(url, "there is a '/' before the '@': write it as %2F if it belongs to the password")
    credentials, at, hosts = authority.rpartition("@")
    user, colon, password = credentials.partition(":")
    return _Parts(
        text=url,
        scheme=scheme,
        username=unquote(user) if at and user else None,
        password=unquote(password) if colon else None,
        hosts=hosts,
        path=slash + path,
        query=query,
    )


def _parse_unix(parts: _Parts) -> ServerAddress:
    if parts.hosts:
        raise parts.fault("a unix socket needs an absolute path: unix:///path/to/socket, with three slashes")
    if parts.path in ("", "/"):
        raise parts.fault("the path of the socket is missing: unix:///path/to/socket")
    options = dict(_parse_options(parts, known=("db",)))
    db = _parse_db(parts, options.get("db", ""))
    return ServerAddress("", 0, unquote(parts.path), parts.username, parts.password, False, db)


def _parse_host(parts: _Parts, text: str) -> tuple[str, int]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise parts.fault(f"{text!r} is no IPv6 address with a port: write [address]:port")
        port = rest[1:]
    else:
        host, _, port = text.partition(":")
        if ":" in port:
            raise parts.fault(f"{text!r} has too many colons: write an IPv6 address as [address]:port")
    if not host:
        raise parts.fault("a host name is missing: write host:port")
    if re.search(r"[\s,@\[\]]", host):
        raise parts.fault(f"{host!r} is no host name: write host:port")
    if not port:
        return host, DEFAULT_PORT
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise parts.fault(f"{port!r} is no port: write a number from 1 to 65535")
    return host, int(port)


def _parse_db(parts: _Parts, text: str) -> int:
    if not text:
        return 0
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise parts.fault(f"{text!r} is no database: write a number, usually 0 to 15")
    return int(text)


def _parse_options(parts: _Parts, known: tuple[str, ...] | None) -> tuple[tuple[str, str], ...]:
    """Parse what follows the question mark. ``known`` limits the names; None lets any pass."""
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        raise parts.fault("what follows '?' must be name=value, joined by '&'") from error
    options = dict(pairs)
    if len(options) != len(pairs):
        raise parts.fault("an option stands there twice: keep one of them")
    for name in options:
        if known is not None and name not in known:
            raise parts.fault(f"the option {name!r} is not known here (known: {', '.join(known) or 'none'}): remove it")
    return tuple(pairs)


def _format_credentials(username: str | None, password: str | None) -> str:
    if username is None and password is None:
        return ""
    secret = "" if password is None else ":" + (password if password == "***" else quote(password, safe=""))
    return f"{quote(username or '', safe='')}{secret}@"


def _format_host(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _format_db(db: int) -> str:
    return f"/{db}" if db else ""
