"""Runs the code blocks of one page, in order, as a reader would: in a folder of their own, with real processes.

A ``toml`` block is a file; its first line is a comment with the name. So is a ``python`` block that begins so. The
``bash`` blocks are one program, which ``run_page.sh`` runs beside the daemons that it starts. The other ``python``
blocks are another, which runs at the end.
Each line of a program has the number that it has in the page.

The hosts and ports of a page are examples: the real ones are given.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamoth.settings.load import ConfigText, load_config
from tests.docs.pages import Block

TIMEOUT_S = 180
"""Bound of one page, on a machine that is busy with everything else."""


class BlockFailed(AssertionError):
    """Raised when a block fails; the text has what it wrote."""


def run_page(blocks: Sequence[Block], folder: Path, instead: Mapping[str, str]) -> str:
    """Run the blocks of a page; return what the programs wrote. Raises BlockFailed.

    Args:
        blocks: those of one page.
        folder: an empty one.
        instead: real hosts and ports for those of the page; whole words are replaced.

    """
    shell: list[str] = []
    python: list[str] = []
    for block in blocks:
        lines = _replaced(block.text, instead).splitlines()
        match block.language:
            case "toml":
                _append(shell, block.line - 1, [f"cat > {_checked_file(block)} << 'END'", *lines, "END"])
            case "python" if (script := re.match(r"# (\w+\.py)\n", block.text)) is not None:
                _append(shell, block.line - 1, [f"cat > {script[1]} << 'END'", *lines, "END"])
            case "bash":
                _append(shell, block.line, lines)
            case "python":
                _append(python, block.line, lines)
            case other:
                raise BlockFailed(f"{block}: nobody can run {other}")
    (folder / "page.sh").write_text("\n".join([*shell, ""]))
    (folder / "page.py").write_text("\n".join([*python, ""]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DYNAMOTH_")}
    program = str(Path(__file__).with_name("run_page.sh"))
    done = subprocess.run(
        ["timeout", "--kill-after=20", str(TIMEOUT_S), "bash", program, sys.executable, "page.sh", "page.py"],
        cwd=folder,
        env={**kept, "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BlockFailed(f"{blocks[0]}: the page ended with {done.returncode} (124: too slow):\n{done.stdout}")
    return done.stdout


def _append(program: list[str], line: int, lines: Sequence[str]) -> None:
    """Append lines behind those that stand before them in the page."""
    program += [""] * (line - len(program))
    program += lines


def _replaced(text: str, instead: Mapping[str, str]) -> str:
    for word, value in instead.items():
        text = re.sub(rf"(?<![\w.]){re.escape(word)}(?![\w.]*\w)", value, text)
    return text


def _checked_file(block: Block) -> str:
    """Return the name of a configuration file; the file must be valid."""
    match = re.match(r"# (\S+\.toml)\n", block.text)
    if match is None:
        raise BlockFailed(f"{block}: the first line names no file")
    if re.search(r"^\[(datasets|queries)\.", block.text, re.MULTILINE):
        return match[1]  # `dynamoth query set` checks it
    load_config(file=ConfigText(str(block), block.text))
    return match[1]
