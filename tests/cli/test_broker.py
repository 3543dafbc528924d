"""``dynamoth broker`` with a configuration that cannot be used."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from dynamoth_cli.main import main

SERVERS = "s1=redis://127.0.0.1:1"


def write_certificate(folder: Path, days: float) -> tuple[Path, Path]:
    """Write a certificate that expires so many days from now, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=9), now + timedelta(days=days))
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return cert_file, key_file


def check(*arguments: str) -> int:
    command = ["broker", "--check", "--id", "b1", "--servers", SERVERS, "--anonymous", "true", *arguments]
    return main(command)


def test_a_certificate_that_is_valid_is_taken(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, 1)
    assert check("--tls-cert-file", str(cert), "--tls-key-file", str(key)) == 0


def test_a_certificate_that_has_expired_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = write_certificate(tmp_path, -1)
    assert check("--tls-cert-file", str(cert), "--tls-key-file", str(key)) == 2
    assert f"{cert} has expired" in capsys.readouterr().err


def test_a_key_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, _ = write_certificate(tmp_path, 1)
    assert check("--tls-cert-file", str(cert)) == 2
    assert "broker.tls_key_file is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{}", "it has no 'keys'"),
        (json.dumps({"keys": [{"kty": "oct", "kid": "k1", "alg": "HS256"}]}), "key 'k1' has no 'k'"),
    ],
)
def test_a_key_set_that_cannot_be_used_is_refused_with_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, reason: str
) -> None:
    file = tmp_path / "keys.json"
    if text is not None:
        file.write_text(text)
    command = ["broker", "--id", "b1", "--port", "0", "--servers", SERVERS, "--token-keys-file", str(file)]
    assert main(command) == 2
    assert reason in capsys.readouterr().err
