"""Writes the browser client, one ES module, to standard output: ``python -m dynamoth_user.js > dynamoth.js``."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

NAME = "dynamoth.js"


def source() -> bytes:
    """Return the module: that of the wheel, or of the source tree, which has it beside this package."""
    packaged = files("dynamoth_user") / NAME
    return packaged.read_bytes() if packaged.is_file() else (Path(__file__).parents[1] / "js" / NAME).read_bytes()


if __name__ == "__main__":
    sys.stdout.buffer.write(source())
