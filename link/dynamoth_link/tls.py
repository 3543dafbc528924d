"""The TLS of connections: whom to trust, and our own certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """How TLS is done for ``rediss://`` addresses. Files are read once per process.

    ``ca_file``: whom to trust (PEM); None for what the system trusts. ``cert_file`` and ``key_file``: our own
    certificate, for servers with ``tls-auth-clients yes``. ``verify``: False accepts any certificate, for
    tests only. ``context`` replaces all of them; ``has_certificate`` says whether it has one of our own.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify: bool = True
    context: ssl.SSLContext | None = None
    has_certificate: bool = False

    def make_context(self) -> ssl.SSLContext:
        """Return the context to connect with. Raises OSError when a file cannot be used."""
        return self.context or _make_context(self)


@lru_cache(maxsize=16)
def _make_context(options: TlsOptions) -> ssl.SSLContext:
    """Reading the system's certificates takes some 10 ms: too long to be done at each attempt to connect."""
    context = ssl.create_default_context(cafile=options.ca_file)
    if not options.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if options.cert_file is not None:
        context.load_cert_chain(options.cert_file, options.key_file)
    return context
