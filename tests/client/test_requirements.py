"""The client needs redis-py, hiredis and msgpack, and nothing else: in an environment that has only these."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dynamoth_cli.extras import EXTRAS
from dynamoth_cli.main import COMMANDS
from tests.client.stored_cluster import StoredCluster

ROOT = Path(__file__).parents[2]

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

CLIENT = ("redis", "hiredis", "msgpack", "async_timeout")
"""What an environment with only the client has. redis-py needs the last one on early versions of Python 3.11."""

IMPORT_ALL = """
import importlib, pkgutil, sys
import dynamoth_client
for module in pkgutil.walk_packages(dynamoth_client.__path__, "dynamoth_client."):
    importlib.import_module(module.name)
print(len(sys.modules))
"""

TO_AND_FRO = """
import asyncio, sys
import dynamoth_client

with dynamoth_client.Redis(servers=sys.argv[1:]) as client, client.pubsub(ignore_subscribe_messages=True) as pubsub:
    pubsub.subscribe("c")
    assert client.publish("c", "sync") == 1
    while (message := pubsub.get_message(timeout=None)) is None:
        pass
    print(message["data"].decode())

async def use():
    async with dynamoth_client.asyncio.Redis(servers=sys.argv[1:]) as client, client.pubsub() as pubsub:
        await pubsub.subscribe("c")
        assert await client.publish("c", "asyncio") == 1
        async for message in pubsub.listen():
            if message["type"] == "message":
                return message["data"].decode()

print(asyncio.run(use()))
"""

COMMAND = "import sys\nfrom dynamoth_cli.main import main\nsys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that the client needs."""
    folder = tmp_path_factory.mktemp("packages")
    for name in CLIENT:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            (folder / name).symlink_to(spec.submodule_search_locations[0])
    return folder


def run(packages: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program where nothing is installed but these packages, and Dynamoth."""
    roots = [ROOT, *(ROOT / name for name in PROJECT["tool"]["pytest"]["ini_options"]["pythonpath"])]
    path = f"import sys\nsys.path += {[str(root) for root in (*roots, packages)]!r}\n"
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", path + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def requirements(names: list[str]) -> set[str]:
    """Return the names of distributions, without versions."""
    return {found[0] for name in names if (found := re.match(r"[\w-]+(\[[\w,]+\])?", name))}


def test_the_declared_requirements_are_these() -> None:
    assert requirements(PROJECT["project"]["dependencies"]) == {"redis", "hiredis", "msgpack"}


def test_each_extra_declares_what_its_commands_need() -> None:
    declared = PROJECT["project"]["optional-dependencies"]
    for extra, needed in EXTRAS.items():
        named = everything(declared, extra)
        assert {MODULES.get(package, package.replace("_", "-")) for package in needed} <= named, extra


MODULES = {"jwt": "PyJWT"}
"""Distributions that are not called as their module."""


def everything(declared: dict[str, list[str]], extra: str) -> set[str]:
    """Return what an extra brings, with the extras that it names."""
    named = requirements(declared[extra])
    for each in [each for each in named if each.startswith("dynamoth[")]:
        for other in each.removeprefix("dynamoth[").removesuffix("]").split(","):
            named |= everything(declared, other)
    return named


def test_every_module_of_the_client_can_be_imported(packages: Path) -> None:
    done = run(packages, IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_both_clients_publish_and_receive(packages: Path, cluster: StoredCluster) -> None:
    done = run(packages, TO_AND_FRO, *cluster.hosts)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sync", "asyncio"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_the_extra_that_it_needs(packages: Path, name: str) -> None:
    done = run(packages, COMMAND, name, "--help")
    extra = COMMANDS[name].extra
    if extra is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 2
        assert f"install the extra '{extra}' (pip install '.[{extra}]' in a checkout)" in done.stderr


def test_the_client_of_end_users_names_the_extra_that_it_needs(packages: Path) -> None:
    done = run(packages, "from dynamoth_user import Interest, Client")
    assert done.returncode == 1
    assert "ImportError: dynamoth_user.Client needs websockets: install the extra 'user'" in done.stderr
