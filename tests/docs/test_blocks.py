"""Every code block of the README and of ``docs/`` does what a reader expects: it runs, or says why it does not."""

from __future__ import annotations

import argparse
import io
import re
import shlex
import socket
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from dynamoth.settings.load import OTHER_VARIABLES, declared_settings
from dynamoth_analytics.replay.grid import read_grid
from dynamoth_balancer.options import BalancerOptions
from dynamoth_cli.local.embedded import reserve_port
from dynamoth_cli.main import COMMANDS, main
from tests.docs.pages import LANGUAGES, ROOT, Block, blocks, prose
from tests.docs.runner import BlockFailed, run_page
from tests.redis_servers import RedisServerFactory

README = ROOT / "README.md"
DOCS = ROOT / "docs"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
CONTAINERS = ROOT / "compose" / "README.md"
OURS = [README, CONTRIBUTING, CONTAINERS, *sorted(DOCS.glob("*.md"))]

NOT_RUN = {
    README: 1,
    CONTRIBUTING: 1,
    CONTAINERS: 3,
    DOCS / "analytics.md": 3,
    DOCS / "brokers.md": 1,
    DOCS / "operating.md": 2,
}
"""How many blocks are not run. A page that is not named has none."""

PUBSUB_LIMIT = {"client-output-buffer-limit": "pubsub 256mb 128mb 60"}
"""What docs/operating.md wants of servers."""


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.reason is None and block.language != "text"]


@pytest.fixture
def free_ports() -> Iterator[tuple[int, int, int]]:
    """Ports, two of them one behind the other, where nobody listens, and nobody but the test will."""
    while True:
        with reserve_port() as one, socket.socket() as other, reserve_port() as third:
            first: int = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", first + 1))  # without the option: also what others reserve is taken
            except (OSError, OverflowError):
                continue
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            yield first, first + 1, third.getsockname()[1]
            return


# Pages.


@dataclass(frozen=True)
class Setup:
    """What a page needs, and what its programs write."""

    #: Hosts of the page, for which real servers are started.
    servers: tuple[str, ...] = ()
    #: Ports of the page, for which free ones are taken.
    ports: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    #: Files that its programs leave, and a part of each.
    files: Mapping[str, str] = field(default_factory=dict[str, str])


RUN = {
    README: Setup(ports=("7001", "7002"), written=("b'hello'",)),
    DOCS / "analytics.md": Setup(ports=("7001", "7002")),
    DOCS / "client.md": Setup(ports=("7001", "7002"), written=("b'hello'",)),
    DOCS / "brokers.md": Setup(ports=("7001", "7002", "8001"), written=("Position(", "2:1")),
    DOCS / "data-cluster.md": Setup(ports=("7001", "7002", "8001"), written=("1 rows", '"text":"smoke"}]}')),
    DOCS / "operating.md": Setup(servers=("10.0.0.1:6379", "10.0.0.2:6379"), written=("all-publishers",)),
    DOCS / "migrating.md": Setup(
        servers=("redis-1:6379",), written=("compatibility: * at s1, plain", "compatibility: * at s1, with envelopes")
    ),
    DOCS / "security.md": Setup(
        files={"users.txt": "ACL SETUSER dynamoth-client", "users.acl": "user dynamoth-client"}
    ),
}


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(
    page: Path, redis_server_factory: RedisServerFactory, free_ports: tuple[int, int, int], tmp_path: Path
) -> None:
    setup = RUN[page]
    instead = dict(zip(setup.ports, map(str, free_ports), strict=False))
    instead |= {host: f"127.0.0.1:{redis_server_factory(options=PUBSUB_LIMIT).port}" for host in setup.servers}
    wrote = run_page(runnable(page), tmp_path, instead)
    assert [each for each in setup.written if each not in wrote] == []
    for name, part in setup.files.items():
        assert part in (tmp_path / name).read_text()


def test_every_page_with_blocks_is_run() -> None:
    assert {page for page in OURS if runnable(page)} == RUN.keys()


@pytest.mark.parametrize("page", OURS, ids=[str(page.relative_to(ROOT)) for page in OURS])
def test_blocks_have_a_language_and_few_are_not_run(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES
    assert page.read_text().count("```") == 2 * len(blocks(page)), "a block is not closed, or not at the margin"
    assert sum(block.reason is not None for block in blocks(page)) == NOT_RUN.get(page, 0)
    assert page.read_text().count("<!-- not run:") == NOT_RUN.get(page, 0) or page == CONTRIBUTING


# Commands of blocks that are not run.


def test_make_knows_every_target() -> None:
    lines = [line for page in OURS for block in blocks(page) for line in block.text.splitlines()]
    targets = {match[1] for line in lines if (match := re.match(r"make (\w+)", line))}
    assert {"demo", "test", "check"} <= targets
    done = subprocess.run(["make", "-n", *sorted(targets)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (ROOT / ".ci" / "run").exists()


def test_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra
        for page in OURS
        for found in re.findall(r"'\.\[([\w,]+)\]'", page.read_text())
        for extra in found.split(",")
    }
    assert named
    assert named <= set(extras)


def test_blocks_that_would_start_spark_are_accepted() -> None:
    page = [block for block in blocks(DOCS / "analytics.md") if block.reason is not None]
    for line in (line for block in page if block.language == "bash" for line in block.text.splitlines()):
        _, command, *arguments = shlex.split(line)
        parser = argparse.ArgumentParser()
        import_module(COMMANDS[command].module).configure(parser)
        parser.parse_args(arguments)
    [grid] = [block.text for block in page if block.language == "toml"]
    assert len(read_grid(grid, "grid.toml", BalancerOptions(load_ratio_high=0.95))) == 1 + 4 * 1 * 3


# What prose says of commands, settings and figures.


def command_lines(page: Path) -> list[list[str]]:
    """Return the arguments of each ``dynamoth`` in the code spans and the blocks of a page."""
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]
    lines = [*spans, *(line for block in blocks(page) for line in block.text.splitlines())]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("dynamoth ")]


@cache
def help_of(names: tuple[str, ...]) -> str:
    """Return what ``--help`` says of a command."""
    with redirect_stdout(io.StringIO()) as written, pytest.raises(SystemExit, match="0"):
        main([*names, "--help"])
    return written.getvalue()


def named(words: list[str]) -> tuple[str, ...]:
    """Return those of the first words that name a command, and a command of that command."""
    names: tuple[str, ...] = ()
    choices = set(COMMANDS)
    for word in words:
        if word not in choices:
            break
        names = (*names, word)
        found = re.search(r"\{([\w,-]+)\}", help_of(names))
        choices = set(found[1].split(",")) if found else set[str]()
    return names


@pytest.mark.parametrize(
    "page", [*OURS, ROOT / "ARCHITECTURE.md"], ids=[*(page.name for page in OURS), "ARCHITECTURE.md"]
)
def test_commands_and_flags_exist(page: Path) -> None:
    for words in command_lines(page):
        names = named(words)
        assert names, f"dynamoth {shlex.join(words)}"
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        unknown = [flag for flag in flags if not re.search(rf"(?<!\S)\[?{re.escape(flag)}\b", help_of(names))]
        assert not unknown, f"dynamoth {shlex.join(words)}"


def test_commands_that_do_not_exist() -> None:
    assert named(["node", "--config", "x"]) == ()
    assert named(["plan", "move", "news", "--to", "s2"]) == ("plan", "move")
    assert named(["plan", "compatibility", "lift", "list"]) == ("plan", "compatibility", "lift")


ACL_VARIABLES = {f"DYNAMOTH_ACL_{role}_PASSWORD" for role in ("AGENT", "BALANCER", "CLIENT", "OPERATOR", "RECORDER")}


def test_variables_exist() -> None:
    known = {declared.variable for declared in declared_settings().values()} | set(OTHER_VARIABLES) | ACL_VARIABLES
    for page in OURS:
        named = set(re.findall(r"\bDYNAMOTH_[A-Z_]+", page.read_text()))
        assert {name for name in named if not name.startswith("DYNAMOTH_TEST_")} <= known, page.name


def rows(page: Path, heading: str) -> list[list[str]]:
    """Return the rows of a table."""
    [_, found] = page.read_text().split(f"| {heading} |\n", 1)
    lines = [line for line in found.split("\n\n", 1)[0].splitlines()[1:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_figures_of_the_readme_are_those_of_the_page() -> None:
    every = {
        (figure, command.strip("`")) for _, figure, command in rows(DOCS / "figures.md", "what | figure | benchmark")
    }
    names = {name for _, name in every if not name.startswith("python")}
    assert names <= set(BENCHMARKS)
    chosen = rows(README, "what | figure | command")
    assert len(chosen) == 6
    for what, figure, command in chosen:
        name = command.strip("`").removeprefix("python -m bench ")
        assert (figure, name) in every, what


def test_guarantees_are_those_of_the_page() -> None:
    """The page defines each number once, and code and tests use no other."""
    numbers = [row[0].strip("*") for row in rows(DOCS / "guarantees.md", "number | guarantee")]
    assert numbers == [f"G{number}" for number in range(1, 8)]
    folders = ("sim", "client", "dispatcher", "agent", "balancer", "dynamoth", "tests", "bench", "docs")
    files = [path for folder in folders for kind in ("py", "md") for path in (ROOT / folder).rglob(f"*.{kind}")]
    used = {number for path in files for number in re.findall(r"\bG\d\b", path.read_text())}
    assert used == set(numbers)


def test_the_readme_is_short() -> None:
    assert 80 <= len(README.read_text().splitlines()) <= 120


# The runner can fail.


def block(language: str, text: str) -> Block:
    return Block(README, 7, language, text, None)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (block("bash", "echo before\nfalse\necho after\n"), "before"),
        (block("bash", "false | true\n"), "ended with 1"),
        (block("bash", "echo $NOTHING\n"), "NOTHING: unbound variable"),
        (block("bash", "dynamoth nothing\n"), "'nothing' is no command"),
        (block("bash", "dynamoth up --servers 0\n"), "argument --servers"),
        (block("python", "x = 1\nassert x == 2\n"), "line 9, in <module>"),
        (block("python", "import warnings\nwarnings.warn('strange')\n"), "strange"),
        (block("toml", "[agent]\n"), "names no file"),
        (block("ruby", "puts 1\n"), "nobody can run ruby"),
    ],
)
def test_a_block_that_fails_is_noticed(made: Block, why: str, tmp_path: Path) -> None:
    with pytest.raises(BlockFailed, match=re.escape(why)):
        run_page([made], tmp_path, {})


def test_what_blocks_leave_for_each_other(tmp_path: Path) -> None:
    exported = block("bash", "export PORT=7001 NAME='a b'\n")
    used = block("bash", "echo $PORT $NAME x7001 7001.5\n")
    first, second = block("python", "x = 1\n"), Block(README, 20, "python", "print(x)\n", None)
    assert run_page([exported, first, used, second], tmp_path, {"7001": "8001"}) == "8001 a b x7001 7001.5\n1\n"
