"""Checks the tokens of users: JSON Web Tokens (RFC 7519), signed with a key that the operator's key set has.

The algorithm is that of the key, never that of the token. The key set (RFC 7517) is a file; it is read again when it
has changed, so keys are rotated by writing another file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jwt
from jwt.exceptions import InvalidSubjectError

from dynamoth.edge.interests import Scalar, canonical
from dynamoth.errors import ConfigError, DynamothError, MalformedMessage
from dynamoth_broker.events import Grant

LEEWAY_S = 10.0
"""Clocks of issuers and brokers may differ by this much."""

ALGORITHMS = frozenset(
    (
        "HS256",
        "HS384",
        "HS512",
        "RS256",
        "RS384",
        "RS512",
        "PS256",
        "PS384",
        "PS512",
        "ES256",
        "ES384",
        "ES512",
        "EdDSA",
    )
)

SECRET_BYTES_MIN = 32
"""A shorter shared secret can be guessed."""

KEY_FILE_BYTES_MAX = 1_000_000
SUBJECT_BYTES_MAX = 256
"""Longest name of a user: others see it in presences, and it is in keys and reports."""

PATTERNS_MAX = 1000
LOOK_S = 1.0
"""The file is looked at this often, at most, and only when a token comes."""

SUBJECT = "$sub"
"""As the value of a parameter in a token: the user's own name."""


QUOTED_MAX = 64
"""Characters of a token's header, or of a claim's name, in the log."""


CAUSES = {
    "no_token": "none was given",
    "malformed": "it could not be read",
    "unknown_key": "its key is not in the key set",
    "algorithm": "its algorithm is not that of its key",
    "signature": "its signature is wrong",
    "expired": "it has expired",
    "not_yet_valid": "it is not valid yet",
    "no_exp": "it has no exp",
    "no_sub": "it has no sub",
    "claims": "a claim has another form",
    "audience": "it is for another audience",
}
"""Why tokens are refused, for counters."""


class TokenRefused(DynamothError):
    """Raised when a token is not valid: its signature, its form or its rights. The text is for the user.

    Args:
        cause: one of ``CAUSES``.
        message: for the user: what is wrong, and no more.
        detail: for the operator's log, where that is more. It has no token and no key in it.

    """

    code = "token_refused"

    def __init__(self, cause: str, message: str, detail: str = "") -> None:
        """Keep why."""
        super().__init__(message)
        self.cause = cause
        self.detail = detail or message


class TokenExpired(TokenRefused):
    """Raised when a token was valid, and is over."""

    code = "token_expired"


@dataclass(frozen=True, slots=True)
class _Key:
    """A key and the one algorithm that it is for."""

    key: Any
    algorithm: str


class Tokens:
    """Turns tokens into grants.

    Args:
        keys_file: the key set; empty for none: then no token is accepted.
        anonymous: whether users without a token are let in.
        now: the time of the machine, in which grants expire.
        audience: this broker's name in the claim ``aud``. Empty: a token with that claim is for others, and is refused.

    Raises:
        ConfigError: the file cannot be read, or is no key set that can be used.

    """

    def __init__(self, keys_file: str, *, anonymous: bool, now: Callable[[], float], audience: str = "") -> None:
        self._file = Path(keys_file) if keys_file else None
        self._anonymous = anonymous
        self._now = now
        self._audience = audience
        self._keys: dict[str, _Key] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._looked_at = 0.0
        #: Why the present file cannot be used, though an earlier one could; empty while it can.
        self.fault = ""
        if self._file is not None:
            self._keys = self._read()
            if not self._keys and not anonymous:
                raise ConfigError(f"broker.token_keys_file: {self._file} has no keys, so nobody could log in: add one")

    def grant(self, token: str | None) -> Grant:
        """Return the rights that a token gives. Raises TokenRefused or TokenExpired."""
        if token is None:
            if self._anonymous:
                return Grant()
            raise TokenRefused("no_token", "a token is needed: connect with one")
        self._look_again()
        try:
            header = jwt.get_unverified_header(token)
            key = self._key_of(header)
            claims = jwt.decode(
                token,
                key=key.key,
                algorithms=[key.algorithm],
                leeway=LEEWAY_S,
                options={"require": ["exp", "sub"], "verify_aud": False},  # PyJWT's rule for `aud` is another one
            )
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise _refusal(error) from error
        self._check_audience(claims)
        return self._grant_of(claims)

    def _key_of(self, header: Mapping[str, Any]) -> _Key:
        kid = header.get("kid")
        if kid is None:
            message = "the token names no key (kid)"
            raise TokenRefused("unknown_key", message, f"{message} in its header: the issuer has to write it")
        key = self._keys.get(str(kid))
        if key is None:
            detail = (
                f"the token names the key {_quoted(kid)}, which broker.token_keys_file ({self._file}) does not have:"
                " add a key with this kid, or let the issuer use one of the file"
            )
            raise TokenRefused("unknown_key", "the token names an unknown key", detail)
        if header.get("alg") != key.algorithm:
            used = _quoted(header.get("alg"))
            detail = f"the token is signed with {used}, and its key {_quoted(kid)} is for {key.algorithm}"
            raise TokenRefused("algorithm", "the token's algorithm is not that of its key", detail)
        return key

    def _check_audience(self, claims: Mapping[str, Any]) -> None:
        """Refuse a token for other audiences (RFC 7519, section 4.1.3), and one for none where this broker has one."""
        named: Any = claims.get("aud")
        if named is None and not self._audience:
            return
        audiences: list[Any] = [named] if isinstance(named, str) else [*named] if isinstance(named, list) else []
        if self._audience and self._audience in audiences:
            return
        if not self._audience:
            detail = (
                "the token has the claim 'aud', and broker.audience is empty: set it to this broker's name in 'aud'"
            )
        else:
            detail = f"the token's claim 'aud' does not name {self._audience!r} (broker.audience)"
        raise TokenRefused("audience", "the token is for another audience (aud)", detail)

    def _grant_of(self, claims: Mapping[str, Any]) -> Grant:
        user = claims["sub"]
        if not user:
            raise TokenRefused("claims", "the claim 'sub' is empty")
        if not _is_unicode(user) or len(user.encode()) > SUBJECT_BYTES_MAX:
            raise TokenRefused("claims", f"the claim 'sub' is text of at most {SUBJECT_BYTES_MAX} bytes")
        try:
            expires_at = self._now() + float(claims["exp"]) + LEEWAY_S - time.time()
        except OverflowError:
            raise TokenRefused("claims", "the claim 'exp' is no time") from None
        bound: dict[str, dict[str, Scalar]] = {}
        params = claims.get("params", {})
        if not isinstance(params, dict):
            raise TokenRefused("claims", "the claim 'params' maps queries to parameters")
        for query, values in cast("dict[str, Any]", params).items():
            if not isinstance(values, dict):
                raise TokenRefused("claims", "the claim 'params' maps queries to parameters")
            named = cast("dict[str, Any]", values)
            bound[query] = {name: user if value == SUBJECT else value for name, value in named.items()}
            try:
                canonical(bound[query])
            except MalformedMessage as error:
                raise TokenRefused("claims", f"the claim 'params' cannot be used: {error}") from None
        patterns = {name: _patterns(claims, name) for name in ("channels", "queries", "publish")}
        return Grant(user, patterns["channels"], patterns["queries"], patterns["publish"], bound, expires_at)

    # The key set.

    def _look_again(self) -> None:
        """Read the file again if it has changed; keep the present keys if it cannot be used."""
        now = self._now()
        if self._file is None or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        try:
            if self._stamp_of(self._file) != self._stamp:
                self._keys = self._read()
            self.fault = ""
        except (ConfigError, OSError) as error:
            self.fault = str(error)

    @staticmethod
    def _stamp_of(file: Path) -> tuple[int, int, int]:
        status = os.stat(file)
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> dict[str, _Key]:
        assert self._file is not None
        try:
            stamp = self._stamp_of(self._file)
            if not self._file.is_file() or stamp[1] > KEY_FILE_BYTES_MAX:
                raise ConfigError(f"broker.token_keys_file: {self._file} is not a file of at most 1 MB")
            keys = dict(map(_read_key, json.loads(self._file.read_text())["keys"]))
            self._stamp = stamp  # that of a file that can be used: the fault of another one stays
            return keys
        except OSError as error:
            raise ConfigError(f"broker.token_keys_file: {self._file} cannot be read: {error.strerror}") from error
        except KeyError as error:
            raise ConfigError(f"broker.token_keys_file: {self._file} is no {_KEY_SET}: it has no {error}") from error
        except (ValueError, TypeError, jwt.PyJWTError) as error:
            raise ConfigError(f"broker.token_keys_file: {self._file} is no {_KEY_SET}: {error}") from error


_KEY_SET = 'JSON Web Key Set that can be used, {"keys": [{"kty": ..., "kid": ..., "alg": ...}, ...]}'

_REFUSALS: tuple[tuple[type[Exception], str, str], ...] = (
    (jwt.InvalidSignatureError, "signature", "the signature is wrong"),
    (jwt.ImmatureSignatureError, "not_yet_valid", "the token is not valid yet (nbf, iat): compare the clocks"),
    (jwt.InvalidAlgorithmError, "algorithm", "the token's algorithm is not that of its key"),
    (InvalidSubjectError, "claims", "the claim 'sub' is not text"),
    (jwt.DecodeError, "malformed", "the token cannot be read"),
)


def _refusal(error: Exception) -> TokenRefused:
    """Return what PyJWT has found, in words for the user and for the log."""
    if isinstance(error, jwt.ExpiredSignatureError):
        return TokenExpired("expired", "the token has expired: connect with a new one")
    if isinstance(error, jwt.MissingRequiredClaimError):
        claim = str(error.claim)
        return TokenRefused(f"no_{claim}", f"the token has no {claim}")
    for kind, cause, message in _REFUSALS:
        if isinstance(error, kind):
            return TokenRefused(cause, message)
    return TokenRefused("malformed", "the token cannot be used", f"the token cannot be used: {type(error).__name__}")


def _quoted(value: object) -> str:
    """Return a text of a token, so that it cannot fill or forge the log."""
    return repr(value if isinstance(value, str | int | None) else type(value).__name__)[:QUOTED_MAX]


def _read_key(entry: Any) -> tuple[str, _Key]:
    if not isinstance(entry, dict):
        raise TypeError("a key is an object")
    entry = cast("dict[str, Any]", entry)
    kid, algorithm = entry.get("kid"), entry.get("alg")
    if not isinstance(kid, str) or not kid:
        raise ValueError("a key has no kid")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"key {kid!r}: alg is none of {', '.join(sorted(ALGORITHMS))}")
    try:
        made = jwt.PyJWK(entry, algorithm=str(algorithm))
    except KeyError as error:
        raise ValueError(f"key {kid!r} has no {error}") from error
    if isinstance(made.key, bytes) and len(made.key) < SECRET_BYTES_MIN:
        raise ValueError(f"key {kid!r} has fewer than {SECRET_BYTES_MIN} bytes")
    return kid, _Key(made.key, str(algorithm))


def _patterns(claims: Mapping[str, Any], name: str) -> tuple[str, ...]:
    patterns = claims.get(name, [])
    if not isinstance(patterns, list) or len(patterns) > PATTERNS_MAX:  # pyright: ignore[reportUnknownArgumentType]
        raise TokenRefused("claims", f"the claim {name!r} is a list of at most {PATTERNS_MAX} patterns")
    found: list[Any] = [*patterns]
    if not all(isinstance(pattern, str) and _is_unicode(pattern) for pattern in found):
        raise TokenRefused("claims", f"the claim {name!r} is a list of patterns")
    return tuple(found)


def _is_unicode(text: str) -> bool:
    """Return whether a text of JSON can be encoded: it may have half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
