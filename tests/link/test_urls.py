"""URLs: what they mean, what is refused and how, and that no password gets out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import ConfigError
from dynamoth_link.urls import (
    ClusterAddress,
    InvalidUrl,
    ServerAddress,
    parse_cluster_url,
    parse_log_servers,
    parse_server_url,
    redact,
)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", ServerAddress("h")),
        ("redis://h:", ServerAddress("h")),
        ("redis://h:7000/", ServerAddress("h", 7000)),
        ("redis://h:7000/3", ServerAddress("h", 7000, db=3)),
        ("rediss://h:7000", ServerAddress("h", 7000, tls=True)),
        ("redis://:p%40ss@h", ServerAddress("h", password="p@ss")),
        ("redis://us%3Aer:p:w@h", ServerAddress("h", username="us:er", password="p:w")),
        ("redis://user@h", ServerAddress("h", username="user")),
        ("redis://a:b@c@h", ServerAddress("h", username="a", password="b@c")),
        ("redis://[::1]:7000", ServerAddress("::1", 7000)),
        ("redis://[::1]", ServerAddress("::1")),
        ("unix:///tmp/r.sock", ServerAddress("", 0, "/tmp/r.sock")),
        ("unix://u:p@/tmp/r%20s?db=2", ServerAddress("", 0, "/tmp/r s", "u", "p", db=2)),
        ("unix:///tmp/a@b", ServerAddress("", 0, "/tmp/a@b")),
    ],
)
def test_server_urls(url: str, address: ServerAddress) -> None:
    assert parse_server_url(url) == address


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "must begin with one of redis://"),
        ("h:6379", "must begin with"),
        ("http://h", "must begin with"),
        ("dynamoth://h", "must begin with"),
        ("redis://", "host name is missing"),
        ("redis://u:secret@", "host name is missing"),
        ("redis://h:0", "'0' is no port"),
        ("redis://h:65536", "'65536' is no port"),
        ("redis://h:x", "'x' is no port"),
        ("redis://h:-1", "is no port"),
        ("redis://h:٣", "is no port"),
        ("redis://::1", "too many colons"),
        ("redis://[::1", "no IPv6 address"),
        ("redis://[::1]x", "no IPv6 address"),
        ("redis://a b", "no host name"),
        ("redis://a,b", "no host name"),
        ("redis://h/x", "'x' is no database"),
        ("redis://h/0/1", "no database"),
        ("redis://h?db=1", "'db' is not known here"),
        ("redis://h#f", "%23"),
        ("redis://u:sec/ret@h", "%2F"),
        ("unix://tmp/r.sock", "three slashes"),
        ("unix://", "path of the socket is missing"),
        ("unix:///tmp/x?db=a", "no database"),
        ("unix:///tmp/x?db", "name=value"),
        ("unix:///tmp/x?db=1&db=2", "twice"),
    ],
)
def test_what_is_refused(url: str, says: str) -> None:
    with pytest.raises(InvalidUrl) as raised:
        parse_server_url(url)
    assert says in str(raised.value)
    assert "sec" not in str(raised.value)
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, ConfigError)


def test_a_cluster_url_lists_servers_that_share_everything_else() -> None:
    url = "dynamoths://u:p@a,b:7000,[::1]:7001/2?x=1&y="
    assert parse_cluster_url(url).servers == (
        ServerAddress("a", 6379, None, "u", "p", True, 2),
        ServerAddress("b", 7000, None, "u", "p", True, 2),
        ServerAddress("::1", 7001, None, "u", "p", True, 2),
    )
    assert dict(parse_cluster_url(url).options) == {"x": "1", "y": ""}


def test_a_server_url_stands_for_a_cluster() -> None:
    assert parse_cluster_url("redis://h:1") == ClusterAddress((ServerAddress("h", 1),))


@pytest.mark.parametrize("url", ["dynamoth://", "dynamoth://a,,b", "dynamoth://a,", "http://a", "dynamoth://a?x"])
def test_cluster_urls_that_are_refused(url: str) -> None:
    with pytest.raises(InvalidUrl):
        parse_cluster_url(url)


def test_a_list_of_log_servers() -> None:
    assert parse_log_servers(" l1=redis://a:1  l-2=rediss://u:p%3D@b/3 ") == {
        "l1": ServerAddress("a", 1),
        "l-2": ServerAddress("b", 6379, None, "u", "p=", True, 3),
    }
    assert parse_log_servers("") == {}


@pytest.mark.parametrize("text", ["l1", "l1=", "=redis://a", "a b=redis://a", "l1=redis://a l1=redis://u:secret@b"])
def test_lists_of_log_servers_that_are_refused(text: str) -> None:
    with pytest.raises(InvalidUrl, match="ID=URL expected, each ID once") as refused:
        parse_log_servers(text)
    assert "secret" not in str(refused.value)


def test_credentials_of_the_server_come_before_those_of_the_cluster() -> None:
    cluster = parse_cluster_url("dynamoth://u:p@a,b")
    assert cluster.merge(parse_server_url("redis://h")) == ServerAddress("h", username="u", password="p")
    own = parse_server_url("redis://:own@h")
    assert cluster.merge(own) == own


def test_no_password_in_repr_or_redacted() -> None:
    cluster = parse_cluster_url("dynamoth://user:secret@a,b:1/2?x=1")
    assert "secret" not in repr(cluster) + cluster.redacted() + cluster.first.redacted()
    assert cluster.redacted() == "dynamoth://user:***@a:6379,b:1/2?x=1"
    assert parse_server_url("unix://user:secret@/tmp/x").redacted() == "unix://user:***@/tmp/x"
    assert redact("redis:/u:secret@h") == "***@h"
    assert redact("x://u:sec@ret@h/1") == "x://***@h/1"


hosts = st.from_regex(r"[a-z0-9.\-]{1,20}", fullmatch=True) | st.ip_addresses().map(str)
ports = st.integers(1, 65535)
users = st.none() | st.text(min_size=1, max_size=10)
passwords = st.none() | st.text(max_size=10)
dbs = st.integers(0, 99)
tcp_addresses = st.builds(
    ServerAddress, host=hosts, port=ports, username=users, password=passwords, tls=st.booleans(), db=dbs
)
unix_addresses = st.builds(
    ServerAddress,
    host=st.just(""),
    port=st.just(0),
    path=st.text(min_size=1).map(lambda text: "/" + text),
    username=users,
    password=passwords,
    db=dbs,
)


@given(tcp_addresses | unix_addresses)
def test_a_server_address_survives_its_url(address: ServerAddress) -> None:
    assert parse_server_url(address.url()) == address


@given(
    st.lists(st.tuples(hosts, ports), min_size=1, max_size=5),
    tcp_addresses,
    st.dictionaries(st.text(min_size=1), st.text(), max_size=3),
)
def test_a_cluster_address_survives_its_url(
    places: list[tuple[str, int]], shared: ServerAddress, options: dict[str, str]
) -> None:
    alike = (None, shared.username, shared.password, shared.tls, shared.db)
    servers = tuple(ServerAddress(host, port, *alike) for host, port in places)
    address = ClusterAddress(servers, tuple(options.items()))
    assert parse_cluster_url(address.url()) == address


@given(st.text() | st.text().map(lambda text: "redis://" + text) | st.text().map(lambda text: "dynamoth://" + text))
def test_any_text_is_parsed_or_refused_as_invalid(text: str) -> None:
    try:
        address = parse_cluster_url(text)
    except InvalidUrl:
        return
    assert parse_cluster_url(address.url()) == address


@given(tcp_addresses, st.text("XYZ", min_size=4, max_size=8))
def test_redacted_shows_no_password(address: ServerAddress, password: str) -> None:
    address = ServerAddress(address.host, address.port, None, "u", password, address.tls, address.db)
    assert password not in address.redacted()
    assert password not in repr(address)
