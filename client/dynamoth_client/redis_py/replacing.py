"""Makes libraries that create their own Redis clients create Dynamoth's: :func:`replace_redis`.

Theory of operation
-------------------
A library finds redis-py's class in a name of its own module: ``redis``, ``aioredis``, ``StrictRedis`` ... That name is
set to our class, in the modules that are known to work and in those that the application names; redis-py itself stays
as it is. So it does not matter how a library imports redis-py, nor whether it was imported before; and a library that
is not named keeps redis-py's client. Celery and kombu are such: they use parts of a connection that nobody else does,
and their queues are keys, not channels.
"""

from __future__ import annotations

import dis
import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, Self, TypeGuard

import redis
import redis.asyncio
import redis.asyncio.client
import redis.client

import dynamoth_client

KNOWN = (
    "broadcaster._backends.redis",
    "channels_redis.pubsub",
    "faststream.redis.configs.state",
    "flask_sse",
    "socketio.async_redis_manager",
    "socketio.redis_manager",
)
"""Modules of libraries that are known to work: where each of them finds the class of its clients."""


class NotReplaced(UserWarning):
    """Warned for each name that keeps redis-py's client although its module was to get ours; says what to do."""


class Replacement:
    """The replacement that :func:`replace_redis` made: it lasts until ``undo``, or to the end of a ``with`` block."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Replace in modules that are imported, and in others when they are."""
        self._before: list[tuple[ModuleType, str, Any]] = []
        self._finder = _Finder(self, modules)
        for name in modules:
            if (module := sys.modules.get(name)) is not None:
                self.replace_in(module)
        sys.meta_path.insert(0, self._finder)

    def __enter__(self) -> Self:
        """Return this; the end of the block undoes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Undo."""
        self.undo()

    @property
    def replaced(self) -> list[str]:
        """The names that are ours now, with their modules. It grows when further modules are imported."""
        return [f"{module.__name__}.{name}" for module, name, _ in self._before]

    def undo(self) -> None:
        """Give every name back what it had. Clients that were made meanwhile stay what they are."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        while self._before:
            module, name, value = self._before.pop()
            setattr(module, name, value)

    def replace_in(self, module: ModuleType) -> None:
        """Replace every name of a module that is redis-py's and has something of ours. Warns of what it cannot."""
        ours = _ours()
        found = [(name, value) for name, value in vars(module).items() if id(value) in ours]
        for name, value in found:
            self._before.append((module, name, value))
            setattr(module, name, ours[id(value)])
        for problem in _problems(module, bool(found)):
            warnings.warn(problem, NotReplaced, stacklevel=4)


class _Finder(MetaPathFinder):
    """An import finder that replaces names in modules as soon as they are imported."""

    def __init__(self, replacement: Replacement, modules: Sequence[str]) -> None:
        self._replacement = replacement
        self._modules = frozenset(modules)
        #: The module that is being looked for elsewhere.
        self._looking_for = ""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that others find, with a loader that replaces names afterwards."""
        if fullname not in self._modules or fullname == self._looking_for:
            return None
        self._looking_for = fullname
        try:
            spec = find_spec(fullname)
        finally:
            self._looking_for = ""
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._replacement)
        return spec


class _Loader(Loader):
    """Loads a module as another loader does, and replaces names in it."""

    def __init__(self, inner: Loader, replacement: Replacement) -> None:
        self._inner = inner
        self._replacement = replacement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as the other loader does."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then replace."""
        self._inner.exec_module(module)
        self._replacement.replace_in(module)


def replace_redis(*modules: str) -> Replacement:
    """Make libraries that create Redis clients themselves create clients of Dynamoth.

    Once, at the start of a program. Known to work are broadcaster, channels_redis (its ``pubsub`` layer), FastStream,
    flask-sse and python-socketio, with asyncio and without. It does not matter whether they were imported before, but
    clients that were made before, or while their module was imported, stay redis-py's, and so do those of a function
    that imports redis-py itself. All other libraries, Celery and kombu among them, keep redis-py's client.

    Args:
        *modules: names of further modules, of the application or of libraries, imported or not. In each, the names
            that redis-py was imported by are replaced: ``import redis``, ``from redis import asyncio``,
            ``from redis.asyncio import Redis``, ``from redis import from_url`` and the like.

    Returns the replacement, which can be undone; tests use it as a context manager.

    Warns:
        NotReplaced: a module has a client, or a class made of redis-py's, that was made before; or one that you named
            has nothing of redis-py, or imports it inside a function only, or does not exist. The text has the cure.

    """
    importlib.invalidate_caches()  # a module may have been written a moment ago
    for name in modules:
        if not _exists(name):
            text = f"there is no module {name}: correct the name, or install it; it will be looked at if it is imported"
            warnings.warn(text, NotReplaced, stacklevel=2)
    return Replacement((*KNOWN, *modules))


def _exists(name: str) -> bool:
    """Tell whether a module is imported or can be, without importing the packages that it is in."""
    if name in sys.modules:
        return True
    top, *rest = name.split(".")
    parent = sys.modules.get(top)
    if parent is not None:
        places = getattr(parent, "__path__", None)
    else:
        spec = find_spec(top) if top else None
        if spec is None:
            return False
        places = spec.submodule_search_locations
    path = top
    for part in rest:
        path = f"{path}.{part}"
        try:
            spec = PathFinder.find_spec(path, places) if places is not None else None
        except KeyError:
            return True  # a namespace package inside one that is not imported: it shows nothing before that
        if spec is None:
            return False
        places = spec.submodule_search_locations
    return True


def _ours() -> dict[int, Any]:
    """Return our replacements by the ids of redis-py's objects."""
    return {
        id(redis): dynamoth_client,
        id(redis.asyncio): dynamoth_client.asyncio,
        id(redis.client): dynamoth_client.client,
        id(redis.asyncio.client): dynamoth_client.asyncio.client,
        id(redis.client.Redis): dynamoth_client.Redis,
        id(redis.asyncio.client.Redis): dynamoth_client.asyncio.Redis,
        id(redis.from_url): dynamoth_client.from_url,
        id(redis.asyncio.from_url): dynamoth_client.asyncio.from_url,
    }


def _is_derived(value: Any, module: ModuleType, classes: tuple[type, ...]) -> TypeGuard[type]:
    """Tell whether a value is a class that a module has made of one of these."""
    return isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, classes)


def _problems(module: ModuleType, has_any: bool) -> list[str]:
    theirs = (redis.client.Redis, redis.asyncio.client.Redis)
    our_classes = (dynamoth_client.Redis, dynamoth_client.asyncio.Redis)
    problems: list[str] = []
    for name, value in vars(module).items():
        where = f"{module.__name__}.{name}"
        if isinstance(value, theirs) and not isinstance(value, our_classes):
            ours = "dynamoth_client" if isinstance(value, redis.client.Redis) else "dynamoth_client.asyncio"
            cure = f"when {module.__name__} has been imported, set {where} = {ours}.from_url(...)"
            problems.append(f"{where} is a client that was made before replace_redis() could act: {cure}")
        elif _is_derived(value, module, theirs) and not issubclass(value, our_classes):
            problems.append(f"{where} was made of redis-py's class: derive it from dynamoth_client's")
    if not has_any and module.__name__ not in KNOWN:
        if _imports_redis_inside(module):
            cure = "give it a client of dynamoth_client if it takes one, else it keeps redis-py's"
            problems.append(f"{module.__name__} imports redis-py where replace_redis() cannot reach it: {cure}")
        else:
            problems.append(f"{module.__name__} has no name of redis-py: name the module that imports it")
    return problems


def _imports_redis_inside(module: ModuleType) -> bool:
    """Tell whether a module imports redis-py inside a function or a class, as far as its code can be read."""
    get_code = getattr(module.__loader__, "get_code", None)
    try:
        code: CodeType | None = None if get_code is None else get_code(module.__name__)
    except (ImportError, OSError):  # imported by another name, as with ``python -m``; or its file is gone
        return False
    inner = [] if code is None else _codes_inside(code)
    while inner:
        code = inner.pop()
        inner += _codes_inside(code)
        for step in dis.get_instructions(code):
            if step.opname == "IMPORT_NAME" and step.argval.partition(".")[0] == "redis":
                return True
    return False


def _codes_inside(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]
