"""What is said about TLS that fails: the cause, and whose certificate is to be looked at."""

from __future__ import annotations

import ssl

import pytest

from dynamoth_link.errors import connection_lost, diagnose_exception
from dynamoth_link.urls import ServerAddress

SERVER = ServerAddress("redis.example.com", 6379, tls=True)


def _alert(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] (_ssl.c:1)")
    error.reason = reason
    return error


def _not_trusted(code: int, text: str) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, text
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (_alert("TLSV13_ALERT_CERTIFICATE_REQUIRED"), "the server asks for a certificate"),
        (_alert("SSLV3_ALERT_CERTIFICATE_EXPIRED"), "the server refuses our certificate"),
        (_alert("TLSV1_ALERT_UNKNOWN_CA"), "the server refuses our certificate"),
        (_alert("WRONG_VERSION_NUMBER"), "check that the port speaks TLS"),
        (_not_trusted(10, "certificate has expired"), "renew it at the server"),
        (_not_trusted(9, "certificate is not yet valid"), "this machine's clock"),
        (_not_trusted(20, "unable to get local issuer certificate"), "check the host name in the URL, and the CA"),
    ],
)
def test_the_cure_fits_the_cause(error: Exception, says: str) -> None:
    assert says in str(diagnose_exception(SERVER, error))


def test_a_tls_server_that_closes_may_have_refused_our_certificate() -> None:
    assert "our certificate" in str(connection_lost(SERVER))
    assert "a TLS port (rediss://)" in str(connection_lost(ServerAddress("redis.example.com", 6379)))
