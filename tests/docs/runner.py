"""Runs the code blocks of one page, in order, as a reader would: in a folder of their own, with real processes.

A ``toml`` block is a file; its first line is a comment with the name. In a ``bash`` block, lines that start a daemon
(``dynamoth up``, ``dynamoth agent``, ``dynamoth balancer``) are started here and run beside all that follows. Bash runs
the other lines and stops at the first that fails. What a block exports is there for the next ones. The
``python`` blocks of a page are one program, which runs after everything else.

The hosts and ports of a page are examples: a runner is given the real ones.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from dynamoth.settings.load import ConfigText, load_config
from dynamoth_cli.local.child import Child, dynamoth_command
from tests.docs.pages import Block

TIMEOUT_S = 60.0
"""Bound of one part of a block, on a machine that is busy with everything else."""

POLL_INTERVAL_S = 0.05

_DAEMON = re.compile(r"dynamoth (?:up|agent|balancer)\b(?!.*(?:--check|--print-config|--help))")
_COMMENT = re.compile(r"\s+#.*$")


class BlockFailed(AssertionError):
    """Raised when a block fails; the text has what it wrote."""


class Runner:
    """The processes and files of one page.

    Args:
        folder: an empty one.
        instead: real hosts and ports for those of the page; whole words are replaced.

    """

    def __init__(self, folder: Path, instead: Mapping[str, str]) -> None:
        self._folder = folder
        self._instead = dict(instead)
        self._daemons = ExitStack()
        self._running: list[Child] = []
        #: Whether something was started and has not been waited for.
        self._not_ready = False
        self._exported = folder / ".exported"
        programs = folder / ".programs"
        programs.mkdir()
        own = programs / "dynamoth"
        own.write_text(f'#!/bin/sh\nexec {shlex.join(dynamoth_command())} "$@"\n')
        own.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DYNAMOTH_")}
        self._environment = {**kept, "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(folder)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._daemons.close()

    def run(self, blocks: Sequence[Block]) -> str:
        """Run blocks; return what the programs wrote. Raises BlockFailed."""
        wrote: list[str] = []
        for block in blocks:
            match block.language:
                case "toml":
                    self._write(block)
                case "bash":
                    wrote += [self._run_part(block, part) for part in self._parts(block)]
                case "python":
                    pass
                case other:
                    raise BlockFailed(f"{block}: nobody can run {other}")
        if program := [block for block in blocks if block.language == "python"]:
            wrote.append(self._run_python(program))
        return "".join(wrote)

    def _replaced(self, text: str) -> str:
        for word, value in self._instead.items():
            text = re.sub(rf"(?<![\w.]){re.escape(word)}(?![\w.]*\w)", value, text)
        return text

    def _write(self, block: Block) -> None:
        match = re.match(r"# (\S+\.toml)\n", block.text)
        if match is None:
            raise BlockFailed(f"{block}: the first line names no file")
        text = self._replaced(block.text)
        load_config(file=ConfigText(str(block), text))
        (self._folder / match[1]).write_text(text)

    def _parts(self, block: Block) -> list[str]:
        """Cut a block in parts: each line that begins a daemon, and the lines between these."""
        parts = [""]
        for line in self._replaced(block.text).splitlines(keepends=True):
            if _DAEMON.match(line):
                parts += [line, ""]
            else:
                parts[-1] += line
        return [part for part in parts if part.strip()]

    def _run_part(self, block: Block, part: str) -> str:
        if _DAEMON.match(part):
            self._start(part)
            return ""
        self._wait_ready()
        save = f"trap 'export -p > {shlex.quote(str(self._exported))}' EXIT\n"
        load = f". {shlex.quote(str(self._exported))}\n" if self._exported.exists() else ""
        return self._checked(block, ["bash", "-euo", "pipefail", "-c", f"{load}{save}{part}"])

    def _run_python(self, program: Sequence[Block]) -> str:
        """Run blocks as one program, in which each line has the number that it has in the page."""
        lines: list[str] = []
        for block in program:
            lines += [""] * (block.line - len(lines)) + self._replaced(block.text).splitlines()
        path = self._folder / f"{program[0].page.stem}.py"
        path.write_text("\n".join([*lines, ""]))
        self._wait_ready()
        return self._checked(program[0], [sys.executable, "-W", "error", str(path)])

    def _checked(self, block: Block, command: Sequence[str]) -> str:
        try:
            done = subprocess.run(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BlockFailed(f"{block}: not done after {TIMEOUT_S:g} s; it wrote:\n{error.output}") from error
        if done.returncode != 0:
            raise BlockFailed(f"{block}: ended with {done.returncode}:\n{command[-1]}\n{done.stdout}")
        for daemon in self._running:
            if daemon.ended_by_itself:
                raise daemon.failure()
        return done.stdout

    # Daemons.

    def _start(self, line: str) -> None:
        words = shlex.split(_COMMENT.sub("", line))[1:]
        arguments = [str(self._folder / word) if word.endswith(".toml") else word for word in words]
        daemon = Child(line.strip(), dynamoth_command(*arguments), environment=self._environment)
        self._daemons.callback(daemon.stop)
        daemon.start()
        self._running.append(daemon)
        self._not_ready = True

    def _wait_ready(self) -> None:
        """Wait until what was started is at work: ``up`` says so, and for the others ``dynamoth status`` does."""
        if not self._not_ready:
            return
        self._not_ready = False
        deadline = time.monotonic() + TIMEOUT_S
        while why := self._why_not_ready():
            if time.monotonic() > deadline:
                raise BlockFailed(f"not ready after {TIMEOUT_S:g} s: {why}")
            time.sleep(POLL_INTERVAL_S)

    def _why_not_ready(self) -> str:
        for daemon in self._running:
            if daemon.ended_by_itself:
                raise daemon.failure()
            if daemon.name.startswith("dynamoth up") and not any("ready" in line for line in daemon.lines):
                return f"{daemon.name} has not said that it is"
        files = list(self._folder.glob("*.toml"))
        commands = [dynamoth_command("status", "--config", str(file)) for file in files]
        asked = [
            subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
            for command in commands
        ]
        return "".join(status.stdout + status.stderr for status in asked if status.returncode)
