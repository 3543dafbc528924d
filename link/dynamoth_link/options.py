"""The options of a link: credentials, TLS, timeouts and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamoth.errors import ConfigError
from dynamoth.settings.link_defaults import CONNECT_TIMEOUT_S, PING_INTERVAL_S, PING_TIMEOUT_S
from dynamoth_link.backoff import Backoff
from dynamoth_link.credentials import Credentials
from dynamoth_link.spares import Spares
from dynamoth_link.tls import TlsOptions
from dynamoth_link.trust import Trust

WRITE_BUFFER_BYTES_MAX = 256 * 1024 * 1024
"""Redis drops a client whose unsent output passes a limit; this is ours, for a server that does not read.

Two seconds of a saturated gigabit link: what is older than that is better lost loudly than sent late.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """The settings of a link. Raises ``ConfigError`` when one is out of range.

    ``username``, ``password``: used where the server's URL has no credentials of its own.
    ``credentials``: used where there are none of these, and asked for at each connection. The time that takes
    does not count as connecting.
    ``trust``: which servers get any of these, or our certificate; no connection is made to others. None: all do. A
    server is connected to in any case if there are no credentials to give.
    ``client_name``: the name shown by ``CLIENT LIST``: visible ASCII without spaces; None for none.
    ``library_name``, ``library_version``: shown there as well, by Redis 7.2 and later; None: not sent.
    ``keepalive``: options of TCP (``{socket.TCP_KEEPIDLE: 30}``) for sockets that are kept alive; None for others.
    ``connect_timeout_s``: bound of one attempt, from the first packet until RESP3 is agreed on; more than 0.
    ``ping_interval_s``: after this much silence a PING is sent; 0 means never, so that a connection that was cut
    silently is never noticed.
    ``ping_timeout_s``: after this much more silence the link is down, unless the server's side has acknowledged bytes
    that were sent before the PING (a large message on a slow network); more than 0. Together these two are the time in
    which a silent cut, or a server that hangs, is noticed: 4.95 s by default. A command that blocks the server for
    less than ``ping_timeout_s`` (a script of 3 s) is never taken for that. One that blocks it for longer may be: the
    link goes down, is made again, and subscribers get gap events.
    What it costs: one PING per ``ping_interval_s`` and *idle* link, as any byte from the server puts it off. By default
    that is 0.67 PINGs per second, about 150 bytes per second with the headers of TCP and IP. Each takes 4 us of Redis
    and 14 us of this process, so 1,000 idle links cost a server 0.3% of a core.
    ``backoff_s_min``, ``backoff_s_max``: bounds of the wait between two attempts. It doubles from one failed
    attempt to the next, and each is shortened by up to a half at random, so that clients do not come back all
    at once. A connection that held for ``backoff_s_max`` ends the series.
    ``backoff``: decides about that wait itself; each link has a copy. None for the above.
    ``spares``: open connections that are taken before another one is made. None: there are none.
    ``close_timeout_s``: how long ``close`` lets what was sent go out before it cuts the connection.
    ``write_buffer_bytes_max``: with more than this unsent at the end of a turn of the event loop the link
    goes down (and comes back): the server does not keep up. 0 means no bound. A command may be larger, as messages of
    512 MB are: if less than this was unsent before it, another ``write_buffer_bytes_max`` may be unsent behind it.
    """

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    credentials: Credentials | None = None
    trust: Trust | None = None
    client_name: str | None = None
    library_name: str | None = None
    library_version: str | None = None
    keepalive: Mapping[int, int | bytes] | None = None
    tls: TlsOptions = field(default_factory=TlsOptions)
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    ping_interval_s: float = PING_INTERVAL_S
    ping_timeout_s: float = PING_TIMEOUT_S
    backoff_s_min: float = 0.05
    backoff_s_max: float = 1.0
    backoff: Backoff | None = None
    spares: Spares | None = field(default=None, repr=False, compare=False)
    close_timeout_s: float = 1.0
    write_buffer_bytes_max: int = WRITE_BUFFER_BYTES_MAX

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("connect_timeout_s", "ping_timeout_s", "backoff_s_min", "close_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}")
        for name in ("ping_interval_s", "write_buffer_bytes_max"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 (off) or more, not {getattr(self, name)}")
        if self.backoff_s_max < self.backoff_s_min:
            raise ConfigError(f"backoff_s_max must be at least backoff_s_min ({self.backoff_s_min})")
        client = self.client_name
        if client is not None and not (client and all("!" <= character <= "~" for character in client)):
            raise ConfigError(f"client_name must be visible ASCII without spaces, not {client!r}")

    @property
    def has_credentials(self) -> bool:
        """Whether a server would get something by which to log in elsewhere as us, or that says who we are."""
        named = self.username is not None or self.password is not None or self.credentials is not None
        return named or self.tls.cert_file is not None or self.tls.has_certificate
