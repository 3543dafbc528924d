"""Tokens for the application's users: JSON Web Tokens signed with a key that the brokers have, too.

A real application has its own login, and hands out tokens there. This one gives everybody a token who asks.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from pathlib import Path

import jwt

LIFETIME_S = 6 * 3600.0


def make_keys(path: Path) -> None:
    """Write a new key as the JSON Web Key Set that ``broker.token_keys_file`` names."""
    key = base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()
    path.touch(mode=0o600)
    path.write_text(json.dumps({"keys": [{"kty": "oct", "kid": "emergency", "alg": "HS256", "k": key}]}))


class TokenMaker:
    """Signs tokens with the first key of a JSON Web Key Set."""

    def __init__(self, path: Path) -> None:
        key = json.loads(path.read_text())["keys"][0]
        self._secret = base64.urlsafe_b64decode(key["k"] + "==")
        self._id: str = key["kid"]

    def token(self, subject: str, publish: list[str]) -> str:
        """Return a token with which ``subject`` may subscribe to every query, and publish on some names."""
        claims = {"sub": subject, "exp": time.time() + LIFETIME_S, "queries": ["*"], "publish": publish}
        return jwt.encode(claims, self._secret, "HS256", headers={"kid": self._id})

    def subject(self, token: str) -> str | None:
        """Return whose a token of this maker is; None for one that is not valid."""
        try:
            subject: str = jwt.decode(token, self._secret, ["HS256"])["sub"]
        except (jwt.InvalidTokenError, KeyError):
            return None
        return subject
