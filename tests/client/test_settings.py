from __future__ import annotations

import inspect
import socket
import ssl
from functools import partial
from typing import Any

import pytest
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.backoff
import redis.exceptions
import redis.retry
import redis.sentinel

import dynamoth_client
import dynamoth_client.asyncio
from dynamoth_client.asyncio import GuaranteesOff, OptionIgnored, Redis, from_url
from dynamoth_client.machines.publisher.events import PUBLISH_TIMEOUT_S_MAX, PUBLISH_TIMEOUT_S_MIN, PublisherOptions
from dynamoth_client.redis_py.constructor import parse_servers
from dynamoth_client.redis_py.pools import ConnectionLimit
from dynamoth_client.redis_py.settings import UNREACHABLE_S, Settings, read_settings
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import ServerAddress
from tests.client.sync_helpers import Running
from tests.client.versions import REDIS_PY

BOTH = pytest.mark.parametrize("module", [dynamoth_client, dynamoth_client.asyncio], ids=["sync", "asyncio"])
"""Both clients; as of here their settings are one thing."""


def _settings(client: Any) -> Settings:
    cluster = client._cluster
    settings: Settings = getattr(cluster, "cluster", cluster).settings
    return settings


def _link_options(module: Any, **options: Any) -> LinkOptions:
    return _settings(module.Redis(servers=["one:1", "two:2"], **options)).link_options


def test_url_gives_seeds_in_order_and_the_pool_of_the_first() -> None:
    client = from_url("dynamoth://user:p%40ss@one:6379,two:6380,[::1]:6381/3?client_name=me&socket_connect_timeout=2.5")
    assert isinstance(client, redis.asyncio.Redis) and not hasattr(client, "nodes_manager")
    settings = _settings(client)
    places = (("one", 6379), ("two", 6380), ("::1", 6381))
    assert settings.seeds == tuple(ServerAddress(host, port, None, "user", "p@ss") for host, port in places)
    assert (settings.link_options.client_name, settings.link_options.connect_timeout_s) == ("me", 2.5)
    expected = {"host": "one", "port": 6379, "db": 3, "username": "user", "password": "p@ss"}
    assert client.connection_pool.connection_kwargs.items() >= expected.items()


def test_keyword_credentials_serve_all_servers_without_their_own() -> None:
    client = Redis(servers=["one:7000", "redis://her:own@two:7001"], username="u", password="p")
    settings = _settings(client)
    assert (settings.link_options.username, settings.link_options.password) == ("u", "p")
    assert settings.seeds == (ServerAddress("one", 7000), ServerAddress("two", 7001, None, "her", "own"))
    assert client.connection_pool.connection_kwargs["host"] == "one"


def test_host_and_port_alone_are_one_seed() -> None:
    assert _settings(Redis(host="one", port=7000)).seeds == (ServerAddress("one", 7000),)
    assert _settings(from_url("redis://one:7000/2")).seeds == (ServerAddress("one", 7000),)
    assert _settings(Redis(unix_socket_path="/tmp/r")).seeds[0].path == "/tmp/r"
    assert _settings(from_url("unix:///tmp/r")).seeds[0].path == "/tmp/r"


@BOTH
def test_tls_of_redis_py_is_tls_of_the_links(module: Any) -> None:
    for client in (
        module.from_url("dynamoths://one:1,two:2?ssl_cert_reqs=none"),
        module.Redis(servers=["one:1", "two:2"], ssl=True, ssl_cert_reqs="none"),
        module.Redis(servers=["rediss://one:1", "rediss://two:2"], ssl_cert_reqs="none"),
    ):
        settings = _settings(client)
        assert all(seed.tls for seed in settings.seeds)
        context = settings.link_options.tls.context
        assert context is not None and context.check_hostname is False


@BOTH
def test_options_of_tls(module: Any) -> None:
    options: dict[str, Any] = {"ssl_ciphers": "ECDHE-RSA-AES128-GCM-SHA256"}
    knows_flags = "ssl_include_verify_flags" in inspect.signature(module.Redis.__mro__[1]).parameters
    if knows_flags:
        options["ssl_include_verify_flags"] = [ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF]
    context = _link_options(module, ssl=True, ssl_min_version=ssl.TLSVersion.TLSv1_3, **options).tls.context
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert bool(context.verify_flags & ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF) is knows_flags
    assert "ECDHE-RSA-AES128-GCM-SHA256" in [cipher["name"] for cipher in context.get_ciphers()]
    client = module.from_url("dynamoths://one:1?ssl_min_version=772&ssl_check_hostname=no")
    if REDIS_PY < (8,):  # leaves it a text
        with pytest.raises(redis.exceptions.DataError, match="ssl_"):
            _settings(client)
    else:
        context = _settings(client).link_options.tls.context
        assert context and (context.minimum_version, context.check_hostname) == (ssl.TLSVersion.TLSv1_3, False)


@BOTH
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"servers": []}, "empty"),
        ({"servers": "one:1,two:2"}, "list"),
        ({"servers": ["one:1"], "host": "two"}, "not both"),
        ({"servers": ["one:1"], "host": "two", "port": 1}, "host and port, not both"),
        ({"servers": ["one:1"], "unix_socket_path": "/tmp/r"}, "not both"),
        ({"client_name": "two words"}, "client_name"),
        ({"trusted_hosts": ["a b"]}, "trusted_hosts"),
        ({"trusted_hosts": "10.0.0.0/40"}, "trusted_hosts"),
        ({"ssl": True, "ssl_ca_certs": "/nowhere/ca.pem"}, "ssl_"),
        ({"ssl": True, "ssl_ciphers": "NONE"}, "ssl_"),
        ({"ssl": True, "ssl_certfile": "/nowhere/me.pem", "ssl_keyfile": "/"}, "ssl_"),
        *(
            ({name: value}, f"{name} must be")
            for name in ("socket_timeout", "socket_connect_timeout", "health_check_interval")
            for value in (-1, "5", True, float("nan"))
        ),
    ],
)
def test_options_that_contradict_each_other_or_mean_nothing(module: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(redis.exceptions.DataError, match=words) as error:
        _settings(module.Redis(**options))
    assert isinstance(error.value, ValueError) or "must be" not in words


def test_urls_that_cannot_be_read_do_not_show_the_password() -> None:
    for url in ("dynamoth://user:secret@one:x", "dynamoth://user:secret@", "dynamoth://user:secret@one:1/db"):
        with pytest.raises(ValueError, match="dynamoth://") as error:
            _ = from_url(url)
        assert "secret" not in str(error.value)
    with pytest.raises(ValueError, match="one:x"):
        _ = Redis(servers=["one:x"])


@BOTH
@pytest.mark.parametrize("url", ["http://user:secret@one", "one:6379", "dynamo://one", ""])
def test_the_schemes_of_urls_are_named_where_another_is_given(module: Any, url: str) -> None:
    schemes = "dynamoth://, dynamoths://, redis://, rediss://, unix://"
    with pytest.raises(ValueError, match=f"must begin with one of {schemes}$"):
        module.from_url(url)


def test_plain_payloads_are_warned_of() -> None:
    with pytest.warns(GuaranteesOff, match="lost"):
        _ = Redis(servers=["one:1"], envelope=False)
    with pytest.warns(GuaranteesOff):
        _ = from_url("dynamoth://one:1,two:2?envelope=false")
    with pytest.warns(GuaranteesOff):
        client = from_url("redis://one:1/2?client_name=a+b&envelope=no&socket_timeout=3")
    options = client.connection_pool.connection_kwargs
    assert options.items() >= {"client_name": "a b", "socket_timeout": 3.0, "db": 2}.items()
    assert "envelope" not in options
    for url in ("redis://one:1?envelope=true", "unix:///tmp/redis.sock?envelope=yes"):
        _ = from_url(url)  # a warning would be an error
    for url in ("dynamoth://one:1?envelope=perhaps", "redis://one:1?envelope=perhaps", "rediss://one?envelope="):
        with pytest.raises(redis.exceptions.DataError, match="envelope"):
            _ = from_url(url)


def test_a_client_of_a_client_has_the_same_seeds() -> None:
    client = Redis(servers=["one:1", "two:2"]).client()
    assert [seed.host for seed in _settings(client).seeds] == ["one", "two"]
    assert client.single_connection_client


def test_a_pool_of_the_application() -> None:
    pool = redis.asyncio.ConnectionPool(host="one", port=7000, password="p")
    client = Redis(connection_pool=pool)
    assert client.connection_pool is pool
    assert not client.auto_close_connection_pool
    assert read_settings(pool, None).seeds == (ServerAddress("one", 7000),)
    assert _settings(client).link_options.password == "p"
    assert Redis.from_pool(pool).auto_close_connection_pool


def test_servers_of_several_kinds() -> None:
    assert parse_servers(["one:1", "redis://two:2", "[::1]:3", "unix:///s"], tls=False) == (
        ServerAddress("one", 1),
        ServerAddress("two", 2),
        ServerAddress("::1", 3),
        ServerAddress("", 0, "/s"),
    )


# Each option of redis-py.


@BOTH
def test_defaults_are_redis_py_s_where_it_has_any(module: Any) -> None:
    options = _link_options(module)
    assert (options.connect_timeout_s, options.ping_timeout_s, options.ping_interval_s) == (5, 3.4, 1.5)
    if REDIS_PY < (8,):
        assert options.keepalive is None
    else:
        assert options.keepalive == {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
    assert (options.username, options.password, options.client_name, options.credentials) == (None,) * 4
    assert (options.library_name, options.library_version) == ("redis-py", redis.__version__)
    if REDIS_PY >= (6,):
        assert isinstance(options.backoff, redis.backoff.ExponentialWithJitterBackoff)
    assert _settings(module.from_url("dynamoth://one:1")).link_options.backoff is None, "as from_url has no retry"


@BOTH
def test_timeouts(module: Any) -> None:
    options = _link_options(module, socket_timeout=0.25, socket_connect_timeout=2, health_check_interval=30)
    assert (options.connect_timeout_s, options.ping_timeout_s, options.ping_interval_s) == (2, 0.25, 30)
    options = _link_options(module, socket_timeout=3, socket_connect_timeout=None)
    assert (options.connect_timeout_s, options.ping_timeout_s) == (3, 3)
    options = _link_options(module, socket_timeout=None, socket_connect_timeout=None, health_check_interval=0)
    assert (options.connect_timeout_s, options.ping_timeout_s, options.ping_interval_s) == (5, 3.4, 1.5)
    options = _link_options(module, socket_timeout=7)
    assert options.ping_timeout_s == 7
    url = "dynamoth://one:1,two:2?socket_timeout=0.25&socket_connect_timeout=2&health_check_interval=30"
    options = _settings(module.from_url(url)).link_options
    assert (options.connect_timeout_s, options.ping_timeout_s, options.ping_interval_s) == (2, 0.25, 30)


@BOTH
def test_keepalive(module: Any) -> None:
    assert _link_options(module, socket_keepalive=False).keepalive is None
    assert _link_options(module, socket_keepalive=True, socket_keepalive_options=None).keepalive == {}
    own = {socket.TCP_KEEPIDLE: 7}
    assert _link_options(module, socket_keepalive=True, socket_keepalive_options=own).keepalive == own
    assert _settings(module.from_url("dynamoth://one:1?socket_keepalive=no")).link_options.keepalive is None


@BOTH
@pytest.mark.parametrize("first", ["redis://one:1", "unix:///socket"])
def test_options_that_redis_py_leaves_out_for_its_own_server(module: Any, first: str) -> None:
    """It has no TLS there, or no TCP; other servers have."""
    servers = [first, "rediss://two:2"]
    client = module.Redis(servers=servers, ssl_cert_reqs="none", socket_connect_timeout=2, socket_keepalive=False)
    for each in (client, module.Redis(servers=servers, connection_pool=client.connection_pool)):
        options = _settings(each).link_options
        assert options.tls.context is not None and options.tls.context.verify_mode is ssl.CERT_NONE
        assert (options.connect_timeout_s, options.keepalive) == (2, None)
    assert _link_options(module, ssl_ca_certs=None).tls.context is None


@BOTH
@pytest.mark.skipif(REDIS_PY < (7, 2), reason="this redis-py has no DriverInfo")
def test_names_of_the_library(module: Any) -> None:
    info = redis.DriverInfo(lib_version="9").add_upstream_driver("django-redis", "5.4.0")
    options = _link_options(module, driver_info=info)
    assert (options.library_name, options.library_version) == ("redis-py(django-redis_v5.4.0)", "9")
    options = _link_options(module, driver_info=None)
    theirs = (None, None) if REDIS_PY >= (8,) else ("redis-py", redis.__version__)
    assert (options.library_name, options.library_version) == theirs


@BOTH
@pytest.mark.filterwarnings("ignore:.*lib_name")
def test_names_of_the_library_before_driver_info(module: Any) -> None:
    options = _link_options(module, lib_name="mine", lib_version="9")
    assert (options.library_name, options.library_version) == ("mine", "9")


@pytest.mark.parametrize("name", ["ssl_password", "ssl_ca_path"])
def test_options_of_tls_that_only_synchronous_connections_had(name: str) -> None:
    make: Any = dynamoth_client.Redis
    client = make(ssl=True, **{name: "/nowhere"})
    if REDIS_PY >= (7,):
        assert _settings(client).link_options.tls.context is not None
    else:
        with pytest.raises(redis.exceptions.DataError, match=f"{name} needs redis-py 7"):
            _settings(client)


@BOTH
def test_the_backoff_is_that_of_every_link_and_the_rest_of_retry_is_for_questions(module: Any) -> None:
    for kind in (redis.retry.Retry, redis.asyncio.retry.Retry):
        given: Any = kind(redis.backoff.ExponentialBackoff(cap=7, base=2), 3)
        for client in (
            module.Redis(servers=["one:1"], retry=given),
            module.from_url("dynamoth://one:1", retry=given),
            module.Redis(connection_pool=type(module.Redis().connection_pool)(retry=given)),
        ):
            backoff = _settings(client).link_options.backoff
            assert backoff is not None and [backoff.compute(failures) for failures in (1, 2)] == [4, 7]
    assert _link_options(module, retry=None, retry_on_error=[OSError]).backoff is None
    with pytest.raises(redis.exceptions.DataError, match=r"retry must be a redis\.retry\.Retry"):
        module.Redis(retry=3)


@BOTH
def test_set_retry_holds_for_what_is_opened_later(module: Any) -> None:
    client = module.Redis(servers=["one:1"], retry=None, socket_timeout=2, socket_connect_timeout=2)
    assert _settings(client).link_options.backoff is None
    assert _settings(client).publish_timeout_s == 2
    client.set_retry(redis.asyncio.retry.Retry(redis.backoff.ConstantBackoff(0.5), 1))
    assert isinstance(_settings(client).link_options.backoff, redis.backoff.ConstantBackoff)
    assert _settings(client).publish_timeout_s == 4.5


class Growing(redis.backoff.AbstractBackoff):
    """A backoff of an application's own, without a cap, that keeps state."""

    def __init__(self) -> None:
        self._asked = 100

    def reset(self) -> None:
        self._asked = 0

    def compute(self, failures: int) -> float:
        self._asked += 1
        return self._asked * 0.5


def _retry(retries: int, backoff: Any = None) -> redis.retry.Retry:
    return redis.retry.Retry(backoff or redis.backoff.NoBackoff(), retries)


@BOTH
@pytest.mark.parametrize(
    ("retry", "socket_timeout", "socket_connect_timeout", "bound_s"),
    [
        (None, 5, 5, 5),
        (None, 2, 5, 5),
        (None, 5, 2, 5),
        (None, 2, None, 2),
        (None, None, 2, 10),
        (None, None, None, 10),
        (None, 60, 5, 10),
        (None, 0.3, 0.2, 1.5),
        (_retry(0), 2, 2, 2),
        (_retry(6), 0.5, 0.25, 3.5),
        (_retry(3, redis.backoff.ConstantBackoff(0.5)), 0.25, 0.25, 2.5),
        (_retry(3, redis.backoff.ExponentialBackoff(cap=0.5, base=0.1)), 0.5, 0.5, 3.5),
        (_retry(2, redis.backoff.FullJitterBackoff(cap=1, base=0.01)), 0.5, 0.5, 3.5),
        (_retry(2, redis.backoff.DecorrelatedJitterBackoff(cap=1, base=0.01)), 0.5, 0.5, 3.5),
        (_retry(2, Growing()), 0.5, 0.5, 3),
        (_retry(1_000_000_000), 0.5, 0.5, 10),
        (_retry(1_000_000, redis.backoff.ConstantBackoff(1)), 0.000001, 0.000001, 10),
        (_retry(-1), 0.1, 0.1, 10),
        (redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 3), 0.5, 0.5, 2),
    ],
)
def test_a_publication_waits_as_long_as_redis_py_would_at_most(
    module: Any, retry: Any, socket_timeout: float | None, socket_connect_timeout: float | None, bound_s: float
) -> None:
    """But neither less than the first connection may take, nor more than 10 s."""
    options = {"socket_timeout": socket_timeout, "socket_connect_timeout": socket_connect_timeout, "retry": retry}
    for client in (module.Redis(**options), module.from_url("dynamoth://one:1,two:2", **options)):
        assert _settings(client).publish_timeout_s == pytest.approx(bound_s)


@BOTH
def test_readers_wait_for_longer_than_a_failover_unless_an_application_says_less(module: Any) -> None:
    assert _settings(module.Redis()).unreachable_s == UNREACHABLE_S > 3 + 3
    assert _settings(module.from_url("dynamoth://one:1,two:2")).unreachable_s == UNREACHABLE_S
    assert _settings(module.Redis(socket_connect_timeout=2)).unreachable_s == 2
    assert _settings(module.from_url("dynamoth://one:1,two:2?socket_connect_timeout=30")).unreachable_s == 30


@BOTH
def test_a_publication_waits_10_s_by_default(module: Any) -> None:
    assert _settings(module.Redis()).publish_timeout_s == 10
    assert _settings(module.from_url("dynamoth://one:1,two:2")).publish_timeout_s == 10
    url = "dynamoth://one:1,two:2?socket_timeout=2&socket_connect_timeout=3"
    assert _settings(module.from_url(url)).publish_timeout_s == 3
    options: dict[str, Any] = {"retry": None, "retry_on_error": [OSError]}
    assert _settings(module.from_url(url, **options)).publish_timeout_s == 6, "redis-py tries once more then"


def test_a_bound_is_above_the_failover() -> None:
    options = PublisherOptions()
    assert options.failover_s < PUBLISH_TIMEOUT_S_MIN < PUBLISH_TIMEOUT_S_MAX == options.publish_timeout_s


class _User:
    is_stopped = False


def _limit(client: Any) -> int | None:
    """Return how many publishers and PubSubs may be open; None for more than redis-py's default."""
    users: list[_User] = []
    try:
        while len(users) <= 100:
            users.append(_settings(client).pool.connections.admit(_User))
    except redis.exceptions.MaxConnectionsError:
        return len(users)
    return None


@BOTH
def test_a_limit_that_is_named_holds_also_where_it_is_redis_py_s_default(module: Any) -> None:
    first = module.Redis(max_connections=100)
    for client in (
        first,
        module.Redis(connection_pool=first.connection_pool),
        module.Redis(servers=["one:1", "two:2"], max_connections=100),
        module.from_url("dynamoth://one:1,two:2?max_connections=100"),
        module.from_url("redis://one:1?max_connections=100"),
        module.from_url("dynamoth://one:1,two:2", max_connections=100),
        module.from_url("redis://one:1?max_connections=100", max_connections=7),
    ):
        assert _limit(client) == client.connection_pool.max_connections == 100
    assert _limit(module.Redis(max_connections=7)) == 7


@BOTH
def test_where_no_limit_is_named_there_is_none(module: Any) -> None:
    plain: Any = redis.asyncio if module is dynamoth_client.asyncio else redis
    for kind in (plain.ConnectionPool, plain.BlockingConnectionPool):
        assert _limit(module.Redis(connection_pool=kind())) is None
        assert _limit(module.Redis(connection_pool=kind(max_connections=7))) == 7
    url = "dynamoth://one:1,two:2"
    limits: list[dict[str, Any]] = [{"max_connections": None}, {"max_connections": 0}, {}]
    clients = [make(**limit) for limit in limits for make in (module.Redis, partial(module.from_url, url))]
    assert {_limit(client) for client in (*clients, module.from_url(f"{url}?max_connections=0"))} == {None}


def test_a_limit_forgets_users_that_were_dropped_and_those_of_a_parent() -> None:
    limit = ConnectionLimit(1)
    limit.admit(_User)
    kept = limit.admit(_User)
    with pytest.raises(redis.exceptions.MaxConnectionsError):
        limit.admit(_User)
    limit.start_over()
    assert limit.admit(_User) is not kept


def test_a_limit_can_be_used_while_a_user_is_made() -> None:
    """By a finalizer, or another thread that it waits for."""
    limit = ConnectionLimit(2)

    def make() -> _User:
        others.append(Running(limit.admit, _User).result())
        with pytest.raises(redis.exceptions.MaxConnectionsError):
            limit.admit(_User)
        return _User()

    others: list[_User] = []
    made = limit.admit(make)
    with pytest.raises(redis.exceptions.MaxConnectionsError):
        limit.admit(_User)
    others.clear()
    assert limit.admit(_User) is not made


@BOTH
def test_a_credential_provider_is_asked_by_links(module: Any) -> None:
    provider = redis.UsernamePasswordCredentialProvider("u", "p")
    options = _link_options(module, credential_provider=provider)
    assert options.credentials is not None
    assert (options.username, options.password) == (None, None)
    with pytest.raises(redis.exceptions.DataError, match="cannot be passed along with"):
        module.Redis(credential_provider=provider, password="p")
    with pytest.raises(redis.exceptions.DataError, match="cannot be passed along with"):
        module.from_url("dynamoth://u:p@one:1", credential_provider=provider)


@BOTH
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"nonsense": 1}, TypeError),
        ({"max_connections": -1}, ValueError),
        ({"max_connections": "7"}, ValueError),
        ({"protocol": 4}, redis.exceptions.ConnectionError),
        pytest.param(
            {"driver_info": "me"},
            TypeError,
            marks=pytest.mark.skipif(REDIS_PY < (8,), reason="this redis-py takes it, or has none"),
        ),
        ({"ssl": True, "ssl_cert_reqs": "maybe"}, redis.exceptions.RedisError),
    ],
)
def test_what_redis_py_refuses_is_refused_at_once_as_it_does(
    module: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    plain: Any = redis.asyncio if module is dynamoth_client.asyncio else redis
    with pytest.raises(error) as theirs:
        pool = plain.Redis(**options).connection_pool
        pool.connection_class(**pool.connection_kwargs)  # what it would do at the first command
    with pytest.raises(error) as ours:
        module.Redis(**options)
    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))


@BOTH
@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("nonsense=1", TypeError),
        ("max_connections=0.5", ValueError),
        ("health_check_interval=often", ValueError),
        ("db=x", ValueError),
        ("protocol=4", redis.exceptions.ConnectionError),
        ("ssl_ca_certs=/ca", TypeError),  # without TLS
        ("trusted_hosts=-", redis.exceptions.DataError),
    ],
)
def test_options_of_a_url_are_refused_as_redis_py_does(module: Any, option: str, error: type[Exception]) -> None:
    for url in ("dynamoth://one:1,two:2", "redis://one:1"):
        with pytest.raises(error):
            module.from_url(f"{url}?{option}")


@BOTH
def test_the_database_of_a_url_is_for_other_commands(module: Any) -> None:
    for url in ("dynamoth://one:1,two:2?db=3", "dynamoth://one:1,two:2/3", "dynamoth://one:1/2?db=3"):
        client = module.from_url(url)
        assert client.get_connection_kwargs()["db"] == 3
        assert [seed.db for seed in _settings(client).seeds] == [0] * len(_settings(client).seeds)


@BOTH
def test_what_links_cannot_do_is_refused_when_they_are_needed(module: Any) -> None:
    client = module.Redis(redis_connect_func=print)
    with pytest.raises(redis.exceptions.DataError, match=r"redis_connect_func.*use credential_provider"):
        _settings(client)
    pools: Any = redis.asyncio if module is dynamoth_client.asyncio else redis
    sentinels: Any = redis.asyncio.sentinel if module is dynamoth_client.asyncio else redis.sentinel
    pool = sentinels.SentinelConnectionPool("master", sentinels.Sentinel([("one", 1)]))
    with pytest.raises(redis.exceptions.DataError, match=r"Sentinel.*servers="):
        _settings(module.Redis(connection_pool=pool))
    assert _settings(module.Redis(connection_pool=pool, servers=["one:1"])).seeds == (ServerAddress("one", 1),)

    kind: Any = type("Own", (pools.Connection,), {})
    with pytest.warns(OptionIgnored, match="connection_class=Own"):
        _settings(module.Redis(connection_pool=pools.ConnectionPool(connection_class=kind)))


@pytest.mark.parametrize("name", ["ssl_validate_ocsp", "ssl_validate_ocsp_stapled"])
def test_ocsp_is_refused(name: str) -> None:
    """redis.asyncio does not know it at all."""
    make: Any = dynamoth_client.Redis
    for options in ({"ssl": True}, {}):
        client = make(servers=["one:1", "rediss://two:2"], **{name: True}, **options)
        with pytest.raises(redis.exceptions.DataError, match=f"{name} is not supported"):
            _settings(client)
    assert _settings(make(ssl=True, **{name: False})).link_options.tls.context is not None


#: What is honoured, refused or without a meaning for links, as the table in ``_settings`` says.
KNOWN = {
    "host", "port", "unix_socket_path", "username", "password", "credential_provider", "client_name", "lib_name",
    "lib_version", "driver_info", "socket_keepalive", "socket_keepalive_options", "socket_connect_timeout",
    "socket_timeout", "health_check_interval", "retry", "retry_on_error", "retry_on_timeout", "max_connections",
    "encoding", "encoding_errors", "decode_responses", "redis_connect_func", "db", "protocol", "legacy_responses",
    "cache", "cache_config", "single_connection_client", "socket_read_size", "maint_notifications_config",
    "oss_cluster_maint_notifications_handler", "event_dispatcher", "connection_pool", "auto_close_connection_pool",
    "charset", "errors",
}  # fmt: skip


@pytest.mark.parametrize("kind", [redis.Redis, redis.asyncio.Redis])
def test_a_new_option_of_redis_py_is_noticed(kind: Any) -> None:
    """Then the table says what becomes of it."""
    options = {name for name in inspect.signature(kind.__init__).parameters if not name.startswith("ssl")}
    assert options - KNOWN == {"self"}


@BOTH
def test_nothing_is_warned_of_without_cause(module: Any) -> None:
    options: dict[str, Any] = {"socket_read_size": 1024} if REDIS_PY >= (8,) else {}
    made = _link_options(
        module, username="", password="", client_name="", db=3, protocol=2, max_connections=7, **options
    )
    assert (made.username, made.password, made.client_name) == (None, None, None), "empty names are none"
