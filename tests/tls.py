"""TLS for tests with real servers: a small authority, and TLS in front of any server, however it was built."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.loop_thread import LoopThread
from tests.tcp_proxy import Proxy


@dataclass(frozen=True)
class Certificates:
    """Files: an authority, a server's certificate for ``localhost`` and for no address, and a client's."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make them with ``openssl``."""
    authority, authority_key = folder / "authority.crt", folder / "authority.key"
    key_usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    _openssl("req", "-x509", *_new_key(authority_key), "-subj", "/CN=authority", *key_usage, "-out", str(authority))
    for name, extension in (("server", "subjectAltName=DNS:localhost"), ("client", "extendedKeyUsage=clientAuth")):
        request = ["-subj", f"/CN={name}", "-addext", extension, "-out", str(folder / f"{name}.crt")]
        signed_by = ["-CA", str(authority), "-CAkey", str(authority_key)]
        _openssl("req", "-x509", *_new_key(folder / f"{name}.key"), *signed_by, *_NO_AUTHORITY, *request)
    return Certificates(
        authority, *(folder / name for name in ("server.crt", "server.key", "client.crt", "client.key"))
    )


_NO_AUTHORITY = ("-addext", "basicConstraints=critical,CA:FALSE")


def _new_key(path: Path) -> list[str]:
    return ["-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", str(path)]


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@contextmanager
def tls_in_front_of(port: int, certificates: Certificates, *, asks_for_client: bool = False) -> Generator[int]:
    """Listen with TLS on localhost, hand everything on to a server's port, and give the own port.

    ``asks_for_client`` refuses clients without a certificate of the authority.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server, certificates.server_key)
    if asks_for_client:
        context.load_verify_locations(certificates.authority)
        context.verify_mode = ssl.CERT_REQUIRED
    thread = LoopThread("TLS")
    thread.loop.set_exception_handler(lambda _loop, _context: None)  # handshakes that fail are what is tested
    proxy = Proxy(port, tls=context)
    thread.call(proxy.start())
    try:
        yield proxy.port
    finally:
        thread.call(proxy.stop())
        thread.close()
