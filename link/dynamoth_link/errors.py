"""Errors of a connection to a Redis server: whose fault it is, and what to do about it.

Everything that the operating system, TLS, hiredis or a Redis server can say against a connection is
translated here, once, into one of the types below. Every text names the cause and the cure, and never holds a
password.
"""

from __future__ import annotations

import errno
import socket
import ssl

from dynamoth.errors import DynamothError
from dynamoth_link.urls import ServerAddress


class LinkError(DynamothError):
    """Base of all errors of a connection to one Redis server."""

    code = "link"
    retryable = True


class ServerUnreachable(LinkError):
    """Raised when no connection to the server can be made, or when it was lost."""

    code = "unreachable"


class AuthenticationFailed(LinkError):
    """Raised when the server refuses our credentials, or when the user may not do what is needed."""

    code = "authentication"
    retryable = False


class CredentialsUnavailable(LinkError):
    """Raised when the credential provider failed; it is asked again at the next attempt."""

    code = "credentials"


class ServerUntrusted(LinkError):
    """Raised when a plan names a server that our own configuration does not vouch for: it would get our credentials."""

    code = "untrusted"
    retryable = False


class TlsFailed(LinkError):
    """Raised when TLS cannot be agreed on: a certificate that is not trusted, a port without TLS."""

    code = "tls"
    retryable = False


class ServerTooOld(LinkError):
    """Raised when the server does not speak RESP3, or is older than Redis 6.2."""

    code = "too-old"
    retryable = False


class ServerLoading(LinkError):
    """Raised when the server is still loading its data set."""

    code = "loading"


class ProtocolViolation(LinkError):
    """Raised when the bytes of the server break the Redis protocol."""

    code = "protocol"
    retryable = False


class MachineCrashed(DynamothError):
    """Never raised: handed to ``on_crash`` when a machine raised, with that exception as its cause."""

    code = "crashed"


def untrusted(address: ServerAddress, objection: str) -> LinkError:
    """Return the error for a server that must not get our credentials."""
    return ServerUntrusted(f"{address.redacted()}: not connected, as it would get our credentials: {objection}")


def unusable_tls(address: ServerAddress, error: Exception) -> LinkError:
    """Return the error for TLS files that cannot be loaded."""
    return TlsFailed(f"{address.redacted()}: the TLS files cannot be loaded ({error}): check the paths and the key")


def unusable_keepalive(address: ServerAddress, error: Exception) -> LinkError:
    """Return the error for a socket that does not take the options of keepalive."""
    return LinkError(
        f"{address.redacted()}: the keepalive options cannot be set ({error}): give numbers of TCP options that this"
        " system has (socket.TCP_KEEPIDLE ...), with values that it takes"
    )


def no_credentials(address: ServerAddress, what: str) -> LinkError:
    """Return the error for a credential provider that failed. ``what`` says how."""
    return CredentialsUnavailable(
        f"{address.redacted()}: the credential provider {what}: check it and what it asks; it is asked again at the"
        " next attempt"
    )


def diagnose_exception(address: ServerAddress, error: Exception) -> LinkError:
    """Translate what the event loop raised while connecting, or gave as the reason of a lost connection."""
    name = address.redacted()
    if isinstance(error, LinkError):
        return error
    if isinstance(error, (ssl.SSLError, ssl.CertificateError)):
        return _diagnose_tls(name, error)
    if isinstance(error, socket.gaierror):
        return ServerUnreachable(f"{name}: the host name cannot be resolved ({error}): check its spelling and the DNS")
    if _is_refusal(error):
        return ServerUnreachable(f"{name}: connection refused: start the server, or check host, port and firewall")
    if isinstance(error, FileNotFoundError):
        return ServerUnreachable(f"{name}: there is no such socket: start the server, or check 'unixsocket' and path")
    if isinstance(error, PermissionError):
        return ServerUnreachable(f"{name}: permission denied: check 'unixsocketperm' and the owner of the socket")
    if isinstance(error, TimeoutError):
        return ServerUnreachable(f"{name}: timed out ({error}): check that the host is up and no firewall is between")
    if isinstance(error, ConnectionError):
        return connection_lost(address, str(error))
    if isinstance(error, OSError):
        return ServerUnreachable(f"{name}: {error}: check host, port and network")
    if isinstance(error, UnicodeError) or (isinstance(error, ValueError) and "null" in str(error)):
        return ServerUnreachable(f"{name}: the host name cannot be used ({error}): correct the URL")
    return LinkError(f"{name}: unexpected {type(error).__name__}: {error}: this is a bug, please report it")


def diagnose_reply(address: ServerAddress, username: str | None, text: str) -> LinkError:
    """Translate an error that the server replied while the connection was being set up."""
    name = address.redacted()
    if text.startswith("NOAUTH"):
        return AuthenticationFailed(
            f"{name}: the server asks for a password and none was given: clients take it from their URL"
            " (user:password@host), daemons and tools from DYNAMOTH_LINK_PASSWORD or link.password_file"
        )
    if text.startswith("WRONGPASS"):
        who = f"user {username!r}" if username else "the default user"
        return AuthenticationFailed(f"{name}: wrong password for {who}, or the user is off: check both (ACL LIST)")
    if text.startswith("NOPERM"):
        return AuthenticationFailed(f"{name}: the user lacks a permission ({text}): grant it with ACL SETUSER")
    if text.startswith("DENIED"):
        return AuthenticationFailed(f"{name}: protected mode: set a password, or 'protected-mode no', at the server")
    if text.startswith("NOPROTO") or "unknown command" in text.lower():
        return ServerTooOld(f"{name}: the server does not speak RESP3 ({text}): use Redis 6.2 or newer")
    if text.startswith("LOADING"):
        return ServerLoading(f"{name}: the server is loading its data set: wait until it has finished")
    if "max number of clients" in text:
        return ServerUnreachable(f"{name}: the server has no connection left: raise 'maxclients'")
    if "DB index" in text:
        return LinkError(f"{name}: no such database ({text}): change the database in the URL, or 'databases'")
    return LinkError(f"{name}: the server refused the connection: {text}")


def too_old(address: ServerAddress, version: str) -> LinkError:
    """Return the error for a server whose HELLO tells a version below 6.2."""
    return ServerTooOld(f"{address.redacted()}: this is Redis {version}: use 6.2 or newer")


def connect_timed_out(address: ServerAddress, timeout_s: float) -> LinkError:
    """Return the error for a server that did not answer in time while the connection was being opened."""
    return ServerUnreachable(
        f"{address.redacted()}: timed out: no answer within {timeout_s:g} s: check that the host is up, that"
        " no firewall is between, and that the port speaks Redis (rediss:// for TLS)"
    )


def fell_silent(address: ServerAddress, silence_s: float) -> LinkError:
    """Return the error for a server that stopped answering PING."""
    return ServerUnreachable(
        f"{address.redacted()}: timed out: nothing came for {silence_s:g} s, not even the answer to a PING:"
        " check the network, and the server for commands that block it (SLOWLOG)"
    )


def connection_lost(address: ServerAddress, detail: str = "") -> LinkError:
    """Return the error for a connection that the server, or the network, closed."""
    because = f" ({detail})" if detail else ""
    about_tls = _REFUSED_WITHOUT_A_WORD if address.tls else "a TLS port (rediss://)"
    return ServerUnreachable(
        f"{address.redacted()}: the connection was closed by the server or the network{because}: if the"
        f" server is up, look in its log for CLIENT KILL, 'client-output-buffer-limit', 'timeout', or {about_tls}"
    )


def connection_cut(address: ServerAddress) -> LinkError:
    """Return the error for a connection that we ended ourselves, to open another one."""
    return ServerUnreachable(f"{address.redacted()}: the connection was cut by the application, and is made again")


def write_buffer_overrun(address: ServerAddress, limit_bytes: int) -> LinkError:
    """Return the error for a server that does not read what we write."""
    return ServerUnreachable(
        f"{address.redacted()}: more than {limit_bytes} bytes wait to be sent: the server or the network is"
        " too slow for what is published: publish less at once, or smaller messages"
    )


def violation(address: ServerAddress, detail: str) -> LinkError:
    """Return the error for bytes that break the protocol."""
    return ProtocolViolation(f"{address.redacted()}: protocol error: {detail}: check that this port is a Redis server")


def _is_refusal(error: Exception) -> bool:
    """Tell whether the host refused; asyncio joins the refusals of several addresses into one text."""
    if isinstance(error, ConnectionRefusedError):
        return True
    return isinstance(error, OSError) and f"[Errno {errno.ECONNREFUSED}]" in str(error)


#: TLS 1.3 checks our certificate after we are connected: the refusal may be lost when we write at that moment.
_REFUSED_WITHOUT_A_WORD = "our certificate, which it may miss or refuse ('tls-auth-clients')"

_OUR_CERTIFICATE = "(clients: ssl_certfile, ssl_keyfile; daemons and tools: link.tls_cert_file, link.tls_key_file)"

#: OpenSSL's codes for a certificate that is not valid yet, and for one that has expired.
_WRONG_TIME = (9, 10)


def _diagnose_tls(name: str, error: Exception) -> LinkError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsFailed(f"{name}: the certificate is not trusted ({error.verify_message}): {_cure_of(error)}")
    reason = getattr(error, "reason", None) or ""
    if reason.endswith("CERTIFICATE_REQUIRED"):
        return TlsFailed(f"{name}: the server asks for a certificate ('tls-auth-clients'): give one {_OUR_CERTIFICATE}")
    if "_ALERT_" in reason and reason.endswith(("CERTIFICATE_EXPIRED", "UNKNOWN_CA", "BAD_CERTIFICATE")):
        return TlsFailed(
            f"{name}: the server refuses our certificate ({error}): check its dates, and that the server's"
            f" 'tls-ca-cert-file' has its CA {_OUR_CERTIFICATE}"
        )
    return TlsFailed(f"{name}: TLS failed ({error}): check that the port speaks TLS, and our certificate")


def _cure_of(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _WRONG_TIME:
        return "renew it at the server, or correct this machine's clock"
    return "check the host name in the URL, and the CA (clients: ssl_ca_certs; daemons and tools: link.tls_ca_file)"
