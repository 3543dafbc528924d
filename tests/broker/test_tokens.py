from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jwt
import pytest

from dynamoth.errors import ConfigError
from dynamoth_broker.process.tokens import CAUSES, LOOK_S, TokenExpired, TokenRefused, Tokens
from tests.broker.edge import SECRET, token, write_keys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(tmp_path)


def tokens_of(keys: Path, audience: str = "") -> Tokens:
    return Tokens(str(keys), anonymous=False, now=time.monotonic, audience=audience)


def without(claim: str) -> str:
    claims = {"sub": "ada", "exp": time.time() + 60}
    del claims[claim]
    return jwt.encode(claims, SECRET, "HS256", headers={"kid": "k1"})


REFUSED: dict[str, tuple[Any, str, str]] = {
    "none": (lambda: None, "no_token", "a token is needed"),
    "garbage": (lambda: "no token", "malformed", "cannot be read"),
    "other kid": (lambda: token(kid="k2"), "unknown_key", "names an unknown key"),
    "no kid": (lambda: jwt.encode({"sub": "ada"}, SECRET, "HS256"), "unknown_key", "names no key"),
    "other key": (lambda: token(key=b"another" * 8), "signature", "the signature is wrong"),
    "other algorithm": (lambda: token(SECRET * 2, "HS512"), "algorithm", "is not that of its key"),
    "alg none": (lambda: jwt.encode({"sub": "ada"}, "", "none", headers={"kid": "k1"}), "algorithm", "algorithm"),
    "expired": (lambda: token(exp=time.time() - 60), "expired", "has expired"),
    "no exp": (lambda: without("exp"), "no_exp", "the token has no exp"),
    "no sub": (lambda: without("sub"), "no_sub", "the token has no sub"),
    "sub is null": (lambda: token(sub=None), "no_sub", "the token has no sub"),
    "sub is a number": (lambda: token(sub=7), "claims", "'sub'"),
    "sub is empty": (lambda: token(sub=""), "claims", "'sub'"),
    "not yet valid": (lambda: token(nbf=time.time() + 60), "not_yet_valid", "compare the clocks"),
    "no list": (lambda: token(channels="*"), "claims", "'channels' is a list"),
    "params": (lambda: token(params=[]), "claims", "'params' maps"),
    "audience": (lambda: token(aud="elsewhere"), "audience", "for another audience"),
}


@pytest.mark.parametrize(("made", "cause", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_token_says_why(made: Any, cause: str, text: str, keys: Path) -> None:
    refused = made()
    with pytest.raises(TokenRefused, match=text) as caught:
        tokens_of(keys).grant(refused)
    assert caught.value.cause == cause
    assert isinstance(caught.value, TokenExpired) is (cause == "expired")
    if refused is not None:
        assert refused not in f"{caught.value} {caught.value.detail}"


def test_every_cause_has_a_counter() -> None:
    assert {cause for _, cause, _ in REFUSED.values()} == CAUSES.keys()


def test_the_log_gets_more_than_the_user(keys: Path) -> None:
    with pytest.raises(TokenRefused) as caught:
        tokens_of(keys).grant(token(kid="k2\n" * 1000))
    assert "k2" not in str(caught.value)
    assert str(keys) not in str(caught.value)
    assert r"'k2\nk2" in caught.value.detail
    assert str(keys) in caught.value.detail
    assert len(caught.value.detail) < 400
    assert "\n" not in caught.value.detail


@pytest.mark.parametrize("named", ["edge", ["other", "edge"]])
def test_a_token_for_this_audience_is_taken(named: Any, keys: Path) -> None:
    assert tokens_of(keys, "edge").grant(token(aud=named)).user == "ada"


@pytest.mark.parametrize("named", ["other", ["other"], [], "edge2", "edg", 7, {"edge": 1}])
def test_a_token_for_other_audiences_is_not(named: Any, keys: Path) -> None:
    with pytest.raises(TokenRefused) as caught:
        tokens_of(keys, "edge").grant(token(aud=named))
    assert (caught.value.cause, "broker.audience" in caught.value.detail) == ("audience", True)


def test_where_an_audience_is_set_a_token_has_to_name_it(keys: Path) -> None:
    assert tokens_of(keys).grant(token()).user == "ada"
    with pytest.raises(TokenRefused, match="another audience"):
        tokens_of(keys, "edge").grant(token())


def test_without_the_setting_an_audience_is_refused_with_its_name(keys: Path) -> None:
    with pytest.raises(TokenRefused, match="another audience") as caught:
        tokens_of(keys).grant(token(aud=["edge"]))
    assert "broker.audience is empty" in caught.value.detail


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no json", "is no JSON Web Key Set"),
        ('{"keys": [1]}', "a key is an object"),
        ('{"keys": {"a": 1}}', "a key is an object"),
        ('{"keys": []}', "has no keys, so nobody could log in"),
        ("{}", "it has no 'keys'"),
    ],
)
def test_a_key_set_that_cannot_be_used_is_refused(text: str, says: str, keys: Path) -> None:
    keys.write_text(text)
    with pytest.raises(ConfigError, match=says):
        tokens_of(keys)


def test_a_running_broker_keeps_its_keys_and_says_so_until_the_file_can_be_used(keys: Path) -> None:
    now, good = 0.0, keys.read_text()
    tokens = Tokens(str(keys), anonymous=False, now=lambda: now)
    keys.write_text("no json")
    for _ in range(3):
        now += 2 * LOOK_S
        assert tokens.grant(token()).user == "ada"
        assert "is no JSON Web Key Set" in tokens.fault
    keys.write_text(good)
    now += 2 * LOOK_S
    assert tokens.grant(token()).user == "ada"
    assert tokens.fault == ""
