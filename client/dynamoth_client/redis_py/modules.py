"""redis-py's submodules under our names: ``from dynamoth_client.exceptions import ConnectionError``.

``dynamoth_client.NAME`` is the module ``redis.NAME``, and ``dynamoth_client.asyncio.NAME`` is ``redis.asyncio.NAME``,
wherever this package has no module of its own. A module of redis-py's that names a class that is ours here, as
``redis.client`` names ``Redis``, is shown by a stand-in that has ours: an import by another path must not give another
client. Packages have stand-ins, too. Type checkers read the ``.pyi`` files beside this one instead, of the modules that
are used most.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_OURS = "dynamoth_client."
_THEIRS = "redis."


class _Modules(MetaPathFinder, Loader):
    """Finds redis-py's modules under our names. ``ours``: our replacements by the ids of redis-py's objects."""

    def __init__(self, ours: Mapping[int, object]) -> None:
        self._ours = ours

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import a module of ours that redis-py has. None if it has none of this name."""
        if not fullname.startswith(_OURS):
            return None
        try:
            theirs = find_spec(_theirs(fullname))
        except ModuleNotFoundError:  # its parent is a module and no package, or does not exist
            return None
        if theirs is None:
            return None
        return ModuleSpec(fullname, self, is_package=theirs.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return redis-py's module, or its stand-in."""
        theirs = import_module(_theirs(spec.name))
        replaced = {name: self._ours[id(value)] for name, value in vars(theirs).items() if id(value) in self._ours}
        spec.loader_state = theirs.__spec__
        if replaced or hasattr(theirs, "__path__"):  # else what is below it would be found there, and imported twice
            return _StandIn(spec.name, theirs, replaced)
        return theirs

    def exec_module(self, module: ModuleType) -> None:
        """Give redis-py's own module back the spec that the import system has replaced."""
        spec = module.__spec__
        assert spec is not None, "the import system has set it"
        if not isinstance(module, _StandIn):
            module.__spec__ = spec.loader_state


class _StandIn(ModuleType):
    """Shows a module of redis-py's with some of its names replaced."""

    def __init__(self, name: str, theirs: ModuleType, replaced: Mapping[str, object]) -> None:
        super().__init__(name, theirs.__doc__)
        self._theirs = theirs
        shown = {key: value for key, value in vars(theirs).items() if not key.startswith("__") or key == "__all__"}
        vars(self).update(shown, **replaced)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system looks for is this module's own
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._theirs, name)


def install(replacements: Sequence[tuple[object, object]]) -> None:
    """Make redis-py's modules importable under our names, with the second of each pair in place of the first."""
    sys.meta_path.append(_Modules({id(theirs): ours for theirs, ours in replacements}))


def submodule(package: str, name: str) -> ModuleType:
    """Return redis-py's submodule under our name. Raises AttributeError where it has none."""
    fullname = f"{package}.{name}"
    if name.startswith("_") or find_spec(_theirs(fullname)) is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return import_module(fullname)


def _theirs(name: str) -> str:
    return _THEIRS + name.removeprefix(_OURS)
