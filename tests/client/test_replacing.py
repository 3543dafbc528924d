"""``replace_redis``: which libraries get clients of Dynamoth, however they import redis-py, and which keep theirs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.client

import dynamoth_client
from dynamoth_client.redis_py.replacing import KNOWN

INSTALLED = ("broadcaster._backends.redis", "channels_redis.pubsub", "socketio.async_redis_manager")
"""Of those that are known: what the development requirements have."""

FORMS = {
    "module": "import redis\ndef make(): return redis.Redis()",
    "url": "import redis\ndef make(): return redis.from_url('redis://x')",
    "class": "from redis import StrictRedis\ndef make(): return StrictRedis()",
    "function": "from redis import from_url\ndef make(): return from_url('redis://x')",
    "path": "from redis.client import Redis\ndef make(): return Redis()",
    "asyncio": "from redis import asyncio as aioredis\ndef make(): return aioredis.Redis()",
    "asyncio class": "from redis.asyncio.client import Redis\ndef make(): return Redis(host='x')",
    "asyncio module": "import redis.asyncio as aioredis\ndef make(): return aioredis.from_url('redis://x')",
}
"""How libraries import redis-py and make clients."""

OURS = (dynamoth_client.Redis, dynamoth_client.asyncio.Redis)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a module ``a_library`` can be written, which is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)  # pyright: ignore[reportUnknownMemberType]
    yield tmp_path / "a_library.py"
    sys.modules.pop("a_library", None)


def imported(name: str = "a_library") -> Any:
    importlib.invalidate_caches()
    return importlib.import_module(name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_early", [True, False], ids=["imported before", "imported later"])
def test_clients_are_ours_however_redis_is_imported(library: Path, form: str, is_early: bool) -> None:
    library.write_text(FORMS[form])
    if is_early:
        imported()
    with dynamoth_client.replace_redis("a_library") as replacement:
        module = imported()
        assert isinstance(module.make(), OURS)
        assert [name.partition(".")[0] for name in replacement.replaced].count("a_library") == 1
    assert not isinstance(module.make(), OURS), "it is undone"
    assert isinstance(module.make(), (redis.Redis, redis.asyncio.Redis))


def test_what_is_not_named_keeps_redis_py_s(library: Path) -> None:
    """As Celery and kombu do, which look the class up when they connect, and make classes of it."""
    library.write_text(
        "import redis\nclass Prefixed(redis.Redis): pass\ndef make(): return redis.Redis(), redis.StrictRedis()\n"
        "pubsub = redis.client.PubSub"
    )
    with dynamoth_client.replace_redis():
        module = imported()
        assert all(type(client) is redis.Redis for client in module.make())
        assert not issubclass(module.Prefixed, OURS)
        assert not issubclass(module.pubsub, dynamoth_client.PubSub)
        assert not any(name.startswith(("celery", "kombu")) for name in KNOWN)


@pytest.mark.parametrize("name", INSTALLED)
def test_the_modules_of_real_libraries_have_what_is_replaced(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    with dynamoth_client.replace_redis() as replacement:
        assert any(replaced.startswith(name) for replaced in replacement.replaced)
        ours = (dynamoth_client, dynamoth_client.asyncio)
        assert any(value in ours for value in vars(module).values() if isinstance(value, ModuleType))


# What comes too late.


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "import redis\nclient = redis.Redis()",
            r"a_library.client is a client .* set a_library.client = dynamoth_client.from_url\(",
        ),
        (
            "import redis.asyncio\nclient = redis.asyncio.Redis()",
            r"when a_library has been imported, set a_library.client = dynamoth_client.asyncio.from_url\(",
        ),
        ("import redis\nclass Own(redis.Redis): pass", "derive it from dynamoth_client's"),
        ("import json\ndef f(): import json", "has no name of redis-py: name the module that imports it"),
        ("class A:\n  def f(self): import redis", "imports redis-py where replace_redis.. cannot reach it: give it"),
        ("def f(): from redis.asyncio import Redis", "imports redis-py where replace_redis.. cannot reach it: give it"),
    ],
)
@pytest.mark.parametrize("is_early", [True, False], ids=["imported before", "imported later"])
def test_what_cannot_be_replaced_is_warned_of(library: Path, text: str, problem: str, is_early: bool) -> None:
    library.write_text(text)
    if is_early:
        imported()
    with pytest.warns(dynamoth_client.NotReplaced, match=problem), dynamoth_client.replace_redis("a_library"):
        imported()


def test_a_module_whose_code_cannot_be_read_is_warned_of(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a program that was started with ``python -m``, which its loader knows by another name."""
    library.write_text("def f(): import redis")
    monkeypatch.setattr(imported(), "__name__", "__main__")
    with pytest.warns(dynamoth_client.NotReplaced, match="__main__ has no name of redis-py"):
        dynamoth_client.replace_redis("a_library").undo()


def test_a_client_that_a_module_makes_is_replaced_as_the_warning_says(library: Path) -> None:
    library.write_text("import redis\nclient = redis.Redis()\ndef publish(): return client")
    with pytest.warns(dynamoth_client.NotReplaced), dynamoth_client.replace_redis("a_library"):
        module = imported()
        module.client = dynamoth_client.from_url("redis://x")
    assert isinstance(module.publish(), OURS)
    dynamoth_client.replace_redis("a_library").undo()  # a warning would be an error


@pytest.mark.parametrize(
    "name", ["a_typo", "a_typo.inside", "json.typo", "asyncio.events.typo", ".x", "sqlite3.typo.x"]
)
def test_a_module_that_does_not_exist_is_warned_of(name: str) -> None:
    with pytest.warns(dynamoth_client.NotReplaced, match=f"there is no module {name}: correct the name"):
        dynamoth_client.replace_redis(name).undo()


def test_no_package_is_imported_to_find_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)  # pyright: ignore[reportUnknownMemberType]
    inner = tmp_path / "a_package" / "inner"
    (inner / "namespace").mkdir(parents=True)
    for package in (inner.parent, inner):
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (inner / "part.py").write_text("import redis")
    dynamoth_client.replace_redis("a_package.inner.part", "a_package.inner.namespace").undo()
    with pytest.warns(dynamoth_client.NotReplaced, match="there is no module a_package.inner.typo"):
        dynamoth_client.replace_redis("a_package.inner.typo").undo()


def test_nothing_is_warned_of_without_a_reason(library: Path) -> None:
    library.write_text("import dynamoth_client\nimport redis\nclass Own(dynamoth_client.Redis): pass\nx = Own()")
    imported()
    with dynamoth_client.replace_redis("a_library"), dynamoth_client.replace_redis():
        pass


def test_nothing_is_left_behind() -> None:
    before = list(sys.meta_path)
    replacement = dynamoth_client.replace_redis()
    replacement.undo()
    replacement.undo()
    assert sys.meta_path == before
    assert redis.Redis is redis.client.Redis
