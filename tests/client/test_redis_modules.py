"""Modules of redis-py under the client's name: the imports that applications of redis-py have."""

# Redis-py has the source of the stubs that are imported here.
# pyright: reportMissingModuleSource=false

from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import redis
import redis.asyncio.client
import redis.asyncio.retry
import redis.client
import redis.exceptions
import redis.retry

import dynamoth_client
import dynamoth_client.asyncio
from dynamoth_client.asyncio.connection import ConnectionPool as AsyncConnectionPool
from dynamoth_client.asyncio.retry import Retry as AsyncRetry
from dynamoth_client.backoff import ExponentialBackoff
from dynamoth_client.connection import ConnectionPool
from dynamoth_client.exceptions import ConnectionError as RedisConnectionError
from dynamoth_client.retry import Retry


def modules_of_redis_py() -> list[str]:
    """Return the names of redis-py's modules that can be imported here, without the prefix."""
    names: list[str] = []
    for module in pkgutil.walk_packages(redis.__path__, "redis."):
        try:
            importlib.import_module(module.name)
        except ImportError:  # it needs a package that is not installed
            continue
        if module.name != "redis.asyncio":
            names.append(module.name.removeprefix("redis."))
    return names


OURS: dict[int, object] = {
    id(redis.client.Redis): dynamoth_client.Redis,
    id(redis.client.PubSub): dynamoth_client.PubSub,
    id(redis.client.Pipeline): dynamoth_client.sync.Pipeline,
    id(redis.from_url): dynamoth_client.from_url,
    id(redis.asyncio.client.Redis): dynamoth_client.asyncio.Redis,
    id(redis.asyncio.client.PubSub): dynamoth_client.asyncio.PubSub,
    id(redis.asyncio.client.Pipeline): dynamoth_client.asyncio.Pipeline,
    id(redis.asyncio.from_url): dynamoth_client.asyncio.from_url,
}
"""What is ours in place of redis-py's, by the id of that."""


def test_the_imports_of_an_application_work() -> None:
    assert RedisConnectionError is redis.exceptions.ConnectionError
    assert ConnectionPool is redis.ConnectionPool
    assert AsyncConnectionPool is redis.asyncio.ConnectionPool
    assert isinstance(Retry(ExponentialBackoff(), 3), redis.retry.Retry)
    assert issubclass(AsyncRetry, redis.asyncio.retry.Retry)


@pytest.mark.parametrize("name", modules_of_redis_py())
def test_every_module_is_redis_py_s_but_for_what_is_ours(name: str) -> None:
    theirs = importlib.import_module(f"redis.{name}")
    ours = importlib.import_module(f"dynamoth_client.{name}")
    for attribute, value in vars(theirs).items():
        if not attribute.startswith("__") and not isinstance(value, ModuleType):
            assert getattr(ours, attribute) is OURS.get(id(value), value), attribute
    assert theirs.__spec__ is not None
    assert theirs.__spec__.name == f"redis.{name}", "redis-py's own module is as it was"


def test_the_packages_stand_for_redis_py_s() -> None:
    pairs: list[tuple[Any, Any]] = [(dynamoth_client, redis), (dynamoth_client.asyncio, redis.asyncio)]
    for ours, theirs in pairs:
        assert set(ours.__all__) >= set(theirs.__all__)
        for name in theirs.__all__:
            value = getattr(theirs, name)
            assert getattr(ours, name) is OURS.get(id(value), value), name
        assert issubclass(ours.Redis, theirs.Redis) and issubclass(ours.PubSub, theirs.client.PubSub)
        for name in ("client", "connection", "lock", "retry", "sentinel", "utils"):
            assert isinstance(getattr(ours, name), ModuleType)
        for name in ("no_such_name", "_no_such_name"):
            with pytest.raises(AttributeError):
                getattr(ours, name)
    assert dynamoth_client.__version__ == redis.__version__


def test_a_star_import_gives_what_redis_py_gives() -> None:
    program = (
        "theirs, ours = {}, {}\n"
        "exec('from redis.client import *', theirs); exec('from dynamoth_client.client import *', ours)\n"
        "assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()\n"
        "import dynamoth_client; assert ours['Redis'] is dynamoth_client.Redis\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_errors_can_be_pickled() -> None:
    assert type(pickle.loads(pickle.dumps(RedisConnectionError("x")))) is redis.exceptions.ConnectionError


@pytest.mark.parametrize("name", ["no_such", "exceptions.no_such", "asyncio.no_such"])
def test_what_redis_py_does_not_have_is_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"dynamoth_client\.{name}"):
        importlib.import_module(f"dynamoth_client.{name}")
